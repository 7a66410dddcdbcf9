"""Tests heads whose parameters are complete only inside their module's forward, as with DeepSpeed ZeRO-3."""

import tiny_lm  # first: skips this module if transformers is missing

# isort: split
import copy
import enum

import pytest
import torch
from torch import nn

from sparse_ce.integrations.transformers import FusedHead, causal_lm_loss, fuse_lm_head
from tiny_lm import Samples, collate, gradients, make_model


class Status(enum.Enum):  # ZeroParamStatus
    AVAILABLE = 1
    NOT_AVAILABLE = 2


class LinearFunction(torch.autograd.Function):
    """Implements the replacement of ``F.linear`` by ``deepspeed.zero.Init``, which reads the same attributes of its
    input."""

    @staticmethod
    def forward(ctx, input, weight, bias=None):
        ctx.save_for_backward(input, weight)
        ctx.bias = bias is not None
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        output = input.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        partitioned = getattr(weight, "ds_status", None) is Status.NOT_AVAILABLE
        if partitioned:
            gather(weight)
        of_input = grad.matmul(weight)
        if partitioned:
            partition(weight)
        of_weight = grad.flatten(0, -2).t().matmul(input.flatten(0, -2))
        return of_input, of_weight, grad.flatten(0, -2).sum(0) if ctx.bias else None


def linear(input, weight, bias=None):
    return LinearFunction.apply(input, weight, bias)


def gather(parameter):
    parameter.data, parameter.ds_status = parameter.ds_tensor.view(parameter.ds_shape), Status.AVAILABLE


def partition(parameter):
    parameter.data, parameter.ds_status = torch.empty(0), Status.NOT_AVAILABLE


def each(do, parameters):
    for parameter in parameters:
        do(parameter)


def converted(model):
    """Returns the model with the parameters, hooks and attributes of ZeRO-3 in a world of one process."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape, parameter.ds_numel = number, parameter.shape, parameter.numel()
        parameter.ds_persist, parameter.ds_tensor = False, parameter.detach().clone().flatten()
        partition(parameter)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        module.register_forward_pre_hook(lambda module, args, own=own: each(gather, own))
        module.register_forward_hook(lambda module, args, output, own=own: each(partition, own))
        module.register_full_backward_pre_hook(lambda module, grad, own=own: each(gather, own))
    return model


@pytest.fixture
def overridden(monkeypatch):
    monkeypatch.setattr(nn.functional, "linear", linear)


def batch_of():
    return collate(list(Samples("labels")))


@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1), dict(reduction="sum")], ids=str)
@pytest.mark.parametrize("name", ["llama", "phi, bias", "gpt2, tied", "gemma2, softcap"])
def test_a_fused_head_equals_that_of_one_process(name, options, overridden):
    """Tests heads that are partitioned before and after they are fused."""
    plain, batch = make_model(name), batch_of()
    fuse_lm_head(plain, **options)
    loss = plain(**batch).loss
    loss.backward()
    first, later = converted(make_model(name)), make_model(name)
    for model in (first, later):
        fuse_lm_head(model, **options)
    converted(later)
    for model in (first, later):
        head, found = model.get_output_embeddings(), model(**batch)
        assert found.logits is None and not head.weight.numel() and "forward" not in vars(head)
        torch.testing.assert_close(found.loss, loss)
        found.loss.backward()
        for key, gradient in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[key], gradient, msg=key)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**batch).loss, loss)  # with logits
        FusedHead.of(model).remove()
        assert model(**batch).logits.shape == (*batch["labels"].shape, tiny_lm.VOCAB)


def test_what_fails_in_a_forward_leaves_the_head_in_its_place(overridden):
    model, batch = converted(make_model()), batch_of()
    fuse_lm_head(model)
    head = model.lm_head
    with pytest.raises(RuntimeError, match="sparse_ce: target must have indices in"):
        model(input_ids=batch["input_ids"], labels=batch["labels"] + 1000)
    assert model.lm_head is head and "forward" not in vars(head)
    assert model(**batch).loss.isfinite()


def test_a_partitioned_teacher_keeps_its_head_apart(overridden):
    batch, teacher = batch_of(), make_model(seed=7).eval().requires_grad_(False)
    hidden = teacher.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    losses = []
    for convert in (lambda model: model, converted):
        student, of_teacher = convert(make_model()), convert(copy.deepcopy(teacher))
        fuse_lm_head(student, distillation=dict(teacher_head=of_teacher.lm_head, kind="jsd", alpha=0.5))
        losses.append(student(**batch, teacher_hidden=hidden).loss)
        losses[-1].backward()
        losses.append(gradients(student)["lm_head.weight"])
    torch.testing.assert_close(losses[2:], losses[:2])


def test_the_loss_function_of_a_trainer(monkeypatch):
    model, batch = make_model(), batch_of()
    labels = batch.pop("labels")
    plain = copy.deepcopy(model)
    loss = plain(**batch, labels=labels).loss
    loss.backward()
    monkeypatch.setattr(nn.functional, "linear", linear)
    made = causal_lm_loss()(converted(model)(**batch), labels)
    made.backward()
    torch.testing.assert_close(made, loss)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient)


def test_an_override_that_persists_in_the_process(overridden):
    """Tests models with complete parameters, after ``deepspeed.zero.Init`` has replaced ``F.linear``."""
    model, batch = make_model(), batch_of()
    expected = model(**batch).loss
    fuse_lm_head(model)
    torch.testing.assert_close(model(**batch).loss, expected)
    assert "forward" not in vars(model.lm_head)
