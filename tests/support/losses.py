"""Describes every differentiable function of the package once: its tensors, the call, and the same in plain PyTorch.

The tests in tests/ops/test_every_loss*.py ask the same questions of all of them. A new loss needs one line in
``LOSSES``.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce as ours
from binary_cases import dense_binary
from cases import Draw
from dense import dense_cross_entropy
from divergence_cases import KINDS, defined, of_kind, transformed
from sparse_ce import SparseTarget

VOCAB, CLASSES, WIDTH, OF_TEACHER = 7, 6, 3, 2  # the logits have one padded class
ROW_OUTPUTS = ("log_probs", "lse", "log_tail", "entropy", "mean_logit", "collision")
SELECTED = {f"return_{name}": True for name in ROW_OUTPUTS[2:]}


class Tensors(NamedTuple):
    """Stores what the functions take: first what may require grad."""

    z: Any = None  # logits (N, V)
    x: Any = None  # hidden states (N, D)
    w: Any = None  # their head (V, D)
    b: Any = None  # its bias (V,)
    v: Any = None  # positive weights of the entries (N, K)
    r: Any = None  # weights of the rows (N,)
    scale: Any = None
    shift: Any = None
    ids: Any = None  # entries (N, K) below C: a class occurs twice, an entry is padding, row 1 is ignored
    labels: Any = None  # (N,) below C, row 1 is ignored
    distinct: Any = None  # entries (N, K) below C, all different in a row
    mask: Any = None  # rows (N,)
    c: Any = None  # weights of the classes (C,)
    y: Any = None  # logits of a teacher (N, V)
    t: Any = None  # hidden states of a teacher (N, E)
    u: Any = None  # the head of a teacher (V, E)


def tensors(device: str, dtype: torch.dtype, rows: int = 4, entries: int = 3, seed: int = 0) -> Tensors:
    draw, wide = Draw(device, seed), torch.float64 if dtype == torch.float64 else torch.float32
    ids, distinct = draw.integers(CLASSES, rows, entries), draw.integers(CLASSES, rows)
    if rows and entries > 1:
        ids[0, 1], ids[-1, -1] = ids[0, 0], -100
    ids[1:2], labels = -100, ids[:, 0].clone()
    mask = torch.arange(rows, device=device) != 2
    return Tensors(
        draw.normal(rows, VOCAB).to(dtype), draw.normal(rows, WIDTH).to(dtype), draw.normal(VOCAB, WIDTH).to(dtype),
        draw.normal(VOCAB).to(dtype), draw.uniform(rows, entries, low=0.2, high=1.5, dtype=wide),
        draw.uniform(rows, low=0.3, high=2, dtype=wide), torch.tensor(1.3, dtype=wide, device=device),
        torch.tensor(-0.4, dtype=wide, device=device), ids, labels,
        (distinct[:, None] + torch.arange(min(entries, CLASSES), device=device)) % CLASSES, mask,
        draw.uniform(CLASSES, low=0.5, high=2, dtype=wide), draw.normal(rows, VOCAB).to(dtype),
        draw.normal(rows, OF_TEACHER).to(dtype), draw.normal(VOCAB, OF_TEACHER).to(dtype))


class Loss(NamedTuple):
    learned: str  # names of the tensors that require grad
    fixed: str  # names of the others
    call: Callable[..., Any]  # of Tensors and options
    plain: Callable[..., Any]  # the same in plain PyTorch, of float64
    reduced: bool = True  # the call has a reduction
    saved: Tuple[str, ...] = ("z", "x")  # tensors that backward reads
    wide: bool = True  # outputs are in the arithmetic dtype
    same_bits: bool = True  # forward returns them with and without gradients

    @property
    def names(self) -> List[str]:
        return [*self.learned.split(), *self.fixed.split()]

    @property
    def linear(self) -> bool:
        return "x" in self.learned.split()


def logits_of(t: Tensors) -> Tensor:
    return t.z if t.x is None else F.linear(t.x, t.w, t.b)


def reduced(losses: Tensor, active: Tensor, reduction: str, divisor: Optional[Tensor] = None) -> Tensor:
    losses = torch.where(active, losses, 0.0)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / (
        active.sum() if divisor is None else divisor)


def none_of(t: Tensors) -> Tensor:
    return torch.zeros(logits_of(t).shape[0], dtype=torch.bool, device=logits_of(t).device)


def dense_of(t: Tensors, ids: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(len(ids), CLASSES).scatter_add(1, ids.clamp(min=0), torch.where(ids < 0, 0.0, values))


# ------------------------------------------------------------------------------------------------------- cross entropy

OPTIONS = dict(label_smoothing=0.2, z_loss=0.1, softcap=4.0)


class Target(NamedTuple):
    """Stores a format of a target, the tensors that it consists of, and its dense equal with the ignored rows."""

    build: Callable[[Tensors], Any]
    learned: str
    fixed: str
    dense: Callable[[Tensors], Tuple[Tensor, Tensor]]


def offsets_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0] + 1, device=ids.device) * ids.shape[1]


TARGETS = {
    "labels": Target(lambda t: t.labels, "", "labels",
                     lambda t: (dense_of(t, t.labels[:, None], torch.ones_like(t.labels[:, None]).double()),
                                t.labels < 0)),
    "tuple": Target(lambda t: (t.ids, t.v), "v", "ids", lambda t: (dense_of(t, t.ids, t.v), (t.ids < 0).all(1))),
    "masked": Target(lambda t: SparseTarget.from_topk(t.ids, t.v, row_mask=t.mask, num_classes=CLASSES), "v",
                     "ids mask", lambda t: (dense_of(t, t.ids, t.v), (t.ids < 0).all(1) | ~t.mask)),
    "jagged": Target(lambda t: SparseTarget.from_jagged(t.distinct.flatten(), t.v.flatten(), offsets_of(t.distinct)),
                     "v", "distinct", lambda t: (dense_of(t, t.distinct, t.v), none_of(t))),
    "log_probs": Target(lambda t: SparseTarget.from_topk(t.ids, -t.v, values_are="log_probs"), "v", "ids",
                       lambda t: (dense_of(t, t.ids, (-t.v).exp()), (t.ids < 0).all(1))),
}


def both(call: Callable, linear: Callable, plain: Callable, learned: str, fixed: str, **more: Any) -> Dict[str, Loss]:
    """Returns a loss of logits and the same of a linear head."""
    return {"": Loss(f"z {learned}", fixed, call, plain, **more),
            "linear_": Loss(f"x w b {learned}", fixed, linear, plain, **more)}


def cross_entropy(form: str, fields: Tuple[str, ...] = ("loss",), learned: str = "", fixed: str = "",
                  **options: Any) -> Dict[str, Loss]:
    """Describes cross entropy with some outputs. Names of tensors among the options stand for these."""
    target, asked = TARGETS[form], {f"return_{name}": True for name in fields[1:]}

    def given(t: Tensors) -> Dict[str, Any]:
        return {name: getattr(t, value) if isinstance(value, str) else value for name, value in options.items()}

    def chosen(out: Any) -> Tuple[Tensor, ...]:
        return tuple(getattr(out, name) for name in fields) if asked else (out,)

    def plain(t: Tensors, reduction: str) -> Tuple[Tensor, ...]:
        of, (dense, ignored) = given(t), target.dense(t)
        weight, n = of.pop("row_weight", 1.0), of.get("num_classes", VOCAB)
        losses, lse = dense_cross_entropy(logits_of(t), F.pad(dense, (0, n - CLASSES)), ignored, reduction="none", **of)
        q = (logits_of(t)[:, :n] * of.get("logit_scale", 1.0)).log_softmax(1)
        entropy = torch.where(ignored, 0.0, -(q.exp() * q).sum(1))
        divisor = of["weight"][t.labels[~ignored]].sum() if form == "labels" and "weight" in of else None
        out = dict(loss=reduced(losses * weight, ~ignored, reduction, divisor), lse=lse, entropy=entropy)
        return tuple(out[name] for name in fields)

    return both(
        lambda t, **o: chosen(ours.cross_entropy(t.z, target.build(t), **given(t), **asked, **o)),
        lambda t, **o: chosen(ours.linear_cross_entropy(t.x, t.w, target.build(t), linear_bias=t.b, chunk_rows=3,
                                                        **given(t), **asked, **o)),
        plain, f"{target.learned} {learned}", f"{target.fixed} {fixed}", same_bits="scale" not in learned)


# ------------------------------------------------------------------------------------------- binary cross entropy, rows


def binary(form: str, **options: Any) -> Dict[str, Loss]:
    target = TARGETS[form]

    def given(t: Tensors) -> Dict[str, Any]:
        of = {name: t.c if value is True else value for name, value in options.items()}
        return dict(of, logit_scale=t.scale, logit_bias=t.shift, row_weight=t.r, num_classes=CLASSES)

    def plain(t: Tensors, **o: Any) -> Tuple[Tensor]:
        return dense_binary(logits_of(t), *target.dense(t), **given(t), **o),

    return both(
        lambda t, **o: (ours.binary_cross_entropy_with_logits(t.z, target.build(t), **given(t), **o),),
        lambda t, **o: (ours.linear_binary_cross_entropy(t.x, t.w, target.build(t), linear_bias=t.b, chunk_classes=4,
                                                         **given(t), **o),),
        plain, f"{target.learned} r scale shift", f"{target.fixed} c")


def plain_rows(t: Tensors, **_: Any) -> Tuple[Tensor, ...]:
    """Returns the outputs of selected_log_probs with 0 for padding."""
    z = logits_of(t)[:, :CLASSES] * t.scale
    z = 4.0 * torch.tanh(z / 4.0)
    q, padding = z.log_softmax(1), t.ids < 0
    inside = (F.one_hot(t.ids.clamp(min=0), CLASSES) * ~padding[..., None]).sum(1) > 0
    tail = torch.where(inside, -torch.inf, q).logsumexp(1)
    rows = z.logsumexp(1), tail, -(q.exp() * q).sum(1), z.mean(1), (2 * q).logsumexp(1)
    return (torch.where(padding, 0.0, q.gather(1, t.ids.clamp(min=0))),
            *(torch.where(padding.all(1), 0.0, of) for of in rows))


def fields_of(out: Any) -> Tuple[Tensor, ...]:
    return tuple(getattr(out, name) for name in ROW_OUTPUTS)


OF_ROWS = dict(softcap=4.0, num_classes=CLASSES, padding_value=0.0, **SELECTED)
TEACHER = {f"return_{name}": True for name in ("forward_kl", "reverse_kl", "jsd", "tv")}


def of_row(out: Any, labels: Tensor, by: Tensor) -> Tensor:
    return by * out.log_probs.square() + out.entropy


def of_row_with_teacher(out: Any, labels: Tensor, by: Tensor) -> Tensor:
    return of_row(out, labels, by) + out.forward_kl - 2 * out.reverse_kl + 3 * by * out.jsd + out.tv


def plain_row_loss(t: Tensors, reduction: str) -> Tuple[Tensor]:
    q = logits_of(t).log_softmax(1)
    losses = t.r * q.gather(1, t.labels.clamp(min=0)[:, None])[:, 0].square() - (q.exp() * q).sum(1)
    if t.t is not None:
        parts = [defined(kind, 0.5, logits_of(t), t.t @ t.u.T) for kind in ("forward_kl", "reverse_kl", "jsd", "tv")]
        losses = losses + parts[0] - 2 * parts[1] + 3 * t.r * parts[2] + parts[3]
    return reduced(losses, t.labels >= 0, reduction),


# ----------------------------------------------------------------------------------------------- divergences, softmaxes


def dense_divergence(kind: str) -> Dict[str, Loss]:
    beta = 0.3 if kind in ("jsd", "skew_forward", "skew_reverse", "alpha_divergence") else 0.5
    options = dict(**of_kind(kind, beta), softcap=4.0, teacher_softcap=5.0, logit_scale=0.9, num_classes=CLASSES)

    def losses(t: Tensors, teacher: Tensor) -> Tensor:
        return defined(kind, beta, transformed(logits_of(t), 0.9, 4.0, CLASSES),
                       transformed(teacher, 1.0, 5.0, CLASSES))

    def linear(t: Tensors, **o: Any) -> Tuple[Tensor]:
        return ours.linear_distillation_loss(t.x, t.w, (t.t, t.u), t.labels, linear_bias=t.b, alpha=0.6, chunk_rows=3,
                                             row_mask=t.mask, row_weight=t.r, **options, **o),

    def plain(t: Tensors, reduction: str) -> Tuple[Tensor]:
        return reduced(t.r * losses(t, t.y), t.mask, reduction),

    def plain_linear(t: Tensors, reduction: str) -> Tuple[Tensor]:
        of_labels = F.cross_entropy(transformed(logits_of(t), 0.9, 4.0, CLASSES), t.labels, reduction="none")
        both = 0.6 * losses(t, t.t @ t.u.T) + 0.4 * of_labels
        return reduced(t.r * both, t.mask & (t.labels >= 0), reduction),

    return {"": Loss("z r", "y mask", lambda t, **o: (ours.distillation_loss(
        t.z, t.y, row_mask=t.mask, row_weight=t.r, **options, **o),), plain),
        "linear_": Loss("x w b r", "t u labels mask", linear, plain_linear, same_bits=False)}


def teacher_of(t: Tensors) -> SparseTarget:
    return SparseTarget.from_topk(t.distinct, t.v / 8, num_classes=CLASSES)


def plain_divergence(t: Tensors, reduction: str, kind: str = "jsd", alpha: float = 1.0) -> Tuple[Tensor]:
    q = logits_of(t)[:, :CLASSES].log_softmax(1)
    p, own = t.v / 8, q.gather(1, t.distinct)
    parts = [torch.cat((a, (1 - a.sum(1, keepdim=True))), 1).log() for a in (own.exp(), p)]
    losses, active = defined(kind, 0.5, *parts), ~none_of(t)
    if alpha < 1:
        active = t.labels >= 0
        losses = alpha * losses + (1 - alpha) * F.nll_loss(q, t.labels, reduction="none")
    return reduced(losses, active, reduction),


DISTILL = dict(tail="bucket", num_classes=CLASSES)


NO_LOSS = dict(reduced=False, wide=False, saved=())


def segments(log: bool) -> Loss:
    function = ours.segment_log_softmax if log else ours.segment_softmax

    def plain(t: Tensors) -> Tuple[Tensor]:
        at = t.labels.clamp(min=0)
        total = t.z.new_zeros(CLASSES, VOCAB).index_add(0, at, t.z.exp())[at]
        return (t.z - total.log() if log else t.z.exp() / total),

    return Loss("z", "labels", lambda t: (function(t.z, index=t.labels.clamp(min=0)),), plain, **NO_LOSS)


def plain_mean(t: Tensors) -> Tuple[Tensor]:
    mask = t.y > -1
    return torch.where(mask, t.z, 0.0).sum(1) / mask.sum(1).clamp(min=1),


TABLE: Dict[str, Any] = {
    "cross_entropy": cross_entropy("tuple", ("loss", "lse")),
    "cross_entropy of labels": cross_entropy("labels"),
    "cross_entropy of labels, weight": cross_entropy("labels", fixed="c", weight="c", num_classes=CLASSES),
    "cross_entropy, options": cross_entropy("masked", ("loss", "lse"), fixed="c", logit_scale=2.0, weight="c",
                                            num_classes=CLASSES, **OPTIONS),
    "cross_entropy, learned": cross_entropy("tuple", learned="r scale", row_weight="r", logit_scale="scale",
                                            label_smoothing=0.1, z_loss=0.1, softcap=3.0),
    "cross_entropy, entropy": cross_entropy("tuple", ("loss", "entropy"), learned="scale", logit_scale="scale",
                                            label_smoothing=0.1),
    "cross_entropy, jagged": cross_entropy("jagged", **OPTIONS),
    "cross_entropy, log_probs": cross_entropy("log_probs"),
    "cross_entropy of sequences": both(
        lambda t, **o: (ours.cross_entropy(t.z[:, None], t.labels[:, None], **o),),
        lambda t, **o: (ours.linear_cross_entropy(t.x[:, None], t.w, t.labels[:, None], linear_bias=t.b, chunk_rows=3,
                                                  **o),),
        lambda t, reduction: (F.cross_entropy(logits_of(t), t.labels, reduction=reduction).reshape(
            (-1, 1) if reduction == "none" else ()),), "", "labels"),
    "binary": binary("tuple"), "binary of labels": binary("labels", weight=True, pos_weight=True),
    "binary, focal": binary("jagged", gamma=(1.5, 2.0), label_smoothing=0.1),
    "binary, clipped": binary("log_probs", gamma=(0.0, 2.0), clip=0.1),
    "selected_log_probs": both(
        lambda t, **o: fields_of(ours.selected_log_probs(t.z, t.ids, logit_scale=t.scale, **OF_ROWS, **o)),
        lambda t: fields_of(ours.linear_selected_log_probs(t.x, t.w, t.ids, linear_bias=t.b, logit_scale=t.scale,
                                                           chunk_rows=3, **OF_ROWS)),
        plain_rows, "scale", "ids", reduced=False),
    "row_loss": Loss("x w b r", "labels", lambda t, **o: (ours.linear_row_loss(
        of_row, t.x, t.w, t.labels, t.r, linear_bias=t.b, return_entropy=True, chunk_rows=3, **o),), plain_row_loss),
    "row_loss with a teacher": Loss("x w b r", "labels t u", lambda t, **o: (ours.linear_row_loss(
        of_row_with_teacher, t.x, t.w, t.labels, t.r, linear_bias=t.b, teacher=(t.t, t.u), return_entropy=True,
        chunk_rows=3, **TEACHER, **o),), plain_row_loss),
    "candidate_logits": Loss(
        "x w b", "distinct", lambda t: (ours.candidate_logits(t.x, t.w, t.distinct, linear_bias=t.b, softcap=4.0),),
        lambda t: (4 * torch.tanh(logits_of(t).gather(1, t.distinct) / 4),), reduced=False),
    **{f"dense_divergence, {kind}": dense_divergence(kind) for kind in KINDS},
    "divergence": Loss("z v", "distinct", lambda t, **o: (ours.divergence(
        t.z, teacher_of(t), kind="jsd", **DISTILL, **o),), plain_divergence),
    "distillation_loss": both(
        lambda t, **o: (ours.distillation_loss(t.z, teacher_of(t), t.labels, kind="reverse_kl", alpha=0.6, **DISTILL,
                                               **o),),
        lambda t, **o: (ours.linear_distillation_loss(t.x, t.w, teacher_of(t), t.labels, linear_bias=t.b, alpha=0.6,
                                                      kind="reverse_kl", chunk_rows=3, **DISTILL, **o),),
        lambda t, **o: plain_divergence(t, kind="reverse_kl", alpha=0.6, **o), "v", "distinct labels", same_bits=False),
    "masked_mean": Loss("z", "y", lambda t: (ours.masked_mean(t.z, t.y > -1, 1),), plain_mean, **NO_LOSS),
    "segment_softmax": segments(False), "segment_log_softmax": segments(True),
    "sparse_softmax": Loss("z", "", lambda t: (torch.ops.sparse_ce.sparse_softmax(
        t.z.flatten(), offsets_of(t.z), None, True),), lambda t: (t.z.log_softmax(1).flatten(),), **NO_LOSS),
}
LOSSES: Dict[str, Loss] = {
    of + name: loss for name, value in TABLE.items()
    for of, loss in (value.items() if isinstance(value, dict) else [("", value)])}
CASES = [(name, reduction) for name, loss in LOSSES.items()
         for reduction in (("none", "mean") if loss.reduced else ("none",))]
MORE = [(name, "sum") for name, loss in LOSSES.items() if loss.reduced]
MORE += [(name, "batchmean") for name in LOSSES if "binary" in name]
# Losses that may overwrite their logits.
IN_PLACE = [name for name in LOSSES if name.startswith(("cross_entropy", "binary", "dense_div", "selected"))]


class Problem:
    """Stores a loss with tensors, and calls it by their values."""

    def __init__(self, name: str, reduction: str, device: str, dtype: torch.dtype = torch.float64, **sizes: int):
        self.loss = LOSSES[name]
        self.options = dict(reduction=reduction) if self.loss.reduced else {}
        self.given = tensors(device, dtype, **sizes)
        self.fixed = [getattr(self.given, name) for name in self.loss.fixed.split()]
        self.count = len(self.loss.learned.split())

    def leaves(self, dtype: Optional[torch.dtype] = None) -> List[Tensor]:
        given = [getattr(self.given, name) for name in self.loss.learned.split()]
        return [t.to(dtype or t.dtype).clone().requires_grad_() for t in given]

    def values(self) -> List[Tensor]:
        return [t.detach() for t in self.leaves()]

    def named(self, given: Any) -> Tensors:
        return Tensors(**dict(zip(self.loss.names, (*given, *self.fixed[:len(self.loss.names) - len(given)]))))

    def __call__(self, *given: Tensor, **options: Any) -> Tuple[Tensor, ...]:
        """Returns the outputs for the learned tensors, and for the fixed ones if these are given too."""
        return self.loss.call(self.named(given), **self.options, **options)

    def free(self, *given: Tensor) -> Tuple[Tensor, ...]:
        """Returns the outputs of all tensors, for a compiler: none of them is a constant."""
        return self.loss.call(Tensors(**dict(zip(self.loss.names, given))), **self.options)

    def plain(self, *given: Tensor) -> Tuple[Tensor, ...]:
        return self.loss.plain(self.named(given), **self.options)

    def total(self, *given: Tensor) -> Tensor:
        """Returns a number whose derivatives for the outputs are all different."""
        return weighted(self(*given))


def upstream(outputs: Any, seed: int = 1) -> List[Tensor]:
    """Returns a random ``grad_output`` for each output."""
    draw = Draw("cpu", seed)
    return [draw.normal(*out.shape, dtype=torch.float64).to(out) for out in outputs]


def weighted(outputs: Any) -> Tensor:
    return sum(((1 + i) * out.sin()).sum() for i, out in enumerate(outputs))


def results(f: Callable, leaves: List[Tensor], **more: Any) -> List[Tensor]:
    """Returns the outputs and the gradients of the leaves for a random ``grad_output``."""
    outputs = f(*leaves)
    grads = torch.autograd.grad(outputs, [t for t in leaves if t.requires_grad], upstream(outputs), **more)
    return [*(out.detach() for out in outputs), *grads]
