"""Tests small calls, which bypass the dispatcher: they have the ops' bits, and the ops run if anything could see a
difference."""

import warnings

import pytest
import torch
from torch.nn import Parameter

import sparse_ce
from cases import DTYPES, Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, cross_entropy
from sparse_ce.ops import expected_grad
from sparse_ce.ops.logits import small_calls as small_calls

ROWS, VOCAB = 7, 30
pytestmark = pytest.mark.skipif(small_calls._function is None or small_calls.LOGITS == 0,
                                reason="a flavour in which every call is an op")


@pytest.fixture
def taken(monkeypatch):
    """Returns a growing list with True for each call that was small."""
    calls, small = [], small_calls.cross_entropy

    def counted(*args):
        found = small(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(small_calls, "cross_entropy", counted)
    return calls


@pytest.fixture
def ops_alone(monkeypatch):
    """Returns a function that disables the path of small calls for the rest of a test."""
    return lambda: monkeypatch.setattr(small_calls, "LOGITS", 0)


def labels(draw):
    index = draw.integers(VOCAB, ROWS)
    index[2] = -100
    return index


def topk(draw):
    indices = draw.integers(VOCAB, ROWS, 4)
    indices[1, 2:] = -100
    indices[3] = -100
    return indices, draw.uniform(ROWS, 4)


TARGETS = {
    "labels": labels,
    "int32 labels": lambda draw: labels(draw).int(),
    "top-k": topk,
    "top-k, bfloat16": lambda draw: (lambda i, v: (i, v.bfloat16()))(*topk(draw)),
    "top-k, int32, float64": lambda draw: (lambda i, v: (i.int(), v.double()))(*topk(draw)),
    "SparseTarget of labels": lambda draw: SparseTarget.from_index(labels(draw), num_classes=VOCAB),
    "SparseTarget of a top-k": lambda draw: SparseTarget.from_topk(*topk(draw)),
    "ids": lambda draw: SparseTarget.from_topk(topk(draw)[0], None),
    "no entries": lambda draw: (draw.integers(VOCAB, ROWS, 0), draw.uniform(ROWS, 0)),
    "all ignored": lambda draw: labels(draw).fill_(-100),
}
OPTIONS = {
    "mean": {},
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "normalizer": dict(normalizer=12.5),
    "normalizer of 0": dict(normalizer=torch.tensor(0)),
    "ignore_index": dict(ignore_index=3),
}


def three_steps(make, target, options):
    """Returns losses and gradients without a cached gradient, with one, and with an unexpected ``grad_output``."""
    expected_grad._expected.clear()
    results = []
    for grad_output in (1.0, 1.0, 2.5, 2.5, float("nan"), 0.0):
        x = make()
        loss = cross_entropy(x, target, **options)
        grad, = torch.autograd.grad(loss, x, torch.full_like(loss, grad_output))
        results += [loss.detach(), grad]
    with torch.no_grad():
        results.append(cross_entropy(make(), target, **options))
    return results


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_the_ops(dtype, form, options, taken, ops_alone):
    draw = Draw("cpu")
    logits = (6 * draw.normal(ROWS, VOCAB)).to(dtype)
    logits[2] = torch.nan
    target, index = TARGETS[form](draw), OPTIONS[options].get("ignore_index", -100)
    if isinstance(target, torch.Tensor):
        target = target.masked_fill(target.eq(-100), index)
    elif isinstance(target, tuple):
        target = target[0].masked_fill(target[0].eq(-100), index), target[1]
    results = []
    for _ in range(2):
        results.append(three_steps(lambda: logits.clone().requires_grad_(), target, OPTIONS[options]))
        assert any(taken) != (len(results) == 2)
        taken.clear()
        ops_alone()
    for small, op in zip(*results):
        assert small.dtype == op.dtype and small.shape == op.shape
        assert_bitwise_equal(small, op)


def coo(draw, entries=9):
    """Returns sorted entries, of which some have duplicates and others weight 0; not all rows have any."""
    rows, _ = draw.integers(ROWS, entries).clamp(max=ROWS - 2).sort()
    values = draw.uniform(entries)
    values[:2] = 0
    return torch.sparse_coo_tensor(torch.stack((rows, draw.integers(VOCAB, entries))), values, (ROWS, VOCAB))


SPARSE = {
    "coo": coo,
    "coalesced": lambda draw: coo(draw).coalesce(),
    "coo without entries": lambda draw: coo(draw, 0),
    "coo with as many entries as offsets": lambda draw: coo(draw, ROWS + 1),
    "coo, float64": lambda draw: coo(draw).double(),
    "csr": lambda draw: coo(draw).to_sparse_csr(),
    "csr, int32": lambda draw: (lambda t: torch.sparse_csr_tensor(
        t.crow_indices().int(), t.col_indices().int(), t.values().half(), t.shape))(coo(draw).to_sparse_csr()),
    "csr without entries": lambda draw: coo(draw, 0).to_sparse_csr(),
}


@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("form", SPARSE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_tensors_have_the_bits_of_the_ops(dtype, form, ignore_index, taken, ops_alone):
    draw = Draw("cpu")
    logits, target, results = (6 * draw.normal(ROWS, VOCAB)).to(dtype), SPARSE[form](draw), []
    for _ in range(2):
        results.append(three_steps(lambda: logits.clone().requires_grad_(), target, dict(ignore_index=ignore_index)))
        assert any(taken) != (len(results) == 2)
        taken.clear()
        ops_alone()
    for small, op in zip(*results):
        assert_bitwise_equal(small, op)


def rows_of_a_coo(*rows):
    return torch.sparse_coo_tensor(torch.tensor([rows, range(len(rows))]), torch.ones(len(rows)), (3, VOCAB),
                                   check_invariants=False)


def csr_of(*crow):
    return torch.sparse_csr_tensor(torch.tensor(crow), torch.arange(3), torch.ones(3), (3, VOCAB),
                                   check_invariants=False)


@pytest.mark.parametrize("target", [rows_of_a_coo(2, 0, 1), rows_of_a_coo(0, 2, 1), rows_of_a_coo(1, 1, 0)])
def test_rows_that_are_not_sorted_are_left_to_the_ops(target, taken):
    x = Draw("cpu").normal(3, VOCAB)
    for loss in (cross_entropy(x, target), cross_entropy(x.requires_grad_(), target)):
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target.to_dense()))
    assert not any(taken)


@pytest.mark.parametrize("target", [rows_of_a_coo(0, 1, 3), rows_of_a_coo(-1, 1, 2), csr_of(0, 1, 2, 2),
                                    csr_of(1, 1, 2, 3), csr_of(0, 2, 1, 3), csr_of(0, 4, 4, 3)])
def test_wrong_rows_are_left_to_the_preparation(target, taken):
    with pytest.raises(RuntimeError, match="target must have (crow_indices|its leading indices)"):
        cross_entropy(Draw("cpu").normal(3, VOCAB), target)
    assert not any(taken)


LOGITS = {
    "rows with a stride": lambda x: x.repeat(1, 2)[:, :VOCAB],
    "rows that overlap": lambda x: x.reshape(-1).as_strided((ROWS, VOCAB), (VOCAB // 2, 1)),
    "more dimensions": lambda x: x[:6].view(2, 3, VOCAB),
    "one dimension": lambda x: x[0],
    "a parameter": lambda x: Parameter(x),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_of_other_shapes_and_strides(name, taken, ops_alone):
    draw = Draw("cpu")
    leaf = draw.normal(ROWS, VOCAB)
    target = draw.integers(VOCAB, *LOGITS[name](leaf).shape[:-1])
    results = []
    for _ in range(2):
        results.append(three_steps(lambda: LOGITS[name](leaf.clone()).requires_grad_(), target, {}))
        assert any(taken) != (len(results) == 2)
        taken.clear()
        ops_alone()
    for small, op in zip(*results):
        assert_bitwise_equal(small, op)


class Subclass(torch.Tensor):
    pass


def negated(x):
    """Returns a tensor with the negative bit, which says that the numbers in memory are negated."""
    return torch._neg_view(-x)


NOT_SMALL = {
    "columns with a stride": lambda x, t: (x.T.contiguous().T, t, {}),
    "a lazy negation": lambda x, t: (negated(x), t, {}),
    "a subclass": lambda x, t: (x.as_subclass(Subclass), t, {}),
    "labels of a subclass": lambda x, t: (x, t.as_subclass(Subclass), {}),
    "labels with a stride": lambda x, t: (x, t.repeat(2, 1).T.reshape(-1)[::2], {}),
    "values with a stride": lambda x, t: (x, (t[:, None].expand(-1, 2).contiguous(), torch.ones(2, ROWS).T), {}),
    "a lazy negation of labels": lambda x, t: (x, negated(t.fill_(5)), dict(ignore_index=-5)),
    "a lazy negation of the normalizer": lambda x, t: (x, t, dict(normalizer=negated(torch.tensor(3.0)))),
    "a lazy negation of values": lambda x, t: (x, (t[:, None], negated(torch.ones(ROWS, 1))), {}),
    "a mask of rows": lambda x, t: (x, SparseTarget.from_index(t, row_mask=torch.ones(ROWS).bool()), {}),
    "offsets": lambda x, t: (x, SparseTarget.from_jagged(t, torch.ones(ROWS), torch.arange(ROWS + 1)), {}),
    "log_probs": lambda x, t: (x, SparseTarget.from_topk(t[:, None], torch.zeros(ROWS, 1), values_are="log_probs"), {}),
    "class weights": lambda x, t: (x, t, dict(weight=torch.ones(VOCAB))),
    "smoothing": lambda x, t: (x, t, dict(label_smoothing=0.1)),
    "z_loss": lambda x, t: (x, t, dict(z_loss=0.1)),
    "logit_scale": lambda x, t: (x, t, dict(logit_scale=2.0)),
    "softcap": lambda x, t: (x, t, dict(softcap=5.0)),
    "num_classes": lambda x, t: (x, t.clamp(max=9), dict(num_classes=10)),
    "no rows": lambda x, t: (x[:0], t[:0], {}),
    "many logits": lambda x, t: (x[:, :1].expand(-1, 20_000).contiguous(), t, {}),
}


@pytest.mark.parametrize("name", NOT_SMALL)
def test_what_the_ops_are_left_to(name, taken, ops_alone):
    draw = Draw("cpu")
    x, target, options = NOT_SMALL[name](draw.normal(ROWS, VOCAB), draw.integers(VOCAB, ROWS))
    results = []
    for _ in range(2):
        results.append(three_steps(lambda: x.detach().requires_grad_(), target, options))
        assert not any(taken)
        ops_alone()
    for small, op in zip(*results):
        assert_bitwise_equal(small.as_subclass(torch.Tensor), op.as_subclass(torch.Tensor))


def test_lse_is_left_to_the_ops(taken):
    x = torch.randn(ROWS, VOCAB)
    loss, lse = cross_entropy(x, torch.zeros(ROWS, dtype=torch.long), return_lse=True)
    torch.testing.assert_close(lse, x.logsumexp(1))
    assert not any(taken)


@pytest.mark.parametrize("target", [torch.tensor([1, 30]), torch.tensor([-1, 2]),
                                    (torch.tensor([[1, 2], [3, 99]]), torch.ones(2, 2)),
                                    SparseTarget(torch.tensor([[1, 2], [3, 9]]), torch.ones(2, 3)),
                                    SparseTarget(torch.tensor([[1], [3]]), torch.ones(2, 1).to(torch.float8_e5m2))],
                         ids=["beyond", "negative", "top-k", "values of another shape", "values of a foreign dtype"])
def test_mistakes_have_the_errors_of_the_ops(target, taken, ops_alone):
    x, messages = torch.randn(2, VOCAB), []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^sparse_ce: ") as error:
            cross_entropy(x, target)
        messages.append(str(error.value))
        ops_alone()
    assert messages[0] == messages[1]
    assert not any(taken)


def test_small_calls_warn_of_log_probabilities(taken):
    x, pair = torch.randn(2, VOCAB), (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-0.3, -1.5], [-0.1, -2.5]]))
    for target in (pair, SparseTarget.from_topk(*pair, values_are="probs")):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            cross_entropy(x, target)
        assert len(warned) == (target is pair)
    assert taken == [True, True]


@pytest.mark.parametrize("target", [SparseTarget(torch.tensor([1, 2]), num_classes=VOCAB + 1),
                                    (torch.tensor([[1], [2]]), torch.ones(2, 2)),
                                    (torch.ones(2, 1), torch.ones(2, 1, dtype=torch.long))],
                         ids=["another number of classes", "values of another shape", "values first"])
def test_small_calls_leave_checks_to_the_preparation(target, taken):
    with pytest.raises((TypeError, ValueError), match="^sparse_ce: "):
        cross_entropy(torch.randn(2, VOCAB), target)
    assert not any(taken)


def test_a_row_of_padding_is_ignored_beside_another_ignored_class():
    """Checks that -100 ignores a row even if its weights are 0, in which case the kernels do not check its class."""
    x, weights = torch.randn(3, VOCAB), torch.tensor([[0.5], [0.0], [0.25]])
    target = SparseTarget.from_topk(torch.tensor([[1], [-100], [4]]), weights)
    active = cross_entropy(x[::2], (target.indices[::2], weights[::2]), reduction="sum") / 2
    torch.testing.assert_close(cross_entropy(x, target, ignore_index=3), active)


def test_integer_values_are_converted(taken):
    x, indices = torch.randn(2, VOCAB), torch.tensor([[1, 2], [3, 4]])
    expected = cross_entropy(x, (indices, torch.tensor([[1.0, 2.0], [0.0, 1.0]])))
    assert_bitwise_equal(cross_entropy(x, (indices, torch.tensor([[1, 2], [0, 1]]))), expected)


def test_a_profiler_sees_an_op(taken):
    x, t = torch.randn(ROWS, VOCAB), torch.zeros(ROWS, dtype=torch.long)
    with torch.profiler.profile() as profile:
        cross_entropy(x, t)
    assert "sparse_ce::forward" in {event.key for event in profile.key_averages()}
    with torch.autograd.profiler.profile() as profile:
        cross_entropy(x, t)
    assert "sparse_ce::forward" in {event.key for event in profile.key_averages()}
    assert not any(taken)
    cross_entropy(x, t)
    assert taken[-1]


def test_tracers_and_modes_see_an_op():
    x, t = torch.randn(ROWS, VOCAB), torch.zeros(ROWS, dtype=torch.long)
    traced = torch.jit.trace(lambda x: cross_entropy(x, t), (x,))
    other = torch.randn(ROWS, VOCAB)
    torch.testing.assert_close(traced(other), cross_entropy(other, t))
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: cross_entropy(x, t))(x)
    torch.testing.assert_close(graph(other), cross_entropy(other, t))
    exported = torch.export.export(sparse_ce.SparseCrossEntropyLoss(), (x, t)).module()
    torch.testing.assert_close(exported(other, t), cross_entropy(other, t))


@pytest.mark.parametrize("grad_output", [1.0, 3.0])
def test_logits_changed_between_forward_and_backward_are_noticed(grad_output, taken):
    """Checks the error also if forward computed the gradient. PyTorch raises it too."""
    expected_grad.remember("cross_entropy", torch.tensor(1.0))
    x = torch.randn(ROWS, VOCAB, requires_grad=True) * 1
    loss = cross_entropy(x, torch.zeros(ROWS, dtype=torch.long))
    assert taken == [True]
    x.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(torch.tensor(grad_output))


def test_a_graph_is_gone_through_once_and_twice_where_it_is_retained(taken):
    x, t = torch.randn(ROWS, VOCAB, requires_grad=True), torch.zeros(ROWS, dtype=torch.long)
    expected_grad.remember("cross_entropy", torch.tensor(1.0))
    loss = cross_entropy(x, t)
    first, = torch.autograd.grad(loss, x, retain_graph=True)
    kept = first.clone()
    first.zero_()  # the caller owns it
    second, = torch.autograd.grad(loss, x)
    assert taken == [True]
    assert_bitwise_equal(second, kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("kind", ["logits", "values", "both"])
def test_gradients_of_values_and_of_second_order(kind, taken, ops_alone):
    draw = Draw("cpu")
    indices, values = draw.integers(VOCAB, ROWS, 4), draw.uniform(ROWS, 4).double()
    logits, results = draw.normal(ROWS, VOCAB).double(), []
    for _ in range(2):
        expected_grad.remember("cross_entropy", torch.tensor(1.0, dtype=torch.float64))
        v, x = values.clone().requires_grad_(kind != "logits"), logits.clone().requires_grad_(kind != "values")
        loss = cross_entropy(x, (indices, v))
        leaves = [t for t in (v, x) if t.requires_grad]
        grads = torch.autograd.grad(loss, leaves, create_graph=kind != "values", retain_graph=True)
        if kind != "values":
            grads = [*grads, *torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)]
        results.append(grads)
        assert any(taken) == (kind == "logits" and len(results) == 1)
        taken.clear()
        ops_alone()
    for small, op in zip(*results):
        torch.testing.assert_close(small, op, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gradient", [False, True])
def test_logits_that_have_outlived_a_transform(gradient, taken):
    """Checks leftover wrappers of a transform, which PyTorch's ops look through."""
    t, wrappers = torch.arange(ROWS), []
    torch.func.grad(lambda x: (wrappers.append(x), x.sum())[1])(torch.randn(ROWS, VOCAB))
    expected = torch.nn.functional.cross_entropy(wrappers[0], t)
    expected_grad.remember("cross_entropy", torch.tensor(1.0))
    with torch.set_grad_enabled(gradient):
        torch.testing.assert_close(cross_entropy(wrappers[0], t).detach(), expected.detach())
    assert taken and not any(taken)


def test_a_large_call_does_not_spend_the_forecast_of_a_small_one(monkeypatch):
    """Checks that both look up the cached gradient and that only one takes it."""
    x = torch.randn(4, 20_000, requires_grad=True)
    taken_by, take = [], expected_grad.take
    monkeypatch.setattr(expected_grad, "take", lambda *key: (taken_by.append(take(*key)), taken_by[-1])[1])
    for _ in range(2):
        cross_entropy(x, torch.arange(4)).backward()
    assert taken_by[-1] is not None and len(taken_by) == 2
