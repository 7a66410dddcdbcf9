"""Tests the loss at infinite logits in every mode, deterministic, in threads, mapped over targets, and copied."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases import FORMS, Draw
from close import assert_bitwise_equal
from refusals import assert_refused
from sparse_ce import (
    LinearSparseBCEWithLogitsLoss,
    LinearSparseCrossEntropyLoss,
    SequenceGroup,
    SparseCrossEntropyLoss,
    SparseTarget,
    cross_entropy,
)


def example(device, rows=4, classes=7, k=3):
    """Returns logits, indices, values and dense target, all float64, with distinct indices in each row."""
    draw = Draw(device)
    indices = torch.stack([torch.randperm(6, generator=draw.generator)[:k] for _ in range(rows)]).to(device)
    values = draw.uniform(rows, k, low=0.1, dtype=torch.float64)
    dense = torch.zeros(rows, classes, dtype=torch.float64, device=device).scatter(1, indices, values)
    return 2 * draw.normal(rows, classes, dtype=torch.float64), indices, values, dense


# --------------------------------------------------------------------------------------------------------- torch.func


def test_vmap_over_a_sparse_target(device):
    x, indices, values, dense = example(device, rows=6)
    target = SparseTarget.from_topk(indices.view(3, 2, 3), values.view(3, 2, 3), num_classes=7)
    ours = torch.func.vmap(lambda x, t: cross_entropy(x, t, reduction="sum"))(x.view(3, 2, 7), target)
    torch.testing.assert_close(ours, F.cross_entropy(x, dense, reduction="none").view(3, 2).sum(1))


# ------------------------------------------------------------------------------ checkpointing, autocast, modes, threads


def test_a_zero_weight_at_a_logit_of_minus_infinity_stays_finite_in_every_mode(device):
    """Checks that the plain PyTorch formula of the transforms does not compute 0 * -inf either."""
    x = torch.tensor([[1.0, -torch.inf, 2.0]], device=device)
    indices, values = torch.tensor([[0, 1]], device=device), torch.tensor([[1.0, 0.0]], device=device)
    weight = torch.tensor([1.0, 0.0, 1.0], device=device)
    expected = torch.softmax(x, 1) - torch.tensor([1.0, 0, 0], device=device)
    for target, w in (((indices, values), None), ((indices, torch.ones_like(values)), weight)):
        grad, loss = torch.func.grad_and_value(lambda x: cross_entropy(x, target, w))(x)
        torch.testing.assert_close(loss, -torch.log_softmax(x, 1)[0, 0])
        torch.testing.assert_close(cross_entropy(x, target, w), loss)
        torch.testing.assert_close(grad, expected)
    smoothed = torch.func.grad_and_value(lambda x: cross_entropy(x, (indices, values), weight, label_smoothing=0.1))(x)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, (indices, values), weight, label_smoothing=0.1)
    assert loss.isfinite()
    torch.testing.assert_close(smoothed, (torch.autograd.grad(loss, leaf)[0], loss.detach()))


@pytest.mark.parametrize("form", FORMS)
def test_repeated_runs_in_deterministic_mode_are_bitwise_equal(form, device, threads):
    draw = Draw(device)
    case = FORMS[form]((6, 8), 501, draw)
    x, grad_output = draw.normal(*case.shape, 501).requires_grad_(), draw.normal(*case.shape)

    def run():
        loss = cross_entropy(x, case.target, reduction="none", label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, x, grad_output)

    threads(2)
    plain = run()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            for a, b in zip(plain, run()):
                assert_bitwise_equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_losses_of_many_python_threads_do_not_disturb_each_other(device):
    from concurrent.futures import ThreadPoolExecutor
    x, indices, values, _ = example(device, rows=64)

    def run(i):
        leaf = (x * (1 + i % 3)).requires_grad_()
        loss = cross_entropy(leaf, (indices, values))
        loss.backward()
        return loss.detach(), leaf.grad

    expected = [run(i) for i in range(3)]
    with ThreadPoolExecutor(4) as pool:
        for i, result in enumerate(pool.map(run, range(30))):
            for a, b in zip(result, expected[i % 3]):
                assert_bitwise_equal(a, b)


def test_a_module_can_be_copied_and_pickled():
    module = SparseCrossEntropyLoss(torch.rand(7), label_smoothing=0.1, softcap=3.0)
    x, labels = torch.randn(4, 7), torch.arange(4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_bitwise_equal(other(x, labels), module(x, labels))


@pytest.fixture
def group():
    """Yields a group of this process alone, which holds all classes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("module, of_sequence", [
    (module, sequence) for module in (SparseCrossEntropyLoss, LinearSparseCrossEntropyLoss,
                                      LinearSparseBCEWithLogitsLoss)
    for sequence in ((False, True) if module is LinearSparseCrossEntropyLoss else (False,))])
def test_copies_and_files_of_a_module_know_its_process_group_by_its_name(module, of_sequence, group):
    group = SequenceGroup(group) if of_sequence else group
    tensors = torch.randn(4, 7), *([] if module is SparseCrossEntropyLoss else [torch.randn(9, 7)]), torch.arange(4)
    made = module(group=group, vocab_start=0, num_classes=tensors[-2].shape[-1 if len(tensors) == 2 else 0])
    file = pickle.dumps(made)
    for other in (made, copy.deepcopy(made), copy.copy(made), pickle.loads(file)):
        assert other.options["group"] == group and type(other.options["group"]) is type(group)
        assert other.state_dict() == {} and repr(other) == repr(made)
        torch.testing.assert_close(other(*tensors), module()(*tensors))
    assert copy.deepcopy(module(group=SequenceGroup(None))).options["group"].group is None
    dist.destroy_process_group()
    assert_refused(lambda: pickle.loads(file), "group must exist in the process that a module is loaded into",
                   error=RuntimeError)
