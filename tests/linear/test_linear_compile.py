"""Tests the linear head under opcheck, torch.compile, torch.export and AOTInductor."""


import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from cases import FORMS, Draw
from close import assert_bitwise_equal
from compiling import dirty_allocator, op_arguments, ops_in, recording
from linear_cases import example, fused
from sparse_ce import LinearSparseCrossEntropyLoss, SparseTarget, linear_cross_entropy

ops = torch.ops.sparse_ce
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def arguments(kind, requires_grad, device, dtype=torch.float32, head_dtype=None):
    """Returns the head, the target, and a ``grad_output`` for every row."""
    draw = Draw(device, 1)
    _, target, rows = op_arguments(kind, requires_grad, device)
    head = [draw.normal(4, 5).to(dtype), *(draw.normal(*size).to(head_dtype or dtype) for size in ((7, 5), (7,)))]
    return [t.requires_grad_(requires_grad) for t in head], target, rows


# ------------------------------------------------------------------------------------------------------------ opcheck


def test_only_a_detached_mean_has_no_gradient_beside_it(device):
    head, target, _ = arguments("labels", True, device)
    for detached in (True, False):
        def outputs(x, detached=detached):
            return ops.linear_select(x, *head[1:], *target, loss=True, log_probs=False, entropy=True, argmax=True,
                                     mean=True, detached=detached)

        out = outputs(head[0])
        assert [out[i].requires_grad for i in (0, 1, 5, 7)] == [True, not detached, not detached, False]
        for at in (1, 5):
            grad = torch.func.grad(lambda x, at=at: outputs(x)[at].sum())(head[0].detach())
            assert grad.any() != detached


def test_an_op_without_a_derivative_does_not_pretend_to_have_one(device):
    """Checks that PyTorch warns or raises and leaves no gradient, instead of returning a silent zero."""
    head, target, rows = arguments("labels", True, device)
    loss = ops.linear_select_with_gradient(rows, *head, *target, loss=True, log_probs=False)[0]
    if loss.requires_grad:
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            loss.sum().backward()
    assert all(t.grad is None for t in head)


# ------------------------------------------------------------------------------------------------------------ compile


def of_head(graph):
    """Returns the names of a graph's ops that compute matrix products."""
    return [name for name in ops_in(graph) if name.startswith("linear_")]


def heads(device, requires_grad=True):
    draw = Draw(device, 2)
    return [draw.normal(*size).requires_grad_(requires_grad) for size in ((6, 5), (11, 5), (11,))]


@pytest.mark.parametrize("asked, forward, backward", [
    (dict(return_entropy="detached"), ["linear_select_with_gradient"], []),
    (dict(return_entropy="detached", return_lse=True), ["linear_select"], ["linear_select_backward"]),
    (dict(return_entropy=True), ["linear_select"], ["linear_select_backward"]),
    (dict(), ["linear_select_with_gradient"], []),
], ids=str)
def test_metrics_cost_a_product_only_where_a_gradient_for_them_may_come(asked, forward, backward, device):
    head, labels, graphs = heads(device), Draw(device).integers(11, 6), []
    f = lambda *h: linear_cross_entropy(*h[:2], labels, linear_bias=h[2], return_argmax=True, **asked)
    eager = f(*head)
    out = torch.compile(f, backend=recording(graphs), fullgraph=True)(*head)
    grads = torch.autograd.grad(out.loss, head)
    assert [of_head(graph) for graph in graphs] == [forward, backward]
    assert_bitwise_equal(out.loss, eager.loss)
    for ours, theirs in zip(grads, torch.autograd.grad(eager.loss, head)):
        (torch.testing.assert_close if backward else assert_bitwise_equal)(ours, theirs)
    assert_bitwise_equal(out.argmax, eager.argmax)
    if "return_entropy" in asked:
        assert_bitwise_equal(out.entropy, eager.entropy)
        assert out.entropy.requires_grad == eager.entropy.requires_grad == (asked["return_entropy"] is True)
        assert [hasattr(t, "lse") and t.lse.requires_grad for t in (out, eager)] == ["return_lse" in asked] * 2
        with torch.no_grad():
            found = torch.compile(f, backend=recording(graphs), fullgraph=True)(*head)
            assert_bitwise_equal(found.entropy, eager.entropy)
            assert of_head(graphs[-1]) == ["linear_select"]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_changing_normalizer_compiles_once(requires_grad, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda head, y, n: fused(head, y, normalizer=n), backend=counter, fullgraph=True)
    head, labels = heads(device, requires_grad), Draw(device).integers(11, 6)
    for n in (3, 7, 0, 11):
        torch.testing.assert_close(compiled(head, labels, torch.tensor([n], device=device)),
                                   fused(head, labels, normalizer=n))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtypes", [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32),
                                    (torch.float16, None)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_compiled_model_has_the_gradients_of_the_eager_one(reduction, dtypes, device):
    """Runs a layer before the head, with values and ignored rows, after eager steps."""
    head, labels = example(device, *dtypes)
    trunk = torch.nn.Linear(8, 8, device=device, dtype=dtypes[0])
    values = torch.rand(10, 1, device=device, requires_grad=True)
    leaves = [trunk.weight, *head[1:], values]

    def f(x):
        loss = fused((trunk(x).tanh(), *head[1:]), (labels[:, None], values), reduction=reduction, chunk_rows=4)
        return 4 * loss.sum()

    x = head[0].detach()
    expected = torch.autograd.grad(f(x), leaves)
    loss = torch.compile(f, backend="aot_eager", fullgraph=True)(x)
    for a, e in zip(torch.autograd.grad(loss, leaves), expected):
        assert a.dtype == e.dtype
        eps = torch.finfo(dtypes[0]).eps
        torch.testing.assert_close(a, e, rtol=4 * eps, atol=4 * eps * float(e.abs().max()))


def test_which_gradients_are_needed_is_known_in_the_graph(device):
    """Checks that the gradient of a frozen part is None, and that the others are computed."""
    head, labels = heads(device), Draw(device).integers(11, 6)
    for frozen in range(3):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(head)]
        torch._dynamo.reset()
        torch.compile(lambda *h: fused(h, labels), backend="aot_eager", fullgraph=True)(*leaves).backward()
        for i, (t, e) in enumerate(zip(leaves, torch.autograd.grad(fused(head, labels), head))):
            assert (t.grad is None) == (i == frozen)
            if i != frozen:
                torch.testing.assert_close(t.grad, e)


@pytest.mark.slow
def test_20_compiled_every_element_of_every_output_is_written(device):
    """Compares torch.compile with eager, with 30 % ignored rows and a dirty allocator (Liger#1338)."""
    draw = Draw(device)
    case = FORMS["tuple"]((120,), 1001, draw)
    target = SparseTarget.from_topk(*case.target, row_mask=draw.uniform(120) > 0.3)
    head, grad_output = [draw.normal(*size) for size in ((120, 16), (1001, 16), (1001,))], draw.normal(120)

    def f(x, w, b, target, grad_output):
        loss, lse = fused((x * 2, w, b), target, reduction="none", return_lse=True, chunk_rows=50)
        mean = fused((x * 3, w, b), target, chunk_rows=50)
        return (loss * grad_output).sum() + lse.sum() + 2 * mean, loss, lse, mean

    results = []
    for run in (torch.compile(f, fullgraph=True), f):
        leaves = [t.clone().requires_grad_() for t in head]
        dirty_allocator(device)
        total, *losses = run(*leaves, target, grad_output)
        dirty_allocator(device)
        total.backward()
        results.append((*losses, *[t.grad for t in leaves]))
    for ours, eager in zip(*results):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    assert results[0][3][~target.row_mask].eq(0).all()


@pytest.mark.parametrize("expected_grad", [1.0, 3.0])
def test_compiled_autograd(expected_grad, device):
    """Compiles the backward alone, also with gradients that were computed for another ``grad_output``."""
    head, labels = heads(device), Draw(device).integers(11, 6)
    for _ in range(2):
        expected = torch.autograd.grad(fused(head, labels), head, torch.tensor(expected_grad, device=device))
    loss = fused([t * 1 for t in head], labels)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    for t, e in zip(head, expected):
        torch.testing.assert_close(t.grad, e / expected_grad)


# ----------------------------------------------------------------------------------------------- export, AOTInductor


@pytest.mark.slow
def test_aot_inductor(device, tmp_path):
    module = LinearSparseCrossEntropyLoss(reduction="none", label_smoothing=0.1, softcap=5.0, chunk_rows=4).to(device)
    draw, (_, w, b) = Draw(device), heads(device, False)

    def given():
        return draw.normal(6, 5), w, (draw.integers(11, 6, 3), draw.uniform(6, 3))

    program = torch.export.export(module, given(), {"linear_bias": b})
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"), inductor_configs={
        "aot_inductor.compile_wrapper_opt_level": "O0"})
    loaded = torch._inductor.aoti_load_package(path)
    for _ in range(2):
        arguments = given()
        torch.testing.assert_close(loaded(*arguments, linear_bias=b), module(*arguments, linear_bias=b))


def test_a_traced_graph_names_one_op_for_loss_and_gradients(device):
    """Checks a mean that is compiled with its backward: forward computes the gradients, in three matrix products."""
    head, labels, graphs = heads(device), Draw(device).integers(11, 6), []
    torch.compile(lambda *h: fused(h, labels), backend=recording(graphs), fullgraph=True)(*head).backward()
    assert [of_head(graph) for graph in graphs] == [["linear_select_with_gradient"], []]
    torch.testing.assert_close(head[0].grad, torch.autograd.grad(F.cross_entropy(F.linear(*head), labels), head[0])[0])


@pytest.mark.parametrize("grad_output", [1.0, 0.25, -1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_gradients_have_the_bits_of_eager_ones(dtype, grad_output, device):
    """Checks that both are computed for a ``grad_output`` of 1 and scaled, whatever ran before."""
    head, labels = example(device, dtype, rows=48, vocab=130, width=20)
    at = torch.tensor(grad_output, device=device)

    def step(f):
        loss = f(head, labels)
        return loss.detach(), *torch.autograd.grad(loss, head, at)

    def loss_of(head, labels):
        return fused(head, labels)

    first, second = step(loss_of), step(loss_of)
    compiled = step(torch.compile(loss_of, fullgraph=True, dynamic=False))
    for c, e in zip(compiled, first):
        assert_bitwise_equal(c, e)
    assert first[2].ne(0).any()
    for a, b in zip(first, second):
        assert_bitwise_equal(a, b)
