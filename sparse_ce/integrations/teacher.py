"""Builds batches from a teacher's cached top-k, in the formats of inference servers and distillation tools."""

import functools
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, fail
from .._core.flags import check_flags
from .._core.options import is_number
from ..data.sequence import CHOICES, Predicts, as_predicts, without_excess
from ..data.vllm import entries_of
from ..targets.collation import cat, collate
from ..targets.entries import GivenAs
from ..targets.sparse_target import SparseTarget
from .batch_layout import first_positions, laid, pad_inputs, side_of, widened, without_rows


class TopKCollator:
    """Collates samples with a teacher's cached top-k, which becomes the labels as a ``SparseTarget``.

    Use it as a ``data_collator``.

    A sample is a dict with ``input_ids`` (S,) and the teacher's candidates for each of its S positions, in one of these
    formats:

    - ids and values: (S, K) tensors, arrays or lists, ragged or padded (DistillKit, axolotl, TRL). Padding is an id of
      -100, a value of -inf, or False in ``mask``; its id may be any number.
    - vLLM's ``prompt_logprobs``: one dict per position from token id to ``Logprob``, number or JSON object; None for a
      position without candidates. vLLM's ``FlatLogprobs`` work too. ``indices`` is not read.

    A repeated id in a position counts once: vLLM lists the sampled token in addition to the top k. Positions without a
    candidate are ignored. Positions whose ``labels`` are -100, if the sample has labels, are ignored too.

    Hard labels can replace a missing teacher, in some positions or whole samples (``fill_with_labels``), or be mixed
    with the teacher (``label_weight``).

    Args:
        collator: builds the batch from all other keys. By default sequences as long as ``input_ids`` are padded with 0.
            A collator that concatenates all samples into one row (``DataCollatorWithFlattening``, TRL's with
            ``padding_free=True``) gets labels (1, total). The first position of each sequence, which no other position
            predicts, is then ignored.
        indices, values, mask: keys of a sample, for classes, values and mask (S, K). ``mask=None``: there is no mask.
        values_are: ``"log_probs"``, ``"probs"`` or ``"logits"``, as in ``SparseTarget.from_topk``. ``"logits"`` also
            normalizes log-probabilities over the candidates.
        predicts: ``"next"`` if row i is the teacher's prediction for token i + 1, as its logits at i are; ``"token"``
            if row i is its prediction for token i. It is optional if each sample has a key ``predicts`` (S,), as in
            caches of :mod:`sparse_ce.data`: 1 (``"next"``) or 0 (``"token"``) for each position. It is also optional
            for vLLM's objects, which are ``"token"``. A sample that contradicts it raises an error. The labels are
            always those of ``"token"``, as a loss that shifts labels expects.
        k: number of candidates kept in each position, those with the largest values. All batches then have the same K.
        padding_side: the side on which ``collator`` pads, ``"right"`` or ``"left"``. None reads the side from the
            batch's ``attention_mask``; without a mask it is the right side.
        num_classes: size of the vocabulary. If it is given, the loss checks that it is that of the logits.
        fill_with_labels: if True, positions without a candidate use their label instead, with weight 1. A sample may
            then have no teacher at all.
        label_weight: weight, in [0, 1), of the sample's own label in the target of each position that has both. The
            candidates' probabilities are multiplied by 1 - ``label_weight``. The cross entropy of this target is the
            same weighted sum of both losses.
        hard_labels: if True, the batch also gets ``hard_labels`` (B, S): the samples' ``labels`` or, without them,
            their ``input_ids``. Ignored positions are -100. Use it with ``fuse_lm_head(distillation=...)``.
        log_tail: key of (S,) logarithms of the teacher's probability outside its candidates. The batch gets
            ``teacher_log_tail`` (B, S). Its probability is multiplied by 1 - ``label_weight``, like those of the
            candidates. It is -inf if a sample has no teacher. None: there is no tail.
        row_weight: key of (S,) token weights, in the positions of the labels. The batch gets them under the same key,
            (B, S) float32, 0 in the padding. Use it with ``row_weight`` of :func:`causal_lm_loss` and
            :func:`fuse_lm_head`. None: there are no weights.

    With the Trainer set ``remove_unused_columns=False``: by default it drops keys that are not arguments of the model.

    Raises:
        TypeError, ValueError: if an argument has the wrong type or value; in a call, if a sample lacks a key, or if its
            parts differ in length or contradict ``predicts``.

    Examples:
        >>> sample = {"input_ids": [5, 6, 7], "teacher_ids": [[5, 9], [6], [7, 2]],
        ...           "teacher_log_probs": [[-0.1, -2.4], [0.0], [-0.7, -0.7]]}
        >>> TopKCollator(predicts="token", k=2)([sample])["labels"].indices.shape
        torch.Size([1, 3, 2])
    """

    def __init__(self, collator: Optional[Callable[[List[Dict[str, Any]]], Dict[str, Any]]] = None, *,
                 indices: str = "teacher_ids", values: str = "teacher_log_probs", mask: Optional[str] = None,
                 values_are: GivenAs = "log_probs", predicts: Optional[Predicts] = None, k: Optional[int] = None,
                 padding_side: Optional[str] = None, num_classes: Optional[int] = None, fill_with_labels: bool = False,
                 label_weight: float = 0.0, hard_labels: bool = False, log_tail: Optional[str] = None,
                 row_weight: Optional[str] = None) -> None:
        check(values_are in ("log_probs", "probs", "logits"),
              f"values_are must be 'log_probs', 'probs' or 'logits', got {values_are!r}")
        check(predicts in (None, "next", "token"), f"predicts must be 'next' or 'token', got {predicts!r}; {CHOICES}")
        check(padding_side in ("right", "left", None), f"padding_side must be 'right', 'left' or None, got "
              f"{padding_side!r}")
        check(k is None or k > 0, f"k must be positive or None, got {k}")
        self.collator = collator or functools.partial(pad_inputs, padding_side=padding_side or "right")
        self.indices, self.values, self.mask = indices, values, mask
        self.values_are, self.predicts, self.k, self.num_classes = values_are, predicts, k, num_classes
        check(is_number(label_weight) and 0 <= label_weight < 1,
              f"label_weight must be in [0, 1), got {label_weight!r}")
        check_flags(fill_with_labels=fill_with_labels, hard_labels=hard_labels)
        self.hard_labels, self.log_tail, self.row_weight = hard_labels, log_tail, row_weight
        self.padding_side, self.fill_with_labels, self.label_weight = padding_side, fill_with_labels, label_weight

    def __repr__(self) -> str:
        always = ("indices", "values", "values_are", "predicts", "k", "num_classes")
        options = [f"{name}={value!r}" for name, value in vars(self).items()
                   if name in always or name != "collator" and value not in (None, False)]
        return f"{type(self).__name__}({', '.join(options)})"

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
        """Returns the batch of ``collator``, with ``labels`` as a ``SparseTarget`` (B, S).

        Args:
            samples: at least one dict, see :class:`TopKCollator`.

        Returns:
            The batch with ``labels`` and, if requested, ``hard_labels`` (B, S) int64, ``teacher_log_tail`` (B, S)
            float32 and token weights (B, S) float32.

        Examples:
            >>> vllm = {"input_ids": [5, 6], "teacher_log_probs": [None, {6: -0.1, 9: -2.4}]}
            >>> TopKCollator(num_classes=10)([vllm])["labels"].ne(-100)
            tensor([[False,  True]])
        """
        check(len(samples) > 0, "samples must be at least one, got none")
        for sample in samples:
            if "input_ids" not in sample:
                fail(f"sample must hold 'input_ids', got {sorted(sample)}; a TeacherCache renames columns by names=")
        used = {self.indices, self.values, self.mask, self.log_tail, self.row_weight, "labels", "predicts"}
        batch = self.collator([{key: v for key, v in sample.items() if key not in used} for sample in samples])
        rows = [self._target(sample) for sample in samples]
        size, length = batch["input_ids"].shape
        side = side_of(batch.get("attention_mask"), [len(target) for target in rows], [size, length], self.padding_side)
        if size == len(samples):
            labels = collate([widened(target, length, side) for target in rows])
        else:
            total = sum(len(target) for target in rows)
            check((size, length) == (1, total), f"collator must make input_ids ({len(samples)}, S) or, of all "
                  f"sequences in a row, (1, {total}), got {[size, length]}")
            labels = cat(rows).unsqueeze(0)
        first = first_positions(batch.get("position_ids"), [len(target) for target in rows], size, length)
        batch = {**batch, "labels": labels if first is None else without_rows(labels, first)}
        if self.hard_labels:
            hard = laid([_hard_labels(sample) for sample in samples], size, length, side, IGNORE_INDEX)
            batch["hard_labels"] = hard if first is None else hard.masked_fill(first, IGNORE_INDEX)
        if self.log_tail is not None:
            batch["teacher_log_tail"] = laid([self._log_tail(sample) for sample in samples], size, length, side, 0.0)
        if self.row_weight is not None:
            batch[self.row_weight] = laid([_column(sample, self.row_weight) for sample in samples], size, length, side,
                                          0.0)
        return batch

    def _target(self, sample: Mapping[str, Any]) -> SparseTarget:
        """Returns the rows of one sample, (S,)."""
        rows, values_are, column = len(sample["input_ids"]), self.values_are, sample.get("labels")
        labels = None if column is None else torch.as_tensor(column)
        if self.fill_with_labels and labels is not None and sample.get(self.values) is None:
            indices, values = torch.full((rows, 1), IGNORE_INDEX), torch.zeros(rows, 1)
        else:
            indices, values = self._entries(sample)
        check(indices.shape[0] == rows, f"{self.values} must have a row for each of the {rows} input_ids, got "
              f"{indices.shape[0]}; add rows without candidates for tokens without a teacher, and truncate both "
              "together")
        if self.k is not None:
            indices, values = _largest(indices, values, self.k)
        behind = self._behind(sample)
        indices, values = _moved(indices, behind, IGNORE_INDEX), _moved(values, behind, 0.0)
        if self.fill_with_labels or self.label_weight:
            if labels is None:
                fail(f"sample must hold 'labels' for fill_with_labels and label_weight, got {sorted(sample)}")
            indices, values = self._with_labels(indices, _as_log_probs(indices, values, values_are), labels)
            values_are = "log_probs"
        return SparseTarget.from_topk(
            indices, values, values_are=values_are, row_mask=None if labels is None else labels.ne(IGNORE_INDEX),
            num_classes=self.num_classes, ignore_empty=True)

    def _behind(self, sample: Mapping[str, Any]) -> Tensor:
        """Returns bool (S,): True if a row predicts the token after its position, according to the sample or the
        caller."""
        rows, teacher, column = len(sample["input_ids"]), _as_rows(sample.get(self.values)), sample.get("predicts")
        if teacher is None or isinstance(teacher, (list, tuple)) and all(row is None for row in teacher):
            return torch.zeros(rows, dtype=torch.bool)
        option = self.predicts
        if _is_prompt_logprobs(teacher):
            check(option in (None, "token"), f"predicts must be 'token' for vLLM's log-probabilities, got {option!r}; "
                  f"pass rows of other tools as ids and values. {CHOICES}")
            option = "token"
        if column is None:
            if option is None:
                fail(f"predicts must be 'next' or 'token', got None and a sample without it, {sorted(sample)}; "
                     f"{CHOICES}")
            return torch.full((rows,), option == "next")
        column = torch.as_tensor(column)
        check(column.shape == (rows,), f"predicts must have an element for each of the {rows} input_ids, got shape "
              f"{list(column.shape)} in a sample")
        lengths = torch.as_tensor(sample.get("seq_lengths", [rows])).tolist()
        seen = {as_predicts(part, "in a sequence of a sample") for part in column.split(lengths)} - {None}
        check(option is None or seen <= {option}, f"predicts must match the samples, {', '.join(map(repr, seen))}, got "
              f"{option!r}; omit it, or correct the samples. {CHOICES}")
        return column.bool()

    def _log_tail(self, sample: Mapping[str, Any]) -> Tensor:
        """Returns the teacher's log tail (S,), in the positions of the labels, scaled by 1 - ``label_weight``."""
        assert self.log_tail is not None
        if self.fill_with_labels and sample.get(self.values) is None:
            return torch.full((len(sample["input_ids"]),), -torch.inf)
        tail = _moved(_column(sample, self.log_tail), self._behind(sample), 0.0)
        return tail + math.log1p(-self.label_weight) if self.label_weight else tail

    def _with_labels(self, indices: Tensor, values: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        """Appends the label to the candidates and to their log-probabilities, (S, K + 1)."""
        taught = indices.ne(IGNORE_INDEX).any(1)
        weight = torch.where(taught, self.label_weight, float(self.fill_with_labels)).to(values.dtype)
        label = torch.where(weight > 0, labels, IGNORE_INDEX)[:, None]
        values = torch.where(taught[:, None], values + math.log1p(-self.label_weight), values)
        return torch.cat((indices, label), 1), torch.cat((values, weight.clamp(min=1e-30).log()[:, None]), 1)

    def _entries(self, sample: Mapping[str, Any]) -> Tuple[Tensor, Tensor]:
        """Returns ids and values (S, K). Padding has the id -100."""
        mask = None
        teacher = _as_rows(sample.get(self.values))
        if teacher is None:
            fail(f"sample must hold {self.values!r}, got {sorted(sample)}; the Trainer drops it unless "
                  "TrainingArguments(remove_unused_columns=False)")
        if _is_prompt_logprobs(teacher):
            rows = entries_of(teacher)
            indices, values = _padded([r[0] for r in rows], IGNORE_INDEX).long(), _padded([r[1] for r in rows], 0.0)
        else:
            check(self.indices in sample, f"sample must hold {self.indices!r}, got {sorted(sample)}")
            indices, values = _padded(sample[self.indices], IGNORE_INDEX).long(), _padded(teacher, 0.0)
            mask = None if self.mask is None else _padded(sample[self.mask], 0).bool()
        check(indices.shape == values.shape and (mask is None or mask.shape == indices.shape),
               f"{self.indices}, {self.values} and mask must have one shape (S, K), got {list(indices.shape)}, "
               f"{list(values.shape)}" + ("" if mask is None else f", {list(mask.shape)}"))
        values = values.double() if values.dtype == torch.float64 else values.float()
        if self.values_are == "log_probs":
            values = without_excess(values)
        padding = indices.eq(IGNORE_INDEX) | (values.eq(0) if self.values_are == "probs" else values.isneginf())
        if mask is not None:
            padding = padding | ~mask
        indices = indices.masked_fill(padding, IGNORE_INDEX)
        padding = padding | _repeated(indices)
        return indices.masked_fill(padding, IGNORE_INDEX), values.masked_fill(padding, 0.0)


def _moved(t: Tensor, behind: Tensor, fill: float) -> Tensor:
    """Moves the rows of (S, ...) to the tokens that they predict, and writes ``fill`` into positions without a row."""
    if not behind.any():
        return t

    def of_rows(mask: Tensor) -> Tensor:
        return mask.reshape(-1, *[1] * (t.dim() - 1))

    return torch.where(of_rows(F.pad(behind, (1, -1))), F.pad(t, (*[0, 0] * (t.dim() - 1), 1, -1)),
                       t.masked_fill(of_rows(behind), fill))


def _column(sample: Mapping[str, Any], name: str) -> Tensor:
    """Returns a sample's column (S,) as float32."""
    if sample.get(name) is None:
        fail(f"sample must hold {name!r}, got {sorted(sample)}; the Trainer drops it unless "
             "TrainingArguments(remove_unused_columns=False)")
    column, rows = torch.as_tensor(sample[name]).float(), len(sample["input_ids"])
    check(column.shape == (rows,), f"{name} must have an element for each of the {rows} input_ids, got shape "
          f"{list(column.shape)}")
    return column


def _hard_labels(sample: Mapping[str, Any]) -> Tensor:
    return torch.as_tensor(sample["input_ids"] if sample.get("labels") is None else sample["labels"]).long()


def _as_log_probs(indices: Tensor, values: Tensor, values_are: str) -> Tensor:
    """Converts values (S, K) to log-probabilities. Padding has the id -100; its values are arbitrary but not NaN."""
    padding = indices.eq(IGNORE_INDEX)
    if values_are == "probs":
        return values.masked_fill(padding, 1.0).log()
    if values_are == "logits":
        values = values.masked_fill(padding, -torch.inf).log_softmax(1)
    return values.masked_fill(padding, 0.0)


def _is_prompt_logprobs(teacher: Any) -> bool:
    return hasattr(teacher, "start_indices") or isinstance(teacher, (list, tuple)) and (
        any(isinstance(row, Mapping) for row in teacher) or len(teacher) > 0 and all(row is None for row in teacher))


def _as_rows(option: Any) -> Any:
    """Converts an array of objects to a list. NumPy and ``datasets`` store ragged rows in such arrays."""
    return list(option) if getattr(getattr(option, "dtype", None), "hasobject", False) else option


def _padded(rows: Any, fill: float) -> Tensor:
    """Returns (S, K): tensors and arrays unchanged, lists of different lengths (or None) padded with ``fill``."""
    rows = _as_rows(rows)
    if hasattr(rows, "shape"):
        t = torch.as_tensor(rows)
        check(t.dim() == 2, f"teacher output must be (S, K), got {list(t.shape)}")
        return t
    rows = [[] if row is None else row.tolist() if hasattr(row, "tolist") else row for row in rows]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    flat = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    out = torch.full((len(rows), int(lengths.max()) if rows else 0), fill, dtype=flat.dtype)
    row_of = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    out[row_of, torch.arange(flat.numel()) - (lengths.cumsum(0) - lengths)[row_of]] = flat
    return out


def _repeated(indices: Tensor) -> Tensor:
    """Returns bool (S, K): True if an id occurred earlier in its row."""
    ordered, order = torch.sort(indices, dim=-1, stable=True)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter(1, order, again)


def _largest(indices: Tensor, values: Tensor, k: int) -> Tuple[Tensor, Tensor]:
    """Returns the k entries with the largest values, (S, k), padded if a row has fewer."""
    missing = max(0, k - indices.shape[1])
    indices, values = F.pad(indices, (0, missing), value=IGNORE_INDEX), F.pad(values, (0, missing))
    order = values.masked_fill(indices.eq(IGNORE_INDEX), -torch.inf).topk(k, dim=1).indices
    return indices.gather(1, order), values.gather(1, order)
