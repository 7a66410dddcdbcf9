"""Tests the smallest and the largest sizes: rows times vocabulary beyond 2^31, on memory that is expanded or sparse."""

import ctypes
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forked
import sparse_ce
from cases import Draw, devices
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, cross_entropy

ops = torch.ops.sparse_ce


@pytest.mark.parametrize("form", ["labels", "topk", "csr"])
def test_a_masked_row_may_hold_any_label(form, device):
    """Checks labels out of range in both directions, and that one in an active row still is an error."""
    x = torch.randn(4, 7, device=device, requires_grad=True)
    labels = torch.tensor([3, 99, -7, 5], device=device)
    mask = torch.tensor([True, False, False, True], device=device)

    def target(labels, mask):
        if form == "labels":
            return SparseTarget.from_index(labels, row_mask=mask)
        if form == "topk":
            return SparseTarget.from_topk(labels[:, None], torch.ones(4, 1, device=device), row_mask=mask)
        offsets = torch.arange(5, device=device)
        return SparseTarget.from_jagged(labels, torch.ones(4, device=device), offsets, row_mask=mask)

    loss = cross_entropy(x, target(labels, mask), reduction="none")
    expected = F.cross_entropy(x, torch.where(mask, labels, -100), reduction="none")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), x), torch.autograd.grad(expected.sum(), x))
    if x.is_cpu:
        with pytest.raises(RuntimeError, match="got 99 in row 1"):
            cross_entropy(x, target(labels, mask | (labels == 99)))


# ------------------------------------------------------------------------------------------------------- smallest sizes


@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.1, z_loss=0.1, softcap=3.0)], ids=["plain", "all"])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_topk_of_no_entries(rows, options, device):
    """Checks K = 0, an all-zero target whose rows are active."""
    target = torch.zeros(rows, 0, dtype=torch.int64, device=device), torch.zeros(rows, 0, device=device)
    x, y = (torch.randn(rows, 5, device=device).requires_grad_() for _ in range(2))
    with torch.no_grad():
        y.copy_(x)
    values = target[1].requires_grad_()
    loss = cross_entropy(x, (target[0], values), **options)
    z = 3 * torch.tanh(y / 3) if options else y
    share, z_loss = options.get("label_smoothing", 0), options.get("z_loss", 0)
    expected = (-share * torch.log_softmax(z, 1).mean(1) + z_loss * torch.logsumexp(z, 1).square()).sum() / max(rows, 1)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert values.grad is None or values.grad.shape == (rows, 0)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_one_class(reduction, device):
    """Checks that loss and gradient are 0 whatever the logit, and that lse is the logit."""
    x = torch.tensor([[3.0], [-1000.0], [1e30]], device=device, requires_grad=True)
    for target in (torch.zeros(3, dtype=torch.int64, device=device), torch.ones(3, 1, device=device).to_sparse(),
                   torch.ones(3, 1, device=device).to_sparse_csr()):
        loss, lse = cross_entropy(x, target, reduction=reduction, return_lse=True, label_smoothing=0.1)
        assert loss.eq(0).all()
        assert_bitwise_equal(lse.detach(), x.detach()[:, 0])
        grad, = torch.autograd.grad([loss, lse], x, [torch.randn_like(loss), torch.tensor([1.0, 2, 3], device=device)])
        torch.testing.assert_close(grad[:, 0], torch.tensor([1.0, 2, 3], device=device), rtol=1e-5, atol=1e-5)


def test_one_row_of_one_class_and_no_entries(device):
    x = torch.randn(1, 1, device=device, requires_grad=True)
    for target in (torch.zeros(1, 1, device=device).to_sparse(), torch.zeros(1, 1, device=device).to_sparse_csr()):
        cross_entropy(x, target).backward()
        assert x.grad.eq(0).all()


def test_no_leading_rows_in_several_dimensions(device):
    x = torch.randn(2, 0, 3, 5, device=device, requires_grad=True)
    labels = torch.zeros(2, 0, 3, dtype=torch.int64, device=device)
    for target in (labels, (labels[..., None].expand(2, 0, 3, 4), torch.zeros(2, 0, 3, 4, device=device)),
                   SparseTarget.from_index(labels).shift(1), torch.zeros(2, 0, 3, 5, device=device).to_sparse()):
        loss, lse = cross_entropy(x, target, reduction="none", return_lse=True)
        assert loss.shape == lse.shape == (2, 0, 3)
        mean = cross_entropy(x, target)
        assert mean == 0
        mean.backward()
        assert x.grad.shape == x.shape


def test_more_entries_than_classes(device):
    """Checks rows of ten thousand entries over three classes."""
    draw = Draw(device)
    indices, values = draw.integers(3, 2, 10000), draw.uniform(2, 10000, low=-0.5, dtype=torch.float64)
    x = draw.normal(2, 3, dtype=torch.float64).requires_grad_()
    dense = torch.zeros(2, 3, dtype=torch.float64, device=device).scatter_add(1, indices, values)
    grad_output = draw.normal(2, dtype=torch.float64)
    loss, expected = cross_entropy(x, (indices, values), reduction="none"), F.cross_entropy(x, dense, reduction="none")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x, grad_output), torch.autograd.grad(expected, x, grad_output))


def test_one_row_holds_every_entry(device):
    draw = Draw(device)
    dense = torch.zeros(50, 3000, device=device)
    dense[17] = draw.uniform(3000)
    x = draw.normal(50, 3000)
    expected = F.cross_entropy(x, dense, reduction="none")
    for target in (dense.to_sparse(), dense.to_sparse_csr()):
        torch.testing.assert_close(cross_entropy(x, target, reduction="none"), expected)


# -------------------------------------------------------------------------------------------------------- largest sizes

LARGE = [(2**31 // 131072 + 2, 131072), (2**32 // 1048576 + 2, 1048576)]  # (rows, vocab): elements beyond 2^31 and 2^32


def expanded(rows, vocab, device):
    """Returns logits (rows, vocab) that expand one row with stride 0, and the loss of each label in it."""
    row = torch.linspace(-2, 2, vocab, device=device).half()
    return row.expand(rows, vocab), -torch.log_softmax(row.double(), 0)


@pytest.mark.slow
@pytest.mark.parametrize("rows,vocab", LARGE, ids=str)
def test_18_rows_whose_logits_begin_beyond_two_to_the_31(rows, vocab, device, threads):
    """Checks forward and the values' gradient at N V around 2^31 and 2^32, up to the last row (pytorch#111484,
    apex)."""
    threads(2)
    logits, row_loss = expanded(rows, vocab, device)
    assert logits.numel() > 2**31
    labels = torch.full((rows,), -100, device=device)
    few = torch.tensor([0, rows // 2, rows - 2, rows - 1], device=device)  # the others are ignored and cost nothing
    labels[few] = torch.tensor([0, 7, vocab - 2, vocab - 1], device=device)
    loss, lse = cross_entropy(logits, labels, reduction="none", return_lse=True)
    torch.testing.assert_close(loss[few].double(), row_loss[labels[few]], rtol=1e-5, atol=1e-5)
    assert loss.ne(0).sum() == 4 and lse.ne(0).sum() == 4
    values = torch.ones(rows, 1, device=device, requires_grad=True)
    cross_entropy(logits, (labels[:, None], values), reduction="sum").backward()
    torch.testing.assert_close(values.grad[few, 0].double(), row_loss[labels[few]], rtol=1e-5, atol=1e-5)
    assert values.grad.ne(0).sum() == 4


@pytest.mark.slow
def test_18_rows_far_apart_in_memory(device, threads):
    """Checks a row stride that puts the last of a few rows beyond 2^31 elements. An in-place backward writes to the
    rows alone, and the memory between them is never touched."""
    threads(2)
    rows, vocab, stride = 3, 1000, 2**30 + 2**29 + 3  # row 2 begins at element 3 * 2^30 + 6
    storage = torch.empty(stride * 2 + vocab, dtype=torch.float16, device=device)
    logits = storage.as_strided((rows, vocab), (stride, 1))
    near = torch.randn(rows, vocab, device=device).half()
    logits.copy_(near)
    labels = torch.tensor([3, 500, 999], device=device)
    results = []
    for x, inplace in ((near, False), (logits, False), (logits, True)):
        x = x.detach().requires_grad_()
        loss = cross_entropy(x, labels, reduction="none", inplace="backward" if inplace else False)
        grad, = torch.autograd.grad(loss, x, torch.tensor([1.0, -2.0, 3.0], device=device))
        results.append((loss.detach(), grad.clone()))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert_bitwise_equal(a, b)
    assert_bitwise_equal(logits, results[0][1])  # written to the rows' own memory


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
def test_18_a_gradient_of_more_than_two_to_the_31_elements(gpu):
    """Allocates 4 GiB in float16, if that much memory is free."""
    rows, vocab = LARGE[0]
    logits, row_loss = expanded(rows, vocab, gpu)
    labels = torch.full((rows,), -100, device=gpu)
    labels[[0, rows - 1]] = torch.tensor([5, vocab - 1], device=gpu)
    grad_loss = torch.zeros(rows, device=gpu)
    grad_loss[[0, rows - 1]] = torch.tensor([2.0, -3.0], device=gpu) * 4096
    lse = cross_entropy(logits, labels, reduction="none", return_lse=True)[1]
    grad = ops.backward(grad_loss, None, logits, lse, None, labels)
    assert grad.shape == (rows, vocab)
    for r, label, g in ((0, 5, 2.0), (rows - 1, vocab - 1, -3.0)):
        expected = torch.exp(-row_loss)
        expected[label] -= 1
        torch.testing.assert_close(grad[r].double(), 4096 * g * expected, rtol=2e-3, atol=1e-4)
    assert grad[1:3].eq(0).all() and grad[rows // 2].eq(0).all() and grad[-3:-1].eq(0).all()


def test_18_indices_near_the_ends_of_their_types(device):
    """Checks that int32 offsets and indices are widened before they are multiplied."""
    vocab = 2**20
    x = torch.zeros(2, vocab, device=device)
    x[1, -1] = 5
    target = SparseTarget.from_jagged(torch.tensor([vocab - 1, vocab - 1], device=device).int(), None,
                                      torch.tensor([0, 1, 2], device=device).int())
    expected = F.cross_entropy(x.double(), torch.tensor([vocab - 1, vocab - 1], device=device), reduction="none")
    torch.testing.assert_close(cross_entropy(x, target, reduction="none").double(), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------- memory of gradients on the CPU


def _mapping_of(tensor):
    """Returns the fields in KiB of the /proc/self/smaps mapping that holds a CPU tensor."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
        if mapping:
            begin, end = (int(address, 16) for address in mapping.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return {name: int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB$", mapping, re.M)}
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="smaps and madvise are Linux")
@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="gradients come from torch's allocator")
def test_a_large_gradient_after_the_system_took_its_memory_back():
    """Checks the next gradient and its huge pages: freed gradients stay mapped until the system reclaims them
    (MADV_FREE)."""
    x, labels = torch.randn(64, 65536), torch.arange(64)
    loss, lse = ops.forward(x, labels)

    def gradient():
        return ops.backward(torch.ones(64), None, x, lse, None, labels)

    others = [gradient(), gradient()]  # the blocks that earlier tests freed, either of which could be next
    grad = gradient()
    first, address = grad.clone(), grad.data_ptr()
    huge = _mapping_of(grad)["AnonHugePages"]  # 0 if the system has no huge pages
    del grad
    again = gradient()
    assert again.data_ptr() == address
    del again
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(first.nbytes), 21)  # MADV_PAGEOUT
    grad = gradient()
    assert_bitwise_equal(grad, first)
    assert _mapping_of(grad)["AnonHugePages"] >= huge / 2
    assert all(other.data_ptr() != grad.data_ptr() for other in others)


@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="gradients come from torch's allocator")
def test_a_larger_gradient_does_not_get_the_block_of_a_smaller_one():
    addresses = []
    for vocab in (32768, 131072):
        x, labels = torch.zeros(64, vocab), torch.arange(64)
        loss, lse = ops.forward(x, labels)
        grad = ops.backward(torch.ones(64), None, x, lse, None, labels)
        addresses.append(grad.data_ptr())
        torch.testing.assert_close(grad.sum(1), torch.zeros(64), rtol=0, atol=1e-4)
        del grad
    assert addresses[0] != addresses[1]


ORDINARY = """
import hashlib, torch, sparse_ce
from torch.profiler import ProfilerActivity, profile
torch.manual_seed(0)
x = torch.randn(64, 65536, requires_grad=True)
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
    grad, = torch.autograd.grad(sparse_ce.cross_entropy(x, torch.arange(64)), x)
largest = max(e.self_cpu_memory_usage for e in seen.events())
digest = hashlib.sha256(grad.clone().numpy().tobytes()).hexdigest()
try:
    grad.untyped_storage().resize_(0)
    resized = True
except RuntimeError:
    resized = False
print(resized, largest >= x.nbytes, digest)
"""


@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="gradients come from torch's allocator")
def test_without_the_block_cache_a_gradient_is_an_ordinary_tensor(tmp_path):
    results = []
    for wish in ("0", "1"):
        package = os.path.dirname(os.path.dirname(os.path.abspath(sparse_ce.__file__)))
        done = forked.run("-c", ORDINARY, cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": package, "SPARSE_CE_BLOCK_CACHE": wish})
        assert done.returncode == 0, done.stderr
        results.append(done.stdout.split())
    assert results[0][:2] == ["True", "True"]
    assert results[0][2] == results[1][2]
