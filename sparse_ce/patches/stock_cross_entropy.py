"""Supports sparse targets in stock PyTorch: adds a missing kernel, and runs its cross entropy on the package's kernels.

Importing this file adds the kernel. ``aten::_log_softmax_backward_data`` has none for sparse COO gradients, which is
why ``nn.CrossEntropyLoss()(logits, coo).backward()`` fails. A PyTorch that has the kernel keeps its own.

:func:`enable_stock` also sends stock cross entropy with a sparse target through the fused kernels.
"""

import threading
from collections import deque
from functools import partial
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import NO_MARK, arithmetic_dtype
from .._core.errors import check, fail
from .._core.handles import Handle
from ..functional.losses import cross_entropy
from ..functional.outputs import Reduction
from ..functional.softmax import csr_softmax, csr_softmax_backward
from ..ops.registration import ops, why_no_cuda
from ..targets.sparse_target import SparseTarget

# If the package has no CUDA kernels, PyTorch's own errors remain.
_DEVICES = ("CPU",) if why_no_cuda else ("CPU", "CUDA")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_hooks_are_enabled: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled")
_lock = threading.RLock()


def _along(coo: Tensor, dim: int) -> SparseTarget:
    """Returns the elements of a COO tensor, hybrid or not, as entries with dimension ``dim`` as their classes, without
    a graph."""
    positions, values, sizes = coo._indices(), coo._values().detach(), list(coo.shape)
    if coo.dense_dim():  # each element of a value becomes an entry
        inner = torch.meshgrid([torch.arange(n, device=values.device) for n in values.shape[1:]], indexing="ij")
        positions = torch.cat((positions.repeat_interleave(inner[0].numel(), 1),
                               torch.stack(inner).flatten(1).repeat(1, values.shape[0])))
        values = values.reshape(-1)
    # With three sparse dimensions, permute keeps is_coalesced() although the entries are out of order.
    in_order = coo.is_coalesced() and coo.sparse_dim() <= 2 and dim == len(sizes) - 1
    if dim != len(sizes) - 1:
        sizes.append(sizes.pop(dim))
        axes = list(positions.unbind())
        axes.append(axes.pop(dim))
        positions = torch.stack(axes)
    return SparseTarget.from_coo(
        torch.sparse_coo_tensor(positions, values, sizes, is_coalesced=in_order, check_invariants=False))


# ------------------------------------------------------------------------------------------------- the missing kernel

def _log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Computes ``g - exp(output) * g.sum(dim, keepdim=True)``, strided, for a COO ``grad_output`` g and a strided
    ``output``.

    The gradient of a cross entropy is ``a * exp(z - lse) - d * w``. With z = ``output``, lse = 0, w = g and a
    ``grad_output`` of -1 it equals this one.
    """
    # PyTorch's own derivative of this op multiplies a COO column by a matrix, which torch.mul computes wrongly.
    # torch.func transforms are not visible here, but they disable hooks on saved tensors.
    if (torch.is_grad_enabled() and (grad_output.requires_grad or output.requires_grad)
            or not _hooks_are_enabled()):
        fail("backward through a sparse COO target must not be differentiated, got create_graph=True or torch.func; "
             "call enable_stock() or use sparse_ce.cross_entropy", NotImplementedError)
    if grad_output.layout != torch.sparse_coo or output.layout != torch.strided:
        fail(f"grad_output must be sparse COO and output strided, got {grad_output.layout} and {output.layout}",
             NotImplementedError)
    check(grad_output.shape == output.shape, f"grad_output must have the shape of output, {list(output.shape)}, got "
           f"{list(grad_output.shape)}", RuntimeError)
    last = (output if output.dim() else output[None]).movedim(dim, -1)
    if last.numel() == 0:
        return torch.empty_like(output, dtype=input_dtype)
    if output.dim() == 0:
        grad_output = grad_output[None]
    rows = last.reshape(-1, last.shape[-1])
    entries = _along(grad_output, dim % last.dim()).flatten()
    lse = rows.new_zeros(rows.shape[0], dtype=arithmetic_dtype(rows.dtype))
    grad = ops.backward(lse - 1, None, rows, lse, None, entries.indices, entries.values,
                        entries.offsets, ignore_index=NO_MARK)
    grad_input: Tensor = grad.view(last.shape).movedim(-1, dim).reshape(output.shape).to(input_dtype)
    return grad_input


_HOLES = {  # keys: op, and dispatch key of the layout
    ("aten::_log_softmax_backward_data", "Sparse"): _log_softmax_backward,
    ("aten::_sparse_softmax", "SparseCsr"): partial(csr_softmax, log=False),
    ("aten::_sparse_softmax_backward_data", "SparseCsr"): partial(csr_softmax_backward, log=False),
    ("aten::_sparse_log_softmax", "SparseCsr"): partial(csr_softmax, log=True),
    ("aten::_sparse_log_softmax_backward_data", "SparseCsr"): partial(csr_softmax_backward, log=True),
}
_filling: Optional[torch.library.Library] = None


def fill_holes() -> None:
    """Registers the missing kernels unless PyTorch has them. Importing the package calls it."""
    global _filling
    with _lock:
        if _filling is None:
            _filling = torch.library.Library("aten", "IMPL")
            for (op, layout), kernel in _HOLES.items():
                for device in _DEVICES:
                    if not torch._C._dispatch_has_kernel_for_dispatch_key(op, layout + device):
                        _filling.impl(op.removeprefix("aten::"), kernel, layout + device)


def reopen_holes() -> None:
    """Restores PyTorch as it was before :func:`fill_holes`."""
    global _filling
    with _lock:
        if _filling is not None:
            _filling._destroy()
            _filling = None


# ------------------------------------------------------------------------------------------- stock cross entropy, fused

_LOSS = "aten::cross_entropy_loss"
# A composition, which is the same for every key. For this key no copy of the package registers a kernel.
_stock = torch.library.get_kernel(_LOSS, "AutogradMeta").call_boxed
_ANY_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
_REDUCTIONS: Dict[int, Reduction] = {0: "none", 1: "mean", 2: "sum"}  # ATen's numbers
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
# In inference mode a call skips the Autograd keys, and the target's layout selects the kernel.
_KEYS = [prefix + device for device in _DEVICES for prefix in ("Autograd", "Sparse", "SparseCsr")]


def _cross_entropy_loss(input: Tensor, target: Tensor, *options: Any) -> Any:
    """Implements ``aten::cross_entropy_loss``. Every dense call passes through it, so it does nothing that can be done
    later."""
    if target.layout not in _LAYOUTS or input.layout != torch.strided:
        return _stock(_ANY_KEYS, input, target, *options)
    return _with_sparse_target(input, target, *options)


def _with_sparse_target(input: Tensor, target: Tensor, weight: Optional[Tensor] = None, reduction: int = 1,
                        ignore_index: int = -100, label_smoothing: float = 0.0) -> Any:
    """Computes the loss of input and target, (C,), (N, C) or (N, C, d1, ...), with weight (C,)."""
    if not _fusible(input, target, weight, reduction, ignore_index, label_smoothing):
        # A dense target gives PyTorch's own values, gradients and errors.
        return _stock(_ANY_KEYS, input, target.to_dense(), weight, reduction, ignore_index, label_smoothing)
    classes = _class_dim(input)
    if target.layout == torch.sparse_csr and target.dim() == 2:
        entries = SparseTarget.from_csr(target.detach())
    else:
        entries = _along(target if target.layout == torch.sparse_coo else target.detach().to_sparse(), classes)
    loss = cross_entropy(input.movedim(classes, -1), entries, None if weight is None else weight.detach(),
                         ignore_index=NO_MARK, reduction=_REDUCTIONS[reduction],
                         label_smoothing=max(0.0, label_smoothing))
    return loss.to(_result_dtype(input, target, weight))


def _class_dim(input: Tensor) -> int:
    return 0 if input.dim() == 1 else 1


def _fusible(input: Tensor, target: Tensor, weight: Optional[Tensor], reduction: int, ignore_index: int,
             label_smoothing: float) -> bool:
    """Returns True if the fused kernels give the same result as stock. If not, stock raises an error or has a gradient
    that they lack."""
    tensors = (input, target) if weight is None else (input, target, weight)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors[1:]):
        return False  # stock has gradients for the class weights, and for entries of probability 0
    return (all(t.dtype in _FLOATING and t.device == input.device for t in tensors)
            and target.shape == input.shape and input.dim() > 0 and input.numel() > 0 and target.dense_dim() == 0
            and (weight is None or weight.layout == torch.strided and weight.shape == (input.shape[_class_dim(input)],))
            and reduction in _REDUCTIONS and ignore_index < 0 and label_smoothing <= 1)


def _result_dtype(input: Tensor, target: Tensor, weight: Optional[Tensor]) -> torch.dtype:
    """Returns the dtype of stock's ``(log_softmax(input) * target * weight).sum()``."""
    dtype = torch.promote_types(input.dtype, target.dtype)
    if weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    # Autocast on CUDA does not cast log_softmax here and sums in float32; on a CPU it has already cast the arguments.
    if dtype != torch.float64 and input.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return dtype


_open: List[Handle] = []
_route: Optional[torch.library.Library] = None
# A kernel must outlive its registration: another thread may have looked it up and wait for the GIL to run it.
_retired: Deque[Any] = deque(maxlen=1024)


def enable_stock() -> Handle:
    """Sends stock ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` with a sparse target through the fused kernels.

    Targets are COO, CSR or CSC tensors of class probabilities in the shape of the input, with PyTorch's class
    dimension: (C,), (N, C), (N, C, d1, ...). All of PyTorch's options are supported. Values, gradients, dtypes and
    errors are those of ``F.cross_entropy(input, target.to_dense(), ...)``. The only difference is that a logit of -inf
    with target 0 adds 0 instead of NaN.

    - If the kernels do not support a call, the target is made dense. This applies to gradients for target or class
      weights, hybrid targets and empty inputs.
    - A call with a dense target returns stock's bits and takes 6 us longer (2.5 GHz Xeon).
    - Under ``torch.compile``, a function with a sparse tensor runs eagerly, or raises an error with ``fullgraph=True``.
    - Under ``torch.func``, ``grad`` and ``jvp`` support COO targets, but neither CSR nor CSC. ``vmap`` uses PyTorch's
      own implementation.

    Class indices are a dense target and stay PyTorch's: for one loss with every target use
    :class:`sparse_ce.SparseCrossEntropyLoss`.

    The setting applies to all threads of the process. It lasts until the handle of each call has been removed.

    Returns:
        A handle. ``handle.remove()``, or the end of ``with sparse_ce.enable_stock(): ...``, undoes this call only.

    Raises:
        RuntimeError: if another library has registered a kernel for the same op.

    Examples:
        >>> logits = torch.zeros(2, 3, requires_grad=True)
        >>> coo = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 1]], [1.0, 0.5, 0.5], (2, 3))
        >>> with sparse_ce.enable_stock():
        ...     torch.nn.CrossEntropyLoss()(logits, coo).backward()
        ...
        >>> logits.grad
        tensor([[ 0.1667,  0.1667, -0.3333],
                [-0.0833, -0.0833,  0.1667]])
    """
    return Handle(_open, _shared()[0], _update_route)


def _shared() -> Tuple[Any, List[Callable[[bool], None]]]:
    """Returns what all copies of this package in a process share: a lock, and the copies that extend stock cross
    entropy, see :func:`_update_route`."""
    shared: Tuple[Any, List[Any]] = vars(torch.library).setdefault("_sparse_ce_stock", (threading.RLock(), []))
    return shared


def _update_route() -> None:
    """Adds this copy of the package to the copies that extend stock cross entropy, or removes it, according to
    ``_open``. The caller must hold the lock.

    A process may have several copies, such as an installed one and one from the Hugging Face Hub. Only the first in the
    list has registered its kernels. When it is removed, the next one registers its own."""
    copies = _shared()[1]
    if _open and _register not in copies:
        if not copies:
            _register(True)
        copies.append(_register)
    elif not _open and _register in copies:
        was_first = copies.index(_register) == 0
        copies.remove(_register)
        if was_first:
            _register(False)
            if copies:
                copies[0](True)


def _register(on: bool) -> None:
    """Registers or removes the kernels."""
    global _route
    if on:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        check(has_kernel(_LOSS, "CompositeImplicitAutograd"), f"{_LOSS} must be a composition to be extended, got "
               f"kernels of torch {torch.__version__} for single devices", RuntimeError)
        for key in _KEYS:
            check(not has_kernel(_LOSS, key), f"{_LOSS} must have no kernel for {key}, got one of another library",
                   RuntimeError)
        _route = torch.library.Library("aten", "IMPL")
        for key in _KEYS:
            _route.impl("cross_entropy_loss", _cross_entropy_loss, key)
    elif _route is not None:
        _retired.extend(torch.library.get_kernel(_LOSS, key) for key in _KEYS)
        _route._destroy()
        _route = None


fill_holes()
