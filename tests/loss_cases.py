"""What the tests of the loss and those of the linear head share: options, upstream gradients, ignored rows."""

import torch
import torch.nn.functional as F

from dense import divisor
from sparse_ce import SparseTarget

SHAPE, CLASSES, PADDED = (3, 4), 37, 41

# The options of a call; "weight" and "num_classes" stand for what is made of them below.
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


def gradients(loss, lse, leaves, upstream, upstream_lse):
    outputs, grads = [loss], [upstream.to(loss.dtype)]
    if upstream_lse is not None:
        outputs, grads = outputs + [lse], grads + [upstream_lse.to(lse.dtype)]
    return torch.autograd.grad(outputs, leaves, grads)


def subtracted(case, keywords, upstream, upstream_lse):
    """(..., 1): what cancels in a row of the gradient, a q - b o - d w."""
    if keywords["reduction"] == "mean":
        upstream = upstream / divisor(case.ignored, case.labels, keywords.get("weight"), keywords.get("normalizer"))
    size = upstream.abs() * (1 + case.dense.abs().sum(-1))
    if upstream_lse is not None:
        size = size + upstream_lse.abs()
    return (size * keywords.get("logit_scale", 1))[..., None]


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

UPSTREAM = {
    "expanded": lambda n, device: torch.full((1,), 1.7, device=device).expand(n),
    "every third element": lambda n, device: torch.randn(3 * n, device=device)[::3],
    "column of a matrix": lambda n, device: torch.randn(n, 4, device=device)[:, 1],
    "zero": lambda n, device: torch.zeros(n, device=device),
    "expanded zero": lambda n, device: torch.zeros(1, device=device).expand(n),
    "one NaN": lambda n, device: torch.arange(n, device=device).float().masked_fill_(
        torch.arange(n, device=device) == 2, torch.nan),
}

FORECAST_OPTIONS = {
    "plain": {},
    "everything": dict(label_smoothing=0.1, z_loss=0.01, logit_scale=1.5, softcap=9.0, num_classes=37),
    "sum": dict(reduction="sum"),
    "normalizer": dict(normalizer=torch.tensor([3, 3])),
    "normalizer of zero": dict(normalizer=0),
}
