"""Computes binary cross entropy of dense targets in plain PyTorch, and how far the kernels may be from float64."""

from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from cases import FORMS, Case, Draw
from dense import arithmetic
from divergence_cases import assert_within, stored_error
from loss_cases import CLASSES, PADDED, SHAPE

ULPS = 8  # roundings of a term: exponential, logarithm, products, a sum in lanes

# The options of a call; True stands for the tensors built by `make`.
OPTIONS: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "weight": dict(weight=True),
    "pos_weight": dict(pos_weight=True),
    "label_smoothing": dict(label_smoothing=0.1),
    "smoothed at most": dict(label_smoothing=1.0),
    "scale": dict(logit_scale=0.7),
    "bias": dict(logit_bias=-1.5),
    "learned": dict(logit_scale=True, logit_bias=True),
    "gamma": dict(gamma=2.0),
    "gammas": dict(gamma=(0.5, 3.0)),
    "gamma of negatives": dict(gamma=(0, 1)),
    "clip": dict(clip=0.05),
    "asymmetric": dict(gamma=(1.0, 4.0), clip=0.05),
    "num_classes": dict(num_classes=CLASSES),
    "ignore_index": dict(ignore_index=3),
    "row_mask": dict(row_mask=True),
    "row_weight": dict(row_weight=True),
    "normalizer": dict(normalizer=7),
    "all": dict(weight=True, pos_weight=True, label_smoothing=0.2, logit_scale=True, logit_bias=True, gamma=(1.0, 2.0),
                clip=0.1, num_classes=CLASSES, ignore_index=5, row_mask=True, row_weight=True),
}
REDUCTIONS = ("none", "sum", "mean", "batchmean")


def exponents(gamma: Union[float, Tuple[float, float]]) -> Tuple[float, float]:
    return gamma if isinstance(gamma, tuple) else (gamma, gamma)


def of_negatives(z: Tensor, gamma: float = 0.0, clip: float = 0.0) -> Tensor:
    """Returns the loss of negative classes."""
    if not clip:
        return (gamma * F.logsigmoid(z)).exp() * -F.logsigmoid(-z)
    above = z.sigmoid() > clip
    p = torch.where(above, z.sigmoid() - clip, 0.5)
    return torch.where(above, p ** gamma * -torch.where(above, (-z).sigmoid() + clip, 0.5).log(), 0.0)


def of_positives(z: Tensor, gamma: float = 0.0) -> Tensor:
    """Returns the loss of positive classes."""
    return (gamma * F.logsigmoid(-z)).exp() * -F.logsigmoid(z)


def of_classes(z: Tensor, target: Tensor, *, weight: Optional[Tensor] = None, pos_weight: Optional[Tensor] = None,
               label_smoothing: float = 0.0, gamma: Any = 0.0, clip: float = 0.0) -> Tensor:
    """Returns the loss of every class."""
    target = (1 - label_smoothing) * target + label_smoothing / 2
    positive, negative = exponents(gamma)
    of = of_positives(z, positive) * target
    if pos_weight is not None:
        of = of * pos_weight.to(z.dtype)
    of = of + (1 - target) * of_negatives(z, negative, clip)
    return of if weight is None else of * weight.to(z.dtype)


class Rows(NamedTuple):
    """Stores arguments of rows."""

    ignored: Tensor  # shape, bool: rows that do not count
    share: Tensor  # shape: factors of the losses, 0 in ignored rows, differentiable in row_weight


def rows_of(ignored: Tensor, classes: int, reduction: str, dtype: torch.dtype, row_mask: Optional[Tensor] = None,
            row_weight: Optional[Tensor] = None, normalizer: Optional[float] = None) -> Rows:
    ignored = ignored if row_mask is None else ignored | ~row_mask
    share = (~ignored).to(dtype)
    if reduction in ("mean", "batchmean"):
        divisor = normalizer
        if divisor is None:
            divisor = float((~ignored).sum()) * (classes if reduction == "mean" else 1)
        share = share / divisor if divisor else share * 0
    if row_weight is not None:
        share = share * torch.where(ignored, 0.0, row_weight.to(dtype))
    return Rows(ignored, share)


SPLIT = ("row_mask", "row_weight", "normalizer")


def dense_binary(logits: Tensor, dense: Tensor, ignored: Tensor, *, dtype: torch.dtype = torch.float64,
                 reduction: str = "mean", logit_scale: Any = 1.0, logit_bias: Any = 0.0,
                 num_classes: Optional[int] = None, **options: Any) -> Tensor:
    """Returns the loss of a dense target in ``dtype``, differentiable in everything that requires grad."""
    rows = rows_of(ignored, dense.shape[-1], reduction, dtype, **{n: options.pop(n) for n in SPLIT if n in options})
    x = torch.where(rows.ignored[..., None], 0.0, logits[..., :num_classes].to(dtype))
    each = of_classes(logit_scale * x + logit_bias, dense.to(dtype), **options)
    losses = torch.where(rows.ignored, 0.0, each.sum(-1)) * rows.share
    return losses if reduction == "none" else losses.sum()


class Problem(NamedTuple):
    """Stores a case, its logits and keyword arguments, and the leaves that may require grad, by name."""

    case: Case
    logits: Tensor
    keywords: Dict[str, Any]

    def leaves(self, wide: bool) -> Dict[str, Tensor]:
        """Returns new leaves: those of the call, or in float64."""
        given = {"logits": self.logits, "values": self.case.values, **{
            name: self.keywords.get(name) for name in ("logit_scale", "logit_bias", "row_weight")}}
        return {name: t.detach().to(torch.float64 if wide else t.dtype).clone().requires_grad_()
                for name, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}


def tensors_of(options: Dict[str, Any], case: Case, draw: Draw, dtype: torch.dtype) -> Dict[str, Any]:
    """Returns the keyword arguments. Rows that do not count hold NaN weights."""
    keywords, wide = dict(options), arithmetic(dtype)
    for name, low in (("weight", 0.2), ("pos_weight", 0.5)):
        if name in options:
            keywords[name] = draw.uniform(case.classes, low=low, high=3)
            keywords[name][2] = 0
    if options.get("logit_scale") is True:
        keywords["logit_scale"], keywords["logit_bias"] = draw.normal(2, dtype=wide).add(1.2).unbind()
    ignored = case.ignored
    if "row_mask" in options:
        keywords["row_mask"] = draw.uniform(*case.shape) > 0.3
        ignored = ignored | ~keywords["row_mask"]
    if "row_weight" in options:
        keywords["row_weight"] = draw.uniform(*case.shape, low=-1, high=2, dtype=wide).masked_fill(ignored, torch.nan)
    return keywords


def make(form: str, device: str, dtype: torch.dtype, options: Dict[str, Any], seed: int = 0,
         shape: Tuple[int, ...] = SHAPE, classes: int = CLASSES) -> Problem:
    """Returns a problem. Whatever must not be read is NaN."""
    draw = Draw(device, seed)
    case = FORMS[form](shape, classes, draw, options.get("ignore_index", -100))
    logits = draw.logits(case.dense, dtype, PADDED if "num_classes" in options else None)
    keywords = tensors_of(options, case, draw, dtype)
    ignored = case.ignored | ~keywords["row_mask"] if "row_mask" in options else case.ignored
    logits[ignored] = torch.nan
    logits[ignored, :2] = torch.inf
    return Problem(case, logits, keywords)


class Sizes(NamedTuple):
    """Stores the sizes of what a loss adds up: of its rows and of its slopes."""

    rows: Tensor
    slopes: Tensor  # of z, per class
    of_values: Tensor  # per class, for a target of 1


def sizes(z: Tensor, moved: Tensor, dense: Tensor, *, weight: Optional[Tensor] = None,
          pos_weight: Optional[Tensor] = None, label_smoothing: float = 0.0, gamma: Any = 0.0,
          clip: float = 0.0) -> Sizes:
    """Returns the sizes of the terms for logits z that were rounded by eps ``moved``.

    The powers exp(-gamma L) have the relative error gamma L eps. A clip is subtracted from probabilities, whose errors
    then are absolute."""
    positive, negative = exponents(gamma)
    w = torch.ones_like(z[..., :1]) if weight is None else weight.double()
    p = torch.ones_like(z[..., :1]) if pos_weight is None else pos_weight.double()
    target = ((1 - label_smoothing) * dense).abs() + label_smoothing / 2 + 4 * (dense != 0)
    a, b = w * (1 + target), w * p * target
    of_p, of_n = -F.logsigmoid(z), -F.logsigmoid(-z)
    grows_p, grows_n = 1 + positive * of_n, 1 + negative * of_p
    f, g = of_negatives(z, negative, clip) * grows_n + bool(clip), of_positives(z, positive) * grows_p
    power_p, power_n = (-positive * of_n).exp() * grows_p, (-negative * of_p).exp() * grows_n
    slope_p = power_p * (positive * z.sigmoid() * of_p + (-z).sigmoid())
    slope_n = power_n * (negative * (-z).sigmoid() * of_n + z.sigmoid()) + bool(clip) * (1 + negative)
    slopes = a * slope_n + b * slope_p
    bends = (1 + max(positive, negative)) ** 2 * (a * (power_n + bool(clip)) + b * power_p)
    return Sizes((a * f + b * g + slopes * moved).sum(-1), slopes + bends * moved,
                 w * (p * g + f + (slope_p * p + slope_n) * moved))


def check(problem: Problem, reduction: str, seed: int = 1, function: Any = None, wanted: Any = None,
          **more: Any) -> Dict[str, Tensor]:
    """Compares a loss and its gradients with float64, and returns them. ``function`` computes the loss."""
    case, logits, keywords = problem
    options = {**keywords, "reduction": reduction}
    if "normalizer" in options and reduction not in ("mean", "batchmean"):
        options.pop("normalizer")
    dtype, draw = logits.dtype, Draw(logits.device.type, seed)
    ours, wide = problem.leaves(False), problem.leaves(True)
    names = [name for name in ours if wanted is None or name in wanted]
    for name in set(ours) - set(names):
        ours[name].requires_grad_(False)
    grad_output = draw.normal(*(case.shape if reduction == "none" else ()), dtype=torch.float64)
    grad_output = grad_output.to(arithmetic(dtype))

    of = {name: ours[name] for name in ("logit_scale", "logit_bias", "row_weight") if name in ours}
    loss = (function or sparse_ce.binary_cross_entropy_with_logits)(
        ours["logits"], case.build(ours.get("values")), **{**options, **of}, **more)
    grads = dict(zip(names, torch.autograd.grad(loss, [ours[name] for name in names], grad_output)))

    of_wide = {name: wide[name] for name in of}
    plain = {name: t for name, t in options.items() if name != "ignore_index"}
    dense = case.dense_of(wide.get("values"))
    exact = dense_binary(wide["logits"], dense, case.ignored, **{**plain, **of_wide})
    exact_grads = dict(zip(names, torch.autograd.grad(exact, [wide[name] for name in names], grad_output.double())))
    assert loss.dtype == arithmetic(dtype) and loss.shape == exact.shape

    rows = rows_of(case.ignored, case.classes, reduction, torch.float64, **{
        name: plain[name] for name in SPLIT if name in plain})
    x = torch.where(rows.ignored[..., None], 0.0, logits[..., :case.classes].double())
    scale, bias = (float(plain.get(name, default)) for name, default in (("logit_scale", 1.0), ("logit_bias", 0.0)))
    moved = (abs(scale) * x.abs() + abs(bias)) * ("logit_scale" in plain or "logit_bias" in plain)
    formula = {name: plain[name] for name in ("weight", "pos_weight", "label_smoothing", "gamma", "clip")
               if name in plain}
    size = sizes(scale * x + bias, moved, dense.detach(), **formula)
    eps = ULPS * torch.finfo(arithmetic(dtype)).eps
    share = rows.share.abs()
    error = eps * share * torch.where(rows.ignored, 0.0, size.rows)
    assert_within(loss, exact.detach(), (error if reduction == "none" else error.sum()) + 1e-37)
    upstream = share * grad_output.double().abs()
    slopes = eps * upstream[..., None] * size.slopes
    allowed = {
        "logits": F.pad(abs(scale) * slopes, (0, logits.shape[-1] - case.classes)),
        "logit_scale": (slopes * x.abs()).sum(), "logit_bias": slopes.sum(),
        "row_weight": grad_output.double().abs() * eps * torch.where(rows.ignored, 0.0, size.rows),
    }
    for name in names:
        if name == "values":
            worst = eps * (upstream[..., None] * size.of_values).max() * (1 + case.dense.abs().max())
            allowed[name] = torch.full_like(exact_grads[name], float(worst))
        twice = 1 + (reduction != "none")  # a gradient for 1 is stored before it is scaled
        bound = allowed[name] + twice * stored_error(exact_grads[name], grads[name].dtype) + 1e-37
        assert_within(grads[name], exact_grads[name], bound)
    if "logits" in names:
        assert not grads["logits"][rows.ignored].any() and not grads["logits"][..., case.classes:].any()
    return {"loss": loss.detach(), **grads}
