"""Tests the checks of the ops themselves and indices that are out of range."""

import pytest
import torch

from cases import Draw
from close import assert_bitwise_equal
from refusals import assert_refused, good
from sparse_ce import SparseTarget, cross_entropy, linear_cross_entropy

ops = torch.ops.sparse_ce


def arguments(device):
    """Returns valid arguments of forward by name."""
    draw = Draw(device)
    return dict(logits=draw.normal(4, 7), indices=draw.integers(7, 4, 3), values=draw.uniform(4, 3),
                weight=draw.uniform(7), row_mask=torch.ones(4, dtype=torch.bool, device=device))


def test_a_gradient_that_is_there_must_fit(device):
    rows = torch.ones(4, device=device)
    given = dict(arguments(device), expected=rows[0], grad_mean=2 * rows[1], grad_loss=rows, lse=rows,
                 lse_residual=rows)
    made = torch.full_like(given["logits"], 5)
    ops.backward_anew_(**given, grad_logits=made)
    assert (made != 5).all()
    wide = torch.full((4, 9), 5.0, device=device)
    refused = [("grad_logits", bad, word) for bad, word in (
        (wide[:3, :7], "[3, 7]"), (wide[:, :7], "stride 9"), (wide[:, :1].expand(4, 7), "stride 9"),
        (wide[:, :7].half(), "Half"), (wide[0, :7], "[7]"), (made.t().contiguous().t(), "stride 1"))]
    refused += [(argument, bad, word) for argument in ("expected", "grad_mean") for bad, word in (
        (rows, "[4]"), (rows[0].double(), "Double"), (rows[0].half(), "Half"))]
    for argument, bad, word in refused:
        call = {**given, "grad_logits": made.clone(), argument: bad}
        before = call["grad_logits"].clone()
        assert_refused(lambda: ops.backward_anew_(**call), argument, word, error=RuntimeError)
        assert_bitwise_equal(call["grad_logits"], before)


def test_overwriting_logits_that_overlap_is_refused(device):
    rows = torch.ones(4, device=device)
    given = dict(arguments(device), grad_loss=rows, grad_lse=None, lse=rows, lse_residual=rows)
    logits = given["logits"]
    for bad, word in ((logits[:1].expand(4, 7), "0"), (logits.t().contiguous().t(), "4")):
        before = bad.clone()
        assert_refused(lambda: ops.backward_(**dict(given, logits=bad)), "logits", word, error=RuntimeError)
        assert_bitwise_equal(bad.contiguous(), before)
        call = dict(arguments(device), logits=bad, grad_mean=rows[0], normalizer=None)
        assert_refused(lambda: ops.forward_with_gradient_(**call), "logits", word, error=RuntimeError)
        assert_bitwise_equal(bad.contiguous(), before)


def test_a_masked_row_may_hold_any_index(device):
    x, mask = torch.zeros(3, 4, device=device), torch.tensor([True, False, True], device=device)
    for bad in (4, -1):
        labels = torch.tensor([1, bad, 2], device=device)
        assert ops.forward(x, labels, row_mask=mask)[0].ne(0).tolist() == mask.tolist()
        topk = torch.stack([labels, labels], 1)
        assert ops.forward(x, topk, torch.ones_like(topk).float(), row_mask=mask)[0].ne(0).tolist() == mask.tolist()


# ------------------------------------------------------------------------------------------------------ the linear head


def test_a_scale_that_does_not_fit_is_refused(device):
    gradient, scale = torch.ones(4, 6, device=device), torch.tensor(2.0, device=device)
    refused = [((gradient, scale[None]), "scale", "[1]"), ((gradient, scale.double()), "scale", "Double"),
               ((gradient.bfloat16(), scale.bfloat16()), "scale", "Float", "BFloat16"),
               ((gradient.long(), scale), "gradient", "Long"), ((gradient[:, ::2], scale), "gradient", "contiguous"),
               ((gradient.t(), scale), "gradient", "contiguous", "[6, 4]"),
               ((gradient[:1].expand(4, 6), scale), "gradient", "overlap"),
               ((gradient, scale, scale[None]), "expected", "[1]"),
               ((gradient, scale, scale.double()), "expected", "Double")]
    for call, *words in refused:
        values = call[0]
        before = values.clone()
        assert_refused(lambda: ops.scale_(*call), *words, error=RuntimeError)
        assert_bitwise_equal(values, before)


# ------------------------------------------------------------------------------------------------- indices out of range


def out_of_range(device):
    """Returns targets over 7 classes with a wrong index in row 2, and the index."""
    ones = torch.ones(4, device=device)
    crow = torch.arange(5, device=device)

    def put(index, dtype=torch.int64):
        return torch.tensor([1, 2, index, 4], device=device).to(dtype)

    def coo(columns):
        return torch.sparse_coo_tensor(torch.stack([crow[:4], columns]), ones, (4, 7), check_invariants=False)

    def csr(crow, columns):
        return torch.sparse_csr_tensor(crow, columns, ones, (4, 7), check_invariants=False)

    return {
        "label": (put(7), 7), "label, negative": (put(-1), -1), "label, int32": (put(-(2**31), torch.int32), -(2**31)),
        "label, uint8": (put(255, torch.uint8), 255), "label, far": (put(2**40), 2**40),
        "top-k": ((torch.stack([put(7), put(7)], 1)[:, :1], ones[:, None]), 7),
        "top-k, last entry": ((torch.stack([put(3), put(9)], 1), torch.ones(4, 2, device=device)), 9),
        "COO column": (coo(put(8)), 8), "COO column, negative": (coo(put(-2)), -2),
        "CSR column": (csr(crow, put(70)), 70), "CSR column, int32": (csr(crow.int(), put(-70).int()), -70),
        "jagged": (SparseTarget.from_jagged(put(7), None, crow), 7),
        "jagged ranges": (SparseTarget.from_jagged(put(7), ones, torch.stack([crow[:-1], crow[1:]], 1)), 7),
        "ignore_index of another value": (put(-100), -100),
    }


@pytest.mark.parametrize("wrong", out_of_range("cpu"))
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_index_out_of_range_is_named_with_its_row_and_the_classes(wrong, requires_grad, device):
    target, index = out_of_range(device)[wrong]
    x = good(device)[0].requires_grad_(requires_grad)
    before = x.detach().clone()
    options = dict(ignore_index=-1) if "another" in wrong else {}
    if "negative" in wrong and "label" in wrong:
        options = dict(ignore_index=-100)
    def linear(x, target, **options):
        return linear_cross_entropy(x, torch.eye(7, device=device), target, chunk_rows=1, **options)

    for loss_of in (cross_entropy, linear):
        if device == "cpu":
            assert_refused(lambda: loss_of(x, target, **options), index, "row 2", "[0, 7)", error=RuntimeError)
        else:
            loss = loss_of(x, target, reduction="none", **options)
            assert loss[2].isnan() and loss[[0, 1, 3]].isfinite().all()
    assert_bitwise_equal(x.detach(), before)


def test_a_column_that_a_padded_head_does_not_have_is_out_of_range(device):
    x, labels = good(device)
    for target in (labels, torch.eye(7, device=device)[labels].to_sparse()):
        if device == "cpu":
            assert_refused(lambda: cross_entropy(x, target, num_classes=4), "[0, 4)", "4 in row 3")
        else:
            assert cross_entropy(x, target, num_classes=4, reduction="none").isnan().tolist() == [False] * 3 + [True]


def corrupt_rows(device):
    columns, ones = torch.arange(4, device=device), torch.ones(4, device=device)

    def csr(*crow):
        return torch.sparse_csr_tensor(torch.tensor(crow, device=device), columns, ones, (4, 7), check_invariants=False)

    return {"past the end": csr(0, 1, 2, 3, 9), "decreasing": csr(0, 3, 1, 3, 4), "negative": csr(-1, 1, 2, 3, 4),
            "far": csr(0, 1, 2, 2**40, 4)}


@pytest.mark.parametrize("wrong", corrupt_rows("cpu"))
def test_a_corrupt_crow_is_refused(wrong, device):
    x, target = good(device)[0].requires_grad_(), corrupt_rows(device)[wrong]
    if device == "cpu":
        assert_refused(lambda: cross_entropy(x, target), "crow_indices", "its 4 entries", error=RuntimeError)
        jagged = SparseTarget.from_jagged(target.col_indices(), None, target.crow_indices())
        assert_refused(lambda: cross_entropy(x, jagged), "offsets", "row", error=RuntimeError)
    else:
        assert cross_entropy(x, target).isnan()


@pytest.mark.parametrize("row", [4, -1, 2**40])
def test_a_coo_row_out_of_range_is_refused(row, device):
    x, positions = good(device)[0], torch.tensor([[0, row], [1, 2]], device=device)

    def coo(*values):
        return torch.sparse_coo_tensor(positions, torch.tensor(values, device=device), (4, 7), check_invariants=False)

    target = coo(1.0, 1.0)
    if device == "cpu":
        assert_refused(lambda: cross_entropy(x, target), row, "[4]", error=RuntimeError)
    else:
        assert cross_entropy(x, target).isnan()
    expected = cross_entropy(x, torch.tensor([1, -100, -100, -100], device=device), reduction="sum")
    torch.testing.assert_close(cross_entropy(x, coo(1.0, 0.0), reduction="sum"), expected)  # a weight of 0 is padding


def test_a_failed_call_leaves_nothing_behind(device):
    """Checks that the next valid call on the same tensors is correct."""
    x, labels = good(device)
    x.requires_grad_()
    expected = cross_entropy(x, labels)
    expected_grad, = torch.autograd.grad(expected, x, retain_graph=True)
    for bad in (dict(label_smoothing=2.0), dict(num_classes=3), dict(softcap=-1.0), dict(normalizer=torch.tensor([]))):
        if device == "cpu" or "num_classes" not in bad:
            with pytest.raises((ValueError, RuntimeError)):
                cross_entropy(x, labels, **bad)
        assert x.grad is None and x._version == 0
        assert_bitwise_equal(cross_entropy(x, labels), expected)
    assert_bitwise_equal(torch.autograd.grad(expected, x)[0], expected_grad)


def test_the_linear_head_names_the_row_of_the_target_that_it_was_given(device):
    """Checks the reported row: on the CPU ignored rows are left out of the head's matrix products and so of its row
    count."""
    x, head = Draw(device).normal(2, 3, 5), torch.eye(7, 5, device=device)
    labels = torch.tensor([[-100, -100, 3], [-100, 1, 77]], device=device)
    mask, crow = labels.ne(-100), torch.arange(7, device=device)
    ones, spread = torch.ones(2, 3, 1, device=device), torch.stack([crow[:-1], crow[1:]], 1).view(2, 3, 2)
    targets = {
        "labels": labels, "masked": SparseTarget.from_index(labels.clamp(min=0), row_mask=mask),
        "top-k": (labels[..., None], ones),
        "jagged": SparseTarget.from_jagged(labels.view(-1), None, spread, row_mask=mask),
    }
    for name, target in targets.items():
        for call in (lambda x: linear_cross_entropy(x, head, target), lambda x: cross_entropy(x @ head.T, target),
                     lambda x: linear_cross_entropy(x, head, target, reduction="none", chunk_rows=1)):
            for z in (x, x.clone().requires_grad_()):
                if device == "cpu":
                    assert_refused(lambda: call(z), "target must have indices in [0, 7)", "got 77 in row 5",
                                   error=RuntimeError)
                else:
                    assert call(z).isnan().any(), name
    ranges = spread.clone()
    ranges[1, 2, 1] = 9
    target = SparseTarget.from_jagged(labels.view(-1).clamp(0, 6), None, ranges, row_mask=mask)
    if device == "cpu":
        assert_refused(lambda: linear_cross_entropy(x, head, target), "target must have offsets", "row 5")


def test_the_classes_of_a_linear_head_are_its_rows(device):
    x, head, labels = good(device)[0], torch.eye(6, 7, device=device), good(device)[1]
    for call in (lambda: linear_cross_entropy(x, head, labels, num_classes=7),
                 lambda: ops.linear_select(x, head, None, labels, num_classes=7)):
        assert_refused(call, "num_classes", "[1, 6] (the rows of linear_weight)", "got 7")
    short = torch.eye(3, 6, device=device).to_sparse()
    assert_refused(lambda: linear_cross_entropy(x, head, short), "that of the logits")
