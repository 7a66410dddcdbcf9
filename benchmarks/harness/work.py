"""Defines the calls that run on one problem: floors, sparse_ce and peers, each with the bytes that its work must
move."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor

import sparse_ce
from harness.bench import Call, Spread, time_by_turns
from harness.peers import Problem, peers

READ, COPY = "read E", "copy E"
FORWARD = "forward"
BACKWARD = "backward"
BOTH = "forward + backward"
IN_PLACE = "forward + backward, in place"
AT_ONCE = "forward + backward, in place at once"
INDEX_FORWARD = "forward, class index"
INDEX_BOTH = "forward + backward, class index"


@dataclass(frozen=True)
class Work:
    """Describes one row of the table."""

    name: str
    side: str  # "floor", "ours" or "peer"
    moves: int  # bytes that any implementation of the work must move
    floor: Tuple[str, ...]  # the rows that together move as many bytes
    call: Call
    soft: bool = True
    yields: str = ""  # the part of `call`'s result that check.py checks: "loss", "grad", "both" or nothing
    note: str = ""


def reader(problem: Problem) -> Tuple[str, Callable[[], Tensor]]:
    """Returns the fastest of several ways to read every byte of the logits once with the available threads, and its
    name.

    Integer sums involve no rounding, no NaN and no denormals, whatever bits the logits have.
    """
    flat = problem.logits.detach().view(-1)
    ways: Dict[str, Callable[[], Tensor]] = {
        "int32 sum": lambda: flat.view(torch.int32).sum(dtype=torch.int32),
        "int32 amax": lambda: flat.view(torch.int32).amax(),
        "int64 sum": lambda: flat.view(torch.int64).sum(),
    }
    if problem.shape.dtype == torch.float32:
        matrix, ones = problem.logits.detach(), torch.ones(problem.shape.vocab, device=problem.device)
        ways["matrix times vector"] = lambda: matrix.mv(ones)
    samples = time_by_turns({name: Call(run) for name, run in ways.items()}, problem.device, 7, 2, problem.shape.small)
    best = min(ways, key=lambda name: Spread.of(samples[name]).median)
    return best, ways[best]


def forward_backward(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tuple[Tensor, Tensor]:
    """Computes the mean loss and its gradient. The gradient is newly allocated unless ``loss`` works in place."""
    value = loss(logits)
    return value.detach(), torch.autograd.grad(value, logits)[0]


class _Made(torch.autograd.Function):
    """Returns a tensor like the output of a model's last layer: neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, made: List[Tensor]) -> Tensor:
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[None, None]:
        return None, None


def kept(table: Dict[str, Any], with_peers: bool) -> Dict[str, Any]:
    """Returns the rows of a table whose values begin with their side, without the peers if these are not requested."""
    return {name: row for name, row in table.items() if with_peers or row[0] != "peer"}


def work_on(problem: Problem) -> List[Work]:
    return _floors(problem) + _ours(problem) + _peers(problem)


def _floors(problem: Problem) -> List[Work]:
    size = problem.shape.logits_bytes  # E = N * V * sizeof(dtype)
    logits, destination = problem.logits.detach(), problem.overwritten.detach()
    way, read = reader(problem)
    return [
        Work(READ, "floor", size, (READ,), Call(read), note=way),  # 1 read
        Work(COPY, "floor", 2 * size, (COPY,), Call(lambda: destination.copy_(logits)),  # 1 read + 1 write
             note="y.copy_(x), y exists"),
    ]


def _ours(problem: Problem) -> List[Work]:
    size = problem.shape.logits_bytes
    logits, overwritten, labels = problem.logits, problem.overwritten, problem.labels
    target = (problem.indices, problem.values)

    def soft(x: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(x, target)

    def soft_in_place(x: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(x, target, inplace="backward")

    def soft_at_once(x: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(x, target, inplace="forward")

    weight = torch.zeros((), device=problem.device, requires_grad=True)

    def index(x: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(x, labels)

    graph = soft(logits)  # kept to time backward separately
    once, both = (READ,), (READ, COPY)
    return [
        Work(FORWARD, "ours", size, once, Call(lambda: soft(logits.detach())), yields="loss"),  # 1 read
        Work(BACKWARD, "ours", 2 * size, (COPY,),  # 1 read + 1 write
             Call(lambda: torch.autograd.grad(graph, logits, retain_graph=True)[0]), yields="grad"),
        Work(BOTH, "ours", 3 * size, both,  # 2 reads + 1 write
             Call(lambda: forward_backward(soft, logits)), yields="both"),
        Work(IN_PLACE, "ours", 3 * size, both,  # the same, but writes to cache lines that were just read
             Call(lambda: forward_backward(soft_in_place, overwritten), problem.restore), yields="both"),
        Work(AT_ONCE, "ours", 2 * size, both,  # 1 read + 1 write
             Call(lambda: forward_backward(soft_at_once, _Made.apply(weight, [overwritten.detach()])), problem.restore),
             yields="both"),
        Work(INDEX_FORWARD, "ours", size, once, Call(lambda: index(logits.detach())), soft=False, yields="loss"),
        Work(INDEX_BOTH, "ours", 3 * size, both,
             Call(lambda: forward_backward(index, logits)), soft=False, yields="both"),
    ]


def _peers(problem: Problem) -> List[Work]:
    """Returns forward + backward of each peer. GB/s count 2 reads + 1 write, the minimum for this work."""

    def call(peer) -> Call:
        if peer.overwrites:
            return Call(lambda: forward_backward(peer.loss, problem.overwritten), problem.restore)
        return Call(lambda: forward_backward(peer.loss, problem.logits))

    return [Work(peer.name, "peer", 3 * problem.shape.logits_bytes, (READ, COPY), call(peer), soft=peer.soft,
                 yields="both", note=peer.note) for peer in peers(problem)]
