"""Determines from a model's class whether its own loss shifts labels, as the Trainer of transformers counts them."""

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
_UNNAMED = {*MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values(),  # transformers maps no loss to them; they do not shift
            *MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES.values()}
_NAMES = re.compile("|".join(loss_utils.LOSS_MAPPING))
# The names of the output classes of models whose loss does not shift.
_OUTPUTS = re.compile("Seq2Seq|MaskedLM|Classif|MultipleChoice|NextSentence")


class Step(NamedTuple):
    """Holds the arguments that the Trainer does not pass to its loss function."""

    model: Any = None
    row_weight: Optional[Tensor] = None


_OUTSIDE = Step()
STEP: "ContextVar[Step]" = ContextVar("sparse_ce_step", default=_OUTSIDE)


def shifts_labels(model: Any) -> bool:
    """Returns True if the model's own loss compares position i with label i + 1, and False if it compares it with label
    i.

    Raises:
        ValueError: if this cannot be determined from the model's class.
    """
    base = unwrapped(model, "module", "_orig_mod")
    found = None if base is None else _of_class(base)
    if found is None:
        fail(f"shift must be True or False for a {type(base or model).__name__}, whose own loss is unknown, got None; "
             "use causal_lm_loss(shift=True) if logits i predict label i + 1, and causal_lm_loss(shift=False) if they "
             "predict label i")
    return found


def outputs_shift(outputs: Any) -> bool:
    """Returns False if the class of ``outputs`` belongs to a model whose loss does not shift labels, and True
    otherwise."""
    return not _OUTPUTS.search(type(outputs).__name__)


def _of_class(model: Any) -> Optional[bool]:
    loss = _named_loss(model)
    if loss is loss_utils.ForSequenceClassificationLoss:
        kind = getattr(model.config, "problem_type", None)
        check(model.config.num_labels > 1 and kind in (None, "single_label_classification"),
              f"compute_loss_func must be None for a {type(model).__name__} with problem_type={kind!r} and "
              f"num_labels={model.config.num_labels}, "
              "whose loss is not a cross entropy, got causal_lm_loss; use the model's own loss")
    configs = (model.config, getattr(model.config, "text_config", None))
    if any(getattr(config, "is_encoder_decoder", False) for config in configs) or loss in _WITHOUT_SHIFT:
        return False
    if any(kind.__name__ in _UNNAMED for kind in type(model).__mro__):
        return False
    # transformers uses the loss of causal language models for every class with an unknown name.
    return True if loss in (None, loss_utils.ForCausalLMLoss) and _calls_loss_function(type(model)) else None


def _named_loss(model: Any) -> Any:
    """Returns the loss that transformers registers for ``loss_type``, or for the name of the class or of one of its
    bases."""
    names = [getattr(model, "loss_type", None) or "", *(kind.__name__ for kind in type(model).__mro__)]
    for name in names:
        found = _NAMES.search(name)
        if found:
            return loss_utils.LOSS_MAPPING.get(name, loss_utils.LOSS_MAPPING[found.group()])
    return None


def _calls_loss_function(kind: type) -> bool:
    """Returns False if the class computes the loss in its own code. Decoders of encoder-decoders do so, and do not
    shift."""
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
