"""Tests that wrong arguments raise ``sparse_ce: <argument> must be <expectation>, got <value>`` and change nothing."""


import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F

import sparse_ce
from cases import Draw
from close import assert_bitwise_equal
from refusals import OPTIONS, assert_refused, good
from sparse_ce import SparseTarget, cross_entropy, linear_cross_entropy

# ------------------------------------------------------------------------------------------------------------ options


RANGES = [o for o in OPTIONS if o[0] in ("label_smoothing", "z_loss", "logit_scale", "softcap", "num_classes")
          and isinstance(o[1], (int, float)) and o[1] != 2.5]


@pytest.mark.parametrize("option,value,word", RANGES, ids=[f"{o}={v!r}" for o, v, _ in RANGES])
def test_a_wrong_option_is_refused_in_every_mode(option, value, word, device):
    x, labels = good(device)

    def loss(x):
        return cross_entropy(x, labels, **{option: value})

    assert_refused(lambda: loss(x.requires_grad_()), option, word)
    assert_refused(lambda: torch.func.grad(loss)(x.detach()), option, word)
    assert_refused(lambda: torch.func.jvp(loss, (x.detach(),), (torch.ones_like(x),)), option, word)
    assert_refused(lambda: torch.ops.sparse_ce.forward(x, labels, **{option: value}), option, word)
    head = torch.eye(7, device=device)
    assert_refused(lambda: torch.func.grad(lambda x: linear_cross_entropy(x, head, labels, **{option: value}))(
        x.detach()), option, word)


# ---------------------------------------------------------------------------------------------------- input and weight


def test_a_wrong_input_is_refused(device):
    x, labels = good(device)
    assert_refused(lambda: cross_entropy(np.zeros((4, 7)), labels), "input", "ndarray", error=TypeError)
    assert_refused(lambda: cross_entropy(None, labels), "input", "NoneType", error=TypeError)
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        assert_refused(lambda: cross_entropy(x.to(dtype), labels), "input", dtype, error=TypeError)
    assert_refused(lambda: cross_entropy(x.to_sparse(), labels), "input", "sparse_coo", error=(TypeError, ValueError))
    assert_refused(lambda: cross_entropy(x[0, 0], labels[0]), "input", "[]", error=ValueError)
    for layout, fix in (torch.strided, "torch.cat(input.unbind())"), (torch.jagged, "input.values()"):
        nested = torch.nested.nested_tensor([x[:1], x[1:]], layout=layout)
        assert_refused(lambda: cross_entropy(nested, labels), "input", "nested", fix, error=TypeError)
    gaps = torch.nested.narrow(x[None].repeat(2, 1, 1), 1, torch.tensor([0, 1]), torch.tensor([1, 2]),
                               layout=torch.jagged)  # its values() have rows of no sequence
    assert_refused(lambda: cross_entropy(gaps, labels), "input", "nested", "torch.cat(input.unbind())", error=TypeError)


def test_logits_without_classes_are_refused(device):
    for rows in (0, 4):
        labels = torch.zeros(rows, dtype=torch.int64, device=device)
        assert_refused(lambda: cross_entropy(torch.zeros(rows, 0, device=device), labels), f"[{rows}, 0]")


def test_a_wrong_class_weight_is_refused(device):
    x, labels = good(device)
    for weight, word in ((torch.ones(6), "[6]"), (torch.ones(8), "[8]"), (torch.ones(7, 1), "[7, 1]"),
                         (torch.tensor(1.0), "[]")):
        assert_refused(lambda: cross_entropy(x, labels, weight.to(device)), "weight", word, error=ValueError)
    assert_refused(lambda: cross_entropy(x, labels, [1.0] * 7), "weight", "list", error=TypeError)
    assert_refused(lambda: cross_entropy(x, labels, torch.ones(7, dtype=torch.complex64, device=device)), "weight")
    needs_grad = torch.ones(7, device=device, requires_grad=True)
    assert_refused(lambda: cross_entropy(x, labels, needs_grad), "weight", "detach()")
    x.requires_grad_()
    assert_refused(lambda: torch.ops.sparse_ce.forward(x, labels, weight=needs_grad), "weight", "detach()")
    assert_refused(lambda: cross_entropy(x, labels, torch.ones(7, device="meta")), "weight", "meta")


# ----------------------------------------------------------------------------------------------------------------- head


def good_head(device):
    """Returns input, linear_weight and linear_bias for the labels of `good`."""
    draw = Draw(device)
    return draw.normal(4, 5), draw.normal(7, 5), draw.normal(7)


WRONG_TENSORS = {  # the replacement for a tensor of the head, the error, and what else the message must name
    "no tensor": (lambda t: t.tolist(), TypeError, "list"),
    "integers": (lambda t: t.long(), TypeError, "int64"),
    "complex": (lambda t: t.to(torch.complex64), TypeError, "complex64"),
    "float8": (lambda t: t.to(torch.float8_e4m3fn), TypeError, "float8_e4m3fn"),
    "sparse": (lambda t: t.to_sparse(), ValueError, "sparse_coo"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias"])
def test_a_wrong_tensor_of_the_head_is_refused(name, wrong, device):
    change, error, word = WRONG_TENSORS[wrong]
    head = dict(zip(("input", "linear_weight", "linear_bias"), good_head(device)))
    head[name] = change(head[name])
    assert_refused(lambda: linear_cross_entropy(**head, target=good(device)[1]), name, word, error=error)


def test_a_head_of_other_dtypes_or_devices_is_refused(device):
    (x, w, b), labels = good_head(device), good(device)[1]
    refused = [
        ((x, None, b), TypeError, "linear_weight", "NoneType"),
        ((x, w.double(), b), RuntimeError, "linear_weight", "Float", "Double"),
        ((x, w, b.double()), RuntimeError, "linear_bias", "Float", "Double"),
        ((x, w.half(), b), RuntimeError, "linear_weight", "Float", "Half"),
        ((x.double(), w, b), RuntimeError, "linear_weight", "Double", "Float"),
        ((x.bfloat16(), w.half(), b), RuntimeError, "linear_weight", "(BFloat16) or float32", "Half"),
        ((x.half(), w, b.bfloat16()), RuntimeError, "linear_bias", "(Half) or float32", "BFloat16"),
        ((x, w.to("meta"), b), RuntimeError, "linear_weight", device, "meta"),
        ((x, w, b.to("meta")), RuntimeError, "linear_bias", device, "meta"),
        ((x.to("meta"), w, b), RuntimeError, "linear_weight", "meta", device),
    ]
    for (x, w, b), error, *words in refused:
        assert_refused(lambda: linear_cross_entropy(x, w, labels, linear_bias=b), *words, error=error)


def test_a_head_of_the_wrong_shape_is_refused(device):
    (x, w, b), labels = good_head(device), good(device)[1]
    refused = [
        (lambda: linear_cross_entropy(x, w.t(), labels), "linear_weight", "(V, 5)", "[5, 7]"),
        (lambda: linear_cross_entropy(x, w[:, :4], labels), "linear_weight", "to match input", "[7, 4]"),
        (lambda: linear_cross_entropy(x, w[0], labels), "linear_weight", "[5]"),
        (lambda: linear_cross_entropy(x, w[None], labels), "target", "[4, 7]", "[4, 7, 1]"),
        (lambda: linear_cross_entropy(x, w[:0], labels), "linear_weight", "at least one class", "[0, 5]"),
        (lambda: linear_cross_entropy(x[:, :4], w, labels), "linear_weight", "(V, 4)", "[7, 5]"),
        (lambda: linear_cross_entropy(x[0, 0], w, labels), "input", "[]"),
        (lambda: linear_cross_entropy(x, w, labels, linear_bias=b[:6]), "linear_bias", "(7,)", "[6]"),
        (lambda: linear_cross_entropy(x, w, labels, linear_bias=b[:, None]), "linear_bias", "(7,)", "[7, 1]"),
        (lambda: linear_cross_entropy(x, w, labels, linear_bias=b.sum()), "linear_bias", "(7,)", "[]"),
        (lambda: linear_cross_entropy(x, w, labels[:3]), "target", "[4, 7]", "[3]"),
        (lambda: linear_cross_entropy(x, w, labels, weight=torch.ones(6, device=device)), "weight", "(7,)", "[6]"),
        (lambda: linear_cross_entropy(x, w, torch.zeros(4, 8, device=device).to_sparse()), "target", "7", "8"),
    ]
    for call, *words in refused:
        assert_refused(call, *words, error=ValueError)


def test_the_linear_head_does_not_differentiate_for_the_class_weights(device):
    (x, w, _), labels = good_head(device), good(device)[1]
    needs_grad = torch.ones(7, device=device, requires_grad=True)
    assert_refused(lambda: linear_cross_entropy(x, w, labels, weight=needs_grad), "weight", "detach()")
    for mean in (False, True):
        assert_refused(lambda: torch.ops.sparse_ce.linear_select(x.requires_grad_(), w, None, labels, weight=needs_grad,
                                                                 loss=True, mean=mean), "weight", "detach()")


# --------------------------------------------------------------------------------------------------------------- target


def targets(device):
    """Returns {description: (wrong target, *what the message must name)}."""
    x, labels = good(device)
    column, ones = labels[:, None], torch.ones(4, 1, device=device)
    dense = torch.softmax(x, 1)
    return {
        "None": (None, "NoneType"),
        "a list of too few labels": ([1, 2, 3], "[4]", "[3]"),
        "two labels": ((1, 2), "[4]", "[2]"),
        "labels of two kinds and their weights": ((labels, labels, 0.3), "torch.stack((a, b), -1)"),
        "a dict": ({"indices": column}, "dict", "SparseTarget(target)"),
        "text": ("abc", "str"),
        "float labels": (labels.float(), "float32", "target.long()"),
        "one-hot integers": (F.one_hot(labels, 7), "[4, 7]", "argmax(-1)", "SparseTarget.from_dense(target)"),
        "a multi-hot mask": (dense > 0.1, "bool", "SparseTarget.from_dense(target)"),
        "a SciPy matrix with too few rows": (scipy.sparse.csr_matrix(np.eye(3, 7)), "[4]", "[3]"),
        "a SciPy matrix of too few classes": (scipy.sparse.csr_matrix(np.eye(4, 6)), "7", "6"),
        "what topk returns": (dense.topk(5), "float32", "(values, indices)"),
        "a nested tensor": (torch.nested.nested_tensor([labels[:1], labels[1:]]), "nested", "torch.cat("),
        "a jagged nested tensor": (torch.nested.nested_tensor([labels[:1], labels[1:]], layout=torch.jagged), "nested",
                                   "target.values()"),
        "a tuple of three": ((column, ones, ones), "3"),
        "a dense distribution": (dense, "SparseTarget.from_dense(target)", "functional.cross_entropy"),
        "a dense distribution in float64": (dense.double(), "(indices, values)"),
        "too few labels": (labels[:3], "[4]", "[3]"),
        "labels with two dimensions too many": (column[..., None], "[4]", "[4, 1, 1]"),
        "ids of too few rows": (column[:3], "[4]", "[3]"),
        "bool labels": (labels > 2, "bool"),
        "CSC": (dense.to_sparse_csc(), "sparse_csc", "to_sparse_csr"),
        "BSR": (torch.ones(4, 8, device=device).to_sparse_bsr((2, 2)), "sparse_bsr"),
        "hybrid COO": (dense.to_sparse(1), "dense_dim"),
        "COO too wide": (torch.zeros(4, 8, device=device).to_sparse(), "7", "8"),
        "CSR too narrow": (torch.zeros(4, 6, device=device).to_sparse_csr(), "7", "6"),
        "COO with too many rows": (torch.zeros(5, 7, device=device).to_sparse(), "[4]", "[5]"),
        "COO with a dimension too many": (torch.zeros(1, 4, 7, device=device).to_sparse(), "[4]", "[1, 4]"),
        "complex values": ((column, ones.to(torch.complex64)), "complex64"),
        "float indices": ((column.float(), ones), "float32"),
        "values of another shape": ((column, ones.expand(4, 2)), "[4, 1]", "[4, 2]"),
        "top-k with too few rows": ((column[:2], ones[:2]), "[4]", "[2]"),
        "values that are no numbers": ((column, [["a"]] * 4), "list"),
        "a target of another width": (SparseTarget.from_topk(column, ones, num_classes=9), "7", "9"),
        "a target of another shape": (SparseTarget.from_index(labels.view(2, 2)), "[4]", "[2, 2]"),
        "a target on another device": (SparseTarget.from_index(labels.to("meta")), "meta", ".to("),
        "float labels of NumPy": (np.arange(4.0), "float64", "numpy.asarray(target).astype('int64')"),
        "one-hot integers of NumPy": (np.eye(4, 7, dtype=int), "[4, 7]", "torch.as_tensor(target).long().argmax(-1)"),
        "lists of as many numbers as classes": (np.eye(4, 7).tolist(), "7", "SparseTarget.from_dense(target)",
                                                "SparseTarget.from_lists(target)"),
        "lists of fractions": ([[1.5], [2.0, 3.0], [], [1]], "rows", "without a fraction"),
        "lists for another number of rows": ([[1], [2]], "[4]", "[2]"),
        "lists of lists of lists": ([[[1]], [[2]], [], []], "[[[1]], [[2]], [], []]"),
        "lists of labels of different lengths": ([[[1, 2], [3]], [[4], [5]]], "expected sequence"),
    }


def test_labels_may_be_an_array(device):
    x, labels = good(device)
    assert_bitwise_equal(cross_entropy(x, labels), cross_entropy(x, labels.cpu().numpy()) if device == "cpu"
                         else cross_entropy(x, SparseTarget.from_index(labels.cpu().numpy()).to(device)))
    ids = labels[:, None].cpu().numpy()
    if device == "cpu":
        assert_bitwise_equal(sparse_ce.selected_log_probs(x, ids).log_probs, sparse_ce.selected_log_probs(
            x, labels[:, None]).log_probs)


@pytest.mark.parametrize("wrong", targets("cpu"))
def test_a_wrong_target_is_refused(wrong, device):
    target, *words = targets(device)[wrong]
    x = good(device)[0].requires_grad_()
    before = x.detach().clone()
    assert_refused(lambda: cross_entropy(x, target), *words)
    assert_refused(lambda: linear_cross_entropy(x, torch.eye(7, device=device), target), *words)
    assert_bitwise_equal(x.detach(), before)
    assert x.grad is None and x._version == 0


def test_weights_of_rows_are_no_class_weights(device):
    x, labels = good(device)
    for f, source in ((cross_entropy, (x,)), (linear_cross_entropy, (x, torch.eye(7, device=device))),
                      (sparse_ce.binary_cross_entropy_with_logits, (x,))):
        assert_refused(lambda: f(*source, labels, weight=torch.ones(4, device=device)), "weight", "[4]", "row_weight")
        with pytest.raises(ValueError, match=r"got \[5\]$"):
            f(*source, labels, weight=torch.ones(5, device=device))


def test_wrong_parts_of_a_target_are_refused(device):
    _, labels = good(device)
    column, ones, offsets = labels[:, None], torch.ones(4, 1, device=device), torch.tensor([0, 2, 4], device=device)
    refused = [
        (lambda: SparseTarget.from_index(labels.float()), "labels", "float32"),
        (lambda: SparseTarget.from_index([1, None]), "labels", "list"),
        *((lambda n=n: SparseTarget.from_index(labels, num_classes=n), "num_classes", repr(n)) for n in (5.5, True, 0)),
        (lambda: SparseTarget.from_index(labels).with_num_classes("a"), "num_classes", "an integer", "'a'"),
        (lambda: sparse_ce.collate([]), "samples", "at least one", "none"),
        (lambda: SparseTarget.cat([]), "targets", "at least one", "none"),
        (lambda: SparseTarget.from_index(labels, row_mask=torch.ones(3, device=device)), "row_mask", "[4]", "[3]"),
        (lambda: SparseTarget.from_index(labels, row_mask=[True] * 3), "row_mask", "[3]"),
        (lambda: SparseTarget.from_topk(column, ones, values_are="odds"), "values_are", "'odds'"),
        (lambda: SparseTarget.from_topk(column, ones, mask=ones[:2]), "mask", "[4, 1]", "[2, 1]"),
        (lambda: SparseTarget.from_topk(labels[0], ones[0, 0]), "[]"),
        (lambda: SparseTarget.from_coo(ones), "COO"),
        (lambda: SparseTarget.from_csr(ones.to_sparse()), "CSR"),
        (lambda: SparseTarget.from_jagged(column, ones, offsets), "indices", "[4, 1]"),
        (lambda: SparseTarget.from_jagged(labels, ones, offsets), "values", "[4]", "[4, 1]"),
        (lambda: SparseTarget.from_jagged(labels, None, offsets.float()), "offsets", "float32"),
        (lambda: SparseTarget.from_jagged(labels, None, offsets[0]), "offsets", "[]"),
        (lambda: SparseTarget.from_jagged(labels, None, offsets.expand(2, 3)), "offsets", "[2, 3]"),
        (lambda: SparseTarget.from_index(labels)[labels.float()], "float32"),
        (lambda: SparseTarget.from_index(labels)[0, 0], "1"),
        (lambda: SparseTarget.from_index(labels).to(torch.float32), "float32"),
        (lambda: len(SparseTarget.from_index(labels[0])), "[]"),
        (lambda: SparseTarget.from_index(labels[0]).shift(1), "[]"),
        (lambda: SparseTarget.from_index(labels).to_dense(), "num_classes", "None"),
        (lambda: SparseTarget.from_index(labels).to_dense(5), "dtype", "5", "num_classes="),
        (lambda: SparseTarget(1, 2), "indices", "1", "from_topk"),
        (lambda: SparseTarget([1], [2.0]), "indices", "[1]", "from_topk"),
        (lambda: SparseTarget.from_topk(*ones.expand(4, 2).topk(2)), "(values, indices)"),
        (lambda: sparse_ce.divergence(torch.zeros(4, 7, device=device), torch.ones(4, 7, device=device) / 7), "teacher",
         "dense", "topk_log_probs(teacher_logits, k)", "sparse_ce.distillation_loss"),
        (lambda: sparse_ce.collate([SparseTarget.from_index(t) for t in (labels, labels.view(2, 2))]), "[1, 2]"),
        (lambda: sparse_ce.collate([SparseTarget.from_index(labels, num_classes=c) for c in (7, 8)]), "[7, 8]"),
    ]
    for call, *words in refused:
        assert_refused(call, *words, error=(TypeError, ValueError, IndexError))
