"""Compares ``segment_softmax`` and ``segment_log_softmax`` with dense softmaxes of each segment."""

import pytest
import torch

from cases import DTYPES, Draw
from close import assert_close_to_float64
from sparse_ce import reference, segment_log_softmax, segment_softmax

FUNCTIONS = {"softmax": (segment_softmax, torch.softmax), "log_softmax": (segment_log_softmax, torch.log_softmax)}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def dense(function, x, index):
    """Returns ``function`` of each segment alone, differentiable."""
    out = torch.zeros_like(x)
    for s in index.unique().tolist():
        out = torch.where((index == s).view(-1, *(1,) * (x.dim() - 1)), out.index_copy(
            0, (index == s).nonzero()[:, 0], function(x[index == s], 0)), out)
    return out


@each_function
@pytest.mark.parametrize("trailing", [(), (4,), (2, 3), (1,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, trailing, name, device):
    ours, plain = FUNCTIONS[name]
    draw = Draw(device)
    index = draw.integers(7, 60).to(device) * 2  # every other segment is empty
    x = (draw.normal(60, *trailing) * 8).to(dtype)
    grad_output = draw.normal(60, *trailing).to(dtype)
    ordered, order = torch.sort(index, stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(15, device=device))
    for given, entries in (({"index": index}, x), ({"index": index.int(), "num_segments": 20}, x),
                           ({"index": ordered}, x[order]), ({"offsets": offsets}, x[order])):
        at = index if "index" in given and given["index"] is not ordered else ordered
        leaf, exact_leaf, peer_leaf = (entries.detach().to(t).requires_grad_() for t in (dtype, torch.float64, dtype))
        y, exact = ours(leaf, **given), dense(plain, exact_leaf, at)
        peer = dense(plain, peer_leaf.to(torch.promote_types(dtype, torch.float32)), at).to(dtype)
        assert y.dtype == dtype and y.shape == x.shape
        assert_close_to_float64(y, peer, exact)
        grads = [torch.autograd.grad(a, b, grad_output.to(a.dtype))[0] for a, b in (
            (y, leaf), (peer, peer_leaf), (exact, exact_leaf))]
        assert_close_to_float64(*grads)


@each_function
def test_parallel_edges_keep_their_own_values(name, device):
    """Checks this because a sparse tensor would sum two edges between the same nodes."""
    x = torch.tensor([1.0, 1.0, 1.0, 1.0], device=device)
    y = FUNCTIONS[name][0](x, index=torch.tensor([0, 0, 0, 0], device=device))
    torch.testing.assert_close(y, FUNCTIONS[name][1](x, 0))


@each_function
def test_no_elements_no_segments_and_peaks(name, device):
    ours, plain = FUNCTIONS[name]
    nothing = torch.zeros(0, 3, device=device, requires_grad=True)
    for given in ({"index": torch.zeros(0, dtype=torch.int64, device=device)},
                  {"offsets": torch.zeros(4, dtype=torch.int32, device=device)},
                  {"index": torch.zeros(0, dtype=torch.int32, device=device), "num_segments": 5}):
        y = ours(nothing, **given)
        assert y.shape == (0, 3) and torch.autograd.grad(y.sum(), nothing)[0].shape == (0, 3)
    x = torch.tensor([1e4, -1e4, 3e38, -torch.inf, 0.0], device=device)
    index = torch.tensor([0, 0, 1, 1, 2], device=device)
    torch.testing.assert_close(ours(x, index=index), torch.cat([plain(x[:2], 0), plain(x[2:4], 0), plain(x[4:], 0)]))


X, AT = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize("call,error,message", [
    (lambda: segment_softmax([1.0], index=AT), TypeError, "input must be a tensor, got list"),
    (lambda: segment_softmax(X.long(), index=AT), TypeError, "input must be of a floating dtype, got torch.int64"),
    (lambda: segment_softmax(torch.tensor(1.0), index=AT), ValueError, r"input must be \(E,\) or \(E, ...\)"),
    (lambda: segment_softmax(X), ValueError, "offsets or index must be given"),
    (lambda: segment_softmax(X, index=AT, offsets=AT), ValueError, "offsets or index must be given, but not both"),
    (lambda: segment_softmax(X, offsets=AT[:2] * 4, num_segments=1), ValueError, "num_segments must be None"),
    (lambda: segment_softmax(X, index=AT[:3]), ValueError, r"index must be \(4,\), got \[3\]"),
    (lambda: segment_softmax(X, index=AT.float()), TypeError, "index must be of an integer dtype, got torch.float32"),
    (lambda: segment_softmax(X, index=AT - 1), RuntimeError, r"index must be in \[0, ...\), got -1"),
    (lambda: segment_softmax(X.to_sparse(), index=AT), TypeError, "input must be dense, got torch.sparse_coo"),
    (lambda: segment_softmax(X, index=AT, num_segments="2"), ValueError, "num_segments must be an integer .* got '2'"),
    (lambda: segment_softmax(X, index=AT, num_segments=2.5), ValueError, "num_segments must be an integer .* got 2.5"),
    (lambda: segment_softmax(X, index=AT, num_segments=-1), ValueError, "num_segments must be an integer .* got -1"),
    (lambda: segment_softmax(X, index=AT, num_segments=1), RuntimeError, r"index must be in \[0, 1\), got 1"),
    (lambda: segment_softmax(X, offsets=AT.view(2, 2)), ValueError, r"offsets must be \(segments \+ 1,\), got"),
    (lambda: segment_softmax(X, offsets=torch.tensor([0, 3])), RuntimeError, "offsets"),
    (lambda: segment_softmax(X, offsets=torch.tensor([0, 3, 1, 4])), RuntimeError, "offsets"),
])
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("width", [1, 3, 16, 21, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_side_by_side_in_segments_of_every_length(dtype, width, ordered, log, threads, device):
    """Checks lengths below and above one block of additions. Any number of threads gives the same bits."""
    draw, lengths = Draw(device), torch.tensor([0, 1, 2, 31, 33, 0, 700, 1500, 3, 0])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    count = int(lengths.sum())
    order = torch.randperm(count, generator=draw.generator).to(device) if ordered else None
    values = (3 * draw.normal(count, width) + (100 if dtype != torch.float16 else 10)).to(dtype)
    grad = draw.normal(count, width).to(dtype)
    ops, results = torch.ops.sparse_ce, []
    for number in (1, 2, 3):
        threads(number)
        output = ops.sparse_softmax(values, offsets, order, log)
        results.append((output, ops.sparse_softmax_backward(grad, output, offsets, order, log)))
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1])
    output, gradient = results[0]
    function = torch.log_softmax if log else torch.softmax
    rows = torch.arange(count, device=device) if order is None else order
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        row = rows[begin:end]
        assert_close_to_float64(output[row], function(values[row], 0), function(values[row].double(), 0))
        exact, peer = (reference.sparse_softmax_backward(
            grad[row].to(t), output[row].to(t), torch.tensor([0, end - begin], device=device), None, log)
            for t in (torch.float64, dtype))
        if end - begin > 1:  # a single entry's gradient is 0 except for rounding
            assert_close_to_float64(gradient[row], peer, exact)


def test_more_segments_than_sixteen_bits_count(device):
    """Checks this because their order is computed in another way."""
    draw = Draw(device)
    index = (draw.integers(100_000, 70_000) // 3 * 3).to(device)
    x = draw.normal(70_000)
    by_index = segment_softmax(x, index=index)
    sums = torch.zeros(100_000, device=device).index_add(0, index, by_index)
    torch.testing.assert_close(sums[index], torch.ones_like(x))
    far = torch.tensor([5, 1 << 40, 5], device=device)
    torch.testing.assert_close(segment_softmax(torch.zeros(3, device=device), index=far),
                               torch.tensor([0.5, 1.0, 0.5], device=device))
