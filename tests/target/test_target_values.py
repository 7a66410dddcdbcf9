"""Tests the constructors of ``SparseTarget``, and that it behaves like a tensor over its leading shape."""

import copy
import io
import pickle

import pytest
import torch

import forked
from cases import FORMS, Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, cross_entropy
from sparse_ce.targets.convert import as_target

LAYOUTS = ["labels-target", "topk-target", "topk-masked", "coo-target", "csr-target-ignore-empty", "jagged",
           "jagged-unweighted", "jagged-ranges"]


def example(form, device, shape=(3, 4)):
    draw = Draw(device)
    case = FORMS[form](shape, 37, draw)
    return case.target, case, draw.normal(*case.shape, 37)


def loss(logits, target):
    return cross_entropy(logits, target, reduction="none")


# -------------------------------------------------------------------------------------------------------- constructors


@pytest.mark.parametrize("form", FORMS)
def test_to_dense_shape_and_length(form, device):
    _, case, logits = example(form, device)
    target = as_target(case.target, logits.shape)
    assert target.shape == target.size() == torch.Size(case.shape) and target.dim() == target.ndim == len(case.shape)
    assert len(target) == case.shape[0] and target.size(-1) == case.shape[-1]
    assert target.device.type == device
    if target.num_classes is not None:
        dense = target.to_dense(torch.float64)
        assert dense.dtype == torch.float64
        torch.testing.assert_close(dense, case.dense, rtol=1e-6, atol=1e-7)


def test_nothing_is_copied_that_need_not_be(device):
    indices, values = torch.zeros(4, 3, dtype=torch.int32, device=device), torch.rand(4, 3, device=device)
    target = SparseTarget.from_topk(indices, values)
    assert target.indices is indices and target.values is values
    labels = indices[:, 0]
    assert SparseTarget.from_index(labels).indices is labels
    csr = torch.eye(4, 5, device=device).to_sparse_csr()
    target = SparseTarget.from_csr(csr)
    assert target.values.data_ptr() == csr.values().data_ptr()
    assert target.indices.data_ptr() == csr.col_indices().data_ptr()
    assert target.offsets.data_ptr() == csr.crow_indices().data_ptr()


def test_kinds_of_topk_values(device):
    indices = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
    logits = torch.tensor([[1.0, 2.0, -1.0], [0.0, 3.0, 0.5]], device=device)
    probs = torch.softmax(logits, 1)
    for target in (SparseTarget.from_topk(indices, probs),
                   SparseTarget.from_topk(indices, probs.log(), values_are="log_probs"),
                   SparseTarget.from_topk(indices, logits, values_are="logits")):
        torch.testing.assert_close(target.probs().values, probs)
    padded = torch.cat([indices, torch.full((2, 1), -100, device=device)], 1)
    for fill in (0.0, 50.0, torch.nan, torch.inf, -torch.inf):  # the softmax excludes padding
        wide = torch.cat([logits, torch.full((2, 1), fill, device=device)], 1)
        target = SparseTarget.from_topk(padded, wide, values_are="logits")
        torch.testing.assert_close(target.values, torch.cat([probs, torch.zeros(2, 1, device=device)], 1))
        everything = SparseTarget.from_topk(padded, wide, values_are="logits", mask=torch.ones_like(padded))
        torch.testing.assert_close(everything.values, target.values)
        target = SparseTarget.from_topk(padded.clamp(min=0), wide, values_are="logits", mask=padded >= 0)
        torch.testing.assert_close(target.values[:, :3], probs)
    entries_of_minus_infinity = torch.tensor([[1.0, 2.0, -torch.inf]], device=device)
    target = SparseTarget.from_topk(indices[:1], entries_of_minus_infinity, values_are="logits")
    torch.testing.assert_close(target.values, torch.softmax(entries_of_minus_infinity, 1))


def test_a_row_of_padding_alone_has_no_weight_of_any_kind(device):
    indices = torch.tensor([[1, 2], [3, 4]], device=device)
    mask = torch.tensor([[True, True], [False, False]], device=device)
    nothing = torch.full((2, 2), -torch.inf, device=device)
    x = torch.randn(2, 7, device=device)
    for kind in ("probs", "log_probs", "logits"):
        target = SparseTarget.from_topk(indices, torch.ones(2, 2, device=device), values_are=kind, mask=mask)
        assert target.probs().values[1].eq(0).all() and loss(x, target)[1] == 0 and loss(x, target)[0] > 0
        assert target.ne(-100).all()  # it is active: a target of all zeros
    for kind in ("log_probs", "logits"):  # a log-probability of -inf is padding
        target = SparseTarget.from_topk(indices, nothing, values_are=kind)
        assert loss(x, target).eq(0).all()


@pytest.mark.parametrize("kind", ["log_probs", "logits"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_log_probabilities_become_weights_without_another_rounding(kind, half, device):
    """Checks float32 arithmetic: exp in 16 bits would be off by 0.4 %."""
    draw = Draw(device)
    logits = torch.log_softmax(draw.normal(5, 8), 1).to(half)
    x, indices = draw.normal(5, 20), draw.integers(20, 5, 8)
    exact = logits.double().exp() if kind == "log_probs" else torch.softmax(logits.double(), 1)
    target = SparseTarget.from_topk(indices, logits, values_are=kind)
    torch.testing.assert_close(loss(x, target), loss(x.double(), (indices, exact)).float(), rtol=2e-6, atol=1e-6)


def test_gradients_reach_log_probabilities_and_logits(device):
    draw = Draw(device)
    x, indices = draw.normal(5, 20, dtype=torch.float64), draw.integers(20, 5, 4)
    indices[0, 2:] = -100
    values = draw.normal(5, 4, dtype=torch.float64).requires_grad_()
    for kind in ("log_probs", "logits"):
        assert torch.autograd.gradcheck(lambda v: loss(x, SparseTarget.from_topk(indices, v, values_are=kind)), values)


def test_ignore_empty_and_row_mask(device):
    row_mask = torch.tensor([True, True, False, True], device=device)
    dense = torch.zeros(4, 5, device=device)
    dense[0, 1] = dense[2, 3] = 1.0
    indices = torch.tensor([[1, 0], [-100, 0], [3, 0], [-100, -100]], device=device)
    values = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 0]], device=device)
    targets = [lambda **k: SparseTarget.from_coo(dense.to_sparse(), **k),
               lambda **k: SparseTarget.from_csr(dense.to_sparse_csr(), **k),
               lambda **k: SparseTarget.from_topk(indices, values, **k),
               lambda **k: SparseTarget.from_jagged(torch.tensor([1, 3], device=device), None,
                                                    torch.tensor([0, 1, 1, 2, 2], device=device), **k)]
    x = torch.randn(4, 5, device=device)
    for make in targets:
        assert make(ignore_empty=True).ne(-100).tolist() == [True, False, True, False]
        assert make(ignore_empty=True, row_mask=row_mask).ne(-100).tolist() == [True, False, False, False]
        assert make(row_mask=row_mask).ne(-100).tolist()[:3] == [True, True, False]
        expected = (-torch.log_softmax(x, 1) * dense).sum(1)
        torch.testing.assert_close(loss(x, make(ignore_empty=True)), expected)
        torch.testing.assert_close(cross_entropy(x, make(ignore_empty=True)), expected.sum() / 2)
    assert SparseTarget.from_index(indices[:, 0], 3, row_mask=row_mask).ne(-100).tolist() == [True, False, False, False]


def test_an_integer_mask_is_a_mask(device):
    indices, values = torch.tensor([[1, 2], [3, 4]], device=device), torch.rand(2, 2, device=device)
    mask = torch.tensor([[1, 0], [1, 1]], device=device)
    rows = torch.tensor([0, 1], device=device)
    x = torch.randn(2, 7, device=device)
    assert_bitwise_equal(loss(x, SparseTarget.from_topk(indices, values, mask=mask, row_mask=rows)),
                         loss(x, SparseTarget.from_topk(indices, values, mask=mask.bool(), row_mask=rows.bool())))


def test_counts_are_weights(device):
    x = torch.randn(3, 5, device=device)
    counts = torch.tensor([[0, 2, 1, 0, 0], [0, 0, 0, 0, 3], [0, 0, 0, 0, 0]], device=device)
    expected = (-torch.log_softmax(x, 1) * counts).sum(1)
    top = counts.topk(2)
    for target in (counts.to_sparse(), counts.to_sparse_csr(), (top.indices, top.values), counts.int().to_sparse(),
                   counts.bool().to_sparse()):
        weights = counts.bool() if isinstance(target, torch.Tensor) and target.dtype == torch.bool else counts
        torch.testing.assert_close(loss(x, target), (-torch.log_softmax(x, 1) * weights).sum(1))
    assert expected[2] == 0


# ------------------------------------------------------------------------------------------------------ like a tensor

KEYS = [0, -1, slice(None), slice(1, None), slice(None, 2), slice(-2, None), slice(5, 9), slice(2, 1),
        slice(None, None, 2), Ellipsis, (Ellipsis, slice(1, None)), (Ellipsis, 2), (slice(None), 1),
        (1, slice(None, 2)), (slice(0, 2), slice(1, 3)), (0, Ellipsis), (1, 2), (-1, -1)]


@pytest.mark.parametrize("form", LAYOUTS)
def test_slicing_is_slicing_of_the_rows(form, device):
    target, case, logits = example(form, device)
    whole, dense = loss(logits, target), target.to_dense()
    for key in KEYS:
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) - parts.count(Ellipsis) > len(case.shape):
            continue
        every_class = (*parts, slice(None)) if Ellipsis in parts else key
        part = target[key]
        assert part.shape == whole[key].shape, key
        assert part.ne(-100).tolist() == target.ne(-100)[key].tolist()
        torch.testing.assert_close(loss(logits[every_class], part), whole[key])
        torch.testing.assert_close(part.to_dense(), dense[every_class])


@pytest.mark.parametrize("form", LAYOUTS)
def test_slices_of_slices_and_iteration(form, device):
    target, case, logits = example(form, device)
    whole = loss(logits, target)
    torch.testing.assert_close(loss(logits[1:][1:], target[1:][1:]), whole[2:])
    torch.testing.assert_close(loss(logits[:-1][0], target[:-1][0]), whole[0])
    rows = list(target)
    assert len(rows) == len(target)
    torch.testing.assert_close(torch.stack([loss(x, t) for x, t in zip(logits, rows)]), whole)


def test_it_is_no_collection_to_those_who_ask(device, tmp_path):
    """Checks this because Lightning looks for the batch size in every iterable, down to single rows."""
    asked = "import sparse_ce, collections.abc; print(issubclass(sparse_ce.SparseTarget, collections.abc.Iterable))"
    done = forked.run("-c", asked, cwd=tmp_path)
    assert done.stdout == "False\n", done.stderr  # in a process that has not imported the Trainer's integration
    target, _, _ = example("topk-target", device)
    row = target[0, 0]
    assert row[...].shape == ()
    for touch in (list, len, lambda t: t[0]):
        with pytest.raises(TypeError, match="sparse_ce: target must have a leading dimension to .*, got shape"):
            touch(row)
    with pytest.raises(IndexError):
        target[3]


def test_a_single_row_of_a_jagged_target_keeps_its_meaning(device):
    """Checks that a row without entries is active, and so is one whose entries are all padding."""
    target = SparseTarget.from_jagged(torch.tensor([3, -100], device=device), None,
                                      torch.tensor([0, 1, 1, 2], device=device), num_classes=5)
    assert target.ne(-100).tolist() == [True, True, True]
    assert [bool(row.ne(-100)) for row in target] == [True, True, True]
    assert [row.to_dense().tolist() for row in target] == target.to_dense().tolist()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 9, -1, -3, -4, -9])
@pytest.mark.parametrize("form", LAYOUTS)
def test_shift_moves_rows_along_the_last_leading_dimension(form, n, device):
    target, case, logits = example(form, device)
    shifted = target.shift(n)
    length = case.shape[-1]
    dense, counts = target.to_dense(torch.float64), target.ne(-100)
    expected, expected_counts = torch.zeros_like(dense), torch.zeros_like(counts)
    for i in range(length):
        if 0 <= i + n < length:
            expected[..., i, :] = dense[..., i + n, :]
            expected_counts[..., i] = counts[..., i + n]
    assert shifted.shape == target.shape and shifted.num_classes == target.num_classes
    assert shifted.ne(-100).tolist() == expected_counts.tolist()
    torch.testing.assert_close(shifted.to_dense(torch.float64), expected)
    rows = -torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(loss(logits.double(), shifted), (rows * expected).sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(target.shift(1).shift(1).to_dense(), target.shift(2).to_dense())


def test_shift_is_that_of_the_labels(device):
    labels = torch.randint(7, (3, 5), device=device)
    labels[0, 2] = -100
    logits = torch.randn(3, 5, 7, device=device)
    ours = cross_entropy(logits, SparseTarget.from_index(labels).shift(1))
    theirs = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(ours, theirs)


def test_ne_with_another_mark(device):
    assert SparseTarget.from_index(torch.tensor([1, -1, 2], device=device)).ne(-1).tolist() == [True, False, True]
    target = SparseTarget.from_topk(torch.tensor([[1, -1], [-1, -1]], device=device), torch.ones(2, 2, device=device))
    assert target.ne(-1).tolist() == [True, False] and target.ne(-100).dtype == torch.bool
    nothing = torch.zeros(2, 0, device=device)
    empty = SparseTarget.from_topk(nothing.long(), nothing)
    assert empty.ne(-100).tolist() == [True, True]


# ------------------------------------------------------------------------------------- moving, copying, saving, showing


@pytest.mark.parametrize("form", LAYOUTS)
def test_copies_are_equal(form, device):
    target, case, logits = example(form, device)
    file = io.BytesIO()
    torch.save(target, file)
    file.seek(0)
    leaves, spec = torch.utils._pytree.tree_flatten(target)
    copies = {
        "pickle": pickle.loads(pickle.dumps(target)), "copy": copy.copy(target), "deepcopy": copy.deepcopy(target),
        "save": torch.load(file, weights_only=False), "pytree": torch.utils._pytree.tree_unflatten(leaves, spec),
        "to": target.to(device), "detach": target.detach(), "tree_map": torch.utils._pytree.tree_map(
            lambda t: t.clone() if isinstance(t, torch.Tensor) else t, target)}
    for how, other in copies.items():
        assert repr(other) == repr(target), how
        assert_bitwise_equal(loss(logits, other), loss(logits, target))
    assert copies["deepcopy"].indices.data_ptr() != target.indices.data_ptr()


def test_torch_load_reads_it_with_its_safe_default(device):
    target, _, logits = example("topk-target", device)
    file = io.BytesIO()
    torch.save({"teacher": target}, file)
    file.seek(0)
    assert_bitwise_equal(loss(logits, torch.load(file)["teacher"]), loss(logits, target))


@pytest.mark.parametrize("form", LAYOUTS)
def test_it_moves_between_devices(form, device):
    target, case, logits = example(form, "cpu")
    moved = target.to(device, non_blocking=True)
    assert all(t is None or t.device.type == device
               for t in (moved.indices, moved.values, moved.offsets, moved.row_mask))
    torch.testing.assert_close(moved.cpu().to_dense(), target.to_dense())
    assert target.to("meta").device.type == "meta" and target.to("meta").shape == target.shape
    if device == "cuda":
        pinned = target.pin_memory()
        assert pinned.is_pinned() and not target.is_pinned()
        torch.testing.assert_close(pinned.cuda(non_blocking=True).cpu().to_dense(), target.to_dense())


def test_it_cannot_be_changed(device):
    target = SparseTarget.from_index(torch.arange(3, device=device), num_classes=5)
    for name in ("indices", "values", "offsets", "row_mask", "num_classes", "other"):
        with pytest.raises(AttributeError, match="sparse_ce: a SparseTarget must not be changed"):
            setattr(target, name, None)
        with pytest.raises(AttributeError):
            delattr(target, name)
    assert target.indices is not None


def test_the_repr_helps():
    topk = SparseTarget.from_topk(torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 3, 4).half(),
                                  row_mask=torch.ones(2, 3), num_classes=50)
    assert repr(topk) == ("SparseTarget(topk, shape=[2, 3], k=4, num_classes=50, values=float16, row_mask, device=cpu)")
    assert repr(SparseTarget.from_index(torch.zeros(5, dtype=torch.int64))) == (
        "SparseTarget(index, shape=[5], num_classes=None, device=cpu)")
    csr = SparseTarget.from_csr(torch.eye(4, 6).to_sparse_csr())
    assert repr(csr) == "SparseTarget(jagged, shape=[4], nnz=4, num_classes=6, values=float32, device=cpu)"
    assert csr.nnz == 4 and topk.nnz == 24


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_coo_tensor_that_permute_left_out_of_order(requires_grad, device):
    """Checks this because torch 2.13 still marks it as coalesced."""
    draw = Draw(device)
    x, dense = draw.normal(4, 7, 5), draw.uniform(4, 7, 5) * (draw.uniform(4, 7, 5) < 0.4)
    target = dense.to_sparse().requires_grad_(requires_grad).movedim(1, -1)
    loss = cross_entropy(x.movedim(1, -1), target)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, dense))
