"""Tests binary cross entropy under second derivatives, torch.func, compilers, hooks, checkpoints and autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from binary_cases import OPTIONS, dense_binary, make
from cases import DTYPES, FORMS, Draw, devices
from compiling import DYNAMIC, op_arguments
from sparse_ce import (
    LinearSparseBCEWithLogitsLoss,
    SparseBCEWithLogitsLoss,
    SparseTarget,
    WeightBlocks,
    binary_cross_entropy_with_logits,
    linear_binary_cross_entropy,
)

ops = torch.ops.sparse_ce
DOUBLE = torch.float64
REDUCTIONS = ["none", "mean"]
FORMULAS = {"plain": {}, "focal": dict(gamma=(1.5, 2.0), label_smoothing=0.1),
            "clipped": dict(gamma=(0.0, 2.0), clip=0.1), "weighted": dict(weight=True, pos_weight=True)}


def formula(name, device):
    draw, options = Draw(device, 9), dict(FORMULAS[name])
    return {key: draw.uniform(6, low=0.5, high=2, dtype=DOUBLE) if value is True else value
            for key, value in options.items()}


def small(device):
    """Returns [hidden states, weight, bias, values, scale, shift] in float64, which require grad, and indices, in which
    a class occurs twice and a row is ignored."""
    draw = Draw(device)
    tensors = [draw.normal(*size, dtype=DOUBLE) for size in ((4, 3), (7, 3), (7,))]
    values = draw.uniform(4, 3, low=0.2, high=1.5, dtype=DOUBLE)
    scale, shift = torch.tensor([1.3, -0.4], dtype=DOUBLE, device=device).unbind()
    indices = draw.integers(6, 4, 3)
    indices[0, 0] = indices[0, 1]
    indices[1] = -100
    return [t.clone().requires_grad_() for t in (*tensors, values, scale, shift)], indices


def of_logits(indices, **options):
    """Returns a function of small()'s tensors that computes the loss from logits."""
    def f(x, w, b, v, scale, shift):
        return binary_cross_entropy_with_logits(F.linear(x, w, b), (indices, v), logit_scale=scale, logit_bias=shift,
                                                num_classes=6, **options)
    return f


def of_head(indices, **options):
    def f(x, w, b, v, scale, shift):
        return linear_binary_cross_entropy(x, w, (indices, v), linear_bias=b, logit_scale=scale, logit_bias=shift,
                                           num_classes=6, **options)
    return f


def of_dense(indices, **options):
    def f(x, w, b, v, scale, shift):
        ignored = (indices == -100).all(1)
        dense = v.new_zeros(4, 6).scatter_add(1, indices.clamp(min=0), torch.where(ignored[:, None], 0.0, v))
        return dense_binary(F.linear(x, w, b), dense, ignored, logit_scale=scale, logit_bias=shift, num_classes=6,
                            **options)
    return f


both = pytest.mark.parametrize("function", [of_logits, of_head])
every_formula = pytest.mark.parametrize("name", FORMULAS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


# ------------------------------------------------------------------------------------------------- second derivatives


@both
@every_formula
@every_reduction
def test_gradcheck_of_first_and_second_order(reduction, name, function, device):
    leaves, indices = small(device)
    f = function(indices, reduction=reduction, **formula(name, device))
    assert gradcheck(f, leaves, check_forward_ad=True, check_batched_grad=True, check_undefined_grad=True,
                     fast_mode=True)
    assert gradgradcheck(f, leaves, fast_mode=True)


@both
@every_reduction
def test_gradcheck_of_a_learned_row_weight(reduction, function, device):
    leaves, indices = small(device)
    row_weight = torch.tensor([1.0, float("nan"), 0.5, -0.3], dtype=DOUBLE, device=device)

    def f(weight, *leaves):
        spread = torch.cat((weight[:1], row_weight[1:2], weight[1:]))
        return function(indices, reduction=reduction, gamma=2.0, row_weight=spread)(*leaves)

    inputs = (row_weight[[0, 2, 3]].requires_grad_(), *leaves)
    assert gradcheck(f, inputs, fast_mode=True) and gradgradcheck(f, inputs, fast_mode=True)


@both
@every_formula
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_derivatives_of_functions_of_the_gradient(reduction, name, function, device):
    leaves, indices = small(device)
    results = []
    for f in (function, of_dense):
        loss = f(indices, reduction=reduction, **formula(name, device))(*leaves).square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)
        results.append((loss, *first, *second))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", ["labels-int64", "tuple", "jagged", "jagged-ranges", "jagged-logprobs"])
@pytest.mark.parametrize("option", ["plain", "all"])
def test_second_derivatives_of_other_formats(option, form, device):
    case, logits, keywords = make(form, device, DOUBLE, OPTIONS[option])
    results = []
    for dense in (False, True):
        leaf = logits.clone().requires_grad_()
        given = [leaf] if case.values is None else [leaf, case.values.double().requires_grad_()]
        of_call = {name: t for name, t in keywords.items() if name != "ignore_index" or not dense}
        values = given[1] if len(given) == 2 else None
        loss = (dense_binary(leaf, case.dense_of(values), case.ignored, **of_call) if dense else
                binary_cross_entropy_with_logits(leaf, case.build(values), **of_call))
        first = torch.autograd.grad(loss, given, create_graph=True)
        results.append(torch.autograd.grad(sum((1e3 * g).sin().sum() for g in first), given))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-9)


@both
@every_reduction
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_twice_through_a_retained_graph(dtype, reduction, function, device):
    draw = Draw(device)
    x, w = draw.normal(4, 5).to(dtype).requires_grad_(), draw.normal(9, 5).to(dtype).requires_grad_()
    labels = draw.integers(9, 4)
    if function is of_head:
        loss = linear_binary_cross_entropy(x, w, labels, reduction=reduction, chunk_classes=4)
    else:
        w = (x @ w.T).detach().requires_grad_()
        loss = binary_cross_entropy_with_logits(w, labels, reduction=reduction)
    first, second = (torch.autograd.grad(loss, w, torch.full_like(loss, 1.0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    third, = torch.autograd.grad(loss, w, torch.full_like(loss, -2.0))
    assert torch.equal(third, -2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, w, torch.ones_like(loss))


@both
@every_reduction
def test_several_gradients_at_once(reduction, function, device):
    leaves, indices = small(device)
    loss = function(indices, reduction=reduction, gamma=2.0)(*leaves)
    many = Draw(device).normal(3, *loss.shape, dtype=DOUBLE)
    at_once = torch.autograd.grad(loss, leaves, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(loss, leaves, one, retain_graph=True) for one in many]
    torch.testing.assert_close(at_once, tuple(map(torch.stack, zip(*each))))


@every_reduction
def test_logits_that_are_written_before_backward_are_noticed(reduction, device):
    logits = Draw(device).normal(3, 5).requires_grad_() * 1
    loss = binary_cross_entropy_with_logits(logits, torch.arange(3, device=device), reduction=reduction)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


# ----------------------------------------------------------------------------------------------------------- torch.func


@both
@every_formula
def test_functorch(name, function, device):
    leaves, indices = small(device)
    tensors = [t.detach() for t in leaves]
    f = function(indices, **formula(name, device))
    numbers = tuple(range(len(tensors)))
    expected = torch.autograd.grad(f(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(f, numbers)(*tensors), expected)
    rows = function(indices, reduction="none", **formula(name, device))
    jacobian = torch.func.jacrev(rows, numbers)(*tensors)
    torch.testing.assert_close(tuple(j.mean(0) * 4 / 18 for j in jacobian), expected)
    torch.testing.assert_close(torch.func.jacfwd(rows, numbers)(*tensors), jacobian)
    tangents = [Draw(device, 5).normal(*t.shape, dtype=DOUBLE) for t in tensors]
    _, along = torch.func.jvp(f, tuple(tensors), tuple(tangents))
    torch.testing.assert_close(along, sum((a * b).sum() for a, b in zip(expected, tangents)))
    stacked = [torch.stack((t, 2 * t)) for t in tensors]
    torch.testing.assert_close(torch.func.vmap(f)(*stacked), torch.stack([f(*tensors), f(*(2 * t for t in tensors))]))
    each = torch.func.vmap(torch.func.grad(f, numbers))(*stacked)
    torch.testing.assert_close(tuple(t[0] for t in each), expected)


@pytest.mark.parametrize("form", FORMS)
def test_functorch_of_every_format(form, device):
    case, logits, keywords = make(form, device, DOUBLE, OPTIONS["all"])
    target = case.target
    if isinstance(target, torch.Tensor) and target.layout != torch.strided:
        target = SparseTarget.from_coo(target) if target.layout == torch.sparse_coo else SparseTarget.from_csr(target)

    def f(x):
        return binary_cross_entropy_with_logits(x, target, **keywords)

    leaf = logits.clone().requires_grad_()
    loss = f(leaf)
    torch.testing.assert_close(torch.func.grad_and_value(f)(logits), (torch.autograd.grad(loss, leaf)[0], loss))


# ------------------------------------------------------------------------------------------------------------ compilers


def results_of(f, tensors, grad_output):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    loss = f(*leaves)
    return loss.detach(), *torch.autograd.grad(loss, leaves, grad_output if loss.dim() else None)


@both
@every_reduction
@pytest.mark.parametrize("name", ["plain", "weighted"])
def test_compiled_with_one_graph(name, reduction, function, device, fresh_compiler):
    leaves, indices = small(device)
    f = function(indices, reduction=reduction, **formula(name, device))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    grad_output = Draw(device, 3).normal(4, dtype=DOUBLE)
    torch.testing.assert_close(results_of(compiled, leaves, grad_output), results_of(f, leaves, grad_output))


@pytest.mark.parametrize("form", DYNAMIC)
@both
def test_compiled_with_changing_numbers_of_entries_and_rows(function, form, device, fresh_compiler):
    draw = Draw(device)
    head = draw.normal(11, 11)

    def f(x, target, mask):
        if function is of_head:
            return linear_binary_cross_entropy(x, head, target, row_mask=mask, gamma=2.0)
        return binary_cross_entropy_with_logits(x @ head.T, target, row_mask=mask, gamma=2.0)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for entries in (3, 5, 9, 14):
        x, target, mask = draw.normal(6, 11), DYNAMIC[form](entries, draw), draw.uniform(6) > 0.3
        found, expected = (results_of(lambda t: call(t, target, mask), [x], None) for call in (compiled, f))
        torch.testing.assert_close(found, expected)
    assert counter.frame_count <= 3


def test_compiled_with_changing_vocabularies_and_rows(device, fresh_compiler):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(binary_cross_entropy_with_logits, backend=counter, fullgraph=True)
    draw = Draw(device)
    for rows, classes in ((4, 7), (6, 9), (5, 13), (9, 11)):
        x, labels, weight = draw.normal(rows, classes), draw.integers(classes, rows), draw.uniform(classes)
        found, expected = (results_of(lambda t: f(t, labels, weight), [x], None)
                           for f in (compiled, binary_cross_entropy_with_logits))
        torch.testing.assert_close(found, expected)
    assert counter.frame_count <= 3


@both
def test_compiled_with_inductor(function, device, fresh_compiler):
    leaves, indices = small(device)
    f = function(indices, gamma=(0.0, 2.0))
    torch.testing.assert_close(results_of(torch.compile(f, fullgraph=True), leaves, None), results_of(f, leaves, None))


@pytest.mark.parametrize("inplace", ["backward", "forward"])
@every_reduction
def test_compiled_with_inplace(reduction, inplace, device, fresh_compiler):
    draw = Draw(device)
    x, labels = draw.normal(4, 7), draw.integers(7, 4)

    def f(x, inplace=inplace):
        return binary_cross_entropy_with_logits(x * 1, labels, reduction=reduction, inplace=inplace)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    grad_output = draw.normal(4)
    torch.testing.assert_close(results_of(compiled, [x], grad_output),
                               results_of(lambda t: f(t, False), [x], grad_output))


def test_compiled_with_modules(device, fresh_compiler):
    draw = Draw(device)
    x, labels, head = draw.normal(4, 7), draw.integers(7, 4), draw.normal(7, 7)
    for module, rest in ((SparseBCEWithLogitsLoss(pos_weight=torch.ones(7)), (labels,)),
                         (LinearSparseBCEWithLogitsLoss(gamma=2.0, reduction="batchmean"), (head, labels))):
        module = module.to(device)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(*(results_of(lambda t: f(t, *rest), [x], None) for f in (compiled, module)))


def test_compiled_with_blocks(device, fresh_compiler):
    draw = Draw(device)
    x, weight, labels = draw.normal(4, 5), draw.normal(9, 5), draw.integers(9, 4)

    class Blocks(WeightBlocks):
        shape, dtype, device = weight.shape, weight.dtype, weight.device

        def block(self, begin, end):
            return weight[begin:end]

    f = torch.compile(lambda x: linear_binary_cross_entropy(x, Blocks(), labels), backend="aot_eager")
    torch.testing.assert_close(results_of(f, [x], None), results_of(
        lambda x: linear_binary_cross_entropy(x, weight, labels), [x], None))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_and_fake_tensors(dtype, function):
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            x = torch.empty(2, 3, 5, dtype=dtype, requires_grad=True)
            w = torch.empty(9, 5, dtype=dtype, requires_grad=True)
            labels = torch.zeros(2, 3, dtype=torch.long)
            scale = torch.ones((), requires_grad=True)
            for reduction, shape in (("none", (2, 3)), ("mean", ())):
                options = dict(reduction=reduction, gamma=2.0, logit_scale=scale)
                loss = (linear_binary_cross_entropy(x, w, labels, **options) if function is of_head else
                        binary_cross_entropy_with_logits(x @ w.T, labels, **options))
                assert loss.shape == shape and loss.dtype == torch.float32
                grads = torch.autograd.grad(loss.sum(), (x, w, scale))
                assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (x, w, scale)]


# --------------------------------------------------------------------------------------------------- hooks, checkpoints


@pytest.mark.parametrize("inplace", [False, "backward", "forward"], ids=str)
@every_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_on_saved_tensors_and_checkpoints_have_the_same_bits(dtype, reduction, inplace, device):
    draw = Draw(device)
    x, labels, grad_output = draw.normal(4, 11).to(dtype), draw.integers(11, 4), torch.full((4,), 0.7, device=device)

    def f(x, inplace=inplace):
        return binary_cross_entropy_with_logits(x * 1, labels, reduction=reduction, inplace=inplace, gamma=1.0)

    expected = results_of(lambda t: f(t, False), [x], grad_output)
    assert all(map(torch.equal, results_of(f, [x], grad_output), expected))
    with save_on_cpu():
        assert all(map(torch.equal, results_of(f, [x], grad_output), expected))
    again = results_of(lambda t: checkpoint(f, t, use_reentrant=False), [x], grad_output)
    assert all(map(torch.equal, again, expected))


@every_reduction
def test_a_head_under_hooks_and_checkpoints(reduction, device):
    leaves, indices = small(device)
    f = of_head(indices, reduction=reduction, gamma=2.0, chunk_classes=4)
    grad_output = Draw(device, 3).normal(4, dtype=DOUBLE)
    expected = results_of(f, leaves, grad_output)
    with save_on_cpu():
        torch.testing.assert_close(results_of(f, leaves, grad_output), expected)
    again = results_of(lambda *t: checkpoint(f, *t, use_reentrant=False), leaves, grad_output)
    torch.testing.assert_close(again, expected)
    own = [t.detach().clone().requires_grad_() for t in leaves]
    checkpoint(f, *own, use_reentrant=True).backward(grad_output if reduction == "none" else None)
    torch.testing.assert_close(tuple(t.grad for t in own), expected[1:])


def test_without_grad(device):
    leaves, indices = small(device)
    for function in (of_logits, of_head):
        f = function(indices, reduction="none")
        expected = f(*leaves)
        with torch.no_grad():
            found = f(*leaves)
        torch.testing.assert_close(found, expected.detach())
        assert not found.requires_grad
        with torch.inference_mode():
            torch.testing.assert_close(f(*leaves), expected.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    """Checks that the head is multiplied as F.linear multiplies it, and that the loss is float32."""
    draw = Draw(device)
    x, w, b = (draw.normal(*size).requires_grad_() for size in ((4, 5), (9, 5), (9,)))
    labels = draw.integers(9, 4)
    with torch.autocast(device, dtype=dtype):
        losses = (linear_binary_cross_entropy(x, w, labels, linear_bias=b),
                  binary_cross_entropy_with_logits(F.linear(x, w, b), labels))
    expected = F.binary_cross_entropy_with_logits(F.linear(x, w, b), F.one_hot(labels, 9).float())
    of_dense = torch.autograd.grad(expected, (x, w, b))
    for loss in losses:
        assert loss.dtype == torch.float32
        grads = torch.autograd.grad(loss, (x, w, b))
        assert all(g.dtype == torch.float32 for g in grads)
        torch.testing.assert_close((loss, *grads), (expected, *of_dense), rtol=0.05, atol=0.005)


# ------------------------------------------------------------------------------------------------------------ raw calls


@pytest.mark.parametrize("kind", ["labels", "topk", "csr", "ranges"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad, kind, device):
    logits, (indices, values, offsets, weight, mask), grad = op_arguments(kind, requires_grad, device)
    options = dict(weight=weight, row_mask=mask, pos_weight=Draw(device, 2).uniform(7), gamma_negative=2.0, clip=0.1,
                   affine=torch.tensor([1.2, 0.3], device=device, requires_grad=requires_grad))
    target = (indices, values, offsets)
    torch.library.opcheck(ops.binary_cross_entropy.default, (logits, *target), options)
    head = Draw(device, 3).normal(7, 7).requires_grad_(requires_grad)
    torch.library.opcheck(ops.linear_binary_cross_entropy.default, (logits, head, None, *target), options)
    share = torch.tensor([0.5, 0.1, 0.2, 0.7], device=device)
    torch.library.opcheck(ops.linear_binary_cross_entropy_sum.default, (share, logits, head, None, *target), options)
    torch.library.opcheck(ops.binary_cross_entropy_with_gradient.default, (grad, logits, *target), options)
    if requires_grad:
        return
    options["affine_grad"] = True
    torch.library.opcheck(ops.binary_cross_entropy_with_gradient.default, (grad, logits, *target), options)
    torch.library.opcheck(ops.binary_cross_entropy_with_gradient_.default, (grad, logits.clone(), *target), options)
    torch.library.opcheck(ops.linear_binary_cross_entropy_with_gradient.default, (grad, logits, head, None, *target),
                          {name: t for name, t in options.items() if name != "affine_grad"})


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
def test_nothing_waits_for_the_gpu(gpu):
    draw = Draw(gpu)
    x, head, labels = draw.normal(6, 9), draw.normal(9, 9), draw.integers(9, 6)
    mask, scale = draw.integers(2, 6).bool(), torch.ones((), device=gpu).requires_grad_()
    leaves = [x.requires_grad_(), head.requires_grad_(), scale]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduction in REDUCTIONS:
            options = dict(row_mask=mask, reduction=reduction, logit_scale=scale, gamma=2.0)
            losses = (binary_cross_entropy_with_logits(x, labels, **options),
                      binary_cross_entropy_with_logits(x * 1, labels, inplace="forward", **options),
                      linear_binary_cross_entropy(x, head, labels, chunk_classes=4, **options))
            torch.autograd.grad([loss.sum() for loss in losses], leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
