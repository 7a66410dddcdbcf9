"""Tells from a model's class whether its own loss shifts labels, as the Trainer of transformers does to count them."""

import inspect
import re
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional

from torch import Tensor
from transformers.loss import loss_utils
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES,
)

from .._core.errors import check, fail
from .heads import unwrapped

_WITHOUT_SHIFT = (loss_utils.ForMaskedLMLoss, loss_utils.ForTokenClassification,
                  loss_utils.ForSequenceClassificationLoss)
_UNNAMED = {*MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values(),  # without a loss in transformers' mapping, and a shift
            *MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES.values()}
_NAMES = re.compile("|".join(loss_utils.LOSS_MAPPING))
_OUTPUTS = re.compile("Seq2Seq|MaskedLM|Classif|MultipleChoice|NextSentence")  # in the names of such models' outputs


class Step(NamedTuple):
    """What a loss function is not passed by the Trainer that calls it."""

    model: Any = None
    row_weight: Optional[Tensor] = None


_OUTSIDE = Step()
STEP: "ContextVar[Step]" = ContextVar("sparse_ce_step", default=_OUTSIDE)


def shifts_labels(model: Any) -> bool:
    """Returns True if the model's own loss compares position i with label i + 1, and False if with label i.

    Raises:
        ValueError: the class of the model does not tell.
    """
    base = unwrapped(model, "module", "_orig_mod")
    found = None if base is None else _of_class(base)
    if found is None:
        fail(f"shift must be True or False for a {type(base or model).__name__}, whose class does not tell which "
             "labels its own loss compares, got None; use causal_lm_loss(shift=True) if logits i predict label i + 1, "
             "and causal_lm_loss(shift=False) if they predict label i")
    return found


def outputs_shift(outputs: Any) -> bool:
    """Does the same for a model's outputs: False if their class is that of a model whose loss does not shift."""
    return not _OUTPUTS.search(type(outputs).__name__)


def _of_class(model: Any) -> Optional[bool]:
    loss = _named_loss(model)
    if loss is loss_utils.ForSequenceClassificationLoss:
        kind = getattr(model.config, "problem_type", None)
        check(model.config.num_labels > 1 and kind in (None, "single_label_classification"),
              f"compute_loss_func must be None for a {type(model).__name__} with problem_type={kind!r} and "
              f"num_labels={model.config.num_labels}, "
              "whose loss is no cross entropy of classes, got causal_lm_loss; use the model's own loss")
    configs = (model.config, getattr(model.config, "text_config", None))
    if any(getattr(config, "is_encoder_decoder", False) for config in configs) or loss in _WITHOUT_SHIFT:
        return False
    if any(kind.__name__ in _UNNAMED for kind in type(model).__mro__):
        return False
    # transformers takes the loss of causal language models for every class whose name says nothing.
    return True if loss in (None, loss_utils.ForCausalLMLoss) and _calls_loss_function(type(model)) else None


def _named_loss(model: Any) -> Any:
    """Returns the loss that transformers has for ``loss_type``, or else for the name of the class or of a base."""
    names = [getattr(model, "loss_type", None) or "", *(kind.__name__ for kind in type(model).__mro__)]
    for name in names:
        found = _NAMES.search(name)
        if found:
            return loss_utils.LOSS_MAPPING.get(name, loss_utils.LOSS_MAPPING[found.group()])
    return None


def _calls_loss_function(kind: type) -> bool:
    """Returns False for a class whose own code makes the loss: decoders of encoder-decoders do not shift there."""
    for base in kind.__mro__:
        forward = vars(base).get("forward")
        if forward is None:
            continue
        names = getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())
        if "loss_function" in names:
            return True
        if "super" not in names:
            return False
    return False
