"""Tests DeepSpeed ZeRO-3, whose parameters are complete only inside their module's forward: a fused head raises an
error."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import copy
import enum

import pytest
import torch
from torch import nn

from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
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


REFUSED = "sparse_ce: fuse_lm_head does not support DeepSpeed ZeRO-3: .* Use causal_lm_loss, which is exact there"


def batch_of():
    return collate(list(Samples("labels")))


@pytest.mark.parametrize("name", ["llama", "phi, bias", "gpt2, tied"])
def test_a_fused_head_is_refused_by_name(name, overridden):
    with pytest.raises(ValueError, match=REFUSED):  # as with deepspeed.zero.Init
        fuse_lm_head(converted(make_model(name)))
    model = make_model(name)
    handle = fuse_lm_head(model)
    converted(model)  # as with deepspeed.initialize, later
    with pytest.raises(ValueError, match=REFUSED):
        model(**batch_of())
    handle.remove()


def test_a_bias_alone_is_enough():
    model = make_model("phi, bias")
    model.lm_head.bias.ds_id = 0
    with pytest.raises(ValueError, match=REFUSED):
        fuse_lm_head(model)


def test_what_the_error_names_is_exact(monkeypatch):
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


def test_a_linear_that_is_overridden_names_the_fix(overridden):
    """Checks that the override persists in the process and also affects models with complete parameters."""
    model = make_model()
    fuse_lm_head(model)
    with pytest.raises(AttributeError, match=r"sparse_ce: model must apply no more .*\.dim of .*causal_lm_loss"):
        model(**batch_of())
