"""Measures a head's logits at K ids per row: ``candidate_logits``, and ``einsum`` over a copy of the ids' rows.

The work must read those rows once in forward, and once more for the gradient of the hidden states. If the head is
trained, it must also fill a gradient of the head's size. The floor is the time that ``sum`` takes for as many
contiguous bytes.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, extra_bytes, time_by_turns
from harness.check import WrongResult
from harness.work import BOTH, FORWARD, kept

READ, FILL = "read of as many bytes", "zeros of the head"
TRAINED, SPARSE = f"{BOTH}, head trained", f"{BOTH}, head trained, sparse gradient"
PEER = "einsum over W[ids]"
PEER_FORWARD, PEER_TRAINED = f"{PEER}, forward", f"{PEER}, head trained"


@dataclass(frozen=True)
class CandidateShape:
    rows: int
    width: int
    vocab: int
    ids: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"candidate_logits, {self.rows} x {self.width} x {self.vocab}, K={self.ids}, {dtype}"


CANDIDATE_SHAPES = {
    "cpu": [CandidateShape(256, 1024, 128256, 64, torch.float32), CandidateShape(256, 1024, 128256, 64, torch.bfloat16),
            CandidateShape(256, 1024, 32000, 64, torch.float32)],
    "cuda": [CandidateShape(8192, 4096, 128256, 64, torch.bfloat16),
             CandidateShape(8192, 4096, 32000, 8, torch.bfloat16)],
}


def measure_candidates(shape: CandidateShape, device: torch.device, repeats: int,
                       with_peers: bool = True) -> Dict[str, Any]:
    generator = torch.Generator(device).manual_seed(1)  # half a billion weights take a CPU too long for a GPU

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    x, w = normal(shape.rows, shape.width).requires_grad_(), normal(shape.vocab, shape.width) / shape.width ** 0.5
    trained = w.detach().clone().requires_grad_()
    ids = torch.randint(shape.vocab, (shape.rows, shape.ids), generator=generator, device=device)
    grad_output = torch.randn(shape.rows, shape.ids, generator=generator, device=device)
    many = torch.empty(shape.rows * shape.ids, shape.width, dtype=shape.dtype, device=device).normal_()

    def ours(x: Tensor, w: Tensor, sparse_grad: bool = False) -> Tensor:
        return sparse_ce.candidate_logits(x, w, ids, sparse_grad=sparse_grad)

    def peer(x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("nd,nkd->nk", x, w[ids])

    def both(f: Callable[..., Tensor], w: Tensor, **named: Any) -> Callable[[], Tuple[Tensor, ...]]:
        leaves = [x, w] if w.requires_grad else [x]

        def call() -> Tuple[Tensor, ...]:
            z = f(x, w, **named)
            return z, *torch.autograd.grad(z, leaves, grad_output.to(z.dtype))
        return call

    try:
        _check(both(ours, trained)(), both(ours, trained, sparse_grad=True)(), x, trained, ids, grad_output)
    except AssertionError as error:
        raise WrongResult(f"{shape}: {error}") from error
    size, head = many.numel() * many.element_size(), w.numel() * w.element_size()
    words, filled = many.view(torch.int32), torch.zeros_like(w)
    table: Dict[str, Tuple[str, int, List[str], Callable[[], Any]]] = {  # side, bytes, floors, call
        READ: ("floor", size, [READ], lambda: words.sum(dtype=torch.int32)),
        FILL: ("floor", head, [FILL], lambda: filled.zero_()),
        FORWARD: ("ours", size, [READ], lambda: ours(x.detach(), w)),
        BOTH: ("ours", 2 * size, [READ, READ], both(ours, w)),
        TRAINED: ("ours", 2 * size + head, [READ, READ, FILL], both(ours, trained)),
        SPARSE: ("ours", 3 * size, [READ, READ, READ], both(ours, trained, sparse_grad=True)),
        PEER_FORWARD: ("peer", size, [READ], lambda: peer(x.detach(), w)),
        PEER: ("peer", 2 * size, [READ, READ], both(peer, w)),
        PEER_TRAINED: ("peer", 2 * size + head, [READ, READ, FILL], both(peer, trained)),
    }
    table = kept(table, with_peers)
    calls = {name: Call(row[3]) for name, row in table.items()}
    seconds = time_by_turns(calls, device, repeats, 2, small=False)
    mine = {PEER_FORWARD: FORWARD, PEER: BOTH, PEER_TRAINED: TRAINED}
    rows = []
    for name, (side, moves, floor, *_) in table.items():
        extra = None if side == "floor" else extra_bytes(calls[name], device)
        rows.append(records.timed_row(name, side, {"bytes": moves}, floor, seconds, mine.get(name), extra))
    return {"title": str(shape), "logits_bytes": size, "rows": rows, "not_run": {}}


def _check(dense: Tuple[Tensor, ...], sparse: Tuple[Tensor, ...], x: Tensor, w: Tensor, ids: Tensor,
           grad_output: Tensor) -> None:
    """Checks the logits of some rows, and both gradients. The head's gradient is checked at the ids of these rows."""
    some = slice(0, 16)
    of_ids = w.detach().double()[ids[some]]
    exact = torch.einsum("nd,nkd->nk", x.detach().double()[some], of_ids)
    torch.testing.assert_close(dense[0][some].double(), exact, rtol=1e-4, atol=1e-4)
    tolerance = dict(rtol=8 * torch.finfo(w.dtype).eps, atol=1e-3)
    exact_grad = torch.einsum("nk,nkd->nd", grad_output.double()[some], of_ids)
    torch.testing.assert_close(dense[1][some].double(), exact_grad, **tolerance)
    for id in ids[some, 0].tolist():
        row, k = (ids == id).nonzero(as_tuple=True)
        expected = grad_output[row, k].double() @ x.detach().double()[row]
        torch.testing.assert_close(dense[2][id].double(), expected, **tolerance)
    assert torch.equal(sparse[2].to_dense(), dense[2]), "the sparse gradient must be the dense one"
