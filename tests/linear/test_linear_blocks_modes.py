"""Tests heads whose frozen weight is given in blocks: dtypes, modes, memory, and what raises an error."""


import pytest
import torch
from torch.utils.checkpoint import checkpoint

import recorded_memory
import sparse_ce
from cases import Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import (
    D,
    InBlocks,
    V,
    head_of_blocks,
    labels_of,
    make_blocks_small,
    way_of_products,
)
from sparse_ce import (
    linear_cross_entropy,
    linear_distillation_loss,
    linear_topk_log_probs,
)
from sparse_ce.ops import instruction_set
from sparse_ce.ops.head import products as head_products


@pytest.fixture
def head(device, monkeypatch):
    return head_of_blocks(device, monkeypatch)


# ----------------------------------------------------------------------------------------------------- dtypes and modes

@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes_are_as_close_to_float64_as_a_tensor(dtype, logits_dtype, weight_dtype, device, monkeypatch):
    draw = Draw(device)
    weight_dtype = weight_dtype or dtype
    hidden, weight, bias = draw.normal(9, 24).to(dtype), draw.normal(50, 24).to(weight_dtype), draw.normal(50).to(dtype)
    make_blocks_small(monkeypatch, weight)
    labels = draw.integers(50, 9)
    labels[3] = -100
    results = []
    for w, wide in ((InBlocks(weight), False), (weight, False), (weight.double(), True)):
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (hidden, bias)]
        loss = linear_cross_entropy(leaves[0], w, labels, linear_bias=leaves[1], reduction="sum",
                                    logits_dtype=logits_dtype)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for ours, peer, exact in zip(*results):
        assert_close_to_float64(ours, peer, exact.detach(), arithmetic=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_autocast(dtype, device, monkeypatch):
    draw = Draw(device)
    hidden, weight, labels = draw.normal(6, 16), draw.normal(40, 16).to(dtype), draw.integers(40, 6)
    make_blocks_small(monkeypatch, weight)
    results = []
    for w in (InBlocks(weight), weight):
        x = hidden.clone().requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = linear_cross_entropy(x, w, labels)
        loss.backward()
        results.append((loss.detach(), x.grad))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
        assert ours.dtype == expected.dtype


def test_checkpointing_and_a_second_backward(head, device):
    hidden, weight, bias = head
    labels, x = labels_of(device), hidden.clone().requires_grad_()
    loss = linear_cross_entropy(x, InBlocks(weight), labels)
    first, = torch.autograd.grad(loss, x, retain_graph=True)
    second, = torch.autograd.grad(loss, x)
    assert_bitwise_equal(first, second)
    blocks = InBlocks(weight)
    inner = checkpoint(lambda x: linear_cross_entropy(x, blocks, labels), x, use_reentrant=False)
    assert_bitwise_equal(torch.autograd.grad(inner, x)[0], first)
    blocks.requested.clear()
    with torch.autograd.graph.save_on_cpu():  # frees memory until backward, so forward computes no gradient
        offloaded = linear_cross_entropy(x, blocks, labels)
    assert blocks.requested == [(0, 16), (16, 32), (32, 37)]
    assert_bitwise_equal(torch.autograd.grad(offloaded, x)[0], first)


def test_compiled_code_breaks_the_graph(head, device):
    hidden, weight, bias = head
    labels, blocks = labels_of(device), InBlocks(weight)

    def f(x):
        return linear_cross_entropy(x * 2, blocks, labels, linear_bias=bias) * 3

    def topk(x):
        return linear_topk_log_probs(x * 2, blocks, 3).indices + 1

    results = []
    for run in (f, torch.compile(f, backend="aot_eager")):
        x = hidden.clone().requires_grad_()
        loss = run(x)
        loss.backward()
        results.append((loss.detach(), x.grad))
    for eager, compiled in zip(*results):
        assert_bitwise_equal(eager, compiled)
    assert torch.equal(torch.compile(topk, backend="aot_eager")(hidden), topk(hidden))
    torch._dynamo.reset()


@pytest.mark.parametrize("reduction, requests", [("mean", 2), ("none", 3)])
@pytest.mark.parametrize("chunk_rows, chunks", [(None, 1), (90, 4)])
def test_each_chunk_of_rows_computes_the_blocks(chunk_rows, chunks, reduction, requests, device, monkeypatch):
    """Checks that a scalar loss computes them twice, for the logits and the gradient, and others three times."""
    draw = Draw(device)
    weight, hidden = InBlocks(draw.normal(40, 3)), draw.normal(280, 3).requires_grad_()
    make_blocks_small(monkeypatch, weight.weight)
    loss = linear_cross_entropy(hidden, weight, draw.integers(40, 280), chunk_rows=chunk_rows, reduction=reduction)
    loss.sum().backward()
    assert weight.requested == [(0, 16), (16, 32), (32, 40)] * requests * chunks


@pytest.mark.parametrize("dtype, logits_bytes", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_memory_does_not_hold_the_weight(dtype, logits_bytes, device, monkeypatch):
    if device != "cpu" or instruction_set() == "emulated CUDA":
        pytest.skip("reads the records of the CPU's allocator, for the products of CPUs")
    if dtype == torch.bfloat16 and way_of_products() == "float32":
        logits_bytes = 4
    rows, width, vocab = 16, 128, 20000
    monkeypatch.setattr(head_products, "_WEIGHT_BYTES", 1 << 17)
    integers = torch.randint(-127, 128, (vocab, width), dtype=torch.int8)
    scales = torch.rand(vocab, 1, dtype=dtype) / 99
    hidden, labels = torch.randn(rows, width, dtype=dtype), torch.randint(vocab, (rows,))

    class Int8Weight:
        shape, dtype = integers.shape, scales.dtype

        def block(self, begin, end):
            return integers[begin:end] * scales[begin:end]

    def step():
        x = hidden.clone().requires_grad_()
        loss = linear_cross_entropy(x, Int8Weight(), labels)
        return torch.autograd.grad(loss, x)

    step()
    block = (1 << 17) * (4 if way_of_products() == "float32" else dtype.itemsize) // dtype.itemsize
    expected = rows * vocab * logits_bytes + 2 * (1 << 17) + block + rows * (64 + width * 16)
    assert recorded_memory.peak(step) <= 1.2 * expected < vocab * width * dtype.itemsize
    assert recorded_memory.peak(lambda: linear_topk_log_probs(hidden, Int8Weight(), 4)) <= 1.2 * expected


# ------------------------------------------------------------------------------------------------------------- refusals

class Broken(InBlocks):
    def __init__(self, weight, **changed):
        super().__init__(weight)
        self.change = changed.pop("change", lambda t: t)
        vars(self).update(changed)

    def block(self, begin, end):
        return self.change(super().block(begin, end))


@pytest.mark.parametrize("changed, error, message", [
    (dict(shape=(V,)), ValueError, r"linear_weight.shape must be \(V, D\), got \(37,\)"),
    (dict(shape=(V, D + 1)), ValueError, r"linear_weight must be \(V, 7\) to match input, got \[37, 8\]"),
    (dict(shape=(0, D)), ValueError, "linear_weight must have at least one class"),
    (dict(dtype=torch.int8), TypeError, "linear_weight.dtype must be a floating dtype, got torch.int8"),
    (dict(dtype=torch.float32), TypeError, r"block\(0, 32\) must be a tensor \[32, 7\] of torch.float32"),
    (dict(requires_grad=True), ValueError, "linear_weight must not require grad if it is given in blocks"),
    (dict(change=lambda t: t[1:]), TypeError, r"block\(0, 16\) must be a tensor \[16, 7\] of .*, got a Tensor"),
    (dict(change=lambda t: t.tolist()), TypeError, r"block\(0, 16\) must be a tensor \[16, 7\]"),
    (dict(change=lambda t: t.to("meta")), RuntimeError, "block must be on the device of input"),
])
def test_invalid_blocks(changed, error, message, head, device):
    hidden, weight, _ = head
    with pytest.raises(error, match=f"sparse_ce: .*{message}"):
        linear_cross_entropy(hidden, Broken(weight, **changed), labels_of(device))


def test_what_blocks_do_not_support(head, device):
    hidden, weight, bias = head
    blocks, labels = InBlocks(weight), labels_of(device)
    for run, message in (
            (lambda: sparse_ce.candidate_logits(hidden, blocks, labels),
             "linear_weight must be a tensor, got InBlocks in blocks, which this function does not support"),
            (lambda: linear_cross_entropy(hidden, blocks, labels, group=object()),
             "group does not support a linear_weight in blocks"),
            (lambda: linear_distillation_loss(hidden, blocks, labels, group=object()),
             "group does not support a linear_weight in blocks"),
            (lambda: linear_cross_entropy(hidden, [1], labels), "linear_weight must be a tensor, got list"),
            (lambda: torch.func.grad(lambda x: linear_cross_entropy(x, blocks, labels))(hidden),
             "linear_weight must be a tensor under torch.func"),
            (lambda: torch.func.vmap(lambda x: linear_topk_log_probs(x, blocks, 2).values)(hidden),
             "linear_weight must be a tensor under torch.func"),
            (lambda: linear_cross_entropy(hidden, blocks, torch.full_like(labels, V)),
             r"target must have indices in \[0, 37\)")):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            run()
    x = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(x, blocks, labels, reduction="none")
    with pytest.raises(RuntimeError, match="create_graph must be False if linear_weight is given in blocks"):
        torch.autograd.grad(loss.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is_grads_batched must be False if linear_weight is given in blocks"):
        torch.autograd.grad(loss, x, torch.ones(3, *loss.shape, dtype=loss.dtype), is_grads_batched=True)
