"""Computes the plain loss of few logits on a CPU without the dispatcher, which would take longer than the computation.

``csrc/torch/small_calls.cpp`` receives addresses. That requires PyTorch's own packed tensors, default options, and no
active mode, transform or profiler. All other calls, and calls with wrong arguments, are left to the op.
"""

import ctypes
import struct
from typing import Any, Container, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._core.arguments import Arguments, SmallTarget
from ..registration import cpu_library

LOGITS = 1 << 16
"""The largest call that counts as small. In larger calls the dispatcher takes a small fraction of the time."""

_CALL = struct.Struct("@8P9q2?")  # struct Call
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int32: 4, torch.int64: 5}
_INTEGERS = (torch.int32, torch.int64)
_PLAIN = (Tensor, Parameter)
_AT = Arguments._fields.index("ignore_index") + 1
_DEFAULTS = tuple(Arguments._field_defaults[name] for name in Arguments._fields[_AT:])
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # a wrapped tensor may outlive its transform
_profiles, _traces = torch._C._autograd._profiler_enabled, torch._C._is_tracing


def _find() -> Any:
    function = getattr(ctypes.PyDLL(cpu_library), "sparse_ce_small_cross_entropy", None)
    if function is not None:  # a build with other kernels for CPU tensors does not export it
        function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_char_p]
    return function


_function = _find()


def plain(a: Arguments) -> bool:
    """Returns True if a call has only classes, optional values, and an ignored index."""
    return a.offsets is None and a.weight is None and a.row_mask is None and a[_AT:] == _DEFAULTS


def cross_entropy(logits: Tensor, target: SmallTarget, ignore_index: int, mean: bool, normalizer: Optional[Tensor],
                  grad_mean: Optional[Tensor]) -> Optional[Tuple[Tensor, Optional[Tensor]]]:
    """Returns the loss and the gradient for the logits, or None if the call is not small or has an invalid argument.

    The bits are those of ``forward`` and ``loss_mean`` or, with ``grad_mean``, of ``forward_with_gradient``. ``logits``
    are (N, V) of a floating dtype, indices (N,) or (N, K), or those of a sparse tensor (N, V). The loss is (N,), or ()
    for the mean.
    """
    indices, values, row_indices, coo = target
    if type(logits) not in _PLAIN or not _usable(indices, _INTEGERS) or not 0 < logits.numel() <= LOGITS:
        return None
    if logits.dim() != 2 or not logits.is_cpu or logits.is_neg():
        return None
    if normalizer is not None and normalizer.is_neg() or grad_mean is not None and grad_mean.is_neg():
        return None
    if _function is None or _profiles() or _traces() or _wrapped(logits):
        return None
    (rows, vocab), (row_stride, column_stride), at_values, values_dtype = logits.shape, logits.stride(), 0, 0
    if values is not None:
        if not _usable(values, _DTYPES) or values.shape != indices.shape:
            return None
        at_values, values_dtype = values.data_ptr(), _DTYPES[values.dtype]
    width, at_rows, rows_dtype = 1 if indices.dim() == 1 else indices.shape[1], 0, 0
    if row_indices is not None:
        if not _usable(row_indices, _INTEGERS):
            return None
        width, at_rows, rows_dtype = indices.shape[0], row_indices.data_ptr(), _DTYPES[row_indices.dtype]
    if column_stride != 1:
        return None
    dtype, at_grad, grad = _DTYPES[logits.dtype], 0, None
    if grad_mean is None:
        loss = torch.empty(() if mean else (rows,), dtype=logits.dtype if dtype < 2 else torch.float32)
    else:
        loss = torch.empty_like(grad_mean)
        # For packed logits empty_like is packed too, and faster than new_empty.
        grad = torch.empty_like(logits) if row_stride == vocab else logits.new_empty((rows, vocab))
        at_grad = grad.data_ptr()
    done = _function(_CALL.pack(
        logits.data_ptr(), indices.data_ptr(), at_values, at_rows, 0 if normalizer is None else normalizer.data_ptr(),
        0 if grad_mean is None else grad_mean.data_ptr(), loss.data_ptr(), at_grad, rows, vocab, row_stride, width,
        ignore_index, dtype, _DTYPES[indices.dtype], values_dtype, rows_dtype, mean, coo))
    return (loss, grad) if done else None


def _usable(t: Any, dtypes: Container[torch.dtype]) -> bool:
    """Returns True if the memory of ``t`` has its elements one after the other."""
    return (type(t) in _PLAIN and t.dtype in dtypes and t.layout == torch.strided and not t.is_nested and t.is_cpu
            and not t.is_neg() and t.is_contiguous())
