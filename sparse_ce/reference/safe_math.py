"""Products and softmaxes whose derivatives are 0 where nobody asks for them, whatever the other factor holds."""

from typing import Any, Tuple

import torch
from torch import Tensor


def _inside_a_kernel() -> bool:
    """Whether functorch has called a kernel (an op of ``torch.ops``, stock.py): there it knows no ``Function``."""
    if torch.compiler.is_dynamo_compiling():  # it does not look into kernels, nor can it follow the question
        return False
    return (torch._C._functorch.peek_interpreter_stack() is not None and
            torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode))


class _TracedTimes(torch.autograd.Function):
    """``a * b``, 0 where ``a`` is 0 whatever ``b`` holds; so are its derivatives where the upstream gradient is 0. For
    torch.compile, which cannot follow a ``jvp``."""

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
    """The same for all others."""

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
    """Of tensors of one shape."""
    product: Tensor = (_TracedTimes if torch.compiler.is_compiling() else _Times).apply(a, b)
    return product


def times(a: Tensor, b: Tensor) -> Tensor:
    """``a * b`` of what may be NaN or infinite by what is 0 where nobody asks for it: then 0."""
    if _inside_a_kernel():
        return torch.where(a == 0, 0.0, a * b)
    return _product(*torch.broadcast_tensors(a, b))


def softcapped(z: Tensor, softcap: float) -> Tensor:
    """``softcap * tanh(z / softcap)``."""
    if _inside_a_kernel():
        return softcap * torch.tanh(z / softcap)
    capped: Tensor = _Softcapped.apply(z, softcap)
    return capped


def slope_of_cap(capped: Tensor, softcap: float) -> Tensor:
    """Returns the derivative of :func:`softcapped` from its result. The differences keep the digits of a slope near 0,
    which ``1 - tanh ** 2`` loses."""
    return (softcap - capped) / softcap * ((softcap + capped) / softcap)


class _Softcapped(torch.autograd.Function):
    """0 where the upstream gradient, or the tangent, is 0, whatever ``z`` holds."""

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


def normalize(z: Tensor) -> Tuple[Tensor, Tensor]:
    """(lse (N,), log-probabilities (N, V)) of z (N, V)."""
    if _inside_a_kernel():
        return torch.logsumexp(z, 1), torch.log_softmax(z, 1)
    normalized: Tuple[Tensor, Tensor] = _Normalize.apply(z)
    return normalized


class _Normalize(torch.autograd.Function):
    """z (N, V) -> (lse (N,), log-probabilities (N, V)), with a gradient of 0 for a row whose upstream gradients are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tuple[Tensor, Tensor]:
        return torch.logsumexp(z, 1), torch.log_softmax(z, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, grad_lse: Tensor, grad: Tensor) -> Tensor:
        log_probs, = ctx.saved_tensors
        # PyTorch's own derivative, which rounds less than a composition, but not of a NaN that nobody asks for.
        dead = grad.eq(0).all(1, keepdim=True) & log_probs.isnan().any(1, keepdim=True)
        through = torch.ops.aten._log_softmax_backward_data(grad, log_probs, 1, log_probs.dtype)
        return torch.where(dead, 0.0, through) + times(grad_lse[:, None], log_probs.exp())

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tuple[Tensor, Tensor]:
        log_probs, = ctx.saved_tensors
        mean = times(tangent, log_probs.exp()).sum(1)
        return mean, tangent - mean[:, None]
