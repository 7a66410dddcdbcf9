"""Tests the ranking metrics against scikit-learn and against loops over rows, for all formats of a target."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.metrics import ndcg_score

import sparse_ce
from cases import Draw
from refusals import assert_refused
from sparse_ce import SparseTarget, linear_topk_logits
from sparse_ce.metrics import label_propensities, ndcg_at_k, precision_at_k, propensity_scored_precision_at_k

N, V, K, KS = 40, 30, 7, (1, 3, 5, 7)


@pytest.fixture
def labels():
    """Returns a dense multi-hot matrix (N, V) with empty rows, and rows with more than K classes."""
    positive = np.random.default_rng(0).random((N, V)) < np.linspace(0.02, 0.5, N)[:, None]
    positive[::9] = False
    return positive


@pytest.fixture
def scores():
    return np.random.default_rng(1).standard_normal((N, V))


def best(scores, device="cpu"):
    return torch.from_numpy(np.argsort(-scores, axis=1, kind="stable")[:, :K].copy()).to(device)


def sets(labels):
    return [set(np.flatnonzero(row).tolist()) for row in labels]


def precision(ids, of_rows, k):
    return sum(len(set(row[:k]) & of_row) for row, of_row in zip(ids, of_rows)) / (k * max(1, len(of_rows)))


def psp(ids, of_rows, propensity, k):
    """Returns the ratio of the totals that pyxclib computes."""
    weight = [1 / p for p in propensity]
    total = sum(weight[c] for row, of_row in zip(ids, of_rows) for c in set(row[:k]) & of_row)
    best = sum(sum(sorted((weight[c] for c in of_row), reverse=True)[:k]) for of_row in of_rows)
    return total / best


def all_metrics(ids, target, propensity, ks=KS):
    return torch.stack([value for of in (precision_at_k(ids, target, ks), ndcg_at_k(ids, target, ks),
                                         propensity_scored_precision_at_k(ids, target, propensity, ks))
                        for value in of.values()]).double().cpu()


def formats(labels, device):
    """Yields a name and a target of each format, with padding, stored zeros and repeated classes."""
    csr = sparse.csr_matrix(labels.astype(np.float32))
    rows, columns = (torch.from_numpy(t.copy()).long().to(device) for t in labels.nonzero())
    width = int(labels.sum(1).max())
    padded = torch.full((N, width + 2), -100, device=device)
    for row, classes in enumerate(sets(labels)):
        padded[row, 1:len(classes) + 1] = torch.tensor(sorted(classes), dtype=torch.int64, device=device)
    weights = torch.where(padded < 0, 0.0, 0.5)
    classes = torch.where(padded < 0, 3, padded)  # a row of -100 would be ignored
    yield "csr_matrix", csr
    yield "csc_array", sparse.csc_array(labels.astype(np.int64))
    yield "coo_matrix", sparse.coo_matrix(labels)
    yield "from_scipy", SparseTarget.from_scipy(csr).to(device)
    yield "COO", torch.sparse_coo_tensor(torch.stack((rows, columns)).repeat(1, 2), torch.ones(
        2 * len(rows), device=device), labels.shape)
    yield "CSR", torch.from_numpy(labels.astype(np.float64)).to_sparse_csr().to(device)
    yield "pair", (classes, weights)
    yield "float16", (classes.int(), (weights * 1e-7).half())
    yield "bfloat16", SparseTarget.from_topk(classes, weights.bfloat16(), num_classes=V)
    yield "log_probs", SparseTarget.from_topk(classes, torch.where(weights > 0, -300.0, -torch.inf),
                                              values_are="log_probs")
    yield "dense", SparseTarget.from_dense(torch.from_numpy(labels).to(device))


def test_all_formats_of_a_target(labels, scores, device):
    ids, of_rows = best(scores, device), sets(labels)
    rows, propensity = ids.tolist(), torch.linspace(0.1, 0.9, V, dtype=torch.float64)
    expected = [*(precision(rows, of_rows, k) for k in KS), *(ndcg_score(labels, scores, k=k) for k in KS),
                *(psp(rows, of_rows, propensity.tolist(), k) for k in KS)]
    for name, target in formats(labels, device):
        ours = all_metrics(ids, target, propensity.to(device))
        torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7,
                                   msg=lambda text, name=name: f"{name}: {text}")


def test_labels_have_one_positive_class(device):
    ids = torch.tensor([[3, 1], [2, 0], [5, 4], [0, 1]], device=device)
    target = torch.tensor([1, 2, -100, 5], device=device)
    assert precision_at_k(ids, target, 1).item() == pytest.approx(1 / 3)
    assert precision_at_k(ids, target, 2).item() == pytest.approx(1 / 3)
    assert ndcg_at_k(ids, target, 2).item() == pytest.approx((1 + 1 / np.log2(3)) / 3)


def test_ignored_rows_do_not_count(labels, scores, device):
    ids, csr, propensity = best(scores, device), sparse.csr_matrix(labels), np.linspace(0.1, 1, V)
    some, third = labels.any(1), np.arange(N) % 3 > 0
    assert 0 < some.sum() < N
    for rows, options in ((some, dict(ignore_empty=True)), (third, dict(row_mask=third)),
                          (some & third, dict(row_mask=third, ignore_empty=True))):
        masked = SparseTarget.from_scipy(csr, **options).to(device)
        torch.testing.assert_close(all_metrics(ids, masked, propensity),
                                   all_metrics(ids[torch.from_numpy(rows)], csr[rows], propensity), rtol=1e-6, atol=0)


def test_a_repeated_class_counts_once(device):
    ids = torch.tensor([[4, 4, 2, 4], [1, 1, 1, 0]], device=device)
    coo = torch.sparse_coo_tensor([[0, 0, 0, 1], [4, 4, 2, 0]], [0.5, 0.5, 1.0, 1.0], (2, 5)).to(device)
    assert precision_at_k(ids, coo, (1, 2, 3, 4)) == {1: 1 / 2, 2: 1 / 4, 3: pytest.approx(2 / 6), 4: 3 / 8}
    ratio = propensity_scored_precision_at_k(ids, coo, torch.ones(5, device=device), (2, 4))
    assert ratio == {2: pytest.approx(1 / 3), 4: 1}


def test_only_positive_weights_count(device):
    """Checks the sum of the weights of a class, a stored zero, a negative weight and NaN."""
    classes = torch.tensor([[0, 0, 1, 2, 3, 4, 4]], device=device)
    values = torch.tensor([[2.0, -1.0, 0.0, -1.0, torch.nan, 1.0, -1.0]], device=device)
    ids = torch.tensor([[0, 1, 2, 3, 4]], device=device)
    assert precision_at_k(ids, (classes, values), (1, 5)) == {1: 1, 5: pytest.approx(1 / 5)}
    assert ndcg_at_k(ids, (classes, values), 5) == 1


def test_negative_ids_are_padding(device):
    ids = torch.tensor([[-1, 3, -100], [-1, -1, -1]], device=device)
    # The key of class -1 in row 1 is next to those of row 0.
    target = SparseTarget.from_topk(torch.tensor([[3, 2**31 - 2], [0, 1]], device=device), None)
    assert precision_at_k(ids, target, (1, 2, 3)) == {1: 0, 2: pytest.approx(1 / 4), 3: pytest.approx(1 / 6)}
    target = SparseTarget.from_topk(torch.tensor([[3], [0]], device=device), None)
    assert propensity_scored_precision_at_k(ids, target, torch.ones(4, device=device), 3) == 1 / 2


def test_ids_as_large_as_the_dtype_are_no_hit(device):
    ids = torch.tensor([[2**31 - 1 + 3, 5], [3, 2**40]], device=device)
    target = SparseTarget.from_topk(torch.tensor([[5], [3]], device=device), None)
    if device == "cpu":
        assert_refused(lambda: precision_at_k(ids, target, 1), "indices must be less than", 2**40, error=ValueError)
    else:
        assert precision_at_k(ids, target, 1) == 1 / 2


def test_any_leading_shape(labels, scores, device):
    target, ids = SparseTarget.from_scipy(sparse.csr_matrix(labels)).to(device), best(scores, device)
    flat = all_metrics(ids, target, np.linspace(0.1, 1, V))
    assert torch.equal(all_metrics(ids.reshape(5, 8, K), target.reshape(5, 8), np.linspace(0.1, 1, V)), flat)


@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_without_positive_classes_they_are_0(shape, device):
    ids = torch.zeros(shape, dtype=torch.int64, device=device) + torch.arange(3, device=device)
    coo = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (shape[0], 5)).to(device)
    ignored = SparseTarget.from_coo(coo, row_mask=torch.zeros(shape[0], dtype=torch.bool, device=device))
    topk = SparseTarget.from_topk(torch.empty(shape[0], 0, dtype=torch.int64, device=device), None)
    for target in (coo, ignored, topk):
        assert not all_metrics(ids, target, torch.ones(5, device=device), (1, 3)).any()


def test_dtypes_of_results(device):
    ids, target = torch.tensor([[1, 0]], device=device), torch.tensor([1], device=device)
    assert precision_at_k(ids, target, 1).dtype == ndcg_at_k(ids, target, 1).dtype == torch.float32
    for dtype, result in ((torch.float64, torch.float64), (torch.float16, torch.float32)):
        propensity = torch.ones(2, dtype=dtype, device=device)
        out = propensity_scored_precision_at_k(ids, target, propensity, 1)
        assert out.dtype == result and out.shape == () and out == 1 and out.device.type == device


def test_arrays_and_any_integers(labels, scores):
    ids, csr = best(scores), sparse.csr_matrix(labels)
    expected = precision_at_k(ids, csr, 5)
    target = SparseTarget.from_scipy(csr)._map(lambda t: t.numpy())  # as a Trainer's evaluation passes it
    for given in (ids.numpy(), ids.numpy().astype(np.uint16), ids.to(torch.int32), ids.tolist()):
        assert precision_at_k(given, csr, np.int64(5)) == expected == precision_at_k(given, target, [5])[5]


def test_the_predictions_of_a_head(labels, device):
    draw = Draw(device)
    hidden, weight = draw.normal(N, 6), draw.normal(V, 6)
    scores = (hidden.double() @ weight.double().T).cpu().numpy()
    _, ids = linear_topk_logits(hidden, weight, K)
    csr = sparse.csr_matrix(labels)
    for k in KS:
        assert ndcg_at_k(ids, csr, k).item() == pytest.approx(ndcg_score(labels, scores, k=k), rel=1e-6)


def test_the_propensities_of_jain(device):
    counts = np.array([0, 1, 5, 40, 3000])
    c = (np.log(7000) - 1) * (2.6 + 1) ** 0.6
    expected = 1 / (1 + c * (counts + 2.6) ** -0.6)
    for given, dtype in ((counts, torch.float32), (torch.from_numpy(counts).double().to(device), torch.float64)):
        ours = label_propensities(given, 7000, a=0.6, b=2.6)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double().cpu(), torch.from_numpy(expected),
                                   rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
    assert label_propensities([0, 3], 3).max() < 1


def test_the_propensities_of_a_training_set(device):
    """Counts rows in which a class is positive: not stored zeros, repeated entries or ignored rows."""
    rows = torch.tensor([[0, 1, 1], [1, 3, 3], [2, -100, -100], [1, 0, 0], [-100, -100, -100]], device=device)
    weights = torch.tensor([[1.0, 2.0, 1.0], [1.0, 1.0, -1.0], [1.0, 1.0, 1.0], [0.5, 0.0, 0.0], [1.0, 1.0, 1.0]])
    target = SparseTarget.from_topk(rows, weights.to(device), num_classes=5)
    expected = label_propensities([1, 3, 1, 0, 0], 4)
    dense = target.to_dense()[:4].cpu()
    for given in (target, SparseTarget.from_dense(dense), dense.to_sparse(), dense.to_sparse_csr(),
                  sparse.csr_matrix(dense.numpy()), sparse.coo_array(dense.numpy())):
        torch.testing.assert_close(label_propensities(given).cpu(), expected)
        torch.testing.assert_close(label_propensities(given, 100).cpu(), label_propensities([1, 3, 1, 0, 0], 100))


def test_compiled_they_give_the_same(labels, scores, device, fresh_compiler):
    target, ids = SparseTarget.from_scipy(sparse.csr_matrix(labels)).to(device), best(scores, device)
    propensity = torch.linspace(0.1, 1, V, device=device)
    compiled = torch.compile(lambda *given: torch.stack([*precision_at_k(*given[:2], KS).values(), *(
        f(*args, 5) for f, args in ((ndcg_at_k, given[:2]), (propensity_scored_precision_at_k, given)))]),
        backend="aot_eager", fullgraph=True)
    expected = [*precision_at_k(ids, target, KS).values(), ndcg_at_k(ids, target, 5),
                propensity_scored_precision_at_k(ids, target, propensity, 5)]
    torch.testing.assert_close(compiled(ids, target, propensity), torch.stack(expected))


IDS, TARGET = torch.tensor([[0, 1], [2, 3]]), SparseTarget.from_topk(torch.tensor([[0, 1], [2, -100]]), None,
                                                                     num_classes=4)


@pytest.mark.parametrize("call,words", [
    (lambda: precision_at_k(IDS, TARGET, 0), ["k must be an integer in [1, 2]", "got 0"]),
    (lambda: precision_at_k(IDS, TARGET, 3), ["k must be an integer in [1, 2]", "got 3"]),
    (lambda: precision_at_k(IDS, TARGET, True), ["k must be an integer"]),
    (lambda: precision_at_k(IDS, TARGET, (1, 2.0)), ["k must be an integer", "(1, 2.0)"]),
    (lambda: precision_at_k(IDS, TARGET, ()), ["k must be an integer", "()"]),
    (lambda: precision_at_k(IDS, TARGET, "1"), ["k must be an integer", "'1'"]),
    (lambda: precision_at_k(IDS.float(), TARGET, 1), ["indices must be of an integer dtype", "torch.float32"]),
    (lambda: precision_at_k((IDS.float(), IDS), TARGET, 1), ["indices must be a tensor",
                                                             "linear_topk_logits(...).indices"]),
    (lambda: precision_at_k(IDS[0], TARGET[0], 1), ["indices must be (..., K)", "[2]"]),
    (lambda: precision_at_k(IDS[:, :0], TARGET, 1), ["indices must be (..., K)", "[2, 0]"]),
    (lambda: precision_at_k(IDS + 1, TARGET, 1), ["indices must be less than 4", "got 4"]),
    (lambda: precision_at_k(IDS, TARGET[:1], 1), ["target must have the leading shape of indices, [2]", "[1]"]),
    (lambda: precision_at_k(IDS, IDS, 1), ["target must be labels of shape [2] or sparse", "int64", "from_topk"]),
    (lambda: precision_at_k(IDS, torch.eye(2, 4), 1), ["got a dense torch.float32 tensor of shape [2, 4]"]),
    (lambda: precision_at_k(IDS, np.eye(2, 4), 1), ["got a dense torch.float64 tensor of shape [2, 4]"]),
    (lambda: precision_at_k(IDS, torch.nested.nested_tensor([IDS, IDS]), 1), ["target must be a regular tensor"]),
    (lambda: precision_at_k(IDS, "labels", 1), ["target must be class indices", "got str"]),
    (lambda: precision_at_k(IDS, TARGET.with_num_classes(2), 1), ["must be less than 2", "got 3"]),
    (lambda: precision_at_k(IDS, torch.tensor([1, -5]), 1), ["target must have classes in [0, ", "got -5"]),
    (lambda: precision_at_k(IDS, SparseTarget.from_jagged(IDS[0], None, torch.tensor([0, 2, 9])), 1),
     ["target must have offsets in [0, 2]", "row 1"]),
    (lambda: precision_at_k(IDS, TARGET.to("meta"), 1), ["target must be on the device of indices, cpu", "meta"]),
    (lambda: propensity_scored_precision_at_k(IDS, TARGET, torch.ones(5), 1), ["propensity must have 4 elements"]),
    (lambda: propensity_scored_precision_at_k(IDS, TARGET, torch.ones(4, 1), 1), ["propensity must be (V,)"]),
    (lambda: propensity_scored_precision_at_k(IDS, TARGET, torch.arange(4), 1), ["propensity must be positive"]),
    (lambda: propensity_scored_precision_at_k(IDS, (IDS, IDS + 1.0), torch.ones(3), 1), ["less than 3", "got 3"]),
    (lambda: label_propensities(torch.tensor([1, -1]), 10), ["counts must not be negative"]),
    (lambda: label_propensities(sparse.csr_matrix(np.eye(3)).sum(0), 10), ["counts must be (V,)", ".ravel()"]),
    (lambda: label_propensities([1, 2]), ["num_rows must be an integer of at least 3, got None"]),
    (lambda: label_propensities(TARGET.with_num_classes(None)), ["counts must be a target with num_classes"]),
    (lambda: label_propensities([1, 2], 2), ["num_rows must be an integer of at least 3, got 2"]),
    (lambda: label_propensities([1, 2], 9.0), ["num_rows must be an integer of at least 3, got 9.0"]),
    (lambda: label_propensities([1, 2], 9, a=-0.5), ["a must be a positive number, got -0.5"]),
    (lambda: label_propensities([1, 2], 9, b="1"), ["b must be a positive number, got '1'"]),
])
def test_a_wrong_argument_is_named(call, words):
    assert_refused(call, *words)


def test_a_target_need_not_know_the_number_of_classes(device):
    ids = torch.tensor([[7, 10**9], [5, 8]], device=device)
    assert precision_at_k(ids, (ids + torch.tensor([[0, 0], [1, 0]], device=device), torch.ones(2, 2, device=device)),
                          2) == 3 / 4


def test_they_are_in_the_package():
    assert set(sparse_ce.metrics.__all__) == {"label_propensities", "ndcg_at_k", "precision_at_k",
                                              "propensity_scored_precision_at_k"}
