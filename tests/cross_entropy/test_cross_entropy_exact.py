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
from exact_rows import LEADS, ExactRows, Rough, assert_exact, confident_logits, long

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
# Weights are values of the target, not their logarithms: rounding of a sum is relative to the sum of absolute values.
LINEAR = [form for form in FORMS if "logprobs" not in form and "logits" not in form]


def weights_of(case, class_weights, values=None):
    """Returns the weights of a target's classes (N, classes), times the class weights."""
    if values is None or not case.build:
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
    weights, options = weights_of(case, class_weights), (keywords.get("label_smoothing", 0.0), keywords.get("z_loss", 0.0))
    losses = rows.cross_entropy(weights, class_weights, *options)
    grad_output = draw.normal(*(shape if reduction == "none" else ()))
    upstream = {name: draw.normal(*shape) for name in ("lse", "entropy") if f"return_{name}" in keywords}

    for step in range(steps):
        leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
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
    if not set(keywords) & {"z_loss", "softcap", "return_lse"} and logits.dtype.itemsize > 2:
        sums = found.double().sum(-1).abs()
        sizes = found.double().abs()
        # Beyond a lead of 64 nats, the differences of logits are rounded twice as much.
        relative = sums / torch.maximum(sizes.amax(-1), sizes.sum(-1) / 2).clamp(min=1e-300)
        top = clean.double().topk(2, -1).values
        limit = torch.where(top[:, 0] - top[:, 1] > 64, 2e-6, 1e-6).reshape(shape).to(found.device)
        assert (relative <= limit).all(), f"gradients must sum to 0, got {relative.max():.2e} of the largest"


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
