"""Makes the Trainer of transformers use losses of sparse_ce, and causal language models compute them without logits."""

import warnings
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
from torch import Tensor

from .. import functional
from .._core.arguments import Normalizer
from .._core.errors import check, fail
from .._core.flags import check_flags
from .._core.listing import listing
from .._core.options import is_number
from ..targets.convert import as_target
from . import trainer
from .fused_head import FusedHead, fuse_lm_head
from .heads import logits_of
from .metrics import TokenMetrics, set_beside
from .options import LossOptions
from .own_loss import STEP, outputs_shift, shifts_labels
from .teacher import TopKCollator
from .token_loss import MARK, check_options, check_row_weight, missing_column, token_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

trainer.install()

__all__ = ["FusedHead", "TokenMetrics", "TopKCollator", "causal_lm_loss", "fuse_lm_head", "logits_of",
           "loss_function"]
__dir__ = listing(globals())


def loss_function(*, shift: bool = True, **options: "Unpack[LossOptions]") -> Callable[..., Tensor]:
    """Returns a loss for ``model.loss_function``, which the model's own forward calls with its logits and labels.

    It needs no Trainer. Auxiliary losses are added as before. The model's output keeps its logits; to train without
    them use :func:`fuse_lm_head`.

    Args:
        shift: if True, position i is compared with the label of i + 1, as in causal language models. If False, it is
            compared with the label of i: masked language models, encoder-decoders, token classification.
        options: see :func:`causal_lm_loss`.

    Returns:
        ``f(logits, labels, ..., num_items_in_batch=None, ignore_index=-100, shift_labels=None)`` with the keywords of
        transformers. It returns a new 0-d tensor. ``labels`` are those of :func:`causal_lm_loss`. If the model passes
        ``shift_labels``, these are compared without a shift.

    Raises:
        TypeError, ValueError: at once, if an option does not exist or does not fit the others.

    Examples:
        >>> model.loss_function = loss_function(label_smoothing=0.1, z_loss=1e-4)
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    check_options(loss_function, functional.cross_entropy, options)
    check_flags(shift=shift)

    def loss(logits: Tensor, labels: Any = None, vocab_size: Any = None,
             num_items_in_batch: Optional[Normalizer] = None, ignore_index: Optional[int] = None,
             shift_labels: Any = None, **_: Any) -> Tensor:
        compared = labels if shift_labels is None else shift_labels
        if compared is None:
            fail("labels must be given to the model, got None", TypeError)
        given = options if ignore_index is None else {"ignore_index": ignore_index, **options}
        return token_loss(logits, compared, num_items_in_batch, given, shift=shift and shift_labels is None,
                          report_metrics=False)[0]

    return loss


def causal_lm_loss(*, shift: Optional[bool] = None, report_metrics: bool = False,
                   aux_loss_weight: Optional[float] = None, row_weight: Optional[str] = None,
                   **options: "Unpack[LossOptions]") -> Callable[..., Tensor]:
    """Returns a loss for ``Trainer(compute_loss_func=...)``: the cross entropy of a language model's or a classifier's
    logits.

    Args:
        shift: if True, position i of a sequence is compared with the label of i + 1, as in ``ForCausalLMLoss``. If
            False, it is compared with the label of i; use this for labels that are already shifted. None compares as
            the model's own loss does, see below.
        report_metrics: if True, ``outputs``, which must be a ``ModelOutput``, gets the attributes ``entropy``,
            ``token_accuracy`` and ``num_items``, see :func:`fuse_lm_head`. They are computed in a second read of the
            logits.
        aux_loss_weight: multiplies ``outputs.aux_loss``, the loss of the routers of a mixture of experts, which is
            added to each batch's loss. To match the model's own loss pass
            ``model.config.get_text_config().router_aux_loss_coef`` (JetMoe: ``aux_loss_coef``). The Trainer passes no
            labels to a model with a custom loss, so the model itself adds nothing. None omits the term with a warning,
            0 without a warning.
        row_weight: name of the batch's column of token weights (B, S), of any real dtype, in the positions of the
            labels. The weights are shifted with the labels. They multiply the loss of each token, including its label
            smoothing and z-loss. The divisor stays the number of labels that are not ignored; so a weight of 0 differs
            from a label of -100. A batch without the column raises an error. Use
            ``TrainingArguments(remove_unused_columns=False)`` and a collator that keeps the column, such as
            ``TopKCollator(row_weight=...)``.
        options: options of :func:`sparse_ce.cross_entropy`, except ``normalizer``, ``return_lse``, ``return_entropy``,
            ``return_argmax``, ``group``, ``vocab_start``, ``logit_scale`` and ``reduction="none"``. Instead of
            ``logit_scale`` there is ``temperature``, a number or a 0-d tensor, which divides the model's logits after a
            ``softcap``. With ``reduction="sum"`` the Trainer's count is not used. ``inplace="forward"`` overwrites the
            logits. It is an error with ``report_metrics``, and in a training step that returns the model's outputs
            (``compute_loss(..., return_outputs=True)``).

    Returns:
        ``f(outputs, labels, num_items_in_batch=None, row_weight=None)``, which returns a new 0-d tensor.

        - ``outputs``: a model's outputs, with ``logits`` (B, S, V).
        - ``labels``: class indices (B, S), an ``(indices, values)`` tuple (B, S, K), a sparse COO tensor (B, S, V) or a
          ``SparseTarget`` (B, S).
        - ``num_items_in_batch``: the divisor, a number or a tensor with equal elements. None divides by the number of
          active positions.
        - ``row_weight``: the token weights, which a Trainer takes from the batch.

    ``shift=None`` inside a Trainer depends on the model's class. Causal language models shift. Token and sequence
    classification, multiple choice, masked language models and encoder-decoders do not. A class whose own loss is
    unknown raises an error that asks for ``shift``. An example is the decoder of an encoder-decoder
    (``BartForCausalLM``, whose own loss does not shift). Outside a Trainer the class of ``outputs`` decides; a dict or
    a tuple counts as a causal language model's.

    The Trainer counts the compared labels. It also recognizes the loss inside a ``functools.partial``, or a function
    with ``functools.wraps(loss)``. The batches of an encoder-decoder must contain ``decoder_input_ids`` beside the
    labels; ``DataCollatorForSeq2Seq(tokenizer, model=model)`` adds them.

    The Trainer counts items before it calls the loss, and PyTorch cannot slice a COO tensor along its positions. Inside
    a Trainer, use :func:`sparse_ce.collate` to convert COO samples into a ``SparseTarget``.

    Pass ``label_smoothing`` here: the Trainer's ``label_smoothing_factor`` raises an error. The Trainer ignores it if
    there is a loss function, and it does not support soft labels.

    Raises:
        TypeError, ValueError: at once, if an option does not exist or does not fit the others. When the loss is
            computed: if ``aux_loss_weight`` is given and there is no ``aux_loss``; if ``shift=None`` and the loss of
            the model's class is unknown; if the batch lacks the token weights.

    Examples:
        >>> loss = causal_lm_loss(label_smoothing=0.1)  # Trainer(..., compute_loss_func=loss)
        >>> loss({"logits": torch.zeros(1, 3, 10)}, torch.tensor([[1, 2, 3]]), num_items_in_batch=2)
        tensor(2.3026)
    """
    check_options(causal_lm_loss, functional.cross_entropy, options)
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
        if isinstance(outputs, Tensor):
            fail("outputs must be those of a model, got a tensor; pass {'logits': logits}, or use loss_function for a "
                 "loss of logits and labels", TypeError)
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


def _check_no_prompt(positions: torch.Size, labels: torch.Size) -> None:
    if len(positions) == len(labels) == 2 and positions[0] == labels[0] and positions[1] > labels[1]:
        fail(f"labels must be {list(positions)}, one for each position of the logits, got {list(labels)}; if PEFT "
             "prepends a learned prompt (prompt tuning, p-tuning), use fuse_lm_head(model) instead of causal_lm_loss: "
             "PEFT then extends the labels too")


def _with_aux_loss(value: Tensor, outputs: Any, weight: Optional[float]) -> Tensor:
    aux_loss = outputs.get("aux_loss") if isinstance(outputs, dict) else getattr(outputs, "aux_loss", None)
    if aux_loss is None:
        check(not weight, "aux_loss_weight must be None or 0 for a model whose outputs have no aux_loss, got "
              f"{weight}; set output_router_logits=True in the config of a mixture of experts")
        return value
    if weight is None:
        warnings.warn("sparse_ce: the aux_loss of the model's routers is ignored; use causal_lm_loss(aux_loss_weight="
                      "model.config.get_text_config().router_aux_loss_coef) or fuse_lm_head(model) to add it, or "
                      "aux_loss_weight=0 to silence this warning", stacklevel=3)
        return value
    added: Tensor = weight * aux_loss.mean().to(value.device)  # DataParallel returns one aux_loss per device
    return value + added
