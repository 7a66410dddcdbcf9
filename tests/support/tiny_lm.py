"""Defines causal language models of transformers that train in milliseconds, their data, and a Trainer."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import sparse_ce

# If they are missing or older, the test modules that import this one are skipped.
transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("accelerate", minversion="1.15")  # required by the Trainer
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

VOCAB, LENGTH = 48, 9
transformers.logging.set_verbosity_error()
gc.freeze()  # each Trainer collects garbage, which would take most of a second for the imported objects alone
_SHAPE = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
              max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_MAKE = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE)),
    "gemma2, softcap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_SHAPE, num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0)),
    "cohere, logit_scale": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**_SHAPE, logit_scale=0.3)),
    "granite, logits_scaling": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**_SHAPE, logits_scaling=0.4)),
    "falcon h1, lm_head_multiplier": lambda: transformers.FalconH1ForCausalLM(transformers.FalconH1Config(
        **_SHAPE, num_key_value_heads=1, lm_head_multiplier=0.4, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8,
        mamba_d_state=4, mamba_chunk_size=4)),
    "gpt2, tied": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "phi, bias": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**_SHAPE)),
    "mixtral, router loss": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(
        **_SHAPE, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.5, experts_implementation="eager")),  # the fused one does not support float64
}
MODELS = list(_MAKE)


def make_model(name="llama", seed=0):
    """Returns a float32 model in training mode with peaked logits."""
    torch.manual_seed(seed)
    model = _MAKE[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.train()


class Samples(Dataset):
    """Contains sequences of different lengths; the loss excludes a prompt, and some samples are ignored entirely.

    ``form`` is "labels" (S,), "coo" (S, VOCAB), or "topk" (S,) targets of 1 to 3 entries.
    """

    def __init__(self, form, size=8, seed=0):
        self.form, self.size, self.seed = form, size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i >= self.size:
            raise IndexError(i)
        g = torch.Generator().manual_seed(1000 * self.seed + i)
        length = LENGTH - i % 4
        ids = torch.randint(3, VOCAB, (length,), generator=g)
        counts = torch.arange(length) >= (length if i == 5 else 2 * i % 5)
        if self.form == "labels":
            labels = ids.masked_fill(~counts, -100)
        else:
            dense = torch.zeros(length, VOCAB)
            classes = torch.randint(3, VOCAB, (length, 1 + i % 3), generator=g)
            dense.scatter_(1, classes, torch.rand(classes.shape, generator=g) + 0.1)
            if self.form == "coo":
                labels = sparse_ce.SparseTarget.from_coo(dense.to_sparse(), row_mask=counts)
            else:
                top = dense.topk(3)
                labels = sparse_ce.SparseTarget.from_topk(top.indices, top.values, row_mask=counts, num_classes=VOCAB)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def collate(samples):
    """Returns a batch of sequences of different lengths."""
    batch = {key: torch.nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True)
             for key in ("input_ids", "attention_mask")}
    labels = [s["labels"] for s in samples]
    if isinstance(labels[0], torch.Tensor):
        return {**batch, "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)}
    return {**batch, "labels": sparse_ce.collate(labels)}


def dense_labels(labels):
    """Returns (B, S, VOCAB) float64, with zeros at ignored positions."""
    if isinstance(labels, torch.Tensor):
        return F.one_hot(labels.clamp(min=0), VOCAB).double() * labels.ne(-100)[..., None]
    return labels.to_dense(torch.float64)


def dense_loss(logits, labels, items):
    """Returns the float64 loss of a causal language model by its definition. ``logits`` and ``labels`` are (B, S,
    VOCAB)."""
    return -(logits.double()[:, :-1].log_softmax(-1) * labels[:, 1:]).sum() / items


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(ours, peer, exact):
    """Checks each parameter's gradient; a gradient that is 0 except for rounding (a key's bias) must stay so.

    Most of the error is the rounding of the layers, which is as large in ``peer`` (the same model with PyTorch's loss)
    but not identical. One parameter may have three times the error of ``peer``, and half of them may not have twice the
    error.
    """
    assert set(ours) == set(peer) == set(exact) and ours
    largest = max(g.abs().max() for g in exact.values())
    ratios = []
    for name, gradient in ours.items():
        scale = exact[name].abs().max()
        if scale < 1e-9 * largest:
            assert gradient.abs().max() < 1e-5 * largest, name
            continue
        error, of_peer = ((g.double() - exact[name]).abs().max() for g in (gradient, peer[name]))
        unit = torch.finfo(gradient.dtype).eps * scale
        allowed = 4 * of_peer + 4 * unit
        assert allowed < 0.1 * scale, f"vacuous for {name}: an all-zero result would pass"
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}, PyTorch's {of_peer:.3e}"
        ratios.append(error / (of_peer + unit))
    assert sorted(ratios)[len(ratios) // 2] <= 2


class Recorder(TrainerCallback):
    """Records the gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(gradients(model))


def arguments(path, **changes):
    return TrainingArguments(**{**dict(
        output_dir=str(path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, per_device_train_batch_size=8,
        per_device_eval_batch_size=4, max_steps=1, logging_steps=1), **changes})


def make_trainer(path, model, samples, eval_samples=None, compute_loss_func=None, compute_metrics=None,
                 collator=collate, preprocess_logits_for_metrics=None, trainer_class=Trainer, **changes):
    return trainer_class(
        model, arguments(path, **changes), data_collator=collator, train_dataset=samples, eval_dataset=eval_samples,
        compute_loss_func=compute_loss_func, compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics, callbacks=[Recorder()])


def recorded(trainer):
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorder)).steps
