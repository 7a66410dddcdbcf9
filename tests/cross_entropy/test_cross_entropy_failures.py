"""Tests bugs of published losses that concern targets. A test's name states what must hold, its docstring what failed
and where."""

import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, cross_entropy

REDUCTIONS = ["none", "sum", "mean"]


def equals_dense(logits, target, dense, reduction="mean", dense_logits=None, **options):
    """Compares value and gradient with F.cross_entropy on the dense target, with a random ``grad_output``."""
    x, y = logits.clone().requires_grad_(), (logits if dense_logits is None else dense_logits).clone().requires_grad_()
    ours = cross_entropy(x, target, reduction=reduction, **options)
    theirs = F.cross_entropy(y, dense.to(y), reduction=reduction, **options)
    torch.testing.assert_close(ours.reshape(theirs.shape), theirs, check_dtype=False)
    grad_output = Draw(logits.device.type, 3).normal(*theirs.shape).to(theirs)
    ours.backward(grad_output.view_as(ours).to(ours.dtype))
    theirs.backward(grad_output)
    assert x.grad.abs().max() > 0
    torch.testing.assert_close(x.grad.reshape(y.shape), y.grad)


def five_classes(device):
    """Returns logits (3, 5), and positions, values and dense form of rows {1: .7, 3: .3}, {0: 1}, {4: .5, 2: .5}."""
    positions = torch.tensor([[0, 0, 1, 2, 2], [1, 3, 0, 2, 4]], device=device)
    values = torch.tensor([0.7, 0.3, 1.0, 0.5, 0.5], dtype=torch.float64, device=device)
    dense = torch.zeros(3, 5, dtype=torch.float64, device=device).index_put_(tuple(positions), values)
    return Draw(device).normal(3, 5, dtype=torch.float64) * 3, positions, values, dense


# ---------------------------------------------------------------------------------------------------- 1: sparse tensors


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", ["coo", "csr", "csr-int32"])
def test_1_a_sparse_tensor_equals_the_dense_target(layout, reduction, device):
    """Guards against COO backward that raises, COO 'none' that is sparse, CSR backward that raises (transformers#36674,
    pytorch#149045)."""
    logits, positions, values, dense = five_classes(device)
    target = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    if layout == "csr-int32":
        crow, columns = target.crow_indices().int(), target.col_indices().int()
        target = torch.sparse_csr_tensor(crow, columns, target.values(), (3, 5))
    equals_dense(logits, target, dense, reduction)
    assert cross_entropy(logits, target, reduction=reduction).layout == torch.strided


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_1_an_uncoalesced_tensor_equals_the_dense_target(reduction, device):
    """Checks entries in any order, with (0, 1) stored as .25 and .45."""
    logits, _, _, dense = five_classes(device)
    target = torch.sparse_coo_tensor([[2, 0, 1, 0, 0, 2], [4, 1, 0, 3, 1, 2]], [0.5, 0.25, 1.0, 0.3, 0.45, 0.5], (3, 5),
                                     dtype=torch.float64, device=device)
    assert not target.is_coalesced()
    equals_dense(logits, target, dense, reduction)
    assert not target.is_coalesced()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_1_an_empty_row_counts_with_loss_zero(layout, reduction, device):
    logits, _, _, dense = five_classes(device)
    for row in range(3):
        one_empty = dense.clone()
        one_empty[row] = 0
        equals_dense(logits, one_empty.to_sparse(layout=layout), one_empty, reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_1_a_target_without_entries_gives_zero(layout, reduction, device):
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    target = torch.zeros(3, 5, device=device).to_sparse(layout=layout)
    loss = cross_entropy(logits, target, reduction=reduction)
    assert loss.shape == ((3,) if reduction == "none" else ()) and loss.eq(0).all()
    loss.backward(torch.randn_like(loss))
    assert logits.grad.eq(0).all()
    smoothed = cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, F.cross_entropy(logits, target.to_dense(), reduction=reduction,
                                                         label_smoothing=0.1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_1_three_dimensions_equal_two(reduction, device):
    """Compares shapes (2, 3, 5) and (6, 5)."""
    rows = torch.cat([five_classes(device)[3], five_classes(device)[3].flip(1)])
    logits = Draw(device).normal(6, 5, dtype=torch.float64)
    equals_dense(logits.view(2, 3, 5), rows.view(2, 3, 5).to_sparse(), rows, reduction, dense_logits=logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_1_values_of_every_dtype(layout, dtype, device):
    logits, _, _, dense = five_classes(device)
    dense = dense.to(dtype)
    equals_dense(logits, dense.to_sparse(layout=layout), dense, "none")
    # These are half-precision logits with values of any other dtype.
    half = logits.to(torch.bfloat16)
    ours = cross_entropy(half, dense.to_sparse(layout=layout), reduction="none")
    torch.testing.assert_close(ours, F.cross_entropy(half.float(), dense.float(), reduction="none"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["coo", "coo-uncoalesced", "csr"])
def test_1_values_that_require_grad(layout, dtype, device):
    logits, positions, values, dense = five_classes(device)
    if layout == "coo-uncoalesced":
        positions = torch.cat([positions, positions[:, :2]], 1)
        values = torch.cat([values, values[:2]])
    v, w = values.to(dtype).requires_grad_(), values.to(dtype).requires_grad_()
    if layout == "csr":
        crow = torch.tensor([0, 2, 3, 5], device=device)
        target = torch.sparse_csr_tensor(crow, positions[1], v, (3, 5))
    else:
        target = torch.sparse_coo_tensor(positions, v, (3, 5))
    grad_output = torch.randn(3, dtype=torch.float64, device=device)
    cross_entropy(logits, target, reduction="none").backward(grad_output)
    dense = torch.zeros(3, 5, dtype=torch.float64, device=device)
    dense = dense.index_put(tuple(positions), w.double(), accumulate=True)
    F.cross_entropy(logits, dense, reduction="none").backward(grad_output)
    assert v.grad.dtype == dtype
    torch.testing.assert_close(v.grad, w.grad)


# ----------------------------------------------------------------------------------------- 2 - 6: what entries may hold


def test_2_duplicate_indices_add_up(device):
    """Guards against PyTorch Geometric's sparse_cross_entropy, which loses the gradient of duplicates."""
    logits = torch.randn(1, 9, device=device, dtype=torch.float64, requires_grad=True)

    def result(indices, values):
        values = torch.tensor([values], device=device, dtype=torch.float64)
        loss = cross_entropy(logits, (torch.tensor([indices], device=device), values), reduction="sum")
        return loss, *torch.autograd.grad(1.7 * loss, logits)

    torch.testing.assert_close(result([7, 7, 3], [0.2, 0.3, 0.5]), result([7, 3], [0.5, 0.5]), rtol=1e-14, atol=1e-14)


def test_2_fifty_runs_with_duplicates_are_bitwise_equal(device):
    draw = Draw(device)
    indices, values = draw.integers(5, 64, 40), draw.uniform(64, 40)
    logits = draw.normal(64, 300).requires_grad_()
    grad_output = draw.normal(64)

    def run():
        loss = cross_entropy(logits, (indices, values), reduction="none")
        return loss, *torch.autograd.grad(loss, logits, grad_output)

    first = run()
    for _ in range(50):
        for a, b in zip(first, run()):
            assert_bitwise_equal(a, b)


PAD_INDICES = [0, -1, -100, 5, 10**6, 2**31 - 1, -(2**31), 2**62, -(2**63)]


@pytest.mark.parametrize("how", ["weight 0", "log-probability -inf", "mask False", "mask False, values NaN"])
@pytest.mark.parametrize("pad", PAD_INDICES)
def test_3_padding_is_not_read_as_an_index(pad, how, device):
    """Guards against axolotl, which returns NaN, and DistillKit, which pads with uninitialized ids."""
    valid, padded = torch.tensor([[1, 3]], device=device), torch.tensor([[1, pad, 3, pad]], device=device)
    probs = torch.tensor([[0.6, 0.4]], device=device, dtype=torch.float64)
    garbage = {"mask False": 0.7, "mask False, values NaN": torch.nan}.get(how, 0.0)
    values = torch.full((1, 4), garbage, device=device, dtype=torch.float64)
    values[:, ::2] = probs
    if how == "weight 0":
        target = padded, values
    elif how == "log-probability -inf":
        target = SparseTarget.from_topk(padded, values.log(), values_are="log_probs")
    else:
        mask = torch.tensor([[True, False, True, False]], device=device)
        target = SparseTarget.from_topk(padded, values, mask=mask)
    logits = torch.randn(1, 5, device=device, dtype=torch.float64)
    logits[0, 0] = -torch.inf  # a padding index of 0 would read this logit
    dense = torch.zeros(1, 5, device=device, dtype=torch.float64).scatter_(1, valid, probs)
    finite = torch.where(dense == 0, logits.clamp(min=-1e30), logits)  # torch's 0 * -inf is NaN
    equals_dense(logits, target, dense, "none", dense_logits=finite)
    with_smoothing = cross_entropy(finite, target, label_smoothing=0.1)
    torch.testing.assert_close(with_smoothing, F.cross_entropy(finite, dense, label_smoothing=0.1))


def test_3_padding_gets_no_gradient_of_its_own(device):
    indices = torch.tensor([[1, 2**40, -1, 3]], device=device)
    values = torch.tensor([[0.6, 0.0, 0.0, 0.4]], device=device, requires_grad=True)
    cross_entropy(torch.randn(1, 5, device=device), (indices, values)).backward()
    assert values.grad[0, 1:3].eq(0).all() and values.grad[0, [0, 3]].abs().min() > 0


@pytest.mark.parametrize("form", ["topk", "coo", "csr", "class weight"])
def test_3_an_explicit_zero_weight_at_a_logit_of_minus_infinity_stays_finite(form, device):
    """Guards against torch's NaN, from 0 * -inf."""
    logits = torch.tensor([[1.0, -torch.inf, 2.0]], device=device, requires_grad=True)
    indices, values = torch.tensor([[0, 1]], device=device), torch.tensor([[1.0, 0.0]], device=device)
    weight = None
    if form == "topk":
        target = indices, values
    elif form == "coo":
        target = torch.sparse_coo_tensor([[0, 0], [0, 1]], values[0], (1, 3))
    elif form == "csr":
        target = torch.sparse_csr_tensor(torch.tensor([0, 2], device=device), indices[0], values[0], (1, 3))
    else:
        target, weight = (indices, torch.ones_like(values)), torch.tensor([1.0, 0.0, 1.0], device=device)
    loss = cross_entropy(logits, target, weight)
    expected = -torch.log_softmax(logits.detach(), 1)[0, 0]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    label = torch.tensor([1.0, 0, 0], device=device)
    torch.testing.assert_close(logits.grad, torch.softmax(logits.detach(), 1) - label)


@pytest.mark.parametrize("form", ["topk", "coo", "csr"])
def test_4_mass_other_than_one_scales_the_softmax_term(form, device):
    """Checks that rows of mass .6, 0 and 1.7 get the gradient s q - w. verl's recipe computes q - w."""
    dense = torch.zeros(3, 6, device=device, dtype=torch.float64)
    dense[0, [1, 4]] = torch.tensor([0.4, 0.2], device=device, dtype=torch.float64)
    dense[2, [0, 4, 5]] = torch.tensor([1.2, 0.3, 0.2], device=device, dtype=torch.float64)
    logits = torch.randn(3, 6, device=device, dtype=torch.float64, requires_grad=True)
    top = dense.topk(3)
    target = {"topk": (top.indices, top.values), "coo": dense.to_sparse(), "csr": dense.to_sparse_csr()}[form]
    grad_output = torch.tensor([0.5, -2.0, 3.0], device=device, dtype=torch.float64)
    cross_entropy(logits, target, reduction="none").backward(grad_output)
    mass = torch.tensor([[0.6], [0.0], [1.7]], device=device, dtype=torch.float64)
    expected = grad_output[:, None] * (mass * torch.softmax(logits.detach(), 1) - dense)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [
    dict(), dict(label_smoothing=0.2), dict(z_loss=0.1), dict(logit_scale=1 / 3), dict(softcap=4.0),
    dict(num_classes=6), dict(label_smoothing=0.2, z_loss=0.1, logit_scale=2.0, softcap=4.0, num_classes=6)], ids=str)
def test_5_the_gradient_is_that_of_the_reported_loss(options, device):
    """Guards against axolotl, whose loss and gradient differ by the temperature squared."""
    draw = Draw(device)
    x = (3 * draw.normal(4, 7, dtype=torch.float64)).requires_grad_()
    values = draw.uniform(4, 3, low=0.1, dtype=torch.float64).requires_grad_()
    indices, weight = draw.integers(6, 4, 3), draw.uniform(7, low=0.5, dtype=torch.float64)
    for reduction in REDUCTIONS:
        assert torch.autograd.gradcheck(lambda x, v: cross_entropy(
            x, (indices, v), weight, reduction=reduction, return_lse=True, **options)[:2], (x, values))


@pytest.mark.parametrize("form", ["label", "topk", "coo", "csr", "jagged"])
@pytest.mark.parametrize("index", [5, -1, -99, 2**31 - 1])
def test_6_an_index_out_of_range_never_gives_a_finite_loss(form, index, device):
    """Guards against flash-attention, which returns 0. torch silently accepts COO and CSR tensors with such indices."""
    logits = torch.randn(2, 5, device=device)
    columns, ones = torch.tensor([1, index], device=device), torch.ones(2, device=device)
    rows = torch.tensor([0, 1, 2], device=device)
    target = {"label": columns, "topk": (columns[:, None], ones[:, None]),
              "coo": torch.sparse_coo_tensor(torch.stack([rows[:2], columns]), ones, (2, 5), check_invariants=False),
              "csr": torch.sparse_csr_tensor(rows, columns, ones, (2, 5), check_invariants=False),
              "jagged": SparseTarget.from_jagged(columns, ones, rows)}[form]
    if device == "cpu":
        with pytest.raises(RuntimeError, match=rf"target must have indices in \[0, 5\).*got {index} in row 1"):
            cross_entropy(logits, target)
    else:
        loss = cross_entropy(logits, target, reduction="none")
        assert loss[1].isnan() and loss[0].isfinite()
