"""Measures log-probabilities and row losses of a linear head, against the bare GEMMs and common PyTorch code.

The floor is the arithmetic:

- one GEMM in forward,
- three GEMMs if gradients are computed together with the logits, as in ``linear_row_loss``,
- four GEMMs if backward recomputes the logits, as any loss that couples rows requires.

All compute the same gradients, those of the mean over rows of -sum(weight * log-probability). Extra memory is defined
as in linear_problems.
"""

from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sparse_ce
from harness import record as records
from harness.bench import Call, time_by_turns
from harness.check import WrongResult
from harness.peers import compiled_when_called, gather_route
from problems.linear_problems import (
    GEMMS,
    TENTH,
    Gradients,
    LinearProblem,
    LinearShape,
    error_of,
    floors,
    held_by,
    reason_of,
)

GEMM = "GEMM of the logits"
FORWARD, BOTH = "linear_selected_log_probs, forward", "linear_selected_log_probs, forward + backward"
FROZEN = f"{BOTH}, frozen head"
ROW_LOSS, LOSS = "linear_row_loss, forward + backward", "linear_cross_entropy, forward + backward"
TOPK = "linear_topk_log_probs"
GATHER_FORWARD, GATHER = "F.linear + log_softmax + gather, forward", "F.linear + log_softmax + gather"
COMPILED, LOOP = f"torch.compile of {GATHER}", f"{GATHER}, checkpointed chunks of 128 rows"
ROUNDS = 9  # a call takes up to two seconds

LINEAR_SELECT_SHAPES = {
    "cpu": [
        LinearShape(512, 512, 32000, 64, torch.float32),
        LinearShape(256, 1024, 128256, 64, torch.float32),
        LinearShape(8192, 128, 128256, 64, torch.float32, memory_alone=True),
    ],
    "cuda": [
        LinearShape(8192, 4096, 128256, 64, torch.bfloat16),
        LinearShape(4096, 2048, 32000, 64, torch.float32),
    ],
}


def measure_linear_select(shape: LinearShape, device: torch.device, repeats: int,
                          with_peers: bool = True) -> Dict[str, Any]:
    problem = LinearProblem(shape, device)
    forward, ours, peers = _forward(problem), _ours(problem), _peers(problem)
    if shape.memory_alone:
        return _measure_memory(problem, {name: ours[name] for name in (BOTH, ROW_LOSS)})
    if not with_peers:
        peers = {GATHER: peers[GATHER]}  # the checks of sparse_ce need it
    try:
        errors, not_run = _check_all(problem, ours, peers)
    except AssertionError as error:
        raise WrongResult(f"{shape}: {error}") from error
    bare = {GEMM: lambda: torch.mm(problem.input.detach(), problem.weight.detach().T), GEMMS: floors(problem)[GEMMS]}
    mine = {GATHER_FORWARD: FORWARD, GATHER: BOTH, COMPILED: BOTH, LOOP: BOTH}
    calls = {name: call for name, call in {**bare, **forward, **ours, **peers}.items()
             if name not in not_run and (with_peers or name not in mine)}
    seconds = time_by_turns({name: Call(run) for name, run in calls.items()}, device, min(repeats, ROUNDS), 2, False)
    held = {name: None if name in bare else held_by(problem, run) for name, run in calls.items()}
    product = shape.operations // 3
    products = {GEMM: 1, FORWARD: 1, TOPK: 1, GATHER_FORWARD: 1, FROZEN: 3, BOTH: 4, LOOP: 4}
    floor_of = {1: [GEMM], 3: [GEMMS], 4: [GEMMS, GEMM]}
    rows = []
    for name in calls:
        count = products.get(name, 3)
        side = "floor" if name in bare else "peer" if name in mine else "ours"
        rows.append(records.timed_row(name, side, {"operations": count * product}, floor_of[count], seconds,
                                      mine.get(name), held[name], errors.get(name)))
    return {"title": _title(shape), "logits_bytes": shape.logits_bytes, "rows": rows, "not_run": not_run}


def _title(shape: LinearShape) -> str:
    return str(shape).replace("linear head", "log-probabilities of a linear head")


def _measure_memory(problem: LinearProblem, ours: Dict[str, Callable[[], Gradients]]) -> Dict[str, Any]:
    """Runs each call once, to measure only its memory."""
    held: Dict[str, Optional[int]] = {}
    calls = {name: Call(lambda name=name, run=run: held.update({name: held_by(problem, run)}))
             for name, run in ours.items()}
    seconds = time_by_turns(calls, problem.device, 1, 0, False)
    rows = [records.timed_row(name, "ours", {"operations": problem.shape.operations}, [name], seconds,
                              extra=held[name]) for name in ours]
    return {"title": _title(problem.shape), "logits_bytes": problem.shape.logits_bytes, "rows": rows, "not_run": {},
            "untimed": True}


def _row_loss(log_probs: sparse_ce.LogProbs, ids: Any, values: Tensor) -> Tensor:
    return -(values * log_probs.log_probs).sum(-1)


def _forward(problem: LinearProblem) -> Dict[str, Callable[[], Any]]:
    x, w, ids = problem.input.detach(), problem.weight.detach(), problem.indices
    return {
        FORWARD: lambda: sparse_ce.linear_selected_log_probs(x, w, ids),
        TOPK: lambda: sparse_ce.linear_topk_log_probs(x, w, ids.shape[1]),
        GATHER_FORWARD: lambda: F.log_softmax(F.linear(x, w), -1, dtype=torch.float32).gather(1, ids),
    }


def _ours(problem: LinearProblem) -> Dict[str, Callable[[], Gradients]]:
    ids, values = problem.indices, problem.values

    def selected(x: Tensor, w: Tensor) -> Tensor:
        return _row_loss(sparse_ce.linear_selected_log_probs(x, w, ids), ids, values).mean()

    def frozen() -> Gradients:
        return torch.autograd.grad(selected(problem.input, problem.weight.detach()), problem.input)

    return {
        BOTH: lambda: problem.gradients(selected),
        FROZEN: frozen,
        ROW_LOSS: lambda: problem.gradients(lambda x, w: sparse_ce.linear_row_loss(_row_loss, x, w, ids, values)),
        LOSS: lambda: problem.gradients(lambda x, w: sparse_ce.linear_cross_entropy(x, w, (ids, values))),
    }


def _peers(problem: LinearProblem) -> Dict[str, Callable[[], Gradients]]:
    ids, values = problem.indices, problem.values

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return gather_route(F.linear(x, w), ids, values)

    def of_chunk(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        return F.log_softmax(F.linear(x, w), -1, dtype=torch.float32).gather(1, ids)

    def loop(x: Tensor, w: Tensor) -> Tensor:
        parts = [checkpoint(of_chunk, *part, use_reentrant=False)
                 for part in zip(x.split(128), [w] * len(x), ids.split(128))]
        return -(values * torch.cat(parts)).sum(1).mean()

    compiled = compiled_when_called(plain)
    return {name: lambda loss=loss: problem.gradients(loss)
            for name, loss in ((GATHER, plain), (COMPILED, lambda x, w: compiled(x, w)), (LOOP, loop))}


def _check_all(problem: LinearProblem, ours: Dict[str, Callable[[], Gradients]],
               peers: Dict[str, Callable[[], Gradients]]) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Checks gradients as linear_problems does: the error may be twice that of PyTorch in the same dtype. Also checks
    the top classes."""
    errors: Dict[str, float] = {}
    not_run: Dict[str, str] = {}
    truth = problem.exact(soft=True)
    allowed = 2 * error_of(peers[GATHER](), truth) + 4 * torch.finfo(problem.shape.dtype).eps
    for name, call in {**ours, **peers}.items():
        try:
            errors[name] = error_of(call(), truth)  # with a frozen head only the first gradient
        except Exception as failure:  # a failure of a peer must not end the run
            if name in ours:
                raise
            not_run[name] = reason_of(failure)
            continue
        assert errors[name] <= (allowed if name in ours else TENTH), (
            f"{name}: gradients are off by {errors[name]:.2e} of their scale, allowed {allowed:.2e}")
    some = problem.input.detach()[:8]
    best = sparse_ce.linear_topk_log_probs(some, problem.weight.detach(), problem.indices.shape[1])
    exact = F.linear(some.double(), problem.weight.detach().double()).log_softmax(1)
    tolerance = 1e-4 + 64 * torch.finfo(problem.shape.dtype).eps
    torch.testing.assert_close(best.values.double(), exact.topk(best.values.shape[1]).values, rtol=0, atol=tolerance)
    return errors, not_run
