"""Tests the device on which ranks exchange their numbers of classes. With NCCL it must be the GPU of the tensors, which
need not be the current one."""

from types import SimpleNamespace

import pytest
import torch

import sparse_ce
from sparse_ce import SequenceGroup
from sparse_ce.sharding import groups

LABELS = torch.zeros(4, dtype=torch.int64, device="meta")
ENTRIES = torch.zeros(4, 2, dtype=torch.int64, device="meta"), torch.ones(4, 2, device="meta")
LOGITS, HIDDEN, HEAD = (torch.zeros(shape, device="meta") for shape in ((4, 8), (4, 3), (8, 3)))
GROUP = SimpleNamespace(group_name="of two", size=lambda: 2, rank=lambda: 1)


class Exchanged(Exception):
    """Ends a call at its exchange of the numbers of classes."""


@pytest.fixture
def devices(monkeypatch):
    """Returns the devices of the exchanged tensors. The backend is a stand-in for one of GPUs only."""
    found = []

    def gather(t, shard):
        found.append(t.device)
        raise Exchanged

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(groups, "gather", gather)
    monkeypatch.setattr(groups, "compares_ranks", lambda: False)
    return found


CALLS = {
    "cross_entropy": lambda g: sparse_ce.cross_entropy(LOGITS, LABELS, group=g),
    "selected_log_probs": lambda g: sparse_ce.selected_log_probs(LOGITS, LABELS, group=g),
    "topk_log_probs": lambda g: sparse_ce.topk_log_probs(LOGITS, 2, group=g),
    "divergence": lambda g: sparse_ce.divergence(LOGITS, ENTRIES, group=g),
    "distillation_loss": lambda g: sparse_ce.distillation_loss(LOGITS, ENTRIES, LABELS, alpha=0.5, group=g),
    "dense_divergence": lambda g: sparse_ce.distillation_loss(LOGITS, LOGITS, group=g),
    "binary": lambda g: sparse_ce.binary_cross_entropy_with_logits(LOGITS, ENTRIES, group=g),
    "linear_cross_entropy": lambda g: sparse_ce.linear_cross_entropy(HIDDEN, HEAD, LABELS, group=g),
    "linear_log_probs": lambda g: sparse_ce.linear_selected_log_probs(HIDDEN, HEAD, LABELS, group=g),
    "linear_topk_log_probs": lambda g: sparse_ce.linear_topk_log_probs(HIDDEN, HEAD, 2, group=g),
    "linear_row_loss": lambda g: sparse_ce.linear_row_loss(lambda row, _: row.lse, HIDDEN, HEAD, LABELS, group=g),
    "linear_distillation_loss": lambda g: sparse_ce.linear_distillation_loss(
        HIDDEN, HEAD, ENTRIES, LABELS, alpha=0.5, group=g),
    "linear_binary": lambda g: sparse_ce.linear_binary_cross_entropy(HIDDEN, HEAD, ENTRIES, group=g),
    "linear_dense_divergence": lambda g: sparse_ce.linear_distillation_loss(HIDDEN, HEAD, (HIDDEN, HEAD), group=g),
    "sequence parallel": lambda g: sparse_ce.linear_cross_entropy(HIDDEN, HEAD, LABELS, group=SequenceGroup(g)),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_classes_are_exchanged_on_the_device_of_the_tensors(name, devices):
    with pytest.raises(Exchanged):
        CALLS[name](GROUP)
    assert devices == [torch.device("meta")]
