"""Tests the row of each entry of a target: every format, slices, joined targets, and losses of rows."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_ce
from cases import FORMS, Draw
from compiling import jagged
from sparse_ce import SparseTarget, linear_row_loss, linear_selected_log_probs, segment_log_softmax
from sparse_ce.targets.convert import as_target


def expected(target):
    """Returns (row of each entry, whether the entry belongs to a row), computed from the ranges."""
    rows = target.shape.numel()
    if target.offsets is None:
        numbers = torch.arange(rows).reshape(target.shape)
        if target.form == "topk":
            numbers = numbers[..., None].expand(target.indices.shape)
        return numbers, torch.ones(numbers.shape, dtype=torch.bool)
    offsets = target.offsets.tolist()
    ranges = target.offsets.reshape(-1, 2).tolist() if target.offsets.dim() > 1 else list(zip(offsets, offsets[1:]))
    found = torch.full(target.indices.shape, -1)
    for row, (begin, end) in enumerate(ranges):
        found[begin:end] = row
    return found, found >= 0


def check(target):
    rows, owned = expected(target)
    found = target.row_indices()
    assert found.dtype == torch.int64 and found.shape == target.indices.shape and found.device == target.device
    assert torch.equal(found.cpu()[owned], rows[owned])
    assert ((found >= 0) & (found < max(1, target.shape.numel()))).all(), "a row that nobody has"
    return owned


@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_its_slices(form, device):
    case = FORMS[form]((3, 4), 37, Draw(device))
    target = as_target(case.target, torch.Size((*case.shape, 37)))
    of_rows = (target, target[2:], target[::2])
    flat = target.flatten()
    for t in of_rows if len(case.shape) == 1 else (target, flat, target[1:], target[:, 1:3], target[[2, 0]], target[:0],
                                                   target.shift(1), flat[3:9], flat[::2]):
        check(t)
        assert check(t.compact(wait=True)).all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_ranges_in_any_order_with_gaps(index_dtype, device):
    offsets = torch.tensor([[6, 8], [3, 3], [0, 2], [99, 1], [4, 6], [-7, -7]], dtype=index_dtype, device=device)
    target = SparseTarget.from_jagged(torch.arange(9, dtype=index_dtype, device=device), None, offsets)
    assert target.row_indices()[[0, 1, 4, 5, 6, 7]].tolist() == [2, 2, 4, 4, 0, 0]
    assert target.row_indices().dtype == torch.int64
    empty = SparseTarget.from_jagged(torch.arange(3, device=device), None, torch.tensor([0], device=device))
    assert empty.row_indices().tolist() == [0, 0, 0] and empty.compact(wait=True).row_indices().tolist() == []


def test_joined_targets_and_those_of_frameworks(device):
    draw = Draw(device)
    a, b = jagged(9, draw), jagged(5, draw)
    joined = SparseTarget.cat([a[2:], b])
    check(joined)
    joined = joined.compact(wait=True)  # CUDA is not synchronized, so the entries of a[:2] are still there
    assert joined.offsets.dim() == 2 and check(joined).all()
    by_sample = SparseTarget(dict(joined.reshape(2, 5).items()))
    assert by_sample.by_sample
    rows, ids = by_sample.row_indices(), by_sample.indices
    assert rows.shape == ids.shape
    sums = torch.zeros(10, device=device).index_add(0, rows.flatten(), by_sample.values.flatten())
    torch.testing.assert_close(sums, torch.zeros(10, device=device).index_add(0, joined.row_indices(), joined.values))


def sum_of_entries(out, target, by):
    """Returns each row's weighted sum of its entries' log-probabilities, for sets of any length, as user code does."""
    terms = torch.where(out.log_probs.isneginf(), 0.0, target.values * out.log_probs)
    return -by * terms.new_zeros(len(target)).index_add(0, target.row_indices(), terms)


@pytest.mark.parametrize("form", ["jagged", "jagged-ranges", "coo", "csr-int64"])
@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_a_loss_of_rows_on_sets_of_any_length(chunk_rows, form, device):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    hidden, head, by = (draw.normal(*s, dtype=torch.float64) for s in ((*case.shape, 6), (37, 6), case.shape))
    target = as_target(case.target, torch.Size((*case.shape, 37)))
    results = []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in (hidden, head)]
        if ours:
            loss = linear_row_loss(sum_of_entries, *leaves, target, by, reduction="sum", chunk_rows=chunk_rows)
        else:
            dense = target.to_dense(torch.float64, num_classes=37)
            loss = -(by[..., None] * dense * torch.log_softmax(leaves[0] @ leaves[1].T, -1)).sum()
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_a_slice_whose_entries_nobody_can_count_loses_nothing(device, fresh_compiler):
    """Checks compiled code, as on CUDA: the entries of other rows stay, and are padding in the log-probabilities."""
    draw = Draw(device)
    hidden, head, by = draw.normal(6, 4), draw.normal(11, 4), draw.normal(6)
    target = jagged(9, draw)

    def f(h, target, by):
        return linear_row_loss(sum_of_entries, h[2:5], head, target[2:5], by[2:5])

    eager = linear_row_loss(sum_of_entries, hidden[2:5], head, target[2:5].compact(), by[2:5])
    torch.testing.assert_close(f(hidden, target, by), eager)
    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(hidden, target, by), eager)


def test_a_changing_number_of_rows_and_entries_compiles_twice_at_most(device, fresh_compiler):
    counter, draw = CompileCounterWithBackend("aot_eager"), Draw(device)
    compiled = torch.compile(lambda t: t.row_indices(), backend=counter, fullgraph=True)
    for rows, nnz in ((5, 9), (9, 20), (7, 12), (12, 5)):
        target = jagged(nnz, draw, rows)
        assert torch.equal(compiled(target), target.row_indices())
    assert counter.frame_count <= 2


def test_segments_of_a_joined_target(device):
    """Checks that its ranges are not offsets of segments, and that the error suggests the alternative."""
    draw = Draw(device)
    joined = SparseTarget.cat([jagged(9, draw), jagged(5, draw)])
    x = draw.normal(joined.nnz)
    with pytest.raises(ValueError, match=r"sparse_ce: offsets must be \(segments \+ 1,\), got \[12, 2\]; pass "
                                         r"index=target.row_indices\(\)"):
        segment_log_softmax(x, offsets=joined.offsets)
    found = segment_log_softmax(x, index=joined.row_indices())
    for begin, end in joined.offsets.tolist():
        torch.testing.assert_close(found[begin:end], x[begin:end].log_softmax(0))
    out = linear_selected_log_probs(draw.normal(12, 4), draw.normal(11, 4), joined)
    assert out.log_probs.shape == joined.row_indices().shape


SHARED = {"one set of many rows": [[0, 4]] * 3, "windows": [[0, 3], [2, 5], [4, 9], [0, 0], [8, 9]],
          "out of order": [[5, 9], [0, 2], [1, 6]], "beside an empty row": [[3, 3], [2, 4], [3, 5]]}


@pytest.mark.parametrize("kind", ["probs", "log_probs", None])
@pytest.mark.parametrize("ranges", SHARED.values(), ids=SHARED)
def test_rows_that_share_entries_have_them_each(ranges, kind, monkeypatch, device):
    """Checks this because otherwise the gradient of a shared value would be that of a single row."""
    monkeypatch.setattr("sparse_ce.targets.storage.VALIDATES", True)  # otherwise CUDA is not synchronized
    draw, rows = Draw(device), len(ranges)
    ids, offsets = torch.arange(9, device=device) * 4, torch.tensor(ranges, device=device)
    values = None if kind is None else draw.uniform(9, low=0.1, dtype=torch.float64).requires_grad_()
    logits, grad_output = draw.normal(rows, 37, dtype=torch.float64), draw.normal(rows, dtype=torch.float64)
    weights = torch.ones(9, device=device).double() if kind is None else values.exp() if kind == "log_probs" else values
    dense = torch.stack([weights.new_zeros(37).index_put((ids[begin:end],), weights[begin:end])
                         for begin, end in ranges])
    expected = -(logits.log_softmax(-1) * dense).sum(-1)

    target = SparseTarget.from_jagged(ids, values, offsets, values_are=kind or "probs")
    assert target.shape == (rows,) and check(target).all()
    found = sparse_ce.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(found, expected)
    if values is not None:
        gradients = (torch.autograd.grad((t * grad_output).sum(), values)[0] for t in (found, expected))
        torch.testing.assert_close(*gradients)
    out = sparse_ce.selected_log_probs(logits, target).log_probs
    torch.testing.assert_close(out, logits.log_softmax(-1)[target.row_indices(), target.indices])

    empty = SparseTarget.from_jagged(ids, values, offsets, values_are=kind or "probs", ignore_empty=True)
    assert empty.ne(-100).tolist() == [begin < end for begin, end in ranges]


@pytest.mark.parametrize("ranges", [[[0, 2], [2, 5]], [[2, 5], [0, 2]], [[0, 2], [1, 99]], [[1, 3], [-2, 2]],
                                    [[4, 2], [0, 3]], [[0, 3], [9, 9], [4, 5]]], ids=str)
def test_other_rows_keep_the_entries_that_they_are_given(ranges, device):
    """Checks invalid ranges too, which the loss reports."""
    ids, offsets = torch.arange(5, device=device), torch.tensor(ranges, device=device)
    target = SparseTarget.from_jagged(ids, None, offsets)
    assert target.indices.data_ptr() == ids.data_ptr() and target.offsets.tolist() == ranges
