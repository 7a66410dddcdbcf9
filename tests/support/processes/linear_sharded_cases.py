"""Runs one of several processes of test_linear_sharded.py, each with some classes of a head.

    python linear_sharded_cases.py RANKS RANK FOLDER quick|slow

Runs every case with the others and saves the results to FOLDER/RANK.pt, a dictionary by the name of the case.
"""

import math
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import linear_cases
import sparse_ce
from cases import DTYPES, FORMS, Draw, drawn
from loss_cases import OPTIONS
from recorded_memory import peak
from sparse_ce._core.tracing import VALIDATES
from sparse_ce.ops import expected_grad

SIXTEEN = [torch.float16, torch.bfloat16]
OF_TEACHER = dict(return_forward_kl=True, return_reverse_kl=True, return_jsd=True, return_tv=True)
ASKED = dict(return_log_tail=True, return_entropy=True, return_mean_logit=True, return_argmax=True,
             return_collision=True, return_rank=True)


class Case(NamedTuple):
    """Describes one loss and its gradients. ``how`` names its special feature."""

    how: str = "loss"
    form: str = "tuple"
    options: str = "plain"
    reduction: str = "mean"
    dtype: torch.dtype = torch.float64
    cut: str = "uneven"
    chunk_rows: Optional[int] = 5
    head_dtype: Optional[torch.dtype] = None
    sequence: bool = False  # the rows of the hidden states are sharded too

    @property
    def name(self) -> str:
        return "-".join(str(part).removeprefix("torch.") for part in self)


OF_FORMS = [Case(form=form, reduction=reduction, chunk_rows=chunk_rows, sequence=sequence)
            for sequence in (False, True) for form in FORMS
            for reduction, chunk_rows in (("mean", 7 if sequence else 5), ("none", 1), ("sum", None))]
CASES = [
    *(Case(form=form, options=options, reduction=reduction, cut=cut) for options in OPTIONS if options != "plain"
      for form, reduction, cut in (("labels-int64", "mean", "uneven"), ("tuple", "mean", "empty"))),
    *(Case(form=form, options="all", reduction="none", cut="first empty")
      for form in ("labels-int64", "tuple", "jagged")
      if form in FORMS),
    *(Case(options="num_classes", reduction=reduction, cut=cut) for cut in ("padded", "even")
      for reduction in ("mean", "none")),
    *(Case(how, reduction=reduction, cut=cut) for how in ("selected", "row loss") for cut in ("uneven", "empty")
      for reduction in ("mean", "none")),
    *(Case(how, form, "num_classes", cut="padded") for how in ("selected", "row loss") for form in FORMS),
    *(Case(how, reduction=reduction) for how in ("row weights", "scale", "entropy", "metrics")
      for reduction in ("mean", "none")),
    *(Case(how, cut=cut) for how in ("input alone", "head alone", "bias alone", "values alone", "no gradient",
                                     "grad_output of 0", "accumulated", "retained", "checkpoint", "traced", "inference")
      for cut in ("uneven", "empty")),
    Case("row loss, retained"), Case("row loss, grad_output of 0"),
    *(Case(how, form, options, reduction, cut=cut, sequence=sequence) for sequence in (False, True)
      for how, form, options, cut in (
        ("row loss, teacher", "labels-int64", "plain", "uneven"), ("row loss, teacher", "tuple", "plain", "empty"),
        ("row loss, teacher", "tuple", "num_classes", "padded"), ("dense", "labels-int64", "plain", "empty"),
        ("dense", "labels-int64", "num_classes", "padded"), ("dense", "tuple", "plain", "uneven"))
      for reduction in ("mean", "none")),
    *(Case(how, form, options, reduction, cut=cut, sequence=sequence) for sequence in (False, True)
      for how, form, options, cut in (
        ("binary", "labels-int64", "plain", "empty"), ("binary", "tuple", "num_classes", "padded"),
        ("binary", "jagged", "plain", "uneven"), ("binary", "topk-log_probs", "ignore_index", "first empty"))
      for reduction in ("mean", "none")),
    *(Case(how, "labels-int64", chunk_rows=None, sequence=sequence) for sequence in (False, True)
      for how in ("binary, checkpoint", "binary, retained", "binary, grad_output of 0")),
    *(Case(how, "labels-int64", chunk_rows=None, sequence=sequence) for sequence in (False, True)
      for how in ("dense, checkpoint", "dense, retained", "row loss, teacher, checkpoint")),
    *(Case(dtype=dtype, reduction=reduction, form=form) for dtype in DTYPES if dtype != torch.float64
      for reduction in ("mean", "none") for form in ("tuple", "labels-int64")),
    *(Case(dtype=dtype, head_dtype=torch.float32) for dtype in SIXTEEN),
]
CASES += [
    *(Case(options=options, cut="empty", sequence=True) for options in OPTIONS if options != "plain"),
    *(Case(how, form, reduction=reduction, sequence=True) for how in ("selected", "row loss", "row weights", "entropy")
      for form in ("tuple", "labels-int64", "jagged") if form in FORMS for reduction in ("mean", "none")),
    *(Case(how, cut=cut, sequence=True) for how in ("scale", "metrics", "input alone", "head alone", "no gradient",
                                                    "accumulated", "retained", "row loss, retained", "checkpoint",
                                                    "traced", "inference", "grad_output of 0")
      for cut in ("uneven", "empty")),
    *(Case(dtype=dtype, reduction=reduction, sequence=True) for dtype in SIXTEEN for reduction in ("mean", "none")),
]
# Each process takes seconds to trace one case.
COMPILED = [Case("compiled", reduction="none", cut="empty", sequence=True), Case("compiled"),
            Case("compiled", reduction="none", cut="empty"), Case("compiled", sequence=True),
            Case("compiled", cut="empty", sequence=True)]


def cases(ranks: int, slow: bool) -> List[Case]:
    """Returns the quick cases, or the slow ones: two ranks take half of the formats, three half of all else."""
    if ranks == 2:
        quick = [case for case in OF_FORMS if drawn(case.name)] + CASES + COMPILED[:1]
    else:
        quick = [*OF_FORMS[::6], *(case for case in CASES if drawn(case.name))]
    return [case for case in (*OF_FORMS, *CASES, *COMPILED) if case not in quick] if slow else quick


# ----------------------------------------------------------------------------------------------------- what is computed

def make(case: Case):
    """Returns the example, [input, weight, bias], keywords, and (row weights, ``grad_output`` values by shape)."""
    options = OPTIONS[case.options]
    shape = (6, 2) if case.sequence else linear_cases.SHAPE
    example, head, keywords = linear_cases.make(case.form, "cpu", case.dtype, options, case.head_dtype, shape=shape)
    if case.cut == "even":  # the same number for 2 ranks as for 3
        head = [head[0], *(torch.cat([t, t.new_full((42 - t.shape[0], *t.shape[1:]), math.nan)]) for t in head[1:])]
    if "normalizer" not in options or case.reduction == "mean":
        keywords["reduction"] = case.reduction
    return example, head, keywords


def ends(case: Case, classes: int, ranks: int):
    """Returns the last class (exclusive) of each rank."""
    inner = {"uneven": [11, 29], "empty": [20, classes], "first empty": [0, 15], "padded": [20, 37],
             "even": [classes // ranks, 2 * classes // ranks]}[case.cut]
    return [*(inner[:ranks - 1] if case.cut in ("uneven", "first empty", "even") else inner[3 - ranks:]), classes]


def row_loss(out, target, by):
    finite = torch.where(out.lse.isinf(), 0.0, out.lse)
    if isinstance(target, sparse_ce.SparseTarget) and target.values is not None:
        terms = torch.where(out.log_probs.isinf(), 0.0, out.log_probs) * target.values.double().exp()
        finite = finite + (terms.sum(1) if target.offsets is None else finite.new_zeros(len(target)).index_add(
            0, target.row_indices(), terms))
    if hasattr(out, "tv"):
        finite = finite + out.forward_kl - 2 * out.reverse_kl + 3 * out.jsd.sqrt() + out.tv
    return by * (finite + out.log_tail.exp() + 0.3 * out.entropy - 0.2 * out.collision) + 0.01 * out.mean_logit


def compute(case: Case, **shard: Any) -> Dict[str, torch.Tensor]:
    """Returns the results of a rank by name, or of one process if there is no shard."""
    example, head, keywords = make(case)
    ranks, rank, group = shard.get("ranks", 1), shard.get("rank", 0), shard.get("group")
    of_teacher = Draw("cpu", 8)
    hidden, teacher_weight = (of_teacher.normal(*t.shape[:-1], 3, dtype=t.dtype) for t in head[:2])
    hidden[example.ignored] = torch.nan
    if group is not None:
        bounds = [0, *ends(case, head[1].shape[0], ranks)]
        begin, end = bounds[rank:rank + 2]
        head, teacher_weight = [head[0], head[1][begin:end], head[2][begin:end]], teacher_weight[begin:end]
        keywords.update(group=group, num_classes=keywords.get("num_classes", bounds[-1]))
        if case.cut != "even":
            keywords["vocab_start"] = begin
        if case.sequence:
            share = head[0].shape[0] // ranks
            head[0], keywords["group"] = head[0][rank * share:][:share], sparse_ce.SequenceGroup(group)
            hidden = hidden[rank * share:][:share]
    draw = Draw("cpu", 7)
    arithmetic = torch.float64 if case.dtype == torch.float64 else torch.float32
    by = draw.uniform(*example.shape, dtype=arithmetic)
    by[example.ignored] = torch.nan
    by.view(-1)[4] = 0
    row_mask = ~example.ignored
    row_mask.view(-1)[3] = False
    wanted = {"input alone": "input", "head alone": "weight bias", "bias alone": "bias", "values alone": "values",
              "no gradient": "", "inference": ""}.get(case.how, "input weight bias values by scale").split()
    leaves = {"input": head[0], "weight": head[1], "bias": head[2]}
    if example.values is not None and case.how != "selected" and not case.how.startswith("binary"):
        leaves["values"] = example.values
    if case.how.startswith(("row weights", "row loss", "binary")) or case.how == "dense" and case.reduction == "none":
        leaves["by"] = by
    if case.how == "scale" or case.how.startswith("binary"):
        leaves["scale"] = torch.tensor(1.3, dtype=arithmetic)
    leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in leaves.items()}
    keywords.update(chunk_rows=case.chunk_rows, linear_bias=leaves["bias"])

    def call(input: torch.Tensor, weight: torch.Tensor) -> Any:
        target = example.build(leaves.get("values", example.values))
        if case.how == "selected":
            given = {k: v for k, v in keywords.items() if k not in ("reduction", "normalizer")}
            return sparse_ce.linear_selected_log_probs(input, weight, target, **given, **ASKED)
        if case.how.startswith("binary"):
            given = {k: v for k, v in keywords.items() if k != "chunk_rows"}
            return sparse_ce.linear_binary_cross_entropy(
                input, weight, target, chunk_classes=case.chunk_rows, row_mask=row_mask, row_weight=leaves["by"],
                logit_scale=leaves["scale"], logit_bias=-0.5, gamma=(0.0, 2.0), label_smoothing=0.1, **given)
        if case.how.startswith("dense"):
            return sparse_ce.linear_distillation_loss(input, weight, (hidden, teacher_weight), target, kind="jsd",
                                                      alpha=0.4, row_mask=row_mask, row_weight=leaves.get("by", by),
                                                      **keywords)
        if case.how.startswith("row loss"):
            of_teacher = dict(OF_TEACHER, teacher=(hidden, teacher_weight)) if "teacher" in case.how else {}
            return sparse_ce.linear_row_loss(row_loss, input, weight, target, leaves["by"], **keywords, **ASKED,
                                             **of_teacher)
        more: Dict[str, Any] = {}
        if case.how == "row weights":
            more["row_weight"] = leaves["by"]
        if case.how == "scale":
            more["logit_scale"] = leaves["scale"]
        if case.how in ("entropy", "metrics"):
            more = dict(return_entropy=True, return_argmax=True)
        return sparse_ce.linear_cross_entropy(input, weight, target, **keywords, **more)

    def run() -> Dict[str, torch.Tensor]:
        if case.how.endswith("checkpoint"):
            out = checkpoint(call, leaves["input"], leaves["weight"], use_reentrant=False)
        elif case.how == "compiled" and group is not None:
            torch._dynamo.reset()
            backend = "aot_eager_decomp_partition"  # partitions forward and backward as Inductor does
            out = torch.compile(call, fullgraph=True, backend=backend)(leaves["input"], leaves["weight"])
        else:
            out = call(leaves["input"], leaves["weight"])
        if case.how == "selected":
            return {name: getattr(out, name) for name in ("log_probs", "lse", "log_tail", "entropy", "mean_logit",
                                                          "argmax", "collision", "rank")}
        if isinstance(out, tuple):
            return out._asdict()
        return {"loss": out}

    if case.how == "inference":
        with torch.inference_mode():
            return run()
    with linear_cases.Traced() if case.how == "traced" else linear_cases.contextlib.nullcontext():
        found = run()
        outputs = [t for name, t in found.items() if t.is_floating_point() and t.requires_grad
                   and not (case.how == "metrics" and name != "loss")]
        if not outputs:
            return found
        grad_output = [draw.normal(*t.shape, dtype=t.dtype) * (case.how[-1] != "0") for t in outputs]
        outputs = [torch.where(t.isinf(), 0.0, t) for t in outputs]  # of padding
        names = [name for name, t in leaves.items() if t.requires_grad]
        total = sum((t * u).sum() for t, u in zip(outputs, grad_output))
        asked = [leaves[name] for name in names]
        if case.how == "accumulated" or case.how.endswith("retained"):
            total.backward(retain_graph=True)
            if case.how == "accumulated":
                again = run()
                total = sum((again[name] * 0.7 * u).sum() for name, u in zip(found, grad_output))
            total.backward()
            grads = [t.grad for t in asked]
        else:
            grads = torch.autograd.grad(total, asked)
    return {**found, **{f"grad_{name}": grad for name, grad in zip(names, grads)}}


# --------------------------------------------------------------------------------------------- what is sent, and errors

COUNTED = dict(rows=600, width=24, classes=53)


class Collectives(TorchDispatchMode):
    """Records the names and bytes of collectives, without those that exchange arguments between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if ("_c10d_functional" if VALIDATES else "c10d") in str(func) and "wait_tensor" not in str(func):
            self.seen.append((func._schema.name.split("::")[1], sum(part.nbytes for part in tree_leaves(args[0]))))
        return func(*args, **(kwargs or {}))


def recorded(record, element: int):
    """Returns the same from a profile, which does not change the computation."""
    found = []
    for event in sorted(record.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("_c10d_functional::") and "wait_tensor" not in event.name:
            gathers = "all_gather" in event.name and event.input_shapes[0][-1] != COUNTED["width"]
            size = (8 if element == 8 else 4) if gathers else element
            found.append((event.name.split("::")[1].rstrip("_"), size * math.prod(event.input_shapes[0])))
    return found


def counted(group, ranks: int, rank: int):
    """Returns the collectives of forward and of backward, as seen by a profile and by a mode.

    The keys are dtype, reduction and whether the rows are sharded too.
    """
    found = {}
    for dtype, reduction, sequence in product((torch.float64, torch.bfloat16, torch.float16), ("mean", "none"),
                                              (False, True)):
        draw = Draw("cpu")
        hidden = draw.normal(COUNTED["rows"], COUNTED["width"]).to(dtype)
        if sequence:
            hidden = hidden.chunk(ranks)[rank].clone()
        hidden.requires_grad_()
        bounds = [0, 17, 53, 53][:ranks] + [53]
        weight = draw.normal(COUNTED["classes"], COUNTED["width"]).to(dtype)
        local = weight[bounds[rank]:bounds[rank + 1]].clone().requires_grad_()
        labels = draw.integers(COUNTED["classes"], COUNTED["rows"])

        given = dict(group=sparse_ce.SequenceGroup(group) if sequence else group, vocab_start=bounds[rank],
                     num_classes=bounds[-1], reduction=reduction)

        def forward(hidden=hidden, local=local, labels=labels, given=given):
            return sparse_ce.linear_cross_entropy(hidden, local, labels, **given).mean()

        ways = []
        for way in (lambda: torch.profiler.profile(record_shapes=True), Collectives):
            passes = []
            with way() as first:
                loss = forward()
            with way() as second:
                loss.backward()
            passes = [each.seen if isinstance(each, Collectives) else recorded(each, dtype.itemsize)
                      for each in (first, second)]
            ways.append(passes)
        found[str(dtype), reduction, sequence] = ways
    return found


def steps(group, ranks: int, rank: int):
    """Returns for each of ``STEPS`` whether forward and backward compute gradients, and the difference from the first
    such step.

    The difference is the largest one between the gradients for the input.
    """
    expected_grad._unused.clear()
    draw = Draw("cpu")
    hidden, whole = draw.normal(6, 4).requires_grad_(), draw.normal(5 * ranks, 4)
    weight, labels = whole.chunk(ranks)[rank].clone().requires_grad_(), draw.integers(5 * ranks, 6)
    groups = {"group": (group, True), "another": (dist.new_group(), True), "no entropy": (group, False)}
    first, found = {}, []
    for beside, name, looking_on, *_ in STEPS:
        of, with_entropy = groups[name]
        with Collectives() if looking_on == rank else nullcontext(), profile() as forward:
            out = sparse_ce.linear_cross_entropy(hidden, weight, labels, group=of, return_lse=True,
                                                 return_argmax=True, return_entropy=with_entropy)
            more = getattr(out, beside) if beside else out.loss * 0
        with profile() as backward:
            grad, = torch.autograd.grad(out.loss + 0.1 * more.sum(), hidden)
        makes = [any("linear_add_gradients_" in event.name for event in way.events()) for way in (forward, backward)]
        found.append((*makes, float((grad - first.setdefault(beside, grad)).abs().max())))
    return found


# The output used beside the loss, its group, the rank that has an active mode, and whether forward and backward compute
# gradients.
STEPS = [("entropy", "group", None, True, True), ("entropy", "group", 0, False, True),
         ("lse", "group", None, False, True), ("lse", "another", None, True, True),
         ("lse", "no entropy", None, True, True), ("", "group", None, False, True),
         ("", "group", None, True, False), ("lse", "another", None, False, True),
         ("", "no entropy", None, False, True), ("lse", "group", 1, True, True), ("", "no entropy", 1, True, False)]


LOOKING_ON = {"nobody": nullcontext, "a mode": Collectives, "hooks": torch.autograd.graph.save_on_cpu}


def looked_on(group, ranks: int, rank: int):
    """Returns loss and gradients by what is active on rank 0, and whether a checkpointed forward computes gradients.

    The chunks skip ignored rows.
    """
    draw = Draw("cpu")
    hidden, whole = draw.normal(12, 4).requires_grad_(), draw.normal(5 * ranks, 4)
    weight, labels = whole.chunk(ranks)[rank].clone().requires_grad_(), draw.integers(5 * ranks, 12)
    labels[2:6] = -100  # three chunks: with two, gradients in forward do not change the order of collectives

    def forward(hidden, weight):
        return sparse_ce.linear_cross_entropy(hidden, weight, labels, chunk_rows=3, group=group)

    def of_teacher(hidden, weight):
        return sparse_ce.linear_distillation_loss(hidden, weight, (hidden.detach().cos(), weight),
                                                  row_mask=labels >= 0, chunk_rows=3, group=group)

    found = {}
    for name, way in LOOKING_ON.items():
        with way() if rank == 0 else nullcontext():
            found[name] = ()
            for loss in (forward(hidden, weight), of_teacher(hidden, weight)):
                found[name] += (loss.detach(), *torch.autograd.grad(loss, [hidden, weight]))
    with profile() as seen:
        checkpoint(forward, hidden, weight, use_reentrant=False)
    return found, any("linear_add_gradients_" in event.name for event in seen.events())


def held(group, ranks: int, rank: int):
    """Returns the peak memory of a backward that recomputes the logits, in units of a chunk's logits."""
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(3000, 4)
    out = sparse_ce.linear_selected_log_probs(hidden, weight, torch.arange(64), group=group, chunk_rows=16)
    return peak(lambda: torch.autograd.grad(out.log_probs.sum(), hidden)) / (16 * 3000 * 4)


def errors(group, ranks: int, rank: int):
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels, sequence = torch.zeros(6, dtype=torch.long), sparse_ce.SequenceGroup(group)

    def loss(target=labels, **options):
        return sparse_ce.linear_cross_entropy(hidden, weight, target, group=group, **options)

    def row(**options):
        return sparse_ce.linear_row_loss(lambda out, target: -out.log_probs, hidden, weight, labels, group=group)

    def watched(call):
        with Collectives():
            return call()

    calls = {
        "second derivative": lambda: torch.autograd.grad(loss(), hidden, create_graph=True),
        "second derivative of rows": lambda: torch.autograd.grad(loss(reduction="none").sum(), hidden,
                                                                 create_graph=True),
        "second derivative of a row loss": lambda: torch.autograd.grad(row(), hidden, create_graph=True),
        **{f"second derivative of a dense teacher{of}": lambda way=way: torch.autograd.grad(
            sparse_ce.linear_distillation_loss(hidden, weight, (hidden.detach(), weight), group=way), hidden,
            create_graph=True) for of, way in (("", group), (" of a sequence", sequence))},
        "second derivative under a mode": lambda: watched(lambda: torch.autograd.grad(
            loss(), hidden, create_graph=True)),
        "second derivative of rows under a mode": lambda: watched(lambda: torch.autograd.grad(
            loss(reduction="none").sum(), hidden, create_graph=True)),
        "second derivative of a row loss under a mode": lambda: watched(lambda: torch.autograd.grad(
            row(), hidden, create_graph=True)),
        "functional": lambda: torch.func.grad(lambda x: sparse_ce.linear_cross_entropy(
            x, weight, labels, group=group))(hidden.detach()),
        "label": lambda: loss(torch.full((6,), 5 * ranks)),
        "num_classes": lambda: loss(num_classes=5 * ranks + 1),
        "vocab_start": lambda: loss(vocab_start=5 * rank),
        "sequence of logits": lambda: sparse_ce.cross_entropy(weight, labels[:5], group=sequence),
        "sequence of a row": lambda: sparse_ce.linear_cross_entropy(hidden[0], weight, labels[0], group=sequence),
        "sequence with a teacher of all rows": lambda: sparse_ce.linear_row_loss(
            lambda out, _: out.tv, hidden, weight, torch.zeros(6 * ranks, dtype=torch.long), return_tv=True,
            teacher=(hidden.detach().repeat(ranks, 1), weight), group=sequence),
        "sequence of other rows": lambda: sparse_ce.linear_cross_entropy(hidden, weight, labels, group=sequence),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    for name, of in (("no rows", group), ("no rows of a sequence", sequence)):
        for reduction in ("mean", "none"):
            nothing = hidden[:0].detach().requires_grad_()
            out = sparse_ce.linear_cross_entropy(nothing, weight, labels[:0], reduction=reduction, group=of)
            grads = torch.autograd.grad(out.sum(), (nothing, weight))
            found[name, reduction] = out, *grads
    poisoned, by = hidden.detach().clone(), torch.tensor([1.0, 0, 2, 1, 1, 1])
    poisoned[1] = torch.nan
    for name, of in (("of weight 0", dict(group=group)), ("of weight 0, one process", {})):
        given = poisoned.clone().requires_grad_(), weight
        grads = torch.autograd.grad(sparse_ce.linear_cross_entropy(*given, labels, row_weight=by, **of), given)
        found[name] = [grad.isfinite() for grad in grads]
    found["and then"] = bool(loss().isfinite())  # the group is still usable
    return found


def main() -> None:
    ranks, rank, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes run on this host, whatever its name resolves to
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=20))
    shard = dict(group=dist.group.WORLD, ranks=ranks, rank=rank)
    found: Dict[str, Any] = {}
    slow = sys.argv[4] == "slow"
    for case in cases(ranks, slow):
        print(case.name, flush=True)  # identifies the case of a process that hangs
        found[case.name] = {name: t.detach() for name, t in compute(case, **shard).items()}
    if not slow:
        found["steps"] = steps(**shard)
        found["looked on"] = looked_on(**shard)
        found["held"] = held(**shard)
        found["collectives"] = counted(**shard)
        found["errors"] = errors(**shard)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
