"""Tests that ``causal_lm_loss()`` in a Trainer shifts labels exactly if the model's own loss does."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparse_ce import SparseTarget
from sparse_ce.integrations.transformers import causal_lm_loss
from tiny_lm import make_model, make_trainer, recorded, transformers

VOCAB, CLASSES, LENGTH = 40, 5, 7
BERT = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
            classifier_dropout=0.0)
SEQ2SEQ = dict(vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, num_layers=1, num_heads=2, d_kv=8,
               d_ff=16, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
               dropout=0.0, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=2, max_position_embeddings=32)


class Tagger(transformers.BertForTokenClassification):
    """Has a name that says nothing about its task, unlike its base class."""


class Chatter(transformers.LlamaForCausalLM):
    """Has another such name, and a forward that calls its base's."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


def model_of(kind, **changes):
    torch.manual_seed(0)
    kind = kind if isinstance(kind, type) else getattr(transformers, kind)
    options = {**(BERT if kind.config_class.model_type in ("bert", "gpt2", "llama") else SEQ2SEQ), **changes}
    model = kind(kind.config_class(**options))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.train()


def encoder_decoder():
    torch.manual_seed(0)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**BERT), transformers.BertConfig(**BERT))
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return transformers.EncoderDecoderModel(config=config).train()


PER_TOKEN = {"tokens": (6, LENGTH), "labels": (6, LENGTH)}
MODELS = {  # factory, shapes of its batch, number of classes, and whether its own loss shifts
    "token classification": (lambda: model_of("BertForTokenClassification"), PER_TOKEN, CLASSES, False),
    "token classification of a decoder": (lambda: model_of("LlamaForTokenClassification"), PER_TOKEN, CLASSES, False),
    "a subclass": (lambda: model_of(Tagger), PER_TOKEN, CLASSES, False),
    "masked": (lambda: model_of("BertForMaskedLM"), PER_TOKEN, VOCAB, False),
    "sequence classification": (lambda: model_of("BertForSequenceClassification"),
                                {"tokens": (6, LENGTH), "labels": (6,)}, CLASSES, False),
    "multiple choice": (lambda: model_of("BertForMultipleChoice"), {"tokens": (6, 3, LENGTH), "labels": (6,)}, 3,
                        False),
    "next sentence": (lambda: model_of("BertForNextSentencePrediction"), {"tokens": (6, LENGTH), "labels": (6,)}, 2,
                      False),
    "t5": (lambda: model_of("T5ForConditionalGeneration"), PER_TOKEN, VOCAB, False),
    "bart": (lambda: model_of("BartForConditionalGeneration"), PER_TOKEN, VOCAB, False),
    "t5 token classification": (lambda: model_of("T5ForTokenClassification"), PER_TOKEN, 2, False),
    "two berts": (encoder_decoder, PER_TOKEN, VOCAB, False),
    "llama": (lambda: model_of("LlamaForCausalLM"), PER_TOKEN, VOCAB, True),
    "a subclass of llama": (lambda: model_of(Chatter), PER_TOKEN, VOCAB, True),
    "gpt2": (lambda: model_of("GPT2LMHeadModel", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), PER_TOKEN, VOCAB,
             True),
    "bert decoder": (lambda: model_of("BertLMHeadModel", is_decoder=True), PER_TOKEN, VOCAB, True),
}


class Batch(torch.utils.data.Dataset):
    """Holds samples of one length. Sequence labels begin with -100, so that all ways to count labels agree."""

    def __init__(self, model, shapes, classes):
        g = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, VOCAB, shapes["tokens"], generator=g)
        labels = torch.randint(classes, shapes["labels"], generator=g)
        if labels.dim() == 2:
            labels[:, 0], labels[2, 3:] = -100, -100
        self.columns = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
        if model.config.is_encoder_decoder and classes == VOCAB:
            self.columns["decoder_input_ids"] = F.pad(labels[:, :-1], (1, 0), value=2).clamp(min=0)

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


def trained(path, model, samples, loss, **changes):
    trainer = make_trainer(path, copy.deepcopy(model), samples, eval_samples=samples, compute_loss_func=loss,
                           collator=torch.utils.data.default_collate, remove_unused_columns=False,
                           per_device_eval_batch_size=8, **changes)
    evaluated = trainer.evaluate()["eval_loss"]
    return evaluated, trainer.train().training_loss, recorded(trainer)[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_labels_of_the_model_s_own_loss_are_compared(name, tmp_path):
    make, shapes, classes, shifts = MODELS[name]
    model = make()
    samples = Batch(model, shapes, classes)
    with torch.no_grad():
        logits = model(**{key: column for key, column in samples.columns.items() if key != "labels"})
        logits = (logits.logits if hasattr(logits, "logits") else logits[0]).double()
    labels = samples.columns["labels"]
    assert logits.shape == (*labels.shape, classes)
    exact = F.cross_entropy(logits.flatten(0, -2) if not shifts else logits[:, :-1].flatten(0, 1),
                            labels.flatten() if not shifts else labels[:, 1:].flatten()).item()
    runs = [trained(tmp_path, model, samples, loss) for loss in (
        None, causal_lm_loss(), functools.partial(causal_lm_loss(shift=shifts)))]
    for evaluated, loss, gradient in runs:
        assert evaluated == pytest.approx(exact, rel=1e-5) and loss == pytest.approx(exact, rel=1e-5)
        for parameter, g in runs[0][2].items():
            torch.testing.assert_close(gradient[parameter], g, rtol=1e-4, atol=1e-5)
    if labels.dim() == 2:
        assert abs(trained(tmp_path, model, samples, causal_lm_loss(shift=not shifts))[1] - exact) > 1e-3


@pytest.mark.parametrize("wrapper", ["peft", "compiled", "both"])
@pytest.mark.works("loss", "PEFT", "compile")
def test_wrapped_models_are_asked_as_what_they_wrap(wrapper, tmp_path):
    model = model_of("BertForTokenClassification")
    samples = Batch(model, PER_TOKEN, CLASSES)
    expected = trained(tmp_path, model, samples, causal_lm_loss(shift=False))[1]
    if wrapper != "compiled":
        peft = pytest.importorskip("peft", minversion="0.21")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="TOKEN_CLS", target_modules=["query"]))
    if wrapper != "peft":
        model = torch.compile(model, backend="eager")
    trainer = make_trainer(tmp_path, model, samples, compute_loss_func=causal_lm_loss(), remove_unused_columns=False,
                           collator=torch.utils.data.default_collate)
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-5)


class Own(nn.Module):
    """Represents a model that is not from transformers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids, labels=None, **kwargs):
        return {"logits": self.head(self.embedding(input_ids))}


@pytest.mark.parametrize("make", [
    lambda: model_of("BartForCausalLM"), Own, lambda: transformers.XLNetLMHeadModel(transformers.XLNetConfig(
        vocab_size=VOCAB, d_model=16, n_layer=1, n_head=2, d_inner=16, dropout=0.0))], ids=["bart", "own", "xlnet"])
def test_a_class_that_does_not_tell_is_asked_for(make, tmp_path):
    model = make()
    samples = Batch(make_model(), PER_TOKEN, VOCAB)
    trainer = make_trainer(tmp_path, model, samples, eval_samples=samples, compute_loss_func=causal_lm_loss(),
                           collator=torch.utils.data.default_collate, remove_unused_columns=False)
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=f"sparse_ce: shift must be True or False for a {type(model).__name__}, .*"
                           r"causal_lm_loss\(shift=True\) if .* causal_lm_loss\(shift=False\) if"):
            run()
    logits = model(**{name: t for name, t in samples.columns.items() if name != "labels"})["logits"].detach().double()
    labels = samples.columns["labels"]
    for shift in (False, True):
        made = trained(tmp_path, model, samples, causal_lm_loss(shift=shift))[1]
        exact = F.cross_entropy(logits[:, :LENGTH - shift].flatten(0, 1), labels[:, int(shift):].flatten())
        assert made == pytest.approx(exact.item(), rel=1e-5)


def test_losses_that_are_no_cross_entropy_of_classes_are_refused(tmp_path):
    for changes in ({"num_labels": 1}, {"problem_type": "multi_label_classification"}):
        model = model_of("BertForSequenceClassification", **changes)
        samples = Batch(model, {"tokens": (6, LENGTH), "labels": (6,)}, 1)
        with pytest.raises(ValueError, match="sparse_ce: compute_loss_func must be None for a BertFor.*own loss"):
            trained(tmp_path, model, samples, causal_lm_loss())


class Calling(transformers.Trainer):
    """Calls the loss function in a subclass, with outputs that have no class."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs, return_dict=False)
        loss = self.compute_loss_func(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_a_trainer_that_calls_the_loss_itself(tmp_path):
    model = model_of("BertForTokenClassification")
    samples = Batch(model, PER_TOKEN, CLASSES)
    expected = trained(tmp_path, model, samples, causal_lm_loss(shift=False))
    made = trained(tmp_path, model, samples, causal_lm_loss(), trainer_class=Calling)
    assert made[:2] == pytest.approx(expected[:2], rel=1e-6)


@pytest.mark.parametrize("name", ["token classification", "masked", "sequence classification", "multiple choice", "t5",
                                  "llama", "gpt2"])
def test_without_a_trainer_the_class_of_the_outputs_tells(name):
    make, shapes, classes, shifts = MODELS[name]
    model = make()
    batch = Batch(model, shapes, classes).columns
    own = model(**batch)
    torch.testing.assert_close(causal_lm_loss()(own, batch["labels"]), own.loss)
    logits = own.logits.detach()
    if batch["labels"].dim() == 2:
        torch.testing.assert_close(causal_lm_loss()({"logits": logits}, batch["labels"]),
                                   causal_lm_loss(shift=True)({"logits": logits}, batch["labels"]))


@pytest.mark.parametrize("name", ["token classification", "masked", "t5", "llama"])
def test_soft_labels_in_a_model_s_own_loss_say_what_to_do(name, tmp_path):
    make, shapes, classes, shifts = MODELS[name]
    model = make()
    samples = Batch(model, shapes, classes)
    labels = samples.columns["labels"]
    expected = trained(tmp_path, model, samples, causal_lm_loss(shift=shifts))
    samples.columns["labels"] = SparseTarget.from_topk(labels[..., None], None)
    message = (r"sparse_ce: .* got a SparseTarget; .*pass Trainer\(compute_loss_func=causal_lm_loss\(\)\) or call "
               r"fuse_lm_head\(model\)")
    with pytest.raises((AttributeError, TypeError), match=message):
        model(**samples.columns)
    made = trained(tmp_path, model, samples, causal_lm_loss())  # which is correct
    assert made[1] == pytest.approx(expected[1], rel=1e-5)
