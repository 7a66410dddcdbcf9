"""Computes losses, log-probabilities and gradients of rows to the last digits, with the error that each may have.

The largest class of a row is left out of the sum of its exponentials, whose 1 would hide the others. All numbers are
long doubles of numpy. tests/suite/test_exact_rows.py compares them with 60 digits of mpmath.
"""

import math
from typing import Any, Optional, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from cases import Draw
from dense import arithmetic

LEADS = (0, 5, 10, 15, 20, 40, 60, 80)  # of the largest class over the next one, in nats
# In units of eps / 2: 4 ULP of each term, and the rounding of a scaled logit and of one with a softcap.
ROUNDINGS, SCALED, CAPPED = 8, 1, 3


def long(t: Tensor) -> np.ndarray:
    return t.detach().cpu().double().numpy().astype(np.longdouble)


def long_sum(terms: int) -> float:
    """Returns the rounding of a sum of one sign in units of eps / 2: a lane adds a part of the terms in order."""
    return math.sqrt(terms) / 4


class Rough:
    """A number that arithmetic of finite precision computes.

    ``size`` is the sum of the absolute values of its terms, each of which may be wrong by 4 ULP. ``error`` is what
    the rounding of logits and of their differences adds, in units of eps / 2.
    """

    __array_ufunc__ = None

    def __init__(self, value: Any, size: Any = None, error: Any = 0.0):
        self.value = np.asarray(value, np.longdouble)
        self.size = np.abs(self.value) if size is None else size
        self.error = np.broadcast_to(np.asarray(error, np.longdouble), self.value.shape)

    def __add__(self, other: "Rough") -> "Rough":
        return Rough(self.value + other.value, self.size + other.size, self.error + other.error)

    def __neg__(self) -> "Rough":
        return Rough(-self.value, self.size, self.error)

    def __sub__(self, other: "Rough") -> "Rough":
        return self + -other

    def __mul__(self, other: Union["Rough", np.ndarray, float]) -> "Rough":
        if not isinstance(other, Rough):
            other = Rough(other)
        return Rough(self.value * other.value, self.size * other.size,
                     self.error * other.size + self.size * other.error)

    __rmul__ = __mul__

    def __truediv__(self, other: "Rough") -> "Rough":
        inverse = 1 / other.value
        return self * Rough(inverse, None, other.error * inverse * inverse)

    def __getitem__(self, at: Any) -> "Rough":
        return Rough(self.value[at], self.size[at], self.error[at])

    def sum(self, axis: int = -1, keepdims: bool = False) -> "Rough":
        return Rough(*(t.sum(axis, keepdims=keepdims) for t in (self.value, self.size, self.error)))

    def log1p(self) -> "Rough":
        return Rough(np.log1p(self.value), None, self.error / (1 + self.value))

    def log(self) -> "Rough":
        return Rough(np.log(self.value), None, self.error / self.value)

    def reshape(self, *shape: int) -> "Rough":
        return Rough(*(t.reshape(shape) for t in (self.value, self.size, self.error)))


def where(condition: np.ndarray, a: Rough, b: Rough) -> Rough:
    return Rough(*(np.where(condition, *pair) for pair in zip((a.value, a.size, a.error), (b.value, b.size, b.error))))


def excess(ours: Tensor, exact: Rough, dtype: torch.dtype) -> np.ndarray:
    """Returns the error of ``ours`` divided by the error that it may have, if logits have this ``dtype``."""
    assert ours.shape == exact.value.shape, f"shape {list(ours.shape)}, expected {list(exact.value.shape)}"
    computed, stored = torch.finfo(arithmetic(dtype)), torch.finfo(ours.dtype)
    # Numbers below the smallest normal one may be flushed to 0.
    slack = 4 if dtype == torch.float64 else 1  # long sums of float64 are not compensated
    allowed = slack * computed.eps / 2 * (ROUNDINGS * exact.size + exact.error) + 2 * computed.smallest_normal
    if stored.eps > computed.eps:
        allowed = allowed + stored.eps / 2 * np.maximum(np.abs(exact.value), stored.smallest_normal)
    error = np.abs(long(ours) - exact.value)
    return np.where(np.isnan(error), np.inf, np.where(long(ours) == exact.value, 0, error / allowed))


def assert_exact(name: str, ours: Tensor, exact: Rough, dtype: torch.dtype) -> None:
    ratio = excess(ours, exact, dtype)
    if ratio.size:
        at = np.unravel_index(ratio.argmax(), ratio.shape)
        assert ratio[at] <= 1, f"{name}: error {float(ratio[at]):.3g} of what is allowed at {[*map(int, at)]}: " \
            f"{float(long(ours)[at]):.9e}, exact {float(exact.value[at]):.9e}"


def assert_sum_to_0(gradient: Tensor, logits: Tensor) -> None:
    """Checks that the derivatives of each row (..., V) sum to 0 within 1e-6 of the largest, or of half of their
    absolute values if there are many, and the rounding of a long sum. Beyond a lead of 64 nats, differences of logits
    are rounded twice as much."""
    sizes = gradient.double().abs()
    flushed = gradient.shape[-1] * torch.finfo(gradient.dtype).smallest_normal
    sums = gradient.double().sum(-1).abs().sub(flushed).clamp(min=0)
    relative = sums / torch.maximum(sizes.amax(-1), sizes.sum(-1) / 2).clamp(min=1e-300)
    top = logits.double().topk(2, -1).values
    limit = torch.where(top[..., 0] - top[..., 1] > 64, 2e-6, 1e-6) + long_sum(gradient.shape[-1]) * 2**-24
    assert (relative <= limit).all(), f"gradients must sum to 0, got {relative.max():.2e} of the largest"


class ExactRows:
    """The softmax of rows of logits (N, V), and the derivatives of all that is computed from it."""

    def __init__(self, logits: Tensor, *, logit_scale: Union[float, Tensor] = 1.0, softcap: Optional[float] = None,
                 num_classes: Optional[int] = None):
        x = long(logits[:, :num_classes])
        scale = torch.as_tensor(logit_scale, dtype=arithmetic(logits.dtype)).reshape(-1, 1)
        scaled, s = bool(scale.ne(1).any()), long(scale)
        z = x * s
        roundings, self.slope = SCALED if scaled else 0, Rough(np.broadcast_to(s, z.shape))
        if softcap is not None:
            t = np.tanh(z / softcap)
            z, roundings = softcap * t, CAPPED
            self.slope = self.slope * Rough(1 - t * t, 1 + t * t)
        self.at = z.argmax(1)  # the first of the largest
        self.largest = np.arange(z.shape[1]) == self.at[:, None]
        top = z.max(1, keepdims=True)
        self.z = Rough(z, None, roundings * np.abs(z))
        self.top = Rough(top, None, roundings * np.abs(top))
        # A difference from the largest logit is rounded once, when it is made or when two parts are merged.
        away = np.where(self.largest, 0, np.abs(z - top) + roundings * (np.abs(z) + np.abs(top)))
        self.below = Rough(z - top, None, away)
        e = np.exp(self.below.value)
        computed = torch.finfo(arithmetic(logits.dtype))
        away = e * away + np.where(e < computed.smallest_normal, e, 0) / (computed.eps / 2)  # it may be flushed to 0
        self.powers = Rough(e, None, away)
        self.others = self.powers * ~self.largest  # without the largest class
        self.rest = self.others.sum(1, keepdims=True)
        self.rest.error = self.rest.error + self.rest.value * long_sum(z.shape[1])
        self.log_total = self.rest.log1p()
        self.log_probs = self.below - self.log_total
        self.probs = self.powers / (Rough(np.ones_like(top)) + self.rest)
        # A kernel may compute it as exp(z - lse), and round that difference as well.
        self.probs.error = self.probs.error + self.probs.value * np.abs(self.log_probs.value)
        self.lse = (self.top + self.log_total)[:, 0]
        # The entropy beyond log1p(rest): all terms are positive.
        self.spread = -(self.others * self.below).sum(1, keepdims=True) / (Rough(np.ones_like(top)) + self.rest)
        self.entropy = (self.log_total + self.spread)[:, 0]
        self.squares = (self.others * self.others).sum(1, keepdims=True)
        self.collision = (self.squares.log1p() - self.log_total * 2.0)[:, 0]
        self.mean_logit = self.z.sum(1) * (1 / z.shape[1])

    def less_shares(self, weights: Rough) -> Rough:
        """Returns p_j sum_k w_k - w_j for each class j.

        For the largest class it is p (S - w - w rest), where S - w is the sum of the other weights.
        """
        other_weights = (weights * ~self.largest).sum(1, keepdims=True)
        return where(self.largest, self.probs * (other_weights - weights * self.rest),
                     self.probs * weights.sum(1, keepdims=True) - weights)

    def cross_entropy(self, weights: Rough, class_weights: np.ndarray, e: float = 0.0, z_loss: float = 0.0) -> Rough:
        """Returns the losses (N,) of the entries' weights (N, V), class weights included."""
        share = Rough(np.broadcast_to(class_weights * e / len(class_weights), self.z.value.shape))
        return -((weights * (1 - e) + share) * self.log_probs).sum(1) + self.lse * self.lse * z_loss

    def of_cross_entropy(self, weights: Rough, class_weights: np.ndarray, e: float = 0.0,
                         z_loss: float = 0.0) -> Rough:
        """Returns the derivatives (N, V) of the losses with respect to the transformed logits."""
        share = Rough(np.broadcast_to(class_weights * e / len(class_weights), self.z.value.shape))
        return (self.less_shares(weights * (1 - e)) + self.less_shares(share)
                + self.probs * (self.lse * (2 * z_loss))[:, None])

    def hessian_times(self, weights: Rough, v: np.ndarray) -> Rough:
        """Returns the product of the second derivatives and ``v`` (N, V): S p_j (v_j - sum_k p_k v_k).

        The differences from v of the largest class are all that counts there.
        """
        of_largest = np.take_along_axis(v, self.at[:, None], 1)
        others = self.others / (Rough(np.ones_like(of_largest)) + self.rest)
        mean = (others * Rough(v - of_largest, abs(v) + abs(of_largest))).sum(1, keepdims=True)
        apart = Rough(v - of_largest, np.where(self.largest, 0, abs(v) + abs(of_largest)))
        return self.probs * (apart - mean) * weights.sum(1, keepdims=True)

    def of_entropy(self) -> Rough:
        return -(self.probs * (where(self.largest, self.below * 0.0, self.below) + self.spread))

    def of_collision(self) -> Rough:
        """Returns 2 p (p / sum p^2 - 1). For the largest class, p - sum p^2 is p^2 (rest - squares)."""
        total = Rough(np.ones_like(self.rest.value)) + self.squares
        difference = where(self.largest, (self.others * Rough(1 - self.powers.value)).sum(1, keepdims=True)
                           * Rough(np.ones(self.z.value.shape)),
                           self.powers - Rough(np.ones_like(self.rest.value)) + self.powers * self.rest - self.squares)
        found = self.probs * difference / total * 2.0
        # A kernel may compute it as 2 p expm1(log p - collision), from a rounded collision.
        of_collision = ROUNDINGS * self.collision.size + self.collision.error
        rounded = np.abs(self.log_probs.value) + of_collision[:, None]
        found.error = found.error + 2 * self.probs.value * self.powers.value / total.value * rounded
        return found

    def tail(self, chosen: np.ndarray) -> Sequence[Rough]:
        """Returns the logarithm of the probability (N,) outside the ``chosen`` classes (N, V), and its derivatives.

        If the tail is more than half of it, the logarithm is -log1p(chosen / tail), without a difference.
        """
        rounded = Rough(self.powers.value, None, self.powers.error + self.powers.value * np.abs(self.log_probs.value))
        inside, outside = (rounded * of for of in (chosen, ~chosen))
        mine, others = inside.sum(1, keepdims=True), outside.sum(1, keepdims=True)
        log_tail = where(others.value > mine.value, -(mine / others).log1p(), others.log() - self.log_total)[:, 0]
        return log_tail, where(chosen, -self.probs, self.probs * (mine / others))

    def of_logits(self, of_z: Rough) -> Rough:
        return of_z * self.slope


def confident_logits(dense: Tensor, draw: Draw, dtype: torch.dtype, leads: Sequence[float] = LEADS) -> Tensor:
    """Returns logits of the shape of ``dense`` (..., n), whose largest class leads by each of ``leads``.

    In the first half of the rows it is the target's largest class, in the others any class.
    """
    z = draw.normal(*dense.shape, dtype=torch.float64).to(dtype).reshape(-1, dense.shape[-1])
    rows, classes = z.shape
    row = torch.arange(rows, device=z.device)
    anywhere = draw.integers(classes, rows)
    at = torch.where(row < (rows + 1) // 2, dense.reshape(rows, classes).abs().argmax(1), anywhere)[:, None]
    lead = torch.tensor(leads, dtype=torch.float64, device=z.device)[(row + row // 8) % len(leads), None]
    next_one = z.scatter(1, at, -torch.inf).amax(1, keepdim=True)
    return z.scatter(1, at, (next_one.double() + lead).to(dtype)).reshape(dense.shape)
