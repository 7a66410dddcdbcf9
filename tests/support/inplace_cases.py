"""Contains helpers for the tests of ``inplace="forward"``: an example, its gradient without ``inplace``, its scaled
gradient."""

import torch

from cases import Draw
from sparse_ce import cross_entropy


def example(device, dtype=torch.float32, rows=6, vocab=50):
    """Returns a leaf and a target of three classes per row."""
    draw = Draw(device)
    x = draw.normal(rows, vocab).to(dtype).requires_grad_()
    return x, (draw.integers(vocab, rows, 3), draw.uniform(rows, 3))


def number(value, loss):
    return torch.tensor(value, dtype=loss.dtype, device=loss.device)


def plain(logits, target, grad_output=1.0, *args, **options):
    """Returns the loss of these logits and their gradient, computed in backward."""
    leaf = logits.detach().clone().requires_grad_()
    loss = cross_entropy(leaf, target, *args, inplace="backward", **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, number(grad_output, loss))[0]


def scaled(grad, grad_output, loss):
    """Returns ``grad``, computed for a ``grad_output`` of 1, scaled to another ``grad_output``."""
    return (grad.to(loss.dtype) * number(grad_output, loss)).to(grad.dtype)


def overwritten(logits, before):
    return not torch.equal(logits.detach().nan_to_num(nan=77.0), before.detach().nan_to_num(nan=77.0))
