"""Hugging Face transformers: losses for the Trainer, and a causal language model that never makes its logits."""

import warnings
from collections.abc import Mapping
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .. import functional
from ..arguments import Normalizer, is_number
from ..errors import check, fail
from ..flags import check_flags
from ..target import SparseTarget, as_target
from . import trainer
from .fused_head import FusedHead, fuse_lm_head
from .metrics import TokenMetrics, set_beside
from .teacher import TopKCollator
from .token_loss import MARK, check_options, token_loss

# The Trainer and accelerate take apart, pad and gather what they know: tensors, sequences and mappings.
Mapping.register(SparseTarget)
trainer.install()

__all__ = ["FusedHead", "TokenMetrics", "TopKCollator", "causal_lm_loss", "fuse_lm_head"]


def causal_lm_loss(*, shift: bool = True, report_metrics: bool = False, aux_loss_weight: Optional[float] = None,
                   **options: Any) -> Callable[..., Tensor]:
    """A loss for ``Trainer(compute_loss_func=...)``: cross entropy of a causal language model's logits.

    Args:
        shift: position i of a sequence is compared with the labels of i + 1, as ``ForCausalLMLoss`` does. False where a
            model's own loss does not: for an encoder-decoder, whose batches must have ``decoder_input_ids`` beside the
            labels (``DataCollatorForSeq2Seq(tokenizer, model=model)`` makes them); for the decoder of one
            (``BartForCausalLM``) and for labels that were shifted before. The Trainer, which would count as the model's
            class does, counts the labels that are compared; it knows the loss in a ``functools.partial`` or a function
            with ``functools.wraps(loss)`` too.
        report_metrics: ``outputs``, which must be a ``ModelOutput``, gets the attributes ``entropy``,
            ``token_accuracy`` and ``num_items`` that :func:`fuse_lm_head` describes, from a second read of the logits.
        aux_loss_weight: what multiplies ``outputs.aux_loss``, the loss of a mixture of experts' routers, which is then
            added to each batch's loss, as the model adds it to its own with
            ``model.config.get_text_config().router_aux_loss_coef`` (JetMoe: ``aux_loss_coef``). The Trainer takes the
            labels away from a model whose loss comes from here, which then adds nothing itself. None leaves it out with
            a warning, 0 without.
        options: those of :func:`sparse_ce.cross_entropy`, but for ``normalizer``, ``return_lse``, ``return_entropy``,
            ``return_argmax`` and ``reduction="none"``. With ``reduction="sum"`` the Trainer's count is not used.
            ``inplace="forward"`` leaves no logits: it is an error with ``report_metrics``, and in a training step that
            returns the model's outputs (``compute_loss(..., return_outputs=True)``).

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
        TypeError, ValueError: at once for options that do not exist or do not fit; where the loss is taken, for an
            ``aux_loss_weight`` without an ``aux_loss``.

    Examples:
        >>> loss = causal_lm_loss(label_smoothing=0.1)  # Trainer(..., compute_loss_func=loss)
        >>> loss({"logits": torch.zeros(1, 3, 10)}, torch.tensor([[1, 2, 3]]), num_items_in_batch=2)
        tensor(2.3026)
    """
    check_options(functional.cross_entropy, options)
    check_flags(shift=shift, report_metrics=report_metrics)
    check(not report_metrics or options.get("inplace") != "forward", "inplace must be False or 'backward' with "
          "report_metrics, which reads the logits after the loss, got 'forward'")
    if not (aux_loss_weight is None or is_number(aux_loss_weight)):
        fail(f"aux_loss_weight must be a number or None, got {aux_loss_weight!r}", TypeError)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Optional[Normalizer] = None) -> Tensor:
        if labels is None:
            fail("labels must be in the batch, got None; the Trainer takes them from its key 'labels'", TypeError)
        logits = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", None)
        if logits is None:
            logits = outputs[0]
        labels = as_target(labels, logits.shape)
        _check_no_prompt(logits.shape[:-1], labels.shape)
        value, metrics = token_loss(logits, labels, num_items_in_batch, options, shift=shift,
                                    report_metrics=report_metrics)
        if metrics is not None:
            set_beside(outputs, metrics)
        return _with_aux_loss(value, outputs, aux_loss_weight)

    setattr(loss, MARK, {**options, "shift": shift})
    return loss


def _check_no_prompt(positions: torch.Size, given: torch.Size) -> None:
    if len(positions) == len(given) == 2 and positions[0] == given[0] and positions[1] > given[1]:
        fail(f"labels must be {list(positions)}, one for each position of the logits, got {list(given)}; where PEFT "
             "has put a learned prompt in front (prompt tuning, p-tuning), it does so with the labels if the model "
             "makes its own loss: take fuse_lm_head(model) instead of causal_lm_loss")


def _with_aux_loss(value: Tensor, outputs: Any, weight: Optional[float]) -> Tensor:
    aux_loss = outputs.get("aux_loss") if isinstance(outputs, dict) else getattr(outputs, "aux_loss", None)
    if aux_loss is None:
        check(not weight, "aux_loss_weight must be None or 0 for a model whose outputs have no aux_loss, got "
              f"{weight}; output_router_logits=True in the config of a mixture of experts gives them one")
        return value
    if weight is None:
        warnings.warn("sparse_ce: the aux_loss of the model's routers is left out; causal_lm_loss(aux_loss_weight="
                      "model.config.get_text_config().router_aux_loss_coef) adds it, as fuse_lm_head(model) does by "
                      "itself, and aux_loss_weight=0 says that it is meant", stacklevel=3)
        return value
    added: Tensor = weight * aux_loss.mean().to(value.device)  # of DataParallel: one of each device
    return value + added
