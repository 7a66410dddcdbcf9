"""Tests that one rule for empty rows and for single rows holds for every format of target."""

import contextlib

import pytest
import torch

from cases import Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, collate, cross_entropy, linear_cross_entropy

VOCAB = 5
# The rows hold weights, stored zeros, nothing, two weights, and an index of -100 in formats that can store one.
INDICES = [[1, 3], [0, 2], [0, 0], [2, 4], [-100, -100]]
VALUES = [[0.5, 0.0], [0.0, 0.0], [0.0, 0.0], [-0.5, 0.5], [1.0, 1.0]]
LENGTHS = [2, 2, 0, 2, 2]
EMPTY = [False, True, True, False, True]


def forms(device):
    indices, values = torch.tensor(INDICES, device=device), torch.tensor(VALUES, device=device)
    kept = [i for i, n in enumerate(LENGTHS) if n]
    offsets = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    ranges = torch.stack((offsets[:-1], offsets[1:]), 1).int()
    flat, weights = indices[kept].flatten(), values[kept].flatten()
    stored = torch.tensor(kept[:3], device=device).repeat_interleave(2)
    positions = torch.stack((stored, flat[:6]))
    size = (5, VOCAB)
    coo = torch.sparse_coo_tensor(positions, weights[:6], size)
    return {
        "topk": lambda **k: SparseTarget.from_topk(indices, values, **k),
        "log_probs": lambda **k: SparseTarget.from_topk(indices, values.abs().log(), values_are="log_probs", **k),
        "jagged": lambda **k: SparseTarget.from_jagged(flat, weights, offsets, **k),
        "ranges": lambda **k: SparseTarget.from_jagged(flat, weights, ranges, **k),
        "coo": lambda **k: SparseTarget.from_coo(coo, **k),
        "coalesced": lambda **k: SparseTarget.from_coo(coo.coalesce(), **k),
        "csr": lambda **k: SparseTarget.from_csr(torch.sparse_csr_tensor(
            torch.tensor([0, 2, 4, 4, 6, 6], device=device), flat[:6], weights[:6], size), **k),
        "dense": lambda **k: SparseTarget.from_dense(
            torch.zeros(size, device=device).scatter_add(1, indices.clamp(min=0), values * indices.ge(0)), **k),
    }


@pytest.mark.parametrize("form", forms("cpu"))
def test_a_row_without_an_entry_of_weight_is_empty(form, device):
    make = forms(device)[form]
    assert make(ignore_empty=True).ne(-100).tolist() == [not e for e in EMPTY]
    mask = torch.tensor([False, True, True, True, True], device=device)
    assert make(ignore_empty=True, row_mask=mask).ne(-100).tolist() == [False, False, False, True, False]
    x = torch.randn(5, VOCAB, device=device)
    rows = cross_entropy(x, make(), reduction="none")
    torch.testing.assert_close(cross_entropy(x, make(ignore_empty=True)), rows.sum() / 2)


def test_ids_without_weights_and_rows_that_overlap(device):
    indices = torch.tensor([-100, 3, -100], device=device)
    offsets = torch.tensor([[0, 1], [0, 2], [1, 3], [2, 2], [2, 3]], device=device)
    target = SparseTarget.from_jagged(indices, None, offsets, ignore_empty=True)
    assert target.ne(-100).tolist() == [False, True, True, False, False]
    assert SparseTarget.from_jagged(indices[:0], None, offsets[3:4] * 0, ignore_empty=True).ne(-100).tolist() == [False]


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [0, 2, 9, 9], [-1, 2, 3, 4]], ids=str)
def test_wrong_offsets_are_no_empty_rows(offsets, device):
    target = SparseTarget.from_jagged(torch.arange(4, device=device), torch.zeros(4, device=device),
                                      torch.tensor(offsets, device=device), ignore_empty=True)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="sparse_ce: target must have offsets with 0 <= begin <= end"):
            cross_entropy(torch.randn(3, VOCAB), target)
    else:
        assert cross_entropy(torch.randn(3, VOCAB, device=device), target).isnan()


# ------------------------------------------------------------------------------------------------------- a single row

ROWS = [[(2, 1.0)], [(2, 0.5), (2, 0.25)], [(0, 1.0)], [], [(1, 0.0)], [(2, 0.5), (1, 0.5)]]


def single_rows(device):
    """Yields each row as (1, V) and as (V,)."""
    for row in ROWS:
        classes = torch.tensor([c for c, _ in row], dtype=torch.int64, device=device)
        weights = torch.tensor([w for _, w in row], device=device)
        positions = torch.stack((torch.zeros_like(classes), classes))
        yield (torch.sparse_coo_tensor(positions, weights, (1, VOCAB)),
               torch.sparse_coo_tensor(positions[1:], weights, (VOCAB,)))


@pytest.mark.parametrize("ignore_index", [-100, 0, 1, 2, -1])
def test_a_single_row_means_what_a_batch_of_one_does(ignore_index, device):
    x = torch.randn(VOCAB, device=device)
    options = {"ignore_index": ignore_index, "z_loss": 0.1}
    for batch, row in single_rows(device):
        expected = cross_entropy(x[None], batch, **options)
        assert expected != 0  # a row of entries is active whatever the entries are
        target = SparseTarget.from_coo(batch)
        singles = {"coo": row, "row": target[0], "last": target[-1], "dense": SparseTarget.from_dense(row.to_dense()),
                   "ranges": collate([target])[0, 0], "unpacked": next(iter(target))}
        for single in singles.values():
            assert_bitwise_equal(cross_entropy(x, single, **options), expected)
        for single in (target[0], SparseTarget.from_coo(row)):
            assert single.shape == () and bool(single.ne(ignore_index))
            assert_bitwise_equal(single.to_dense(), batch.to_dense()[0])
            assert_bitwise_equal(cross_entropy(x[None], collate([single]), **options), expected)


@pytest.mark.parametrize("ignore_index", [-100, 0, 1, 2])
def test_rows_collated_one_by_one_and_taken_apart_keep_their_meaning(ignore_index, device):
    batches = [SparseTarget.from_coo(batch) for batch, _ in single_rows(device)]
    x = torch.randn(len(ROWS), VOCAB, device=device)
    options = {"ignore_index": ignore_index, "z_loss": 0.1, "reduction": "none"}
    expected = torch.cat([cross_entropy(x[i:i + 1], t, **options) for i, t in enumerate(batches)])
    rows = collate([t[0] for t in batches])
    assert_bitwise_equal(cross_entropy(x, rows, **options), expected)
    assert_bitwise_equal(cross_entropy(x, SparseTarget(dict(rows.items())), **options), expected)
    no_weights = torch.zeros(1, 0, device=device)
    nothing = SparseTarget.from_topk(no_weights.long(), no_weights)
    one = SparseTarget.from_topk(torch.tensor([[3]], device=device), torch.ones(1, 1, device=device))
    for target in (collate([nothing, one])[0], SparseTarget(dict(nothing.items())), nothing):
        assert cross_entropy(x[:1], target, **options) != 0


def test_gradients_of_a_single_row(device):
    values = torch.rand(4, dtype=torch.float64, device=device, requires_grad=True)
    x = torch.randn(VOCAB, dtype=torch.float64, device=device, requires_grad=True)
    indices, offsets = torch.tensor([2, 2, 1, 4], device=device), torch.tensor([0, 2, 4], device=device)
    assert torch.autograd.gradcheck(lambda x, v: cross_entropy(x, SparseTarget.from_jagged(indices, v, offsets)[0]),
                                    (x, values))


def through_head(x, target, **options):
    return linear_cross_entropy(x, torch.eye(x.shape[-1], device=x.device), target, **options)


@pytest.mark.parametrize("loss", [cross_entropy, through_head])
def test_a_target_keeps_its_padding_under_another_ignore_index(loss, device):
    """Checks this because frameworks, ``collate`` and every SparseTarget mark padding and masked rows with -100."""
    x = Draw(device).normal(3, 9)
    indices = torch.tensor([[2, 3], [5, 6], [-1, -1]], device=device)
    values = torch.tensor([[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]], device=device)
    topk = SparseTarget.from_topk(indices, values, ignore_empty=True)
    labels = SparseTarget.from_index(indices[:, 0], row_mask=torch.tensor([True, False, True], device=device))
    ids = SparseTarget.from_topk(indices, None, mask=torch.tensor([[True, True], [False, False], [True, True]],
                                                                  device=device))
    apart = torch.tensor([[2, 3], [5, 6], [-1, -1]], device=device), torch.tensor([0, 2, 2, 2], device=device)
    jagged = SparseTarget.from_jagged(apart[0].flatten(), None, apart[1], ignore_empty=True)
    for target in (topk, labels, ids, jagged):
        expected = loss(x[:1], target[:1], ignore_index=-1)  # the other rows are ignored, in two ways
        for same in (target, SparseTarget(dict(target.items())), collate([t for t in target])):
            torch.testing.assert_close(loss(x, same, ignore_index=-1), expected)
    wide = collate([SparseTarget.from_topk(torch.tensor(k, device=device), None) for k in ([1, 2], [1], [-1])])
    losses = loss(x, wide, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses[:2], torch.stack([
        loss(x[row], SparseTarget.from_topk(torch.tensor(k, device=device), None))
        for row, k in ((0, [1, 2]), (1, [1]))]))
    assert losses[2] == 0
    with pytest.raises(RuntimeError, match="got -100 in row 1") if x.is_cpu else contextlib.nullcontext():
        # A plain tensor has no padding mark of its own.
        loss(x, torch.tensor([1, -100, 2], device=device), ignore_index=-1)
