"""Hugging Face transformers: losses for the Trainer, and a causal language model that never makes its logits."""

import warnings
from collections.abc import Mapping
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .. import functional
from .._core.arguments import Normalizer
from .._core.errors import check, fail
from .._core.flags import check_flags
from .._core.options import is_number
from ..targets.convert import as_target
from ..targets.sparse_target import SparseTarget
from . import trainer
from .fused_head import FusedHead, fuse_lm_head
from .metrics import TokenMetrics, set_beside
from .own_loss import STEP, outputs_shift, shifts_labels
from .teacher import TopKCollator
from .token_loss import MARK, check_options, check_row_weight, missing_column, token_loss

# The Trainer and accelerate take apart, pad and gather what they know: tensors, sequences and mappings.
Mapping.register(SparseTarget)
trainer.install()

__all__ = ["FusedHead", "TokenMetrics", "TopKCollator", "causal_lm_loss", "fuse_lm_head"]


def causal_lm_loss(*, shift: Optional[bool] = None, report_metrics: bool = False,
                   aux_loss_weight: Optional[float] = None, row_weight: Optional[str] = None,
                   **options: Any) -> Callable[..., Tensor]:
    """A loss for ``Trainer(compute_loss_func=...)``: cross entropy of a language model's logits, or of a classifier's.

    Args:
        shift: if True, position i of a sequence is compared with the label of i + 1, as ``ForCausalLMLoss`` does; if
            False, with the label of i. None compares as the model's own loss does. In a Trainer the model's class
            tells: causal language models shift; token and sequence classification, multiple choice, masked language
            models and encoder-decoders do not. A class that does not tell, such as the decoder of an encoder-decoder
            (``BartForCausalLM``, whose own loss does not shift), is an error that asks for ``shift``. Without a
            Trainer the class of ``outputs`` tells, and a dict or a tuple is that of a causal language model. Pass
            False for labels that were shifted before. The batches of an encoder-decoder must have
            ``decoder_input_ids`` beside the labels (``DataCollatorForSeq2Seq(tokenizer, model=model)`` makes them). The
            Trainer counts the labels that are compared; it knows the loss in a ``functools.partial`` or a function with
            ``functools.wraps(loss)`` too.
        report_metrics: ``outputs``, which must be a ``ModelOutput``, gets the attributes ``entropy``,
            ``token_accuracy`` and ``num_items`` that :func:`fuse_lm_head` describes, from a second read of the logits.
        aux_loss_weight: what multiplies ``outputs.aux_loss``, the loss of a mixture of experts' routers, which is then
            added to each batch's loss, as the model adds it to its own with
            ``model.config.get_text_config().router_aux_loss_coef`` (JetMoe: ``aux_loss_coef``). The Trainer takes the
            labels away from a model whose loss comes from here, which then adds nothing itself. None leaves it out with
            a warning, 0 without.
        row_weight: the name of a column of the batch that holds token weights (B, S), of any real dtype, in the
            positions of the labels. It is shifted with the labels, and multiplies the loss of each token, its smoothing
            and its z-loss included. The divisor stays the number of labels that are not ignored, so that a weight of 0
            is not a label of -100. A batch without the column is an error: use
            ``TrainingArguments(remove_unused_columns=False)`` and a collator that keeps the column, as
            ``TopKCollator(row_weight=...)`` does.
        options: those of :func:`sparse_ce.cross_entropy`, but for ``normalizer``, ``return_lse``, ``return_entropy``,
            ``return_argmax``, ``group``, ``vocab_start``, a ``logit_scale`` for each row and ``reduction="none"``. With
            ``reduction="sum"`` the Trainer's count is not used.
            ``inplace="forward"`` leaves no logits: it is an error with ``report_metrics``, and in a training step that
            returns the model's outputs (``compute_loss(..., return_outputs=True)``).

    Returns:
        ``f(outputs, labels, num_items_in_batch=None, row_weight=None)``, a fresh 0-d tensor. ``outputs``: a model's,
        with ``logits`` (B, S, V). ``labels``: class indices (B, S), an ``(indices, values)`` tuple (B, S, K), a
        sparse COO tensor (B, S, V) or a ``SparseTarget`` (B, S). ``num_items_in_batch``: the divisor, a number or a
        tensor whose elements are equal; None for the mean over the positions that count. ``row_weight``: the token
        weights, which a Trainer takes from the batch.

    The Trainer counts items before it calls this, and PyTorch cannot slice a COO tensor along its positions: inside a
    Trainer, let :func:`sparse_ce.collate` turn COO samples into a ``SparseTarget``.

    ``label_smoothing`` is an option here: the Trainer's own ``label_smoothing_factor``, which it drops where there is a
    loss function and which knows no soft labels, is an error.

    Raises:
        TypeError, ValueError: at once for options that do not exist or do not fit; when the loss is taken, for an
            ``aux_loss_weight`` without an ``aux_loss``, for ``shift=None`` with a model whose class does not tell, and
            for a batch without token weights.

    Examples:
        >>> loss = causal_lm_loss(label_smoothing=0.1)  # Trainer(..., compute_loss_func=loss)
        >>> loss({"logits": torch.zeros(1, 3, 10)}, torch.tensor([[1, 2, 3]]), num_items_in_batch=2)
        tensor(2.3026)
    """
    check_options(functional.cross_entropy, options)
    check_flags(report_metrics=report_metrics, **({} if shift is None else {"shift": shift}))
    check_row_weight(row_weight)
    check(not report_metrics or options.get("inplace") != "forward", "inplace must be False or 'backward' with "
          "report_metrics, which reads the logits after the loss, got 'forward'")
    column = row_weight
    if not (aux_loss_weight is None or is_number(aux_loss_weight)):
        fail(f"aux_loss_weight must be a number or None, got {aux_loss_weight!r}", TypeError)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Optional[Normalizer] = None, *,
             row_weight: Optional[Tensor] = None) -> Tensor:
        if labels is None:
            fail("labels must be in the batch, got None; the Trainer takes them from its key 'labels'", TypeError)
        logits = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", None)
        if logits is None:
            logits = outputs[0]
        step = STEP.get()
        shifts = shift
        if shifts is None:
            shifts = outputs_shift(outputs) if step.model is None else shifts_labels(step.model)
        weights = step.row_weight if row_weight is None else row_weight
        if weights is None and column is not None:
            fail(missing_column(column))
        labels = as_target(labels, logits.shape)
        _check_no_prompt(logits.shape[:-1], labels.shape)
        value, metrics = token_loss(logits, labels, num_items_in_batch, options, shift=shifts,
                                    report_metrics=report_metrics, row_weight=weights)
        if metrics is not None:
            set_beside(outputs, metrics)
        return _with_aux_loss(value, outputs, aux_loss_weight)

    setattr(loss, MARK, {**options, "shift": shift, "row_weight": column})
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
