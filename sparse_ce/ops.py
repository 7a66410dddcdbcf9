"""Where this package's ops meet ``torch.library``: loads the kernels and gives them autograd and shape functions.

``torch.ops.sparse_ce.forward`` has a Python kernel on the Autograd key. It runs the composite of ``reference.py`` where
only plain PyTorch ops can follow (``torch.func`` transforms, forward-mode AD, devices without kernels of ours), an
``autograd.Function`` where a gradient is needed, and the C++ kernel alone otherwise. ``backward`` is itself an op:
its Autograd kernel is the composite, which makes second derivatives right.
"""

import functools
import glob
import os
from typing import Optional, Tuple

import torch
from torch import Tensor

from . import foresight, reference

_ops = torch.ops.sparse_ce
_validates = os.environ.get("SPARSE_CE_VALIDATE", "").startswith("1")


def _load(name: str) -> Optional[str]:
    """Loads one library of the package; returns why it could not be loaded, or None."""
    found = glob.glob(os.path.join(os.path.dirname(__file__), name + ".*so"))
    if not found:
        return f"{name} was not built"
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        return str(error)
    return None


def _load_all() -> Optional[str]:
    reason = _load("_C")
    if reason:
        raise ImportError(f"sparse_ce: the compiled library must be loadable under torch {torch.__version__}, "
                          f"got: {reason}. Install it (pip install .) and run from outside of the source tree, which "
                          "hides the installed package.")
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return _load("_C_cuda")


why_no_cuda = _load_all()
"""None where the CUDA kernels are loaded, else the reason why they are not."""


def _composite(logits: Tensor) -> bool:
    """Whether only a composition of PyTorch's own ops can follow: functorch, a dual level, a foreign device."""
    return (torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
            or logits.device.type not in ("cpu", "cuda", "meta"))


def _batched(grad: Tensor) -> bool:
    """Whether a gradient stands for several: under ``torch.func.vmap`` or ``is_grads_batched``."""
    return torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(grad)


def _needs_grad(*tensors: Optional[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _CrossEntropy(torch.autograd.Function):
    """(loss, lse), or (mean, lse), with the gradient for logits and for the values of the entries."""

    @staticmethod
    def forward(ctx, logits, indices, values, offsets, weight, row_mask, options, inplace_backward, mean, normalizer):
        target, divisor, upstream, gradient = (indices, values, offsets, weight, row_mask), None, None, None
        ctx.foresee = mean and logits.is_cpu and ctx.needs_input_grad[0] and not inplace_backward
        if ctx.foresee:
            upstream = foresight.forecast("cross_entropy", logits.device, reference.arithmetic_dtype(logits.dtype))
        with torch._C._AutoDispatchBelowAutograd():
            if upstream is not None:
                loss, divisor, lse, lse_residual, gradient = _ops.forward_with_gradient(
                    upstream, normalizer, logits, *target, *options)
            else:
                loss, lse, lse_residual = _ops.forward_with_residual(logits, *target, *options)
                if mean:
                    loss, divisor = _ops.loss_mean(loss, normalizer, *target, options[0])
        ctx.save_for_backward(logits, *target, lse, lse_residual, divisor)
        ctx.options, ctx.inplace_backward, ctx.made = options, inplace_backward, (upstream, gradient)
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx, grad_loss, grad_lse):
        logits, indices, values, offsets, weight, row_mask, lse, lse_residual, divisor = ctx.saved_tensors
        target = (indices, values, offsets, weight, row_mask, *ctx.options)
        grad_logits = grad_values = None
        once = not torch.is_grad_enabled()
        (upstream, gradient), ctx.made = ctx.made, (None, None)  # handed out once: its new owner may overwrite it
        if grad_loss is None:
            if grad_lse is None:
                return (None,) * 10
            grad_loss = torch.zeros_like(grad_lse)
        elif divisor is not None:
            if ctx.foresee and once and grad_lse is None and _eager() and not _batched(grad_loss):
                foresight.remember("cross_entropy", grad_loss)
                if upstream is not None and torch.equal(upstream, grad_loss):
                    grad_logits = gradient
            grad_loss = (grad_loss / divisor).expand(lse.shape)
        if ctx.needs_input_grad[2]:
            grad_values = _ops.backward_values(grad_loss, logits, lse, lse_residual, *target).to(values.dtype)
        if ctx.needs_input_grad[0] and grad_logits is None:
            if once and ctx.inplace_backward:
                grad_logits = logits.detach()
                _backward_counted(grad_loss, grad_lse, grad_logits, lse, lse_residual, *target)
            elif once and _eager():
                with torch._C._AutoDispatchBelowAutograd():
                    grad_logits = _ops.backward(grad_loss, grad_lse, logits, lse, lse_residual, *target)
            else:
                grad_logits = _ops.backward(grad_loss, grad_lse, logits, lse, lse_residual, *target)
        return grad_logits, None, grad_values, *(None,) * 7


def _forward_autograd(logits, indices, values=None, offsets=None, weight=None, row_mask=None, *options,
                      inplace_backward=False, mean=False, normalizer=None):
    target = (indices, values, offsets, weight, row_mask)
    if _composite(logits):
        loss, lse = reference.forward(logits, *target, *options)
        if mean:
            loss, _ = reference.mean(loss, normalizer, *target, options[0])
        return loss, lse
    if _needs_grad(logits, values, weight):
        if weight is not None and weight.requires_grad:
            raise RuntimeError("sparse_ce: weight must be a tensor that does not require grad, got one that does; "
                               "pass weight.detach()")
        return _CrossEntropy.apply(logits, *target, options, inplace_backward, mean, normalizer)
    with torch._C._AutoDispatchBelowAutograd():
        loss, lse = _ops.forward(logits, *target, *options)
        if mean:
            loss, _ = _ops.loss_mean(loss, normalizer, *target, options[0])
        return loss, lse


class _Mean(torch.autograd.Function):

    @staticmethod
    def forward(ctx, loss, *target):
        with torch._C._AutoDispatchBelowAutograd():
            mean, divisor = _ops.loss_mean(loss, *target)
        ctx.save_for_backward(divisor)
        ctx.mark_non_differentiable(divisor)
        ctx.rows, ctx.arguments = loss.shape, 1 + len(target)
        return mean, divisor

    @staticmethod
    def backward(ctx, grad_mean, _):
        divisor, = ctx.saved_tensors
        return (grad_mean / divisor).expand(ctx.rows), *(None,) * (ctx.arguments - 1)


def _mean_autograd(loss, normalizer, indices, *rest):
    if _composite(loss):
        return reference.mean(loss, normalizer, indices, *rest)
    if _needs_grad(loss):
        return _Mean.apply(loss, normalizer, indices, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.loss_mean(loss, normalizer, indices, *rest)


def _backward_autograd(grad_loss, grad_lse, logits, lse, lse_residual, indices, values=None, *rest):
    if _composite(logits) or _needs_grad(grad_loss, grad_lse, logits, values):
        return reference.backward(grad_loss, grad_lse, logits, lse, lse_residual, indices, values, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.backward(grad_loss, grad_lse, logits, lse, lse_residual, indices, values, *rest)


def _backward_values_autograd(grad_loss, logits, lse, lse_residual, indices, values=None, *rest):
    if _composite(logits) or _needs_grad(grad_loss, logits, values):
        return reference.backward_values(grad_loss, logits, lse, lse_residual, indices, values, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.backward_values(grad_loss, logits, lse, lse_residual, indices, values, *rest)


class _SparseSoftmax(torch.autograd.Function):

    @staticmethod
    def forward(ctx, values, offsets, order, log):
        with torch._C._AutoDispatchBelowAutograd():
            output = _ops.sparse_softmax(values, offsets, order, log)
        ctx.save_for_backward(output, offsets, order)
        ctx.log = log
        return output

    @staticmethod
    def backward(ctx, grad):
        output, offsets, order = ctx.saved_tensors
        return _ops.sparse_softmax_backward(grad, output, offsets, order, ctx.log), None, None, None


def _sparse_softmax_autograd(values, offsets, order, log):
    if _composite(values):
        return reference.sparse_softmax(values, offsets, order, log)
    if _needs_grad(values):
        return _SparseSoftmax.apply(values, offsets, order, log)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.sparse_softmax(values, offsets, order, log)


def _sparse_softmax_backward_autograd(grad, output, offsets, order, log):
    if _composite(output) or _needs_grad(grad, output):
        return reference.sparse_softmax_backward(grad, output, offsets, order, log)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.sparse_softmax_backward(grad, output, offsets, order, log)


def _backward_counted(grad_loss, grad_lse, logits, *rest):
    """Whoever saved these logits, a second backward included, gets autograd's own error afterwards."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _ops.backward_(grad_loss, grad_lse, logits, *rest)
    torch.autograd.graph.increment_version(logits)


_library = torch.library.Library("sparse_ce", "IMPL")
_library.impl("backward_", _backward_counted, "ADInplaceOrView")
_library.impl("forward", _forward_autograd, "Autograd")
_library.impl("backward", _backward_autograd, "Autograd")
_library.impl("backward_values", _backward_values_autograd, "Autograd")
_library.impl("loss_mean", _mean_autograd, "Autograd")
_library.impl("sparse_softmax", _sparse_softmax_autograd, "Autograd")
_library.impl("sparse_softmax_backward", _sparse_softmax_backward_autograd, "Autograd")


def _register_fake(name: str):
    """``torch.library.register_fake`` of an op. PyTorch calls the shape function for real where one tensor is on "meta"
    and the others are not: without the check, memory that nobody wrote would be the result."""
    names = [argument.name for argument in getattr(_ops, name).default._schema.arguments]

    def checked(f):
        @functools.wraps(f)
        def fake(*args, **kwargs):
            tensors = {n: t for n, t in (*zip(names, args), *kwargs.items()) if isinstance(t, Tensor)}
            like = next((n for n in ("logits", "input") if n in tensors), next(iter(tensors)))
            for n, t in tensors.items():
                if t.device != tensors[like].device:
                    raise RuntimeError(f"sparse_ce: {n} must be on the device of {like}, {tensors[like].device}, got "
                                       f"{t.device}")
            return f(*args, **kwargs)

        return torch.library.register_fake(f"sparse_ce::{name}", fake)

    return checked


def _per_row(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=reference.arithmetic_dtype(logits.dtype))


@_register_fake("forward")
def _(logits, indices, *args, **kwargs):
    return _per_row(logits), _per_row(logits)


@_register_fake("forward_with_residual")
def _(logits, indices, *args, **kwargs):
    return _per_row(logits), _per_row(logits), _per_row(logits)


@_register_fake("forward_with_gradient")
def _(grad_mean, normalizer, logits, indices, *args, **kwargs):
    scalar = torch.empty_like(grad_mean)
    return scalar, torch.empty_like(scalar), _per_row(logits), _per_row(logits), logits.new_empty(logits.shape)


@_register_fake("backward")
def _(grad_loss, grad_lse, logits, lse, lse_residual, indices, *args, **kwargs):
    return logits.new_empty(logits.shape)


@_register_fake("backward_")
def _(grad_loss, grad_lse, logits, lse, lse_residual, indices, *args, **kwargs):
    return None


@_register_fake("backward_values")
def _(grad_loss, logits, lse, lse_residual, indices, *args, **kwargs):
    return indices.new_empty(indices.shape, dtype=reference.arithmetic_dtype(logits.dtype))


@_register_fake("loss_mean")
def _(loss, normalizer, indices, *args, **kwargs):
    return loss.new_empty(()), loss.new_empty(())


@_register_fake("sparse_softmax")
def _(values, offsets, order, log):
    return values.new_empty(values.shape)


@_register_fake("sparse_softmax_backward")
def _(grad, output, offsets, order, log):
    return output.new_empty(output.shape)


def _eager() -> bool:
    """Whether nobody traces this call: then the dispatcher's way to the Autograd kernel (20 us) can be skipped."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def may_look_at(t: Tensor) -> bool:
    """Whether the values of ``t`` are there to be checked: in eager mode, on the host, or on a GPU that may be waited
    for."""
    if not _eager() or torch._C._are_functorch_transforms_active():
        return False
    return t.is_cpu or t.is_cuda and _validates and not torch.cuda.is_current_stream_capturing()


def cross_entropy(logits: Tensor, indices: Tensor, values: Optional[Tensor], offsets: Optional[Tensor],
                  weight: Optional[Tensor], row_mask: Optional[Tensor], options: tuple,
                  inplace_backward: bool, mean: bool, normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.forward``, with the choices of a loss that is the mean already (``normalizer``, (), divides
    instead of the count of rows) and of a gradient that overwrites the logits.

    Under ``torch.compile`` and functorch the gradient is a fresh tensor: their graphs do not let a backward write to an
    input. So it is for logits whose rows overlap or whose columns are strided.
    """
    if not _eager():
        loss, lse = _ops.forward(logits, indices, values, offsets, weight, row_mask, *options)
        if mean:
            loss, _ = _ops.loss_mean(loss, normalizer, indices, values, offsets, weight, row_mask, options[0])
        return loss, lse
    writable = logits.stride(1) == 1 and (logits.shape[0] <= 1 or logits.stride(0) >= logits.shape[1])
    return _forward_autograd(logits, indices, values, offsets, weight, row_mask, *options,
                             inplace_backward=inplace_backward and writable, mean=mean, normalizer=normalizer)


def instruction_set() -> str:
    """The CPU kernels' path: ``"avx512"``, ``"avx2"`` or ``"default"``."""
    return _ops.cpu_instruction_set()


def cuda_architectures() -> str:
    """The architectures that the CUDA kernels were compiled for, e.g. ``"8.0;9.0+PTX"``."""
    return _ops.cuda_architectures()
