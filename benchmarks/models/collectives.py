"""Models the collectives of a loss over a sharded vocabulary: their bytes, their time, and the part hidden by GEMMs.

    python benchmarks/models/collectives.py                  every link, rows and ranks, in bfloat16
    python benchmarks/models/collectives.py --links nvlink ndr --ranks 8 --rows 8192 --features 7168 --classes 129280
    python benchmarks/models/collectives.py --links nvlink --latency 2 --bandwidth 340    with values measured on yours
    python benchmarks/models/collectives.py --markdown       the tables of docs/vocabulary-parallel.md

The results are predictions of a model, not measurements. A rank has two streams, as with a process group: one runs
GEMMs, the other uses the links. Each stream runs its steps in the order in which they were issued. A GEMM takes its
operations divided by --tflops. A collective takes --start, plus the time of NCCL's fastest algorithm in the
alpha-beta model, in which each of R ranks contributes n bytes:

    all-gather       ring   (R - 1) (latency + n / bandwidth)
    reduce-scatter   ring   (R - 1) (latency + n / (R bandwidth))
    all-reduce       ring   2 (R - 1) (latency + n / (R bandwidth))
                     tree   2 ceil(log2 R) latency + 2 n / bandwidth

The model ignores everything else:

- the kernels that read the logits, which every implementation needs,
- the cores that collectives take from GEMMs,
- ranks that arrive late.

All links of a group are equal; a link across nodes has one rank per node. Units are seconds, bytes and operations,
except on the command line and in printed output. It needs no torch.
"""

import argparse
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

# --------------------------------------------------------------------------------------------- collectives of each kind


class Collective(NamedTuple):
    op: str
    bytes: int  # of the tensor that each rank contributes


class Product(NamedTuple):
    operations: int


class Step(NamedTuple):
    """Describes a step. ``after`` names earlier steps that must have ended, in addition to the previous step of the
    same stream."""

    name: str
    work: Union[Collective, Product]
    after: Tuple[str, ...] = ()


Passes = Tuple[List[Step], List[Step]]  # forward, backward

# The numbers per row that a rank gathers from the others: maximum, sum of e, sum of w z and mass of the entries that it
# owns; and the numbers for each requested output.
STATISTICS = {"": 4, "label_smoothing": 2, "log_tail": 4, "entropy": 1, "mean_logit": 1, "argmax": 1,
              "collision": 1}


@dataclass(frozen=True)
class Call:
    """Describes a call of a loss, with all sizes that its collectives depend on."""

    rows: int
    ranks: int
    features: int = 4096
    classes: int = 128256
    element: int = 2  # bytes of an element of logits, hidden states and their gradients
    chunk_rows: Optional[int] = None  # of sparse_ce's head; by default an eighth of the rows, at least 1024
    sequence_parallel: bool = False  # hidden states and their gradient are sharded over the rows
    reduction: str = "mean"
    weight_gradient: str = "after"  # or "before" the input's gradient of each chunk, or "last", for all rows at once
    outputs: Tuple[str, ...] = ()  # names of STATISTICS
    entries: int = 0  # entries per row whose log-probabilities every rank needs
    rows_sharded: bool = False  # rows are sharded over another mesh dimension, and a mean needs their total number

    @property
    def number(self) -> int:
        """Returns the bytes of a number in computations."""
        return max(4, self.element)

    @property
    def chunks(self) -> List[int]:
        size = self.chunk_rows or max(1024, ceil(self.rows / 8))
        return [min(size, self.rows - begin) for begin in range(0, self.rows, size)]

    def product(self, rows: int) -> Product:
        """Returns the product of hidden states and a shard of the weight. Each of its two gradients takes as many
        operations."""
        return Product(2 * rows * self.features * ceil(self.classes / self.ranks))

    def statistics(self, rows: int) -> Collective:
        return Collective("all_gather", rows * self.number * sum(STATISTICS[name] for name in ("", *self.outputs)))

    def hidden(self, rows: int) -> List[Collective]:
        """Returns the collectives that gather all rows for the product."""
        if not self.sequence_parallel:
            return []
        return [Collective("all_gather", ceil(rows / self.ranks) * self.features * self.element)]

    def input_gradient(self, rows: int, element: Optional[int] = None) -> Collective:
        return Collective("reduce_scatter" if self.sequence_parallel else "all_reduce",
                          rows * self.features * (element or self.element))

    def sums(self, *numbers: int) -> List[Collective]:
        """Returns consecutive all-reduces of the given numbers of float32 values per row."""
        return [Collective("all_reduce", 4 * count * self.rows) for count in numbers]

    def results(self) -> List[Collective]:
        return [*([Collective("all_reduce", self.rows * self.entries * self.number)] if self.entries else []),
                *([Collective("all_reduce", 8)] if self.rows_sharded else [])]


def _in_turn(work: List[Any], after: Tuple[str, ...] = ()) -> List[Step]:
    steps: List[Step] = []
    for number, part in enumerate(work):
        steps.append(Step(f"{part.op} {number}", part, after))
        after = (steps[-1].name,)
    return steps


def _logits(work: Callable[[Call], List[Collective]]) -> Callable[[Call], Passes]:
    return lambda call: (_in_turn(work(call)), [])


def _our_head(call: Call) -> Passes:
    chunks = call.chunks

    def logits(i: int) -> List[Step]:
        ahead = [] if i else _all_rows(call, "hidden 0", chunks[0])
        if i + 1 < len(chunks):  # gathered one chunk ahead, before the statistics occupy the stream
            ahead += _all_rows(call, f"hidden {i + 1}", chunks[i + 1])
        return [*ahead, _product(call, f"logits {i}", chunks[i], f"hidden {i}")]

    forward, backward = [], []
    for i, rows in enumerate(chunks):
        forward += [*logits(i), Step(f"statistics {i}", call.statistics(rows), (f"logits {i}",))]
        if i and call.reduction != "none":  # the previous chunk's statistics arrive during this chunk's product
            forward += _gradients(call, i - 1, f"statistics {i - 1}")
    last = len(chunks) - 1
    if call.reduction != "none":
        forward += _gradients(call, last, f"statistics {last}")
    else:
        for i in range(len(chunks)):
            backward += [*logits(i), *_gradients(call, i, f"logits {i}")]
    return forward + _in_turn(call.results()), backward


def _gradients(call: Call, i: int, after: str) -> List[Step]:
    rows, last = call.chunks[i], i == len(call.chunks) - 1
    weight = [Step(f"weight {i}", call.product(rows), (after,))]
    input = [Step(f"input {i}", call.product(rows), (after,)),
             Step(f"input gradient {i}", call.input_gradient(rows), (f"input {i}",))]
    return {"before": weight + input, "after": input + weight,
            "last": input + [Step("weight", call.product(call.rows))] * last}[call.weight_gradient]


def _all_rows(call: Call, name: str, rows: int) -> List[Step]:
    return [Step(name, work) for work in call.hidden(rows)]


def _product(call: Call, name: str, rows: int, hidden: str) -> Step:
    return Step(name, call.product(rows), (hidden,) if call.sequence_parallel else ())


def _their_head(loss: Callable[[Call], List[Collective]], *, products: str = "input weight",
                gathers_again: bool = False, gradient: Optional[int] = None) -> Callable[[Call], Passes]:
    """Returns the passes of a head that processes all rows at once. Backward runs ``products`` in this order. The
    input's gradient is reduced as soon as it is computed, in the elements' dtype or in one of ``gradient`` bytes."""
    def passes(call: Call) -> Passes:
        rows = call.rows
        forward = [*_all_rows(call, "hidden", rows), _product(call, "logits", rows, "hidden"),
                   *_in_turn(loss(call), ("logits",))]
        backward = _all_rows(call, "hidden", rows) if gathers_again else []
        for name in products.split():
            needs_all = name == "weight" and gathers_again and call.sequence_parallel
            backward.append(Step(name, call.product(rows), ("hidden",) if needs_all else ()))
            if name == "input":
                backward.append(Step("input gradient", call.input_gradient(rows, gradient), ("input",)))
        return forward, backward
    return passes


def _megatron(call: Call) -> List[Collective]:
    return call.sums(1, 1, 1)  # maximum, logit of the label, sum of e


def _fused(call: Call) -> List[Collective]:
    return call.sums(1, 2)  # maximum; logit of the label and sum of e in one tensor


def _loss_parallel(call: Call) -> List[Collective]:
    """Returns the all-reduces of maximum, sum of e, and the label's log-probability, which is rounded to the logits'
    dtype."""
    return [Collective("all_reduce", call.rows * bytes) for bytes in (call.number, call.number, call.element)]


def _two_reductions(call: Call) -> List[Collective]:
    """Returns the alternative to sparse_ce's single all-gather: the maximum first, then sums relative to it."""
    total = call.statistics(call.rows).bytes
    return [*(Collective("all_reduce", bytes) for bytes in (call.rows * call.number, total - call.rows * call.number)),
            *call.results()]


# The collectives of each implementation. Peers are as in their sources of August 2026, loss_parallel as in torch 2.13:
#   loss_parallel        torch/distributed/tensor/parallel/loss.py, _log_softmax and _nll_loss_forward; its head is
#                        ColwiseParallel's DTensor, which reduces the input's gradient after both products
#   Megatron-LM          megatron/core/tensor_parallel/cross_entropy.py; "fused" is
#                        megatron/core/fusions/fused_cross_entropy.py; its head is
#                        megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication
#   Transformer Engine   transformer_engine/pytorch/triton/cross_entropy.py, cross_entropy_forward: maximum, sum of e
#                        and logit of the label; cross_entropy_recompute_forward, newer, a fourth, the sum of logits
#   flash-attention      flash_attn/ops/triton/cross_entropy.py: log-sum-exp gathered, the label's logit reduced
#   Liger-Kernel         logits as Megatron-LM, src/liger_kernel/ops/vocab_parallel_cross_entropy.py, and one more with
#                        label smoothing; its head, newer, src/liger_kernel/ops/megatron_fused_linear_cross_entropy.py
#   cut-cross-entropy    cut_cross_entropy/vocab_parallel/utils.py and cce_backward.py, which recomputes the logits.
#                        Neither its head nor Liger-Kernel's has sequence parallelism: the model assumes it anyway
#   gathered logits      torchtitan/components/loss.py, compute_logprobs; megatron/rl/rl_utils.py, get_logprobs.
#                        Backward takes the rank's own part of the gradient and sends nothing
KINDS: Dict[str, Callable[[Call], Passes]] = {
    "sparse_ce": _logits(lambda call: [call.statistics(call.rows), *call.results()]),
    "two reductions": _logits(_two_reductions),
    "loss_parallel": _logits(_loss_parallel),
    "Megatron-LM": _logits(_megatron),
    "Megatron-LM, fused": _logits(_fused),
    "Transformer Engine": _logits(lambda call: [Collective("all_gather", 12 * call.rows)]),
    "flash-attention": _logits(lambda call: [Collective("all_gather", 4 * call.rows), *call.sums(1)]),
    "gathered logits": _logits(lambda call: [
        Collective("all_gather", call.rows * ceil(call.classes / call.ranks) * call.element)]),
    "sparse_ce head": _our_head,
    "loss_parallel head": _their_head(_loss_parallel, products="weight input"),
    "Megatron-LM head": _their_head(_megatron, gathers_again=True),
    "Liger-Kernel head": _their_head(_fused, gradient=4),
    "cut-cross-entropy head": _their_head(_megatron, products="logits weight input", gradient=4),
}
OF_LOGITS = [kind for kind in KINDS if not kind.endswith(" head")]
OF_HEADS = [kind for kind in KINDS if kind.endswith(" head")]


def collectives(kind: str, rows: int, ranks: int, backward: bool = False, **options: Any) -> List[Collective]:
    """Returns the collectives of one of KINDS in forward, or in backward, in order. Options are those of Call. Peers
    depend only on dtypes, shapes and sequence parallelism."""
    return [step.work for step in KINDS[kind](Call(rows, ranks, **options))[backward]
            if isinstance(step.work, Collective)]


# ---------------------------------------------------------------------------------------------------------------- times


class Link(NamedTuple):
    latency: float  # seconds from a rank to the next
    bandwidth: float  # bytes per second that a rank sends while it receives as many
    start: float = 0.0  # fixed seconds of a collective
    trees: bool = True  # NCCL's all-reduce has trees between nodes; within a node its tree is a chain, like a ring


# Bandwidths are nominal, for one port per rank: 18 links of 25 GB/s (NVLink 4), and 400, 200, 100 and 25 Gbit/s. Starts
# and latencies approximate NCCL's own model for small messages, src/graph/tuning.cc of 2.30: 6.6 to 8.4 us to start. A
# step takes 0.6 to 1.9 us over NVLink and 2.7 to 5 us between nodes. Those of TCP over Ethernet are assumptions; RoCE
# is closer to InfiniBand.
LINKS = {
    "nvlink": Link(1e-6, 450e9, 7e-6, trees=False),
    "ndr": Link(4e-6, 50e9, 7e-6),
    "hdr": Link(4e-6, 25e9, 7e-6),
    "ethernet100": Link(20e-6, 12.5e9, 7e-6),
    "ethernet25": Link(30e-6, 3.125e9, 7e-6),
}


def seconds(collective: Collective, ranks: int, link: Link) -> float:
    """Computes the time of one collective on idle links."""
    if ranks == 1:
        return 0.0
    latency, bandwidth, start, trees = link
    ring = (ranks - 1) * (latency + collective.bytes / (ranks * bandwidth))
    if collective.op == "all_reduce":
        tree = 2 * (ceil(log2(ranks)) * latency + collective.bytes / bandwidth)
        return start + (min(2 * ring, tree) if trees else 2 * ring)
    return start + {"all_gather": (ranks - 1) * (latency + collective.bytes / bandwidth),
                    "reduce_scatter": ring}[collective.op]


def sent(collective: Collective, ranks: int) -> float:
    """Returns the bytes that a rank sends in a ring; it receives as many."""
    share = (ranks - 1) * collective.bytes / ranks
    return {"all_gather": share * ranks, "reduce_scatter": share, "all_reduce": 2 * share}[collective.op]


def timeline(steps: List[Step], ranks: int, link: Link, rate: float) -> Dict[str, Tuple[float, float]]:
    """Computes when each step begins and ends. ``rate`` is the operations per second."""
    free: Dict[type, float] = {Product: 0.0, Collective: 0.0}
    times: Dict[str, Tuple[float, float]] = {}
    for name, work, after in steps:
        stream = type(work)
        begin = max([free[stream], *(times[earlier][1] for earlier in after)])
        took = work.operations / rate if isinstance(work, Product) else seconds(work, ranks, link)
        times[name] = begin, begin + took
        free[stream] = begin + took
    return times


class Prediction(NamedTuple):
    total: float
    products: float

    @property
    def exposed(self) -> float:
        """Returns the time that the collectives add to the GEMMs."""
        return self.total - self.products


def predict(kind: str, link: Link, rate: float, rows: int, ranks: int, **options: Any) -> Prediction:
    """Computes the time of forward followed by backward."""
    total = products = 0.0
    for steps in KINDS[kind](Call(rows, ranks, **options)):
        total += max([end for _, end in timeline(steps, ranks, link, rate).values()], default=0.0)
        products += sum(step.work.operations / rate for step in steps if isinstance(step.work, Product))
    return Prediction(total, products)


# -------------------------------------------------------------------------------------------------------------- reports

ROWS, RANKS = (8192, 16384, 32768, 65536), (2, 4, 8, 16, 32, 64)
RATE = 770e12  # a rate of bfloat16 GEMMs that an H100 reaches
ELEMENTS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SHORT = {"two reductions": "2 reductions", "loss_parallel head": "ColwiseParallel", "Megatron-LM, fused": "fused",
         "Transformer Engine": "TE", "flash-attention": "flash-attn", "gathered logits": "gathered"}


def report(links: Dict[str, Link], rows: List[int], ranks: List[int], rate: float, **options: Any) -> Iterator[str]:
    def heading(first: str, kinds: List[str]) -> str:
        return f"{first:>18}" + "".join(f"{SHORT.get(kind, kind.replace(' head', '')):>20}" for kind in kinds)

    yield "Predictions of a model, not measurements: see the docstring of this file."
    for name, link in links.items():
        yield (f"\n{name}: {1e6 * link.latency:g} us, {link.bandwidth / 1e9:g} GB/s, {1e6 * link.start:g} us to start"
               f"\n\nus of the collectives of logits\n{heading('rows x ranks', OF_LOGITS)}")
        for n in rows:
            for r in ranks:
                times = [predict(kind, link, rate, n, r, **options).total for kind in OF_LOGITS]
                yield f"{f'{n} x {r}':>18}" + "".join(f"{1e6 * time:20.0f}" for time in times)
        yield f"\nms of a head's forward and backward (exposed time)\n{heading('rows x ranks', OF_HEADS)}"
        for n in rows:
            for r in ranks:
                heads = [predict(kind, link, rate, n, r, **options) for kind in OF_HEADS]
                cells = (f"{1e3 * head.total:.2f} ({1e3 * head.exposed:.2f})" for head in heads)
                yield f"{f'{n} x {r}':>18}" + "".join(f"{cell:>20}" for cell in cells)


def markdown() -> str:
    """Returns the tables of docs/vocabulary-parallel.md: bytes, and predicted times of a loss of sharded logits."""
    ranks, rows = 8, 8192
    lines = ["| bytes per row | forward | backward | KiB sent by a rank |", "|---|---|---|---|"]
    for kind in KINDS:
        if kind != "two reductions":
            passes = [collectives(kind, 1, ranks, backward) for backward in (False, True)]
            total = sum(sent(one, ranks) for backward in (False, True)
                        for one in collectives(kind, rows, ranks, backward))
            cells = (", ".join(f"{op.replace('_', '-')} {bytes}" for op, bytes in each) for each in passes)
            lines.append(_line(kind, [*cells, f"{total / 1024:,.0f}"]))
    shapes = [("nvlink", 8, 8192), ("ndr", 16, 8192), ("ndr", 16, 65536)]
    headings = [f"{'NVLink' if link == 'nvlink' else 'NDR'}, {r} ranks, {n} rows" for link, r, n in shapes]
    lines += ["", f"| us | {' | '.join(headings)} |", "|---" * (len(shapes) + 1) + "|"]
    for kind in OF_LOGITS:
        if kind != "two reductions":
            times = [predict(kind, LINKS[link], RATE, n, r).total for link, r, n in shapes]
            lines.append(_line(kind, [f"{1e6 * time:,.0f}" for time in times]))
    return "\n".join(lines)


def _line(kind: str, cells: List[str]) -> str:
    bold = "**" if kind.startswith("sparse_ce") else ""
    return "| " + " | ".join(f"{bold}{cell}{bold}" if cell else "" for cell in (kind, *cells)) + " |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--latency", type=float, help="us, of the chosen links")
    parser.add_argument("--bandwidth", type=float, help="GB/s each way, of the chosen links")
    parser.add_argument("--start", type=float, help="us, of the chosen links")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--features", type=int, default=Call.features)
    parser.add_argument("--classes", type=int, default=Call.classes)
    parser.add_argument("--dtype", choices=list(ELEMENTS), default="bfloat16")
    parser.add_argument("--chunk-rows", type=int, help="of sparse_ce's head; default: an eighth of the rows, at least "
                        "1024")
    parser.add_argument("--sequence-parallel", action="store_true", help="hidden states sharded over the rows")
    parser.add_argument("--reduction", choices=["mean", "none"], default="mean")
    parser.add_argument("--weight-gradient", choices=["before", "after", "last"], default="before",
                        help="order in sparse_ce's head: before or after the input's gradient of each chunk, or last "
                        "for all rows at once")
    parser.add_argument("--outputs", nargs="+", choices=[name for name in STATISTICS if name], default=[])
    parser.add_argument("--entries", type=int, default=0, help="log-probabilities per row")
    parser.add_argument("--tflops", type=float, default=RATE / 1e12, help="speed of the device's GEMMs")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the documentation")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.markdown:
        print(markdown())
        return
    own = {name: scale * value for name, scale, value in (
        ("latency", 1e-6, given.latency), ("bandwidth", 1e9, given.bandwidth), ("start", 1e-6, given.start))
        if value is not None}
    links = {name: LINKS[name]._replace(**own) for name in given.links}
    for line in report(links, given.rows, given.ranks, given.tflops * 1e12, features=given.features,
                       classes=given.classes, element=ELEMENTS[given.dtype], chunk_rows=given.chunk_rows,
                       sequence_parallel=given.sequence_parallel, reduction=given.reduction,
                       weight_gradient=given.weight_gradient, outputs=tuple(given.outputs), entries=given.entries):
        print(line)


if __name__ == "__main__":
    main()
