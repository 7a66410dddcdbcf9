"""Provides distillation with :class:`trl.SFTTrainer`, from a cache or with the teacher in the loop.

``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``GRPOTrainer`` and ``RLOOTrainer`` do not need this module:
:func:`sparse_ce.integrations.transformers.fuse_lm_head` supports them.
"""

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn
from trl import SFTTrainer, pack_dataset
from trl.models.utils import prepare_deepspeed, unwrap_model_for_generation
from trl.trainer.utils import create_model_from_path

from .._core.arguments import IGNORE_INDEX, Kind, Tail
from .._core.errors import check
from .._core.flags import check_flags
from .._core.listing import listing
from ..data.sequence import CHOICES, Predicts
from ..functional.topk import linear_topk_log_probs
from ..targets.sparse_target import SparseTarget
from .cached_rows import as_dataset
from .distillation import logits_at
from .fused_head import fuse_lm_head
from .heads import base_of, check_head, head_of, logits_of, model_of, rows_of
from .options import TrainerArguments, check_names, keywords
from .teacher import TopKCollator
from .trainer import install

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistillationTrainer"]
__dir__ = listing(globals())

_CACHED = {"teacher_ids": "teacher_log_probs", "ids": "log_probs"}  # column names; the second pair is our Parquet's
_LOG_TAIL = ("teacher_log_tail", "log_tail")
install()


class DistillationTrainer(SFTTrainer):  # type: ignore[misc]
    """Extends ``SFTTrainer`` by a distillation loss: a divergence from a teacher's cached top-k, or from a model in the
    loop.

    All else is TRL's: PEFT, bf16, gradient checkpointing, packing, padding-free batches, gradient accumulation, several
    processes. So is the log of loss, entropy and token accuracy. Accuracy is measured against the teacher's most
    likely class, or against the labels if all classes are compared.

    For offline distillation (``teacher_model=None``) the dataset holds ``input_ids`` (S,) and the teacher's candidates.
    These are ``teacher_ids`` and ``teacher_log_probs`` (S, K), or the columns ``ids`` and ``log_probs`` of a Parquet
    cache of :mod:`sparse_ce.data`. A ``TeacherCache`` or ``DistillKitCache`` with tokens works too; ``datasets`` copies
    it to its own folder first. ``labels`` mark the active positions; with ``completion_only_loss=True``
    ``completion_mask`` does. ``teacher_log_tail`` or ``log_tail`` (S,) is used if present.

    A teacher in the loop works with any dataset of ``SFTTrainer``. The teacher reads each batch. The loss then compares
    all classes, from the hidden states and output heads of both models, without the logits of either. If ``k`` is
    given, only the teacher's ``k`` most likely classes per position are kept, as in a cache.

    With ``on_policy`` the student itself continues the prompts in a fraction of the steps. A prompt is the part of a
    sequence before its first label. The teacher then scores the student's text.

    Args:
        model, args, train_dataset, ...: as in ``SFTTrainer``. Each dataset may also be a cache. The model must not be
            fused already.
        teacher_model: a causal language model of transformers with the student's vocabulary, or its path or name on the
            Hub. Its parameters are frozen, except those that it shares with the student.
        teacher_model_init_kwargs: keyword arguments of ``from_pretrained`` for a teacher given by its path, such as
            ``revision``. The default ``dtype`` is that of the files.
        k: number of classes kept per position from a teacher in the loop. None compares all classes.
        num_classes: only the first ``num_classes`` classes of both models exist. By default, if the heads are padded to
            different sizes, it is the smaller size.
        predicts: for a cache: ``"next"`` if row i is the teacher's prediction for token i + 1, as its logits at i are;
            ``"token"`` if row i is its prediction for token i (vLLM). Required unless the dataset has the column
            ``predicts`` of a cache of :mod:`sparse_ce.data`.
        kind, beta: as in :func:`sparse_ce.distillation_loss`. ``beta`` without ``kind`` is TRL's: 0 is forward KL, 1 is
            reverse KL, and a number between them is the generalized Jensen-Shannon divergence, ``kind="jsd"``.
        temperature, temperature_squared, alpha: as in :func:`sparse_ce.distillation_loss`. The temperature divides the
            student's logits, and those of a teacher in the loop. The candidates of a cached teacher are renormalized
            among themselves at the temperature, which requires ``tail="renormalize"`` or ``"zero"``.
        tail, floor: as in :func:`sparse_ce.distillation_loss`, for a cache and for ``k``; the default is ``"bucket"``.
            If all classes are compared there is no tail, and both must be None.
        on_policy: fraction of the steps, in [0, 1], that train on text generated by the student. Requires a teacher in
            the loop.
        max_new_tokens, sampling_temperature: generation options for the student's text.

    Raises:
        TypeError, ValueError: as :func:`fuse_lm_head` and :func:`sparse_ce.distillation_loss`. Also if there is neither
            a teacher nor its candidates, or if ``on_policy`` is used without a teacher in the loop or with packed
            sequences.

    Examples:
        >>> from sparse_ce.integrations.trl import DistillationTrainer
        >>> trainer = DistillationTrainer(
        ...     model, teacher_model=teacher, args=sft_config, train_dataset=dataset, processing_class=tokenizer,
        ...     kind="jsd")
    """

    _tag_names = ["trl", "distillation"]
    args: Any  # the base classes annotate these attributes with broader types
    model: Any
    model_wrapped: Any
    processing_class: Any
    train_dataset: Any
    data_collator: Any
    _signature_columns: Any

    def __init__(self, model: Any, *positional: Any, teacher_model: Union[nn.Module, str, None] = None,
                 teacher_model_init_kwargs: Optional[Dict[str, Any]] = None, k: Optional[int] = None,
                 num_classes: Optional[int] = None, predicts: Optional[Predicts] = None, kind: Optional[Kind] = None,
                 beta: Optional[float] = None, tail: Optional[Tail] = None, floor: Optional[float] = None,
                 temperature: float = 1.0, temperature_squared: bool = False, alpha: float = 1.0,
                 on_policy: float = 0.0, max_new_tokens: int = 64, sampling_temperature: float = 1.0,
                 **of_trl: "Unpack[TrainerArguments]") -> None:
        check_flags(temperature_squared=temperature_squared)
        check_names(of_trl, sorted({*inspect.signature(SFTTrainer).parameters, *keywords(DistillationTrainer)}))
        config = positional[0] if positional else of_trl.get("args")
        check(not hasattr(config, "beta"), f"args must be an SFTConfig, got a {type(config).__name__}, whose beta and "
              "temperature are not read; pass beta, temperature and on_policy (lmbda) to DistillationTrainer")
        check(teacher_model_init_kwargs is None or isinstance(teacher_model, str), "teacher_model_init_kwargs must be "
              f"None unless teacher_model is a path, got a {type(teacher_model).__name__} as teacher_model")
        check(0 <= on_policy <= 1, f"on_policy must be in [0, 1], got {on_policy}")
        check(on_policy == 0 or teacher_model is not None, "teacher_model must be given for on_policy, got None; it "
              "scores the student's text")
        loops = teacher_model is not None
        self._dense = loops and k is None
        for name, value, refused, why in (
                ("tail", tail, self._dense, "if all classes are compared; give k for a teacher with a tail"),
                ("floor", floor, self._dense, "if all classes are compared; give k for a teacher with a tail"),
                ("predicts", predicts, loops, "with a teacher_model, whose logits predict the next token"),
                ("k", k, not loops, "for a cache, whose candidates are all used; TopKCollator(k=...) keeps fewer")):
            check(value is None or not refused, f"{name} must be None {why}, got {value!r}")
        self.k, self.num_classes, self.predicts, self.on_policy = k, num_classes, predicts, on_policy
        # The top k of a teacher in the loop are evaluated at the temperature, so that its tail is known. The student's
        # temperature is then a logit scale.
        scaled = loops and k is not None and tail not in ("zero", "renormalize")
        self._temperature = temperature if scaled else 1.0
        check(self._temperature == 1 or alpha == 1, f"alpha must be 1 at a temperature with tail={tail or 'bucket'!r}, "
              f"got {alpha}; tail='renormalize' supports other values")
        self._factor = self._temperature ** 2 if temperature_squared else 1.0
        self._hard_labels = alpha < 1 and not self._dense
        self._of_generation: Dict[str, Any] = dict(
            max_new_tokens=max_new_tokens, do_sample=sampling_temperature > 0,
            temperature=sampling_temperature or None, top_k=0)
        self._columns: Dict[str, Any] = {}
        self.teacher_model: Any = None
        self._required = teacher_model is None and predicts is None
        super().__init__(model, *map(as_dataset, positional),
                         **{name: as_dataset(part) for name, part in of_trl.items()})
        check(self.args.loss_type == "nll" and self.compute_loss_func is None, "loss_type must be 'nll' and "
              "compute_loss_func None, since the loss is the distillation, got "
              f"{self.args.loss_type!r} and {self.compute_loss_func}")
        check(on_policy == 0 or not (self.padding_free or self.args.packing),
              "padding_free and packing must be off for on_policy, which generates from separate prompts")
        if isinstance(teacher_model, str):
            teacher_model = self._loaded(teacher_model, teacher_model_init_kwargs or {})
        head = check_head(model_of(teacher_model)) if self._dense else None
        if loops and num_classes is None:
            self.num_classes = self._common_classes(teacher_model)
        rows = rows_of(head_of(base_of(self.model)))
        if self.num_classes is not None and self.num_classes < rows:
            self._of_generation["suppress_tokens"] = list(range(self.num_classes, rows))
        options: Dict[str, Any] = {} if self.num_classes is None else {"num_classes": self.num_classes}
        distillation: Any = dict(kind=kind, beta=beta, alpha=alpha, tail=tail, floor=floor, teacher_head=head,
                                 temperature=temperature if self._temperature == 1 else 1.0,
                                 temperature_squared=temperature_squared)
        distillation = {name: value for name, value in distillation.items() if value is not None}
        self._handle = fuse_lm_head(self.model, temperature=self._temperature, distillation=distillation, **options)
        if teacher_model is not None:
            self.teacher_model = self._prepared(teacher_model)
        else:
            check(bool(self._columns), f"train_dataset must hold {' or '.join(map(str, _CACHED.items()))} if there is "
                  f"no teacher_model, got {self.train_dataset.column_names}")
            self.data_collator = TopKCollator(self.data_collator, predicts=predicts, hard_labels=self._hard_labels,
                                              **self._columns)

    def _loaded(self, path: str, options: Dict[str, Any]) -> Any:
        options = {"dtype": "auto", "trust_remote_code": self.args.trust_remote_code, **options}
        if self.args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            options["device_map"] = None
        return create_model_from_path(path, **options)

    def _prepared(self, teacher: Any) -> Any:
        """Returns the teacher in evaluation mode, with its parameters frozen except those that the student trains."""
        check(model_of(teacher) is not base_of(self.model), "teacher_model must be another model than model, got the "
              "same model")
        own = {id(p) for p in self.model.parameters()}
        for p in teacher.parameters():
            p.requires_grad_(p.requires_grad and id(p) in own)
        teacher.eval()
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self.accelerator)
        return self.accelerator.prepare_model(teacher, evaluation_mode=True)

    def _common_classes(self, teacher: Any) -> Optional[int]:
        """Returns the number of classes of both models if their heads have different sizes, else None."""
        sizes = [rows_of(head_of(model_of(model))) for model in (self.model, teacher)]
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        if sizes[0] == sizes[1]:
            return None
        check(len(tokenizer) <= min(sizes), "teacher_model must have the vocabulary of model; their heads have "
              f"{sizes[1]} and {sizes[0]} rows, which do not both hold the {len(tokenizer)} tokens of processing_class")
        least: int = min(sizes)
        return least

    # ------------------------------------------------------------------------------------------------ a cached teacher

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, packing: Any, formatting_func: Any,
                         dataset_name: str) -> Any:
        """Keeps the teacher's columns, which TRL drops when it truncates or packs."""
        names = list(dataset.column_names or ())
        ids = next((name for name in _CACHED if name in names and _CACHED[name] in names), None)
        if ids is None:
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        self._columns = dict(indices=ids, values=_CACHED[ids],
                             log_tail=next((name for name in _LOG_TAIL if name in names), None))
        check("predicts" in names or not self._required, "predicts must be 'next' or 'token' for a dataset without the "
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
        if self._dense:
            teacher = logits_of(self.teacher_model, _without_labels(inputs))
            self._handle.teacher = partial(logits_at, head=teacher.head, scale=teacher.scale, gain=teacher.gain)
            inputs = {**inputs, "teacher_hidden": teacher.hidden.to(inputs["input_ids"].device)}
        elif self.teacher_model is not None and not self._dense and not isinstance(inputs["labels"], SparseTarget):
            inputs = self._taught(inputs)
        result = super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        return (result[0] * self._factor, result[1]) if return_outputs else result * self._factor

    def _taught(self, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """Replaces the labels by the teacher's top k. Its head is evaluated at the active tokens only."""
        assert self.k is not None
        labels = inputs["labels"]
        # The logits at these positions predict an active token.
        rows = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).ne(IGNORE_INDEX)
        logits = logits_of(self.teacher_model, _without_labels(inputs)).of_rows(rows)
        with torch.no_grad():
            top, log_tail = logits.of_head(linear_topk_log_probs, self.k, 1 / self._temperature, return_log_tail=True,
                                           num_classes=self.num_classes)
        at = F.pad(rows[:, :-1], (1, 0))
        ids = torch.full((*labels.shape, self.k), IGNORE_INDEX, device=labels.device)
        log_probs = log_tail.new_zeros(ids.shape)
        tail = log_tail.new_zeros(labels.shape)
        assert top.values is not None
        ids[at], log_probs[at], tail[at] = top.indices, top.values, log_tail
        target = SparseTarget.from_topk(ids, log_probs,
                                        values_are="log_probs", row_mask=at, num_classes=top.num_classes)
        inputs = {**inputs, "labels": target, "teacher_log_tail": tail}
        return {**inputs, "hard_labels": labels} if self._hard_labels else inputs

    # ------------------------------------------------------------------------------------------- the student's own text

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Tuple[List[Any], Any]:
        """Replaces batches by the student's own text, before the Trainer counts the divisor."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches or not self._on_own_text():
            return batches, num_items
        batches = [self._continued(batch) for batch in batches]
        return batches, self._get_num_items_in_batch(batches, device)

    def _on_own_text(self) -> bool:
        """Returns True if this step uses the student's own text. The result is the same on all processes."""
        draw = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        return torch.rand((), generator=draw).item() < self.on_policy

    @torch.no_grad()
    def _continued(self, batch: Dict[str, Any]) -> Dict[str, Any]:
        """Returns a batch in which the student has continued the prompts: the tokens before the first label of each
        sequence."""
        device = self.accelerator.device
        ids, counts = batch["input_ids"].to(device), batch["labels"].to(device).ne(IGNORE_INDEX)
        lengths = torch.where(counts.any(1), counts.int().argmax(1), batch["attention_mask"].to(device).sum(1))
        lengths = lengths.clamp(min=1)
        width = int(lengths.max())
        columns = torch.arange(width, device=device)
        padding = width - lengths[:, None]  # generation needs padding on the left
        prompts, mask = ids.gather(1, (columns - padding).clamp(min=0)), (columns >= padding).long()
        pad = self.processing_class.pad_token_id
        training = self.model.training
        self.model.eval()
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=(
                self.args.gradient_checkpointing_kwargs)) as student:
            out = student.generate(input_ids=prompts.masked_fill(mask == 0, pad), attention_mask=mask,
                                   pad_token_id=pad, **self._of_generation)
        self.model.train(training)
        completion = out[:, width:]
        ends = completion.eq(self.processing_class.eos_token_id)
        real = torch.cat((mask.bool(), F.pad(ends.cumsum(1)[:, :-1], (1, 0)).eq(0)), 1)
        # Move the padding to the right, as in training.
        order = (torch.arange(out.shape[1], device=device) + padding).clamp(max=out.shape[1] - 1)
        real = real.gather(1, order) & (torch.arange(out.shape[1], device=device) + padding < out.shape[1])
        ids = out.gather(1, order).masked_fill(~real, pad)
        own = real & (torch.arange(out.shape[1], device=device) >= lengths[:, None])
        return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~own, IGNORE_INDEX)}


def _without_labels(inputs: Dict[str, Any]) -> Dict[str, Any]:
    return {name: t for name, t in inputs.items() if name != "labels"}


def _labels(input_ids: List[int], mask: Optional[List[int]]) -> List[int]:
    return input_ids if mask is None else [token if counts else IGNORE_INDEX for token, counts in zip(input_ids, mask)]
