"""Makes Liger-Kernel's fused linear cross entropy run on the kernels of this package.

Every model that Liger patches calls one function, ``liger_kernel.transformers.functional``'s
``liger_fused_linear_cross_entropy``. Importing this module changes nothing and does not import Liger.
"""

import functools
import inspect
import sys
import threading
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import Tensor

from .. import functional
from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, described
from .._core.handles import Handle
from .._core.listing import listing
from ..ops.registration import why_no_cuda
from ..targets.sparse_target import SparseTarget

__all__ = ["install"]
__dir__ = listing(globals())

_DEVICES = ("cpu",) if why_no_cuda else ("cpu", "cuda")
_lock = threading.RLock()
_open: List[Handle] = []
_restore: Optional[Callable[[], None]] = None


def install() -> Handle:
    """Sends Liger's fused linear cross entropy through :func:`sparse_ce.linear_cross_entropy`.

    It replaces ``liger_fused_linear_cross_entropy`` in Liger and in all modules that have imported it, and the
    ``forward`` of ``LigerFusedLinearCrossEntropyLoss``. So ``use_liger_kernel: true`` of a training library needs no
    other change, before or after the model is loaded. Arguments and results are Liger's, with these differences:

    - The target may also be any target of :func:`sparse_ce.linear_cross_entropy`, and the labels of a model a
      ``SparseTarget``. The mean is then over the rows that are not ignored.
    - The gradients for the head are accumulated in float32 whatever ``accum_dtype`` is, and ``chunk_mem_const`` has no
      effect.
    - A frozen input does not stop the gradient for the head.

    A call that only Liger supports still runs Liger's kernels: another device, an argument of a newer release, or an
    option out of the range of :func:`sparse_ce.linear_cross_entropy`.

    The setting applies to all threads of the process. It lasts until the handle of each call has been removed.

    Returns:
        A handle. ``handle.remove()``, or the end of ``with liger.install(): ...``, undoes this call only.

    Raises:
        ImportError: if Liger cannot be imported. It requires Triton.
        RuntimeError: if the release of Liger is too old.

    Examples:
        >>> from liger_kernel.transformers import functional
        >>> from sparse_ce.integrations import liger
        >>> with liger.install():
        ...     loss = functional.liger_fused_linear_cross_entropy(hidden, head.weight, labels)
    """
    return Handle(_open, _lock, _update)


def _update() -> None:
    """Replaces Liger's functions while a call of :func:`install` lasts."""
    global _restore
    if _open and _restore is None:
        _restore = _replace()
    elif not _open and _restore is not None:
        _restore()
        _restore = None


def _replace() -> Callable[[], None]:
    """Replaces two functions and the method of the module. Returns a function that restores them."""
    from liger_kernel.transformers import functional as liger
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss as Loss
    from liger_kernel.transformers.model import loss_utils

    check(hasattr(liger, "CrossEntropyOutput"), "liger_kernel must have CrossEntropyOutput, got an older release; "
          "upgrade it", RuntimeError)
    original, forward, of_labels = liger.liger_fused_linear_cross_entropy, Loss.forward, loss_utils.LigerForCausalLMLoss
    options = [name for name in inspect.signature(Loss.__init__).parameters if name != "self"]

    @functools.wraps(original)  # LigerForCausalLMLoss reads the signature
    def fused(*args: Any, **kwargs: Any) -> Any:
        out = _outputs(*args, **kwargs)
        if out is None:
            return original(*args, **kwargs)
        return out["loss"] if len(out) == 1 else liger.CrossEntropyOutput(**out)

    @functools.wraps(forward)
    def fused_forward(self: Any, lin_weight: Tensor, _input: Tensor, target: Any, bias: Optional[Tensor] = None) -> Any:
        return fused(_input, lin_weight, target, bias, **{name: getattr(self, name) for name in options})

    @functools.wraps(of_labels)
    def of_targets(hidden_states: Tensor, lm_head_weight: Tensor, labels: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(labels, SparseTarget) and kwargs.get("shift_labels") is None:
            kwargs["shift_labels"] = labels.shift(1)
        if isinstance(kwargs.get("shift_labels"), SparseTarget):
            kwargs["shift_labels"] = _Viewed(kwargs["shift_labels"])
        return of_labels(hidden_states.contiguous(), lm_head_weight, labels, *args, **kwargs)  # Liger views them

    def restore() -> None:
        _replace_everywhere(fused, original)
        _replace_everywhere(of_targets, of_labels)
        Loss.forward = forward

    _replace_everywhere(original, fused)
    _replace_everywhere(of_labels, of_targets)
    Loss.forward = fused_forward
    return restore


def _replace_everywhere(old: Any, new: Any) -> None:
    """Replaces a function in all imported modules."""
    name = old.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


class _Viewed:
    """Gives a target the method by which Liger flattens labels."""

    def __init__(self, target: SparseTarget) -> None:
        self.target = target

    def view(self, _: int) -> SparseTarget:
        return self.target.flatten()


def _outputs(input: Tensor, weight: Tensor, target: Any, bias: Optional[Tensor] = None,
             ce_weight: Optional[Tensor] = None, ignore_index: int = IGNORE_INDEX, lse_square_scale: float = 0.0,
             label_smoothing: float = 0.0, reduction: Any = "mean", softcap: Optional[float] = None,
             return_z_loss: bool = False, accum_dtype: Any = None, use_token_scaling: bool = False,
             return_token_accuracy: bool = False, return_predicted_tokens: bool = False, chunk_mem_const: int = 1,
             *later: Any, **also_later: Any) -> Optional[Dict[str, Tensor]]:
    """Computes the fields of Liger's ``CrossEntropyOutput`` that were requested, or returns None for a call that only
    Liger supports."""
    if (later or also_later or input.device.type not in _DEVICES or reduction not in ("none", "sum", "mean")
            or not 0 <= label_smoothing <= 1 or lse_square_scale < 0 or softcap is not None and softcap <= 0):
        return None
    indices = isinstance(target, Tensor) and target.shape == input.shape[:-1]
    check(indices or not (use_token_scaling or return_token_accuracy), "target must be class indices for "
          f"use_token_scaling and return_token_accuracy, got {described(target)}", TypeError)
    head: Dict[str, Any] = dict(ignore_index=ignore_index, softcap=softcap)
    if bias is not None:  # the logits of a wider bias are promoted
        head["linear_bias"] = bias.to(torch.promote_types(bias.dtype, input.dtype))
    row_weight, divisor = None, None
    if use_token_scaling:
        with torch.no_grad():
            row_weight = functional.linear_cross_entropy(input, weight, target, reduction="none", **head).neg().exp()
    if ce_weight is not None:
        ce_weight = ce_weight.detach()
        if indices and reduction == "mean" and lse_square_scale:
            # The mean of the z-loss is over rows, and that of the cross entropy over the weights of the labels.
            active = target != ignore_index
            divisor = active.sum()
            of_labels = ce_weight.float()[target.where(active, 0)]
            ce_weight = ce_weight.float() * (divisor / of_labels.where(active, 0).sum())
    more = return_z_loss or return_token_accuracy or return_predicted_tokens
    out: Any = functional.linear_cross_entropy(
        input, weight, target, weight=ce_weight, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=lse_square_scale, normalizer=divisor, row_weight=row_weight, return_lse=return_z_loss,
        return_argmax=more, **head)
    if not more:
        return {"loss": out}
    fields, rows = {"loss": out.loss}, out.argmax.ge(0).sum()

    def reduced(of_rows: Tensor, mean: bool) -> Tensor:
        return of_rows if reduction == "none" else of_rows.sum() / rows if mean else of_rows.sum()

    if return_z_loss:
        z_loss = lse_square_scale * out.lse.detach().square()
        fields["z_loss"] = reduced(z_loss if row_weight is None else z_loss * row_weight, reduction == "mean").to(
            input.dtype)
    if return_token_accuracy:
        fields["token_accuracy"] = reduced(out.argmax.eq(target).where(out.argmax.ge(0), False).float(), True)
    if return_predicted_tokens:
        fields["predicted_tokens"] = out.argmax
    return fields
