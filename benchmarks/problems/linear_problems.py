"""Measures the linear head with its loss, against its bare GEMMs and other implementations with the same gradients.

The floor is the arithmetic: three GEMMs of 2 N V D operations each (logits, the input's gradient, the weight's
gradient). The same library computes them into newly allocated memory, since every row here returns new gradients.
``GEMMs, existing memory`` are the same without the page faults of new memory. Extra memory is the peak memory beyond
inputs and gradients.
"""

from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, Samples, Spread, extra_bytes, ratio, time_by_turns
from harness.check import WrongResult
from harness.peers import LIGER_BACKENDS, compiled_when_called, gather_route, liger_with, unsloth_module

GEMMS, GEMMS_AGAIN = "GEMMs", "GEMMs, existing memory"
BOTH, INDEX_BOTH = "forward + backward", "forward + backward, class index"
NONE = 'forward + backward, class index, reduction="none"'
FEW_ROWS = f"{INDEX_BOTH}, chunk_rows=D/16"  # if there are more rows than features: a fourth GEMM for less memory
UNFUSED, STOCK = "F.linear + F.cross_entropy, class index", "F.linear_cross_entropy, class index"
CHUNKED, CHUNKED_128 = f"{STOCK}, default options", f"{STOCK}, chunks of 128 rows"
COMPILED, SOFT_UNFUSED = "torch.compile of F.linear + F.cross_entropy, class index", "F.linear + log_softmax + gather"
ROUNDS = 9  # a call takes up to two seconds
TENTH = 0.1

Gradients = Tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LinearShape:
    """Holds the sizes: hidden states (rows, width), a head (vocab, width), and ``entries`` weighted classes per row."""

    rows: int
    width: int
    vocab: int
    entries: int
    dtype: torch.dtype
    memory_alone: bool = False  # too large to time peers, which materialize all logits

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.dtype.itemsize

    @property
    def operations(self) -> int:
        return 6 * self.rows * self.vocab * self.width

    def __str__(self) -> str:
        only = ", memory" if self.memory_alone else ""
        return (f"linear head{only}, {self.rows} x {self.width} x {self.vocab}, K={self.entries}, "
                f"{str(self.dtype)[6:]}")


LINEAR_SHAPES = {
    "cpu": [
        LinearShape(512, 512, 32000, 64, torch.float32),
        LinearShape(512, 512, 32000, 64, torch.bfloat16),
        LinearShape(256, 1024, 128256, 64, torch.float32),
        LinearShape(256, 1024, 128256, 64, torch.bfloat16),
        LinearShape(8192, 128, 128256, 64, torch.float32, memory_alone=True),
        LinearShape(4096, 2048, 64000, 64, torch.bfloat16, memory_alone=True),
        LinearShape(8192, 512, 128256, 64, torch.bfloat16, memory_alone=True),
    ],
    "cuda": [
        LinearShape(8192, 4096, 128256, 64, torch.bfloat16),
        LinearShape(8192, 512, 128256, 64, torch.bfloat16),
        LinearShape(4096, 2048, 32000, 64, torch.float32),
    ],
}


class LinearProblem:
    """Creates hidden states near the weights of their labels, so that the softmax is peaked, and a soft target around
    them."""

    def __init__(self, shape: LinearShape, device: torch.device):
        generator = torch.Generator(device).manual_seed(1)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device)

        self.shape, self.device = shape, device
        stride = shape.vocab // shape.entries
        columns = torch.randint(stride, (shape.rows, shape.entries), generator=generator, device=device)
        self.indices = columns + torch.arange(shape.entries, device=device) * stride
        self.values = torch.softmax(2 * normal(shape.rows, shape.entries), 1)
        self.labels = self.indices[:, 0].contiguous()
        weight = normal(shape.vocab, shape.width).div_(shape.width ** 0.5)
        self.input = (12 * weight[self.labels] + normal(shape.rows, shape.width)).to(shape.dtype).requires_grad_()
        self.weight = weight.to(shape.dtype).requires_grad_()

    def gradients(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Gradients:
        return torch.autograd.grad(loss(self.input, self.weight), (self.input, self.weight))

    def exact(self, soft: bool) -> Gradients:
        """Computes the gradients of the mean loss in float64 (for 16-bit dtypes in float32), one chunk of rows at a
        time."""
        dtype = torch.float64 if self.shape.dtype == torch.float32 else torch.float32
        x, w = self.input.detach().to(dtype), self.weight.detach().to(dtype)
        labels = self.labels[:, None]
        indices, values = (self.indices, self.values) if soft else (labels, torch.ones_like(labels, dtype=dtype))
        values = values.to(dtype) / self.shape.rows
        grad_input, grad_weight = torch.empty_like(x), torch.zeros_like(w)
        for rows in torch.arange(self.shape.rows, device=self.device).split(128):
            dz = torch.softmax(x[rows] @ w.T, 1).mul_(values[rows].sum(1, keepdim=True))
            dz.scatter_add_(1, indices[rows], -values[rows])
            grad_input[rows] = dz @ w
            grad_weight.addmm_(dz.T, x[rows])
        return grad_input, grad_weight


def measure_linear(shape: LinearShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    problem = LinearProblem(shape, device)
    ours, peers = _ours(problem), _peers(problem)
    if shape.memory_alone:
        if shape.dtype.itemsize == 2 and shape.rows > shape.width:
            ours[FEW_ROWS] = lambda: problem.gradients(lambda x, w: sparse_ce.linear_cross_entropy(
                x, w, problem.labels, chunk_rows=shape.width // 16))
        return _measure_memory(problem, ours, {STOCK: peers[STOCK]} if with_peers else {})
    if not with_peers:
        peers = {name: peers[name] for name in (UNFUSED, SOFT_UNFUSED)}  # the checks of sparse_ce need these
    bare = floors(problem)
    slow = {name: peers.pop(name) for name in [CHUNKED] if device.type == "cpu" and name in peers}
    errors, not_run = _check_all(problem, ours, peers)
    calls = {**bare, **ours, **{name: call for name, call in peers.items() if with_peers and name not in not_run}}
    seconds = time_by_turns({name: Call(run) for name, run in calls.items()}, device, min(repeats, ROUNDS), 2, False)
    found, failures = _once(problem, slow)
    seconds.update(found)
    not_run.update(failures)
    calls.update({name: slow[name] for name in found})
    held = {name: None if name in bare or name in slow else held_by(problem, run) for name, run in calls.items()}
    rows = [_row(name, problem, name in bare, name in ours, seconds, held[name], errors.get(name)) for name in calls]
    return _record(shape, rows, not_run)


def _once(problem: LinearProblem, peers) -> Tuple[Dict[str, Samples], Dict[str, str]]:
    """Runs each call once. Returns its time, or the reason why it is not run."""
    seconds, not_run = {}, {}
    for name, run in peers.items():
        try:
            seconds.update(time_by_turns({name: Call(run)}, problem.device, 1, 0, False))
        except Exception as failure:  # a peer may fail for any reason, e.g. this torch lacks it
            not_run[name] = reason_of(failure)
    return seconds, not_run


def _measure_memory(problem: LinearProblem, ours, peers) -> Dict[str, Any]:
    """Runs each call once, to measure only its memory."""
    held = {}
    calls = {name: lambda name=name, run=run: held.update({name: held_by(problem, run)})
             for name, run in {**ours, **peers}.items()}
    seconds = time_by_turns({name: Call(calls.pop(name)) for name in ours}, problem.device, 1, 0, False)
    found, not_run = _once(problem, calls)
    seconds.update(found)
    names = list(seconds)
    seconds[GEMMS] = seconds[BOTH]  # a placeholder: nothing is timed against a floor here
    rows = [_row(name, problem, False, name in ours, seconds, held[name], None) for name in names]
    return {**_record(problem.shape, rows, not_run), "untimed": True}


def floors(problem: LinearProblem) -> Dict[str, Callable[[], Any]]:
    x, w = problem.input.detach(), problem.weight.detach()
    dz = torch.softmax(x @ w.T, 1).div_(problem.shape.rows)
    z, grad_input, grad_weight = torch.empty_like(dz), torch.empty_like(x), torch.empty_like(w)

    def fresh() -> Gradients:
        torch.mm(x, w.T)
        return torch.mm(dz, w), torch.mm(dz.T, x)

    def again() -> None:
        torch.mm(x, w.T, out=z), torch.mm(dz, w, out=grad_input), torch.mm(dz.T, x, out=grad_weight)

    return {GEMMS: fresh, GEMMS_AGAIN: again}


def _ours(problem: LinearProblem) -> Dict[str, Callable[[], Gradients]]:
    target, labels = (problem.indices, problem.values), problem.labels
    loss = sparse_ce.linear_cross_entropy
    return {
        BOTH: lambda: problem.gradients(lambda x, w: loss(x, w, target)),
        INDEX_BOTH: lambda: problem.gradients(lambda x, w: loss(x, w, labels)),
        NONE: lambda: problem.gradients(lambda x, w: loss(x, w, labels, reduction="none").mean()),
        **{f"{INDEX_BOTH}, chunk_rows={rows}": lambda rows=rows: problem.gradients(
            lambda x, w: loss(x, w, labels, chunk_rows=rows))
           for rows in ((2048, problem.shape.rows) if problem.device.type == "cuda" else ())},
    }


def _peers(problem: LinearProblem) -> Dict[str, Callable[[], Gradients]]:
    labels, indices, values = problem.labels, problem.indices, problem.values
    compiled = compiled_when_called(lambda x, w: F.cross_entropy(F.linear(x, w), labels))
    losses = {
        UNFUSED: lambda x, w: F.cross_entropy(F.linear(x, w), labels),
        SOFT_UNFUSED: lambda x, w: gather_route(F.linear(x, w), indices, values),
        COMPILED: compiled,
        STOCK: lambda x, w: F.linear_cross_entropy(x, w, labels),
        CHUNKED: lambda x, w: F.linear_cross_entropy(x, w, labels, options=torch.nn.LinearCrossEntropyOptions()),
        CHUNKED_128: lambda x, w: F.linear_cross_entropy(
            x, w, labels, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=128)),
    }
    if problem.device.type == "cuda":
        losses["liger-kernel, class index"] = lambda x, w: _liger(x, w, labels)
        for backend in LIGER_BACKENDS:
            losses[f"liger-kernel with {backend}, class index"] = lambda x, w, backend=backend: liger_with(
                backend).LigerFusedLinearCrossEntropyFunction.apply(x, w, labels)[0]
        losses["liger-kernel with the loss of cutedsl, class index"] = lambda x, w: _liger_functional(x, w, labels)
        losses["unsloth, class index"] = lambda x, w: _unsloth(x, w, labels)
        losses["cut-cross-entropy, class index"] = lambda x, w: _cut(x, w, labels)
        losses["quack-kernels, class index"] = lambda x, w: _quack(x, w, labels)
    return {name: (lambda loss=loss: problem.gradients(loss)) for name, loss in losses.items()}


# Peers are imported when called: one that is not installed, or does not load, is reported as not run.


def _liger(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    return liger_fused_linear_cross_entropy(x, w, labels)


def _liger_functional(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """Computes GEMMs by cuBLAS and each chunk's loss by CuTe DSL, because Liger's fused kernels of cutedsl need
    sm_100."""
    from liger_kernel.functional import fused_linear_cross_entropy
    return fused_linear_cross_entropy(x, w, labels, impl="nvidia-cutedsl")[0]


def _unsloth(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    loss = unsloth_module("unsloth_zoo.fused_losses.cross_entropy_loss").unsloth_fused_ce_loss
    return loss(None, x, w, None, labels, shift_labels=False)


def _cut(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy
    return linear_cross_entropy(x, w, labels)


def _quack(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy
    return chunked_linear_cross_entropy(x, w, labels)


def _check_all(problem: LinearProblem, ours, peers) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Returns gradient errors by row, in units of the gradient's scale, and the reasons why peers are not run. The
    error of sparse_ce may be twice that of PyTorch's unfused route in the same dtype, plus four units in the last
    place."""
    errors: Dict[str, float] = {}
    not_run: Dict[str, str] = {}
    for soft, unfused in ((True, SOFT_UNFUSED), (False, UNFUSED)):
        truth = problem.exact(soft)
        allowed = 2 * error_of(peers[unfused](), truth) + 4 * torch.finfo(problem.shape.dtype).eps
        for name, call in {**ours, **peers}.items():
            if (name in (BOTH, SOFT_UNFUSED)) != soft:
                continue
            try:
                error = error_of(call(), truth)
            except Exception as failure:  # a failure of a peer must not end the run
                if name in ours:
                    raise
                not_run[name] = reason_of(failure)
                continue
            if not error <= (allowed if name in ours else TENTH):
                raise WrongResult(f"{name}: gradients are off by {error:.2e} of their scale, allowed {allowed:.2e}")
            errors[name] = error
    return errors, not_run


def reason_of(failure: Exception) -> str:
    return str(failure).strip().split("\n")[0] or type(failure).__name__


def error_of(found: Gradients, truth: Gradients) -> float:
    parts = [((a.to(b.dtype) - b).abs().max() / b.abs().max()).item() for a, b in zip(found, truth)]
    return torch.tensor(parts).max().item()  # Python's max() may drop a NaN


def held_by(problem: LinearProblem, run: Callable[[], Gradients]) -> Optional[int]:
    extra = extra_bytes(Call(run), problem.device)
    return None if extra is None else max(0, extra - problem.input.nbytes - problem.weight.nbytes)


def _row(name: str, problem: LinearProblem, floor: bool, ours: bool, seconds: Dict[str, Samples], held: Optional[int],
         error: Optional[float]) -> records.Record:
    operations, mine = problem.shape.operations, BOTH if name == SOFT_UNFUSED else INDEX_BOTH
    side = "floor" if floor else "ours" if ours else "peer"
    return {
        "name": name, "side": side, "target": f"K={problem.shape.entries}" if mine == BOTH else "class index",
        "operations": operations, "floor": [GEMMS], "ms": asdict(Spread.of([1e3 * t for t in seconds[name]])),
        "gflop_per_s": operations / Spread.of(seconds[name]).median / 1e9,
        "over_floor": asdict(ratio(seconds[name], seconds[GEMMS])),
        "over_ours": asdict(ratio(seconds[name], seconds[mine])) if side == "peer" else None,
        "extra_mib": None if held is None else held / 2**20, "gradient_error": error,
        "note": "one round" if name == CHUNKED and len(seconds[name]) == 1 else "",
    }


def _record(shape: LinearShape, rows: List[records.Record], not_run: Dict[str, str]) -> Dict[str, Any]:
    return {"title": str(shape), "logits_bytes": shape.logits_bytes, "rows": rows, "not_run": not_run}
