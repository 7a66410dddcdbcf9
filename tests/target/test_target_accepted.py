"""Tests the types that a target may have, in every function that takes one: each equals its ``SparseTarget``."""

import numpy as np
import pytest
import scipy.sparse
import torch

import sparse_ce
from cases import Draw
from refusals import assert_refused
from sparse_ce import SparseTarget

CLASSES = 5
IDS = torch.tensor([[1, 3], [2, -100], [-100, -100]])
LABELS = torch.tensor([1, -100, 3])
TOPK = torch.tensor([[1, 3], [2, 0], [4, 3]]), torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
ROWS = [(1, 3), (), (2,)]
MATRIX = np.array([[0, 2, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 3, 0]])


class Foreign:
    """An array of another library, which shares its memory through DLPack only."""

    def __init__(self, t):
        self.t = t

    def __dlpack__(self, **kwargs):
        return self.t.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.t.__dlpack_device__()


ACCEPTED = {  # description: (what is passed, the target)
    "labels in a list": (LABELS.tolist(), LABELS),
    "labels in a tuple": (tuple(LABELS.tolist()), LABELS),
    "labels of NumPy in a list": (list(LABELS.numpy()), LABELS),
    "labels as scalar tensors": (list(LABELS), LABELS),
    "labels in a range": (range(3), torch.arange(3)),
    "labels of NumPy": (LABELS.numpy().astype(np.int16), LABELS),
    "labels through DLPack": (Foreign(LABELS), LABELS),
    "a column of labels": (LABELS[:, None], SparseTarget.from_topk(LABELS[:, None], None)),
    "ids": (IDS, SparseTarget.from_topk(IDS, None)),
    "ids in int16": (IDS.short(), SparseTarget.from_topk(IDS, None)),
    "ids of NumPy": (IDS.numpy(), SparseTarget.from_topk(IDS, None)),
    "ids in lists": (IDS.tolist(), SparseTarget.from_topk(IDS, None)),
    "a pair of NumPy": (tuple(t.numpy() for t in TOPK), SparseTarget.from_topk(*TOPK)),
    "a pair in a list": (list(TOPK), SparseTarget.from_topk(*TOPK)),
    "a pair of lists": (tuple(t.tolist() for t in TOPK), SparseTarget.from_topk(*TOPK)),
    "a pair of counts": ((TOPK[0].numpy(), MATRIX[:, :2]), SparseTarget.from_topk(TOPK[0], MATRIX[:, :2])),
    "a pair without weights": ((IDS, None), SparseTarget.from_topk(IDS, None)),
    "the classes of each row": (ROWS, SparseTarget.from_lists(ROWS)),
    "the classes of each row in a tuple": (tuple(ROWS), SparseTarget.from_lists(ROWS)),
    "the classes of each row as floats": ([(1.0, 3.0), (), (2.0,)], SparseTarget.from_lists(ROWS)),
    "the classes of each row as sets": ([set(row) for row in ROWS], SparseTarget.from_lists(ROWS)),
    "the classes of each row as tensors": ([torch.tensor(row, dtype=torch.int64) for row in ROWS],
                                           SparseTarget.from_lists(ROWS)),
    "a SciPy CSR matrix": (scipy.sparse.csr_matrix(MATRIX), SparseTarget.from_scipy(scipy.sparse.csr_matrix(MATRIX))),
    "a SciPy COO array": (scipy.sparse.coo_array(MATRIX), SparseTarget.from_scipy(scipy.sparse.csr_matrix(MATRIX))),
}
LOSSES = {
    "cross_entropy": sparse_ce.cross_entropy,
    "linear_cross_entropy": lambda x, t: sparse_ce.linear_cross_entropy(x, torch.eye(CLASSES, device=x.device), t),
    "binary": sparse_ce.binary_cross_entropy_with_logits,
    "linear binary": lambda x, t: sparse_ce.linear_binary_cross_entropy(x, torch.eye(CLASSES, device=x.device), t),
    "module": lambda x, t: sparse_ce.SparseCrossEntropyLoss()(x, t),
}
QUERIES = {
    "selected": lambda x, t: sparse_ce.selected_log_probs(x, t).log_probs,
    "linear selected": lambda x, t: sparse_ce.linear_selected_log_probs(x, torch.eye(CLASSES), t).log_probs,
    "candidates": lambda x, t: sparse_ce.candidate_logits(x, torch.eye(CLASSES), t),
    "row loss": lambda x, t: sparse_ce.linear_row_loss(lambda q, rows: q.lse, x, torch.eye(CLASSES), t),
}
OTHERS = {
    "labels beside a teacher": lambda x, t: sparse_ce.distillation_loss(x, TOPK, t, alpha=0.5),
    "metrics": lambda x, t: sparse_ce.metrics.precision_at_k(x.topk(2).indices, t, 2),
}


@pytest.mark.parametrize("kind, function", [
    (kind, function) for kind, (given, _) in ACCEPTED.items() for function in (*LOSSES, *QUERIES, *OTHERS)
    if function != "metrics" or getattr(given, "ndim", 1) == 1 or scipy.sparse.issparse(given)])
def test_a_target_may_be(kind, function):
    given, target = ACCEPTED[kind]
    f = {**LOSSES, **QUERIES, **OTHERS}[function]
    x = Draw("cpu").normal(3, CLASSES)
    assert torch.equal(f(x, given).flatten(), f(x, target).flatten())


@pytest.mark.parametrize("function", [*LOSSES, *QUERIES])
@pytest.mark.parametrize("kind", [kind for kind, (given, _) in ACCEPTED.items()
                                  if isinstance(given, (list, tuple)) and len(given) == 3])
def test_two_rows_are_no_pair(kind, function):
    (given, target), f, x = ACCEPTED[kind], {**LOSSES, **QUERIES}[function], Draw("cpu").normal(2, CLASSES)
    if torch.is_tensor(target) or target.form == "topk":
        expected = target[:2]
    else:
        expected = SparseTarget.from_lists(given[:2])
    assert torch.equal(f(x, given[:2]).flatten(), f(x, expected).flatten())


def test_metrics_refuse_ids_which_may_be_dense():
    for ids in (IDS, IDS.numpy()):
        assert_refused(lambda: sparse_ce.metrics.precision_at_k(torch.tensor([[1, 2]] * 3), ids, 2), "target", "[3, 2]",
                       "SparseTarget.from_topk(target, None)")


@pytest.mark.parametrize("function", QUERIES)
def test_a_query_takes_a_smoothed_target_without_its_smoothing(function):
    x, target = Draw("cpu").normal(3, CLASSES), SparseTarget.from_index(LABELS)
    smoothed = sparse_ce.SmoothedTarget(target, 0.1)
    assert torch.equal(QUERIES[function](x, smoothed), QUERIES[function](x, target))


@pytest.mark.parametrize("function", LOSSES)
def test_ids_of_each_position_of_a_sequence(function):
    x, ids = Draw("cpu").normal(2, 3, CLASSES), torch.stack((IDS, IDS.flip(0)))
    expected = LOSSES[function](x.flatten(0, 1), ids.flatten(0, 1))
    for given in (ids, ids.numpy(), ids.tolist()):
        torch.testing.assert_close(LOSSES[function](x, given), expected)
    labels = ids[..., 0]
    assert torch.equal(LOSSES[function](x, labels.tolist()), LOSSES[function](x, labels))


def test_ids_may_mark_padding_with_another_ignore_index(device):
    x, ids = Draw(device).normal(3, CLASSES), torch.tensor([[1, 3], [2, 0], [0, 0]], device=device)
    for function in (sparse_ce.cross_entropy, sparse_ce.binary_cross_entropy_with_logits):
        got = function(x, ids, ignore_index=0, reduction="none")
        assert torch.equal(got, function(x, torch.where(ids == 0, -100, ids), reduction="none")) and got[2] == 0


@pytest.mark.parametrize("kind", [kind for kind, (given, _) in ACCEPTED.items() if not torch.is_tensor(given)
                                  and kind not in ("a pair in a list", "a pair without weights",
                                                   "the classes of each row as tensors", "labels as scalar tensors")])
def test_data_without_a_device_moves_to_that_of_the_logits(kind, device):
    logits, given = Draw(device).normal(3, CLASSES), ACCEPTED[kind][0]
    for x in (logits, logits.to("meta")):
        for name, f in LOSSES.items():
            if "binary" not in name or x.device.type != "meta":
                assert f(x, given).device == x.device, name


def test_compiled_losses_take_ids():
    x = Draw("cpu").normal(3, CLASSES)
    for function in (sparse_ce.cross_entropy, sparse_ce.binary_cross_entropy_with_logits):
        compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
        torch.testing.assert_close(compiled(x, IDS), function(x, IDS))
