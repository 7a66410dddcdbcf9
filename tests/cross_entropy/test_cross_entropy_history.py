"""Tests that the bits of a gradient depend on the inputs and ``grad_output`` alone, never on what ran before."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import sparse_ce
from cases import Draw, sparsely
from close import assert_bitwise_equal
from sparse_ce.ops import expected_grad

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
GRADS = [1.0, 0.7, 0.25, 3e-3, 1e4]
ROWS, VOCAB, WIDTH = 24, 70, 32


def example(device, dtype, rows=ROWS, vocab=VOCAB, width=WIDTH):
    """Returns leaves (input, weight, bias, values, row_weight), labels and ids. Some rows are ignored."""
    draw = Draw(device)
    leaves = [(draw.normal(rows, width) * 2).to(dtype), draw.normal(vocab, width).to(dtype),
              draw.normal(vocab).to(dtype), draw.uniform(rows, 3), draw.uniform(rows)]
    labels, ids = draw.integers(vocab, rows), draw.integers(vocab, rows, 3)
    labels[::5] = ids[::5] = -100
    return [t.requires_grad_() for t in leaves], labels, ids


def logits_of(x, w, b):
    return torch.nn.functional.linear(x, w, b)


def row_loss(out, target, advantages):
    return -advantages * out.log_probs - 0.1 * out.entropy


LOSSES = {
    "labels": lambda x, w, b, v, r, y, ids: sparse_ce.cross_entropy(logits_of(x, w, b), y),
    "small": lambda x, w, b, v, r, y, ids: sparse_ce.cross_entropy(
        logits_of(x, w, b), (ids, torch.full_like(v, 0.3, requires_grad=False))),
    "options": lambda x, w, b, v, r, y, ids: sparse_ce.cross_entropy(
        logits_of(x, w, b), (ids, v), label_smoothing=0.1, z_loss=1e-3, row_weight=r),
    "backward": lambda x, w, b, v, r, y, ids: sparse_ce.cross_entropy(
        logits_of(x, w, b), (ids, v), inplace="backward"),
    "forward": lambda x, w, b, v, r, y, ids: sparse_ce.cross_entropy(
        logits_of(x, w, b), (ids, v.detach()), row_weight=r, inplace="forward"),
    "log_probs": lambda x, w, b, v, r, y, ids: sparse_ce.selected_log_probs(logits_of(x, w, b), y).log_probs.mean(),
    "distillation": lambda x, w, b, v, r, y, ids: sparse_ce.distillation_loss(logits_of(x, w, b), (ids, v / 4)),
    "head": lambda x, w, b, v, r, y, ids: sparse_ce.linear_cross_entropy(x, w, y, linear_bias=b),
    "head in chunks": lambda x, w, b, v, r, y, ids: sparse_ce.linear_cross_entropy(
        x, w, (ids, v), linear_bias=b, row_weight=r, label_smoothing=0.1, chunk_rows=7),
    "head by classes": lambda x, w, b, v, r, y, ids: sparse_ce.linear_cross_entropy(
        x.repeat(3, 1), w, y.repeat(3), linear_bias=b, chunk_rows=3),
    "head with metrics": lambda x, w, b, v, r, y, ids: sparse_ce.linear_cross_entropy(
        x, w, (ids, v), linear_bias=b, return_entropy=True, return_argmax=True).loss,
    "head's log_probs": lambda x, w, b, v, r, y, ids: sparse_ce.linear_selected_log_probs(
        x, w, y, linear_bias=b).log_probs.mean(),
    "head's distillation": lambda x, w, b, v, r, y, ids: sparse_ce.linear_distillation_loss(
        x, w, (ids, v / 4), linear_bias=b),
    "row loss": lambda x, w, b, v, r, y, ids: sparse_ce.linear_row_loss(
        row_loss, x, w, y, r, linear_bias=b, return_entropy=True, chunk_rows=7),
    "sharded": lambda x, w, b, v, r, y, ids: sparse_ce.cross_entropy(
        logits_of(x, w, b), (ids, v), row_weight=r, group=dist.group.WORLD),
    "sharded head": lambda x, w, b, v, r, y, ids: sparse_ce.linear_cross_entropy(
        x, w, (ids, v), linear_bias=b, row_weight=r, group=dist.group.WORLD),
    "sharded row loss": lambda x, w, b, v, r, y, ids: sparse_ce.linear_row_loss(
        row_loss, x, w, y, r, linear_bias=b, return_entropy=True, group=dist.group.WORLD),
}


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def forget():
    for known in (expected_grad._expected, expected_grad._replayed, expected_grad._followed, expected_grad._unused):
        known.clear()


def grads_of(loss, leaves, grad_output, **keywords):
    return torch.autograd.grad(loss, leaves, loss.new_full((), grad_output), allow_unused=True, **keywords)


def unused(leaves, labels, ids):
    """Runs backward through outputs beside the loss, and forwards without a backward."""
    x, w, b, *_ = leaves
    for loss in LOSSES.values():
        loss(*leaves, labels, ids)
    for options in (dict(), dict(group=dist.group.WORLD)):
        for asked in (dict(return_lse=True), dict(return_entropy=True, return_lse=True)):
            for target in (labels, (ids, leaves[3])):
                out = sparse_ce.linear_cross_entropy(x, w, target, linear_bias=b, **asked, **options)
                (out[0] + sum(t.sum() for t in out[1:])).backward()
    for leaf in leaves:
        leaf.grad = None


@pytest.mark.parametrize("name, dtype", sparsely(2, LOSSES, DTYPES))
def test_the_same_bits_whatever_ran_before(name, dtype, device):
    leaves, labels, ids = example(device, dtype)

    def loss():
        return LOSSES[name](*leaves, labels, ids)

    def hooked(hooks=lambda: saved_tensors_hooks(lambda t: t, lambda t: t)):
        with hooks():
            return loss()

    def again(first):
        total = loss()
        grads_of(total, leaves, first, retain_graph=True)
        return total

    for grad_output in GRADS:
        forget()
        fresh = grads_of(loss(), leaves, grad_output)
        ways = {"hooks": hooked, "offloaded": lambda: hooked(save_on_cpu),
                "checkpointed": lambda: checkpoint(loss, use_reentrant=False), "at once": loss}
        for before in (0.7, 1.0, grad_output, 0.0, float("inf")):
            ways[f"after {before}"] = lambda before=before: (grads_of(loss(), leaves, before), loss())[1]
        if name not in ("backward", "forward"):
            ways["a second time"] = lambda: again(grad_output)
            ways["after another"] = lambda: again(0.7)
        ways["after one in vain"] = lambda: (unused(leaves, labels, ids), loss())[1]
        for way, made in ways.items():
            for ours, expected in zip(grads_of(made(), leaves, grad_output), fresh, strict=True):
                assert (ours is None) == (expected is None), way
                if ours is not None:
                    assert_bitwise_equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows,vocab,width,chunk_rows", [
    (130, 3000, 128, None), (300, 5000, 64, None), (300, 2000, 64, 16), (64, 40_000, 96, None), (257, 900, 300, 100)])
def test_the_same_bits_of_larger_heads(rows, vocab, width, chunk_rows, dtype, device):
    """Compares heads with several chunks, 24-bit sums, logits' gradients in borrowed memory, and passes by classes."""
    leaves, labels, ids = example(device, dtype, rows, vocab, width)
    x, w, b, v, r = leaves

    def loss(**options):
        return sparse_ce.linear_cross_entropy(x, w, (ids, v), linear_bias=b, row_weight=r, chunk_rows=chunk_rows,
                                              **options)

    forget()
    fresh = grads_of(loss(), leaves, 0.7)
    total = loss()
    grads_of(total, leaves, 3.0, retain_graph=True)
    for ours, expected in zip(grads_of(total, leaves, 0.7), fresh):
        assert_bitwise_equal(ours, expected)
    first = grads_of(loss(return_entropy=True, return_argmax=True).loss, leaves, 0.7)
    total = loss(return_entropy=True, return_argmax=True).loss
    grads_of(total, leaves, 3.0, retain_graph=True)
    for ours, expected in zip(grads_of(total, leaves, 0.7), first):
        assert_bitwise_equal(ours, expected)


@pytest.mark.parametrize("before", [None, 0.7, "in vain"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("backward", "forward")])
def test_gradcheck_passes_after_anything(name, before, device):
    leaves, labels, ids = example(device, torch.float64, 5, 7, 3)
    leaves[3:] = [t.detach().double().requires_grad_() for t in leaves[3:]]
    forget()
    if before == "in vain":
        unused(leaves, labels, ids)
    elif before is not None:
        grads_of(LOSSES[name](*leaves, labels, ids), leaves, before)
    assert torch.autograd.gradcheck(lambda *leaves: LOSSES[name](*leaves, labels, ids), leaves, atol=1e-6)
