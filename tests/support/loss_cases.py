"""Contains options, ``grad_output`` values and ignored rows, shared by the tests of the loss and of the linear head."""

import torch
import torch.nn.functional as F

import sparse_ce
from cases import FORMS, Draw
from close import assert_close_to_float64
from dense import arithmetic, dense_cross_entropy, divisor
from sparse_ce import SparseTarget

SHAPE, CLASSES, PADDED = (3, 4), 37, 41

# The options of a call; "weight" and "num_classes" are replaced by the tensors and numbers built below.
OPTIONS = {
    "plain": {},
    "weight": dict(weight=True),
    "label_smoothing": dict(label_smoothing=0.1),
    "weight-label_smoothing": dict(weight=True, label_smoothing=0.3),
    "z_loss": dict(z_loss=0.03),
    "logit_scale": dict(logit_scale=0.37),
    "softcap": dict(softcap=5.0),
    "num_classes": dict(num_classes=CLASSES),
    "ignore_index": dict(ignore_index=3),
    "return_lse": dict(return_lse=True),
    "normalizer": dict(normalizer=7),
    "all": dict(weight=True, label_smoothing=0.1, z_loss=0.01, logit_scale=1.7, softcap=8.0, num_classes=CLASSES,
                ignore_index=5, return_lse=True),
}


def gradients(loss, lse, leaves, grad_output, grad_lse):
    outputs, grads = [loss], [grad_output.to(loss.dtype)]
    if grad_lse is not None:
        outputs, grads = outputs + [lse], grads + [grad_lse.to(lse.dtype)]
    return torch.autograd.grad(outputs, leaves, grads)


def subtracted(case, keywords, grad_output, grad_lse):
    """Returns the size (..., 1) of the terms that cancel in a row of the gradient a q - b o - d w."""
    if keywords["reduction"] == "mean":
        grad_output = grad_output / divisor(case.ignored, case.labels, *map(keywords.get, ("weight", "normalizer")))
    size = grad_output.abs() * (1 + case.dense.abs().sum(-1))
    if grad_lse is not None:
        size = size + grad_lse.abs()
    return (size * keywords.get("logit_scale", 1))[..., None]


def poisoned(form, dtype, options, draw, shape=SHAPE):
    """Returns (case, logits), with NaN and inf wherever the loss must not read."""
    case = FORMS[form](shape, CLASSES, draw, options.get("ignore_index", -100))
    logits = draw.logits(case.dense, dtype, PADDED if "num_classes" in options else None)
    logits[case.ignored] = torch.nan
    logits[case.ignored, :2] = torch.inf
    return case, logits


def make(form, device, dtype, options, seed=0, shape=SHAPE):
    """Returns (case, logits, keyword arguments of the loss)."""
    draw = Draw(device, seed)
    case, logits = poisoned(form, dtype, options, draw, shape)
    keywords = dict(options)
    if "weight" in options:
        keywords["weight"] = draw.uniform(CLASSES, low=0.2, high=2)
        keywords["weight"][2] = 0
    return case, logits, keywords


def dense_result(case, logits, keywords, grad_output, grad_lse, exact):
    """Returns (loss, lse, gradient for logits, gradient for values or None) of the dense target.

    If ``exact``, everything is float64. Otherwise it follows PyTorch: computation in the arithmetic dtype, gradients in
    their tensors' dtypes.
    """
    dtype = torch.float64 if exact else arithmetic(logits.dtype)
    keywords = {k: v for k, v in keywords.items() if k not in ("return_lse", "ignore_index")}
    given = [logits] if case.values is None else [logits, case.values]
    leaves = [t.detach().to(torch.float64 if exact else t.dtype).requires_grad_() for t in given]
    dense = case.dense_of(leaves[1].to(dtype) if len(leaves) == 2 else None)
    loss, lse = dense_cross_entropy(leaves[0], dense, case.ignored, case.labels, dtype=dtype, **keywords)
    grads = gradients(loss, lse, leaves, grad_output, grad_lse)
    return loss, lse, grads[0], grads[1] if len(grads) == 2 else None


def check(form, device, dtype, options, reductions, seed=0, values_grad=False, shape=SHAPE, laid_out=lambda x: x):
    """Compares loss and gradients with the dense target. ``laid_out`` returns the same logits in another layout."""
    case, logits, keywords = make(form, device, dtype, options, seed, shape)
    logits = laid_out(logits)
    if "normalizer" in options:
        reductions = ("mean",)
    draw = Draw(device, seed + 1)
    before = logits.clone()
    for reduction in reductions:
        grad_output = draw.normal(*(case.shape if reduction == "none" else ()))
        grad_lse = draw.normal(*case.shape) if "return_lse" in options else None
        logits.requires_grad_()
        values = case.values.clone().requires_grad_() if values_grad else case.values
        leaves = [logits, values] if values_grad else [logits]
        out = sparse_ce.cross_entropy(logits, case.build(values), reduction=reduction, **keywords)
        loss, lse = out[:2] if "return_lse" in options else (out, None)
        ours = gradients(loss, lse, leaves, grad_output, grad_lse)
        assert ours[0].stride() == torch.empty_like(logits).stride() or logits.stride(-1) == 1
        logits.requires_grad_(False)

        keywords["reduction"] = reduction
        exact = dense_result(case, logits, keywords, grad_output, grad_lse, exact=True)
        peer = dense_result(case, logits, keywords, grad_output, grad_lse, exact=False)
        assert_close_to_float64(loss, peer[0], exact[0])
        assert_close_to_float64(ours[0], peer[2], exact[2],
                                subtracted(case, keywords, grad_output, grad_lse))
        if lse is not None:
            assert_close_to_float64(lse, peer[1], exact[1])
        if values_grad:
            assert_close_to_float64(ours[1], peer[3], exact[3], arithmetic=arithmetic(dtype))
        del keywords["reduction"]
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


REDUCTIONS = ["none", "sum", "mean"]


def all_ignored(form, rows, vocab, device):
    labels = torch.full((rows,), -100, device=device)
    topk = labels[:, None].expand(rows, 3), torch.rand(rows, 3, device=device)
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    dense = F.one_hot(torch.arange(rows, device=device) % vocab, vocab).float()
    return {
        "labels": lambda: labels,
        "topk": lambda: topk,
        "topk masked, ignore_empty": lambda: SparseTarget.from_topk(
            *topk, mask=mask[:, None].expand(rows, 3), ignore_empty=True),
        "coo with row_mask": lambda: SparseTarget.from_coo(dense.to_sparse(), row_mask=mask),
        "csr with row_mask": lambda: SparseTarget.from_csr(dense.to_sparse_csr(), row_mask=mask),
        "csr ignore_empty": lambda: SparseTarget.from_csr((0 * dense).to_sparse_csr(), ignore_empty=True),
        "labels with row_mask": lambda: SparseTarget.from_index(labels.clamp(min=0), row_mask=mask),
    }[form]()


ALL_IGNORED = ["labels", "topk", "topk masked, ignore_empty", "coo with row_mask", "csr with row_mask",
               "csr ignore_empty", "labels with row_mask"]
SOME = dict(label_smoothing=0.1, z_loss=0.1, logit_scale=0.5, softcap=3.0)

GRAD_OUTPUTS = {
    "expanded": lambda n, device: torch.full((1,), 1.7, device=device).expand(n),
    "every third element": lambda n, device: torch.randn(3 * n, device=device)[::3],
    "column of a matrix": lambda n, device: torch.randn(n, 4, device=device)[:, 1],
    "zero": lambda n, device: torch.zeros(n, device=device),
    "expanded zero": lambda n, device: torch.zeros(1, device=device).expand(n),
    "one NaN": lambda n, device: torch.arange(n, device=device).float().masked_fill_(
        torch.arange(n, device=device) == 2, torch.nan),
}

SCALAR_OPTIONS = {
    "plain": {},
    "everything": dict(label_smoothing=0.1, z_loss=0.01, logit_scale=1.5, softcap=9.0, num_classes=37),
    "sum": dict(reduction="sum"),
    "normalizer": dict(normalizer=torch.tensor([3, 3])),
    "normalizer of zero": dict(normalizer=0),
}
