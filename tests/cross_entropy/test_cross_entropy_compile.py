"""Tests cross entropy under opcheck, torch.compile, torch.export, AOTInductor, compiled autograd and CUDA graphs."""

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_ce
from cases import FORMS, Draw, devices
from close import assert_bitwise_equal
from compiling import dirty_allocator, jagged, op_arguments
from sparse_ce import SparseTarget, cross_entropy
from sparse_ce._core.arguments import Arguments

ops = torch.ops.sparse_ce
pytestmark = pytest.mark.usefixtures("fresh_compiler")


# ------------------------------------------------------------------------------------------------------------ opcheck


def test_python_knows_the_arguments_of_the_schema_in_their_order():
    arguments = ops.forward.default._schema.arguments[1:]  # arguments after the logits
    assert [argument.name for argument in arguments] == list(Arguments._fields)
    assert {a.name: a.default_value for a in arguments if a.has_default_value()} == Arguments._field_defaults


def test_ops_without_a_derivative_do_not_pretend_to_have_one(device):
    """Checks that PyTorch warns or raises and leaves no gradient, instead of returning a silent zero."""
    logits, target, rows = op_arguments("topk", True, device)
    loss = ops.forward_with_residual(logits, *target)[0]
    if loss.requires_grad:
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            loss.sum().backward()
    assert logits.grad is None
    logits = logits.detach()
    ops.backward_(rows, None, logits, loss.detach(), None, *target)
    assert logits._version == 1  # autograd detects the change if it saved the logits
    ops.forward_with_gradient_(rows[0].detach().clone(), None, logits, *target)
    assert logits._version == 2


# ------------------------------------------------------------------------------------------------------------ compile


@pytest.mark.parametrize("option", ["normalizer", "logit_scale"])
def test_a_number_that_changes_compiles_once_as_a_tensor(option, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, y, n: cross_entropy(x, y, **{option: n}), backend=counter, fullgraph=True)
    draw = Draw(device)
    x, labels = draw.normal(6, 11), draw.integers(11, 6)
    for n in (3.5, 7.0, 0.0, 11.0):
        torch.testing.assert_close(compiled(x, labels, torch.tensor(n, device=device)),
                                   cross_entropy(x, labels, **{option: n}))
    assert counter.frame_count == 1


def test_a_target_can_be_made_and_shifted_inside_the_graph(device):
    draw = Draw(device)

    def f(x, i, v):
        target = SparseTarget.from_topk(i, v,
                                        values_are="log_probs", mask=i > 2, ignore_empty=True, num_classes=11).shift(1)
        return cross_entropy(x[:, :5], target[:, :5], label_smoothing=0.1, softcap=3.0), target[..., 1:]

    x, i, v = draw.normal(2, 6, 11), draw.integers(11, 2, 6, 3), draw.normal(2, 6, 3)
    loss, target = torch.compile(f, backend="aot_eager", fullgraph=True)(x, i, v)
    expected, expected_target = f(x, i, v)
    assert_bitwise_equal(loss, expected)
    assert_bitwise_equal(target.to_dense(), expected_target.to_dense())


def test_values_and_second_use_of_the_logits_in_a_graph(device):
    draw = Draw(device)

    def f(x, i, v):
        z = x * 2
        return cross_entropy(z, (i, v), inplace="backward") + z.square().sum()

    i, grads = draw.integers(11, 6, 2), []
    inputs = draw.normal(6, 11), draw.uniform(6, 2)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for run, options in ((compiled, {}), (lambda x, i, v: cross_entropy(x * 2, (i, v)) + (x * 2).square().sum(), {})):
        x, v = (t.clone().requires_grad_() for t in inputs)
        run(x, i, v).backward()
        grads.append((x.grad, v.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_20_compiled_every_element_of_every_output_is_written(device):
    """Compares torch.compile with eager, with 30 % ignored rows and a dirty allocator (Liger#1338)."""
    draw = Draw(device)
    case = FORMS["tuple"]((120,), 1001, draw)
    target = SparseTarget.from_topk(*case.target, row_mask=draw.uniform(120) > 0.3)
    logits, grad_output = draw.normal(120, 1001), draw.normal(120)

    def f(x, target, grad_output):
        loss, lse = cross_entropy(x * 2, target, reduction="none", return_lse=True)
        return (loss * grad_output).sum() + lse.sum(), loss, lse

    results = []
    for run in (torch.compile(f, fullgraph=True), f):
        x = logits.clone().requires_grad_()
        dirty_allocator(device)
        total, loss, lse = run(x, target, grad_output)
        dirty_allocator(device)
        total.backward()
        results.append((loss, lse, x.grad))
    for ours, eager in zip(*results):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    assert results[0][2][~target.row_mask].eq(0).all()


def test_compiled_autograd(device):
    from torch._dynamo import compiled_autograd
    draw = Draw(device)
    x, labels = draw.normal(6, 11).requires_grad_(), draw.integers(11, 6)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        cross_entropy(x * 1, labels, label_smoothing=0.1).backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(cross_entropy(x, labels, label_smoothing=0.1), x)[0])


def test_compiled_autograd_of_a_gradient_that_was_foreseen(device):
    from torch._dynamo import compiled_autograd
    draw = Draw(device)
    x, labels = draw.normal(6, 11).requires_grad_(), draw.integers(11, 6)
    for options in (dict(), dict(softcap=5.0)):  # with and without the path that bypasses the dispatcher
        for _ in range(2):
            expected, = torch.autograd.grad(cross_entropy(x, labels, **options), x)
        loss = cross_entropy(x * 1, labels, **options)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward(torch.tensor(3.0, device=device))
        torch.testing.assert_close(x.grad, 3 * expected)
        x.grad = None


@pytest.mark.parametrize("inplace", ["backward", "forward"])
def test_compiled_autograd_of_a_gradient_in_place(inplace, device):
    from torch._dynamo import compiled_autograd
    draw = Draw(device)
    x, labels = draw.normal(6, 11).requires_grad_(), draw.integers(11, 6)
    expected, = torch.autograd.grad(cross_entropy(x, labels), x)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    for before, grad_output in ((2.0, 2.0), (2.0, 3.0), (5.0, 3.0), (3.0, 3.0)):
        cross_entropy(x * 1, labels, inplace=inplace).backward(torch.tensor(before, device=device))
        x.grad = None
        with compiled_autograd._enable(compiler):
            logits = x * 1
            loss = cross_entropy(logits, labels, inplace=inplace)
            assert logits.detach().equal(x.detach()) == (inplace == "backward")
            loss.backward(torch.tensor(grad_output, device=device))
        torch.testing.assert_close(x.grad, grad_output * expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_compiled_loss_that_may_write_at_once_writes_nothing(reduction, device):
    draw = Draw(device)
    x, labels = draw.normal(6, 11).requires_grad_(), draw.integers(11, 6)
    expected, = torch.autograd.grad(cross_entropy(x, labels, reduction=reduction), x)
    cross_entropy(x * 1, labels, inplace="forward").backward()
    compiled = torch.compile(lambda z: cross_entropy(z, labels, reduction=reduction, inplace="forward"),
                             backend="aot_eager", fullgraph=True)
    for _ in range(2):
        logits = x * 1
        grad, = torch.autograd.grad(compiled(logits), logits)
        assert logits.detach().equal(x.detach())
        torch.testing.assert_close(grad, expected)


# ----------------------------------------------------------------------------------------------- export, AOTInductor


def test_export_with_a_sparse_target_of_dynamic_size(device):
    module = sparse_ce.SparseCrossEntropyLoss(reduction="none")
    draw = Draw(device)
    nnz = torch.export.Dim("nnz", min=1, max=1000)
    parts = torch.utils._pytree.tree_leaves(jagged(8, draw))
    shapes = {}, [None if t is None else {0: nnz} if len(t) == 8 else {} for t in parts]
    program = torch.export.export(module, (draw.normal(6, 11), jagged(8, draw)), dynamic_shapes=shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (1, 8, 30):
            x, target = draw.normal(6, 11), jagged(n, draw)
            assert_bitwise_equal(program.module()(x, target), module(x, target))


@pytest.mark.slow
def test_aot_inductor(device, tmp_path, monkeypatch):
    module = sparse_ce.SparseCrossEntropyLoss(torch.rand(11), label_smoothing=0.1, softcap=5.0).to(device)
    draw = Draw(device)
    example = draw.normal(6, 11), (draw.integers(11, 6, 3), draw.uniform(6, 3))
    program = torch.export.export(module, example)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"), inductor_configs={
        "aot_inductor.compile_wrapper_opt_level": "O0"})
    loaded = torch._inductor.aoti_load_package(path)
    for _ in range(2):
        x, target = draw.normal(6, 11), (draw.integers(11, 6, 3), draw.uniform(6, 3))
        torch.testing.assert_close(loaded(x, target), module(x, target))


# ------------------------------------------------------------------------------------------ CUDA: no synchronization


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_waits_for_the_gpu(form, gpu):
    draw = Draw(gpu)
    case = FORMS[form]((3, 4), 37, draw)
    x, grad_output = draw.normal(*case.shape, 37).requires_grad_(), draw.normal(*case.shape)
    weight = draw.uniform(37)
    torch.cuda.set_sync_debug_mode("error")
    try:
        target = case.target
        for reduction in ("none", "mean"):
            loss = cross_entropy(x, target, weight, reduction=reduction, label_smoothing=0.1)
            loss.backward(grad_output if reduction == "none" else None)
        for scale in (1, 1, 3, 0, 1):
            (scale * cross_entropy(x * 1, target, weight, inplace="forward")).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
@pytest.mark.parametrize("inplace", [False, "forward"])
@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo-target", "csr-target-ignore-empty", "jagged-ranges"])
def test_a_cuda_graph_replays_with_other_logits(form, inplace, gpu):
    draw = Draw(gpu)
    case = FORMS[form]((3, 4), 37, draw)
    x, target = draw.normal(*case.shape, 37).requires_grad_(), case.target
    step = torch.cuda.make_graphed_callables(
        lambda x: cross_entropy(x * 1, target, label_smoothing=0.1, inplace=inplace), (x,))
    for _ in range(3):
        y = draw.normal(*case.shape, 37).requires_grad_()
        expected = cross_entropy(y, target, label_smoothing=0.1)
        replayed = step(y)
        assert_bitwise_equal(replayed.detach().clone(), expected.detach())
        assert_bitwise_equal(torch.autograd.grad(replayed, y)[0].clone(), torch.autograd.grad(expected, y)[0])
