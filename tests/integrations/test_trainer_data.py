"""Tests a SparseTarget on the data path of the Trainer and of accelerate, which split it into tensors."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import pytest
import torch
from accelerate.utils import operations
from torch.utils.data import DataLoader
from transformers import trainer_pt_utils

import forked
import sparse_ce.integrations.transformers  # noqa: F401, registers SparseTarget with them
from sparse_ce import SparseTarget, collate, cross_entropy
from tiny_lm import VOCAB, Samples
from tiny_lm import collate as make_batch


def batch(form, begin, end):
    if form == "classes":
        return SparseTarget.from_index(make_batch([Samples("labels")[i] for i in range(begin, end)])["labels"],
                                       row_mask=None, num_classes=VOCAB)
    return make_batch([Samples(form)[i] for i in range(begin, end)])["labels"]


FORMS = ["classes", "coo", "topk"]


def assert_same(a, b):
    assert a.shape == b.shape and a.num_classes == b.num_classes
    assert torch.equal(a.ne(-100), b.ne(-100))
    torch.testing.assert_close(a.to_dense(), b.to_dense(), rtol=0, atol=0)
    logits = torch.randn(*a.shape, VOCAB)
    torch.testing.assert_close(cross_entropy(logits, a), cross_entropy(logits, b))


@pytest.mark.parametrize("form", FORMS)
def test_parts_make_the_same_target(form):
    target = batch(form, 0, 6)
    assert_same(SparseTarget(dict(target.items())), target)
    for part in dict(target.items()).values():
        assert len(part) == 6
    assert_same(trainer_pt_utils.nested_detach(target), target)
    assert_same(operations.send_to_device({"labels": target}, torch.device("cpu"))["labels"], target)
    assert operations.find_batch_size({"labels": target}) == 6


def test_targets_of_odd_shapes():
    csr = torch.eye(3, VOCAB).to_sparse_csr()
    weightless = SparseTarget.from_jagged(torch.tensor([1, 2, 3]), None, torch.tensor([0, 2, 2, 3]), num_classes=VOCAB)
    grid = collate([batch("topk", 0, 2), batch("topk", 0, 3)])
    empty = torch.sparse_coo_tensor(torch.zeros(3, 0).long(), torch.zeros(0), (2, 3, VOCAB))
    for target in (SparseTarget.from_csr(csr, row_mask=torch.tensor([True, False, True])), weightless, grid,
                   collate([batch("coo", 0, 2), batch("coo", 0, 3)]), SparseTarget.from_coo(empty),
                   SparseTarget.from_topk(torch.zeros(2, 0).long(), torch.zeros(2, 0), num_classes=VOCAB),
                   SparseTarget.from_topk(torch.tensor([[1], [-100]]), torch.ones(2, 1), num_classes=VOCAB),
                   batch("coo", 0, 6)[1:5], batch("coo", 0, 6)[..., 1:], batch("coo", 0, 6).shift(1)):
        assert_same(SparseTarget(dict(target.items())), target)
    with pytest.raises(ValueError, match="sparse_ce: target must have a leading dimension to be taken apart"):
        SparseTarget.from_index(torch.tensor(3)).items()


@pytest.mark.parametrize("form", FORMS)
def test_slicing_as_dispatch_does(form):
    target = batch(form, 0, 6)
    for rows in (slice(0, 3), slice(3, 6)):
        assert_same(operations.slice_tensors({"labels": target}, rows)["labels"], target[rows])


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_different_lengths_are_joined_as_evaluation_does(form, arrays):
    parts = [batch(form, 3, 4), batch(form, 0, 3), batch(form, 4, 6)]
    joined = trainer_pt_utils.nested_numpify(parts[0]) if arrays else parts[0]
    for part in parts[1:]:
        joined = trainer_pt_utils.nested_concat(joined, trainer_pt_utils.nested_numpify(part) if arrays else part)
    if arrays:
        joined = SparseTarget({name: torch.from_numpy(array) for name, array in joined.items()})
    begin = 0
    for part in parts:
        rows, length = len(part), part.shape[1]
        assert_same(joined[begin:begin + rows, :length], part)
        assert not joined[begin:begin + rows, length:].ne(-100).any()
        begin += rows
    assert len(joined) == begin


@pytest.mark.parametrize("form", FORMS)
def test_equal_batches_are_joined_as_dispatch_does(form):
    target = batch(form, 0, 4)
    joined = operations.concatenate([{"labels": target}, {"labels": target}])["labels"]
    assert_same(joined[:4], target)
    assert_same(joined[4:], target)
    described = operations.initialize_tensors(operations.get_data_structure({"labels": target}))["labels"]
    assert isinstance(described, SparseTarget) and {k: t.shape for k, t in described.items()} == {
        k: t.shape for k, t in target.items()}


def test_one_candidate_is_not_spread_over_the_k_of_another_batch():
    one = SparseTarget.from_topk(torch.full((1, 2, 1), 7), torch.ones(1, 2, 1), num_classes=VOCAB)
    four = SparseTarget.from_topk(torch.full((1, 3, 4), 5), torch.ones(1, 3, 4), num_classes=VOCAB)
    with pytest.raises(RuntimeError):
        trainer_pt_utils.nested_concat(four, one)


def test_a_data_loader_needs_no_collate_fn():
    samples = [{"x": torch.ones(2), "labels": batch("topk", i, i + 1)[0, :5]} for i in range(4)]
    loaded, = DataLoader(samples, batch_size=4)
    assert_same(loaded["labels"], collate([s["labels"] for s in samples]))


def test_import_of_the_package_alone_needs_no_transformers():
    code = "import sys, sparse_ce; assert not {'transformers', 'accelerate'} & set(sys.modules)"
    done = forked.run("-c", code, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
