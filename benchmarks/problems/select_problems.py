"""Measures log-probabilities of K classes per row: ``selected_log_probs``, related functions, and peers.

The work must read the logits once. For their gradient it reads them once more and writes the gradient. The peers are
common PyTorch code: ``log_softmax`` or ``logsumexp`` with ``gather``, and TRL's pair of functions for a policy's
log-probabilities (row by row) and entropy (in chunks).
"""

import functools
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, extra_bytes, time_by_turns
from harness.check import WrongResult
from harness.peers import compiled_when_called
from harness.work import BOTH, COPY, FORWARD, IN_PLACE, READ, kept

LOSS, MORE = "cross_entropy, forward", "with entropy and log_tail"
FORWARD_MORE, BOTH_MORE, TOPK = f"{FORWARD}, {MORE}", f"{BOTH}, {MORE}", "topk_log_probs"
GATHER, LSE, PAIR, PLAIN_TOPK = ("log_softmax + gather", "logsumexp + gather, forward",
                                 "selective log-softmax + entropy, forward", "torch.topk")
COMPILED_GATHER, COMPILED_MORE = f"torch.compile of {GATHER}", "torch.compile of log_softmax, gather + entropy, forward"
ENTROPY_ROWS = 128  # rows per chunk
OUTPUTS = ("log_tail", "entropy", "mean_logit", "argmax", "collision", "rank")


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
    """Computes log-probabilities with one logsumexp per row, which avoids a copy of the logits, and the entropy in
    chunks."""
    lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
    entropy = []
    for chunk in logits.split(ENTROPY_ROWS):
        log_probs = F.log_softmax(chunk, -1)
        entropy.append(-(log_probs.exp() * log_probs).sum(-1))
    return logits.gather(1, ids) - lse[:, None], torch.cat(entropy)


def _gathered(logits: Tensor, ids: Tensor) -> Tensor:
    return F.log_softmax(logits, -1, dtype=torch.float32).gather(1, ids)


def _gathered_and_entropy(logits: Tensor, ids: Tensor) -> Tuple[Tensor, Tensor]:
    log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    return log_probs.gather(1, ids), -(log_probs.exp() * log_probs).sum(-1)


def measure_select(shape: SelectShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.Generator(device).manual_seed(2)  # a billion numbers take a CPU too long for a GPU
    logits = torch.randn(shape.rows, shape.vocab, generator=noise, device=device).mul_(3).to(shape.dtype)
    ids = torch.randint(shape.vocab, (shape.rows, shape.ids), generator=generator).to(device)
    grad_output = torch.randn(shape.rows, shape.ids, generator=generator).to(device)
    of_rows = torch.randn(shape.rows, generator=generator).to(device)
    target = sparse_ce.SparseTarget.from_topk(ids, None)
    leaf, copy = logits.clone().requires_grad_(), torch.empty_like(logits)

    def forward(*outputs: str) -> sparse_ce.LogProbs:
        return sparse_ce.selected_log_probs(logits, target, **{f"return_{name}": True for name in outputs})

    def both(more: bool = False, **named: Any) -> Tuple[Tensor, ...]:
        out = sparse_ce.selected_log_probs(leaf, target, return_entropy=more, return_log_tail=more, **named)
        outputs = [out.log_probs, *((out.entropy, out.log_tail) if more else ())]
        grads = [grad_output, of_rows, of_rows][:len(outputs)]
        return *outputs, *torch.autograd.grad(outputs, leaf, grads)

    def gather(log_probs_of: Callable[..., Tensor] = _gathered) -> Tuple[Tensor, ...]:
        log_probs = log_probs_of(leaf, ids)
        return log_probs, *torch.autograd.grad(log_probs, leaf, grad_output)

    compiled, compiled_more = compiled_when_called(_gathered), compiled_when_called(_gathered_and_entropy)
    peers, not_run = {
        COMPILED_GATHER: ("peer", 3 * logits.nbytes, [READ, COPY], lambda: gather(compiled), None),
        COMPILED_MORE: ("peer", logits.nbytes, [READ], lambda: compiled_more(logits, ids), None),
    }, {}
    for name in kept(peers, with_peers):
        try:
            peers[name][3]()
        except Exception as failure:  # the compiler may fail on this machine
            not_run[name] = str(failure).strip().split("\n")[0] or type(failure).__name__
            del peers[name]

    try:
        _check(both(True), logits, ids, grad_output, of_rows)
        _check_outputs(forward(*OUTPUTS), logits, ids)
    except AssertionError as error:
        raise WrongResult(f"{shape}: {error}") from error
    size = logits.numel() * logits.element_size()
    words = logits.view(torch.int32)
    table: Dict[str, Tuple[str, int, List[str], Callable[[], Any], Optional[Callable[[], Any]]]] = {
        READ: ("floor", size, [READ], lambda: words.sum(dtype=torch.int32), None),
        COPY: ("floor", 2 * size, [COPY], lambda: copy.copy_(logits), None),
        FORWARD: ("ours", size, [READ], forward, None),
        FORWARD_MORE: ("ours", size, [READ], lambda: forward("entropy", "log_tail"), None),
        **{_with(name): ("ours", size, [READ], functools.partial(forward, name), None) for name in OUTPUTS},
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
        **peers,
    }
    table = kept(table, with_peers)
    calls = {name: Call(row[3], row[4]) for name, row in table.items()}
    seconds = time_by_turns(calls, device, repeats, 2, small=False)
    mine = {GATHER: BOTH, COMPILED_GATHER: BOTH, LSE: FORWARD, PAIR: FORWARD_MORE, COMPILED_MORE: FORWARD_MORE,
            PLAIN_TOPK: TOPK}
    rows = []
    for name, (side, moves, floor, *_) in table.items():
        extra = None if side == "floor" else extra_bytes(calls[name], device)
        rows.append(records.timed_row(name, side, {"bytes": moves}, floor, seconds, mine.get(name), extra))
    return {"title": str(shape), "logits_bytes": size, "rows": rows, "not_run": not_run}


def _with(output: str) -> str:
    return f"{FORWARD}, with {output}"


def _check(ours: Tuple[Tensor, ...], logits: Tensor, ids: Tensor, grad_output: Tensor, of_rows: Tensor) -> None:
    """Checks some rows in float64."""
    some = slice(0, 8)
    z = logits[some].double().requires_grad_()
    log_probs = z.log_softmax(1)
    rest = torch.ones(z.shape, dtype=torch.bool, device=z.device).scatter(1, ids[some], False)
    exact = (log_probs.gather(1, ids[some]), -(log_probs.exp() * log_probs).sum(1),
             torch.where(rest, log_probs, -torch.inf).logsumexp(1))
    grad, = torch.autograd.grad(exact, z, [t[some].double() for t in (grad_output, of_rows, of_rows)])
    for found, expected in zip(ours, exact):
        torch.testing.assert_close(found[some].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[-1][some].double(), grad, rtol=2 * torch.finfo(logits.dtype).eps, atol=1e-5)


def _check_outputs(ours: sparse_ce.LogProbs, logits: Tensor, ids: Tensor) -> None:
    """Checks some rows in float64."""
    some = slice(0, 8)
    z = logits[some].double()
    exact = {"mean_logit": z.mean(1), "argmax": z.argmax(1), "collision": (2 * z.log_softmax(1)).logsumexp(1),
             "rank": (z > z.gather(1, ids[some, :1])).sum(1)}
    for name, expected in exact.items():
        torch.testing.assert_close(getattr(ours, name)[some].to(expected.dtype), expected, rtol=1e-5, atol=1e-5)
