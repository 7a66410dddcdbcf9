"""Tests ``fuse_lm_head``: loss and gradients equal those of the model with logits, for the heads of transformers."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import copy
import functools
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from close import assert_close_to_float64
from sparse_ce import SparseTarget, cross_entropy, functional
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
from tiny_lm import (
    MODELS,
    VOCAB,
    Samples,
    assert_gradients_close,
    collate,
    dense_labels,
    dense_loss,
    gradients,
    make_model,
    transformers,
)


def batch_of(form="labels"):
    return collate(list(Samples(form)))


def unfused(model, batch, dtype, items):
    """Returns loss and gradients by the model's own code, with its logits and dense labels, in ``dtype``."""
    model, batch = copy.deepcopy(model).to(dtype), dict(batch)
    labels = dense_labels(batch["labels"])

    def definition(logits, labels, vocab_size, **kwargs):
        return dense_loss(logits, dense_labels(labels), items)

    model.loss_function = definition
    loss = model(**batch).loss
    loss.backward()
    assert labels.any()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("form", ["labels", "coo"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_the_unfused_model(name, form):
    model, batch, items = make_model(name), batch_of(form), 13
    loss, exact = unfused(model, batch, torch.float64, items)
    _, peer = unfused(model, batch, torch.float32, items)
    fuse_lm_head(model)
    output = model(**batch, num_items_in_batch=items)
    output.loss.backward()
    assert "logits" not in output and output.logits is None
    torch.testing.assert_close(output.loss.double(), loss, rtol=1e-5, atol=0)
    assert_gradients_close(gradients(model), peer, exact)


@pytest.mark.parametrize("name", ["gemma2, softcap", "cohere, logit_scale", "granite, logits_scaling",
                                  "falcon h1, lm_head_multiplier", "phi, bias"])
def test_what_these_models_do_to_their_logits_matters(name):
    """Checks that the loss differs without the transformation, so that the test above detects its absence."""
    model, batch = make_model(name), batch_of()
    labels = batch.pop("labels")
    hidden, logits = model.get_decoder()(**batch).last_hidden_state, model(**batch).logits
    naive = F.linear(hidden, model.get_output_embeddings().weight)
    target = SparseTarget.from_index(labels).shift(1)
    assert abs(cross_entropy(naive, target) - cross_entropy(logits, target)) > 1e-3


@pytest.mark.parametrize("report_metrics", [False, True])
def test_logits_of_a_bfloat16_head_that_are_not_rounded(report_metrics, monkeypatch):
    """Checks that every path to a fused head gets the dtype, and that evaluation keeps its logits."""
    told, right = [], functional.linear_cross_entropy

    @functools.wraps(right)
    def recorded(*args, **options):
        told.append(options.get("logits_dtype"))
        return right(*args, **options)

    monkeypatch.setattr(functional, "linear_cross_entropy", recorded)
    model, batch = make_model(MODELS[0]).bfloat16(), batch_of()
    fuse_lm_head(model, logits_dtype=torch.float32, report_metrics=report_metrics)
    loss = model(**batch).loss
    assert told == [torch.float32] and torch.isfinite(loss)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).loss, loss, rtol=0.05, atol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2, softcap", "granite, logits_scaling"])
def test_a_temperature_divides_what_the_model_makes(name):
    model, batch = make_model(name), batch_of("topk")
    dense, counted = dense_labels(batch["labels"]), batch["labels"][:, 1:].ne(-100).sum()
    plain = {key: t for key, t in batch.items() if key != "labels"}
    dense_loss(model(**plain).logits / 3, dense, counted).backward()
    expected = gradients(model)
    model.zero_grad()
    fuse_lm_head(model, temperature=3, report_metrics=True)
    output = model(**batch)
    output.loss.backward()
    for parameter, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        evaluated = model.eval()(**batch)
        torch.testing.assert_close(evaluated.loss, output.loss.detach())
        torch.testing.assert_close(evaluated.entropy, output.entropy)
        log_probs = (model(**plain).logits / 3).log_softmax(-1)[:, :-1][batch["labels"][:, 1:].ne(-100)]
    torch.testing.assert_close(output.entropy, -(log_probs.exp() * log_probs).sum(-1).mean())


def test_a_temperature_that_is_learned():
    model, batch, temperature = make_model(), batch_of(), nn.Parameter(torch.tensor(0.7))
    dense_loss(model(**{**batch, "labels": None}).logits / temperature, dense_labels(batch["labels"]),
               batch["labels"][:, 1:].ne(-100).sum()).backward()
    expected, temperature.grad = temperature.grad, None
    fuse_lm_head(model, temperature=temperature)
    model(**batch).loss.backward()
    torch.testing.assert_close(temperature.grad, expected, rtol=1e-4, atol=1e-6)
    capped = make_model("gemma2, softcap")
    fuse_lm_head(capped, temperature=temperature)
    with pytest.raises(ValueError, match="sparse_ce: temperature must be a number for a model with a softcap"):
        capped(**batch)
    with pytest.raises(ValueError, match="sparse_ce: temperature must be a number with a softcap"):
        causal_lm_loss(temperature=temperature, softcap=30.0)


def test_the_logits_never_exist():
    """Checks that no tensor of (positions, vocabulary) is allocated from the start of forward to the end of
    backward."""
    from torch.utils._python_dispatch import TorchDispatchMode
    model, batch, largest = make_model(), batch_of(), [0]
    fuse_lm_head(model, chunk_rows=4)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and t.dim() >= 2 and t.shape[-1] == VOCAB:
                    largest[0] = max(largest[0], t.numel())
            return out

    with Watch():
        model(**batch).loss.backward()
    assert largest[0] <= 4 * VOCAB


@pytest.mark.parametrize("items", [7, 7.0, torch.tensor(7), torch.tensor([7]), torch.tensor([7, 7]),
                                   torch.tensor([[7.0], [7.0]]), torch.tensor(7, dtype=torch.uint8)], ids=str)
def test_every_form_of_num_items_in_batch(items):
    model, batch = make_model(), batch_of()
    labels, logits = batch["labels"], model(**{**batch, "labels": None}).logits
    expected = dense_loss(logits, dense_labels(labels), 7).float()
    for loss in (causal_lm_loss()({"logits": logits}, labels, items), causal_lm_loss()((logits,), labels, items)):
        torch.testing.assert_close(loss, expected)
        loss *= 2  # as the Trainer does
        loss.backward(retain_graph=True)
    fuse_lm_head(model)
    loss = model(**batch, num_items_in_batch=items).loss
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected)
    loss *= 2
    loss.backward()
    assert causal_lm_loss()({"logits": logits}, labels, 0) == 0 and model(**batch, num_items_in_batch=0).loss == 0


def test_shifted_labels_tuples_and_coo():
    model, batch = make_model(), batch_of()
    labels = batch.pop("labels")
    logits = model(**batch).logits
    expected = model(**batch, labels=labels).loss
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    coo, marked = dense_labels(labels).float().to_sparse(), labels.masked_fill(labels.eq(-100), -1)
    losses = [causal_lm_loss(shift=False)({"logits": logits}, shifted), causal_lm_loss()({"logits": logits}, labels),
              causal_lm_loss(ignore_index=-1)({"logits": logits}, marked),
              causal_lm_loss(ignore_index=-1)({"logits": logits}, SparseTarget.from_topk(
                  marked[..., None], torch.zeros(*labels.shape, 1), values_are="log_probs")),
              causal_lm_loss(ignore_index=-1)({"logits": logits}, SparseTarget.from_topk(marked[..., None], None)),
              causal_lm_loss(reduction="sum")({"logits": logits}, coo, 3) / labels[:, 1:].ne(-100).sum(),
              causal_lm_loss()({"logits": logits}, coo, labels[:, 1:].ne(-100).sum())]
    fuse_lm_head(model)
    top = labels.masked_fill(labels.eq(-100), 5)[..., None], torch.ones(*labels.shape, 1)
    losses += [model(**batch, labels=labels).loss, model(**batch, labels=labels, shift_labels=shifted).loss,
               model(batch["input_ids"], batch["attention_mask"], None, None, None, labels).loss,
               model(**batch, labels=labels, return_dict=False)[0],
               model(**batch, labels=labels, ignore_index=-100).loss]
    for loss in losses:
        torch.testing.assert_close(loss, expected)
    assert torch.isfinite(model(**batch, labels=top).loss)


def test_forward_without_labels_and_generate_are_untouched():
    model, batch = make_model("gemma2, softcap").eval(), batch_of()
    labels = batch.pop("labels")
    before = model(**batch).logits
    words = model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    signature = inspect.signature(model.forward)
    with torch.no_grad():
        kept = model(**batch, labels=labels)
    handle = fuse_lm_head(model)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model(**batch).logits, before)
    assert torch.equal(model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False), words)
    with torch.no_grad():  # as Trainer.evaluate
        evaluated = model(**batch, labels=labels)
    assert torch.equal(evaluated.logits, kept.logits)
    torch.testing.assert_close(evaluated.loss, kept.loss)
    assert model(**batch, labels=labels).logits is None
    handle.remove()
    handle.remove()
    assert "forward" not in model.__dict__ and torch.equal(model(**batch, labels=labels).logits, before)
    with torch.no_grad():
        fuse_lm_head(model, eval_logits=False)
        output = model(**batch, labels=labels)
    assert output.logits is None
    torch.testing.assert_close(output.loss, kept.loss)


@pytest.mark.works("head", "checkpointing", "compile")
def test_a_fused_model_is_saved_copied_checkpointed_and_compiled(tmp_path):
    model, batch = make_model("gemma2, softcap"), batch_of("topk")
    model(**{**batch, "labels": batch_of()["labels"]})
    fuse_lm_head(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert type(loaded) is type(model)
    for name, t in model.state_dict().items():
        assert torch.equal(t, loaded.state_dict()[name])
    model(**batch).loss.backward()
    expected, copied = gradients(model), copy.deepcopy(model)
    copied.zero_grad()
    nn.init.zeros_(model.get_output_embeddings().weight)  # the copy must use its own forward
    copied.gradient_checkpointing_enable()
    copied(**batch, use_cache=False).loss.backward()
    for name, gradient in gradients(copied).items():
        torch.testing.assert_close(gradient, expected[name])
    copied.gradient_checkpointing_disable()
    copied.zero_grad()
    explained = torch._dynamo.explain(copied)(**batch)
    assert explained.graph_count == 1 and explained.graph_break_count == 0
    torch.compile(copied, backend="aot_eager")(**batch).loss.backward()
    for name, gradient in gradients(copied).items():
        torch.testing.assert_close(gradient, expected[name])


def test_a_fused_model_is_not_pickled_into_one_that_cannot_be_read(tmp_path):
    model, batch = make_model("gemma2, softcap"), batch_of()
    handle = fuse_lm_head(model)
    for save in (pickle.dumps, lambda model: torch.save(model, tmp_path / "model.pt")):
        with pytest.raises(TypeError, match="fuse_lm_head does not support pickle: a fused"):
            save(model)
    loss = model(**batch).loss
    handle.remove()
    again = pickle.loads(pickle.dumps(model))
    fuse_lm_head(again)
    torch.testing.assert_close(again(**batch).loss, loss)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("first", ["fused", "prepared"])
def test_accelerate_unwraps_what_it_has_prepared(first, keeps, request):
    accelerate = pytest.importorskip("accelerate")
    model, batch = make_model("gemma2, softcap"), batch_of()
    expected = model(**batch).loss
    request.addfinalizer(lambda: accelerate.state.AcceleratorState._reset_state(True))  # a process has only one state
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    if first == "fused":
        handle, prepared = fuse_lm_head(model), accelerator.prepare(model)
    else:
        prepared = accelerator.prepare(model)
        handle = fuse_lm_head(prepared)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=keeps)
    out = unwrapped(**batch)
    assert out.logits is None
    torch.testing.assert_close(out.loss.float(), expected, rtol=0.01, atol=0.01)
    handle.remove()
    assert unwrapped(**batch).logits is not None
    fuse_lm_head(unwrapped)
    assert unwrapped(**batch).logits is None


@pytest.mark.works("head", "bfloat16")
def test_autocast_and_frozen_heads():
    model, batch = make_model("granite, logits_scaling"), batch_of()
    model.get_output_embeddings().weight.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**batch)
        expected.loss.backward()
    exact, peer = unfused(model.float(), batch, torch.float64, batch["labels"][:, 1:].ne(-100).sum()), gradients(model)
    model.zero_grad()
    fuse_lm_head(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    assert model.get_output_embeddings().weight.grad is None
    torch.testing.assert_close(loss, expected.loss, rtol=2e-2, atol=0)
    name = "model.layers.0.mlp.down_proj.weight"
    assert_close_to_float64(gradients(model)[name], peer[name], exact[1][name], arithmetic=torch.bfloat16)


def replicas_on_cpu(model, count):
    """Returns what ``nn.DataParallel`` creates for each device, without the devices."""
    replicas = []
    for _ in range(count):
        copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, replica in copies.items():
            for name, child in module._modules.items():
                replica._modules[name] = copies[child]
            for name, parameter in module._parameters.items():
                setattr(replica, name, None if parameter is None else parameter.detach().clone().requires_grad_())
        replicas.append(copies[model])
    return replicas


def test_replicas_run_on_their_own_parameters():
    model, samples = make_model(), Samples("topk")
    whole = collate(list(samples))
    expected = model(**{**whole, "labels": None}).logits
    expected = dense_loss(expected, dense_labels(whole["labels"]), 9)
    fuse_lm_head(model, report_metrics=True)
    total = items = 0
    for replica, begin in zip(replicas_on_cpu(model, 2), (0, 4)):
        part = {"input_ids": whole["input_ids"][begin:begin + 4], "labels": whole["labels"][begin:begin + 4]}
        output = replica(**part, num_items_in_batch=torch.tensor([[9]]))
        loss, items = output.loss, items + output.num_items
        loss.backward()
        assert replica.lm_head.weight.grad is not None
        total = total + loss.detach()
    assert not gradients(model) and items == whole["labels"].ne(-100)[:, 1:].sum()
    torch.testing.assert_close(total, expected.float())
