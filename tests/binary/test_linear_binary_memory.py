"""Tests the memory of binary cross entropy through a head: below that of the logits, from the allocator's records."""

import pytest
import torch

import sparse_ce
from cases import Draw
from recorded_memory import peak
from sparse_ce import binary_cross_entropy_with_logits, linear_binary_cross_entropy
from sparse_ce.ops.head import binary_cross_entropy as op

ROWS, CLASSES, WIDTH = 256, 4096, 32
LOGITS = ROWS * CLASSES * 4
pytestmark = pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="the formula of the CPU")


def gradients(loss, leaves):
    return torch.autograd.grad(loss.sum(), leaves)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", [False, True])
def test_the_logits_of_one_block_exist_at_a_time(ignored, dtype, reduction, frozen):
    draw = Draw("cpu")
    x, w = draw.normal(ROWS, WIDTH).to(dtype).requires_grad_(), draw.normal(CLASSES, WIDTH).to(dtype)
    leaves = [x] if frozen else [x, w.requires_grad_()]
    labels = draw.integers(CLASSES, ROWS)
    if ignored:
        labels[::5] = -100
    for blocks in (8, 32):
        def call(size=CLASSES // blocks):
            return gradients(linear_binary_cross_entropy(x, w, labels, reduction=reduction, chunk_classes=size), leaves)
        call()
        beyond = peak(call) - sum(t.numel() * t.element_size() for t in leaves)
        # Hidden states of active rows and their float32 gradient, the block's weight as float32, and small vectors.
        allowed = LOGITS // blocks + 3 * x.numel() * 4 + CLASSES // blocks * WIDTH * 8 + (112 << 10)
        assert beyond <= allowed, f"{beyond} bytes, allowed {allowed}"
        assert allowed < LOGITS / 4


def test_blocks_have_a_limited_size_by_default(monkeypatch):
    monkeypatch.setattr(op, "_LOGITS_BYTES", 1 << 18)
    monkeypatch.setattr(op, "_LEAST_CLASSES", 16)
    draw = Draw("cpu")
    x, w = draw.normal(2 * ROWS, WIDTH).requires_grad_(), draw.normal(CLASSES, WIDTH).requires_grad_()
    labels = draw.integers(CLASSES, 2 * ROWS)

    def call():
        return gradients(linear_binary_cross_entropy(x, w, labels), [x, w])

    call()
    beyond = peak(call) - sum(t.numel() * t.element_size() for t in (x, w))
    assert beyond <= (1 << 18) + 3 * x.numel() * 4 + (128 << 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_need_their_gradient_and_in_place_nothing(dtype):
    x, labels = Draw("cpu").normal(ROWS, CLASSES).to(dtype).requires_grad_(), Draw("cpu").integers(CLASSES, ROWS)
    size = x.numel() * x.element_size()
    for inplace, logits in ((False, 1), ("backward", 0), ("forward", 0)):
        made = x * 1

        def call(inplace=inplace, made=made):
            return gradients(binary_cross_entropy_with_logits(made, labels, inplace=inplace), [made])
        assert peak(call) <= logits * size + (64 << 10)
