"""Tests that results are bitwise equal for any number of threads, more than rows and processors included.

The linear head is excluded, because its GEMMs are the BLAS's.
"""

import pytest
import torch

import sparse_ce
from cases import Draw
from close import assert_bitwise_equal

COUNTS = (1, 2, 3, 8, 17, 64)


def loss(rows, vocab, dtype, strided=False, k=9, **options):
    draw = Draw("cpu")
    x = (3 * draw.normal(vocab, rows)).to(dtype).t() if strided else (3 * draw.normal(rows, vocab)).to(dtype)
    ids, values = draw.integers(vocab, rows, k), draw.uniform(rows, k, low=0.05)

    def run():
        leaf = x.detach().requires_grad_()
        for reduction in ("mean", "none"):  # gradients computed with the loss and after it
            made = sparse_ce.cross_entropy(leaf, (ids, values), reduction=reduction, return_lse=True, **options)
            yield from (*made, torch.autograd.grad(made[0].sum(), leaf, retain_graph=True)[0])
    return run


def log_probs(rows, vocab, dtype):
    draw = Draw("cpu")
    x, ids = (3 * draw.normal(rows, vocab)).to(dtype).requires_grad_(), draw.integers(vocab, rows, 9)

    def run():
        out = sparse_ce.selected_log_probs(x, ids, return_entropy=True, return_log_tail=True)
        yield from (out.log_probs, out.lse, out.entropy, out.log_tail)
        yield from torch.autograd.grad(out.log_probs.sum() + out.entropy.sum() + out.log_tail.sum(), x)
        found = sparse_ce.topk_log_probs(x.detach(), 9)
        yield from (found.indices, found.values)
    return run


def sparse_softmax(entries, log):
    values, offsets = Draw("cpu").normal(entries), torch.tensor([0, 3, entries - 40, entries])

    def run():
        y = torch.ops.sparse_ce.sparse_softmax(values, offsets, None, log)
        yield y
        yield torch.ops.sparse_ce.sparse_softmax_backward(values, y, offsets, None, log)
    return run


def masked_mean(rows, columns, dim):
    x, mask = Draw("cpu").normal(rows, columns).requires_grad_(), Draw("cpu").uniform(rows, columns) > 0.5

    def run():
        mean = sparse_ce.masked_mean(x, mask, dim)
        yield mean
        yield from torch.autograd.grad(mean.sum(), x)
    return run


CALLS = {
    **{f"loss {rows} x {vocab} {str(dtype)[6:]}": loss(rows, vocab, dtype)
       for rows, vocab in ((2, 70_001), (40, 3001), (3000, 10)) for dtype in (torch.float32, torch.bfloat16)},
    "smoothed loss": loss(70, 5000, torch.float32, label_smoothing=0.1, softcap=9.0, weight=torch.rand(5000)),
    **{f"strided loss {rows} x {vocab}": loss(rows, vocab, torch.float32, strided=True)
       for rows, vocab in ((600, 2000), (1500, 21))},
    **{f"log-probabilities {rows} x {vocab}": log_probs(rows, vocab, torch.float32)
       for rows, vocab in ((2, 70_001), (300, 500))},
    **{f"sparse softmax {entries}": sparse_softmax(entries, log) for entries, log in ((200_000, True), (500, False))},
    **{f"masked mean {dim}": masked_mean(300, 700, dim) for dim in (None, 0, 1)},
}


@pytest.mark.parametrize("call", CALLS)
def test_any_number_of_threads_gives_the_same_bits(call, threads):
    results = []
    for count in COUNTS:
        threads(count)
        results.append([t.detach() for t in CALLS[call]()])
    for result in results[1:]:
        for found, expected in zip(result, results[0]):
            assert_bitwise_equal(found, expected)
