"""Reads log-probabilities of vLLM, and of servers whose JSON is similar: OpenAI's format with ids of tokens."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Dict, List, Optional, Tuple

import torch

from .._core.errors import check, described, fail, shortened
from .._core.options import is_integer
from ..targets.sparse_target import SparseTarget
from .reading import reading
from .sequence import EXCESS, Stored, target_of

_LOWEST = -9999.0  # servers write this or a lower number for -inf, which JSON cannot represent
_IDS = ("id", "token_id")  # the id of a token in the JSON of llama.cpp and of Fireworks
Entries = Tuple[List[int], List[float]]


def from_vllm(logprobs: Any, *, num_classes: Optional[int] = None) -> SparseTarget:
    """Converts vLLM's output for a text of S tokens to a jagged target (S,) with float32 log-probabilities.

    Args:
        logprobs: one of

            - ``RequestOutput.prompt_logprobs`` or ``CompletionOutput.logprobs``: for each position a dict from token id
              to ``Logprob``, or None; or the ``FlatLogprobs`` of ``SamplingParams(flat_logprobs=True)``.
            - ``prompt_logprobs`` of the server: the same, from ids as strings to ``{"logprob": ..., "rank": ...}``.
            - ``choice["logprobs"]`` of the server, for completions (``top_logprobs``) and chats (``content``). The
              request must set ``"return_tokens_as_token_ids": true`` to get ids instead of texts.
            - the same of a server that returns ids beside the texts: ``id`` (llama.cpp) or ``token_id`` (Fireworks) of
              each token, or ``token_ids`` of the sampled tokens (Together), which are then the only entries. Also
              ``completion_probabilities`` of llama.cpp.
        num_classes: size of the vocabulary. If it is given, ids are checked against it.

    Returns:
        A target of log-probabilities, whose row i is the model's prediction for token i (``predicts="token"``). A
        position without entries, such as the first of a prompt, is ignored. vLLM lists the sampled token in addition to
        the most likely tokens; if it is one of them, it counts once.

    Raises:
        TypeError, ValueError: if ``logprobs`` is none of these, if an id is outside the vocabulary, or if a
            log-probability is positive or NaN. Values up to 1e-3 above 0 are rounding errors, and count as 0.

    Examples:
        >>> from_vllm([None, {7: -0.1, 9: -2.5}], num_classes=10).tolist()
        [None, [(7, -0.10000000149011612), (9, -2.5)]]
        >>> chat = {"content": [{"token": "token_id:7", "logprob": -0.5, "top_logprobs": [
        ...     {"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -1.5}]}]}
        >>> from_vllm(chat).tolist()
        [[(7, -0.5), (9, -1.5)]]
    """
    with reading("logprobs must be as vLLM returns them", None, fix="pass them unchanged"):
        return jagged(entries_of(logprobs), num_classes)


def jagged(entries: List[Entries], num_classes: Optional[int]) -> SparseTarget:
    """Returns a target with these entries in each position."""
    with reading("logprobs must be as the server returns them", None, fix="pass them unchanged"):
        rows = [_once(*row) for row in entries]
        counts = torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int64)
        ids = torch.tensor(list(chain.from_iterable(row for row, _ in rows)), dtype=torch.int64)
        values = torch.tensor(list(chain.from_iterable(row for _, row in rows)), dtype=torch.float32)
    stored = Stored(ids, values, counts)
    for wrong, what, t in ((~(values <= 0), "logprobs must be at most 0", values),
                           ((ids < 0) | (ids >= (num_classes or 2**31)),
                            f"token ids must be in [0, {num_classes or 2**31})", ids)):
        if wrong.any():
            entry = int(wrong.to(torch.uint8).argmax())
            fail(f"{what}, got {t[entry].item()} at position {stored.position_of(entry)}")
    return target_of(stored, num_classes)


def entries_of(logprobs: Any) -> List[Entries]:
    """Returns token ids and log-probabilities of each position, in their order."""
    if hasattr(logprobs, "model_dump"):  # clients of the server return pydantic models
        logprobs = logprobs.model_dump()
    if hasattr(logprobs, "start_indices"):
        return _of_flat(logprobs)
    if isinstance(logprobs, Mapping):
        return _of_server(logprobs)
    if not isinstance(logprobs, Sequence) or isinstance(logprobs, str):
        fail("logprobs must be a list with a dict for each position, FlatLogprobs, or the logprobs of a choice, got "
             f"{type(logprobs).__name__}", TypeError)
    if any(isinstance(row, Mapping) and "top_logprobs" in row for row in logprobs):
        return _of_content(logprobs)
    return [_of_dict(row, i, bare=True) for i, row in enumerate(logprobs)]


def _of_flat(data: Any) -> List[Entries]:
    _check_length("logprobs", data.logprobs, len(data.token_ids), "token_ids")
    _check_length("end_indices", data.end_indices, len(data.start_indices), "start_indices")
    rows = []
    for i, (begin, end) in enumerate(zip(data.start_indices, data.end_indices)):
        check(0 <= begin <= end <= len(data.token_ids), f"indices must ascend from 0 to {len(data.token_ids)}, got "
              f"{begin} to {end} at position {i}")
        rows.append(([id_of(token, i) for token in data.token_ids[begin:end]],
                     [logprob_of(value, i) for value in data.logprobs[begin:end]]))
    return rows


def _of_server(data: Mapping[str, Any]) -> List[Entries]:
    if data.get("content") is not None:
        return _of_content(data["content"])
    tokens, chosen, ids = (data.get(name) for name in ("tokens", "token_logprobs", "token_ids"))
    top = data.get("top_logprobs")
    if ids is not None:
        texts = [None] * len(ids) if tokens is None else tokens
        top = [None] * len(ids) if top is None else top
        for name, part in ("token_logprobs", chosen), ("tokens", texts), ("top_logprobs", top):
            _check_length(name, part, len(ids), "token_ids")
        # The id of any other token than the sampled one is unknown: its text raises an error below.
        top = [row and {text: v for text, v in row.items() if text != sampled} for row, sampled in zip(top, texts)]
        tokens = [int(i) if isinstance(i, float) and i.is_integer() else i for i in ids]  # Together's client: floats
    if top is None:
        fail(f"logprobs must have 'content', 'top_logprobs' or 'token_ids', got "
             f"{shortened(str(sorted(map(str, data))))}; request logprobs and top_logprobs")
    rows = [_of_dict(row, i) for i, row in enumerate(top)]
    if tokens is not None or chosen is not None:
        _check_length("tokens", tokens, len(rows), "top_logprobs")
        _check_length("token_logprobs", chosen, len(rows), "top_logprobs")
    # The sampled token need not be among the most likely ones.
    for i, (row, token, logprob) in enumerate(zip(rows, tokens or [], chosen or [])):
        if logprob is not None:
            row[0].insert(0, id_of(token, i))
            row[1].insert(0, logprob_of(logprob, i))
    return rows


def _of_content(content: Sequence[Any]) -> List[Entries]:
    rows = []
    for i, position in enumerate(content):
        _check_dict("content must have a dict for each position", position, i)
        entries = [position, *(position.get("top_logprobs") or [])]
        for entry in entries:
            _check_dict("top_logprobs must have dicts", entry, i)
        tokens = [next((e[name] for name in _IDS if e.get(name) is not None), e.get("token")) for e in entries]
        rows.append(([id_of(token, i) for token in tokens], [logprob_of(e, i) for e in entries]))
    return rows


def _check_dict(must: str, row: Any, i: int) -> None:
    if not isinstance(row, Mapping):
        fail(f"{must}, got {type(row).__name__} at position {i}", TypeError)


def _check_length(name: str, part: Any, n: int, of: str) -> None:
    found = None if part is None else len(part)
    check(found == n, f"{name} must be {n}, one for each of {of}, got {found}")


def _of_dict(row: Any, i: int, bare: bool = False) -> Entries:
    if row is None:
        return [], []
    _check_dict("logprobs must have a dict or None for each position", row, i)
    return [id_of(token, i, bare) for token in row], [logprob_of(entry, i) for entry in row.values()]


def id_of(token: Any, i: int, bare: bool = False) -> int:
    """Returns the id of a token. If ``bare``, a string of digits is an id; otherwise the text "7" may stand for any
    id."""
    if not isinstance(token, str):
        if type(token) is not int and not is_integer(token):
            fail(f"token must be an id, such as 7 or 'token_id:7', got {described(token)} at position {i}")
        return int(token)
    digits = token.removeprefix("token_id:")
    if not digits.isdecimal() or digits == token and not bare:
        fail(f"token must be an id, such as 'token_id:123', got {described(token)} at position {i}; request ids from "
             "the server with return_tokens_as_token_ids. If it returns only the sampled tokens' token_ids, set "
             "top_logprobs to None")
    return int(digits)


def logprob_of(entry: Any, i: int) -> float:
    number: Any = entry.get("logprob") if isinstance(entry, Mapping) else getattr(entry, "logprob", entry)
    try:
        value = float(number)
    except (TypeError, ValueError, OverflowError):
        fail(f"logprob must be a number, got {described(number)} at position {i}")
    return -torch.inf if value <= _LOWEST else 0.0 if 0 < value <= EXCESS else value


def _once(ids: List[int], values: List[float]) -> Entries:
    """Removes repeated ids, and ids with probability 0."""
    kept: Dict[int, float] = {}
    for token, value in zip(ids, values):
        if value != -torch.inf:
            kept.setdefault(token, value)
    return list(kept), list(kept.values())
