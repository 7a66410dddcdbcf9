"""Contains problems for PyTorch's cross entropy with a sparse target, and the comparison with the dense result."""

import torch
import torch.nn.functional as F

from close import assert_close_to_float64


def problem(shape, draw, dtype=torch.float32, target_dtype=torch.float32):
    """Returns peaked logits and the dense probabilities of a sparse target; one row has none, some are negative."""
    dim = min(1, len(shape) - 1)
    last = [n for d, n in enumerate(shape) if d != dim] + [shape[dim]]
    dense = draw.uniform(*last, low=-0.4, high=1.6) * (draw.uniform(*last) < 0.4)
    if len(shape) > 1:
        dense.view(-1, shape[dim])[2] = 0
    dense = dense.to(target_dtype)
    return draw.logits(dense.double(), dtype).movedim(-1, dim).contiguous(), dense.movedim(-1, dim).contiguous()


def sparse(dense, layout):
    if layout == "csr":
        return dense.to_sparse_csr()
    if layout == "csc":
        return dense.to_sparse_csc()
    coo = dense.to_sparse()
    if layout == "coo-uncoalesced":  # each entry is split into two halves, out of order
        order = torch.randperm(2 * coo._nnz()).to(dense.device)
        coo = torch.sparse_coo_tensor(coo.indices().repeat(1, 2)[:, order], (coo.values() / 2).repeat(2)[order],
                                      coo.shape)
    return coo


def loss_and_grad(logits, target, grad_output, **options):
    logits = logits.clone().requires_grad_()
    loss = F.cross_entropy(logits, target, **options)
    assert loss.layout == torch.strided
    if grad_output is None:
        grad_output = torch.randn(loss.shape, dtype=torch.float64).to(loss.device)
    loss.backward(grad_output.to(loss.dtype))
    assert logits.grad.layout == torch.strided
    return loss, logits.grad, grad_output


def subtracted(dense, weight, grad_output, reduction="mean", label_smoothing=0.0):
    """Returns the size (..., 1) of the subtracted terms in a row of the gradient a q - b o - d w, whose last bits are
    lost."""
    n = dense.movedim(min(1, dense.dim() - 1), -1).double()
    o = torch.ones_like(n) if weight is None else weight.double()
    mass = (((1 - label_smoothing) * n.abs() + label_smoothing / n.shape[-1]) * o).sum(-1, keepdim=True)
    if reduction == "none":
        return mass * grad_output.abs()[..., None]
    return mass * grad_output.abs() / (mass.numel() if reduction == "mean" else 1)


def assert_equals_dense(logits, target, dense, weight=None, **options):
    def cast(dtype):
        return None if weight is None else weight.to(dtype)

    loss, grad, grad_output = loss_and_grad(logits, target, None, weight=weight, **options)
    peer = loss_and_grad(logits, dense, grad_output, weight=weight, **options)
    exact = loss_and_grad(logits.double(), dense.double(), grad_output, weight=cast(torch.float64), **options)
    assert_close_to_float64(loss, peer[0], exact[0], arithmetic=logits.dtype)
    dim = min(1, dense.dim() - 1)
    assert_close_to_float64(*(g.movedim(dim, -1) for g in (grad, peer[1], exact[1])),
                            subtracted(dense, weight, grad_output, **options))
