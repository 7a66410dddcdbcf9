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


def jagged(device):
    a = arguments(device)
    offsets = torch.arange(0, 13, 3, device=device)
    return dict(a, indices=a["indices"].view(-1), values=a["values"].view(-1), offsets=offsets)


WRONG = {  # (argument, its replacement, what else the message must name)
    "logits of one dimension": ("logits", lambda t: t[0], "[7]"),
    "logits of four dimensions": ("logits", lambda t: t[None, None], "[1, 1, 4, 7]"),
    "logits of integers": ("logits", lambda t: t.long(), "Long"),
    "logits without classes": ("logits", lambda t: t[:, :0], "[4, 0]"),
    "indices of too few rows": ("indices", lambda t: t[:3], "[3, 3]"),
    "indices of three dimensions": ("indices", lambda t: t[None], "[1, 4, 3]"),
    "indices of no dimension": ("indices", lambda t: t[0, 0], "[]"),
    "indices in uint8": ("indices", lambda t: t.byte(), "Byte"),
    "indices in int16": ("indices", lambda t: t.short(), "Short"),
    "indices in float": ("indices", lambda t: t.float(), "Float"),
    "values of another shape": ("values", lambda t: t[:, :2], "[4, 2]"),
    "values transposed": ("values", lambda t: t.t(), "[3, 4]"),
    "values flat": ("values", lambda t: t.reshape(-1), "[12]"),
    "values in int64": ("values", lambda t: t.long(), "Long"),
    "weight of another length": ("weight", lambda t: t[:6], "[6]"),
    "weight of two dimensions": ("weight", lambda t: t[None], "[1, 7]"),
    "weight in float64": ("weight", lambda t: t.double(), "Double"),
    "row_mask in uint8": ("row_mask", lambda t: t.byte(), "Byte"),
    "row_mask of another length": ("row_mask", lambda t: t[:3], "[3]"),
}
WRONG_JAGGED = {
    "offsets too short": ("offsets", lambda t: t[:-1], "[4]"),
    "offsets of three columns": ("offsets", lambda t: torch.stack([t[:-1]] * 3, 1), "[4, 3]"),
    "offsets of too few rows": ("offsets", lambda t: torch.stack([t[:-2], t[1:-1]], 1), "[3, 2]"),
    "offsets in float": ("offsets", lambda t: t.float(), "Float"),
    "indices of two dimensions": ("indices", lambda t: t.view(4, 3), "[4, 3]"),
    "values of another length": ("values", lambda t: t[:-1], "[11]"),
}


@pytest.mark.parametrize("name", ["forward", "forward_with_residual", "forward_with_gradient", "forward_with_gradient_",
                                  "backward", "backward_", "backward_anew_", "backward_values"])
@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_JAGGED])
def test_every_op_refuses_a_wrong_tensor(wrong, name, device):
    given = jagged(device) if wrong in WRONG_JAGGED else arguments(device)
    argument, change, word = {**WRONG, **WRONG_JAGGED}[wrong]
    rows = torch.ones(4, device=device)
    given[argument] = change(given[argument])
    if name.startswith("backward"):
        given.update(grad_loss=rows, lse=rows, lse_residual=rows)
        if name == "backward_anew_":
            given.update(expected=rows[0], grad_mean=rows[1], grad_logits=torch.zeros_like(given["logits"]))
        elif name != "backward_values":
            given["grad_lse"] = None
    elif "gradient" in name:
        given.update(grad_mean=rows[0], normalizer=None)
    before = given["logits"].clone()
    assert_refused(lambda: getattr(ops, name)(**given), argument, word, error=RuntimeError)
    assert_bitwise_equal(given["logits"], before)


@pytest.mark.parametrize("name", ["backward", "backward_", "backward_values"])
def test_the_backward_ops_refuse_wrong_rows(name, device):
    rows = torch.ones(4, device=device)
    given = dict(arguments(device), grad_loss=rows, lse=rows, lse_residual=rows)
    if name != "backward_values":
        given["grad_lse"] = rows
    getattr(ops, name)(**dict(given, logits=given["logits"].clone()))
    wrong = [(rows[:3], "[3]"), (rows[:, None], "[4, 1]"), (rows.double(), "Double"), (rows.half(), "Half")]
    refused = [(argument, *bad) for argument in set(given) & {"grad_loss", "grad_lse", "lse", "lse_residual"}
               for bad in wrong]
    refused += [(argument, rows[:1].expand(4), "contiguous") for argument in ("lse", "lse_residual")]
    for argument, bad, word in refused:
        call = dict(given, **{argument: bad})
        assert_refused(lambda: getattr(ops, name)(**call), argument, word, error=RuntimeError)


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


def test_what_a_gradient_is_made_for_must_fit(device):
    given = dict(arguments(device), grad_mean=torch.ones((), device=device), normalizer=None)
    before, one = given["logits"].clone(), given["grad_mean"]
    refused = [("grad_mean", one[None], "[1]"), ("grad_mean", one.double(), "Double"), ("normalizer", one[None], "[1]"),
               ("row_weight", one.expand(3), "[3]"), ("row_weight", one.half().expand(4), "Half")]
    for argument, bad, word in refused:
        call = dict(given, **{argument: bad})
        assert_refused(lambda: ops.forward_with_gradient_(**call), argument, word, error=RuntimeError)
        assert_bitwise_equal(given["logits"], before)


def test_a_masked_row_may_hold_any_index(device):
    x, mask = torch.zeros(3, 4, device=device), torch.tensor([True, False, True], device=device)
    for bad in (4, -1):
        labels = torch.tensor([1, bad, 2], device=device)
        assert ops.forward(x, labels, row_mask=mask)[0].ne(0).tolist() == mask.tolist()
        topk = torch.stack([labels, labels], 1)
        assert ops.forward(x, topk, torch.ones_like(topk).float(), row_mask=mask)[0].ne(0).tolist() == mask.tolist()


# ------------------------------------------------------------------------------------------------------ the linear head


LINEAR = ["linear_forward", "linear_forward_with_residual", "linear_mean", "linear_forward_with_gradient",
          "linear_backward"]
WRONG_HEAD = {
    "input of one dimension": ("input", lambda t: t[0], "[5]"),
    "input of three dimensions": ("input", lambda t: t[None], "[1, 4, 5]"),
    "input of integers": ("input", lambda t: t.long(), "Long"),
    "linear_weight of another width": ("linear_weight", lambda t: t[:, :4], "[7, 4]"),
    "linear_weight transposed": ("linear_weight", lambda t: t.t(), "[5, 7]"),
    "linear_weight of one dimension": ("linear_weight", lambda t: t[0], "[5]"),
    "linear_weight without classes": ("linear_weight", lambda t: t[:0], "[0, 5]"),
    "linear_weight in float64": ("linear_weight", lambda t: t.double(), "Double"),
    "linear_weight in bfloat16": ("linear_weight", lambda t: t.bfloat16(), "BFloat16"),
    "linear_bias of another length": ("linear_bias", lambda t: t[:6], "[6]"),
    "linear_bias of two dimensions": ("linear_bias", lambda t: t[None], "[1, 7]"),
    "linear_bias in float16": ("linear_bias", lambda t: t.half(), "Half"),
    "chunk_rows of none": ("chunk_rows", lambda _: 0, "0"),
    "chunk_rows below none": ("chunk_rows", lambda _: -4, "-4"),
    "label_smoothing": ("label_smoothing", lambda _: 1.5, "1.5"),
    "num_classes beyond the weight": ("num_classes", lambda _: 8, "8"),
}


def linear_arguments(name, device, given):
    """Returns valid arguments of an op of the linear head by name, with the target of ``given``."""
    draw, rows = Draw(device), torch.ones(4, device=device)
    given = {k: v for k, v in given.items() if k != "logits"}
    given.update(input=draw.normal(4, 5), linear_weight=draw.normal(7, 5), linear_bias=draw.normal(7), chunk_rows=3)
    if name == "linear_backward":
        given.update(grad_loss=rows, grad_lse=rows, lse=rows, lse_residual=rows)
    if name == "linear_forward_with_gradient":
        given.update(grad_mean=rows[0], normalizer=rows[1])
    return given


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("wrong", [*WRONG_HEAD, *WRONG_JAGGED, *(w for w in WRONG if not w.startswith("logits"))])
def test_the_linear_ops_refuse_a_wrong_tensor(wrong, name, device):
    given = linear_arguments(name, device, (jagged if wrong in WRONG_JAGGED else arguments)(device))
    argument, change, word = {**WRONG, **WRONG_JAGGED, **WRONG_HEAD}[wrong]
    getattr(ops, name)(**given)
    given[argument] = change(given.get(argument))
    assert_refused(lambda: getattr(ops, name)(**given), argument, word, error=RuntimeError)


def test_the_linear_ops_refuse_wrong_upstream_gradients(device):
    rows = torch.ones(4, device=device)
    wrong = [(rows[:3], "[3]"), (rows[:, None], "[4, 1]"), (rows.double(), "Double"), (rows.half(), "Half")]
    refused = [("linear_backward", argument, *bad) for argument in ("grad_loss", "grad_lse", "lse", "lse_residual")
               for bad in wrong]
    refused += [("linear_backward", argument, rows[:1].expand(4), "contiguous") for argument in ("lse", "lse_residual")]
    for bad in ((rows, "[4]"), (rows[0].double(), "Double"), (rows[0].half(), "Half")):
        refused += [("linear_forward_with_gradient", "grad_mean", *bad), ("linear_mean", "normalizer", *bad),
                    ("linear_forward_with_gradient", "normalizer", *bad)]
    for name, argument, bad, word in refused:
        given = dict(linear_arguments(name, device, arguments(device)), **{argument: bad})
        assert_refused(lambda: getattr(ops, name)(**given), argument, word, error=RuntimeError)


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
                 lambda: ops.linear_forward(x, head, None, labels, num_classes=7)):
        assert_refused(call, "num_classes", "[1, 6] (the rows of linear_weight)", "got 7")
    short = torch.eye(3, 6, device=device).to_sparse()
    assert_refused(lambda: linear_cross_entropy(x, head, short), "that of the logits")
