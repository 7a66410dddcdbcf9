"""Reads SGLang's log-probabilities, from its engine and from the JSON of its server."""

from collections.abc import Mapping, Sequence
from typing import Any, List, Optional

from .._core.errors import check, fail, shortened
from ..targets.sparse_target import SparseTarget
from .reading import reading
from .vllm import Entries, id_of, jagged, logprob_of


def from_sglang(top_logprobs: Any, *, num_classes: Optional[int] = None) -> SparseTarget:
    """Converts SGLang's output for a text of S tokens to a jagged target (S,) with float32 log-probabilities.

    Args:
        top_logprobs: ``meta_info["input_top_logprobs"]`` of a request with ``logprob_start_len=0``, for a prompt, or
            ``meta_info["output_top_logprobs"]``, for generated text. For each position it has a list of
            ``[logprob, id, text]``, or None. The request must set ``return_logprob`` and ``top_logprobs_num``.
        num_classes: size of the vocabulary. If it is given, ids are checked against it.

    Returns:
        A target of log-probabilities, whose row i is the model's prediction for token i (``predicts="token"``). A
        position without entries, such as the first of a prompt, is ignored.

    Raises:
        TypeError, ValueError: if ``top_logprobs`` is none of these, if an id is outside the vocabulary, or if a
            log-probability is positive or NaN. Values up to 1e-3 above 0 are rounding errors, and count as 0.

    Examples:
        >>> from_sglang([None, [[-0.1, 7, None], [-2.5, 9, None]]], num_classes=10).tolist()
        [None, [(7, -0.10000000149011612), (9, -2.5)]]
    """
    if isinstance(top_logprobs, Mapping):
        fail("top_logprobs must be meta_info['input_top_logprobs'] or meta_info['output_top_logprobs'], got a mapping "
             f"of {shortened(str(sorted(map(str, top_logprobs))))}", TypeError)
    if not isinstance(top_logprobs, Sequence) or isinstance(top_logprobs, str):
        fail("top_logprobs must be a list with a list or None for each position, got "
             f"{type(top_logprobs).__name__}", TypeError)
    with reading("top_logprobs must be as SGLang returns them", None, fix="pass them unchanged"):
        entries: List[Entries] = [_of_position(row, i) for i, row in enumerate(top_logprobs)]
    return jagged(entries, num_classes)


def _of_position(row: Any, i: int) -> Entries:
    if row is None:
        return [], []
    if not isinstance(row, Sequence) or isinstance(row, str):
        fail(f"top_logprobs must have a list or None for each position, got {type(row).__name__} at position {i}",
             TypeError)
    for entry in row:
        check(isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) >= 2, "top_logprobs must have "
              f"[logprob, id, text] for each class, got {shortened(str(entry))} at position {i}")
    return [id_of(entry[1], i) for entry in row], [logprob_of(entry[0], i) for entry in row]
