"""Tests PyTorch's own samples of cross entropy, with sparse targets, against ``F.cross_entropy`` and its reference."""

import pytest
import torch
import torch.nn.functional as F

from cases import Draw
from sparse_ce import SparseCrossEntropyLoss, SparseTarget, cross_entropy, linear_cross_entropy

pytest.importorskip("expecttest")  # torch's samples import it
from torch.testing._internal import common_nn  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402


def op_samples(device, dtype):
    """Yields (logits, target, keywords) of F.cross_entropy."""
    op, = (op for op in op_db if op.name == "nn.functional.cross_entropy")
    for sample in op.sample_inputs(device, dtype, requires_grad=False):
        yield sample.input, sample.args[0], sample.kwargs


def module_samples(device, dtype):
    """Yields (logits, target, constructor keywords) of nn.CrossEntropyLoss."""
    info, = (info for info in module_db if info.module_cls is torch.nn.CrossEntropyLoss)
    for sample in info.module_inputs_func(info, device, dtype, False, training=True):
        assert not sample.constructor_input.args
        yield *sample.forward_input.args, sample.constructor_input.kwargs


def classes_last(t):
    """Returns ``t`` with the classes last. PyTorch has them in dimension 1 of a batch."""
    return t.movedim(1, -1) if t.dim() > 1 else t


def sparse_forms(logits, target, keywords):
    """Yields the name and target of each sparse format whose mean has F.cross_entropy's divisor."""
    if target.shape != logits.shape:
        yield "labels", target
        yield "int32", target.int()
        yield "SparseTarget", SparseTarget.from_index(target)
        yield "own ignore_index", SparseTarget.from_index(target, keywords.get("ignore_index", -100))
        if not (keywords.get("weight") is not None and keywords.get("reduction", "mean") == "mean"):
            yield "top-1", (target[..., None], torch.ones_like(target[..., None], dtype=logits.dtype))
        return
    dense = classes_last(target)
    top = dense.topk(dense.shape[-1], dim=-1)
    yield "top-k", (top.indices, top.values)
    yield "COO", dense.to_sparse()
    yield "COO target", SparseTarget.from_coo(dense.to_sparse())
    csr = dense.reshape(-1, dense.shape[-1]).to_sparse_csr()
    if dense.dim() == 2:
        yield "CSR", csr
        yield "CSR int32", torch.sparse_csr_tensor(
            csr.crow_indices().int(), csr.col_indices().int(), csr.values(), csr.shape)
    crow = csr.crow_indices()
    if dense.dim() > 1:
        yield "ranges", SparseTarget.from_jagged(csr.col_indices(), csr.values(), torch.stack(
            [crow[:-1], crow[1:]], 1).reshape(*dense.shape[:-1], 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("samples,at_least", [(op_samples, 60), (module_samples, 350)], ids=["op_db", "module_db"])
def test_pytorchs_samples(samples, at_least, dtype, device):
    compared, targets = 0, set()
    for logits, target, keywords in samples(device, dtype):
        targets.add(target.dtype)
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        expected = F.cross_entropy(theirs, target, **keywords)
        oracle = expected.detach()
        if logits.dim() > 1:  # PyTorch's plain reference supports batches only
            oracle = common_nn.cross_entropy_loss_reference(logits, target, **keywords)
            torch.testing.assert_close(expected, oracle)
        grad_output = Draw(device, compared).normal(*expected.shape, dtype=dtype)
        expected_grad, = torch.autograd.grad(expected, theirs, grad_output)
        for _, form in sparse_forms(logits, target, keywords):
            loss = cross_entropy(classes_last(ours), form, **keywords)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(torch.autograd.grad(loss, ours, grad_output)[0], expected_grad)
            module = SparseCrossEntropyLoss(**keywords)
            torch.testing.assert_close(module(classes_last(ours), form), oracle)
            compared += 1
    assert compared >= at_least and targets == {torch.int64, dtype}, "PyTorch's samples were not found"


def test_pytorchs_samples_with_ignored_labels_and_smoothing(device):
    """Checks what PyTorch's samples leave out: ignored rows together with weights and smoothing."""
    draw = Draw(device)
    for shape in ((6, 5), (2, 5, 4), (2, 5, 3, 2)):
        logits = draw.normal(*shape, dtype=torch.float64)
        labels = draw.integers(5, shape[0], *shape[2:])
        labels.view(-1)[::3] = 2
        weight = draw.uniform(5, dtype=torch.float64)
        for reduction in ("none", "sum", "mean"):
            for options in (dict(weight=weight), dict(label_smoothing=0.3), dict(weight=weight, label_smoothing=0.3)):
                keywords = dict(options, reduction=reduction, ignore_index=2)
                expected = common_nn.cross_entropy_loss_reference(logits, labels, **keywords)
                for _, form in sparse_forms(logits, labels, keywords):
                    torch.testing.assert_close(cross_entropy(classes_last(logits), form, **keywords), expected)


@pytest.mark.parametrize("samples", [op_samples, module_samples], ids=["op_db", "module_db"])
def test_pytorchs_samples_behind_a_linear_head(samples, device):
    """Runs their targets and keywords on logits of hidden states."""
    compared = 0
    for logits, target, keywords in samples(device, torch.float64):
        draw, classes = Draw(device, compared), logits.shape[1 if logits.dim() > 1 else 0]
        shape = classes_last(logits).shape[:-1]
        sizes = (*shape, 3), (classes, 3), (classes,)
        head = [draw.normal(*size, dtype=torch.float64).requires_grad_() for size in sizes]
        z = F.linear(*head)
        expected = F.cross_entropy(z.movedim(-1, 1) if z.dim() > 1 else z, target, **keywords)
        grad_output = draw.normal(*expected.shape, dtype=torch.float64)
        expected_grads = torch.autograd.grad(expected, head, grad_output)
        for _, form in sparse_forms(logits, target, keywords):
            loss = linear_cross_entropy(*head[:2], form, linear_bias=head[2], chunk_rows=2, **keywords)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(torch.autograd.grad(loss, head, grad_output), expected_grads)
            compared += 1
    assert compared >= 60


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="F.linear_cross_entropy is new in PyTorch 2.13")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_pytorchs_samples_of_a_linear_head(dtype, device):
    """Compares with F.linear_cross_entropy, also for weights (C, d1, ..., D)."""
    compared, dims = 0, set()
    for op in (op for op in op_db if op.name == "nn.functional.linear_cross_entropy"):
        for sample in op.sample_inputs(device, dtype, requires_grad=False):
            (weight, target), keywords = sample.args, dict(sample.kwargs)
            keywords.pop("options", None)
            bias = keywords.pop("linear_bias", None)
            leaves = [t.detach().clone().requires_grad_() for t in (sample.input, weight, bias) if t is not None]
            of_bias = {} if bias is None else {"linear_bias": leaves[2]}
            expected = F.linear_cross_entropy(*leaves[:2], target, **of_bias, **keywords)
            logits = weight.new_empty((*sample.input.shape[:-1], *weight.shape[:-1]))
            grad_output = Draw(device, compared).normal(*expected.shape, dtype=dtype)
            expected_grads = torch.autograd.grad(expected, leaves, grad_output)
            for _, form in sparse_forms(logits, target, keywords):
                loss = linear_cross_entropy(*leaves[:2], form, **of_bias, **keywords)
                torch.testing.assert_close(loss, expected)
                torch.testing.assert_close(torch.autograd.grad(loss, leaves, grad_output), expected_grads)
                compared += 1
            dims.add(weight.dim())
    assert compared >= 200 and len(dims) > 1, "PyTorch's samples were not found"
