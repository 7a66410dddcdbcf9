"""Tests ``SparseTarget.from_dense``, and what the loss suggests instead of a dense target."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cases import Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, cross_entropy

VOCAB = 23


def dense_rows(device, *shape, density=0.2):
    draw = Draw(device)
    dense = draw.normal(*shape, VOCAB) * (draw.uniform(*shape, VOCAB) < density)
    if dense.numel() and shape:
        dense[(0,) * len(shape)] = 0.0
    return dense


@pytest.mark.parametrize("shape", [(7,), (3, 4), (), (0,), (2, 0)], ids=str)
def test_every_entry_that_is_not_zero_is_kept(shape, device):
    dense = dense_rows(device, *shape)
    target = SparseTarget.from_dense(dense)
    assert target.shape == dense.shape[:-1] and target.num_classes == VOCAB
    assert_bitwise_equal(target.to_dense(), dense)
    assert target.form == "jagged" and target.nnz == int(dense.ne(0).sum()) or shape == ()
    assert target.indices.is_contiguous()
    x = torch.randn_like(dense)
    expected = (-torch.log_softmax(x, -1) * dense).sum(-1)
    torch.testing.assert_close(cross_entropy(x, target, reduction="none"), expected)
    assert target.ne(-100).all()
    assert SparseTarget.from_dense(dense, ignore_empty=True).ne(-100).tolist() == dense.ne(0).any(-1).tolist()


@pytest.mark.parametrize("shape", [(7,), (3, 4), (), (0,)], ids=str)
@pytest.mark.parametrize("k", [1, 3, 500])
def test_k_keeps_the_largest_by_magnitude(k, shape, device):
    dense = dense_rows(device, *shape)
    target = SparseTarget.from_dense(dense, k)
    assert target.form == "topk" and target.indices.shape == (*shape, min(k, VOCAB))
    order = dense.abs().argsort(-1, descending=True)
    dropped = order[..., min(k, VOCAB):]
    assert_bitwise_equal(target.to_dense(), dense.scatter(-1, dropped, 0.0))
    assert target.ne(-100).all()


def test_k_may_be_any_integer(device):
    dense = dense_rows(device, 3)
    assert SparseTarget.from_dense(dense, np.int64(2)).indices.shape == (3, 2)
    for k in (True, np.float32(2), "2", 0):
        with pytest.raises(ValueError, match="k must be a positive integer or None, got"):
            SparseTarget.from_dense(dense, k)


def test_dtypes_masks_and_broken_weights(device):
    counts = torch.tensor([[0, 2, 1], [3, 0, 0], [0, 0, 0]], device=device)
    mask = torch.tensor([True, False, True], device=device)
    for k in (None, 2):
        assert SparseTarget.from_dense(counts, k).values.dtype == torch.float32
        assert SparseTarget.from_dense(counts.double(), k).values.dtype == torch.float64
        assert_bitwise_equal(SparseTarget.from_dense(counts.bool(), k).to_dense(), counts.bool().float())
        target = SparseTarget.from_dense(counts, k, row_mask=mask, ignore_empty=True)
        assert target.ne(-100).tolist() == [True, False, False]
        broken = counts.float()
        broken[0, 0] = torch.nan
        loss = cross_entropy(torch.randn(3, 3, device=device), SparseTarget.from_dense(broken, k), reduction="none")
        assert loss.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("k", [None, 4])
def test_gradients_reach_the_dense_tensor(k, device):
    dense = dense_rows(device, 5).double().requires_grad_()
    x = torch.randn(5, VOCAB, device=device, dtype=torch.float64)
    grad, = torch.autograd.grad(cross_entropy(x, SparseTarget.from_dense(dense, k), reduction="sum"), dense)
    kept = SparseTarget.from_dense(dense.detach(), k).to_dense().ne(0)
    torch.testing.assert_close(grad[kept], -torch.log_softmax(x, -1)[kept])
    assert k is None and not grad[~kept].any() or k is not None


@pytest.mark.parametrize("wrong,words", [
    (lambda: SparseTarget.from_dense(torch.eye(3).to_sparse()), "t must be dense, got layout torch.sparse_coo"),
    (lambda: SparseTarget.from_dense([["a"]]), "t must be a tensor, an array or a list of numbers, got list"),
    (lambda: SparseTarget.from_dense(torch.tensor(1.0)), r"t must be \(..., V\), got shape \[\]"),
    (lambda: SparseTarget.from_dense(torch.eye(3), 0), "k must be a positive integer or None, got 0"),
    (lambda: SparseTarget.from_dense(torch.eye(3), 2.5), "k must be a positive integer or None, got 2.5"),
    (lambda: SparseTarget.from_dense(torch.eye(3), True), "k must be a positive integer or None, got True"),
], ids=range(6))
def test_wrong_arguments(wrong, words):
    with pytest.raises((TypeError, ValueError), match="sparse_ce: " + words):
        wrong()


def test_the_advice_for_a_dense_target_works(device):
    x, dense = torch.randn(4, VOCAB, device=device), torch.softmax(torch.randn(4, VOCAB, device=device), -1)
    with pytest.raises(TypeError, match=r"sparse_ce: target must be sparse, got a dense torch.float32 tensor of shape "
                       r"\[4, 23\]; .*mixes a few labels.*\(indices, values\).*SparseTarget\.from_dense\(target\).*"
                       r"torch\.nn\.functional\.cross_entropy"):
        cross_entropy(x, dense)
    torch.testing.assert_close(cross_entropy(x, SparseTarget.from_dense(dense)), F.cross_entropy(x, dense))
    labels, other, share = torch.arange(4, device=device), torch.arange(4, 8, device=device), 0.3
    mixed = share * F.one_hot(labels, VOCAB) + (1 - share) * F.one_hot(other, VOCAB)
    pair = torch.stack((labels, other), -1), torch.tensor([share, 1 - share], device=device).expand(4, 2)
    torch.testing.assert_close(cross_entropy(x, pair), F.cross_entropy(x, mixed))
