"""Tests the rank of an id: the number of classes with a larger logit."""

import pytest
import torch

import sparse_ce
from cases import Draw
from sparse_ce import SparseTarget, linear_selected_log_probs, selected_log_probs, topk_log_probs

all_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


def ranks(x, ids, **options):
    return selected_log_probs(x, ids, return_rank=True, **options).rank.tolist()


def test_ties_count_none_and_the_place_among_them_does_not_matter(device):
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]], device=device)
    assert [ranks(x, torch.tensor([c], device=device)) for c in range(6)] == [[4], [0], [2], [0], [2], [5]]


@all_dtypes
@pytest.mark.parametrize("vocab", [1, 31, 1025, 33000])
def test_rounded_logits_tie_exactly(vocab, dtype, device):
    draw = Draw(device, vocab)
    x = (3 * draw.normal(5, vocab)).to(dtype)
    ids = draw.integers(vocab, 5)
    expected = (x > x.gather(1, ids[:, None])).sum(1).tolist()
    for options in (dict(), dict(softcap=0.5), dict(return_log_tail=True), dict(return_entropy=True, logit_scale=0.3),
                    dict(return_argmax=True, return_collision=True)):
        assert ranks(x, ids, **options) == expected


def test_the_sign_of_the_scale_orders_the_logits(device):
    x, ids = torch.tensor([[1.0, 3.0, 2.0]] * 3, device=device), torch.tensor([1, 1, 1], device=device)
    assert ranks(x, ids, logit_scale=-2.0) == [2, 2, 2]
    assert ranks(x, ids, logit_scale=torch.tensor([1.0, -1.0, 0.0], device=device)) == [0, 2, 0]


def test_the_first_id_that_is_not_padding_is_ranked(device):
    x = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 4, device=device)
    ids = torch.tensor([[-100, 2, 1], [3, -100, 1], [-100, -100, -100], [0, 0, 1]], device=device)
    assert ranks(x, ids) == [1, 3, -1, 2]
    weights = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], device=device)
    assert ranks(x, SparseTarget.from_topk(ids, weights)) == [0, 0, -1, -1]
    jagged = SparseTarget.from_jagged(torch.tensor([2, 1, 3, 0], device=device), None,
                                      torch.tensor([0, 2, 2, 3, 4], device=device))
    assert ranks(x, jagged) == [1, -1, 3, 2]


@all_dtypes
@pytest.mark.parametrize("vocab", [4, 9000])
def test_nan_is_above_every_logit(vocab, dtype, device):
    x = torch.zeros(4, vocab, device=device, dtype=dtype)
    x[0, 1], x[1, 0], x[2], x[3, 2] = torch.nan, torch.nan, torch.inf, torch.copysign(torch.tensor(torch.nan), -x[0, 0])
    ids = torch.zeros(4, dtype=torch.int64, device=device)
    assert ranks(x, ids) == [1, vocab, 0, 1]
    assert ranks(-1 - x, ids) == [1, vocab, 0, 1]
    assert ranks(x, ids, logit_scale=-1.0) == [1, vocab, 0, 1]


def test_subnormal_logits_are_not_zeros(device):
    x = torch.tensor([[0.0, 1e-40, 2e-40, *[-1.0] * 20], [-2e-40, 0.0, -1e-40, *[1.0] * 20]], device=device)
    assert ranks(x, torch.tensor([0, 0], device=device)) == [2, 22]


@all_dtypes
def test_zeros_of_either_sign_are_equal(dtype, device):
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0], [-0.0, 0.0, 2.0, -2.0]], device=device, dtype=dtype)
    for c, rank in enumerate((1, 1, 0, 3)):
        assert ranks(x, torch.tensor([c, c], device=device)) == [rank, rank]


def test_masked_classes_and_padding_classes_are_below(device):
    x = torch.tensor([[0.0, -torch.inf, 1.0, 9.0]], device=device)
    assert ranks(x, torch.tensor([1], device=device), num_classes=3) == [2]
    assert ranks(x, torch.tensor([1], device=device)) == [3]


def test_the_rank_is_the_place_in_topk(device):
    x = Draw(device).normal(4, 50)
    top = topk_log_probs(x, 50, softcap=3.0)
    for k in (0, 1, 7, 49):
        assert ranks(x, top.indices[:, k].long(), softcap=3.0) == [k] * 4


def test_the_rank_of_a_head_has_the_leading_shape_and_no_gradient(device):
    draw = Draw(device)
    hidden, weight = draw.normal(2, 3, 5).requires_grad_(), draw.normal(40, 5)
    ids = draw.integers(40, 2, 3)
    ids[0, 1] = -100
    out = linear_selected_log_probs(hidden, weight, ids, return_rank=True, chunk_rows=2)
    logits = hidden @ weight.T
    expected = (logits > logits.gather(-1, ids.clamp(min=0)[..., None])).sum(-1)
    assert torch.equal(out.rank, torch.where(ids == -100, -1, expected))
    assert not out.rank.requires_grad and not hasattr(out, "collision")

    def top_1(log_probs, ids):
        return -log_probs.log_probs, {"top 1": log_probs.rank == 0}

    _, aux = sparse_ce.linear_row_loss(top_1, hidden, weight, ids, has_aux=True, return_rank=True)
    assert torch.equal(aux["top 1"], (expected == 0) & (ids != -100))


def test_an_index_out_of_range_has_no_rank(device):
    x, ids = torch.zeros(2, 4, device=device), torch.tensor([[1, 9], [1, 2]], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="9"):
            ranks(x, ids)
        expected = torch.func.vmap(lambda x, ids: selected_log_probs(x[None], ids[None], return_rank=True).rank[0])
        assert expected(x, ids).tolist() == [-1, 0]
    else:
        assert ranks(x, ids) == [-1, 0]
