"""Calls every op with randomly drawn arguments, most of them invalid.

tests/ops/test_raw_calls.py runs it in a separate process.

    python tests/support/processes/raw_calls.py FIRST COUNT [FILE]    the calls of the seeds FIRST, FIRST + 1, ...
    python tests/support/processes/raw_calls.py 17 1                  one call again, with its arguments printed

A call must raise an error that names the argument, or return the reference's result. Memory around its tensors, and
arguments that it does not write, must not change. Each seed is written to FILE before its call, which identifies a
crash.
"""

import random
import re
import resource
import signal
import sys
from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from sparse_ce import reference
from sparse_ce._core.arguments import DIVERGENCES, Arguments
from sparse_ce._core.outputs import SAVED as SAVED_OUTPUTS
from sparse_ce._core.outputs import Selected
from sparse_ce.ops import instruction_set

ops = torch.ops.sparse_ce
PAD = 64  # elements before and after each tensor
MEMORY = 6 << 30  # bytes of address space, beyond what torch has mapped

SHARDED = ("sharded_select",)  # collectives of the ops below
NAMES = sorted({s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("sparse_ce::")}
               - {"cpu_instruction_set", "cuda_architectures", "emulation_runs", "emulation_launches",
                  "plan_by_classes", *SHARDED})
TORCH = ("Could not run 'sparse_ce::", "sparse_ce.", "sparse_ce::", "DefaultCPUAllocator: can't allocate memory",
         "Storage size calculation overflowed", "Overflow when unpacking long", "Not yet supported ScalarType",
         "ZeroTensors are immutable", "Expected Tensor but got None", "cloned_mutable_input",
         "Trying to create tensor with negative dimension")
"""PyTorch's own errors: of another backend, of a value of another type than the schema's, of views with a bit that it
resolves itself, and of memory."""

SAVED = (*SAVED_OUTPUTS, "output", "statistics", "chosen")
"""What forward gave: the kernels take its word, and the reference computes it."""

INTEGERS = (0, 1, -1, 2, 3, 7, 100, 2**31 - 1, 2**31, -2**31, 2**48, 2**62, 2**63 - 1, -2**63)
FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e300, -1e300, float("nan"), float("inf"))


class Arena:
    """Places tensors in separate memory with a guard pattern around each."""

    def __init__(self) -> None:
        self.bytes: List[Tensor] = []
        self.before: List[Tensor] = []

    def place(self, t: Tensor) -> Tensor:
        size = t.element_size()
        memory = torch.full(((t.numel() + 2 * PAD) * size,), 0xA5, dtype=torch.uint8)
        placed = memory.view(t.dtype).as_strided(t.shape, t.contiguous().stride(), PAD)
        placed.copy_(t)
        self.bytes.append(memory)
        return placed

    def remember(self) -> None:
        self.before = [memory.clone() for memory in self.bytes]

    def changed(self, written: List[Tensor]) -> bool:
        """Returns True if anything except the elements of ``written`` has changed."""
        for memory, before in zip(self.bytes, self.before):
            for t in written:
                if t.layout == torch.strided and t.device.type == "cpu" and t.numel() <= memory.numel() and (
                        t.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()):
                    before.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t.clone())
            if not torch.equal(memory, before):
                return True
        return False


class Problem:
    """Holds the valid arguments of a call by name."""

    def __init__(self, seed: int):
        self.choose, self.arena = random.Random(seed), Arena()
        self.numbers = torch.Generator().manual_seed(seed)
        pick = self.choose.choice
        self.rows, self.width = pick((0, 1, 2, 4, 5, 33)), pick((0, 1, 3, 8, 17))
        self.vocab, self.entries = pick((1, 2, 7, 33, 130, 1030)), pick((0, 1, 2, 3, 9))
        self.dtype = pick((torch.float16, torch.bfloat16, torch.float32, torch.float32, torch.float64))
        self.acc = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.num_classes = pick((None, None, self.vocab, max(1, self.vocab - 1)))
        self.classes = self.num_classes or self.vocab

    def maybe(self, make: Callable[[], Any], chance: float = 0.3) -> Any:
        return make() if self.choose.random() < chance else None

    def normal(self, *shape: int, dtype: Optional[torch.dtype] = None) -> Tensor:
        return self.arena.place(torch.randn(shape, generator=self.numbers).to(dtype or self.acc))

    def uniform(self, *shape: int, dtype: Optional[torch.dtype] = None) -> Tensor:
        return self.arena.place(torch.rand(shape, generator=self.numbers).add(0.1).to(dtype or self.acc))

    def integers(self, high: int, *shape: int, dtype: Optional[torch.dtype] = None) -> Tensor:
        dtype = dtype or self.choose.choice((torch.int64, torch.int32))
        return self.arena.place(torch.randint(max(1, high), shape, generator=self.numbers).to(dtype))

    def mask(self, *shape: int) -> Tensor:
        return self.arena.place(torch.rand(shape, generator=self.numbers) > 0.3)

    # ------------------------------------------------------------------------------------------------ what ops share

    def target(self) -> Dict[str, Any]:
        rows, form = self.rows, self.choose.choice(("labels", "topk", "ids", "csr", "ranges"))
        given: Dict[str, Any] = dict(ignore_index=self.choose.choice((-100, -100, 0)))
        logprobs = self.choose.random() < 0.3
        shape: Tuple[int, ...] = (rows,) if form == "labels" else (rows, self.entries)
        if form in ("csr", "ranges"):
            counts = torch.randint(4, (rows,), generator=self.numbers)
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
            spare = self.choose.choice((0, 2)) if form == "ranges" else 0
            offsets = ends if form == "csr" else torch.stack([ends[:-1], ends[1:]], 1)
            given["offsets"] = self.arena.place(offsets.to(self.choose.choice((torch.int64, torch.int32))))
            shape = (int(ends[-1]) + spare,)
        given["indices"] = self.integers(self.classes, *shape)
        if form in ("topk", "csr", "ranges") and self.choose.random() < 0.8:
            dtype = self.choose.choice((torch.float32, torch.float64, torch.float16))
            given["values"] = self.normal(*shape, dtype=dtype) if logprobs else self.uniform(*shape, dtype=dtype)
            given["logprobs"] = logprobs
        given["row_mask"] = self.maybe(lambda: self.mask(rows))
        return given

    def options(self) -> Dict[str, Any]:
        pick = self.choose.choice
        return dict(label_smoothing=pick((0.0, 0.0, 0.1)), z_loss=pick((0.0, 0.0, 1e-3)),
                    logit_scale=pick((1.0, 1.0, 0.7)), softcap=pick((None, None, 5.0)), num_classes=self.num_classes,
                    weight=self.maybe(lambda: self.uniform(self.classes)),
                    row_scale=self.maybe(lambda: pick((self.uniform(), self.uniform(self.rows))), 0.2))

    def logits(self, strided: bool) -> Tensor:
        if strided and self.rows % 2 == 0 and self.choose.random() < 0.3:
            return self.normal(2, self.vocab, self.rows // 2, dtype=self.dtype).transpose(1, 2)
        return self.normal(self.rows, self.vocab, dtype=self.dtype)

    def head(self) -> Dict[str, Any]:
        mixed = self.dtype.itemsize == 2 and self.choose.random() < 0.3
        dtype = torch.float32 if mixed else self.dtype
        return dict(input=self.normal(self.rows, self.width, dtype=self.dtype),
                    linear_weight=self.normal(self.vocab, self.width, dtype=dtype),
                    linear_bias=self.maybe(lambda: self.normal(self.vocab, dtype=dtype), 0.5),
                    chunk_rows=self.choose.choice((None, 1, 3)), float32_logits=self.choose.random() < 0.3)

    def outputs(self) -> Dict[str, Any]:
        names = ("loss", "log_probs", "log_tail", "entropy", "mean_logit", "argmax", "collision", "rank")
        return dict(padding_value=self.choose.choice((None, 0.0, -7.0)),
                    **{name: self.choose.random() < 0.5 for name in names})

    def rows_of(self, *names: str) -> Dict[str, Any]:
        return {name: self.normal(self.rows) for name in names}

    def made(self, name: str, call: Dict[str, Any]) -> List[Tensor]:
        """Returns an op's results for a valid call, placed in the arena."""
        return [self.arena.place(t) for t in run(name, call)]

    # ------------------------------------------------------------------------------------------------------ every op

    def call(self, name: str) -> Dict[str, Any]:
        if name in ("sparse_softmax", "sparse_softmax_backward"):
            return self.softmax(name)
        if name in ("masked_mean", "masked_mean_backward"):
            return self.masked(name)
        if name == "scale_":
            packed = self.normal(self.rows, self.vocab, dtype=self.dtype)
            return dict(gradient=packed, scale=self.uniform(), expected=self.maybe(self.uniform))
        if name == "topk_ids":
            return dict(logits=self.logits(False), k=self.choose.randint(0, self.vocab),
                        largest=self.choose.random() < 0.5)
        if "dense_divergence" in name:
            return self.dense(name)
        given = {**self.target(), **self.options()}
        if name.startswith("candidate"):
            given = {**given, **self.head()}
            if "backward" in name:
                given["output"] = self.made("candidate_logits", given)[0]
                given["grad"] = self.normal(*given["indices"].shape)
            return given
        if name == "loss_mean":
            return {**given, "loss": self.normal(self.rows), **self.of_mean()}
        if name == "linear_add_gradients_":
            return self.gradients_of_chunk()
        if name in ("linear_logits", "linear_logits_"):
            return {**given, **self.head(), "logits": self.memory(self.rows, self.classes)}
        if name in ("large_empty_like", "linear_plan", "linear_store_", "linear_multiply_stored_"):
            return self.stored()
        if name == "select_merge":
            return self.merged(given)
        linear = name.startswith("linear_")
        given.update(self.head() if linear else dict(logits=self.logits("select" not in name)))
        if "select" in name:
            return self.selected(name, given, linear)
        if "binary" in name:
            given.update(self.rows_of("grad", "share"), pos_weight=self.maybe(lambda: self.uniform(self.classes)))
            return given
        if "with_gradient" in name:
            given.update(self.of_mean(), grad_mean=self.normal())
        if "backward" in name:
            _, lse, residual = self.made("forward_with_residual", given)
            given.update(self.rows_of("grad_loss"), lse=lse, lse_residual=residual,
                         grad_lse=self.maybe(lambda: self.normal(self.rows)))
        if name == "backward_anew_":
            given.update(expected=self.normal(), grad_mean=self.normal(), grad_logits=self.like(given["logits"]))
        return given

    def like(self, logits: Tensor) -> Tensor:
        if logits.dim() == 3:
            return self.normal(*logits.transpose(1, 2).shape, dtype=self.dtype).transpose(1, 2)
        return self.normal(*logits.shape, dtype=self.dtype)

    def of_mean(self) -> Dict[str, Any]:
        return dict(normalizer=self.maybe(self.uniform), row_weight=self.maybe(lambda: self.uniform(self.rows)))

    def selected(self, name: str, given: Dict[str, Any], linear: bool) -> Dict[str, Any]:
        outputs = self.outputs()
        if name == "select_shard":
            return {**given, **outputs, "num_classes": self.classes, "first_class": 0, **self.rows_of("ranked_logits")}
        given = {**given, **outputs, **self.rows_of("grad_loss"), "scale_grad": self.choose.random() < 0.3}
        if name == "linear_select_with_gradient":
            return {**given, "loss": True}
        if "backward" not in name:
            return {**given, **self.of_mean(), "mean": True} if given["loss"] and self.choose.random() < 0.5 else given
        requested = ("loss", "log_probs", "log_tail", "entropy", "mean_logit", "collision")
        out = Selected(*self.made("linear_select" if linear else "select", {**given, **dict.fromkeys(requested, True)}))
        given.update({name: getattr(out, name) for name in SAVED_OUTPUTS})
        for of in ("grad_loss", "grad_lse", "grad_log_tail", "grad_entropy", "grad_mean_logit", "grad_collision"):
            given[of] = self.maybe(lambda: self.normal(self.rows), 0.5)
        given["grad_log_probs"] = self.maybe(lambda: self.normal(*out.log_probs.shape), 0.5)
        return given

    def dense(self, name: str) -> Dict[str, Any]:
        rows, kind = self.rows, self.choose.randrange(len(DIVERGENCES) + 1)
        sums = (5 if kind == len(DIVERGENCES) else 2, rows)
        given = dict(kind=kind, num_classes=self.num_classes, row_mask=self.maybe(lambda: self.mask(rows)),
                     labels=self.maybe(lambda: self.integers(self.classes, rows)), grad=self.normal(*sums),
                     share=self.normal(*sums))
        if name.startswith("linear_"):
            weight = self.normal(self.vocab, 3, dtype=self.dtype)
            return {**given, **self.head(), "teacher": self.normal(rows, 3, dtype=self.dtype), "teacher_weight": weight}
        given.update((of, self.normal(rows, self.vocab, dtype=self.dtype)) for of in ("logits", "teacher"))
        if "sums" in name or "backward" in name:
            given["stats"], given["sums"] = self.made("dense_divergence", given)
        return given

    def merged(self, given: Dict[str, Any]) -> Dict[str, Any]:
        call = {**given, **self.outputs(), "num_classes": self.classes}
        statistics, chosen = self.made("select_shard", {**call, "logits": self.logits(False), "first_class": 0,
                                                          **self.rows_of("ranked_logits")})
        return {**call, "statistics": statistics, "chosen": chosen, "shards": 1}

    def memory(self, *shape: int) -> Tensor:
        """Returns memory for logits."""
        of_plan = ops.linear_plan(torch.empty(0, self.width, dtype=self.dtype), None, 0, 1)[4]
        return self.normal(*shape, dtype=of_plan.dtype)

    def stored(self) -> Dict[str, Any]:
        """Returns the arguments of the ops that plan and store the gradient of the logits."""
        rows, classes, width = self.rows, max(1, self.classes), self.width
        input, grad_weight = (self.normal(n, width, dtype=self.dtype) for n in (rows, classes))
        emulated = instruction_set() == "emulated CUDA"
        beside = rows * classes if emulated or rows > width else 0
        return dict(like=grad_weight, input=input, rows=rows, classes=classes, row=0,
                    chunk_rows=self.choose.randint(1, 9), grad_weight=grad_weight,
                    stored_classes=128 if emulated else classes, beside=self.normal(beside, dtype=self.dtype),
                    grad_logits=self.normal(rows, classes, dtype=self.dtype),
                    logits=self.memory(max(1, rows) * classes))

    def gradients_of_chunk(self) -> Dict[str, Any]:
        head, classes = self.head(), self.classes
        first, last = self.choose.random() < 0.7, self.choose.random() < 0.7
        def low(*shape: int) -> Tensor:
            return self.integers(256, *shape, dtype=torch.uint8)

        bias = head["linear_bias"]
        return dict(head, grad_logits=self.normal(self.rows, classes, dtype=self.dtype), first=first, last=last,
                    grad_input=self.maybe(lambda: self.like(head["input"]), 0.7),
                    grad_weight=self.maybe(lambda: self.normal(*head["linear_weight"].shape,
                                                               dtype=head["linear_weight"].dtype), 0.7),
                    grad_bias=None if bias is None else self.normal(*bias.shape, dtype=bias.dtype),
                    input_low=low(self.rows, self.width), weight_low=None if first and last else low(
                        classes, self.width),
                    bias_low=None if first and last else low(1, classes))

    def softmax(self, name: str) -> Dict[str, Any]:
        counts = torch.randint(5, (self.rows,), generator=self.numbers)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        entries, log = int(offsets[-1]), self.choose.random() < 0.5
        shape = (entries,) if self.choose.random() < 0.5 else (entries, self.choose.choice((0, 1, 3, 20)))
        given = dict(values=self.normal(*shape, dtype=self.dtype), offsets=self.arena.place(offsets), log=log,
                     order=self.maybe(lambda: self.arena.place(torch.randperm(entries, generator=self.numbers))))
        if name == "sparse_softmax_backward":
            given.update(output=self.made("sparse_softmax", given)[0], grad=self.normal(*shape, dtype=self.dtype))
        return given

    def masked(self, name: str) -> Dict[str, Any]:
        shape = [self.choose.choice((0, 1, 2, 3, 40)) for _ in range(self.choose.choice((1, 2, 3)))]
        dim = [d for d in range(len(shape)) if self.choose.random() < 0.5]
        mask = self.mask(*shape) if self.choose.random() < 0.5 else self.uniform(*shape)
        kept = [n for d, n in enumerate(shape) if d not in dim]
        return dict(input=self.normal(*shape, dtype=self.dtype), mask=mask, dim=dim, share=self.normal(*kept),
                    dtype=self.dtype)


# ----------------------------------------------------------------------------------------------------- wrong arguments


def views(t: Tensor, p: Problem) -> List[Callable[[], Tensor]]:
    """Returns other shapes, strides and dtypes of a strided tensor."""
    dim = p.choose.randrange(t.dim()) if t.dim() else 0
    return [
        lambda: t[None], lambda: t.flatten(), lambda: t.movedim(0, -1), lambda: t[:-1], lambda: t[:0],
        lambda: t[..., :0],
        lambda: t[..., ::2], lambda: t[::2], lambda: t[..., None], lambda: t.narrow(dim, 0, max(0, t.shape[dim] - 1)),
        lambda: t.unsqueeze(dim).expand(*t.shape[:dim], 2, *t.shape[dim:]),
        lambda: t.narrow(dim, 0, 1).expand(t.shape),  # the same size, with a stride of 0
        lambda: t.as_strided(t.shape, [1] * t.dim()),  # elements overlap
        lambda: p.arena.place(t.mT.contiguous()).mT,
        lambda: t[..., :1].expand(*t.shape[:-1], 2**40 if t.dim() < 3 else 3),  # strided classes are read, not copied
        lambda: t[:1].expand(2**40, *t.shape[1:]),
        lambda: p.arena.place(torch.cat([t, t], -1))[..., :t.shape[-1]],  # padded rows
        lambda: p.arena.place(torch.stack([t, t], -1))[..., 0],
        lambda: t.to(p.choose.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8,
                                      torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64,
                                      torch.complex64))),
        lambda: t.view(torch.int32), lambda: t.new_zeros(()), lambda: torch.zeros_like(t), lambda: t.new_ones(3),
        lambda: torch._neg_view(-t) if t.is_floating_point() else t,  # indexing by a negated view is wrong in PyTorch
        lambda: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    ]


def foreign(t: Tensor) -> List[Callable[[], Any]]:
    """Returns values that are not strided tensors on this device."""
    return [
        lambda: None, lambda: t.to("meta"), lambda: t.to_sparse(), lambda: t.to_sparse_csr(), lambda: 3, lambda: "x",
        lambda: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint8), lambda: [t], lambda: 0.5,
        lambda: torch.nested.nested_tensor([t, t]), lambda: t.float().to_mkldnn(), lambda: torch.empty(0),
        lambda: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    ]


def has_views(t: Tensor) -> bool:
    """Returns True if views of ``t`` are safe; PyTorch's own views of others crash (mkldnn) or never end."""
    return not (t.is_nested or t.is_quantized or t.is_meta) and t.layout == torch.strided


def spoil(name: str, given: Dict[str, Any], p: Problem) -> bool:
    """Replaces one argument. Returns True if the result can still be compared with the reference."""
    schema = getattr(ops, name).default._schema
    argument = p.choose.choice(schema.arguments)
    value, kind = given.get(argument.name), str(argument.type)
    comparable = argument.name.startswith("grad") or not any(a.name in SAVED for a in schema.arguments)
    if any(isinstance(t, Tensor) and t.numel() > 1 << 20 for t in given.values()):
        return comparable  # with another tensor of this size the call may be valid and not end
    if isinstance(value, Tensor) and not has_views(value):
        return comparable  # already invalid
    if isinstance(value, Tensor):
        tensors = [t for t in given.values() if isinstance(t, Tensor) and has_views(t)]
        choice = p.choose.random()
        if choice < 0.65:
            changes: list = views(value, p)
        elif choice < 0.85 or value.dtype == torch.bool:  # a bool must not hold other bytes than 0 and 1
            changes = foreign(value)
        else:  # the memory of another argument
            other = p.choose.choice(tensors)
            changes = [lambda: other, lambda: other.view(value.dtype).flatten()[:value.numel()].view(value.shape),
                       lambda: other.view(torch.uint8).flatten()[1:], lambda: other[-1]]
        try:
            given[argument.name] = p.choose.choice(changes)()
        except (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError):
            return comparable
        number = given[argument.name]
        if argument.name in ("indices", "offsets", "order") and isinstance(number, Tensor) and p.choose.random() < 0.1:
            try:
                given[argument.name] = p.arena.place(number + p.choose.choice((1, -1, 2**31 - 10, 2**40)))
            except RuntimeError:
                pass
    elif kind == "bool":
        given[argument.name] = p.choose.random() < 0.5
    elif "Tensor" in kind:
        given[argument.name] = p.choose.choice((p.normal, lambda: p.normal(p.rows), lambda: p.integers(3, p.rows)))()
    elif "float" in kind:
        given[argument.name], comparable = p.choose.choice(FLOATS), False
    elif "List" in kind:
        given[argument.name] = [p.choose.choice(INTEGERS) for _ in range(p.choose.choice((0, 1, 2)))]
    elif kind == "int" or "Optional" in kind:
        numbers = (torch.int8, torch.complex128, torch.qint8) if argument.name == "dtype" else INTEGERS
        given[argument.name] = number = p.choose.choice(numbers)
        comparable &= not isinstance(number, int) or abs(number) < 1000  # the reference allocates as many classes
    return comparable


# ----------------------------------------------------------------------------------------------------------- one call


def run(name: str, given: Dict[str, Any]) -> Tuple[Any, ...]:
    op = getattr(ops, name)
    out = op(*(given.get(a.name, a.default_value) for a in op.default._schema.arguments))
    return out if isinstance(out, tuple) else () if out is None else (out,)


def named(name: str, given: Dict[str, Any], without: Tuple[str, ...] = (), **others: Any) -> List[Any]:
    """Returns the arguments of ``name`` in their order."""
    arguments = [a for a in getattr(ops, name).default._schema.arguments if a.name not in without]
    return [others.get(a.name, given.get(a.name, a.default_value)) for a in arguments]


def expected(name: str, given: Dict[str, Any]) -> Optional[Dict[str, Tensor]]:
    """Returns the reference's values by the name of a result or of a written argument, or None if there is no
    reference."""
    returns = [r.name for r in getattr(ops, name).default._schema.returns]
    a = Arguments(*(given.get(field, default) for field, default in {"indices": None,
                                                                    **Arguments._field_defaults}.items()))
    if name == "scale_":
        if given.get("expected") is not None and given["expected"].item() == 0:
            return None  # gives no information
        by = given["scale"] if given.get("expected") is None else given["scale"] / given["expected"]
        return {"gradient": given["gradient"] * by}
    if name == "linear_add_gradients_":
        return gradients_of_chunk(given)
    if name in ("backward_", "backward_anew_"):
        if name == "backward_anew_" and given["expected"].item() == given["grad_mean"].item():
            return {"grad_logits": given["grad_logits"].clone()}
        others = dict(grad_lse=None) if name == "backward_anew_" else {}
        grad = reference.backward(*named("backward", given, **others))
        return {"logits" if name == "backward_" else "grad_logits": grad}
    if name == "select_backward_":
        grad, of_scale = reference.select_backward(*named("select_backward", given))
        return {"logits": grad, "0": of_scale}
    if name in ("forward_with_gradient", "forward_with_gradient_"):
        loss, lse = reference.forward(given["logits"], *a)
        weight = given.get("row_weight")
        mean, divisor = reference.loss_mean(loss, given.get("normalizer"), *a.target, weight)
        grad_output = (given["grad_mean"] / divisor).expand(loss.shape)
        grad_output = grad_output if weight is None else grad_output * weight
        grad = reference.backward(grad_output, None, given["logits"], lse, None, *a)
        by = {"mean": mean, "divisor": divisor, "loss": loss, "lse": lse}
        return {**by, "logits" if name.endswith("_") else "grad_logits": grad}
    if name == "forward_with_residual":
        return dict(zip(("loss", "lse"), reference.forward(*named("forward", given))))
    if not hasattr(reference, name) or "dense_divergence" in name:  # the reference returns the losses alone
        return None
    out = getattr(reference, name)(*named(name, given))
    out = out if isinstance(out, tuple) else (out,)
    return dict(zip([r or str(i) for i, r in enumerate(returns)], out))


def gradients_of_chunk(given: Dict[str, Any]) -> Optional[Dict[str, Tensor]]:
    dz, first, last = given["grad_logits"].double(), given["first"], given["last"]
    out = {}
    classes = dz.shape[1]
    sum_, blocks = given.get("grad_input"), (given.get("first_classes", True), given.get("last_classes", True))
    if sum_ is not None and (sum_.dtype.itemsize > 2 or all(blocks)):
        product = dz @ given["linear_weight"][:classes].double()
        out["grad_input"] = product if blocks[0] else sum_.double() + product
    for of, product in (("grad_weight", dz.mT @ given["input"].double()), ("grad_bias", dz.sum(0))):
        sum_ = given.get(of)
        if sum_ is not None and (sum_.dtype.itemsize > 2 or first and last):
            out[of] = sum_.double()
            out[of][:classes] = product if first else out[of][:classes] + product
    return out


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    if ours.shape != theirs.shape:
        return False
    if not ours.dtype.is_floating_point:
        return torch.equal(ours, theirs.to(ours.dtype))
    a, b = ours.double(), theirs.double()
    both = (a == b) | (a.isnan() & b.isnan())
    allowed = {2: 0.1, 4: 5e-3, 8: 1e-6}[min(dtype.itemsize, ours.dtype.itemsize)]
    scale = b[b.isfinite()].abs().max() if b.isfinite().any() else 0.0
    return bool((both | ((a - b).abs() <= allowed * (1 + scale))).all())


class Failed(AssertionError):
    pass


def one(seed: int, count: Counter, verbose: bool = False) -> None:
    p = Problem(seed)
    name = p.choose.choice(NAMES)
    given = p.call(name)
    comparable = True
    for _ in range(p.choose.choice((0, 1, 1, 1, 2, 3))):
        comparable &= spoil(name, given, p)
    if verbose:
        print(name)
        for key, value in given.items():
            shape = (value.dtype, value.device, tuple(value.shape), value.layout, value.stride()
                     if value.layout == torch.strided else "") if isinstance(value, Tensor) else value
            print(f"  {key} = {shape}")
    schema = getattr(ops, name).default._schema
    written = {a.name: given.get(a.name) for a in schema.arguments if a.is_write}
    own = [t for t in written.values() if isinstance(t, Tensor)]
    before = dict(given)
    before.update((key, t.clone()) for key, t in written.items() if isinstance(t, Tensor) and t.numel() < 1 << 20)
    p.arena.remember()
    try:
        out = run(name, given)
    except Exception as error:  # noqa: BLE001
        text = str(error)
        ours = re.match(r"sparse_ce: \S+ must ", text) is not None
        count["refused by us" if ours else "refused by PyTorch"] += 1
        if not ours and not any(text.startswith(t) or t in text[:200] for t in TORCH):
            raise Failed(f"{name} raised {type(error).__name__}: {text[:400]}") from error
        if p.arena.changed([]) and ours:
            raise Failed(f"{name} refused its arguments, and wrote to them") from error
        return
    count["answered"] += 1
    if p.arena.changed(own):
        raise Failed(f"{name} wrote to memory that is not an argument's to be written")
    if any(isinstance(t, Tensor) and t.is_meta for t in given.values()):
        count["answered on meta"] += 1
        return
    if not comparable:
        return
    try:  # checked by the op alone: PyTorch's own ops may crash instead of raising an error
        theirs = expected(name, before)
    except Exception as error:  # noqa: BLE001
        count[f"the reference raised of {name}"] += 1
        if verbose:
            print("reference:", repr(error)[:300])
        return
    if theirs is None:
        return
    results = dict(zip([r.name or str(i) for i, r in enumerate(schema.returns)], out))
    count["compared"] += 1
    for key, reference_has in theirs.items():
        got = results[key] if key in results else written.get(key)
        if key in ("argmax", "rank") and "input" in before and p.dtype.itemsize == 2:
            continue  # logits of 16 bits may be equal
        if got is not None and not close(got, reference_has, p.dtype):
            raise Failed(f"{name}: {key} is\n{got}\nand the reference has\n{reference_has}")


def main(first: int, calls: int, told: Optional[str]) -> None:
    torch.set_num_threads(1)
    if "libasan" not in open("/proc/self/maps").read():  # AddressSanitizer maps terabytes
        mapped = int(re.search(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    count: Counter = Counter()
    failed = 0
    file = open(told, "w") if told else None
    for seed in range(first, first + calls):
        signal.alarm(600)  # ends a call that hangs
        if file:
            file.seek(0)
            file.write(f"{seed}\n")
            file.flush()
        try:
            one(seed, count, verbose=calls == 1)
        except Failed as error:
            failed += 1
            print(f"seed {seed}: {error}", flush=True)
            if failed > 30:
                break
    print(*(f"{n} {what}" for what, n in sorted(count.items())), sep=", ")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
