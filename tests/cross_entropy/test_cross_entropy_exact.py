"""Compares losses and each class's gradient with the exact ones, for rows that are confident by up to 80 nats.

An error must be at most 4 ULP of each term of the exact formula, plus the rounding of z_j - max z and of z_j - lse,
which are errors relative to an exponential. A sum with the 1 of the largest class fails from a lead of 5 nats on.
"""

import numpy as np
import pytest
import torch

import sparse_ce
from cases import DTYPES, FORMS, Draw, sparsely
from dense import divisor
from exact_rows import ExactRows, Rough, assert_exact, assert_sum_to_0, confident_logits, long
from sparse_ce.ops.logits import strided as strided_logits

CLASSES, PADDED, SHAPE = 37, 41, (4, 8)
OPTIONS = {
    "plain": {},
    "weight": dict(weight=True),
    "label_smoothing": dict(label_smoothing=0.1),
    "z_loss": dict(z_loss=0.03, return_lse=True),
    "logit_scale": dict(logit_scale=0.37),
    "softcap": dict(softcap=60.0),
    "entropy": dict(return_entropy=True),
    "all": dict(weight=True, label_smoothing=0.1, z_loss=0.01, logit_scale=1.3, softcap=50.0, num_classes=CLASSES,
                return_lse=True, return_entropy=True),
}
REDUCTIONS = ["none", "sum", "mean"]


def weights_of(case, class_weights):
    """Returns the weights of a target's classes (N, classes), times the class weights."""
    values = None if case.values is None else case.values.double()
    dense = long(case.dense_of(values).reshape(-1, case.classes))
    size = dense if values is None or (dense >= 0).all() else long(case.dense_of(values.abs()).reshape(dense.shape))
    return Rough(dense, np.maximum(size, abs(dense))) * class_weights


def compare(logits, case, keywords, reduction, draw, steps=1):
    """Compares a loss of logits (..., V) in any layout, its outputs and gradients with the exact ones."""
    keywords, classes, shape = dict(keywords), case.classes, tuple(case.shape)
    weight = keywords.get("weight")
    class_weights = np.ones(classes, np.longdouble) if weight is None else long(weight)
    active = (~case.ignored).reshape(-1).cpu().numpy()
    # An ignored row is a row of zeros, whose results are not compared.
    clean = torch.where(case.ignored[..., None], 0, logits[..., :classes]).reshape(-1, classes)
    rows = ExactRows(clean, softcap=keywords.get("softcap"), logit_scale=keywords.get("logit_scale", 1.0))
    weights = weights_of(case, class_weights)
    options = keywords.get("label_smoothing", 0.0), keywords.get("z_loss", 0.0)
    losses = rows.cross_entropy(weights, class_weights, *options)
    grad_output = draw.normal(*(shape if reduction == "none" else ()))
    upstream = {name: draw.normal(*shape) for name in ("lse", "entropy") if f"return_{name}" in keywords}

    for step in range(steps):
        leaf = logits.detach().requires_grad_()  # keeps the strides
        out = sparse_ce.cross_entropy(leaf * 1 if keywords.get("inplace") else leaf, case.target, reduction=reduction,
                                      **keywords)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        outputs = [loss, *(getattr(out, name) for name in upstream)]
        grads = [t.to(loss.dtype) for t in (grad_output, *upstream.values())]
        gradient, = torch.autograd.grad(outputs, leaf, grads)

    counted = losses * active
    if reduction == "none":
        assert_exact("loss", loss, counted.reshape(*shape), logits.dtype)
        per_row = long(grads[0]).reshape(-1)
    else:
        by = divisor(case.ignored, case.labels, None if weight is None else weight.double())
        by = by if reduction == "mean" else 1.0
        assert_exact("loss", loss, counted.sum(0) * (1 / np.longdouble(by)), logits.dtype)
        per_row = np.full(len(active), long(grads[0]) / np.longdouble(by))
    of_z = rows.of_cross_entropy(weights, class_weights, *options) * per_row[:, None]
    for name, grad in zip(upstream, grads[1:]):
        exact = getattr(rows, name)
        assert_exact(name, getattr(out, name), (exact * active).reshape(*shape), logits.dtype)
        of_z = of_z + {"lse": lambda: rows.probs, "entropy": rows.of_entropy}[name]() * long(grad).reshape(-1, 1)
    of_x = rows.of_logits(of_z) * active[:, None]
    found = gradient[..., :classes]
    assert_exact("gradient", found, of_x.reshape(*shape, classes), logits.dtype)
    assert gradient[..., classes:].eq(0).all()
    if not set(keywords) & {"z_loss", "softcap", "return_lse", "return_entropy"} and logits.dtype.itemsize > 2:
        assert_sum_to_0(found, clean.reshape(found.shape))


def make(form, device, dtype, options, shape=SHAPE, classes=CLASSES, seed=0):
    draw = Draw(device, seed)
    case = FORMS[form](shape, classes, draw)
    logits = confident_logits(case.dense, draw, dtype)
    keywords = dict(options)
    if "num_classes" in options:
        logits = torch.cat((logits, logits.new_full((*logits.shape[:-1], PADDED - CLASSES), torch.nan)), -1)
    if "weight" in options:
        keywords["weight"] = draw.uniform(classes, low=0.2, high=2)
    return case, logits, keywords, draw


@pytest.mark.parametrize("form,options,dtype", sparsely(5, FORMS, OPTIONS.items(), DTYPES))
def test_confident_rows(form, options, dtype, device):
    for seed, reduction in enumerate(REDUCTIONS):
        case, logits, keywords, draw = make(form, device, dtype, options, seed=seed)
        compare(logits, case, keywords, reduction, draw)


LAYOUTS = {
    "packed": lambda x: x,
    "unaligned": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
    "classes first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "images": lambda x: x.reshape(4, -1, x.shape[-1]).movedim(-1, 1).contiguous().movedim(1, -1).reshape(x.shape),
    "every second class": lambda x: torch.stack((x, x), -1)[..., 0],
}


@pytest.mark.parametrize("layout,dtype", sparsely(2, LAYOUTS, DTYPES))
@pytest.mark.parametrize("classes", [2, 10, 19, 150, 700, 4099])
def test_confident_rows_of_any_width(classes, layout, dtype, device, monkeypatch):
    """Runs a mean twice: the second step computes the gradient together with the loss."""
    monkeypatch.setattr(strided_logits, "LEAST_INNER", 1)
    for form, reduction, steps in (("labels-int64", "mean", 2), ("csr-int32", "none", 1)):
        case, logits, keywords, draw = make(form, device, dtype, {}, (16,), classes)
        compare(LAYOUTS[layout](logits), case, keywords, reduction, draw, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_a_number_of_threads_shares_a_confident_row(options, dtype, device, threads):
    threads(4)
    keywords = {**OPTIONS[options], "num_classes": 120_001}
    case, logits, keywords, draw = make("csr-target-ignore-empty", device, dtype, keywords, (6,), 120_001)
    compare(logits, case, keywords, "none", draw)


@pytest.mark.parametrize("inplace", ["backward", "forward"])
@pytest.mark.parametrize("form", ["labels-int64", "topk-target"])
def test_confident_rows_are_overwritten(form, inplace, device):
    for reduction in REDUCTIONS:
        case, logits, keywords, draw = make(form, device, torch.float32, dict(inplace=inplace))
        compare(logits, case, keywords, reduction, draw, steps=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [37, 4099])
def test_classes_that_tie_for_the_largest(classes, dtype, device):
    """Checks ties of 2 and 3 classes, near and far from each other, with the label at each of them or elsewhere."""
    case, logits, keywords, draw = make("labels-int64", device, dtype, {}, (16,), classes)
    top = logits.amax(-1, keepdim=True)
    label = case.labels.clamp(min=0)[:, None]
    for others in ([1], [16], [classes // 2], [-1, classes // 3]):
        for at in (label, label + 2):
            columns = torch.cat([(at + shift) % classes for shift in (0, *others)], 1)
            compare(logits.scatter(1, columns, top.expand(columns.shape)), case, keywords, "none", draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [5, 4099])
def test_a_row_with_one_finite_logit_has_no_loss(classes, dtype, device):
    x = torch.full((3, classes), -torch.inf, dtype=dtype, device=device)
    labels = torch.tensor([0, classes - 1, classes // 2], device=device)
    x[torch.arange(3, device=device), labels] = torch.tensor([-3.0, 0.3, 90.0], dtype=dtype, device=device)
    loss = sparse_ce.cross_entropy(x.requires_grad_(), labels, reduction="none")
    gradient, = torch.autograd.grad(loss.sum(), x)
    assert loss.eq(0).all() and gradient.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("route", ["torch.func", "create_graph"])
def test_confident_rows_of_plain_pytorch(route, dtype, device):
    """Checks the formulas in ``reference/``, which transforms and second derivatives use."""
    case, logits, _, draw = make("csr-target-ignore-empty", device, dtype, {})
    target = case.target  # torch.func cannot convert sparse tensors
    rows, weights = ExactRows(logits), weights_of(case, np.ones(CLASSES, np.longdouble))
    exact = rows.of_cross_entropy(weights, np.ones(CLASSES, np.longdouble))

    def loss(x):
        return sparse_ce.cross_entropy(x, target, reduction="sum")

    if route == "torch.func":
        assert_exact("gradient", torch.func.grad(loss)(logits), exact, dtype)
        return
    leaf = logits.requires_grad_()
    gradient, = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    assert_exact("gradient", gradient, exact, dtype)
    direction = draw.normal(*logits.shape).to(dtype)
    second, = torch.autograd.grad(gradient, leaf, direction)
    assert_exact("second derivative", second, rows.hessian_times(weights, long(direction)), dtype)
