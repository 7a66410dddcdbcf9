"""Tests that unsupported settings of a fused head raise an error and are never ignored."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import copy
import re

import pytest
import torch
from torch import nn

from sparse_ce import SparseTarget
from tiny_lm import VOCAB, Samples, collate, make_model, transformers

peft = pytest.importorskip("peft", minversion="0.21")
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head, loss_function  # noqa: E402


def step(model):
    return model(**collate(list(Samples("labels")))).loss


def adapted(model, *modules):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=list(modules), task_type="CAUSAL_LM",
                                                      init_lora_weights=False))


def test_24_adapters_on_the_head_are_refused_and_elsewhere_honoured():
    with pytest.raises(TypeError, match="sparse_ce: model must have a plain nn.Linear as its output head, got peft"):
        fuse_lm_head(adapted(make_model(), "q_proj", "lm_head"))
    model = make_model()
    fuse_lm_head(model)
    with pytest.raises(TypeError, match="plain nn.Linear"):  # added later
        step(adapted(model, "lm_head"))
    model = adapted(make_model(), "q_proj")
    expected = step(model)
    handle = fuse_lm_head(model, report_metrics=True)
    output = model(**collate(list(Samples("labels"))))
    assert "logits" not in output and output.entropy > 0 and output.num_items > 0
    torch.testing.assert_close(output.loss, expected)
    handle.remove()
    assert model(**collate(list(Samples("labels")))).logits is not None


def prompted(kind, **options):
    torch.manual_seed(0)
    return peft.get_peft_model(make_model(), getattr(peft, kind)(task_type="CAUSAL_LM", **options)).train()


PROMPTS = {"PromptTuningConfig": dict(num_virtual_tokens=3), "PrefixTuningConfig": dict(num_virtual_tokens=3),
           "PromptEncoderConfig": dict(num_virtual_tokens=3, encoder_hidden_size=8)}


@pytest.mark.parametrize("kind", list(PROMPTS))
def test_prompts_that_peft_learns(kind, tmp_path):
    """Tests prompts for which PEFT prepends -100 to the labels before the model computes its own loss."""
    model, batch = prompted(kind, **PROMPTS[kind]), collate(list(Samples("labels")))
    soft = {**batch, "labels": SparseTarget.from_topk(batch["labels"][..., None], None)}
    expected = step(model)
    expected.backward()
    gradient = tiny_lm.gradients(model)
    handle = fuse_lm_head(model)
    for given in (batch, soft):
        model.zero_grad()
        loss = model(**given).loss
        torch.testing.assert_close(loss, expected)
        loss.backward()
        for name, g in tiny_lm.gradients(model).items():
            torch.testing.assert_close(g, gradient[name])
    handle.remove()
    trainer = tiny_lm.make_trainer(tmp_path, model, Samples("topk"), compute_loss_func=causal_lm_loss())
    if kind == "PrefixTuningConfig":  # prefixes are keys and values, not positions of a sequence
        trainer.train()
    else:
        with pytest.raises(ValueError, match=r"labels must be \[8, 12\], .* got \[8, 9\]; if PEFT prepends a learned "
                           r"prompt .*use fuse_lm_head\(model\) instead"):
            trainer.train()


def test_a_prompt_whose_loss_peft_makes_of_the_logits():
    model = prompted("CPTConfig", cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4])
    with pytest.raises(ValueError, match="sparse_ce: fuse_lm_head does not support PEFT's CPT"):
        fuse_lm_head(model)
    assert step(model) > 0


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.works("head", "PEFT")
def test_24_a_copy_of_the_head_that_peft_trains(wrapped_first):
    """Checks that ``modules_to_save`` is an ordinary linear layer, whose weight belongs to the adapter."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = make_model()
    handle = None if wrapped_first else fuse_lm_head(model)
    model = peft.get_peft_model(model, config)
    handle = fuse_lm_head(model) if handle is None else handle
    head = model.get_base_model().lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(0.5)
    fused = step(model)
    fused.backward()
    of_fused = head.modules_to_save["default"].weight.grad.clone()
    with model.disable_adapter():
        of_base = step(model)
    assert head.original_module.weight.grad is None
    handle.remove()
    model.zero_grad()
    plain = step(model)
    plain.backward()
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(of_fused, head.modules_to_save["default"].weight.grad)
    with model.disable_adapter():
        torch.testing.assert_close(step(model), of_base)
    assert abs(of_base - plain) > 1e-3


def lce_forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
    return None


lce_forward.__module__ = "liger_kernel.transformers.model.llama"  # what Liger leaves on an instance, or on a class


def test_24_the_fused_loss_of_liger_is_refused_by_name(tmp_path):
    model = make_model()
    model.forward = lce_forward.__get__(model)
    with pytest.raises(ValueError, match="sparse_ce: model must keep its own forward, got that of liger_kernel"):
        fuse_lm_head(model)
    model = make_model()
    fuse_lm_head(model)
    trainer = tiny_lm.make_trainer(tmp_path, model, Samples("labels"))
    trainer.args.use_liger_kernel = True  # without Liger, which needs a GPU
    for config in (None, {"rope": True}, {"fused_linear_cross_entropy": True}):
        trainer.args.liger_kernel_config = config
        with pytest.raises(ValueError, match="sparse_ce: fuse_lm_head does not support Liger's own fused loss"):
            trainer.training_step(model, collate(list(Samples("labels"))))
    trainer.args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    trainer.current_gradient_accumulation_steps = 1
    assert trainer.training_step(model, collate(list(Samples("labels")))) > 0


class Int8Linear(nn.Linear):
    """Represents a quantized head as such libraries implement it."""

    def forward(self, input):
        return input @ (self.weight.round() * 0.1).T


@pytest.mark.parametrize("quantise", [
    lambda head: Int8Linear(head.in_features, head.out_features, bias=False),
    lambda head: torch.ao.nn.quantized.dynamic.Linear(head.in_features, head.out_features),
    lambda head: with_weight(head, head.weight.detach().to(torch.int8)),
], ids=["subclass", "quantised module", "integer weight"])
def test_24_quantised_heads_are_refused(quantise):
    model = make_model()
    model.lm_head = quantise(model.lm_head)
    with pytest.raises(TypeError, match="sparse_ce: model must have a"):
        fuse_lm_head(model)


def with_weight(head, weight):
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def changing_logits(change):
    class Changed(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
            logits = change(self, self.lm_head(hidden))
            loss = None if labels is None else self.loss_function(logits=logits, labels=labels,
                                                                  vocab_size=self.vocab_size, **kwargs)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    return Changed(make_model().config).train()


def masked(model, logits):
    logits[..., 3] = -1e9
    return logits


@pytest.mark.parametrize("change", [
    lambda model, x: x + 1.0, lambda model, x: 1.0 - x, lambda model, x: -x,
    lambda model, x: x + model.lm_head.weight[:, 0], lambda model, x: model.lm_head.weight[:, 0] * x,
    lambda model, x: x * model.lm_head.weight[:, 0],
    lambda model, x: x.relu(), lambda model, x: torch.relu(x), lambda model, x: x[..., :5], masked,
    lambda model, x: torch.tanh(torch.tanh(x)), lambda model, x: x.view(-1, VOCAB), lambda model, x: x ** 2,
    lambda model, x: torch.where(x > 0, x, 0.0), lambda model, x: torch.cat([x, x], -1),
    lambda model, x: x.log_softmax(-1),
])
def test_24_unknown_changes_to_the_logits_are_refused(change):
    model = changing_logits(change)
    fuse_lm_head(model)
    with pytest.raises((ValueError, AttributeError), match="sparse_ce: model must apply no more than a factor"):
        step(model)
    assert not getattr(model.lm_head, "_sparse_ce_fusing")  # a failed call leaves no state


@pytest.mark.parametrize("change,factor", [
    (lambda model, x: 3.0 * x / 2.0, 1.5), (lambda model, x: x.float().mul(3).div(2).contiguous(), 1.5),
    (lambda model, x: x.to(torch.float32) * -0.5, -0.5),
])
@pytest.mark.parametrize("cap", [None, 2.0, -2.0])
def test_known_changes_are_followed(change, factor, cap):
    def whole(model, x):
        return change(model, x) if cap is None else torch.tanh(change(model, x) / cap) * cap

    model = changing_logits(whole)
    expected = step(model)
    fuse_lm_head(model)
    torch.testing.assert_close(step(model), expected)
    assert abs(step(changing_logits(lambda model, x: x)) - expected) > 1e-4


def test_models_that_make_their_loss_themselves():
    class Bypassing(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            logits = self.model(input_ids, attention_mask=attention_mask).last_hidden_state @ self.lm_head.weight.T
            return transformers.modeling_outputs.CausalLMOutputWithPast(
                loss=self.loss_function(logits, labels, self.vocab_size), logits=logits)

    model = Bypassing(make_model().config).train()
    fuse_lm_head(model)
    with pytest.raises(ValueError, match="sparse_ce: model must compute its loss from the logits of its output head"):
        step(model)
    bart = transformers.BartForCausalLM(transformers.BartConfig(
        vocab_size=VOCAB, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)).train()
    fuse_lm_head(bart)
    with pytest.raises(AttributeError, match="model must apply no more than a factor .* shift=False if its own loss"):
        step(bart)
    bamba = transformers.BambaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_indices=[0], z_loss_coefficient=0.1, mamba_n_heads=2, mamba_d_head=16,
        mamba_d_state=4)
    bamba = transformers.BambaForCausalLM(bamba).train()
    fuse_lm_head(bamba)
    with pytest.raises(AttributeError, match="model must apply no more than a factor and a softcap"):
        step(bamba)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_what_the_error_of_an_encoder_decoder_advises_is_its_own_loss(name, tmp_path):
    config = getattr(transformers, name).config_class(
        vocab_size=VOCAB, d_model=16, num_layers=1, encoder_layers=1, decoder_layers=1, num_heads=2, d_kv=8,
        encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=2)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)

    def collator(samples):
        batch = collate(samples)
        return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    handle = fuse_lm_head(model)
    with pytest.raises((AttributeError, ValueError), match=r"causal_lm_loss, with shift=False .*\(encoder-decoders\)"):
        model(**collator(list(Samples("labels"))))
    handle.remove()
    steps = []
    for loss in (None, causal_lm_loss(shift=False), causal_lm_loss(), causal_lm_loss(shift=True)):
        trainer = tiny_lm.make_trainer(tmp_path, copy.deepcopy(model), Samples("labels"), compute_loss_func=loss,
                                       collator=collator)
        trainer.train()
        steps.append(tiny_lm.recorded(trainer)[0]["shared.weight" if "T5" in name else "model.shared.weight"])
    torch.testing.assert_close(steps[1], steps[0])
    torch.testing.assert_close(steps[2], steps[0])
    assert not torch.allclose(steps[3], steps[0], rtol=0.1)


def test_a_step_of_a_trainer_that_calls_no_other(tmp_path):
    class Alone(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            inputs = self._prepare_inputs(inputs)
            if bypassing:
                loss = model(input_ids=inputs["input_ids"]).logits.square().mean()
            else:
                loss = model(**inputs).loss
            self.accelerator.backward(loss)
            return loss.detach()

    model = make_model()
    for bypassing in (False, True):
        trainer = tiny_lm.make_trainer(tmp_path, model, Samples("labels"), trainer_class=Alone, max_steps=2)
        trainer.train()  # a head that is not fused works
    handle = fuse_lm_head(model, z_loss=1.0)
    for bypassing in (False, True, True):  # bypassing after normal use too
        trainer = tiny_lm.make_trainer(tmp_path, model, Samples("labels"), trainer_class=Alone, max_steps=2)
        if not bypassing:
            trainer.train()
            continue
        with pytest.raises(ValueError, match="sparse_ce: the loss of a fused model must come from its .* of Alone"):
            trainer.train()
        assert not tiny_lm.recorded(trainer)  # before anything has changed
    handle.remove()


def test_a_step_that_leaves_out_a_batch_or_has_two_losses(tmp_path):
    class Skipping(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if self.state.global_step == skipped:
                return torch.zeros(())
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.accelerator.backward(sum(p.square().sum() for p in model.parameters()))
            return loss

    model = make_model()
    fuse_lm_head(model, z_loss=1.0)
    for skipped in (0, 1):
        trainer = tiny_lm.make_trainer(tmp_path, model, Samples("labels"), trainer_class=Skipping, max_steps=3)
        trainer.train()
        assert trainer.state.global_step == 3
        assert "backward" not in vars(trainer.accelerator)


def test_what_is_no_causal_language_model():
    config = make_model().config
    for model, message in ((nn.Linear(2, 2), "causal language model of transformers, got Linear"),
                           (transformers.LlamaModel(config), "a forward that takes labels, got LlamaModel"),
                           (transformers.LlamaForSequenceClassification(config), "output head|loss of causal")):
        with pytest.raises((TypeError, ValueError), match=f"sparse_ce: model must .*({message})"):
            fuse_lm_head(model)
    model = make_model()
    fuse_lm_head(model)
    with pytest.raises(ValueError, match="sparse_ce: model must not be fused yet"):
        fuse_lm_head(model)


@pytest.mark.parametrize("make", [causal_lm_loss, lambda **options: fuse_lm_head(make_model(), **options)],
                         ids=["causal_lm_loss", "fuse_lm_head"])
def test_options_that_do_not_exist_are_refused_at_once(make):
    for options in ({"label_smooting": 0.1}, {"normalizer": 3}, {"return_lse": True}, {"target": 0},
                    {"return_entropy": True}, {"return_argmax": True}):
        with pytest.raises(TypeError, match="sparse_ce: options must be among .* got "):
            make(**options)
    with pytest.raises(ValueError, match="sparse_ce: reduction must be 'mean' or 'sum'"):
        make(reduction="none")
    for options, name in (({"label_smoothing": 1.5}, "label_smoothing"), ({"z_loss": torch.tensor(0.1)}, "z_loss"),
                          ({"weight": [1.0]}, "weight"), ({"ignore_index": None}, "ignore_index")):
        with pytest.raises((TypeError, ValueError), match=f"sparse_ce: {name} must be .*, got "):
            make(**options)
    with pytest.raises(TypeError, match="options must be among .*, got 'softcap'"):
        fuse_lm_head(make_model(), softcap=2.0)
    with pytest.raises(TypeError, match="options must be among .* got 'labels'"):
        fuse_lm_head(make_model(), distillation={}, labels=3)
    with pytest.raises(TypeError, match="distillation must have keys among kind, beta, .* got 'nonsense'"):
        fuse_lm_head(make_model(), distillation={"nonsense": 1})


@pytest.mark.parametrize("function, own", [
    (fuse_lm_head, ["distillation", "eval_logits", "report_metrics", "row_weight", "chunk_rows"]),
    (causal_lm_loss, ["aux_loss_weight", "report_metrics", "row_weight", "shift", "inplace"]),
    (loss_function, ["shift", "z_loss"])])
def test_the_error_of_an_unknown_option_lists_all_options(function, own):
    arguments = [make_model()] if function is fuse_lm_head else []
    with pytest.raises(TypeError) as raised:
        function(*arguments, distilation={})
    listed = re.match(r"sparse_ce: options must be among (.*), got 'distilation'", str(raised.value))[1].split(", ")
    assert listed == sorted({*listed, *own}) and "normalizer" not in listed
    for name in listed:
        with pytest.raises((TypeError, ValueError)) as raised:
            function(*arguments, **{name: object()})
        assert "options must be among" not in str(raised.value)


def test_labels_that_do_not_fit():
    model = make_model()
    logits = model(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits
    with pytest.raises(TypeError, match="sparse_ce: labels must be in the batch, got None"):
        causal_lm_loss()({"logits": logits}, None)
    with pytest.raises(ValueError, match=r"sparse_ce: labels must be \[2, 4\], one for .* got \[2, 5\]; pass"):
        causal_lm_loss()({"logits": logits}, torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(TypeError, match="sparse_ce: outputs must be those of a model, .*{'logits': logits}"):
        causal_lm_loss()(logits, torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"sparse_ce: labels must be \[2, 4\], one for each pos.*\[2, 3\]$"):
        loss_function(shift=False)(logits, torch.ones(2, 3, dtype=torch.int64))
    fuse_lm_head(model)
    with pytest.raises(ValueError, match=r"sparse_ce: labels must be \[2, 4\], one for each pos.*; pass those of all"):
        model(input_ids=torch.ones(2, 4, dtype=torch.int64), labels=SparseTarget.from_index(torch.ones(2, 3).long()))
    with pytest.raises(ValueError, match=r"sparse_ce: labels must be \[2, 2\], one for each position"):
        model(input_ids=torch.ones(2, 4, dtype=torch.int64), labels=torch.ones(2, 4).long(), logits_to_keep=2)


@pytest.mark.parametrize("function, name, fix", [
    (fuse_lm_head, "teacher_model", "pass distillation=.*teacher_head.*DistillationTrainer"),
    (fuse_lm_head, "teacher", "pass distillation="), (fuse_lm_head, "kind", "pass distillation={'kind'"),
    (fuse_lm_head, "temperature_squared", "pass distillation="), (fuse_lm_head, "softcap", "the model applies its own"),
    (fuse_lm_head, "smoothing", "did you mean 'label_smoothing'"), (fuse_lm_head, "normalizer", "pass num_items_in_ba"),
    (fuse_lm_head, "logit_scale", "use temperature=1 / logit_scale"), (fuse_lm_head, "inplace", "a fused head stores"),
    (fuse_lm_head, "return_entropy", "report_metrics=True"), (fuse_lm_head, "distilation", "did you mean 'distillati"),
    (causal_lm_loss, "temprature", "did you mean 'temperature'"),
    (causal_lm_loss, "distillation", r"use fuse_lm_head\(model, distillation=...\)"),
    (loss_function, "row_weight", "causal_lm_loss and fuse_lm_head"),
])
def test_a_first_guess_names_the_fix(function, name, fix):
    arguments = [make_model()] if function is fuse_lm_head else []
    with pytest.raises(TypeError, match=f"sparse_ce: options must be among .*, got '{name}'; {fix}"):
        function(*arguments, **{name: 0.5})


@pytest.mark.parametrize("distillation, message", [
    (nn.Linear(2, 2), "distillation must be a dict of options, such as .*teacher_head.*, got a Linear"),
    (True, "distillation must be a dict of options"),
    ({"teacher": None}, "distillation must have keys among .*'teacher'; pass distillation={'teacher_head'"),
    ({"kind": "tv", "beta": 0.5}, "beta must be None with kind='tv', which has no beta"),
    ({"temprature": 2.0}, "distillation must have keys .*; did you mean 'temperature'"),
])
def test_a_distillation_that_is_no_dict_of_options(distillation, message):
    with pytest.raises((TypeError, ValueError), match=f"sparse_ce: {message}"):
        fuse_lm_head(make_model(), distillation=distillation)


@pytest.mark.parametrize("loss", [causal_lm_loss, loss_function, loss_function()])
def test_a_loss_that_was_not_called(tmp_path, loss):
    with pytest.raises(TypeError, match="sparse_ce: compute_loss_func must be the result of causal_lm_loss"):
        tiny_lm.make_trainer(tmp_path, make_model(), Samples("labels"), compute_loss_func=loss).train()
