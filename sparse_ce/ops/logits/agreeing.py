"""Decides which rows of a dense divergence with sharded classes are computed from log(q / p), see ``NearDivergence`` in
``csrc/core/near_divergence.h``. The rules are those of the kernels, which decide for rows without shards."""

import math

import torch
from torch import Tensor

from ..._core.arguments import DenseArguments
from ...reference.divergence_terms import bound


def _relative_to_kl(d: DenseArguments) -> float:
    """Returns k such that a divergence is about k times the forward KL if p and q agree."""
    return {"jsd": d.beta * (1 - d.beta), "skew_forward": (1 - d.beta) ** 2, "skew_reverse": (1 - d.beta) ** 2,
            "hellinger": 0.25}.get("jsd" if d.divergences > 1 else d.kinds[0], 1)


def near_rows(sums: Tensor, d: DenseArguments) -> Tensor:
    """Returns the rows (N,) whose ordinary divergence has too few digits."""
    limit = 0.125 if d.kinds == ("tv",) else 0.03125 * _relative_to_kl(d)
    near = sums[2 if d.divergences > 1 else 0] < limit
    return near if d.row_mask is None else near & d.row_mask


def rough_log_ratio(stats: Tensor) -> Tensor:
    """Returns log(sum / teacher_sum), (N,), and 0 where it may be rounding."""
    rough = stats[:, 1].log() - stats[:, 3].log()
    return torch.where(rough.abs() < 16 * torch.finfo(stats.dtype).eps, 0.0, rough)


def rough_rows(sums: Tensor, error: Tensor, d: DenseArguments) -> Tensor:
    """Returns the rows (N,) whose log_ratio had too large an ``error`` for their divergence."""
    if "tv" in d.kinds:
        return error != 0
    return error * error * _relative_to_kl(d) > 0.5 * torch.finfo(sums.dtype).eps * sums[0]


def bounded(sums: Tensor, d: DenseArguments) -> Tensor:
    """Returns ``sums`` with divergences within their bounds, which rounding may have exceeded."""
    most = [bound(kind, d.beta) for kind in d.kinds]
    losses = [of_kind.clamp(0, None if math.isinf(most) else most) for of_kind, most in zip(sums, most)]
    return torch.cat((torch.stack(losses), sums[len(losses):]))
