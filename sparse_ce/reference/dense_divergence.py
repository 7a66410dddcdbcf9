"""Computes divergences of a student from a dense teacher in plain PyTorch."""

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import DenseArguments, arithmetic_dtype
from .._schema import Bound, bound
from .divergence_terms import finished, more_of_q, slope, term
from .linear import head_gradients
from .safe_math import normalize, of_log_probs, slope_of_cap, softcapped, times


class _BothModels(NamedTuple):
    """Stores log-probabilities of both models and x = log(q / p), (N, classes). Rows that do not count are uniform."""

    log_p: Tensor
    log_q: Tensor
    x: Tensor

    @classmethod
    def of(cls, z: Tensor, y: Tensor) -> "_BothModels":
        log_q, log_p = normalize(z)[1], normalize(y)[1]
        like = log_q - torch.where(log_q.isneginf(), 0.0, log_p)  # gives x its derivative
        exact = _log_ratio(z.detach(), y.detach(), log_q.detach(), log_p.detach()) + (like - like.detach())
        return cls(log_p, log_q, torch.where(like.isfinite(), exact, like))


def _log_ratio(z: Tensor, y: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
    """Returns log(q / p). The log-probabilities have the rounding errors of large logits, but the difference of the
    logits themselves has not."""
    (of_class, left), (of_largest, left_of_largest) = _difference(z, y), _difference(*(
        t.amax(1, keepdim=True) for t in (z, y)))
    rough = log_p.amax(1, keepdim=True) - log_q.amax(1, keepdim=True)  # close to 0 it may be rounding
    rough = torch.where(rough.abs() < 16 * torch.finfo(z.dtype).eps, 0.0, rough)
    x = (of_class - of_largest) + (left - left_of_largest) - rough
    # q - p sums to 0, and after a shift of x by d to exp(d) - 1.
    return x - more_of_q(log_p.exp(), log_q.exp(), x).sum(1, keepdim=True).log1p()


def _difference(a: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:
    """Returns ``a - b`` and its rounding error, which is 0 if the difference is not finite."""
    value = a - b
    of_b = value - a
    error = (a - (value - of_b)) - (b + of_b)
    return value, torch.where(error.isnan(), 0.0, error)


class _Call(NamedTuple):
    rows: _BothModels
    has_divergence: Tensor  # (N,) bool
    has_label: Tensor  # (N,) bool
    label: Tensor  # (N, 1) int64, 0 without a label
    z: Tensor  # (N, classes), the student's transformed logits


def _transformed(x: Tensor, scale: float, softcap: Optional[float], row_scale: Optional[Tensor],
                 counts: Tensor) -> Tensor:
    x = torch.where(counts[:, None], x, 0.0) * scale
    if row_scale is not None:
        x = x * (row_scale if row_scale.dim() == 0 else torch.where(counts, row_scale, 1.0)[:, None])
    return x if softcap is None else softcapped(x, softcap)


def _call(logits: Tensor, d: DenseArguments) -> _Call:
    dtype, classes = arithmetic_dtype(logits.dtype), logits.shape[1] if d.num_classes is None else d.num_classes
    every = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    has_divergence = every if d.row_mask is None else d.row_mask
    has_label = ~every if d.labels is None else d.labels >= 0
    counts = has_divergence | has_label
    z = _transformed(logits[:, :classes].to(dtype), d.logit_scale, d.softcap, d.row_scale, counts)
    y = _transformed(d.teacher[:, :classes].to(dtype), d.teacher_logit_scale, d.teacher_softcap, d.teacher_row_scale,
                     has_divergence)
    label = torch.zeros_like(every, dtype=torch.int64) if d.labels is None else d.labels.long()
    label = torch.where(has_label, label, 0)[:, None]
    return _Call(_BothModels.of(z, y), has_divergence, has_label, label, z)


def _sums(logits: Tensor, d: DenseArguments) -> Tensor:
    call = _call(logits, d)

    def of_rows(f: Callable[..., Tensor]) -> List[Tensor]:
        return [torch.where(call.has_divergence, f(kind, d.beta, *call.rows).sum(1), 0.0) for kind in d.kinds]

    divergences = [finished(kind, d.beta, total, torch.zeros_like(total))
                   for kind, total in zip(d.kinds, of_rows(term))]
    slopes = [total.detach() for total in of_rows(slope)]
    of_label = torch.where(call.has_label, -call.rows.log_q.gather(1, call.label)[:, 0], 0.0)
    return torch.stack((*divergences, of_label, *slopes, torch.zeros_like(of_label)))


def dense_divergence_stats(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.dense_divergence_stats`` for all classes."""
    d = DenseArguments(*args, **kwargs)
    call = _call(logits, d)
    y = _transformed(d.teacher[:, :call.z.shape[1]].to(call.z.dtype), d.teacher_logit_scale, d.teacher_softcap,
                     d.teacher_row_scale, call.has_divergence)
    most = [t.detach().max(1).values for t in (call.z, y)]
    sums = [(t - m[:, None]).exp().sum(1).detach() for t, m in zip((call.z, y), most)]
    of_student, of_teacher = call.has_divergence | call.has_label, call.has_divergence
    stats = [torch.where(counts, t, 0.0) for t, counts in (
        (most[0], of_student), (sums[0], of_student), (most[1], of_teacher), (sums[1], of_teacher))]
    return torch.stack((*stats, torch.full_like(sums[0], torch.inf)), 1)


def dense_divergence_sums(stats: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.dense_divergence_sums`` for all classes."""
    return _sums(logits, DenseArguments(*args, **kwargs))


def dense_divergence(logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.dense_divergence``."""
    return dense_divergence_stats(logits, *args, **kwargs), _sums(logits, DenseArguments(*args, **kwargs))


def dense_divergence_backward(grad: Tensor, stats: Tensor, sums: Tensor, logits: Tensor, *args: Any,
                              **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.dense_divergence_backward``. It recomputes stats and sums, so that second
    derivatives include theirs."""
    d = DenseArguments(*args, **kwargs)
    call = _call(logits, d)
    *of_divergences, of_label = grad
    of_label = torch.where(call.has_label, of_label, 0.0)[:, None]
    of_log_q = torch.zeros_like(call.z).scatter_add(1, call.label, -of_label)
    for kind, g in zip(d.kinds, of_divergences):
        of_log_q = of_log_q + times(torch.where(call.has_divergence, g, 0.0)[:, None], slope(kind, d.beta, *call.rows))
    dz = of_log_probs(of_log_q, call.rows.log_q)
    if d.softcap is not None:
        dz = times(dz, slope_of_cap(call.z, d.softcap))
    dz = dz * d.logit_scale
    if d.row_scale is not None:
        counts = call.has_divergence | call.has_label
        dz = dz * (d.row_scale if d.row_scale.dim() == 0 else torch.where(counts, d.row_scale, 1.0)[:, None])
    return torch.nn.functional.pad(dz, (0, logits.shape[1] - dz.shape[1])).to(logits.dtype)


def _heads(given: Bound) -> Tuple[Tensor, Tensor, Tensor, DenseArguments]:
    """Returns input, weight and logits of the student in the arithmetic dtype, and the arguments with the teacher's
    logits. Ignored rows of the input are 0."""
    d, input = given.of(DenseArguments), given["input"]
    classes = d.num_classes
    active = d.active(input.shape[0])
    dtype = arithmetic_dtype(input.dtype)

    def logits(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
        x, weight = x.to(dtype), weight[:classes].to(dtype)
        if active is not None:
            x = torch.where(active[:, None], x, 0.0)
        return x, weight, torch.nn.functional.linear(x, weight, None if bias is None else bias[:classes].to(dtype))

    x, w, z = logits(input, given["linear_weight"], given["linear_bias"])
    if given["teacher_weight"] is None:
        y = d.teacher[:, :classes].to(dtype)
    else:
        y = logits(d.teacher, given["teacher_weight"], given["teacher_bias"])[2]
    return x, w, z, d._replace(teacher=y, num_classes=None, first_class=None)


def linear_dense_divergence(*args: Any, **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.linear_dense_divergence`` for all classes."""
    _, _, z, d = _heads(bound("linear_dense_divergence", args, kwargs))
    return _sums(z, d)[:d.divergences + 1]


def linear_dense_divergence_with_gradient(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.linear_dense_divergence_with_gradient`` for all classes."""
    given = bound("linear_dense_divergence_with_gradient", args, kwargs)
    x, w, z, d = _heads(given)
    dz = dense_divergence_backward(given["grad"], z, z, z, *d)
    return _sums(z, d)[:d.divergences + 1], *head_gradients(dz, x, w, given)
