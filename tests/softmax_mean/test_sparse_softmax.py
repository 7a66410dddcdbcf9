"""Compares ``log_softmax`` of sparse tensors and its ops with dense softmax in float64, with -inf at unstored
elements."""

import os

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import sparse_ce
from cases import DTYPES, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from sparse_ce import log_softmax, reference
from sparse_ce.functional import sparse_values as patterns

ops = torch.ops.sparse_ce


def pattern(draw, *shape, share=0.4):
    """Returns a bool pattern with an empty row and an empty column."""
    stored = draw.uniform(*shape) < share
    stored[..., 1, :] = False
    stored[..., 2] = False
    return stored


def coo(stored, values, coalesced=True):
    """Returns a COO tensor. ``values`` has the shape of ``stored``, optionally followed by dense dimensions."""
    index, shape = stored.nonzero().T, values.shape
    values = values[stored]
    if coalesced:
        return torch.sparse_coo_tensor(index, values, shape, is_coalesced=True)
    # Each entry is stored twice, in parts that add up exactly.
    order = torch.randperm(len(values), device=values.device)
    index, values = index[:, order], values[order]
    return torch.sparse_coo_tensor(torch.cat([index, index], 1), torch.cat([values * 0.25, values * 0.75]), shape)


def csr(stored, values, index_dtype=torch.int64):
    crow = torch.nn.functional.pad(stored.sum(-1).cumsum(-1), (1, 0)).to(index_dtype)
    columns = stored.nonzero()[:, -1].to(index_dtype).view(*stored.shape[:-2], -1)
    dense = values.shape[stored.dim():]
    return torch.sparse_csr_tensor(crow, columns, values[stored].view(*columns.shape, *dense), values.shape)


def batched(draw, *shape):
    """Returns a pattern with the same number of entries in every batch, as CSR requires."""
    stored = torch.zeros(shape, dtype=torch.bool)
    for batch in stored.view(-1, *shape[-2:]):
        batch.view(-1)[torch.randperm(batch.numel(), generator=draw.generator)[:batch.numel() // 3]] = True
    return stored.to(draw.device)


FORMS = {
    "coo": lambda draw: (pattern(draw, 6, 9), (), coo),
    "coo, three dimensions": lambda draw: (pattern(draw, 4, 5, 6), (), coo),
    "coo, uncoalesced": lambda draw: (pattern(draw, 4, 5, 6), (), lambda s, v: coo(s, v, coalesced=False)),
    "coo, hybrid": lambda draw: (pattern(draw, 5, 6), (3, 2), coo),
    "coo, one dimension": lambda draw: (draw.uniform(30) < 0.5, (), coo),
    "csr": lambda draw: (pattern(draw, 6, 9), (), csr),
    "csr, int32": lambda draw: (pattern(draw, 6, 9), (), lambda s, v: csr(s, v, torch.int32)),
    "csr, batches": lambda draw: (batched(draw, 2, 3, 5, 6), (), csr),
    "csr, batches, hybrid": lambda draw: (batched(draw, 2, 5, 6), (4,), csr),
}
DIMENSIONS = [(name, dim) for name in FORMS for dim in range(sum(map(len, (lambda f: (f[0].shape, f[1]))(
    FORMS[name](Draw("cpu"))))))]


def example(form, device, dtype, size=4.0):
    draw = Draw(device)
    stored, dense, build = FORMS[form](draw)
    values = size * draw.normal(*stored.shape, *dense)
    if form == "coo, uncoalesced":
        values = (values * 8).round() / 8
    stored_everywhere = stored.view(*stored.shape, *[1] * len(dense)).expand_as(values)
    return build(stored, values.to(dtype)), stored_everywhere, draw


def coordinates(y):
    """Returns the coordinates of each entry, one index tensor per sparse dimension."""
    if y.layout == torch.sparse_coo:
        return tuple(y.indices())
    crow, columns = y.crow_indices(), y.col_indices()
    batches = columns.shape[:-1]
    rows = [torch.repeat_interleave(torch.arange(len(c) - 1, device=c.device), c.diff())
            for c in crow.reshape(-1, crow.shape[-1])]
    batch = torch.cartesian_prod(*[torch.arange(n, device=crow.device) for n in batches]) if batches else None
    index = [] if batch is None else list(
        batch.reshape(-1, len(batches)).repeat_interleave(columns.shape[-1], 0).T)
    return (*index, torch.cat(rows), columns.reshape(-1).long())


def values_at(dense, y):
    return dense[coordinates(y)].view(y.values().shape)


def with_values(y, values):
    if y.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(y.indices(), values, y.shape, is_coalesced=True)
    return torch.sparse_csr_tensor(y.crow_indices(), y.col_indices(), values, y.shape)


def full(x, stored, dtype):
    """Returns ``x`` as a dense tensor, with -inf at unstored elements."""
    return torch.where(stored, x.to_dense().to(dtype), -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form,dim", DIMENSIONS)
def test_equals_dense_log_softmax_with_minus_infinity_where_nothing_is_stored(form, dim, dtype, device):
    x, stored, draw = example(form, device, dtype)
    exact_x = full(x.detach(), stored, torch.float64).requires_grad_()
    peer_x = full(x.detach(), stored, dtype).requires_grad_()
    grad_output = draw.normal(*x.shape)

    x.requires_grad_()
    y = log_softmax(x, dim)
    assert y.layout == x.layout and y.dtype == dtype and y.shape == x.shape
    exact, peer = (torch.log_softmax(t, dim) for t in (exact_x, peer_x))
    assert_close_to_float64(y.detach().to_dense()[stored], peer[stored], exact[stored])
    assert not y.detach().to_dense()[~stored].any()

    grad, = torch.autograd.grad(y, x, with_values(y.detach(), values_at(grad_output.to(dtype), y.detach())))
    assert grad.layout == x.layout
    exact_grad, = torch.autograd.grad(torch.where(stored, exact, 0.0), exact_x, grad_output.to(dtype).double())
    peer_grad, = torch.autograd.grad(torch.where(stored, peer, 0.0), peer_x, grad_output.to(dtype))
    assert_close_to_float64(grad.to_dense()[stored], peer_grad[stored], exact_grad[stored])


@pytest.mark.parametrize("dim", [0, 1, 2])  # stock's gradient is wrong for a negative one (torch 2.13, 2.14)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_what_stock_does_where_stock_can(dtype, dim, device):
    x, _, draw = example("coo, uncoalesced", device, dtype)
    results = []
    for f in (log_softmax, torch.sparse.log_softmax):
        leaf = x.clone().requires_grad_()
        y = f(leaf, dim)
        grad, = torch.autograd.grad(torch.sparse.sum(y * y), leaf)
        results.append((y.detach().to_dense(), grad.to_dense()))
    for ours, stock in zip(*results):
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("form,dims", [(form, len(draw[0].shape) + len(draw[1])) for form, draw in
                                       ((form, FORMS[form](Draw("cpu"))) for form in FORMS)])
def test_a_negative_dimension_counts_from_the_end(form, dims, device):
    x, _, draw = example(form, device, torch.float64)
    for dim in range(dims):
        grads = []
        for d in (dim, dim - dims):
            y = log_softmax(x.requires_grad_(), d)
            grads += torch.autograd.grad(y.values().sin().sum(), x)
        torch.testing.assert_close(grads[0].values() if x.layout != torch.sparse_coo else grads[0].coalesce().values(),
                                   grads[1].values() if x.layout != torch.sparse_coo else grads[1].coalesce().values())


@pytest.mark.parametrize("form", ["coo", "csr", "coo, hybrid", "csr, batches"])
def test_upstream_gradients_of_every_kind(form, device):
    x, stored, draw = example(form, device, torch.float64)
    dim = stored.dim() - 1 if form != "coo, hybrid" else 1
    leaf = x.clone().requires_grad_()
    y = log_softmax(leaf, dim)
    dense = draw.normal(*x.shape, dtype=torch.float64)
    everywhere = torch.where(stored, dense, 0.0)
    pattern = with_values(y.detach(), values_at(dense, y.detach()))
    expected = torch.autograd.grad(y, leaf, pattern, retain_graph=True)[0].to_dense()
    others = [pattern.clone()]  # the same pattern in other memory
    if y.layout == torch.sparse_coo:
        others.append(dense.to_sparse(y.sparse_dim()))
        doubled = torch.sparse_coo_tensor(torch.cat([pattern.indices()] * 2, 1), torch.cat([pattern.values() / 2] * 2),
                                          y.shape)
        others.append(doubled)
    elif form == "csr":
        others.append(dense.to_sparse_csr())
    for grad in others:
        torch.testing.assert_close(torch.autograd.grad(y, leaf, grad, retain_graph=True)[0].to_dense(), expected)
    by_values, = torch.autograd.grad(y.values(), leaf, pattern.values(), retain_graph=True)
    torch.testing.assert_close(by_values.to_dense(), expected)
    if form != "csr, batches":  # to_dense of batches has no derivative in PyTorch
        by_dense, = torch.autograd.grad(y.to_dense(), leaf, everywhere, retain_graph=True)
        torch.testing.assert_close(by_dense.to_dense(), expected)


@pytest.mark.parametrize("form", ["coo", "csr"])
def test_an_upstream_gradient_with_as_many_entries_elsewhere(form, device):
    x, stored, draw = example(form, device, torch.float64)
    y = log_softmax(x.requires_grad_(), 1)
    elsewhere = draw.normal(*x.shape, dtype=torch.float64) * stored.flip(-1)
    grad = elsewhere.to_sparse(layout=x.layout)
    assert grad.values().shape == y.values().shape
    moved, = torch.autograd.grad(y, x, grad, retain_graph=True)
    expected, = torch.autograd.grad(y, x, with_values(y.detach(), values_at(elsewhere, y.detach())))
    torch.testing.assert_close(moved.to_dense(), expected.to_dense())


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("shape", [(12,), (12, 3)])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_op_and_its_derivatives_of_any_order(ordered, shape, log, device):
    draw = Draw(device)
    values = 2 * draw.normal(*shape, dtype=torch.float64).requires_grad_()
    values = values.detach().requires_grad_()
    offsets = torch.tensor([0, 4, 4, 5, 12], device=device)
    order = torch.randperm(12, generator=draw.generator).to(device) if ordered else None

    def f(v):
        return ops.sparse_softmax(v, offsets, order, log)

    assert gradcheck(f, values, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, values)
    assert_close_to_float64(f(values.float()), reference.sparse_softmax(values.float(), offsets, order, log),
                            reference.sparse_softmax(values, offsets, order, log))
    batch = draw.normal(3, *shape, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(f)(batch), torch.stack([f(v) for v in batch]))


def entries(t, stored):
    return t[stored] if t.layout == torch.strided else patterns.values_of(t)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_second_derivatives(layout, device):
    x, stored, _ = example("coo", device, torch.float64)
    results = []
    for f, leaf in ((log_softmax, x.to_sparse(layout=layout) if layout != x.layout else x.clone()),
                    (lambda t, dim: torch.log_softmax(t, dim), full(x, stored, torch.float64))):
        leaf = leaf.detach().requires_grad_()
        first, = torch.autograd.grad(entries(f(leaf, 1), stored).sin().sum(), leaf, create_graph=True)
        second, = torch.autograd.grad(entries(first, stored).pow(3).sum(), leaf)
        results.append([t.detach().to_dense()[stored] for t in (first, second)])
    for ours, dense in zip(*results):
        torch.testing.assert_close(ours, dense)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_length(dtype, log, threads, device):
    """Checks rows longer than a warp, a block and a part, with values far from zero. The number of threads does not
    matter."""
    draw, lengths = Draw(device), [0, 1, 2, 31, 33, 0, 700, 2049, 5000, 70_001, 3, 0]
    offsets = torch.tensor(lengths, device=device).cumsum(0)
    offsets = torch.nn.functional.pad(offsets, (1, 0)).int()
    values = (3 * draw.normal(int(offsets[-1])) + (100 if dtype != torch.float16 else 10)).to(dtype)
    grad = draw.normal(len(values)).to(dtype)
    results = []
    for count in (1, 2, 3):
        threads(count)
        output = ops.sparse_softmax(values, offsets, None, log)
        results.append((output, ops.sparse_softmax_backward(grad, output, offsets, None, log)))
    for result in results[1:]:
        assert_bitwise_equal(result[0], results[0][0])
        assert_bitwise_equal(result[1], results[0][1])
    output, gradient = results[0]
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        row = values[begin:end]
        dense = torch.log_softmax if log else torch.softmax
        assert_close_to_float64(output[begin:end], dense(row, 0), dense(row.double(), 0))
        exact, peer = (reference.sparse_softmax_backward(
            grad[begin:end].to(t), output[begin:end].to(t), torch.tensor([0, end - begin], device=device), None, log)
            for t in (torch.float64, dtype))
        if end - begin > 1:  # a single entry's gradient is 0 except for rounding
            assert_close_to_float64(gradient[begin:end], peer, exact)


def test_minus_infinity_is_an_entry_like_any_other(device):
    x = torch.tensor([[0.0, -torch.inf, 2.0], [-torch.inf, -torch.inf, 0.0], [1.0, 0.0, 0.0]], device=device)
    index = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0]], device=device)
    leaf = torch.sparse_coo_tensor(index, x[index[0], index[1]], (3, 3), is_coalesced=True).requires_grad_()
    y = log_softmax(leaf, 1)
    expected = torch.cat([torch.log_softmax(x[0], 0), torch.full((2,), torch.nan, device=device), x.new_zeros(1)])
    torch.testing.assert_close(y.values(), expected, equal_nan=True)
    grad, = torch.autograd.grad(y.values()[:3].exp().sum(), leaf)
    assert grad.values()[:3].abs().max() < 1e-6 and grad.values()[3:5].isnan().all() and grad.values()[5] == 0


@pytest.mark.parametrize("entries", [7, 40_000])
def test_what_no_row_has_is_not_what_memory_held(entries, device):
    """Checks wrong offsets: an error on the CPU and with synchronization, otherwise NaN."""
    x = torch.ones(entries, device=device)
    for offsets in ([0], [3], [1, 3]):
        given = torch.tensor(offsets, device=device)
        junk = torch.full((entries,), 7.0, device=device)  # fills the memory that is allocated next
        del junk
        try:
            y = torch.ops.sparse_ce.sparse_softmax(x, given, None, False)
        except RuntimeError as error:
            assert "offsets must ascend from 0" in str(error)
            continue
        outside = torch.ones(entries, dtype=torch.bool, device=device)
        outside[offsets[0] : offsets[-1]] = False
        assert y[outside].isnan().all() and not y[~outside].isnan().any()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 4)])
def test_nothing_stored(shape, layout, device):
    x = torch.zeros(shape, device=device).to_sparse(layout=layout).requires_grad_()
    for dim in (0, 1):
        y = log_softmax(x, dim)
        assert y.shape == shape and y.layout == layout and y.values().numel() == 0
        assert torch.autograd.grad(y.values().sum(), x)[0].shape == shape


def test_more_rows_than_entries(device):
    """Checks that rows are counted by the entries: a matrix of 10**12 rows takes no memory."""
    index = torch.tensor([[0, 5, 5, 999_999], [3, 1, 999_998, 0], [1, 0, 1, 1]], device=device)
    x = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0, 3.0, 4.0], device=device), (10**6, 10**6, 2))
    assert log_softmax(x, 2).values().tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(log_softmax(x, 1).values(), torch.zeros(4, device=device))
    two = torch.sparse_coo_tensor(torch.tensor([[7, 7], [1, 2]], device=device), torch.zeros(2, device=device),
                                  (10**6, 10**6))
    torch.testing.assert_close(log_softmax(two, 1).values().exp(), torch.full((2,), 0.5, device=device))


def test_entries_that_permute_left_out_of_order(device):
    """Checks this because torch 2.13 still marks the tensor as coalesced."""
    x, stored, _ = example("coo, three dimensions", device, torch.float64)
    moved = x.movedim(1, -1)
    for dim in range(3):
        exact = torch.log_softmax(full(moved, stored.movedim(1, -1), torch.float64), dim)
        y = log_softmax(moved, dim).to_dense()
        torch.testing.assert_close(y[stored.movedim(1, -1)], exact[stored.movedim(1, -1)])


def test_the_input_is_left_alone_and_runs_are_equal(device):
    x, _, _ = example("coo, uncoalesced", device, torch.float32)
    before = x._values().clone(), x._indices().clone()
    runs = [log_softmax(x, 0) for _ in range(5)]
    assert_bitwise_equal(x._values(), before[0])
    assert torch.equal(x._indices(), before[1]) and not x.is_coalesced()
    for run in runs[1:]:
        assert_bitwise_equal(run.values(), runs[0].values())


@pytest.mark.parametrize("call,error,message", [
    (lambda: log_softmax(torch.zeros(3, 4), 1), ValueError, "must be sparse COO or CSR.*torch.log_softmax"),
    (lambda: log_softmax(torch.zeros(3, 4).to_sparse_csc(), 1), ValueError,
     "got layout torch.sparse_csc.*to_sparse_csr"),
    (lambda: log_softmax([1.0], 0), TypeError, "input must be a tensor, got list"),
    (lambda: log_softmax(torch.ones(3, 4).long().to_sparse(), 1), TypeError, "floating dtype, got torch.int64"),
    (lambda: log_softmax(torch.ones(3, 4).to_sparse(), 2), ValueError, r"dim must be in \[-2, 2\), got 2"),
    (lambda: ops.sparse_softmax(torch.zeros(2, 3, 4), torch.tensor([0, 2]), None, True), RuntimeError,
     r"values must be \(entries,\) or \(entries, width\), got \[2, 3, 4\]"),
    (lambda: ops.sparse_softmax(torch.zeros(2), torch.tensor([0.0, 2.0]), None, True), RuntimeError,
     "offsets must be of dtype int32 or int64, got Float"),
    (lambda: ops.sparse_softmax(torch.zeros(2), torch.tensor([0, 2]), torch.tensor([0, 1, 2]), True), RuntimeError,
     r"order must be \(2,\), got \[3\]"),
    (lambda: ops.sparse_softmax_backward(torch.zeros(3), torch.zeros(2), torch.tensor([0, 2]), None, True),
     RuntimeError, r"grad must have the shape of output, \[2\], got \[3\]"),
    (lambda: ops.sparse_softmax_backward(torch.zeros(2).half(), torch.zeros(2), torch.tensor([0, 2]), None, True),
     RuntimeError, r"grad must have the dtype of output \(Float\), got Half"),
])
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="on a GPU these stay within bounds")
@pytest.mark.parametrize("offsets,order,message", [
    ([0, 2, 1, 4], None, r"offsets must ascend from 0 to 4 \(the number of entries\), got 1 at position 2"),
    ([1, 2, 4], None, "got 1 at position 0"),
    ([0, 2, 3], None, "got 3 at position 2"),
    ([0, 2, 9, 4], None, "got 9 at position 2"),
    ([0, 4], [0, 1, 2, 4], r"order must be in \[0, 4\), got 4 at position 3"),
])
def test_rows_outside_of_the_entries_are_refused(offsets, order, message):
    order = None if order is None else torch.tensor(order)
    with pytest.raises(RuntimeError, match=message):
        ops.sparse_softmax(torch.zeros(4), torch.tensor(offsets), order, True)


# -------------------------------------------------------------------------------------- torch.sparse.softmax of CSR


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("form,dim", [(form, dim) for form, dim in DIMENSIONS if form.startswith("csr")])
def test_stock_softmax_takes_csr(form, dim, log, dtype, device):
    x, stored, draw = example(form, device, dtype)
    stock = torch.sparse.log_softmax if log else torch.sparse.softmax
    dense_softmax = torch.log_softmax if log else torch.softmax
    exact_x = full(x.detach(), stored, torch.float64).requires_grad_()
    peer_x = full(x.detach(), stored, dtype).requires_grad_()
    grad_output = draw.normal(*x.shape).to(dtype)
    x.requires_grad_()
    for d in (dim, dim - x.dim()):
        y = stock(x, d)
        assert y.layout == torch.sparse_csr and y.dtype == dtype and torch.equal(y.col_indices(), x.col_indices())
        exact, peer = (torch.where(stored, dense_softmax(t, dim), 0.0) for t in (exact_x, peer_x))
        assert_close_to_float64(y.detach().to_dense()[stored], peer[stored], exact[stored])
        grad, = torch.autograd.grad(y, x, with_values(y.detach(), values_at(grad_output, y.detach())))
        exact_grad, = torch.autograd.grad(exact, exact_x, grad_output.double())
        peer_grad, = torch.autograd.grad(peer, peer_x, grad_output)
        terms = grad_output.double().abs().max().view(1)  # the size of the terms of the difference
        assert_close_to_float64(grad.to_dense()[stored], peer_grad[stored], exact_grad[stored], terms)
    torch.testing.assert_close(stock(x.detach(), dim, dtype=torch.float64).to_dense()[stored], exact[stored].detach(),
                               rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log", [True, False])
def test_the_gradient_of_a_row_of_a_million_does_not_drift(log, device):
    """Checks this because equal terms round in the same direction: one float32 accumulator is off by thousands of
    eps."""
    n, eps = 1 << 20, torch.finfo(torch.float32).eps
    x = (torch.arange(n, device=device).remainder(3) / 7).view(1, n)
    csr = x.to_sparse_csr() if x.ne(0).all() else (x + 1).to_sparse_csr()
    values = csr.values()
    grad_output = torch.full((n,), 0.37, device=device)
    y = ops.sparse_softmax(values, csr.crow_indices(), None, log)
    grad = ops.sparse_softmax_backward(grad_output, y, csr.crow_indices(), None, log)
    exact = grad_output.double() - y.double().exp() * grad_output.double().sum()
    if not log:
        exact = y.double() * (grad_output.double() - (grad_output.double() * y.double()).sum())
    size = grad_output.double().sum() * y.double().exp().max() if log else y.double().max()
    assert ((grad.double() - exact).abs() <= 8 * eps * size).all()


@pytest.mark.parametrize("entries", [131072, 131073, 300_007])
@pytest.mark.parametrize("log", [True, False])
def test_long_rows_do_not_depend_on_the_threads(log, entries, threads):
    """Checks long rows among short ones, in order and not. On the CPU both orders give the same bits."""
    draw = Draw("cpu")
    values, grad_output = 3 * draw.normal(entries + 50), draw.normal(entries + 50)
    offsets = torch.tensor([0, 20, entries + 20, entries + 20, entries + 50])
    order = torch.argsort(draw.uniform(entries + 50))
    apart, strided_grad = torch.empty_like(values), torch.empty_like(values)
    apart[order], strided_grad[order] = values, grad_output
    found = []
    for n in (1, 3):
        threads(n)
        y = ops.sparse_softmax(values, offsets, None, log)
        grad = ops.sparse_softmax_backward(grad_output, y, offsets, None, log)
        y_apart = ops.sparse_softmax(apart, offsets, order, log)
        grad_apart = ops.sparse_softmax_backward(strided_grad, y_apart, offsets, order, log)
        found.append((y, grad, y_apart[order], grad_apart[order]))
    for one, other in zip(*found):
        assert_bitwise_equal(one, other)
    if sparse_ce.ops.instruction_set() != "emulated CUDA":
        assert_bitwise_equal(y, y_apart[order])
        assert_bitwise_equal(grad, grad_apart[order])
    function = torch.log_softmax if log else torch.softmax
    torch.testing.assert_close(y[20:entries + 20].double(), function(values[20:entries + 20].double(), 0), rtol=1e-5,
                               atol=1e-5 if log else 1e-9)


@pytest.mark.parametrize("offsets,covered", [([1, 3, 4], [1, 2, 3]), ([0, 1, 3], [0, 1, 2]), ([0, 9], [0, 1, 2, 3]),
                                             ([-5, 2], [0, 1]), ([3, 1], [])])
def test_on_a_gpu_rows_outside_of_the_entries_give_nan_and_reach_no_other_memory(offsets, covered, device):
    if device == "cpu" and sparse_ce.ops.instruction_set() != "emulated CUDA":
        pytest.skip("the CPU refuses them")
    values, offsets = torch.zeros(4, device=device), torch.tensor(offsets, device=device)
    if os.environ.get("SPARSE_CE_VALIDATE") == "1":
        with pytest.raises(RuntimeError, match="sparse_ce: offsets must ascend from 0 to 4"):
            ops.sparse_softmax(values, offsets, None, True)
        return
    result = ops.sparse_softmax(values, offsets, None, True)
    assert result.isfinite().nonzero().flatten().tolist() == covered


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("shape,sparse_dim", [((7,), 1), ((3, 4), 2), ((4, 3, 5), 3), ((3, 4, 2, 5), 4), ((3, 4, 5), 2),
                                              ((5, 3, 2), 1), ((4, 0), 2), ((0, 3, 2), 2)])
@pytest.mark.parametrize("stored", ["all", "half", "none"])
def test_stock_softmax_of_coo_is_what_it_was(stored, shape, sparse_dim, log, dtype, device):
    """Checks that with this package imported PyTorch's own COO kernels still pass tests like PyTorch's."""
    draw = Draw(device)
    share = {"all": 2.0, "half": 0.5, "none": -1.0}[stored]
    keep = (draw.uniform(*shape[:sparse_dim]) < share).view(*shape[:sparse_dim], *[1] * (len(shape) - sparse_dim))
    keep = keep.expand(shape)
    values = draw.normal(*shape, dtype=dtype)
    place = keep[(..., *[0] * (len(shape) - sparse_dim))] if values.numel() else torch.zeros(
        shape[:sparse_dim], dtype=torch.bool, device=device)
    x = coo(place, values, coalesced=False)
    f, dense_f = (torch.sparse.log_softmax, torch.log_softmax) if log else (torch.sparse.softmax, torch.softmax)
    for dim in range(len(shape)):
        leaf, y_leaf = x.clone().requires_grad_(), full(x, keep, dtype).requires_grad_()
        y, expected = f(leaf, dim), torch.where(keep, dense_f(y_leaf, dim), 0.0)
        torch.testing.assert_close(y.to_dense(), expected)
        grad_output = torch.where(keep, draw.normal(*shape, dtype=dtype), 0.0)
        grad, = torch.autograd.grad(y.to_dense(), leaf, grad_output)
        exact, = torch.autograd.grad(expected, y_leaf, grad_output)
        torch.testing.assert_close(grad.to_dense(), torch.where(keep, exact, 0.0), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------- along dense dimensions


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_along_a_dense_dimension_16_bits_are_rounded_once(dtype, layout, device):
    """Checks this because PyTorch's own 16-bit arithmetic is off by 16 units in the last place there."""
    values = (4 * Draw(device).normal(40, 300)).to(dtype).requires_grad_()
    index = torch.arange(40, device=device)
    pattern = torch.sparse_coo_tensor(torch.stack([index // 8, index % 8]), values, (5, 8, 300), is_coalesced=True)
    if layout == torch.sparse_csr:
        pattern = torch.sparse_csr_tensor(torch.arange(6, device=device) * 8, index % 8, values, (5, 8, 300))
    out = sparse_ce.log_softmax(pattern, -1).values()
    exact = torch.log_softmax(values.detach().double(), 1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.detach().double(), exact, rtol=0.51 * eps, atol=1e-6)
    grad_output = Draw(device, 1).normal(40, 300).to(dtype)
    grad, = torch.autograd.grad(out, values, grad_output)
    leaf = values.detach().double().requires_grad_()
    expected, = torch.autograd.grad(torch.log_softmax(leaf, 1), leaf, grad_output.double())
    torch.testing.assert_close(grad.double(), expected, rtol=0.51 * eps, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- host overhead


def calls(run):
    """Returns the names of all calls of the dispatcher, nested ones included, and the autograd nodes that are run."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    nodes = [event.name for event in profile.events() if event.name.startswith("autograd::engine")]
    return [event.name for event in profile.events() if "::" in event.name and event.name not in nodes], nodes


@pytest.mark.parametrize("layout,most", [(torch.sparse_coo, 40), (torch.sparse_csr, 48)], ids=str)
def test_a_step_is_one_node_and_few_calls(layout, most, device, monkeypatch):
    """Counts what the host does for small tensors, as on a GPU, whose indices cannot be read. A node each for values,
    softmax and result made 70 and 75 calls."""
    for module in (patterns, sparse_ce.functional.softmax):
        monkeypatch.setattr(module, "readable", lambda t: False)
    x = example("coo", device, torch.float32)[0].to_sparse(layout=layout).requires_grad_()
    grad_output = x.detach()  # has the same indices

    def step():
        torch.autograd.grad(log_softmax(x, 1), x, grad_output)

    made, nodes = calls(step)
    assert len(nodes) == 2  # the softmax, and the gradient of the leaf
    assert made.count("sparse_ce::sparse_softmax") == made.count("sparse_ce::sparse_softmax_backward") == 1
    assert len(made) <= most, made


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("changed", ["output", "values"])
def test_a_change_of_the_output_before_backward_is_an_error(changed, layout, device):
    """Checks this because the gradient is computed from the output."""
    x = example("coo", device, torch.float32)[0].to_sparse(layout=layout).requires_grad_()
    y = log_softmax(x, 1)
    with torch.no_grad():
        (y if changed == "output" else y.values()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, x.detach())


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_the_sparse_softmax_compiles(layout, device):
    pattern = example("coo", device, torch.float32)[0].to_sparse(layout=layout)
    at = pattern.indices() if layout == torch.sparse_coo else (pattern.crow_indices(), pattern.col_indices())

    def f(values):
        if layout == torch.sparse_coo:
            x = torch.sparse_coo_tensor(at, values, pattern.shape, is_coalesced=True)
        else:
            x = torch.sparse_csr_tensor(*at, values, pattern.shape)
        return log_softmax(x, 1).values().sin()

    results = []
    for run in (f, torch.compile(f, backend="aot_eager")):
        leaf = pattern.values().clone().requires_grad_()
        results.append(torch.autograd.grad(run(leaf).sum(), leaf)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["kernel", "composition", "vmap", "jvp"])
def test_confident_rows_are_exact(how, dtype, log, device):
    """Checks each entry's result and gradient for leads of 5 to 80 nats, with several entries below the largest."""
    draw, leads = Draw(device), torch.tensor([5, 10, 15, 20, 40, 60, 80], device=device)
    values = draw.normal(7, 6, dtype=torch.float64).to(dtype)
    values[:, 2] = values.amax(1) + leads.to(dtype)
    offsets, grad = torch.arange(0, 43, 6, device=device), draw.normal(7, 6, dtype=torch.float64).to(dtype)
    x, g = values.double(), grad.double()
    below, largest = x - x[:, 2:3], torch.arange(6, device=device) == 2
    rest = torch.where(largest, 0.0, below.exp()).sum(1, keepdim=True)
    output, p = below - rest.log1p(), below.exp() / (1 + rest)
    differences = ((g[:, None] - g[..., None]) * p[:, None]).sum(2)  # sum_k p_k (g_k - g_j)
    others = torch.where(largest, 0.0, g).sum(1, keepdim=True)
    of_largest = (g * rest - others) / (1 + rest)
    of_log = torch.where(largest, of_largest, g - p * g.sum(1, keepdim=True))
    exact = of_log if log and how != "jvp" else -differences * (1 if log else p)

    def f(values):
        return torch.ops.sparse_ce.sparse_softmax(values, offsets, None, log)

    if how == "kernel":
        leaf = values.flatten().requires_grad_()
        ours = f(leaf)
        gradient, = torch.autograd.grad(ours, leaf, grad.flatten())
    elif how == "composition":
        ours = reference.sparse_softmax(values.flatten(), offsets, None, log)
        gradient = reference.sparse_softmax_backward(grad.flatten(), ours, offsets, None, log)
    elif how == "vmap":
        ours, pull = torch.func.vjp(torch.func.vmap(f), torch.stack((values.flatten(),) * 2))
        (gradient, *_), ours = pull(torch.stack((grad.flatten(),) * 2))[0], ours[0]
    else:
        ours, gradient = torch.func.jvp(f, (values.flatten(),), (grad.flatten(),))
    limit = 100 * torch.finfo(dtype).eps  # z - max is rounded at 80
    for found, expected in ((ours, output if log else p), (gradient, exact)):
        torch.testing.assert_close(found.view(7, 6).double(), expected, rtol=limit, atol=1e-37)
