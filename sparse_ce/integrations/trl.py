"""TRL: distillation with :class:`trl.SFTTrainer`, from a cache or with the teacher in the loop.

``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``GRPOTrainer`` and ``RLOOTrainer`` need nothing of this module:
:func:`sparse_ce.integrations.transformers.fuse_lm_head` answers them.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from trl import SFTTrainer, pack_dataset
from trl.models.utils import unwrap_model_for_generation

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check
from .._core.flags import check_flags
from ..data.sequence import CHOICES, Predicts
from ..targets.sparse_target import SparseTarget
from .fused_head import fuse_lm_head, topk_of
from .teacher import TopKCollator

__all__ = ["DistillationTrainer"]

_CACHED = {"teacher_ids": "teacher_logprobs", "ids": "log_probs"}  # the names of columns; the latter of our Parquet
_LOG_TAIL = ("teacher_log_tail", "log_tail")


class DistillationTrainer(SFTTrainer):  # type: ignore[misc]
    """``SFTTrainer`` whose loss is a divergence from a teacher: of its cached top-k, or of a model in the loop.

    Everything else is TRL's: PEFT, bf16, gradient checkpointing, packing, padding-free batches, accumulation, several
    processes, its log of loss, entropy and token accuracy (against the teacher's likeliest class).

    Off-line, ``teacher_model=None``, a dataset holds ``input_ids`` (S,) and the teacher's candidates, ``teacher_ids``
    and ``teacher_logprobs`` (S, K), or the columns ``ids``, ``log_probs`` of a Parquet cache of :mod:`sparse_ce.data`;
    ``labels`` say which positions count, and ``completion_mask`` does with ``completion_only_loss=True``.
    ``teacher_log_tail`` or ``log_tail`` (S,) is read where it is there. With a teacher in the loop, any dataset of
    ``SFTTrainer`` will do: the teacher reads each batch, and ``k`` classes a position are kept of it, without its
    logits.

    On-policy, in a share of the steps the student continues the prompts itself: what stands before the first label of
    each sequence. The teacher is asked about the student's text.

    Args:
        model, args, train_dataset, ...: as for ``SFTTrainer``. The model must not be fused before.
        teacher_model: a causal language model of transformers with the student's vocabulary; frozen here.
        k: classes kept of a teacher in the loop.
        predicts: of a cache, ``"next"`` if row i is what the teacher predicts behind token i, as its logits at i are;
            ``"token"`` if row i is what it predicts of token i (vLLM). It is needed unless the dataset has the column
            ``predicts`` of a cache of :mod:`sparse_ce.data`.
        kind, tail, beta, floor, temperature, temperature_squared, alpha: as for :func:`sparse_ce.distillation_loss`.
            At a temperature the student's logits are divided by it, and so are those of a teacher in the loop, whose
            tail is then known; a cached teacher's candidates are tempered against each other.
        on_policy: share of the steps, in [0, 1], that train on text of the student; wants a teacher in the loop.
        max_new_tokens, sampling_temperature: of the student's text.

    Raises:
        TypeError, ValueError: as :func:`fuse_lm_head` and :func:`sparse_ce.distillation_loss`; neither a teacher nor
            its candidates; ``on_policy`` without a teacher in the loop or with packed sequences.

    Examples:
        >>> from sparse_ce.integrations.trl import DistillationTrainer
        >>> trainer = DistillationTrainer(
        ...     model, teacher_model=teacher, args=sft_config, train_dataset=dataset, processing_class=tokenizer,
        ...     kind="jsd", tail="bucket", k=16)
    """

    _tag_names = ["trl", "distillation"]
    args: Any  # and what else a Trainer of TRL types as what a Trainer may have at all
    model: Any
    model_wrapped: Any
    processing_class: Any
    train_dataset: Any
    data_collator: Any
    _signature_columns: Any

    def __init__(self, model: Any, *args: Any, teacher_model: Optional[nn.Module] = None, k: int = 64,
                 predicts: Optional[Predicts] = None, kind: str = "forward_kl", tail: str = "bucket",
                 beta: float = 0.5, floor: float = -100.0, temperature: float = 1.0, temperature_squared: bool = False,
                 alpha: float = 1.0, on_policy: float = 0.0, max_new_tokens: int = 64,
                 sampling_temperature: float = 1.0, **of_trl: Any) -> None:
        check_flags(temperature_squared=temperature_squared)
        check(0 <= on_policy <= 1, f"on_policy must be in [0, 1], got {on_policy}")
        check(on_policy == 0 or teacher_model is not None, "teacher_model must be given for on_policy, to score the "
              "student's text, got None")
        self.k, self.predicts, self.on_policy = k, predicts, on_policy
        # A teacher in the loop is asked at the temperature, so that its tail is known; then the student's is a scale.
        self._asks_at = temperature if teacher_model is not None and tail not in ("zero", "renormalize") else 1.0
        check(self._asks_at == 1 or alpha == 1, f"alpha must be 1 at a temperature with tail={tail!r}, got {alpha}")
        self._factor = self._asks_at ** 2 if temperature_squared else 1.0
        self._hard_labels = alpha < 1
        self._of_generation = dict(max_new_tokens=max_new_tokens, do_sample=sampling_temperature > 0,
                                   temperature=sampling_temperature or None, top_k=0)
        self._columns: Dict[str, Any] = {}
        self.teacher_model: Any = None
        self._must_say = teacher_model is None and predicts is None
        super().__init__(model, *args, **of_trl)
        check(on_policy == 0 or not (self.padding_free or self.args.packing),
              "padding_free and packing must be off for on_policy, which continues each prompt by itself")
        fuse_lm_head(self.model, logit_scale=1 / self._asks_at, distillation=dict(
            kind=kind, tail=tail, beta=beta, floor=floor, alpha=alpha, temperature_squared=temperature_squared,
            temperature=temperature if self._asks_at == 1 else 1.0))
        if teacher_model is not None:
            self.teacher_model = self.accelerator.prepare_model(
                teacher_model.requires_grad_(False).eval(), evaluation_mode=True)
        else:
            check(bool(self._columns), f"train_dataset must hold {' or '.join(map(str, _CACHED.items()))} where there "
                  f"is no teacher_model, got {self.train_dataset.column_names}")
            self.data_collator = TopKCollator(self.data_collator, predicts=predicts, hard_labels=self._hard_labels,
                                              **self._columns)

    # ------------------------------------------------------------------------------------------------ a cached teacher

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, packing: Any, formatting_func: Any,
                         dataset_name: str) -> Any:
        """TRL's keeps the columns of a teacher neither where it truncates nor where it packs."""
        names = list(dataset.column_names or ())
        ids = next((name for name in _CACHED if name in names and _CACHED[name] in names), None)
        if ids is None:
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        self._columns = dict(ids=ids, values=_CACHED[ids],
                             log_tail=next((name for name in _LOG_TAIL if name in names), None))
        check("predicts" in names or not self._must_say, "predicts must be 'next' or 'token' for a dataset without the "
              f"column 'predicts', got None and {names}; {CHOICES}")
        kept = ["input_ids", *filter(None, self._columns.values()), "labels", *{"predicts"} & {*names}]
        if "labels" not in names:
            mask = "completion_mask" if self.completion_only_loss and "completion_mask" in names else None
            dataset = dataset.map(lambda row: {"labels": _labels(row["input_ids"], row[mask] if mask else None)})
        if "seq_lengths" in names:
            return dataset
        dataset = dataset.select_columns(kept)
        if packing:
            return pack_dataset(dataset, args.max_length, args.packing_strategy)
        if args.max_length is None:
            return dataset
        cut = slice(None, args.max_length) if args.truncation_mode == "keep_start" else slice(-args.max_length, None)
        dataset = dataset.map(lambda row: {name: row[name] and row[name][cut] for name in kept})
        return dataset.filter(lambda row: any(label != IGNORE_INDEX for label in row["labels"]))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *filter(None, self._columns.values()),
                                                      *["predicts"] * bool(self._columns)]))

    # -------------------------------------------------------------------------------------------- a teacher in the loop

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any) -> Any:
        if self.teacher_model is not None and not isinstance(inputs["labels"], SparseTarget):
            inputs = self._taught(inputs)
        made = super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        return (made[0] * self._factor, made[1]) if return_outputs else made * self._factor

    def _taught(self, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """With what the teacher says in place of the labels. It is asked about the tokens that count alone."""
        labels = inputs["labels"]
        rows = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).ne(IGNORE_INDEX)  # whose logits are of such a token
        teacher = {name: t for name, t in inputs.items() if name != "labels"}
        top, log_tail = topk_of(self.teacher_model, teacher, rows, self.k, 1 / self._asks_at)
        at = F.pad(rows[:, :-1], (1, 0))
        ids = torch.full((*labels.shape, self.k), IGNORE_INDEX, device=labels.device)
        log_probs = log_tail.new_zeros(ids.shape)
        tail = log_tail.new_zeros(labels.shape)
        assert top.values is not None
        ids[at], log_probs[at], tail[at] = top.indices, top.values, log_tail
        target = SparseTarget.from_topk(ids, log_probs, kind="logprobs", row_mask=at, num_classes=top.num_classes)
        inputs = {**inputs, "labels": target, "teacher_log_tail": tail}
        return {**inputs, "hard_labels": labels} if self._hard_labels else inputs

    # ------------------------------------------------------------------------------------------- the student's own text

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Tuple[List[Any], Any]:
        """Before the Trainer counts what it divides by."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches or not self._on_own_text():
            return batches, num_items
        batches = [self._continued(batch) for batch in batches]
        return batches, self._get_num_items_in_batch(batches, device)

    def _on_own_text(self) -> bool:
        """The same on all processes."""
        draw = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        return torch.rand((), generator=draw).item() < self.on_policy

    @torch.no_grad()
    def _continued(self, batch: Dict[str, Any]) -> Dict[str, Any]:
        """A batch of prompts, what stands before the first label of each sequence, that the student has continued."""
        device = self.accelerator.device
        ids, counts = batch["input_ids"].to(device), batch["labels"].to(device).ne(IGNORE_INDEX)
        lengths = torch.where(counts.any(1), counts.int().argmax(1), batch["attention_mask"].to(device).sum(1))
        lengths = lengths.clamp(min=1)
        width = int(lengths.max())
        columns = torch.arange(width, device=device)
        padding = width - lengths[:, None]  # in front of a prompt, as generation wants it
        prompts, mask = ids.gather(1, (columns - padding).clamp(min=0)), (columns >= padding).long()
        pad = self.processing_class.pad_token_id
        training = self.model.training
        self.model.eval()
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=(
                self.args.gradient_checkpointing_kwargs)) as student:
            out = student.generate(input_ids=prompts.masked_fill(mask == 0, pad), attention_mask=mask,
                                   pad_token_id=pad, **self._of_generation)
        self.model.train(training)
        made = out[:, width:]
        ends = made.eq(self.processing_class.eos_token_id)
        real = torch.cat((mask.bool(), F.pad(ends.cumsum(1)[:, :-1], (1, 0)).eq(0)), 1)
        # Padding behind a sequence, as in training.
        order = (torch.arange(out.shape[1], device=device) + padding).clamp(max=out.shape[1] - 1)
        real = real.gather(1, order) & (torch.arange(out.shape[1], device=device) + padding < out.shape[1])
        ids = out.gather(1, order).masked_fill(~real, pad)
        own = real & (torch.arange(out.shape[1], device=device) >= lengths[:, None])
        return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~own, IGNORE_INDEX)}


def _labels(input_ids: List[int], mask: Optional[List[int]]) -> List[int]:
    return input_ids if mask is None else [token if counts else IGNORE_INDEX for token, counts in zip(input_ids, mask)]
