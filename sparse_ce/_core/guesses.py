"""Answers a call with unknown or missing arguments by the names that the function has.

Nothing is checked in calls that succeed: Python has already raised its ``TypeError``."""

import difflib
import functools
import inspect
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, TypeVar

import torch

from .errors import described

_F = TypeVar("_F", bound=Callable[..., Any])

_NAMES = {  # parameter: the names that other libraries have for it
    "input": "logits inputs preds pred x hidden hidden_states student_logits student_hidden e",
    "student": "input logits student_logits log_probs",
    "target": "labels targets label y y_true tgt ids token_ids",
    "indices": "target targets labels ids index token_ids candidates negatives actions",
    "teacher": "target teacher_probs teacher_log_probs teacher_topk",
    "labels": "targets label true_labels",
    "linear_weight": "lm_head_weight head_weight proj_weight classifier c W",
    "linear_bias": "bias head_bias b",
    "weight": "weights class_weight class_weights ce_weight",
    "pos_weight": "pos_weights positive_weight",
    "row_weight": "sample_weight sample_weights token_weight token_weights row_weights loss_weight",
    "row_mask": "mask loss_mask padding_mask valid_mask",
    "ignore_index": "ignore_idx ignored_index ignore_label padding_idx pad_token_id",
    "reduction": "reduce size_average average",
    "label_smoothing": "smoothing label_smooth smoothing_factor eps epsilon",
    "z_loss": "lse_square_scale z_loss_weight z_loss_coef z_loss_multiplier",
    "softcap": "softcapping soft_cap logit_softcap logit_softcapping final_logit_softcapping logits_soft_cap",
    "normalizer": "num_items_in_batch avg_factor divisor denominator",
    "num_classes": "vocab_size vocab num_labels n_classes org_vocab_size",
    "group": "process_group tp_group vocab_parallel_options",
    "return_lse": "return_logsumexp lse",
    "return_argmax": "return_predicted_tokens return_predictions return_accuracy return_token_accuracy",
    "return_entropy": "entropy",
    "chunk_rows": "block_size",
    "logits_dtype": "accum_dtype dtype out_dtype",
    "gamma": "focal_gamma",
    "beta": "skew_alpha jsd_beta generalized_jsd_beta",
    "values_are": "kind",
    "alpha": "weight_soft_loss distillation_weight kd_ratio",
}
_FIXES: Dict[str, Sequence[Tuple[str, str]]] = {  # name: (a parameter, the fix for functions that have it)
    **{name: (("temperature", "temperature="), ("logit_scale", "logit_scale=1 / temperature"))
       for name in ("temperature", "temp", "tau", "T")},
    **{name: (("linear_weight", "linear_weight=head.weight, linear_bias=head.bias"),
              ("target", "the logits, or call the function of the same name with linear_"))
       for name in ("head", "lm_head", "linear", "lin")},
    **{name: (("row_mask", "row_mask="), ("indices", "labels of ignore_index in these rows"))
       for name in ("row_mask", "mask", "loss_mask", "padding_mask", "valid_mask", "attention_mask")},
    **{name: (("dim", "dim="), ("input", "classes in the last dimension: input.movedim(1, -1)"))
       for name in ("dim", "class_dim", "axis")},
    "bias": (("linear_bias", "linear_bias=bias"), ("input", "logits that contain the bias")),
    **{name: (("chunk_rows", "chunk_rows=, because the loss is computed in chunks of rows"),
              ("chunk_classes", "chunk_classes=, because the loss is computed in blocks of classes"),
              ("input", "no chunks, because all logits exist; functions that begin with linear_ have them"))
       for name in ("chunk_size", "chunk_rows", "chunk_classes")},
    "shift": (("target", "SparseTarget.from_index(labels).shift(1) as target, or input[:, :-1] and labels[:, 1:]"),),
    "num_chunks": (("chunk_rows", "chunk_rows=rows // num_chunks"),
                   ("chunk_classes", "chunk_classes=classes // num_chunks"),
                   ("input", "no chunks, because all logits exist; functions that begin with linear_ have them")),
    "return_z_loss": (("return_lse", "nothing for False, or return_lse=True, from which z_loss * lse ** 2 follows"),),
    "reduce": (("reduction", "reduction='none' for reduce=False"),),
    "size_average": (("reduction", "reduction='mean', or 'sum' for size_average=False"),),
    "log_target": (("teacher", "SparseTarget.from_topk(indices, log_probs, values_are='log_probs') as teacher"),
                   ("target", "SparseTarget.from_topk(indices, log_probs, values_are='log_probs') as target")),
    **{name: (("linear_weight", "teacher=(teacher_hidden, teacher_weight)"),
              ("teacher", "the logits of the teacher, or call the function of the same name with linear_"))
       for name in ("teacher_input", "teacher_hidden", "teacher_weight")},
    "teacher_logits": (("alpha", "teacher=teacher_logits"),
                       ("teacher", "teacher=sparse_ce.topk_log_probs(teacher_logits, k)"),
                       ("target", "sparse_ce.topk_log_probs(teacher_logits, k) as target")),
    **{name: (("values", "values="), ("target", "(indices, values) as target"),
              ("teacher", "(indices, values) as teacher")) for name in ("values", "probs", "indices")},
    **{name: (("values_are", "values, values_are='log_probs'"),) for name in ("log_probs", "logprobs", "log_values")},
    "lengths": (("offsets", "offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"),),
    "inplace_backward": (("inplace", "inplace='backward'"),),
    "return_lse": (("return_log_tail", "no flag, because lse is always a field of the result"),),
}


def _fix(name: str, parameters: Mapping[str, Any]) -> Optional[str]:
    """Returns what to pass instead of the unknown argument ``name`` to a function with these ``parameters``."""
    found = [fix for parameter, fix in _FIXES.get(name, ()) if parameter in parameters]
    found += [f"{parameter}=" for parameter, names in _NAMES.items()
              if parameter in parameters and name in names.split()]
    found += [f"{parameter}=" for parameter in difflib.get_close_matches(name, parameters, 1, 0.7)]
    return found[0] if found else None


def explanation(of: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any],
                elsewhere: Optional[Mapping[str, str]] = None) -> Optional[TypeError]:
    """Returns an error if the arguments do not fit the ``signature`` of the function or the class named ``of``.

    ``elsewhere`` has the fixes for names that belong into another call."""
    try:
        signature.bind(*args, **kwargs)
        return None
    except TypeError as error:
        reason = str(error)
    parameters = {name: p for name, p in signature.parameters.items() if name not in ("self", "cls")}
    keywords = [name for name, p in parameters.items() if p.kind == p.KEYWORD_ONLY]
    call = f"{of}({', '.join(name for name in parameters if name not in keywords)})"
    for name, value in kwargs.items():
        if name not in parameters:
            fix = (elsewhere or {}).get(name) or _fix(name, parameters)
            return TypeError(f"sparse_ce: arguments must be those of {of}, got {name}={described(value)}; "
                             + (f"pass {fix}" if fix else f"its arguments are {', '.join(parameters)}"))
    by_name = f"; pass options by name: {', '.join(keywords)}" if keywords and "too many" in reason else ""
    return TypeError(f"sparse_ce: arguments must be {call}, got {reason}{by_name}")


def explained(function: _F) -> _F:
    """Wraps a function so that a call with arguments that it does not have raises an error with the fix."""
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            reraise(function, args, kwargs)
            raise

    return wrapper  # type: ignore[return-value]


def reraise(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises the explanation of a ``TypeError`` of a call, if its arguments are the cause and it is not compiled."""
    if torch.compiler.is_compiling():
        return
    found = explanation(function.__qualname__, inspect.signature(function), args, kwargs)
    if found is not None:
        raise found from None
