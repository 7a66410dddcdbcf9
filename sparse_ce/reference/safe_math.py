"""Provides NaN-safe products and softmaxes: if ``grad_output`` is 0 the gradient is 0, even if a factor is NaN."""

from typing import Any, Tuple

import torch
from torch import Tensor

from .._core.tracing import traced_transform


def inside_a_kernel() -> bool:
    """Returns True inside a kernel called by functorch, where it does not support ``torch.autograd.Function``.

    Such kernels are ops of ``torch.ops`` and those of :mod:`sparse_ce.patches.stock_cross_entropy`."""
    if torch.compiler.is_dynamo_compiling():  # Dynamo does not trace into kernels, and cannot trace the calls below.
        return False
    return (torch._C._functorch.peek_interpreter_stack() is not None and
            torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode))


class _TracedTimes(torch.autograd.Function):
    """Computes ``a * b``, and 0 wherever ``a`` is 0, even if ``b`` is NaN or inf.

    Likewise, derivatives are 0 wherever ``grad_output`` is 0. This class has no ``jvp``, which ``torch.compile`` cannot
    trace."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a == 0, 0.0, a * b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _product(grad, b), _product(grad, a)


class _Times(_TracedTimes):
    """Adds forward-mode AD to :class:`_TracedTimes`, for use outside of ``torch.compile``."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent_a: Tensor, tangent_b: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return _product(tangent_a, b) + _product(a, tangent_b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns :func:`times` of tensors of the same shape."""
    if traced_transform():
        return a * torch.where((a == 0) & ~b.isfinite(), 0.0, b)
    product: Tensor = (_TracedTimes if torch.compiler.is_compiling() else _Times).apply(a, b)
    return product


def times(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a * b``, and 0 wherever ``a`` is 0, even if ``b`` is NaN or inf."""
    if inside_a_kernel():
        return torch.where(a == 0, 0.0, a * b)
    same = a.shape == b.shape  # broadcast_tensors has no batching rule for is_grads_batched
    return _product(a, b) if same else _product(*torch.broadcast_tensors(a, b))


def softcapped(z: Tensor, softcap: float) -> Tensor:
    """Returns ``softcap * tanh(z / softcap)``."""
    if inside_a_kernel():
        return softcap * torch.tanh(z / softcap)
    capped: Tensor = _Softcapped.apply(z, softcap)
    return capped


def slope_of_cap(capped: Tensor, softcap: float) -> Tensor:
    """Returns the derivative of :func:`softcapped` from its result.

    Near a derivative of 0, this product of differences keeps the digits that ``1 - tanh ** 2`` loses."""
    return (softcap - capped) / softcap * ((softcap + capped) / softcap)


class _Softcapped(torch.autograd.Function):
    """Computes :func:`softcapped`. Where ``grad_output`` or the tangent is 0, so is its derivative, for any ``z``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, softcap: float) -> Tensor:
        return softcap * torch.tanh(z / softcap)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.softcap = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        capped, = ctx.saved_tensors
        return times(grad, slope_of_cap(capped, ctx.softcap)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        capped, = ctx.saved_tensors
        return times(tangent, slope_of_cap(capped, ctx.softcap))


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """Returns log(e^a + e^b). The second derivative of ``torch.logaddexp`` is NaN if a or b is -inf."""
    above = a >= b
    high, low = torch.where(above, a, b), torch.where(above, b, a)
    return high + (low - torch.where(high.isneginf(), 0.0, high)).exp().log1p()


def less_log1p(v: Tensor) -> Tensor:
    """Returns v - log(1 + v), whose difference has no digits for small v. That of exp(x) - 1 is exp(x) - 1 - x."""
    s = v / (2 + v)
    near = s.abs() < 0.2
    s = torch.where(near, s, 0.0)
    square, series = s * s, torch.zeros_like(s)
    for k in range(27 if v.dtype == torch.float64 else 13, 1, -2):
        series = series * square + 1 / k
    # log(1 + v) is 2 (s + s^3 / 3 + s^5 / 5 + ...), and v - 2 s is v s.
    return torch.where(near, s * (v - 2 * square * series), v - torch.where(near, 0.0, v).log1p())


def normalize(z: Tensor) -> Tuple[Tensor, Tensor]:
    """Returns lse (N,) and log-probabilities (N, V) of ``z`` (N, V)."""
    if inside_a_kernel():
        return _normalized(z)
    normalized: Tuple[Tensor, Tensor] = _Normalize.apply(z)
    return normalized


def _normalized(z: Tensor) -> Tuple[Tensor, Tensor]:
    """Implements :func:`normalize` with the sum of exponentials without the largest class, whose 1 would hide them."""
    if z.shape[1] == 0:
        return torch.logsumexp(z, 1), torch.log_softmax(z, 1)
    highest, largest = z.amax(1, keepdim=True), largest_of(z)

    def rest(below: Tensor) -> Tensor:
        return torch.where(largest, below.expm1(), below.exp()).sum(1, keepdim=True)  # NaN if the highest is infinite

    # PyTorch differentiates this in a kernel. If the largest class has most of the probability, the derivative of
    # `highest` leaves 1 - q of its own; otherwise it would be a difference of large numbers.
    below = z - torch.where(rest((z - highest).detach()) < 1, highest, highest.detach())
    return torch.logsumexp(z, 1), below - rest(below).log1p()


def largest_of(z: Tensor) -> Tensor:
    """Returns a mask (N, V) with the first of the largest classes of each row of ``z`` (N, V)."""
    if z.shape[1] == 0:
        return torch.zeros_like(z, dtype=torch.bool)
    return torch.arange(z.shape[1], device=z.device) == z.detach().argmax(1, keepdim=True)


def of_log_probs(grad: Tensor, log_probs: Tensor) -> Tensor:
    """Returns the gradient of logits (N, V), ``g_j - q_j sum_k g_k``, from ``grad``, that of their log-probabilities.

    For the largest class it is ``(1 - q_j) g_j - q_j sum g`` with the sum over the others: if q is close to 1, the
    gradient is rounded relative to 1 - q."""
    largest, nothing = largest_of(log_probs), torch.zeros_like(grad)
    others = torch.where(largest, nothing, grad).sum(1, keepdim=True).expand_as(grad)
    own = torch.where(largest, grad, nothing).sum(1, keepdim=True)
    of_largest = -times(grad, log_probs.expm1()) - times(others, log_probs.exp())
    return torch.where(largest, of_largest, grad - times(others + own, log_probs.exp()))


class _Normalize(torch.autograd.Function):
    """Computes :func:`normalize`, with a gradient of 0 for rows whose ``grad_output`` is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tuple[Tensor, Tensor]:
        return _normalized(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, grad_lse: Tensor, grad: Tensor) -> Tensor:
        log_probs, = ctx.saved_tensors
        return of_log_probs(grad, log_probs) + times(grad_lse[:, None].expand_as(grad), log_probs.exp())

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tuple[Tensor, Tensor]:
        log_probs, = ctx.saved_tensors
        probs, nothing = log_probs.exp(), torch.zeros_like(tangent)
        # Relative to the tangent of the largest class, whose q of nearly 1 would hide the others' in the mean.
        relative = tangent - torch.where(largest_of(log_probs), tangent, nothing).sum(1, keepdim=True)
        return times(tangent, probs).sum(1), relative - times(relative, probs).sum(1, keepdim=True)
