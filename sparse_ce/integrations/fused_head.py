"""Provides ``fuse_lm_head``: a causal language model of transformers then computes its loss from hidden states."""

import copy
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional

from transformers.loss.loss_utils import ForCausalLMLoss

from .. import functional
from .._core.errors import check, fail
from .._core.flags import check_flags
from ..functional.distillation import linear_distillation_loss
from . import per_token
from .distillation import OF_CANDIDATES, TeacherLogits, checked_distillation
from .fused_forward import Settings, forward_of, loss_of
from .heads import base_of, check_head, check_liger, check_prompt
from .metrics import make_types
from .options import Distillation, HeadOptions
from .token_loss import check_options, check_row_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


def fuse_lm_head(model: Any, *, eval_logits: bool = True, report_metrics: bool = False,
                 distillation: Optional[Distillation] = None, row_weight: Optional[str] = None,
                 **options: "Unpack[HeadOptions]") -> "FusedHead":
    """Patches ``model.forward`` so that a call with labels computes the loss from hidden states, without logits.

    The model's own code still runs. Between its head and its loss the logits are a formula
    (``sparse_ce.integrations.logits``). A factor, a softcap, a bias and tied embeddings therefore work as in the model,
    and auxiliary losses are added as before. The output then has no ``logits``. A forward without labels, and so
    ``generate``, is unchanged. Labels may be class indices (B, S), an ``(indices, values)`` tuple, a COO tensor
    (B, S, V) or a ``SparseTarget``.

    TRL's trainers request the log-probability of each label instead (``fused_lm_head=True``). It is computed from the
    same formula, whether TRL patches the model before or after this call. ``SFTTrainer`` receives minus the loss of
    each position, with any labels and options. Other trainers receive the result of
    :func:`sparse_ce.linear_selected_log_probs`; for them, options that change log-probabilities raise an error.

    Args:
        model: a causal language model of transformers. PEFT, DDP, FSDP or DataParallel may wrap it before or after this
            call, ``torch.compile`` only after it. Save a fused model with ``save_pretrained`` or its ``state_dict``;
            pickling the whole model raises an error.
        eval_logits: if True, a forward in eval mode without gradients, as in ``Trainer.evaluate``, returns logits as
            usual, for ``compute_metrics``. If False, this forward omits them too.
        report_metrics: if True, an output with a loss has three more fields. They are detached 0-d tensors on the
            device and cause no synchronization. They cover all positions whose label is not ignored:

            - ``num_items``, int64: the number of these positions.
            - ``entropy``: the mean entropy of the model's distributions, in nats.
            - ``token_accuracy``: the fraction of positions whose most likely class is the label. For a soft label it
              must be one of the classes with the largest weight.

            Means over no positions are 0. Neither class weights nor ``num_items_in_batch`` affect them. With
            DataParallel each field has one element per device. Outputs that are tuples do not get the fields. Inside a
            Trainer's ``compute_loss`` they are attributes of the output instead of items, because evaluation collects
            the items as predictions. :class:`TokenMetrics` logs them.
        distillation: dict of options of a distillation loss. ``options`` may then contain ``ignore_index``,
            ``reduction``, ``num_classes``, ``temperature``, ``chunk_rows`` and ``logits_dtype``. The teacher is one of:

            - cached candidates. The loss is :func:`sparse_ce.distillation_loss` with the dict's options, such as
              ``kind``, ``tail`` and ``alpha``. The default tail is ``"bucket"``; at a ``temperature`` other than 1,
              ``tail`` must be given, such as ``"renormalize"``. The labels are the teacher, a ``SparseTarget``. The
              forward also takes ``hard_labels`` (B, S), class indices, and ``teacher_log_tail`` (B, S), both in the
              positions of the labels; :class:`TopKCollator` creates them.
            - hidden states, if the dict has a ``teacher_head``: the ``nn.Linear``, plain or quantized, of the teacher's
              logits. The forward also takes ``teacher_hidden`` (B, S, D2), the input of this head at each
              position. The loss is ``alpha`` times the divergence of :func:`sparse_ce.linear_dense_divergence` plus
              ``1 - alpha`` times the cross entropy of the labels, over the positions whose label is not ignored. The
              dict may have ``kind``, ``beta``, ``alpha``, ``temperature``, ``temperature_squared``,
              ``teacher_head_scale`` and ``teacher_softcap``: the teacher's logits are
              ``softcap * tanh(scale * x / softcap)`` for the output x of its head.

            ``beta`` without ``kind`` is that of TRL: 0 is forward KL, 1 is reverse KL, and a number between them is
            ``kind="jsd"``.
        row_weight: name of the batch's column of token weights (B, S), as for :func:`causal_lm_loss`. The forward takes
            this column beside the labels. TRL's ``SFTTrainer`` supports it with ``loss_type="nll"``.
        options: options of :func:`sparse_ce.linear_cross_entropy`, such as ``label_smoothing``, ``z_loss``, ``weight``
            and ``chunk_rows``. These are not accepted: ``softcap``, which the model defines; ``normalizer``, which is
            ``num_items_in_batch``; ``inplace``, ``group``, ``vocab_start`` and ``return_*``. ``temperature`` replaces
            ``logit_scale``: it divides the logits that the model returns, for all terms of the loss. It is a number, or
            a 0-d tensor if the model has no softcap. The ``temperature`` of ``distillation`` further divides those of
            the divergence.

    Returns:
        A handle. ``handle.remove()`` restores the model's own forward. A deepcopy of a fused model is fused too, with
        its own handle, :meth:`FusedHead.of`.

    Raises:
        TypeError, ValueError: if the model has no head; if the head is more than a matrix product (adapters, quantized
            inputs); if the model's loss is not that of causal language models; if Liger's fused loss is in use. A copy
            of the head that PEFT trains (``modules_to_save=["lm_head"]``) is a matrix product. So is a frozen head that
            :func:`sparse_ce.integrations.quantization.weight_blocks` supports.
        ValueError, AttributeError: in the first forward, if the model applies any other operation to its logits.

    Examples:
        >>> handle = fuse_lm_head(model, z_loss=1e-4)
        >>> output = model(input_ids=tokens, labels=tokens)
        >>> output.loss.backward()
        >>> output.logits is None
        True
        >>> handle.remove()
    """
    check_row_weight(row_weight)
    check(row_weight is None or distillation is None, "distillation does not support row_weight: a divergence has no "
          "token weights. Use one of the two.")
    teacher: Optional[TeacherLogits] = None
    check_loss_options(options, distillation is not None)
    of_teacher: Optional[Dict[str, Any]] = None
    if distillation is not None:
        of_teacher, teacher = checked_distillation(distillation)
    check_flags(eval_logits=eval_logits, report_metrics=report_metrics)
    check_prompt(model)
    model = base_of(model)
    check("labels" in inspect.signature(model.forward).parameters,
           f"model must have a forward that takes labels, got {type(model).__name__}")
    check("_sparse_ce_head" not in model.__dict__, "model must not be fused yet, got a fused "
          f"{type(model).__name__}; FusedHead.of(model).remove() undoes it")
    check_liger(model)
    check(model.loss_function is ForCausalLMLoss, "model must have the loss of causal language models, "
           f"ForCausalLMLoss, got {getattr(model.loss_function, '__name__', model.loss_function)}")
    check_head(model)
    labels_at = list(inspect.signature(model.forward).parameters).index("labels")
    settings = Settings(eval_logits, report_metrics, dict(options), of_teacher, row_weight, labels_at)
    return FusedHead(model, settings, teacher)


def check_loss_options(options: Mapping[str, Any], distils: bool) -> None:
    """Checks the ``options`` of :func:`fuse_lm_head`, which depend on its loss."""
    if distils:
        check_options(fuse_lm_head, linear_distillation_loss, options, "softcap", "labels", "teacher_log_tail",
                      "teacher_logit_scale", "teacher_softcap", "row_mask", *OF_CANDIDATES)
    else:
        check_options(fuse_lm_head, functional.linear_cross_entropy, options, "softcap", "inplace")


class FusedHead:
    """Handles a model that :func:`fuse_lm_head` has patched; :meth:`remove` restores the model.

    Examples:
        >>> handle = fuse_lm_head(model, z_loss=1e-4)
        >>> handle
        FusedHead(LlamaForCausalLM, active=True, z_loss=0.0001)
        >>> handle.remove()
    """

    def __init__(self, model: Any, settings: Settings, teacher: Optional[TeacherLogits] = None) -> None:
        self.model, self.active, self.row_weight, self._settings = model, True, settings.row_weight, settings
        self.teacher = teacher  # computes the logits of a teacher that is given by its hidden states
        self.distils = settings.distillation is not None
        self.used = False  # True after the fused forward has computed a loss; compiled code does not set it
        self.summed = False  # True while a trainer only sums the log-probabilities of all positions
        self._own = {name: model.__dict__[name] for name in ("forward", "_loss_function") if name in model.__dict__}
        self._hook = model.register_forward_pre_hook(per_token.hook, with_kwargs=True)
        self._fused = forward_of(settings, inspect.signature(model.forward))
        if settings.report_metrics:
            make_types(type(model).forward)
        self._fused_loss = loss_of(settings)
        model._loss_function = MethodType(self._fused_loss, model)
        model._sparse_ce_request = model._sparse_ce_rows = model._sparse_ce_beside = None
        model._sparse_ce_head = self
        model.forward = MethodType(self._fused, model)
        model._replicate_for_data_parallel = MethodType(_replicate, model)

    def __repr__(self) -> str:
        state = [type(self.model).__name__, f"active={self.active}"]
        return f"{type(self).__name__}({', '.join([*state, *self._settings.requested])})"

    def __reduce__(self) -> Any:
        # Pickle looks a bound method up in the model's class, which lacks it or has a different one.
        fail(f"fuse_lm_head does not support pickle: a fused {type(self.model).__name__} has a forward of its own. "
             "Save its state_dict, or call FusedHead.of(model).remove() first and fuse it again afterwards.", TypeError)

    def __deepcopy__(self, memo: Dict[int, Any]) -> "FusedHead":
        """Copies the handle for the model's copy. The copy's methods are the same functions, which find the handle of
        the model that they are called for."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        for name in ("model", "_own", "_hook"):
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        return copied

    @staticmethod
    def of(model: Any) -> "FusedHead":
        """Returns the handle of a fused model, for example of a deepcopy (weight averages, reference models).

        Raises:
            ValueError, TypeError: if the model is not fused.

        Examples:
            >>> handle = fuse_lm_head(model)
            >>> FusedHead.of(model) is handle
            True
            >>> FusedHead.of(copy.deepcopy(model)).remove()
            >>> handle.remove()
        """
        model = base_of(model)
        head: Optional[FusedHead] = model.__dict__.get("_sparse_ce_head")
        if head is None:
            fail(f"model must be fused by fuse_lm_head, got a {type(model).__name__} that is not")
        return head

    def remove(self) -> None:
        """Restores the model's own forward and loss. A second call does nothing.

        Examples:
            >>> fuse_lm_head(model).remove()
            >>> model(input_ids=tokens, labels=tokens).logits.shape
            torch.Size([1, 3, 50])
        """
        if not self.active:
            return
        self.active = False
        self._hook.remove()
        for name in ("_replicate_for_data_parallel", "_loss_function", "_sparse_ce_request", "_sparse_ce_rows",
                     "_sparse_ce_beside", "_sparse_ce_head"):
            delattr(self.model, name)
        if getattr(self.model.__dict__.get("forward"), "__func__", None) is self._fused:
            del self.model.forward
        else:  # a later wrapper (autocast) keeps the fused forward, which then calls the previous forward
            self.model._sparse_ce_before = {**getattr(self.model, "_sparse_ce_before", {}),
                                            self._fused: self._own.get("forward")}
        self.model.__dict__.update({k: v for k, v in self._own.items() if k not in self.model.__dict__})


def _replicate(model: Any) -> Any:
    """Creates a replica for DataParallel. A replica copies the model's attributes, so its forward is bound to the
    replica."""
    replica, head = type(model)._replicate_for_data_parallel(model), model._sparse_ce_head
    replica.forward = MethodType(head._fused, replica)
    replica._loss_function = MethodType(head._fused_loss, replica)
    return replica
