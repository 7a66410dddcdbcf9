"""Tests tensors on two devices in one call. If one is on "meta", PyTorch calls the shape function, which returns
unwritten memory."""

import pytest
import torch

from cases import Draw
from refusals import assert_refused
from sparse_ce import SparseTarget, cross_entropy, linear_cross_entropy, masked_mean
from sparse_ce._core.arguments import Arguments
from sparse_ce.targets.storage import Parts

ops = torch.ops.sparse_ce


def targets(device):
    draw = Draw(device)
    indices, values = draw.integers(7, 4, 3), draw.uniform(4, 3)
    mask, offsets = torch.ones(4, dtype=torch.bool, device=device), torch.arange(5, device=device) * 3
    return {
        "index": SparseTarget.from_index(indices[:, 0], row_mask=mask),
        "topk": SparseTarget.from_topk(indices, values, row_mask=mask),
        "jagged": SparseTarget.from_jagged(indices.view(-1), values.view(-1), offsets, row_mask=mask),
    }


def parts(target):
    return {name: getattr(target, name) for name in Parts.__slots__}


PARTS = [(form, name) for form, target in targets("cpu").items() for name, t in parts(target).items()
         if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("form,name", PARTS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_part_of_a_target_on_another_device_is_refused(form, name, requires_grad, device):
    draw = Draw(device)
    x, w = draw.normal(4, 7).requires_grad_(requires_grad), draw.normal(7, 7).requires_grad_(requires_grad)
    target = parts(targets(device)[form])
    target = SparseTarget(**{**target, name: target[name].to("meta")})
    for reduction in ("none", "sum", "mean"):
        for call in (lambda x: cross_entropy(x, target, reduction=reduction),
                     lambda x: linear_cross_entropy(x, w, target, reduction=reduction)):
            assert_refused(lambda: call(x), "target", device, f"{name} on meta", ".to(", error=RuntimeError)
    assert_refused(lambda: torch.func.grad(lambda x: cross_entropy(x, target))(x.detach()), f"{name} on meta")
    if name != "indices":
        assert_refused(lambda: cross_entropy(x.to("meta"), target), f"indices on {device}", "meta")


def test_a_normalizer_without_memory_is_refused(device):
    x, target = Draw(device).normal(4, 7), targets(device)["topk"]
    normalizer = torch.ones(1, device="meta")
    assert_refused(lambda: cross_entropy(x, target, normalizer=normalizer), "normalizer", "meta")
    assert_refused(lambda: linear_cross_entropy(x, x[:, :7], target, normalizer=normalizer), "normalizer", "meta")
    assert cross_entropy(x.to("meta"), target.to("meta"), normalizer=normalizer).is_meta


def op_calls(device):
    """Returns valid positional arguments for each op that takes tensors."""
    draw = Draw(device)
    x, rows, one = draw.normal(4, 7), draw.normal(4), torch.ones((), device=device)
    target = (draw.integers(7, 12), draw.uniform(12), torch.arange(5, device=device) * 3, draw.uniform(7),
              torch.ones(4, dtype=torch.bool, device=device))
    head = x, draw.normal(7, 7), draw.normal(7)
    entries, mask = draw.normal(12), torch.ones(4, 7, device=device)
    order, ids = torch.arange(12, device=device), (*target[:3], target[4])
    return {
        "forward": (x, *target), "forward_with_residual": (x, *target), "forward_with_gradient": (one, one, x, *target),
        "forward_with_gradient_": (one, one, x.clone(), *target),
        "backward": (rows, rows, x, rows, rows, *target), "backward_": (rows, rows, x.clone(), rows, rows, *target),
        "backward_anew_": (one, 2 * one, rows, x, rows, rows, x.clone(), *target),
        "backward_values": (rows, x, rows, rows, *target), "loss_mean": (rows, one, *target),
        "sparse_softmax": (entries, target[2], order, True),
        "sparse_softmax_backward": (entries, entries, target[2], order, True),
        "masked_mean": (x, mask, [1]), "masked_mean_backward": (rows, mask, [1], torch.float32),
        "linear_forward": (*head, *target), "linear_forward_with_residual": (*head, *target),
        "linear_forward_with_gradient": (one, one, *head, *target),
        "linear_mean": (*head, *Arguments(*target), one),
        "linear_backward": (rows, rows, *head, rows, rows, *target), "scale_": (x.clone(), one, one),
        "candidate_logits": (*head, *ids), "candidate_logits_backward": (entries, entries, *head, *ids),
    }


@pytest.mark.parametrize("name", op_calls("cpu"))
def test_every_op_refuses_tensors_on_two_devices(name, device):
    call, op = op_calls(device)[name], getattr(ops, name)
    names = [argument.name for argument in op.default._schema.arguments]
    like = next((n for n in ("logits", "input") if n in names), names[0])
    tensors = [i for i, t in enumerate(call) if isinstance(t, torch.Tensor)]
    op(*call)  # Without a valid call the errors below prove nothing.
    for i in tensors:
        wrong = [*call]
        wrong[i] = call[i].to("meta")
        assert_refused(lambda: op(*wrong), "must be on the device of", "meta")
        if names[i] != like:
            assert_refused(lambda: op(*wrong), f"{names[i]} must be on the device of {like}, {device}", "got meta")
    op(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in call))


def test_a_mask_on_another_device_is_refused(device):
    x = Draw(device).normal(4, 7)
    assert_refused(lambda: masked_mean(x, torch.ones(4, 7, device="meta")), "mask", f"input, {device}", "got meta")
    assert_refused(lambda: masked_mean(x.to("meta"), torch.ones(4, 7, device=device)), "mask", "meta", f"got {device}")
