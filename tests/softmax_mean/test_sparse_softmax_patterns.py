"""Tests ``log_softmax`` of COO tensors built from values. The values' gradient, which PyTorch looks up in the pattern,
is the dense one, whatever other operations the tensors pass through."""

import pytest
import torch

import sparse_ce
from cases import Draw
from refusals import assert_refused
from sparse_ce import log_softmax
from sparse_ce.functional import sparse_values as patterns

DOUBLE = torch.float64


def indices(draw, *shape, share=0.5):
    """Returns sorted indices without duplicates."""
    return (draw.uniform(*shape) < share).nonzero().T


def repeated(draw, *shape):
    """Returns unsorted indices, some of them twice."""
    index = indices(draw, *shape)
    index = torch.cat([index, index[:, ::2]], 1)
    return index[:, torch.randperm(index.shape[1], generator=draw.generator).to(index.device)]


MADE = {
    "coalesced": lambda draw, shape: (indices(draw, *shape), True),
    "not known to be in order": lambda draw, shape: (indices(draw, *shape), None),
    "in order, twice": lambda draw, shape: (indices(draw, *shape).repeat_interleave(2, 1)[:, :-1], None),
    "out of order": lambda draw, shape: (repeated(draw, *shape), None),
}


def made(name, device, shape=(6, 9), dense=()):
    """Returns a leaf of values, their sparse tensor, the same tensor densely with -inf at unstored elements, and a
    draw."""
    draw = Draw(device)
    index, flag = MADE[name](draw, shape)
    values = draw.normal(index.shape[1], *dense, dtype=DOUBLE).requires_grad_()
    sparse = torch.sparse_coo_tensor(index, values, (*shape, *dense), is_coalesced=flag)
    stored = torch.zeros(shape, dtype=torch.bool, device=device)
    stored[tuple(index)] = True
    # Duplicates are summed.
    full = torch.zeros(*shape, *dense, dtype=DOUBLE, device=device).index_put(tuple(index), values, accumulate=True)
    stored = stored.view(*shape, *[1] * len(dense)).expand_as(full)
    return values, sparse, torch.where(stored, full, -torch.inf), draw


def dense_log_softmax(full, dim):
    """Returns the dense log_softmax, and 0 at unstored elements."""
    return torch.where(full == -torch.inf, 0.0, torch.log_softmax(full, dim))


USES = {
    "values": lambda y, other: y.values().pow(2).sum() if y.is_sparse else y.pow(2).sum(),
    "sum": lambda y, other: (torch.sparse.sum(y * y) if y.is_sparse else (y * y).sum()),
    "twice": lambda y, other: (y * other).sum() + (y * y).sum(),
    "dense": lambda y, other: (y.to_dense() * other).sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("shape,dense", [((6, 9), ()), ((4, 5, 6), ()), ((5, 6), (3,)), ((30,), ())], ids=str)
def test_the_gradient_of_the_values_is_the_dense_one(shape, dense, name, use, device):
    if use == "twice" and dense:
        use = "values"  # PyTorch cannot multiply a hybrid tensor by a dense one
    values, sparse, full, draw = made(name, device, shape, dense)
    other = draw.normal(*full.shape, dtype=DOUBLE)
    for dim in range(full.dim()):
        expected, = torch.autograd.grad(USES[use](dense_log_softmax(full, dim), other), values, retain_graph=True)
        y = log_softmax(sparse, dim)
        for _ in range(2):  # the second time through the same graph
            got, = torch.autograd.grad(USES[use](y, other), values, retain_graph=True)
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", MADE)
def test_second_derivatives_of_the_values_are_refused(name, device):
    """Checks the error because PyTorch's COO constructor silently drops them. Those of a COO tensor itself exist."""
    values, sparse, _, _ = made(name, device)
    y = log_softmax(sparse, 1)
    assert_refused(lambda: torch.autograd.grad(y.values().pow(2).sum(), values, create_graph=True), "create_graph",
                   "segment_log_softmax", error=NotImplementedError)
    y = log_softmax(sparse.detach().requires_grad_(), 1)
    torch.autograd.grad(y.values().pow(2).sum(), values, allow_unused=True, create_graph=True)


def test_pytorch_drops_second_derivatives_of_the_values(device):
    """Checks that the error of the test above is still needed."""
    values, sparse, _, _ = made("coalesced", device)
    first, = torch.autograd.grad(torch.sparse.sum(sparse * sparse), values, create_graph=True)
    assert not first.requires_grad


@pytest.mark.parametrize("name", MADE)
def test_the_sparse_tensor_keeps_its_gradient_its_hooks_and_other_uses(name, device):
    results = []
    for softmax in (log_softmax, lambda t, dim: log_softmax(t * 1, dim)):  # a product is not built from values
        values, sparse, full, draw = made(name, device)
        other, seen = draw.normal(*full.shape, dtype=DOUBLE), []
        sparse.retain_grad()
        sparse.register_hook(lambda grad: seen.append(grad.to_dense()) or 2 * grad)
        loss = softmax(sparse, 1).pow(2).to_dense().sum() + (sparse * other).to_dense().sum()
        grads = torch.autograd.grad(loss, [values, sparse], retain_graph=True)
        loss.backward()
        results.append([t.to_dense() for t in (*grads, values.grad, sparse.grad)] + seen)
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain)
    assert len(results[0]) == len(results[1]) == 6
    finite = torch.where(full == -torch.inf, 0.0, full)
    exact, = torch.autograd.grad(dense_log_softmax(full, 1).pow(2).sum() + (finite * other).sum(), values)
    torch.testing.assert_close(results[0][0], 2 * exact)


def test_a_tensor_that_no_gradient_reaches(device):
    values, sparse, _, _ = made("coalesced", device)
    log_softmax(sparse, 1)
    torch.sparse.sum(sparse).backward()
    torch.testing.assert_close(values.grad, torch.ones_like(values))
    values, sparse, _, _ = made("coalesced", device)
    y = log_softmax(sparse, 1)
    got = torch.autograd.grad(y.detach().values().sum() + 0 * values.sum(), values)[0]
    assert not got.any()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_another_pattern_is_found(layout, device):
    draw = Draw(device)
    x, elsewhere = (torch.sparse_coo_tensor(i, draw.normal(i.shape[1], dtype=DOUBLE), (6, 9), is_coalesced=True)
                    for i in (indices(draw, 6, 9), indices(draw, 6, 9)))
    leaf = x.to_sparse(layout=layout).requires_grad_()
    halves = torch.sparse_coo_tensor(torch.cat([elsewhere.indices()] * 2, 1), torch.cat([elsewhere.values() / 2] * 2),
                                     (6, 9))
    for grad in (elsewhere.to_sparse_csr(), elsewhere, halves):
        found = patterns.values_at(grad, leaf.detach())
        torch.testing.assert_close(found, elsewhere.to_dense()[tuple(x.indices())])
    nothing = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), torch.empty(0, dtype=DOUBLE), (6, 9))
    assert not patterns.values_at(nothing.to(device), x).any()


def test_an_element_that_a_gradient_stores_twice(device):
    """Checks that the element has the sum wherever the pattern stores it twice too."""
    index = torch.tensor([[0, 1, 1], [2, 0, 0]], device=device)
    grad, pattern = (torch.sparse_coo_tensor(index, torch.tensor(v, device=device), (2, 3))
                     for v in ([1.0, 2.0, 5.0], [0.0, 0.0, 0.0]))
    assert patterns.values_at(grad, pattern).tolist() == [1.0, 7.0, 7.0]
    assert patterns.values_at(grad, pattern.coalesce()).tolist() == [1.0, 7.0]
    assert patterns.values_at(grad.coalesce(), pattern).tolist() == [1.0, 7.0, 7.0]
    grad = torch.sparse_coo_tensor(pattern._indices(), grad._values(), (2, 3))
    assert patterns.values_at(grad, pattern).tolist() == [1.0, 7.0, 7.0]
    # The number of entries equals that of two patterns, but they are not one after the other.
    grad = torch.sparse_coo_tensor([[0, 1, 1, 0], [2, 0, 0, 2]], torch.tensor([1.0, 2.0, 3.0, 5.0]), (2, 3)).to(device)
    assert patterns.values_at(grad, pattern.coalesce()).tolist() == [6.0, 5.0]


def test_a_tensor_without_sparse_dimensions(device):
    values = torch.randn(2, 5, dtype=DOUBLE, device=device, requires_grad=True)
    x = torch.sparse_coo_tensor(torch.empty(0, 2, dtype=torch.long, device=device), values, (5,))
    y, exact = log_softmax(x, 0), torch.log_softmax(values.sum(0), 0)
    torch.testing.assert_close(y.to_dense(), exact)
    got, expected = (torch.autograd.grad(t[2], values)[0] for t in (y.to_dense(), exact))
    torch.testing.assert_close(got, expected)


def test_columns_of_a_csr_gradient_in_any_order(device):
    grad = torch.sparse_csr_tensor([0, 3, 4], [2, 0, 1, 0], torch.tensor([3.0, 1.0, 2.0, 4.0]), (2, 3)).to(device)
    pattern = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], device=device).to_sparse_csr()
    assert patterns.values_at(grad, pattern).tolist() == [1.0, 3.0, 0.0]


def test_a_segment_softmax_by_offsets_is_that_of_the_coo(device):
    values, sparse, _, draw = made("coalesced", device)
    offsets = sparse.detach().to_sparse_csr().crow_indices()
    grad_output = draw.normal(len(values), dtype=DOUBLE)
    by_coo, = torch.autograd.grad(log_softmax(sparse, 1).values(), values, grad_output)
    by_offsets, = torch.autograd.grad(sparse_ce.segment_log_softmax(values, offsets=offsets), values, grad_output)
    torch.testing.assert_close(by_coo, by_offsets)


def test_dense_dimensions_of_size_0(device):
    none = torch.zeros(2, 0, device=device)
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 2]], device=device), none, (4, 0))
    ends, column = torch.tensor([0, 1], device=device), torch.tensor([0], device=device)
    csr = torch.sparse_csr_tensor(ends, column, none[:1], (1, 2, 0))
    assert log_softmax(coo, 0).shape == (4, 0) and log_softmax(csr, 1).shape == (1, 2, 0)
