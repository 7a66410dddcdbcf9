"""Computes log-probabilities of selected classes from dense ones, in plain PyTorch of any precision, row by row."""

import math

import torch
import torch.nn.functional as F

from sparse_ce.targets.convert import as_target

OUTPUTS = ("log_probs", "lse", "log_tail", "entropy", "mean_logit", "collision")  # the differentiable ones
ALL = dict(return_log_tail=True, return_entropy=True, return_mean_logit=True, return_argmax=True, return_collision=True,
           return_rank=True)

# "row_scale" is replaced by a tensor with one number per row.
OPTIONS = {
    "plain": {},
    "logit_scale": dict(logit_scale=0.37),
    "row_scale": dict(row_scale=True),
    "softcap": dict(softcap=5.0),
    "num_classes": dict(num_classes=True),
    "ignore_index": dict(ignore_index=3),
    "all": dict(row_scale=True, softcap=8.0, num_classes=True, ignore_index=5, padding_value=-3.0),
}


def entries_of(target, shape, ignore_index=-100):
    """Returns for each row the (position among the entries, class) of the entries that are not padding, in order."""
    given, target = target, as_target(target, shape)
    flat = target.flatten()
    marks = {ignore_index, -100} if given is target else {ignore_index}
    rows = []
    indices = flat.indices.reshape(-1).tolist()
    values = None if flat.values is None else flat.values.reshape(-1).tolist()
    for r in range(math.prod(target.shape)):
        if flat.offsets is None:
            width = flat.indices.shape[1] if flat.indices.dim() == 2 else 1
            begin, end = r * width, (r + 1) * width
        elif flat.offsets.dim() == 1:
            begin, end = flat.offsets[r:r + 2].tolist()
        else:
            begin, end = flat.offsets[r].tolist()
        padding = -math.inf if target.values_are == "log_probs" else 0.0
        rows.append([(i, indices[i]) for i in range(begin, end)
                     if indices[i] not in marks and (values is None or values[i] != padding)])
    return rows, flat.indices.shape


def dense_select(logits, rows, entries_shape, ignored, *, dtype=torch.float64, logit_scale=1.0, softcap=None,
                 num_classes=None, padding_value=-math.inf):
    """Returns {name: tensor} for logits (N, V); ``log_probs`` holds ``padding_value`` at positions without an entry."""
    z = torch.where(ignored[:, None], 0.0, logits[:, :num_classes].to(dtype))
    z = z * (logit_scale[:, None] if isinstance(logit_scale, torch.Tensor) and logit_scale.dim() else logit_scale)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_probs = F.log_softmax(z, 1)
    inside = torch.zeros(z.shape, dtype=torch.bool)
    at = []
    for r, entries in enumerate(rows):
        for i, c in entries:
            inside[r, c] = True
            at.append((i, r, c))
    inside = inside.to(z.device)
    out = torch.full((math.prod(entries_shape),), padding_value, dtype=dtype, device=z.device)
    for i, r, c in at:
        out = out.clone()
        out[i] = log_probs[r, c]
    finite = torch.where(log_probs.isneginf(), 0.0, log_probs)
    tail = [torch.logsumexp(row[~own], 0) if bool((~own & ~row.isneginf()).any()) else row.sum() * 0 - torch.inf
            for row, own in zip(log_probs, inside)]
    per_row = dict(lse=torch.logsumexp(z, 1), log_tail=torch.stack(tail), mean_logit=z.mean(1),
                   collision=torch.logsumexp(2 * log_probs, 1),
                   entropy=-(finite.exp() * ~log_probs.isneginf() * finite).sum(1))
    result = {name: torch.where(ignored, 0.0, t) for name, t in per_row.items()}
    result["argmax"] = torch.where(ignored, -1, z.detach().argmax(1))
    scale = torch.as_tensor(logit_scale).expand(len(rows)).sign().tolist()
    ranks = [-1 if no or not own else int((sign * row > sign * row[own[0][1]]).sum())
             for row, own, no, sign in zip(logits.detach()[:, :num_classes], rows, ignored.tolist(), scale)]
    result["rank"] = torch.tensor(ranks, device=z.device)
    result["log_probs"] = out.reshape(entries_shape)
    return result
