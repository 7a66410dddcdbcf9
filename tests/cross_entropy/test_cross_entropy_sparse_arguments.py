"""Tests sparse tensors as targets: invalid ones raise an error, and ``torch.func`` transforms may close over one."""

import os
import subprocess
import sys

import pytest
import torch

from sparse_ce import SparseTarget, collate, cross_entropy, linear_cross_entropy

WRONG = {
    "starts at 1": [1, 2, 3, 4], "starts below 0": [-1, 2, 3, 4], "ends early": [0, 1, 2, 3], "ends late": [0, 2, 3, 5],
    "descends": [0, 3, 2, 4], "leads outside in between": [0, 9, 3, 4],
}


def csr_of(crow, device, dtype=torch.int64):
    return torch.sparse_csr_tensor(torch.tensor(crow, dtype=dtype, device=device),
                                   torch.tensor([0, 1, 2, 3], dtype=dtype, device=device),
                                   torch.ones(4, device=device), (len(crow) - 1, 5), check_invariants=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", WRONG)
def test_the_rows_of_a_csr_tensor_must_be_all_its_entries(wrong, dtype):
    csr, x = csr_of(WRONG[wrong], "cpu", dtype), torch.randn(3, 5)
    for refuses in (lambda: cross_entropy(x, csr), lambda: SparseTarget.from_csr(csr), lambda: collate([csr, csr]),
                    lambda: linear_cross_entropy(x, torch.eye(5), csr),
                    lambda: torch.func.grad(lambda x: cross_entropy(x, csr))(x)):
        with pytest.raises(RuntimeError, match=r"sparse_ce: target must have crow_indices that ascend from 0 to its 4 "
                                             r"entries, got .*; build it with check_invariants=True"):
            refuses()


def test_right_rows_of_a_csr_tensor_pass(device):
    for crow in ([0, 1, 1, 4], [0, 0, 4, 4], [0, 4]):
        assert SparseTarget.from_csr(csr_of(crow, device)).nnz == 4
    nothing = torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
                                      torch.zeros(0), (0, 5)).to(device)
    assert SparseTarget.from_csr(nothing).shape == (0,)


@pytest.mark.parametrize("gpu", range(torch.cuda.device_count())[:1])
def test_on_a_gpu_they_are_looked_at_on_demand(gpu):
    code = """
import torch, sparse_ce
crow, col = torch.tensor([1, 2, 3, 4]).cuda(), torch.arange(4).cuda()
csr = torch.sparse_csr_tensor(crow, col, torch.ones(4).cuda(), (3, 5), check_invariants=False)
sparse_ce.cross_entropy(torch.randn(3, 5).cuda(), csr)
"""
    for validate, refused in (("0", False), ("1", True)):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env={**os.environ, "SPARSE_CE_VALIDATE": validate})
        assert ("sparse_ce: target must have crow_indices" in done.stderr) == refused, done.stderr


@pytest.mark.parametrize("where", ["meta", "device"])
def test_collation_of_targets_with_and_without_values(where, device):
    where = device if where == "device" else where
    offsets = torch.tensor([0, 1, 3], device=where)
    indices, values = torch.tensor([1, 2, 3], device=where), torch.tensor([0.5, 0.25, 1.0], device=where)
    without, with_values = (SparseTarget.from_jagged(indices, v, offsets, num_classes=5) for v in (None, values))
    topk = SparseTarget.from_topk(indices[:2, None], values[:2, None].half(), num_classes=5)
    for samples in ([without, with_values], [with_values, without], [without, topk], [topk, without],
                    [without, without], [without[:1], with_values]):
        batch = collate(samples)
        assert batch.device.type == where and batch.shape == (2, 2)
        assert (batch.values is None) == (samples[0] is samples[1])
        if where != "meta":
            for found, sample in zip(batch, samples):
                torch.testing.assert_close(found[:len(sample)].to_dense(), sample.to_dense(), check_dtype=False)


# -------------------------------------------------------------------------------------------------------- torch.func

CALLS = {
    "cross_entropy": lambda x, t: cross_entropy(x, t, label_smoothing=0.1),
    "rows": lambda x, t: cross_entropy(x, t, reduction="none").square().sum(),
    "linear": lambda x, t: linear_cross_entropy(x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), t),
    "constructor": lambda x, t: cross_entropy(x, SparseTarget.from_coo(t) if t.layout == torch.sparse_coo
                                              else SparseTarget.from_csr(t)),
}
TRANSFORMS = {
    "grad": lambda f, x, t: torch.func.grad(lambda x: f(x, t))(x),
    "jvp": lambda f, x, t: torch.func.jvp(lambda x: f(x, t), (x,), (x.cos(),)),
    "vjp": lambda f, x, t: torch.func.vjp(lambda x: f(x, t), x)[1](torch.ones((), dtype=x.dtype, device=x.device)),
    "vmap": lambda f, x, t: torch.func.vmap(lambda x: f(x, t))(torch.stack([x, x.sin()])),
    "vmap of grad": lambda f, x, t: torch.func.vmap(torch.func.grad(lambda x: f(x, t)))(torch.stack([x, x.sin()])),
    "jacrev": lambda f, x, t: torch.func.jacrev(lambda x: f(x, t))(x),
    "hessian": lambda f, x, t: torch.func.hessian(lambda x: f(x, t))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("layout", ["csr", "coo"])
@pytest.mark.parametrize("call", CALLS)
def test_transforms_close_over_sparse_tensors(call, layout, transform, device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    dense = torch.tensor([[0.5, 0, 0, 0.5, 0], [0, 0, 0, 0, 0], [0, 2.0, 0, 0, -1]], dtype=torch.float64, device=device)
    raw = dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()
    target = SparseTarget.from_csr(raw) if layout == "csr" else SparseTarget.from_coo(raw)
    same = CALLS["cross_entropy"] if call == "cross_entropy" else CALLS["rows"] if call == "rows" else cross_entropy
    found = TRANSFORMS[transform](CALLS[call], x, raw)
    torch.testing.assert_close(found, TRANSFORMS[transform](same, x, target))


def test_outer_gradients_of_the_values_survive(device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    for layout in ("csr", "coo"):
        dense = torch.eye(3, 5, dtype=torch.float64, device=device).mul(2).requires_grad_()
        raw = dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()
        torch.func.grad(lambda x: cross_entropy(x, raw, reduction="sum"))(x).sin().sum().backward()
        found, dense.grad = dense.grad, None
        again = x.clone().requires_grad_()
        grad, = torch.autograd.grad(cross_entropy(again, dense.to_sparse(), reduction="sum"), again, create_graph=True)
        grad.sin().sum().backward()
        assert found.any()
        torch.testing.assert_close(found, dense.grad)
