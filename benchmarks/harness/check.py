"""Checks loss and gradient against float64 before they are timed.

The tolerance is derived, not tuned. The error of sparse_ce may be twice that of PyTorch's log-softmax with the same
dtype and inputs, plus four units in the last place. A tolerance that zeros would satisfy is an error. For peers the
tolerance is a tenth of the scale, which shows that they solve the same problem; their error is reported.
"""

from dataclasses import dataclass
from typing import Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from harness.peers import Problem, gather_route

_CHUNK_ELEMENTS = 1 << 25  # float64 intermediates of 256 MiB
_TENTH = 0.1  # of the scale; zeros have an error of the whole scale


class WrongResult(Exception):
    """Reports a loss or a gradient that does not agree with float64."""


@dataclass(frozen=True)
class Exact:
    """Holds loss and gradient in float64, and the errors of PyTorch in the same dtype."""

    loss: float
    loss_error: float  # of the loss in float32, the dtype of sparse_ce's loss
    grad: Tensor  # (rows, vocab) float64
    grad_error: float
    grad_scale: float


def exact(problem: Problem, soft: bool) -> Exact:
    """Computes the formula in float64, one chunk of rows at a time: grad = (softmax(x) * sum(w) - w) / rows."""
    rows = problem.shape.rows
    grad = torch.empty(problem.shape.rows, problem.shape.vocab, dtype=torch.float64, device=problem.device)
    loss = peer_loss = 0.0
    grad_errors = []
    for chunk in _chunks(problem):
        indices, values = _target(problem, soft, chunk)
        x = problem.logits.detach()[chunk].double()
        log_probs, w = torch.log_softmax(x, 1), values.double()
        loss -= (log_probs.gather(1, indices) * w).sum().item() / rows
        grad[chunk] = log_probs.exp_().mul_(w.sum(1, keepdim=True)).scatter_add_(1, indices, -w).div_(rows)
        share = x.shape[0] / rows
        stored = problem.logits.detach()[chunk].requires_grad_()
        (peer_grad,) = torch.autograd.grad(gather_route(stored, indices, values) * share, stored)
        grad_errors.append(_distance(peer_grad, grad[chunk]))
        peer_loss += gather_route(stored.detach().float(), indices, values).item() * share
    return Exact(loss, abs(peer_loss - loss), grad, _largest(grad_errors), grad.abs().max().item())


def check(name: str, loss: Optional[Tensor], grad: Optional[Tensor], truth: Exact, strict: bool) -> Optional[float]:
    """Raises an error unless loss and gradient are correct; returns the gradient's largest error, relative to its
    scale."""
    # Negated comparisons, so that NaN fails.
    if loss is not None:
        allowed = _TENTH * abs(truth.loss)
        if strict:
            allowed = 2 * truth.loss_error + 4 * torch.finfo(loss.dtype).eps * abs(truth.loss)
        error = abs(loss.double().item() - truth.loss)
        if not error <= allowed:
            raise WrongResult(f"{name}: loss is off by {error:.2e}, allowed {allowed:.2e}")
    if grad is None:
        return None
    allowed = 2 * truth.grad_error + 4 * torch.finfo(grad.dtype).eps * truth.grad_scale
    if not allowed < _TENTH * truth.grad_scale:
        raise WrongResult(f"{name}: a tolerance of {allowed:.2e} is vacuous, zeros would pass")
    if not strict:
        allowed = _TENTH * truth.grad_scale
    rows = _rows_of_chunk(grad.shape[1])
    error = _largest([_distance(a, b) for a, b in zip(grad.split(rows), truth.grad.split(rows))])
    if not (grad.shape == truth.grad.shape and error <= allowed):
        raise WrongResult(f"{name}: gradient {list(grad.shape)} is off by {error:.2e}, allowed {allowed:.2e}")
    return error / truth.grad_scale


def _rows_of_chunk(vocab: int) -> int:
    return max(1, _CHUNK_ELEMENTS // vocab)


def _chunks(problem: Problem) -> Iterator[slice]:
    step = _rows_of_chunk(problem.shape.vocab)
    return (slice(begin, begin + step) for begin in range(0, problem.shape.rows, step))


def _target(problem: Problem, soft: bool, chunk: slice) -> Tuple[Tensor, Tensor]:
    if soft:
        return problem.indices[chunk], problem.values[chunk]
    labels = problem.labels[chunk, None]
    return labels, torch.ones_like(labels, dtype=torch.float32)


def _distance(a: Tensor, truth: Tensor) -> float:
    return (a.double() - truth).abs().max().item()


def _largest(errors: List[float]) -> float:
    return torch.tensor(errors, dtype=torch.float64).max().item()  # Python's max() may drop a NaN
