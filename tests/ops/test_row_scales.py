"""Compares every function of scaled logits with float64 and with PyTorch, which rounds the products of logits and scale
once."""

from typing import Callable, List, NamedTuple, Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from binary_cases import of_classes
from cases import Draw
from close import assert_close_to_float64
from dense import arithmetic, dense_cross_entropy
from divergence_cases import KINDS, defined
from select_cases import dense_select
from sparse_ce import SparseTarget
from sparse_ce.ops.logits import strided

# None is a power of two. Products with 7 and 100 are exact for bfloat16 logits.
SCALES = (0.15, 0.3, 0.7, 1.3, 7.0, 14.3, 33.3, 77.7, 100.0)
ROWS, HIDDEN, WIDTH, CAP, BIAS = 12, 8, 3, 50.0, -3.0
SPREADS = (3.0, 0.25)  # the latter is usual for a scale of 100
WIDE = {"logits_dtype": torch.float32}  # 16-bit logits of a head would be rounded once more
FEW = 40  # so few that no p is close to its q, where the sign of p - q would decide
CLASSES, MANY = 520, 1030  # these take two paths each: of tiles, and of logits with strided classes


class Problem(NamedTuple):
    """Stores the input of a function, logits or hidden states, and its other arguments."""

    input: Tensor
    teacher: Tensor
    scale: Tensor  # () or (ROWS,)
    labels: Tensor
    ids: Tensor
    values: Tensor
    class_weight: Tensor
    weight: Tensor  # of the head, and of the teacher's

    @property
    def options(self):
        return {"logit_scale": self.scale if self.scale.dim() else float(self.scale)}

    @property
    def target(self):
        return SparseTarget(self.ids, self.values)

    def dense(self, one_hot: bool, classes: int) -> Tensor:
        if one_hot:
            return F.one_hot(self.labels, classes).double()
        return torch.zeros(ROWS, classes, dtype=torch.float64).scatter(1, self.ids, self.values.double())


def problem(spread: float, scale: float, of_rows: bool, dtype: torch.dtype, classes: int, linear: bool) -> Problem:
    draw = Draw("cpu")
    rows = draw.uniform(ROWS, low=0.5, high=1.5) if of_rows else torch.ones(())
    width = HIDDEN if linear else classes
    x = spread * draw.normal(ROWS, width, dtype=torch.float64) / (width if linear else 1) ** 0.5
    teacher = x + 0.3 * spread * draw.normal(ROWS, width, dtype=torch.float64) / (width if linear else 1) ** 0.5
    labels = draw.integers(classes, ROWS)
    others = [torch.randperm(classes - 1, generator=draw.generator)[:WIDTH - 1] for _ in range(ROWS)]
    ids = (torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), 1 + torch.stack(others)], 1) + labels[:, None]) % classes
    if not linear:
        x[torch.arange(ROWS // 2), labels[:ROWS // 2]] += 2 * spread
    return Problem(x.to(dtype), teacher.to(dtype), scale * rows, labels, ids,
                   draw.uniform(ROWS, WIDTH, low=0.1), draw.uniform(classes, low=0.5, high=1.5),
                   draw.normal(classes, HIDDEN).to(dtype))


class Function(NamedTuple):
    """Stores a function of the package and the same in plain PyTorch, of transformed logits and those of the
    teacher."""

    ours: Callable[[Problem, Tensor], List[Tensor]]
    plain: Callable[[Problem, Tensor, Tensor], List[Tensor]]
    softcap: bool = False
    linear: bool = False
    classes: int = CLASSES
    scales_rows: bool = True
    lost: float = 0.0  # the size of terms that cancel in the outputs


def loss(of=lambda p: p.labels, one_hot=True, inplace=lambda x: x, linear=False, reduction="none", **options):
    """Returns cross entropy with a target; True stands for weights."""
    def given(p):
        return {name: p.class_weight if value is True else value for name, value in options.items()}

    def ours(p, x):
        if linear:
            return [sparse_ce.linear_cross_entropy(x, p.weight, of(p), reduction=reduction, **WIDE, **given(p),
                                                   **p.options)]
        return [sparse_ce.cross_entropy(inplace(x), of(p), reduction=reduction, **given(p), **p.options)]

    def plain(p, z, _):
        of_loss = {name: value for name, value in given(p).items() if name != "softcap"}
        return [dense_cross_entropy(z, p.dense(one_hot, z.shape[1]), torch.zeros(ROWS, dtype=torch.bool),
                                    dtype=z.dtype, reduction=reduction, **of_loss)[0]]

    return Function(ours, plain, "softcap" in options, linear)


def select(*outputs, linear=False, **options):
    requested = {f"return_{name}": True for name in outputs if name not in ("log_probs", "lse")}

    def ours(p, x):
        given = dict(requested, **options, **p.options)
        of = (sparse_ce.linear_selected_log_probs(x, p.weight, p.ids, **WIDE, **given) if linear else
              sparse_ce.selected_log_probs(x, p.ids, **given))
        return [getattr(of, name) for name in outputs]

    def plain(p, z, _):
        rows = [[(WIDTH * r + k, int(c)) for k, c in enumerate(own)] for r, own in enumerate(p.ids)]
        of = dense_select(z, rows, p.ids.shape, torch.zeros(ROWS, dtype=torch.bool), dtype=z.dtype)
        return [of[name] for name in outputs]

    # An entropy is the difference of terms that change by more than their last digits if the product is rounded.
    return Function(ours, plain, bool(options), linear, lost=2.0 if "entropy" in outputs else 0.0)


def teach(kind, softcap=None, linear=False):
    def ours(p, x):
        options = dict(kind=kind, reduction="none", softcap=softcap, teacher_softcap=softcap,
                       teacher_logit_scale=p.options["logit_scale"], **p.options)
        if linear:
            return [sparse_ce.linear_distillation_loss(x, p.weight, (p.teacher, p.weight), **WIDE, **options)]
        return [sparse_ce.distillation_loss(x, p.teacher, **options)]

    return Function(ours, lambda p, z, y: [defined(kind, 0.5, z, y)], softcap is not None, linear, lost=0.01)


def binary(linear=False):
    def ours(p, x):
        options = dict(reduction="none", logit_scale=float(p.scale), logit_bias=BIAS)
        if linear:
            return [sparse_ce.linear_binary_cross_entropy(x, p.weight, p.target, **WIDE, **options)]
        return [sparse_ce.binary_cross_entropy_with_logits(x, p.target, **options)]

    def plain(p, z, _):
        return [of_classes(z + BIAS, p.dense(False, z.shape[1]).to(z.dtype)).sum(1)]

    return Function(ours, plain, linear=linear, scales_rows=False)


def topk(p, x):
    return [sparse_ce.topk_log_probs(x, WIDTH, **p.options).values]


def candidates(p, x):
    return [sparse_ce.candidate_logits(x, p.weight, p.ids, logit_scale=float(p.scale))]


def by_columns(x):
    return x.t().contiguous().t()


ALL = ("log_probs", "lse", "log_tail", "entropy", "mean_logit", "collision")
FUNCTIONS = {
    "labels": loss(),
    "labels of many classes": loss()._replace(classes=MANY),
    "weights": loss(lambda p: p.target, one_hot=False),
    "sum": loss(reduction="sum"),
    "label_smoothing": loss(label_smoothing=0.1),
    "label_smoothing, weight": loss(label_smoothing=0.1, weight=True),
    "z_loss": loss(z_loss=0.01),
    "softcap": loss(softcap=CAP),
    "softcap, label_smoothing": loss(softcap=CAP, label_smoothing=0.1),
    "strided": loss(inplace=by_columns),
    "strided, many classes": loss(inplace=by_columns)._replace(classes=MANY),
    "strided, softcap": loss(inplace=by_columns, softcap=CAP),
    "strided, label_smoothing": loss(inplace=by_columns, label_smoothing=0.1, weight=True),
    "log_probs": select("log_probs"),
    "lse": select("lse"),
    "entropy": select("log_probs", "entropy"),
    "all outputs": select(*ALL),
    "all outputs, softcap": select(*ALL, softcap=CAP),
    "topk": Function(topk, lambda p, z, _: [z.log_softmax(1).topk(WIDTH, 1).values]),
    **{kind: teach(kind) for kind in KINDS},
    "tv": teach("tv")._replace(classes=FEW),
    "reverse_kl, softcap": teach("reverse_kl", CAP),
    "jsd, softcap": teach("jsd", CAP),
    "binary": binary(),
    "linear": loss(linear=True),
    "linear, label_smoothing": loss(linear=True, label_smoothing=0.1),
    "linear, softcap": loss(linear=True, softcap=CAP),
    "linear log_probs": select("log_probs", "entropy", linear=True),
    "linear reverse_kl": teach("reverse_kl", linear=True),
    "linear jsd": teach("jsd", linear=True),
    "linear binary": binary(linear=True),
    "candidates": Function(candidates, lambda p, z, _: [z.gather(1, p.ids)], linear=True, scales_rows=False),
}


def results(p: Problem, x: Tensor, outputs: List[Tensor]) -> List[Tensor]:
    """Returns the outputs and, if they have one, the gradient of ``x``."""
    if not outputs[0].requires_grad:
        return outputs
    draw = Draw("cpu", 1)
    grads = [draw.normal(*t.shape).to(t.dtype) for t in outputs]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, x, grads)]


def in_pytorch(f: Function, p: Problem, dtype: torch.dtype, stored: torch.dtype) -> List[Tensor]:
    """Returns the results of PyTorch in ``dtype`` for an input of dtype ``stored``."""
    x = p.input.to(stored).requires_grad_()
    scale = p.scale.to(dtype)[..., None]

    def transformed(t: Tensor) -> Tensor:
        z = (t.to(dtype) @ p.weight.to(dtype).t() if f.linear else t.to(dtype)) * scale
        return CAP * torch.tanh(z / CAP) if f.softcap else z

    return results(p, x, f.plain(p, transformed(x), transformed(p.teacher)))


def settings(f: Function, dtype: torch.dtype) -> List[Tuple[float, float, bool]]:
    """Returns combinations of a scale, a spread and whether each row has its own scale."""
    scales = SCALES if dtype == torch.float32 else SCALES[::3]
    spreads = SPREADS[1:] if f.linear else SPREADS  # matrix products of large logits have errors of their own
    return [(scale, spread, f.scales_rows and (i + j) % 2 == 1)
            for i, scale in enumerate(scales) for j, spread in enumerate(spreads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_product_with_the_scale_is_rounded_once(name, dtype, monkeypatch):
    """Checks outputs and the gradient. The last bits of p - 1 are lost, whatever the scale is, and those of tanh."""
    monkeypatch.setattr(strided, "LEAST_INNER", 1)
    f, compared = FUNCTIONS[name], 0
    for scale, spread, of_rows in settings(f, dtype):
        p = problem(spread, scale, of_rows, dtype, f.classes, f.linear)
        x = p.input.clone().requires_grad_()
        found, of_storage = results(p, x, f.ours(p, x)), in_pytorch(f, p, arithmetic(dtype), dtype)
        exact = in_pytorch(f, p, torch.float64, torch.float64)
        lost = [CAP / 4 if f.softcap else f.lost] * (len(found) - 1)
        lost += [(6 if f.softcap else 4) * scale * (float(p.weight.abs().max()) if f.linear else 1)]
        for ours, peer, wanted, terms in zip(found, of_storage, exact, lost):
            if wanted.abs().max() > 1e-4 * terms:  # otherwise no digit is left
                compared += 1
                flat = (t.reshape(1, -1) for t in (ours, peer, wanted))
                assert_close_to_float64(*flat, terms=torch.full((1, 1), terms, dtype=torch.float64))
    assert compared >= len(settings(f, dtype))
