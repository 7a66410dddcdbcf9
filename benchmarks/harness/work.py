"""What is run on one problem: the floors, ours and the peers, each with the bytes that its work cannot avoid."""

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
    """One row of the table."""

    name: str
    side: str  # "floor", "ours" or "peer"
    moves: int  # bytes that the work must move, whoever does it
    floor: Tuple[str, ...]  # the rows that together move as much
    call: Call
    soft: bool = True
    yields: str = ""  # what `call` returns and check.py can look at: "loss", "grad", "both" or nothing
    note: str = ""


def reader(problem: Problem) -> Tuple[str, Callable[[], Tensor]]:
    """The fastest of some ways to read every byte of the logits once with the threads at hand, and its name.

    Sums of integers: whatever bits the logits hold, there is no rounding, no NaN and no denormal to slow them down.
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
    """The mean loss and its gradient, fresh unless ``loss`` says otherwise."""
    value = loss(logits)
    return value.detach(), torch.autograd.grad(value, logits)[0]


class _Made(torch.autograd.Function):
    """A tensor as a model's last layer makes it: nobody's leaf, and no view."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, made: List[Tensor]) -> Tensor:
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[None, None]:
        return None, None


def kept(table: Dict[str, Any], with_peers: bool) -> Dict[str, Any]:
    """Returns the rows of a table of which each begins with its side, without the peers' where they are not wanted."""
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

    graph = soft(logits)  # kept for the backward alone
    once, both = (READ,), (READ, COPY)
    return [
        Work(FORWARD, "ours", size, once, Call(lambda: soft(logits.detach())), yields="loss"),  # 1 read
        Work(BACKWARD, "ours", 2 * size, (COPY,),  # 1 read + 1 write
             Call(lambda: torch.autograd.grad(graph, logits, retain_graph=True)[0]), yields="grad"),
        Work(BOTH, "ours", 3 * size, both,  # 2 reads + 1 write
             Call(lambda: forward_backward(soft, logits)), yields="both"),
        Work(IN_PLACE, "ours", 3 * size, both,  # as many, but into lines that were just read
             Call(lambda: forward_backward(soft_in_place, overwritten), problem.restore), yields="both"),
        Work(AT_ONCE, "ours", 2 * size, both,  # 1 read + 1 write
             Call(lambda: forward_backward(soft_at_once, _Made.apply(weight, [overwritten.detach()])), problem.restore),
             yields="both"),
        Work(INDEX_FORWARD, "ours", size, once, Call(lambda: index(logits.detach())), soft=False, yields="loss"),
        Work(INDEX_BOTH, "ours", 3 * size, both,
             Call(lambda: forward_backward(index, logits)), soft=False, yields="both"),
    ]


def _peers(problem: Problem) -> List[Work]:
    """Forward + backward of each; 2 reads + 1 write is all that the work needs, and what their GB/s count."""

    def call(peer) -> Call:
        if peer.overwrites:
            return Call(lambda: forward_backward(peer.loss, problem.overwritten), problem.restore)
        return Call(lambda: forward_backward(peer.loss, problem.logits))

    return [Work(peer.name, "peer", 3 * problem.shape.logits_bytes, (READ, COPY), call(peer), soft=peer.soft,
                 yields="both", note=peer.note) for peer in peers(problem)]
