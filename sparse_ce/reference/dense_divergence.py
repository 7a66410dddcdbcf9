"""Computes divergences of a student from a dense teacher in plain PyTorch."""

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import DIVERGENCES, SEVERAL, DenseArguments, arithmetic_dtype
from .linear import head_gradients
from .safe_math import normalize, slope_of_cap, softcapped, times


class _Rows(NamedTuple):
    """Stores log-probabilities and probabilities of both models, (N, classes). Rows that do not count are uniform."""

    log_q: Tensor
    q: Tensor
    log_p: Tensor
    p: Tensor

    @property
    def finite_log_q(self) -> Tensor:
        return torch.where(self.q == 0, 0.0, self.log_q)

    @property
    def finite_log_p(self) -> Tensor:
        return torch.where(self.p == 0, 0.0, self.log_p)

    def mixture(self, beta: float) -> Tensor:
        """Returns ``beta * p + (1 - beta) * q``, and 1 where that is 0."""
        m = beta * self.p + (1 - beta) * self.q
        return torch.where(m == 0, 1.0, m)

    def product(self, beta: float) -> Tensor:
        """Returns ``p ** beta * q ** (1 - beta)``."""
        none = (self.p == 0) | (self.q == 0)
        return torch.where(none, 0.0, (beta * self.finite_log_p + (1 - beta) * self.finite_log_q).exp())


def _terms(kind: str, beta: float, r: _Rows) -> Tensor:
    """Returns phi(p, q) of each class."""
    if kind == "forward_kl":
        return times(r.p, r.finite_log_p - r.log_q)
    if kind == "reverse_kl":
        return times(r.q, r.finite_log_q - r.log_p)
    if kind == "jsd":
        log_m = r.mixture(beta).log()
        return beta * times(r.p, r.finite_log_p - log_m) + (1 - beta) * times(r.q, r.finite_log_q - log_m)
    if kind == "skew_forward":
        return times(r.p, r.finite_log_p - r.mixture(beta).log())
    if kind == "skew_reverse":
        return times(r.q, r.finite_log_q - r.mixture(1 - beta).log())
    if kind == "alpha":
        return (beta * r.p + (1 - beta) * r.q - r.product(beta)) / (beta * (1 - beta))
    if kind == "tv":
        return (r.p - r.q).abs() / 2
    return ((r.log_p / 2).exp() - (r.log_q / 2).exp()).square() / 2


def _slopes(kind: str, beta: float, r: _Rows) -> Tensor:
    """Returns q dphi/dq of each class, plus the multiple of q that ``csrc/core/divergence_math.h`` adds."""
    if kind == "forward_kl":
        return -r.p
    if kind == "reverse_kl":
        return times(r.q, r.finite_log_q - r.log_p)
    if kind == "jsd":
        return (1 - beta) * times(r.q, r.finite_log_q - r.mixture(beta).log())
    if kind == "skew_forward":
        return (1 - beta) * r.q * (1 - r.p / r.mixture(beta))
    if kind == "skew_reverse":
        m = r.mixture(1 - beta)
        return times(r.q, r.finite_log_q - m.log()) - r.q * beta * (r.q / m - 1)
    if kind == "alpha":
        return (r.q - r.product(beta)) / beta
    if kind == "tv":
        return r.q * (r.q - r.p).sign() / 2
    root_q = (r.log_q / 2).exp()
    return root_q * (root_q - (r.log_p / 2).exp()) / 2


def _kinds(d: DenseArguments) -> Tuple[str, ...]:
    return SEVERAL if d.kind == len(DIVERGENCES) else (DIVERGENCES[d.kind],)


class _Call(NamedTuple):
    rows: _Rows
    lse: Tensor  # (N,)
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
    lse, log_q = normalize(z)
    log_p = y.log_softmax(1)
    label = torch.zeros_like(every, dtype=torch.int64) if d.labels is None else d.labels.long()
    label = torch.where(has_label, label, 0)[:, None]
    return _Call(_Rows(log_q, log_q.exp(), log_p, log_p.exp()), lse, has_divergence, has_label, label, z)


def _sums(logits: Tensor, d: DenseArguments) -> Tensor:
    call = _call(logits, d)
    divergences = [torch.where(call.has_divergence, _terms(kind, d.beta, call.rows).sum(1), 0.0) for kind in _kinds(d)]
    slopes = [torch.where(call.has_divergence, _slopes(kind, d.beta, call.rows).sum(1), 0.0).detach()
              for kind in _kinds(d)]
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
    dz = times(of_label, call.rows.q).scatter_add(1, call.label, -of_label)
    for kind, g in zip(_kinds(d), of_divergences):
        slopes = _slopes(kind, d.beta, call.rows)
        g = torch.where(call.has_divergence, g, 0.0)[:, None]
        dz = dz + times(g, slopes - call.rows.q * slopes.sum(1, keepdim=True))
    if d.softcap is not None:
        dz = times(dz, slope_of_cap(call.z, d.softcap))
    dz = dz * d.logit_scale
    if d.row_scale is not None:
        counts = call.has_divergence | call.has_label
        dz = dz * (d.row_scale if d.row_scale.dim() == 0 else torch.where(counts, d.row_scale, 1.0)[:, None])
    return torch.nn.functional.pad(dz, (0, logits.shape[1] - dz.shape[1])).to(logits.dtype)


def _heads(args: Any, kwargs: Any) -> Tuple[Tensor, Tensor, Tensor, DenseArguments, Tuple[bool, bool, bool]]:
    """Returns input, weight and logits of the student in the arithmetic dtype, the arguments with the teacher's logits,
    and which gradients are requested. Ignored rows of the input are 0."""
    fields = DenseArguments._fields
    names = ("input", "linear_weight", "linear_bias", "teacher_weight", "teacher_bias", *fields, "chunk_rows",
             "float32_logits", "group", "ranks", "shares_rows", "input_grad", "weight_grad", "bias_grad")
    of = {**dict.fromkeys(names[-3:], True), **dict(zip(names, args)), **kwargs}
    d = DenseArguments(**{name: of[name] for name in fields if name in of})
    input, classes = of["input"], d.num_classes
    active = d.active(input.shape[0])
    dtype = arithmetic_dtype(input.dtype)

    def logits(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
        x, weight = x.to(dtype), weight[:classes].to(dtype)
        if active is not None:
            x = torch.where(active[:, None], x, 0.0)
        return x, weight, torch.nn.functional.linear(x, weight, None if bias is None else bias[:classes].to(dtype))

    x, w, z = logits(input, of["linear_weight"], of["linear_bias"])
    y = logits(d.teacher, of["teacher_weight"], of["teacher_bias"])[2]
    grad_mask = of["input_grad"], of["weight_grad"], of["bias_grad"]
    return x, w, z, d._replace(teacher=y, num_classes=None, first_class=None), grad_mask


def linear_dense_divergence(*args: Any, **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.linear_dense_divergence`` for all classes."""
    _, _, z, d, _ = _heads(args, kwargs)
    return _sums(z, d)[:d.divergences + 1]


def linear_dense_divergence_with_gradient(grad: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.linear_dense_divergence_with_gradient`` for all classes."""
    x, w, z, d, grad_mask = _heads(args, kwargs)
    dz = dense_divergence_backward(grad, z, z, z, *d)
    return _sums(z, d)[:d.divergences + 1], *head_gradients(dz, x, w, args[0], args[1], args[2], grad_mask)
