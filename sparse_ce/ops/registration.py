"""Registers autograd and shape functions of the package's ops with ``torch.library``.

The Autograd kernel of an op runs one of three implementations:

- its composition in ``reference/`` if only plain PyTorch ops are supported (``torch.func`` transforms, forward-mode AD,
  devices without kernels)
- an ``autograd.Function`` if a gradient is needed
- the C++ kernel alone otherwise

The backward of an op is itself an op. If it is differentiated, its composition makes second derivatives correct.
"""

import functools
import os
from typing import Any, Callable, Optional, Tuple, Type, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _ops, reference
from .._core.arguments import arithmetic_dtype
from .._core.errors import fail
from .._core.tracing import eager
from .._ops import add_op_namespace_prefix
from .._schema import Bound

ops = _ops.ops
_F = TypeVar("_F", bound=Callable[..., Any])

_wish = os.environ.get("SPARSE_CE_CPU", "")
if _wish not in ("", "avx2", "avx512", "default"):  # the kernels would use "default", the slowest
    fail(f"SPARSE_CE_CPU must be 'avx2', 'avx512', 'default' or not set, got {_wish!r}")

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
_library = torch.library.Library(NAMESPACE, "IMPL")


def has_kernel(name: str, key: str) -> bool:
    """Returns True if an op has a kernel for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(name), key)


cpu_library: str
why_no_cuda: Optional[str]
if hasattr(_ops, "cpu_library"):
    cpu_library, why_no_cuda, _fix = _ops.cpu_library, _ops.why_no_cuda, "reinstall sparse_ce with nvcc on the PATH"
else:  # The builder of Hugging Face kernels has replaced _ops.py. The library is a module, named like the namespace.
    cpu_library = getattr(_ops, NAMESPACE).__file__
    why_no_cuda = None if has_kernel("forward", "CUDA") else "this Hugging Face kernel was built for CPUs"
    _fix = "call get_kernel without backend='cpu'"


def check_kernels(input: Tensor) -> None:
    if input.is_cuda and why_no_cuda is not None:
        fail(f"input must be on a device with kernels, got a CUDA tensor, but {why_no_cuda}; {_fix}", RuntimeError)


def instruction_set() -> str:
    """Returns the instruction set of the CPU kernels: ``"avx512"``, ``"avx2"`` or ``"default"``."""
    return str(ops.cpu_instruction_set())


def cuda_architectures() -> str:
    """Returns the architectures that the CUDA kernels were compiled for, e.g. ``"8.0;9.0+PTX"``."""
    return str(ops.cuda_architectures())


# ----------------------------------------------------------------------------------------------------------- exceptions

def as_pytorch_raises(error: Optional[BaseException]) -> None:
    """Raises ``torch.OutOfMemoryError`` if ``error`` is a kernel's failed allocation on a GPU. The ABI of the kernels
    passes only its text."""
    if type(error) is RuntimeError and str(error).startswith("CUDA out of memory."):
        raise torch.OutOfMemoryError(str(error)).with_traceback(error.__traceback__) from None


class below_autograd(torch._C._AutoDispatchBelowAutograd):
    """Calls an op's kernel below its Autograd kernel."""

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        as_pytorch_raises(raised[1])


def _refuse_none(name: str, arguments: Tuple[Any, ...]) -> None:
    for argument, value in zip(getattr(ops, name).default._schema.arguments, arguments):
        if value is None and str(argument.type) == "Tensor":
            fail(f"{argument.name} must be a tensor, got None", TypeError)


# ----------------------------------------------------------------------------------------------------- differentiation

_transforms = torch._C._are_functorch_transforms_active


def composite(t: Tensor) -> bool:
    """Returns True if only a composition of PyTorch's own ops is supported: under functorch, in a dual level, on other
    devices."""
    return (_transforms() or forward_ad._current_level >= 0
            or not t.is_cpu and not t.is_cuda and t.device.type not in ("cpu", "cuda", "meta"))


def batched(*grads: Optional[Tensor]) -> bool:
    """Returns True if a gradient stands for several, under ``torch.func.vmap`` or ``is_grads_batched``."""
    if torch.compiler.is_compiling():
        return False
    if _transforms():
        return True
    for grad in grads:
        if grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad):
            return True
    return False


def is_last(*grads: Optional[Tensor]) -> bool:
    """Returns True if there is no second derivative and only one gradient at a time."""
    return not torch.is_grad_enabled() and eager() and not batched(*grads)


def needs_grad(*arguments: object) -> bool:
    if torch.is_grad_enabled():
        for t in arguments:
            if t is not None and isinstance(t, Tensor) and t.requires_grad:
                return True
    return False


# --------------------------------------------------------------------------------------------------------- registration

def register_autograd(name: str) -> Callable[[_F], _F]:
    """Registers the decorated function as the Autograd kernel of an op."""
    def register(f: _F) -> _F:
        @functools.wraps(f)
        def kernel(*arguments: Any, **kwargs: Any) -> Any:
            try:
                return f(*arguments, **kwargs)
            except (AttributeError, TypeError, ValueError):  # the dispatcher accepts None for any tensor
                _refuse_none(name, arguments)
                raise

        _library.impl(name, kernel, "Autograd")
        return f
    return register


def register_composition(name: str, kernel: Callable[..., Any]) -> None:
    """Registers the kernel of an op that is composed of other ops."""
    _library.impl(name, kernel, "CompositeExplicitAutograd")


def register_differentiable(name: str, function: Type[torch.autograd.Function]) -> Callable[..., Any]:
    """Registers ``function`` as the derivative of an op for its first argument. Returns the op's Autograd kernel."""
    op, plain = getattr(ops, name), getattr(reference, name)

    @register_autograd(name)
    def kernel(first: Tensor, *others: Any) -> Any:
        if composite(first):
            return plain(first, *others)
        if needs_grad(first):
            return function.apply(first, *others)
        with below_autograd():
            return op(first, *others)

    return kernel


def register_backward(name: str) -> Callable[..., Any]:
    """Registers the composition of an op that is a backward, for the case that it is differentiated itself. Returns the
    op's Autograd kernel."""
    op, plain = getattr(ops, name), getattr(reference, name)

    @register_autograd(name)
    def kernel(*arguments: Any) -> Any:
        if composite(next(t for t in arguments if t is not None)) or needs_grad(*arguments):
            return plain(*arguments)
        with below_autograd():
            return op(*arguments)

    return kernel


def register_in_place(name: str, written: str, fake: Callable[..., Any] = lambda *args, **kwargs: None,
                      ) -> Callable[..., Any]:
    """Registers an op that overwrites its argument ``written``, and returns its kernel.

    Other functions that saved the argument, a second backward included, then raise autograd's own error. ``fake`` is
    the shape function of the op's outputs.
    """
    op = getattr(ops, name)
    at = [argument.name for argument in op.default._schema.arguments].index(written)

    def counted(*arguments: Any) -> Any:
        if arguments[at] is None:
            fail(f"{written} must be a tensor, got None", TypeError)
        try:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                out = op(*arguments)
        except RuntimeError as error:
            as_pytorch_raises(error)
            raise
        torch.autograd.graph.increment_version(arguments[at])
        return out

    _library.impl(name, counted, "ADInplaceOrView")
    register_fake(name)(fake)
    return counted


def register_fake(name: str) -> Callable[[_F], _F]:
    """Registers the shape function of an op, with a check that all tensors are on one device.

    PyTorch also calls the shape function if only one tensor is on "meta". Without the check the result would be
    uninitialized memory.
    """
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]

    def register(f: _F) -> _F:
        @functools.wraps(f)
        def fake(*args: Any, **kwargs: Any) -> Any:
            tensors = {n: t for n, t in (*zip(names, args), *kwargs.items()) if isinstance(t, Tensor)}
            like = next((n for n in ("logits", "input") if n in tensors), next(iter(tensors)))
            for n, t in tensors.items():
                if t.device != tensors[like].device:
                    fail(f"{n} must be on the device of {like}, {tensors[like].device}, got {t.device}", RuntimeError)
            return f(*args, **kwargs)

        torch.library.register_fake(add_op_namespace_prefix(name), fake)
        return f

    return register


def register_fake_rows(*names: str) -> None:
    """Registers the shape functions of ops whose outputs are all (rows,), in the arithmetic dtype of their first
    tensor."""
    for name in names:
        results = len(getattr(ops, name).default._schema.returns)

        @register_fake(name)
        def _(like: Tensor, *args: Any, results: int = results, **kwargs: Any) -> Tuple[Tensor, ...]:
            return tuple(per_row(like) for _ in range(results))


def per_row(like: Tensor) -> Tensor:
    """Returns an empty tensor (rows,) of the arithmetic dtype, for shape functions. ``like`` is (rows, ...) or logits
    (outer, inner, classes)."""
    rows = like.shape[0] * like.shape[1] if like.dim() == 3 else like.shape[0]
    return like.new_empty(rows, dtype=arithmetic_dtype(like.dtype))


def fake_gradients(given: Bound) -> Tuple[Tensor, ...]:
    """Returns empty gradients for the head, and for values if the op has that flag; (0,) if not requested."""
    input: Tensor = given["input"]
    likes = {"input": input, "weight": given["linear_weight"], "bias": given["linear_bias"]}
    if "values_grad" in given:
        likes["values"] = given["indices"].to(arithmetic_dtype(input.dtype))
    return tuple(input.new_empty(0) if like is None or not needed else like.new_empty(like.shape)
                 for like, needed in zip(likes.values(), given.flags(*likes)))
