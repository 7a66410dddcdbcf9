"""Log-probabilities of K classes a row and what stands beside them: ``selected_log_probs``, its neighbours, its peers.

The work must read the logits once; for their gradient it reads them once more and writes it. The peers are what people
write in PyTorch: ``log_softmax`` or ``logsumexp`` and ``gather``, and the pair of functions that TRL has for a policy's
log-probabilities and its entropy, row by row and in chunks.
"""

from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import record as records
import sparse_ce
from bench import Call, Spread, extra_bytes, ratio, time_by_turns, total
from check import WrongResult
from goals import Goal
from work import BOTH, COPY, FORWARD, IN_PLACE, READ

LOSS, MORE = "cross_entropy, forward", "with entropy and log_rest"
FORWARD_MORE, BOTH_MORE, TOPK = f"{FORWARD}, {MORE}", f"{BOTH}, {MORE}", "topk_log_probs"
GATHER, LSE, PAIR, PLAIN_TOPK = ("log_softmax + gather", "logsumexp + gather, forward",
                                 "selective log-softmax + entropy, forward", "torch.topk")
ENTROPY_ROWS = 128  # of a chunk


@dataclass(frozen=True)
class SelectShape:
    rows: int
    vocab: int
    ids: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"selected_log_probs, {self.rows} x {self.vocab}, K={self.ids}, {dtype}"


SELECT_SHAPES = {
    "cpu": [SelectShape(256, 128256, 64, torch.float32), SelectShape(256, 128256, 64, torch.bfloat16),
            SelectShape(512, 32000, 64, torch.float32), SelectShape(512, 32000, 64, torch.bfloat16)],
    "cuda": [SelectShape(8192, 151936, 64, torch.bfloat16), SelectShape(8192, 151936, 1, torch.bfloat16)],
}


def pair(logits: Tensor, ids: Tensor) -> Tuple[Tensor, Tensor]:
    """Log-probabilities by a logsumexp for each row, so that the logits are not copied, and the entropy in chunks."""
    lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
    entropy = []
    for chunk in logits.split(ENTROPY_ROWS):
        log_probs = F.log_softmax(chunk, -1)
        entropy.append(-(log_probs.exp() * log_probs).sum(-1))
    return logits.gather(1, ids) - lse[:, None], torch.cat(entropy)


def measure_select(shape: SelectShape, device: torch.device, repeats: int) -> Dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(shape.rows, shape.vocab, generator=generator)).to(device, shape.dtype)
    ids = torch.randint(shape.vocab, (shape.rows, shape.ids), generator=generator).to(device)
    upstream = torch.randn(shape.rows, shape.ids, generator=generator).to(device)
    of_rows = torch.randn(shape.rows, generator=generator).to(device)
    target = sparse_ce.SparseTarget.from_topk(ids, None)
    leaf, copy = logits.clone().requires_grad_(), torch.empty_like(logits)

    def forward(more: bool = False) -> sparse_ce.LogProbs:
        return sparse_ce.selected_log_probs(logits, target, return_entropy=more, return_log_rest=more)

    def both(more: bool = False, **named: Any) -> Tuple[Tensor, ...]:
        out = sparse_ce.selected_log_probs(leaf, target, return_entropy=more, return_log_rest=more, **named)
        outputs = [t for t in (out.log_probs, out.entropy, out.log_rest) if t is not None]
        grads = [upstream, of_rows, of_rows][:len(outputs)]
        return *outputs, *torch.autograd.grad(outputs, leaf, grads)

    def gather() -> Tuple[Tensor, ...]:
        log_probs = F.log_softmax(leaf, -1, dtype=torch.float32).gather(1, ids)
        return log_probs, *torch.autograd.grad(log_probs, leaf, upstream)

    try:
        _check(both(True), logits, ids, upstream, of_rows)
    except AssertionError as error:
        raise WrongResult(f"{shape}: {error}") from error
    size = logits.numel() * logits.element_size()
    words = logits.view(torch.int32)
    table: Dict[str, Tuple[str, int, List[str], Callable[[], Any], Optional[Callable[[], Any]]]] = {
        READ: ("floor", size, [READ], lambda: words.sum(dtype=torch.int32), None),
        COPY: ("floor", 2 * size, [COPY], lambda: copy.copy_(logits), None),
        FORWARD: ("ours", size, [READ], forward, None),
        FORWARD_MORE: ("ours", size, [READ], lambda: forward(True), None),
        BOTH: ("ours", 3 * size, [READ, COPY], both, None),
        BOTH_MORE: ("ours", 3 * size, [READ, COPY], lambda: both(True), None),
        IN_PLACE: ("ours", 3 * size, [READ, COPY], lambda: both(inplace="backward"),
                   lambda: leaf.detach().copy_(logits)),
        TOPK: ("ours", 2 * size, [READ, READ], lambda: sparse_ce.topk_log_probs(logits, shape.ids), None),
        LOSS: ("ours", size, [READ], lambda: sparse_ce.cross_entropy(logits, target, reduction="none"), None),
        GATHER: ("peer", 3 * size, [READ, COPY], gather, None),
        LSE: ("peer", size, [READ], lambda: logits.gather(1, ids) - torch.logsumexp(logits, 1, keepdim=True), None),
        PAIR: ("peer", size, [READ], lambda: pair(logits, ids), None),
        PLAIN_TOPK: ("peer", size, [READ], lambda: logits.topk(shape.ids, 1), None),
    }
    calls = {name: Call(row[3], row[4]) for name, row in table.items()}
    seconds = time_by_turns(calls, device, repeats, 2, small=False)
    mine = {GATHER: BOTH, LSE: FORWARD, PAIR: FORWARD_MORE, PLAIN_TOPK: TOPK}
    rows = [_row(name, *row[:3], seconds, mine.get(name),
                 None if row[0] == "floor" else extra_bytes(calls[name], device)) for name, row in table.items()]
    floor = total(seconds[READ], seconds[COPY])
    found = [
        Goal(f"{FORWARD} / {LOSS}", ratio(seconds[FORWARD], seconds[LOSS]), 1.15, False),
        Goal(f"{FORWARD_MORE} / {LOSS}", ratio(seconds[FORWARD_MORE], seconds[LOSS]), 1.4, False),
        Goal(f"{BOTH} / (read E + copy E)", ratio(seconds[BOTH], floor), 1.3, False),
        Goal(f"{IN_PLACE} / (read E + copy E)", ratio(seconds[IN_PLACE], floor), 0.95, False),
        Goal(f"{PAIR} / ours", ratio(seconds[PAIR], seconds[FORWARD_MORE]), 20.0, True),
        Goal(f"{TOPK} / ({PLAIN_TOPK} + 2.2 reads)",
             ratio(seconds[TOPK], total(seconds[PLAIN_TOPK], [2.2 * t for t in seconds[READ]])), 1.0, False),
    ]
    if shape.dtype == torch.float32:
        found.append(Goal(f"{GATHER} / ours", ratio(seconds[GATHER], seconds[BOTH]), 6.0, True))
    return {"title": str(shape), "logits_bytes": size, "rows": rows,
            "goals": [records.goal_row(goal) for goal in found], "not_run": {}}


def _check(ours: Tuple[Tensor, ...], logits: Tensor, ids: Tensor, upstream: Tensor, of_rows: Tensor) -> None:
    """Of some rows, in float64."""
    some = slice(0, 8)
    z = logits[some].double().requires_grad_()
    log_probs = z.log_softmax(1)
    rest = torch.ones(z.shape, dtype=torch.bool, device=z.device).scatter(1, ids[some], False)
    exact = (log_probs.gather(1, ids[some]), -(log_probs.exp() * log_probs).sum(1),
             torch.where(rest, log_probs, -torch.inf).logsumexp(1))
    grad, = torch.autograd.grad(exact, z, [t[some].double() for t in (upstream, of_rows, of_rows)])
    for found, expected in zip(ours, exact):
        torch.testing.assert_close(found[some].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[-1][some].double(), grad, rtol=2 * torch.finfo(logits.dtype).eps, atol=1e-5)


def _row(name: str, side: str, moves: int, floor: List[str], seconds: Any, mine: Any, extra: Any) -> records.Record:
    return {
        "name": name, "side": side, "target": "", "bytes": moves, "floor": floor,
        "ms": asdict(Spread.of([1e3 * t for t in seconds[name]])),
        "gb_per_s": moves / Spread.of(seconds[name]).median / 1e9,
        "over_floor": asdict(ratio(seconds[name], total(*(seconds[f] for f in floor)))),
        "over_ours": asdict(ratio(seconds[name], seconds[mine])) if mine else None,
        "extra_mib": None if extra is None else extra / 2**20, "gradient_error": None, "note": "",
    }
