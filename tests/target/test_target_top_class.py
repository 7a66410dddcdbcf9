"""Tests ``SparseTarget.is_top_class``, which tells correct predictions, for every format of target."""

import numpy as np
import pytest
import torch

from sparse_ce import SparseTarget


def targets(seed):
    """Yields targets (6, 5) over 7 classes in every format: duplicates, ties, negative weights, padding, ignored and
    empty rows."""
    g = torch.Generator().manual_seed(seed)
    indices = torch.randint(7, (6, 5, 4), generator=g)
    weights = torch.randint(-1, 4, (6, 5, 4), generator=g) / 4
    mask = torch.rand(6, 5, generator=g) < 0.8
    indices[torch.rand(6, 5, 4, generator=g) < 0.2] = -100
    known = dict(row_mask=mask, num_classes=7)
    yield SparseTarget.from_topk(indices, weights, **known)
    yield SparseTarget.from_topk(indices, weights.half(), **known)
    yield SparseTarget.from_topk(indices, weights.clamp(min=0).log() - 3, values_are="log_probs", **known)
    yield SparseTarget.from_topk(indices, None, **known)
    yield SparseTarget.from_topk(indices[..., :0], weights[..., :0], **known)
    yield SparseTarget.from_index(indices[..., 0], **known)
    lengths = torch.randint(5, (30,), generator=g)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    total = int(offsets[-1])
    flat, values = indices.reshape(-1)[:total], weights.reshape(-1)[:total]
    for kept in (values, values.double(), None):
        jagged = SparseTarget.from_jagged(flat, kept, offsets, row_mask=mask.reshape(-1), num_classes=7).reshape(6, 5)
        yield jagged
        yield jagged[2:, 1:]


@pytest.mark.parametrize("seed", range(4))
def test_the_top_class_of_a_target_is_that_of_the_dense_one(seed):
    seen = set()
    for target in targets(seed):
        dense, counts = target.to_dense(torch.float64), target.ne(-100)
        if target.values_are == "log_probs":
            dense = dense.float()  # rounded exponentials may tie
        for c in range(7):
            classes = torch.full(target.shape, c)
            largest = dense.amax(-1)
            expected = counts & (dense[..., c] == largest) & largest.gt(0)
            ours = target.is_top_class(classes)
            assert ours.dtype == torch.bool and torch.equal(ours, expected), target
            seen.update(ours.reshape(-1).tolist())
    assert seen == {True, False}


def test_duplicates_add_up_before_classes_are_compared():
    target = SparseTarget.from_topk(torch.tensor([[3, 5, 3], [5, 3, 3]]),
                                    torch.tensor([[0.3, 0.4, 0.3], [0.25, 0.5, -0.4]]))
    assert target.is_top_class(torch.tensor([3, 3])).tolist() == [True, False]
    assert target.is_top_class(torch.tensor([5, 5])).tolist() == [False, True]


def test_classes_of_another_shape_or_type_are_refused():
    target = SparseTarget.from_index(torch.zeros(6, 5, dtype=torch.int64))
    for classes, error in ((torch.zeros(5, dtype=torch.int64), ValueError), (torch.zeros(6, 5), TypeError),
                           (torch.zeros(6, 5, dtype=torch.bool), TypeError), (["a"], TypeError)):
        with pytest.raises(error, match="sparse_ce: classes must be"):
            target.is_top_class(classes)


def test_a_target_that_travels_by_sample_has_top_classes():
    target = SparseTarget.from_jagged([3, 5, 7], [0.2, 0.8, 1.0], [[[0, 2]], [[2, 3]]], num_classes=9)
    parts = SparseTarget(dict(target.items()))
    assert parts.by_sample and parts.is_top_class(torch.tensor([[5], [3]])).tolist() == [[True], [False]]


def test_a_target_of_arrays_tells_it_of_arrays():
    target = SparseTarget.from_topk([[3, 5]], [[0.25, 0.75]])._map(lambda t: t.numpy())
    assert target.is_top_class(np.array([5])).tolist() == [True]


def test_an_empty_target_and_a_single_row():
    for indices, values in ((torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4)),
                            (torch.zeros(0, dtype=torch.int64), None)):
        target = SparseTarget.from_topk(indices, values) if values is not None else SparseTarget.from_index(indices)
        assert target.is_top_class(torch.zeros(0, dtype=torch.int64)).shape == (0,)
    row = SparseTarget.from_topk([3, 5], [0.25, 0.75])
    assert row.is_top_class(torch.tensor(5)) and not row.is_top_class(torch.tensor(3))
