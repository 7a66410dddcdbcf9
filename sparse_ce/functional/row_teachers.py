"""Checks the arguments of a teacher whose divergences a loss of rows receives."""

from typing import Any, Dict, Optional, Tuple, Union

from torch import Tensor, nn

from .._core.arguments import DIVERGENCES, SEVERAL, DenseArguments
from .._core.errors import described, fail
from .._core.flags import check_flags
from .._core.options import checked_beta
from .._core.weight_blocks import LinearWeight
from ..ops.head.teacher import RowTeacher
from .dense_inputs import dense_options, teacher_head_of
from .inputs import Source

HeadOfTeacher = Union[Tuple[Tensor, LinearWeight], Tuple[Tensor, LinearWeight, Optional[Tensor]]]
"""Hidden states, weight and bias of a teacher."""


def requested_divergences(**flags: bool) -> Tuple[str, ...]:
    """Checks flags by the names of their options, and returns the names of the divergences that they request."""
    check_flags(**flags)
    return tuple(name for name in SEVERAL if flags[f"return_{name}"])


def teacher_of_rows(source: Source, linear_weight: LinearWeight, teacher: Any, requested: Tuple[str, ...],
                    beta: Optional[float], of_student: Dict[str, Any],
                    of_teacher: Dict[str, Any]) -> Optional[RowTeacher]:
    """Checks the arguments of a teacher. Returns None if there is none. The transforms of both models are
    ``logit_scale`` and ``softcap``."""
    if beta is not None and "jsd" not in requested:
        fail(f"beta must be None without return_jsd=True, got {beta}")
    if not requested:
        if teacher is not None:
            fail("teacher must be None if no divergence is requested, got a teacher; pass return_forward_kl=True, or "
                 "another of the divergences")
        for name, value in of_teacher.items():
            if value is not None:
                fail(f"teacher_{name} must be None without a teacher, got {described(value)}")
        return None
    if teacher is None:
        fail(f"teacher must be given for return_{requested[0]}=True, got None; pass (teacher_input, teacher_weight)")
    input, weight, bias = head_of(teacher)
    hidden, head = teacher_head_of(input, weight, bias, linear_weight, source)
    kind = "jsd" if "jsd" in requested else requested[0]
    scale = of_teacher["logit_scale"]
    options = dense_options(source, kind, checked_beta(kind, beta), of_student,
                            {**of_teacher, "logit_scale": 1.0 if scale is None else scale})
    options["kind"] = DIVERGENCES.index(requested[0]) if len(requested) == 1 else len(DIVERGENCES)
    return RowTeacher(head, DenseArguments(hidden, **options), requested)


def head_of(teacher: Any) -> Tuple[Any, Any, Any]:
    """Returns hidden states, weight and bias of a teacher."""
    if not isinstance(teacher, (tuple, list)) or len(teacher) not in (2, 3):
        fail("teacher must be (teacher_input, teacher_weight) or (teacher_input, teacher_weight, teacher_bias), got "
             f"{described(teacher)}", TypeError)
    hidden, weight, bias = (*teacher, None)[:3]
    if isinstance(weight, nn.Module):
        fail(f"teacher must hold the weight of the teacher's head, got {type(weight).__name__}; pass (teacher_input, "
             "head.weight, head.bias)", TypeError)
    return hidden, weight, bias
