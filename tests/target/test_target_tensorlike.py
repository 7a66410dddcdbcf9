"""Tests ``SparseTarget`` as a tensor: every format under indexing, ``cat``, ``stack``, slicing and copying."""

import math
import pickle
import sys

import numpy as np
import pytest
import torch

from cases import FORMS, Draw, sparsely
from sparse_ce import SparseTarget, collate, cross_entropy
from sparse_ce.targets.convert import as_target

VOCAB = 23


def target_of(form, shape, device, seed=0):
    logits = torch.zeros(*shape, VOCAB)
    target = as_target(FORMS[form](shape, VOCAB, Draw(device, seed)).target, logits.shape)
    return target.detach().with_num_classes(VOCAB).reshape(shape)


def meaning(target):
    """Returns (dense weights, active rows), which no operation may change."""
    return target.to_dense(torch.float64), target.ne(-100)


def assert_means(target, dense, counts):
    assert target.shape == counts.shape and target.num_classes == VOCAB
    assert target.ne(-100).tolist() == counts.tolist()
    torch.testing.assert_close(target.to_dense(torch.float64), dense, rtol=1e-6, atol=1e-7)
    logits = Draw(target.device.type).normal(*counts.shape, VOCAB, dtype=torch.float64)
    expected = torch.where(counts, -(torch.log_softmax(logits, -1) * dense).sum(-1), 0.0)
    torch.testing.assert_close(cross_entropy(logits, target, reduction="none"), expected, rtol=1e-6, atol=1e-6)
    again = pickle.loads(pickle.dumps(target))
    assert again.equal(target) and target.equal(again)


KEYS = [
    3, -1, np.int64(2), slice(1, 4), slice(None, None, 2), slice(0, 0), [2, 0, 2], [], np.array([5, 1]),
    np.array([-1, 0], dtype=np.int32), torch.tensor([4, 4, 1]), torch.tensor(2), torch.tensor([[0, 1], [2, 3]]),
    [True, False, True, False, True, False], np.arange(6) % 2 == 1, torch.arange(6) > 3,
    torch.zeros(6, dtype=torch.bool),
    (np.array([3, 0]), ...), ..., (..., slice(2, 5)), (torch.tensor([0, 5]),), None, (..., None), (None, slice(1, 4)),
    (2, None), (None, [2, 0, 2]),
]
KEYS_2D = [
    (slice(None), [0, 2]), (1, torch.tensor([3, 0])), ([0, 5], [1, 2]), (..., 1), (torch.arange(6) > 2, 0),
    (slice(1, 3), np.array([True, False, True, True])), [1, 0], (np.int32(4), slice(2)),
    torch.arange(24).view(6, 4) % 5 == 0,
    (np.array([2, 1]), ...), (torch.tensor([[1], [4]]), torch.tensor([0, 3])), None, (slice(1, 3), None), (..., None),
    (None, 1, np.newaxis, slice(2)), (torch.arange(6) > 2, None, 0), (None, ..., None), (0, 1, None),
    (torch.tensor([3, 3]), None, torch.tensor([0, 2])),
]


@pytest.mark.parametrize("form", FORMS)
def test_rows_by_every_kind_of_key(form, device):
    for shape, keys in (((6,), KEYS), ((6, 4), KEYS_2D)):
        target = target_of(form, shape, device)
        dense, counts = meaning(target)
        for key in keys:
            plain = tuple(torch.as_tensor(k) if isinstance(k, (list, np.ndarray)) and len(k) else k for k in key) if (
                isinstance(key, tuple)) else torch.tensor(key) if isinstance(key, list) and key else key
            rows = torch.arange(counts.numel(), device=device).view(shape)[plain]
            assert_means(target[key], dense.reshape(-1, VOCAB)[rows], counts.reshape(-1)[rows])


def test_a_dimension_more_of_offsets_that_are_one_behind_the_other(device):
    target = SparseTarget.from_jagged(torch.tensor([3, 5, 7, 2, 0], device=device), None,
                                      torch.tensor([0, 2, 3, 5], device=device), num_classes=VOCAB)
    dense, counts = meaning(target)
    for key in ((slice(1, None), None), (None, slice(1, None)), None, (2, None), (None, 2)):
        assert_means(target[key], dense[key], counts[key])


@pytest.mark.parametrize("key", [
    1.5, True, torch.tensor([0.5]), [0.5], (0, 0, 0), [9], torch.tensor([9]), torch.zeros(5, dtype=torch.bool),
    (..., ...), [[1], [1, 2]]], ids=repr)
@pytest.mark.parametrize("form", ["labels-target", "topk-target", "jagged-ranges"])
def test_keys_that_are_refused(form, key, device):
    with pytest.raises((TypeError, IndexError)):
        target_of(form, (6, 4), device)[key]


@pytest.mark.parametrize("key, row", [
    ([9], 9), ([0, -7], -7), (np.array([[5], [6]]), 6), ((slice(None), [3, 4]), 4), ((..., [-5]), -5),
    ((None, 1, [4]), 4), ((torch.arange(6) > 2, [0, 1, 4]), 4),
    ((torch.tensor([0]), None, torch.tensor([8])), 8)], ids=repr)
@pytest.mark.parametrize("form", ["labels-target", "topk-target", "jagged-ranges"])
def test_rows_outside_are_refused_where_the_device_would_not_say_so(form, key, row):
    """Checks keys on the CPU. An assertion on CUDA would end all work on the device."""
    target = target_of(form, (6, 4), "cpu").to("meta")
    with pytest.raises(IndexError, match=rf"sparse_ce: target must be sliced with rows in \[-., .\), got {row}$"):
        target[key]
    for inside in ([5, -6], [], (..., [3, -4])):
        assert target[inside].device.type == "meta"


def alike(*forms):
    weighted = [form for form in forms if "labels" not in form and form not in ("topk-ids", "jagged-unweighted")]
    return len({"log_probs" in form for form in weighted}) <= 1


@pytest.mark.parametrize("first, second", sparsely(2, FORMS, FORMS))
def test_every_two_forms_concatenate_and_stack(first, second, device):
    a, b = target_of(first, (6, 4), device, 1), target_of(second, (6, 4), device, 2)
    if not alike(first, second):
        for join in (torch.cat, torch.stack, collate):
            with pytest.raises(ValueError, match="the same kind, got .*; convert them with .probs"):
                join([a, b])
        a, b = a.probs(), b.probs()
    (dense_a, counts_a), (dense_b, counts_b) = meaning(a), meaning(b)
    for dim in (0, 1, -1):
        joined = torch.cat([a, b[:, :4]], dim)
        assert_means(joined, torch.cat([dense_a, dense_b], dim - (dim < 0)), torch.cat([counts_a, counts_b], dim))
        stacked = torch.stack((a, b), dim)
        assert_means(stacked, torch.stack((dense_a, dense_b), dim - (dim < 0)), torch.stack((counts_a, counts_b), dim))
    assert_means(torch.cat([b[:2], a[:0], a[3:]]), torch.cat([dense_b[:2], dense_a[3:]]),
                 torch.cat([counts_b[:2], counts_a[3:]]))
    assert_means(collate([a, b]), torch.stack((dense_a, dense_b)), torch.stack((counts_a, counts_b)))


@pytest.mark.parametrize("form", FORMS)
def test_cut_and_put_together_again(form, device):
    target = target_of(form, (6, 4), device)
    dense, counts = meaning(target)
    for pieces in (target.split(4), torch.split(target, [1, 2, 3]), target.chunk(4), torch.chunk(target, 9),
                   target.split(9)):
        assert torch.equal(torch.cat(pieces), target)
        assert_means(torch.cat(pieces), dense, counts)
    assert [len(p) for p in target.split(4)] == [4, 2] and [p.shape[1] for p in target.split([1, 3], 1)] == [1, 3]
    assert [len(p) for p in target.chunk(4)] == [2, 2, 2]
    assert_means(target.reshape(2, 3, -1), dense.reshape(2, 3, 4, VOCAB), counts.reshape(2, 3, 4))
    assert_means(torch.reshape(target, (24,)), dense.reshape(24, VOCAB), counts.reshape(24))
    assert_means(target.reshape([4, 6])[1], dense.reshape(4, 6, VOCAB)[1], counts.reshape(4, 6)[1])
    for dim in (0, 1, 2, -1, -3):
        assert target.unsqueeze(dim).shape == counts.unsqueeze(dim).shape
        assert_means(torch.unsqueeze(target, dim).reshape(6, 4), dense, counts)
    assert_means(target[0, 0].reshape(1), dense[0, :1], counts[0, :1])
    for call in (lambda: target.reshape(5, 5), lambda: target.reshape(-1, -1), lambda: target.reshape(7, -1),
                 lambda: target.split([1, 2]), lambda: target.split(0), lambda: target.chunk(0)):
        with pytest.raises(ValueError, match="sparse_ce: "):
            call()
    for call in (lambda: target.unsqueeze(3), lambda: target.split(1, 2), lambda: torch.cat([target], 2)):
        with pytest.raises(IndexError, match="sparse_ce: dim must be in "):
            call()


@pytest.mark.parametrize("form", FORMS)
def test_comparisons_copies_and_arrays(form, device):
    target = target_of(form, (6, 4), device)
    dense, counts = meaning(target)
    assert target.equal(target.clone()) and torch.equal(target, torch.clone(target))
    assert target.clone().indices.data_ptr() != target.indices.data_ptr()
    assert not target.equal(target.with_num_classes(None)) and not target.equal(target[:5]) and not target.equal(dense)
    assert not target.equal(target.shift(1)) and target.contiguous().equal(target)
    assert (target == np.int64(-100)).tolist() == (~counts).tolist()
    assert (target == -100).tolist() == (~counts).tolist() and (target != -100).tolist() == counts.tolist()
    assert target == target and target != target.clone() and hash(target) == hash(target) and len({target, target}) == 1
    assert target not in (None, "a", 1.0)
    assert target.to(device) is target
    arrays = target.numpy()
    assert all(isinstance(a, np.ndarray) for a in arrays.values())
    assert_means(SparseTarget({k: torch.as_tensor(a) for k, a in arrays.items()}).with_num_classes(VOCAB).to(device)[:],
                 dense, counts)
    listed = target.probs().tolist()
    for i in range(6):
        for j in range(4):
            row = torch.zeros(VOCAB, dtype=torch.float64)
            entries = [] if listed[i][j] is None else listed[i][j]
            for column, weight in [(entries, 1.0)] if isinstance(entries, int) else entries:
                row[column] += weight
            assert (listed[i][j] is not None) == bool(counts[i, j])
            torch.testing.assert_close(row, dense[i, j].cpu(), rtol=1e-6, atol=1e-7)
    assert torch.equal(target.with_num_classes(None).to_dense(num_classes=VOCAB + 2)[..., :VOCAB], target.to_dense())


@pytest.mark.parametrize("form", FORMS)
def test_plain_labels_beside_a_target(form, device):
    """Checks labels such as the -100 that PEFT puts in front of a batch's labels."""
    target = target_of(form, (6, 4), device)
    ids = torch.randint(VOCAB, (6, 4), generator=torch.Generator().manual_seed(0)).to(device)
    for labels in (torch.full((6, 2), -100, device=device), torch.where(ids > 15, -100, ids).int()):
        own = SparseTarget.from_index(labels, num_classes=VOCAB)
        for join in (torch.cat, SparseTarget.cat, torch.concat):
            for pair, expected in (((labels, target), (own, target)), ([target, labels], (target, own))):
                joined, dense = join(pair, 1), torch.cat([meaning(t)[0] for t in expected], 1)
                assert_means(joined, dense, torch.cat([meaning(t)[1] for t in expected], 1))
    for pair, expected in (((labels, target), (own, target)), ((target, labels), (target, own))):
        assert_means(torch.stack(pair, -1), torch.stack([meaning(t)[0] for t in expected], 2),
                     torch.stack([meaning(t)[1] for t in expected], 2))


def test_what_is_neither_a_target_nor_labels_is_not_joined(device):
    target = SparseTarget.from_index(torch.tensor([1, 3], device=device))
    for given in ([torch.ones(2, device=device), target], [target, torch.ones(2, device=device) > 0],
                  [target, torch.eye(2, dtype=torch.int64, device=device).to_sparse()]):
        for join in (SparseTarget.cat, torch.cat, torch.stack):
            with pytest.raises(TypeError, match="sparse_ce: targets must be SparseTargets or integer tensors"):
                join(given)
    with pytest.raises(TypeError, match=r"got \['SparseTarget', 'list'\]"):
        SparseTarget.cat([target, [1, 2]])
    with pytest.raises(TypeError, match=r"got \['torch.strided torch.int64'\]"):
        SparseTarget.cat([torch.ones(2, dtype=torch.int64, device=device)] * 2)
    with pytest.raises(ValueError, match="targets must have the same shape except in dimension 0"):
        SparseTarget.cat([target.reshape(1, 2), torch.ones(1, 3, dtype=torch.int64, device=device)])


def test_what_is_not_equal_and_not_stacked(device):
    first, last = (SparseTarget.from_index(torch.tensor(t, device=device)) for t in ([-100, 3], [3, -100]))
    assert not first.equal(last) and not torch.equal(first, last)
    with pytest.raises(ValueError, match=r"targets must have the same shape to be stacked, got \[\(1,\), \(2,\)\]"):
        torch.stack([first, last[:1]])


def test_lists_of_labels_and_of_no_rows(device):
    assert SparseTarget.from_index(torch.tensor([[3, -100]], device=device)).tolist() == [[3, None]]
    assert SparseTarget.from_index(torch.tensor(3, device=device)).tolist() == 3
    assert SparseTarget.from_index(torch.zeros(2, 0, dtype=torch.int64, device=device)).tolist() == [[], []]
    logprobs = SparseTarget.from_topk(torch.tensor([[3, 1]]), torch.tensor([[0.0, -torch.inf]]), values_are="log_probs")
    assert logprobs.tolist() == [[(3, 0.0)]]


@pytest.mark.parametrize("form", ["jagged", "jagged-ranges", "tuple", "coo"])
def test_rows_taken_twice_pass_their_gradients_on(form, device):
    target = target_of(form, (6,), device)
    values = target.values.double().requires_grad_()
    again = SparseTarget(target.indices, values, target.offsets, target.row_mask, VOCAB)
    logits = Draw(device).normal(8, VOCAB, dtype=torch.float64)
    key = torch.tensor([0, 2, 2, 5, 1, 2, 0, 4], device=device)
    grad_output = Draw(device).normal(8, dtype=torch.float64)
    ours, = torch.autograd.grad(cross_entropy(logits, again[key], reduction="none"), values, grad_output)
    theirs, = torch.autograd.grad(-(torch.log_softmax(logits, -1) * again.to_dense()[key]).sum(-1), values, grad_output)
    torch.testing.assert_close(ours, theirs)


def test_arrays_and_lists_are_taken_as_tensors():
    indices, values = np.array([[3, 5], [7, 0]], dtype=np.int32), np.array([[0.5, 0.5], [1.0, 0.0]], dtype=np.float32)
    expected = SparseTarget.from_topk(torch.from_numpy(indices), torch.from_numpy(values)).to_dense(num_classes=9)
    values.setflags(write=False)
    for a, b in ((indices, values), (indices.tolist(), values.tolist()),
                 (torch.from_numpy(indices), values.astype(float))):
        torch.testing.assert_close(SparseTarget.from_topk(a, b).to_dense(num_classes=9).float(), expected)
        masked = SparseTarget.from_topk(a, b, mask=[[True, False]] * 2, row_mask=np.array([True, False]))
        assert masked.ne(-100).tolist() == [True, False]
    assert SparseTarget.from_topk(indices, values).indices.data_ptr() == indices.ctypes.data
    assert SparseTarget.from_index([3, -100, 5]).ne(-100).tolist() == [True, False, True]
    assert SparseTarget.from_index([3, -1, 5], -1, row_mask=[1, 1, 0]).ne(-100).tolist() == [True, False, False]
    assert SparseTarget.from_index([]).shape == (0,)
    jagged = SparseTarget.from_jagged([3, 5, 7], [0.5, 0.5, 1], np.array([0, 2, 3]))
    torch.testing.assert_close(jagged.to_dense(num_classes=9), expected)
    assert SparseTarget.from_jagged([], [], [0, 0]).to_dense(num_classes=2).tolist() == [[0, 0]]
    assert SparseTarget.from_dense(expected.numpy()).equal(SparseTarget.from_dense(expected))
    for call in (lambda: SparseTarget.from_index("ab"), lambda: SparseTarget.from_topk([[1], [1, 2]], None),
                 lambda: SparseTarget.from_index(np.array(["a"])), lambda: SparseTarget.from_index([0.5])):
        with pytest.raises(TypeError, match="sparse_ce: (labels|indices) must be"):
            call()


RAGGED = [[(1.0, 3.0), (), (2.0,)], [[1, 3], [], [2]], [np.array([1, 3]), torch.tensor([], dtype=torch.int64), {2}]]


@pytest.mark.parametrize("rows", RAGGED, ids=("svmlight", "lists", "arrays"))
def test_lists_of_the_classes_of_each_row(rows):
    target = SparseTarget.from_lists(rows, num_classes=5)
    assert target.tolist() == [[(1, 1.0), (3, 1.0)], [], [(2, 1.0)]] and target.indices.dtype == torch.int64
    assert SparseTarget.from_lists(rows, ignore_empty=True).ne(-100).tolist() == [True, False, True]
    ignored = SparseTarget.from_lists([[-100, 3], [], [-100]], row_mask=[True, True, True])
    assert ignored.ne(-100).tolist() == [True, True, False]
    assert SparseTarget.from_lists([]).shape == (0,) and SparseTarget.from_lists([[2.0 ** 40]]).indices == 2 ** 40
    for wrong in ([[0.5]], [["1"]], [1, 2], [[None]], [[math.nan]], [[math.inf]]):
        with pytest.raises((TypeError, ValueError), match="sparse_ce: rows must hold "):
            SparseTarget.from_lists(wrong)


def test_lists_of_the_values_of_each_row():
    rows, values = [[1, 3], [], [2]], [(0.25, 0.5), [], np.array([2.0])]
    target = SparseTarget.from_lists(rows, values, num_classes=5)
    assert target.tolist() == [[(1, 0.25), (3, 0.5)], [], [(2, 2.0)]]
    assert SparseTarget.from_lists([{1: 0.25, 3: 0.5}, {}, {2: 2}]).tolist() == target.tolist()
    logs = SparseTarget.from_lists([{1: -1.0}, {2: 0.0}], values_are="log_probs", row_mask=[True, False])
    assert logs.values_are == "log_probs" and logs.values.tolist() == [-1.0, 0.0] and logs.row_mask[1] == 0
    for wrong in ([[0.25], [], [2.0]], [[0.25, "a"], [], [2.0]], [0.25, 0.5, 2.0], [[0.25, 0.5]]):
        with pytest.raises((TypeError, ValueError), match="sparse_ce: values must h"):
            SparseTarget.from_lists(rows, wrong)
    with pytest.raises(TypeError, match="sparse_ce: rows must all be dicts"):
        SparseTarget.from_lists([{1: 0.5}, [2]])


def test_a_batch_of_csr_tensors(device):
    dense = torch.eye(4, 6, dtype=torch.float64, device=device).roll(1, 0).repeat(3, 1, 1) * torch.arange(
        1, 4, device=device).view(3, 1, 1)
    csr = dense.to_sparse_csr()
    target = SparseTarget.from_csr(csr)
    assert target.shape == (3, 4)
    torch.testing.assert_close(target.to_dense(), dense)
    for last in (3, 5) if device == "cpu" else ():
        crow = csr.crow_indices().clone()
        crow[1, -1] = last
        broken = torch.sparse_csr_tensor(crow, csr.col_indices(), csr.values(), dense.shape, check_invariants=False)
        with pytest.raises(RuntimeError, match=f"crow_indices that ascend from 0 to its 4 entries, got 0 to {last}"):
            SparseTarget.from_csr(broken)


def test_scipy_matrices_of_every_kind():
    import scipy.sparse as sparse

    dense = np.array([[0, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 3]])
    for kind in (sparse.csr_matrix, sparse.csc_matrix, sparse.coo_matrix, sparse.csr_array, sparse.coo_array,
                 sparse.lil_matrix):
        for dtype in (np.float32, np.float64, np.int64, np.int8, bool):
            target = SparseTarget.from_scipy(kind(dense.astype(dtype)))
            assert target.form == "jagged" and target.num_classes == 4
            torch.testing.assert_close(target.to_dense(torch.float64),
                                       torch.from_numpy(dense.astype(dtype).astype(float)))
    wide = sparse.random(50, 670_091, 1e-4, "csr", np.float32, random_state=0)
    target = SparseTarget.from_scipy(wide)
    assert target.values.data_ptr() == wide.data.ctypes.data and target.indices.data_ptr() == wide.indices.ctypes.data
    assert cross_entropy(torch.zeros(50, 670_091), target).item() == pytest.approx(
        np.log(670_091) * wide.data.sum() / 50, rel=1e-5)
    assert SparseTarget.from_scipy(wide, ignore_empty=True).ne(-100).sum() == (np.diff(wide.indptr) > 0).sum()
    with pytest.raises(TypeError, match="matrix must be a SciPy sparse matrix or array, got ndarray"):
        SparseTarget.from_scipy(dense)


@pytest.mark.parametrize("form", ["labels-target", "topk-target", "jagged-ranges"])
def test_indexing_and_concatenation_compile(form, device, fresh_compiler):
    """Checks the function that torch.cat calls: torch.compile cannot trace torch.cat of objects that are not
    tensors."""
    def step(logits, a, b, rows):
        both = SparseTarget.cat((a[rows].reshape(2, 2), b.unsqueeze(0).chunk(1)[0][0, :4].reshape(2, 2)))
        return cross_entropy(logits, both, reduction="none")

    a, b = target_of(form, (6,), device, 1), target_of(form, (6,), device, 2)
    logits, rows = Draw(device).normal(4, 2, VOCAB), torch.tensor([1, 1, 5, 0], device=device)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, a, b, rows), step(logits, a, b, rows))


def test_scikit_learn_splits_a_target_with_its_features():
    from sklearn.model_selection import KFold, train_test_split
    target = SparseTarget.from_jagged(np.arange(30), None, np.arange(0, 31, 3), num_classes=30)
    features = np.arange(10, dtype=np.float32)[:, None]
    x, x_test, y, y_test = train_test_split(features, target, test_size=3, random_state=0)
    assert y.shape == (7,) and [row[0][0] for row in y.tolist()] == (3 * x[:, 0]).tolist()
    assert [row[0][0] for row in y_test.tolist()] == (3 * x_test[:, 0]).tolist()
    for _, rows in KFold(3).split(features, target):
        assert [row[0][0] for row in target[rows].tolist()] == (3 * rows).tolist()


def test_pandas_columns_are_labels_and_masks():
    import pandas as pd
    frame = pd.DataFrame({"label": [3, 1, 2, 0], "split": ["a", "b", "a", "a"]}, index=[7, 5, 3, 1])
    target = SparseTarget.from_index(frame["label"])
    assert target.tolist() == [3, 1, 2, 0] and target[frame["split"] == "a"].tolist() == [3, 2, 0]
    assert target[frame["label"].argsort()].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("compare", [
    lambda a, b: a == b, lambda a, b: a != b, lambda a, b: b == a, lambda a, b: b != a, torch.eq,
    lambda a, b: torch.ne(b, a), lambda a, b: a.eq(b)])
def test_predictions_are_not_compared_as_a_whole(compare, device):
    """Checks the error without which Python compares identities, so that an accuracy is 0."""
    predictions, target = torch.tensor([3, 5], device=device), SparseTarget.from_index(torch.tensor([3, 4])).to(device)
    with pytest.raises(TypeError, match=r"^sparse_ce: .* must be .*, got a .*is_top_class\(classes\).*\.tolist\(\)"):
        compare(predictions, target)
    assert target.is_top_class(predictions).tolist() == [True, False] and target.tolist() == [3, 4]


@pytest.mark.parametrize("of_transformers", [True, False])
@pytest.mark.parametrize("name, call, instead", [
    ("torch.add", lambda t: torch.add(t, 1), "target.indices and target.values"),
    ("torch.nn.functional.pad", lambda t: torch.nn.functional.pad(t, (0, 1)), "target.indices and target.values"),
    ("torch.eq", lambda t: torch.eq(t, 1), "is_top_class"), ("Tensor.argmax", lambda t: t.argmax(-1), "is_top_class"),
    ("Tensor.float", lambda t: t.float(), "in any dtype"), ("Tensor.view", lambda t: t.view(-1), "target.reshape"),
    ("Tensor.sum", lambda t: t.sum(), "target.to_dense()"), ("Tensor.max", lambda t: t.max(), "target.to_dense()")])
def test_other_functions_of_torch_say_what_to_use(name, call, instead, of_transformers, monkeypatch):
    """Checks that errors speak of a transformers model only if there may be one."""
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    if of_transformers:
        monkeypatch.setitem(sys.modules, "transformers", sys)
    with pytest.raises((TypeError, AttributeError)) as caught:
        call(SparseTarget.from_index([1]))
    message = str(caught.value)
    assert message.startswith(f"sparse_ce: {name} must be called ") and instead in message
    assert ("fuse_lm_head" in message) == of_transformers


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_the_parts_by_name_keeps_the_width_too(form, known, tmp_path):
    """Checks safetensors files, which hold only strings and tensors."""
    from safetensors.torch import load_file, save_file

    target = target_of(form, (6,), "cpu").with_num_classes(VOCAB if known else None)
    save_file({name: t.contiguous() for name, t in target.items()}, tmp_path / "parts.safetensors")
    torch.save(dict(target.items()), tmp_path / "parts.pt")
    for parts in (load_file(tmp_path / "parts.safetensors"), torch.load(tmp_path / "parts.pt"),
                  pickle.loads(pickle.dumps(dict(target.items()))), dict(target.items())):
        again = SparseTarget(parts)
        assert again.num_classes == target.num_classes and again.equal(SparseTarget(dict(target.items())))
        torch.testing.assert_close(again.to_dense(num_classes=VOCAB), target.to_dense(num_classes=VOCAB))
        assert again.ne(-100).tolist() == target.ne(-100).tolist()


def test_the_width_is_a_part_without_elements():
    target = SparseTarget.from_topk(torch.tensor([[3, 5], [1, 2]]), torch.ones(2, 2), num_classes=VOCAB)
    parts = dict(target.items())
    assert list(parts) == ["indices", "values", "num_classes"] == list(target.keys())
    assert parts["num_classes"].shape == (2, 0, VOCAB) and target["num_classes"].shape == (2, 0, VOCAB)
    assert "num_classes" not in target.with_num_classes(None).keys()
    twice = SparseTarget({name: torch.cat((t, t)) for name, t in parts.items()})
    assert twice.num_classes == VOCAB and twice.shape == (4,)
    arrays = SparseTarget(target.numpy())
    assert arrays.num_classes == VOCAB and arrays.numpy()["num_classes"].shape == (2, 0, VOCAB)
    assert {type(part).__name__ for part in dict(arrays.items()).values()} == {"ndarray"}
    made = SparseTarget(dict.fromkeys(parts, "a description"))  # a framework passes descriptions along
    assert dict(made.items()) == dict.fromkeys(parts, "a description")


# ------------------------------------------------------------------------------------------------------ empty targets

@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 2), (0, 2, 3)], ids=str)
def test_a_jagged_target_without_rows_comes_apart_and_together(leading):
    target = SparseTarget.from_jagged([1, 2], [0.5, 0.5], [0, 2], num_classes=7)[:0].reshape(leading)
    assert len(target.indices) == 0
    again = SparseTarget(dict(target.items()))
    assert again.shape == target.shape == leading and again.num_classes == 7
    assert torch.equal(again.to_dense(), torch.zeros(*leading, 7)) and again.tolist() == target.tolist()
    terms = torch.ones(len(target.indices))
    assert torch.zeros(target.shape.numel()).index_add(0, target.row_indices(), terms).numel() == 0
    masked = target._replace(row_mask=torch.ones(leading, dtype=torch.bool))
    assert SparseTarget(masked.numpy()).tolist() == target.tolist()


def test_a_single_row_without_a_leading_dimension():
    assert SparseTarget.from_index([3]).reshape(()).indices == 3
    row = SparseTarget.from_topk([[1, 2]], [[0.5, 0.5]], row_mask=[True]).reshape(())
    assert row.shape == () and row.row_mask.shape == () and row.indices.tolist() == [1, 2]


def test_lists_of_a_target_of_arrays():
    labels = SparseTarget.from_index([[3], [1]])
    jagged = SparseTarget.from_jagged([1, 2, 3], [0.5, 0.5, 1.0], [0, 2, 3])
    for target in (labels, jagged, labels.flatten()):
        assert SparseTarget(target.numpy()).tolist() == target.tolist()


def test_a_batch_of_no_csr_matrices():
    none = torch.zeros(0, 2, dtype=torch.int64)
    crow = torch.zeros(0, 3, dtype=torch.int64)
    target = SparseTarget.from_csr(torch.sparse_csr_tensor(crow, none, none.float(), (0, 2, 5)))
    assert target.shape == (0, 2) and target.num_classes == 5
