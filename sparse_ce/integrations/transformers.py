"""Hugging Face transformers: losses for the Trainer, and a causal language model that never makes its logits."""

import functools
import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from .. import functional
from ..arguments import Normalizer, check_held
from ..entries import IGNORE_INDEX
from ..errors import check, fail
from ..target import SparseTarget, as_target
from .logits import HeadInput, Logits
from .metrics import TokenMetrics, make_types, metrics_beside, metrics_of, set_beside, with_metrics
from .teacher import TopKCollator

# The Trainer and accelerate take apart, pad and gather what they know: tensors, sequences and mappings.
Mapping.register(SparseTarget)

_MARK = "_sparse_ce"  # an attribute of what is ours

__all__ = ["FusedHead", "TokenMetrics", "TopKCollator", "causal_lm_loss", "fuse_lm_head"]


def causal_lm_loss(*, shift: bool = True, report_metrics: bool = False, **options: Any) -> Callable[..., Tensor]:
    """A loss for ``Trainer(compute_loss_func=...)``: cross entropy of a causal language model's logits.

    Args:
        shift: position i of a sequence is compared with the labels of i + 1, as the models of transformers do. False
            for labels that were shifted before; the Trainer's count then wants them as ``shift_labels`` too.
        report_metrics: ``outputs``, which must be a ``ModelOutput``, gets the attributes ``entropy``,
            ``token_accuracy`` and ``num_items`` that :func:`fuse_lm_head` describes, from a second read of the logits.
        options: those of :func:`sparse_ce.cross_entropy`, but for ``normalizer``, ``return_lse``, ``return_entropy``,
            ``return_argmax`` and ``reduction="none"``. With ``reduction="sum"`` the Trainer's count is not used.

    Returns:
        ``f(outputs, labels, num_items_in_batch=None)``, a fresh 0-d tensor. ``outputs``: a model's, with ``logits``
        (B, S, V). ``labels``: class indices (B, S), an ``(indices, values)`` tuple (B, S, K), a sparse COO tensor
        (B, S, V) or a ``SparseTarget`` (B, S). ``num_items_in_batch``: the divisor, a number or a tensor whose elements
        are equal; None for the mean over the positions that count.

    The Trainer counts items before it calls this, and PyTorch cannot slice a COO tensor along its positions: inside a
    Trainer, let :func:`sparse_ce.collate` turn COO samples into a ``SparseTarget``.

    ``label_smoothing`` is an option here: the Trainer's own ``label_smoothing_factor``, which it drops where there is a
    loss function and which knows no soft labels, is an error.

    Raises:
        TypeError, ValueError: at once for options that do not exist or do not fit.

    Examples:
        >>> loss = causal_lm_loss(label_smoothing=0.1)  # Trainer(..., compute_loss_func=loss)
        >>> loss({"logits": torch.zeros(1, 3, 10)}, torch.tensor([[1, 2, 3]]), num_items_in_batch=2)
        tensor(2.3026)
    """
    _check_options(functional.cross_entropy, options)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Optional[Normalizer] = None) -> Tensor:
        if labels is None:
            fail("labels must be in the batch, got None; the Trainer takes them from its key 'labels'", TypeError)
        logits = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", None)
        if logits is None:
            logits = outputs[0]
        value, metrics = _loss(logits, labels, num_items_in_batch, options, shift=shift, report_metrics=report_metrics)
        if metrics is not None:
            set_beside(outputs, metrics)
        return value

    setattr(loss, _MARK, True)
    return loss


def _loss(logits: Any, labels: Any, normalizer: Optional[Normalizer], options: Dict[str, Any], *, shift: bool,
          report_metrics: bool) -> Tuple[Tensor, Optional[Dict[str, Tensor]]]:
    """The loss and, where they are asked for, its metrics. ``logits`` (B, S, V): numbers, or the :class:`Logits` of a
    fused head."""
    target = as_target(labels, logits.shape)
    if options.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:  # positions that a shift adds are marked with -100
        target = SparseTarget(target.indices, target.values, target.offsets, target.ne(options["ignore_index"]),
                              target.num_classes, target.kind, target.ids)
    target = target.to(logits.device, non_blocking=True)
    if shift:
        target = target.shift(1)
    if options.get("reduction", "mean") == "mean":
        options = {**options, "normalizer": normalizer}
    if not report_metrics:
        return _cross_entropy(logits, target, **options), None
    # Metrics are to change nothing of a gradient. Those that a fused head reads beside the loss in eager mode do not
    # (but for a rounding where logits have a factor); of logits, and compiled, the gradients would be those of another
    # op, so that metrics get a read of their own.
    if isinstance(logits, Logits) and not torch.compiler.is_compiling():
        out = _cross_entropy(logits, target, return_entropy=True, return_argmax=True, **options)
        return out.loss, metrics_of(out.entropy, out.argmax, target)
    loss = _cross_entropy(logits, target, **options)
    rows = SparseTarget.from_index(torch.where(target.ne(IGNORE_INDEX), 0, IGNORE_INDEX))
    options = {name: options[name] for name in _OF_THE_DISTRIBUTION if name in options}
    with torch.no_grad():
        out = _cross_entropy(logits, rows, return_entropy=True, return_argmax=True, **options)
    return loss, metrics_of(out.entropy, out.argmax, target)


_OF_THE_DISTRIBUTION = ("logit_scale", "softcap", "num_classes", "chunk_rows", "logits_dtype")


def _cross_entropy(logits: Any, target: SparseTarget, **options: Any) -> Any:
    if isinstance(logits, Logits):
        return logits.loss(target, **options)
    return functional.cross_entropy(logits, target, **options)


def _check_options(loss: Callable[..., Any], options: Dict[str, Any], *taken: str) -> None:
    known = [name for name, parameter in inspect.signature(loss).parameters.items()
             if parameter.default is not inspect.Parameter.empty]
    refused = {"normalizer", "return_lse", "return_entropy", "return_argmax", "linear_bias", *taken}
    for name in options:
        if name not in known or name in refused:
            fail(f"options must be among {sorted(set(known) - refused)}, got {name!r}", TypeError)
    check(options.get("reduction", "mean") != "none",
           "reduction must be 'mean' or 'sum' in a training loop, got 'none'")
    check_held(options.get("weight"), None, options)


def fuse_lm_head(model: Any, *, eval_logits: bool = True, report_metrics: bool = False, **options: Any) -> "FusedHead":
    """Makes ``model.forward`` go from hidden states to the loss without logits, wherever it gets labels.

    The model's own code runs; between its head and its loss the logits are a formula
    (``sparse_ce.integrations.logits``),
    so a factor, a softcap, a bias and tied embeddings are what they are in the model, and auxiliary losses are added as
    ever. The output has no ``logits`` then. Forward without labels, and so ``generate``, is untouched. Labels may be
    class indices (B, S), an ``(indices, values)`` tuple, a COO tensor (B, S, V) or a ``SparseTarget``.

    Args:
        model: a causal language model of transformers, or one inside PEFT, DDP, FSDP or DataParallel, before or after
            it is wrapped. Fuse before ``torch.compile``.
        eval_logits: a forward in eval mode without gradients, as in ``Trainer.evaluate``, makes logits as ever, for
            ``compute_metrics``; False leaves them out there as well.
        report_metrics: an output with a loss has three more fields, detached, 0-d, on the device; nothing waits for
            them. Of the positions that count, whose labels are not ignored: ``num_items``, int64, how many there are;
            ``entropy``, the mean of the entropies of the model's distributions in nats; ``token_accuracy``, the share
            at which the likeliest class is the label, or one of those with the largest weight in a soft label. Means
            over nothing are 0; neither class weights nor ``num_items_in_batch`` have a part in them. DataParallel
            gathers one of each from every device. An output that is a tuple has none of them. Inside of a
            Trainer's ``compute_loss`` they are attributes of the output and not among its items, which evaluation
            collects as predictions. :class:`TokenMetrics` logs them.
        options: those of :func:`sparse_ce.linear_cross_entropy`, such as ``label_smoothing``, ``z_loss``, ``weight``
            and ``chunk_rows``; not ``logit_scale`` and ``softcap``, which are the model's, and not ``normalizer``,
            which is ``num_items_in_batch``, nor ``return_*``.

    Returns:
        A handle; ``handle.remove()`` gives the model its own forward back.

    Raises:
        TypeError, ValueError: the model has no head, one that is more than a matrix product (adapters, quantisation),
            or another loss than that of causal language models.
        ValueError, AttributeError: from its first forward, if its code does something else to the logits.

    Examples:
        >>> handle = fuse_lm_head(model, z_loss=1e-4)
        >>> output = model(input_ids=tokens, labels=tokens)
        >>> output.loss.backward()
        >>> output.logits is None
        True
        >>> handle.remove()
    """
    _check_options(functional.linear_cross_entropy, options, "logit_scale", "softcap", "inplace")
    while not isinstance(model, PreTrainedModel):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else getattr(model, "module", None)
        if inner is None:
            fail(f"model must be a causal language model of transformers, got {type(model).__name__}", TypeError)
        model = inner
    check("labels" in inspect.signature(model.forward).parameters,
           f"model must have a forward that takes labels, got {type(model).__name__}")
    check(not hasattr(model.loss_function, _MARK), f"model must not be fused yet, got a fused "
           f"{type(model).__name__}")
    check(model.loss_function is ForCausalLMLoss, "model must have the loss of causal language models, "
           f"ForCausalLMLoss, got {getattr(model.loss_function, '__name__', model.loss_function)}")
    return FusedHead(model, _check_head(model), eval_logits, report_metrics, options)


def _check_head(model: Any) -> Any:
    head = model.get_output_embeddings()
    if head is None:
        fail(f"model must have an output head, got {type(model).__name__} without one", TypeError)
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        fail("model must have a plain nn.Linear as its output head, got "
              f"{type(head).__module__}.{type(head).__name__}; keep adapters and quantisation away from the head, or "
              "train with causal_lm_loss", TypeError)
    weight = head.weight
    wrapped = is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)  # FSDP2's, between forwards
    if wrapped or not weight.dtype.is_floating_point:
        fail(f"model must have an output head with a plain floating weight, got {type(weight).__name__} of "
              f"{weight.dtype}; a quantised head has no fused loss", TypeError)
    return head


class FusedHead:
    """What :func:`fuse_lm_head` did to a model; :meth:`remove` undoes it.

    Examples:
        >>> handle = fuse_lm_head(model)
        >>> handle.active
        True
        >>> handle.remove()
    """

    def __init__(self, model: Any, head: nn.Linear, eval_logits: bool, report_metrics: bool,
                 options: Dict[str, Any]) -> None:
        self.model, self.eval_logits, self.report_metrics = model, eval_logits, report_metrics
        self.options, self.active = options, True
        self._own = {name: model.__dict__[name] for name in ("forward", "_loss_function") if name in model.__dict__}
        forward = self._own.get("forward")
        self._call = (lambda module, *args, **kwargs: forward(*args, **kwargs)) if forward else type(model).forward
        signature = inspect.signature(model.forward)
        self._labels_at = list(signature.parameters).index("labels")
        self._hook = head.register_forward_pre_hook(_enter_head)
        self._fused = self._forward(signature)
        if report_metrics:
            make_types(type(model).forward)
        self._fused_loss = self._loss()
        model._loss_function = MethodType(self._fused_loss, model)
        model._sparse_ce_metrics = None
        model.forward = MethodType(self._fused, model)
        model._replicate_for_data_parallel = MethodType(self._replicate, model)

    def remove(self) -> None:
        """Gives the model its own forward and loss back; a second call does nothing.

        Examples:
            >>> fuse_lm_head(model).remove()
            >>> model(input_ids=tokens, labels=tokens).logits.shape
            torch.Size([1, 3, 50])
        """
        if not self.active:
            return
        self.active = False
        self._hook.remove()
        del self.model._replicate_for_data_parallel, self.model._loss_function, self.model._sparse_ce_metrics
        # Wrapped since, as autocast does, it stays: without labels to fuse it passes everything on.
        if getattr(self.model.__dict__.get("forward"), "__func__", None) is self._fused:
            del self.model.forward
        self.model.__dict__.update({k: v for k, v in self._own.items() if k not in self.model.__dict__})

    def _loss(self) -> Callable[..., Tensor]:
        def loss_function(module: Any, logits: Any, labels: Any, vocab_size: Any = None, num_items_in_batch: Any = None,
                          ignore_index: int = IGNORE_INDEX, shift_labels: Any = None, **kwargs: Any) -> Tensor:
            shift = shift_labels is None
            options = {"ignore_index": ignore_index, **self._options(logits)}
            loss, metrics = _loss(logits, labels if shift else shift_labels, num_items_in_batch, options, shift=shift,
                                  report_metrics=self.report_metrics)
            module._sparse_ce_metrics = metrics  # on their way to the output, past the model's own code
            return loss

        setattr(loss_function, _MARK, self)
        return loss_function

    def _options(self, logits: Any) -> Dict[str, Any]:
        of_head = ("chunk_rows", "logits_dtype")
        return {k: v for k, v in self.options.items() if k not in of_head or isinstance(logits, Logits)}

    def _forward(self, signature: inspect.Signature) -> Callable[..., Any]:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.get("labels", args[self._labels_at] if len(args) > self._labels_at else None)
            if labels is None or not self.active:
                return self._call(module, *args, **kwargs)
            if self.eval_logits and not (module.training or torch.is_grad_enabled()):
                return _with_metrics(module, self._call(module, *args, **kwargs))
            head = _check_head(module)
            if isinstance(head, FSDPModule):
                head.set_reshard_after_forward(False, recurse=False)  # the loss reads the weight after the head is left
            head._sparse_ce_fusing = True
            try:
                output = self._call(module, *args, **kwargs)
            finally:
                head._sparse_ce_fusing = False
            return _with_metrics(module, _without_logits(module, output))

        module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        setattr(forward, "__signature__", signature.replace(parameters=[module, *signature.parameters.values()]))
        return forward

    def _replicate(self, model: Any) -> Any:
        """A replica of DataParallel has the attributes of the model it was made from: bind its forward to itself."""
        replica = type(model)._replicate_for_data_parallel(model)
        replica.forward = MethodType(self._fused, replica)
        replica._loss_function = MethodType(self._fused_loss, replica)
        return replica


def _enter_head(head: nn.Module, args: Tuple[Any, ...]) -> Optional[Tuple[HeadInput]]:
    return (HeadInput(*args),) if getattr(head, "_sparse_ce_fusing", False) else None


def _without_logits(module: nn.Module, output: Any) -> Any:
    items = list(output.values() if isinstance(output, dict) else output)
    if not any(isinstance(v, Logits) for v in items) or not isinstance(items[0], Tensor):
        fail(f"model must make its loss from the logits of its output head with self.loss_function, got "
              f"{type(module).__name__}, which does not; train it with causal_lm_loss instead of fuse_lm_head")
    if isinstance(output, dict):
        return type(output)(**{k: v for k, v in output.items() if not isinstance(v, Logits)})
    return tuple(v for v in items if not isinstance(v, Logits))


def _with_metrics(module: Any, output: Any) -> Any:
    metrics, module._sparse_ce_metrics = module._sparse_ce_metrics, None
    return output if metrics is None else with_metrics(output, metrics)


def _our_compute_loss(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.compute_loss`` that refuses ``label_smoothing_factor`` where the Trainer would drop it (it has a loss
    function), make the logits of a fused head for it, or fail in it (soft labels), and that takes metrics out of the
    items of an output, all of which evaluation collects. Nowhere else do these meet."""

    @functools.wraps(compute_loss)
    def checked(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        smoother = getattr(self, "label_smoother", None)
        loss = self.compute_loss_func
        while isinstance(loss, functools.partial):
            loss = loss.func
        if smoother is not None and (hasattr(loss, _MARK)
                                     or isinstance(inputs.get("labels"), SparseTarget)
                                     or any(hasattr(m.__dict__.get("_loss_function"), _MARK)
                                            for m in model.modules())):
            given = self.args.label_smoothing_factor
            fail(f"label_smoothing_factor must be 0 with soft labels and with the losses of sparse_ce, got {given}; "
                  f"use causal_lm_loss(label_smoothing={given}) or fuse_lm_head(model, label_smoothing={given})")
        made = compute_loss(self, model, inputs, *args, **kwargs)
        return (made[0], metrics_beside(made[1])) if isinstance(made, tuple) else made

    setattr(checked, _MARK, True)
    return checked


if not hasattr(Trainer.compute_loss, _MARK):  # a reload of this module must not wrap it twice
    setattr(Trainer, "compute_loss", _our_compute_loss(Trainer.compute_loss))
