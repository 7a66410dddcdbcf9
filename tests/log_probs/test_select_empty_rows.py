"""Tests selected log-probabilities without rows, entries or classes: every element has its documented value."""

import pytest
import torch

from refusals import assert_refused
from sparse_ce import SparseTarget, linear_selected_log_probs, selected_log_probs

ops = torch.ops.sparse_ce


def dirty():
    """Fills freed memory with a value other than zero."""
    for size in (1, 2, 4, 8, 16, 64):
        torch.full((size,), -3.7e28)


def targets(device):
    def tensor(*numbers, shape=None):
        return torch.tensor(numbers, dtype=torch.int64, device=device).view(shape or (len(numbers),))

    ids, values = tensor(1, 2), torch.tensor([0.5, 0.25], device=device)
    return {"ranges": SparseTarget.from_jagged(ids, None, tensor(shape=(0, 2))),
            "ranges with values": SparseTarget.from_jagged(ids, values, tensor(shape=(0, 2))),
            "ranges of int32": SparseTarget.from_jagged(ids.int(), None, tensor(shape=(0, 2)).int()),
            "ends": SparseTarget.from_jagged(tensor(), None, tensor(0)),
            "top-k": SparseTarget.from_topk(tensor(shape=(0, 3)), None), "labels": tensor()}


@pytest.mark.parametrize("name", targets("cpu"))
@pytest.mark.parametrize("padding", [None, -7.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ids_of_no_row_are_padding(name, padding, dtype, device):
    target = targets(device)[name]
    options = {} if padding is None else dict(padding_value=padding)
    expected = -torch.inf if padding is None else padding
    x = torch.randn(0, 10, device=device, dtype=dtype)
    weight = torch.randn(10, 4, device=device, dtype=dtype)
    for _ in range(3):
        dirty()
        for given in (x, x.clone().requires_grad_()):
            assert (selected_log_probs(given, target, **options).log_probs == expected).all()
        for given in (x[:, :4], x[:, :4].clone().requires_grad_()):
            out = linear_selected_log_probs(given, weight, target, **options)
            assert (out.log_probs == expected).all()


def test_rows_without_entries_and_ids_of_no_row_are_padding(device):
    x, ids = torch.randn(2, 10, device=device), torch.tensor([1, 2, 3], device=device)
    offsets = torch.tensor([[0, 0], [1, 2]], device=device)
    out = selected_log_probs(x, SparseTarget.from_jagged(ids, None, offsets), padding_value=5.0).log_probs
    assert out[[0, 2]].tolist() == [5.0, 5.0]
    torch.testing.assert_close(out[1], x[1].log_softmax(0)[2])


def test_every_op_without_rows_writes_what_it_returns(device):
    ids, offsets = torch.tensor([1, 2], device=device), torch.zeros(0, 2, dtype=torch.int64, device=device)
    x, weight = torch.zeros(0, 10, device=device), torch.zeros(10, 4, device=device)
    for _ in range(3):
        dirty()
        assert (ops.select(x, ids, None, offsets)[3] == -torch.inf).all()
        statistics, chosen = ops.select_shard(x, ids, None, offsets, num_classes=10)
        assert (chosen == 0).all()
        dirty()
        assert (ops.select_merge(statistics, 1, chosen, ids, None, offsets, num_classes=10)[3] == -torch.inf).all()
        assert (ops.linear_select(x[:, :4], weight, None, ids, None, offsets)[3] == -torch.inf).all()
        assert (ops.candidate_logits(x[:, :4], weight, None, ids, None, offsets) == -torch.inf).all()
        assert (ops.backward_values(x[:, 0], x, x[:, 0], None, ids, None, offsets) == 0).all()


def test_outputs_that_are_not_asked_for_stay_empty_if_every_row_is_ignored(device):
    x, weight = torch.zeros(3, 4, device=device), torch.zeros(10, 4, device=device)
    ids = torch.full((3, 2), -100, device=device)
    out = ops.linear_select(x, weight, None, ids, log_probs=False)
    assert [t.numel() for t in out] == [0, 3, 3, 0, 0, 0, 0, 0, 0, 0]
    lse = torch.zeros(3, device=device)
    made = ops.linear_select_backward(None, lse, *(None,) * 5, x, weight, None, lse, *(None,) * 4, ids)
    assert [t.numel() for t in made] == [12, 40, 0, 0] and not made[0].any() and not made[1].any()
    out = ops.linear_select(x, weight, None, ids, loss=True, log_probs=False, argmax=True, mean=True)
    assert [t.numel() for t in out] == [1, 3, 3, 0, 0, 0, 0, 3, 0, 0]


def test_a_padding_value_is_a_number_of_the_arithmetic(device):
    x, ids = torch.zeros(2, 5, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    for wrong in (1e39, -1e300):
        assert_refused(lambda: ops.select(x, ids, padding_value=wrong), "padding_value", error=RuntimeError)
        assert ops.select(x.double(), ids, padding_value=wrong)[3].shape == (2, 1)
    for right in (float("nan"), float("inf"), -3e38):
        ops.select(x, ids, padding_value=right)
