"""Tests the loss under gradcheck, torch.func, forward-mode AD, checkpointing, autocast and other modes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import sparse_ce
from cases import FORMS, Draw, sparsely
from close import assert_bitwise_equal
from loss_cases import CLASSES, OPTIONS, PADDED
from sparse_ce import SparseTarget, cross_entropy

ALL = dict(label_smoothing=0.2, z_loss=0.1, logit_scale=2.0, softcap=4.0, num_classes=6)


def example(device, rows=4, classes=7, k=3):
    """Returns logits, indices, values and dense target, all float64, with distinct indices in each row."""
    draw = Draw(device)
    indices = torch.stack([torch.randperm(6, generator=draw.generator)[:k] for _ in range(rows)]).to(device)
    values = draw.uniform(rows, k, low=0.1, dtype=torch.float64)
    dense = torch.zeros(rows, classes, dtype=torch.float64, device=device).scatter(1, indices, values)
    return 2 * draw.normal(rows, classes, dtype=torch.float64), indices, values, dense


# ----------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("options", [dict(), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradcheck_in_both_modes_and_batched(options, reduction, device):
    x, indices, values, _ = example(device)
    inputs = x.requires_grad_(), values.requires_grad_()

    def f(x, v):
        return cross_entropy(x, (indices, v), reduction=reduction, return_lse=True, **options)[:2]

    assert gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True, check_undefined_grad=True)
    assert gradgradcheck(f, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("wanted", ["logits", "values"])
def test_only_the_gradient_that_is_asked_for(wanted, device):
    x, indices, values, dense = example(device)
    leaf = (x if wanted == "logits" else values).requires_grad_()
    loss = cross_entropy(x, (indices, values), reduction="none")
    expected = F.cross_entropy(x, torch.zeros_like(dense).scatter(1, indices, values), reduction="none")
    grad_output = torch.randn(4, dtype=torch.float64, device=device)
    torch.testing.assert_close(*(torch.autograd.grad(t, leaf, grad_output) for t in (loss, expected)))


def test_a_penalty_on_the_gradient(device):
    x, indices, values, dense = example(device)
    results = []
    for loss in (lambda x: cross_entropy(x, (indices, values), reduction="sum"),
                 lambda x: F.cross_entropy(x, dense, reduction="sum")):
        leaf = x.clone().requires_grad_()
        grad, = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        results.append(torch.autograd.grad(grad.pow(3).sum(), leaf)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gradient_to_be_differentiated_is_the_one_that_is_not(options, metrics, device):
    """Checks a gradient composed of PyTorch operations, those of the loss or, with an entropy, those of select."""
    draw, options = Draw(device), dict(options, return_entropy=metrics)
    x = draw.normal(4, PADDED if "num_classes" in options else CLASSES, dtype=torch.float64).requires_grad_()
    target = draw.integers(CLASSES, 4, 3), draw.uniform(4, 3, dtype=torch.float64)
    if options.pop("weight", False):
        options["weight"] = draw.uniform(CLASSES, low=0.2, dtype=torch.float64)
    found = []
    for create_graph in (False, True):
        out = cross_entropy(x, target, **options)
        loss = out if isinstance(out, torch.Tensor) else out[0]
        found.append(torch.autograd.grad(loss, x, create_graph=create_graph)[0].detach())
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0])


def test_forward_mode_follows_logits_and_values(device):
    x, indices, values, dense = example(device)
    tangents = torch.randn_like(x), torch.randn_like(values)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangents[0]), forward_ad.make_dual(values, tangents[1])
        loss, lse = cross_entropy(dual[0], (indices, dual[1]), reduction="none", return_lse=True)[:2]
        expected = F.cross_entropy(dual[0], torch.zeros_like(dense).scatter(1, indices, dual[1]), reduction="none")
        for ours, theirs in ((loss, expected), (lse, torch.logsumexp(dual[0], 1))):
            torch.testing.assert_close(forward_ad.unpack_dual(ours).primal, forward_ad.unpack_dual(theirs).primal)
            torch.testing.assert_close(forward_ad.unpack_dual(ours).tangent, forward_ad.unpack_dual(theirs).tangent)


# --------------------------------------------------------------------------------------------------------- torch.func


@pytest.mark.parametrize("form", FORMS)
def test_func_grad_equals_autograd(form, device):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    x = draw.normal(*case.shape, 41, dtype=torch.float64)
    x[case.ignored] = torch.nan
    target, grad_output = case.target, draw.normal(*case.shape, dtype=torch.float64)
    if isinstance(target, torch.Tensor) and target.layout != torch.strided:
        target = SparseTarget.from_coo(target) if target.layout == torch.sparse_coo else SparseTarget.from_csr(target)

    def f(x):
        loss = cross_entropy(x, target, reduction="none", num_classes=37, label_smoothing=0.1, softcap=9.0)
        return (loss * grad_output).sum()

    ours, value = torch.func.grad_and_value(f)(x)
    leaf = x.clone().requires_grad_()
    expected = f(leaf)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaf)[0])


@pytest.mark.parametrize("form", ["labels", "ids"])
def test_with_class_weights_a_mean_has_the_same_divisor_under_torch_func(form, device):
    draw = Draw(device)
    x, weight = draw.normal(6, 7, dtype=torch.float64), draw.uniform(7, dtype=torch.float64) + 0.5
    target = draw.integers(7, 6) if form == "labels" else SparseTarget.from_topk(draw.integers(7, 6, 2), None)
    if form == "labels":
        target[2] = -100

    def f(x):
        return cross_entropy(x, target, weight=weight)

    ours, value = torch.func.grad_and_value(f)(x)
    leaf = x.clone().requires_grad_()
    expected = f(leaf)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaf)[0])


def test_the_ops_themselves_under_torch_func(device):
    """Checks the kernels that functorch calls, in which no autograd.Function can be applied."""
    draw = Draw(device)
    x, labels = draw.normal(3, 5, dtype=torch.float64), draw.integers(5, 3)

    def ours(x):
        loss, lse = torch.ops.sparse_ce.forward(x, labels, None, None, None, None, -100, 0.1)
        return (loss * lse).sum()

    def plain(x):
        return (F.cross_entropy(x, labels, reduction="none", label_smoothing=0.1) * x.logsumexp(1)).sum()

    for transform in (torch.func.grad, torch.func.hessian, lambda f: torch.vmap(torch.func.grad(f))):
        scalar = transform in (torch.func.grad, torch.func.hessian)
        inputs = x if scalar else x[:, None].expand(3, 3, 5).contiguous()
        torch.testing.assert_close(transform(ours)(inputs), transform(plain)(inputs))


FUNCTIONS = {
    "cross_entropy": lambda x, ids, head: cross_entropy(x, (ids, torch.ones_like(x[:, :3])), softcap=3.0, z_loss=0.1),
    "selected_log_probs": lambda x, ids, head: sparse_ce.selected_log_probs(x, ids, padding_value=0.0).log_probs.sum(),
    "linear_cross_entropy": lambda x, ids, head: sparse_ce.linear_cross_entropy(x, head, ids[:, 0]),
    "linear_selected_log_probs": lambda x, ids, head: sparse_ce.linear_selected_log_probs(
        x, head, ids, return_entropy=True).entropy.sum(),
    "linear_row_loss": lambda x, ids, head: sparse_ce.linear_row_loss(
        lambda out, ids: -out.log_probs.sum(1), x, head, ids),
}
TRANSFORMS = {
    "grad_and_value": torch.func.grad_and_value,
    "vjp": lambda f: lambda x: (lambda value, pull: pull(torch.ones_like(value)))(*torch.func.vjp(f, x)),
    "vmap of grad": lambda f: lambda x: torch.func.vmap(torch.func.grad(f))(torch.stack((x, 2 * x))),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "hessian": torch.func.hessian,
}


@pytest.mark.parametrize("function, transform", sparsely(2, FUNCTIONS, TRANSFORMS))
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_transforms_give_what_they_give_uncompiled(function, transform, device):
    """Checks the ops' kernels that Dynamo runs under functorch, which applies no autograd.Function there."""
    x, ids, _, _ = example(device)
    head = Draw(device).normal(7, 7, dtype=torch.float64)
    f = TRANSFORMS[transform](lambda x: FUNCTIONS[function](x, ids, head))
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


def test_vmap_over_logits_and_targets(device):
    x, indices, values, dense = example(device, rows=6)

    def f(x, i, v):
        return cross_entropy(x, (i, v), label_smoothing=0.1)

    batched = x.view(3, 2, 7), indices.view(3, 2, 3), values.view(3, 2, 3)
    expected = torch.stack([f(*parts) for parts in zip(*batched)])
    torch.testing.assert_close(torch.func.vmap(f)(*batched), expected)
    torch.testing.assert_close(torch.func.vmap(f, in_dims=(1, None, None))(
        x.view(3, 2, 7), indices[:3], values[:3]), torch.stack([f(x.view(3, 2, 7)[:, i], indices[:3], values[:3])
                                                                for i in range(2)]))
    per_sample = torch.func.vmap(torch.func.grad(f))(*batched)
    for i, parts in enumerate(zip(*batched)):
        torch.testing.assert_close(per_sample[i], torch.func.grad(f)(*parts))


def test_vmap_over_a_sparse_target(device):
    x, indices, values, dense = example(device, rows=6)
    target = SparseTarget.from_topk(indices.view(3, 2, 3), values.view(3, 2, 3), num_classes=7)
    ours = torch.func.vmap(lambda x, t: cross_entropy(x, t, reduction="sum"))(x.view(3, 2, 7), target)
    torch.testing.assert_close(ours, F.cross_entropy(x, dense, reduction="none").view(3, 2).sum(1))


def test_jvp_jacobians_and_hessian(device):
    x, indices, values, dense = example(device, rows=2)

    def ours(x):
        return cross_entropy(x, (indices, values), reduction="sum", z_loss=0.1)

    def theirs(x):
        return F.cross_entropy(x, dense, reduction="sum") + 0.1 * torch.logsumexp(x, 1).square().sum()

    direction = torch.randn_like(x)
    torch.testing.assert_close(torch.func.jvp(ours, (x,), (direction,)), torch.func.jvp(theirs, (x,), (direction,)))
    torch.testing.assert_close(torch.func.hessian(ours)(x), torch.func.hessian(theirs)(x))
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(ours))(x), torch.func.hessian(theirs)(x))
    torch.testing.assert_close(torch.autograd.functional.hessian(ours, x), torch.func.hessian(theirs)(x))

    def rows(x):
        return cross_entropy(x, (indices, values), reduction="none")

    torch.testing.assert_close(torch.func.jacrev(rows)(x), torch.func.jacfwd(rows)(x))
    torch.testing.assert_close(torch.func.jacrev(rows)(x), torch.func.jacrev(
        lambda x: F.cross_entropy(x, dense, reduction="none"))(x))


def test_no_rows_under_torch_func(device):
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    x = torch.zeros(0, 7, device=device)
    for target in (empty, (empty.view(0, 3), torch.zeros(0, 3, device=device)),
                   SparseTarget.from_jagged(empty, None, empty.new_zeros(1)),
                   SparseTarget.from_jagged(empty, None, empty.view(0, 2))):
        grad, loss = torch.func.grad_and_value(lambda x: cross_entropy(x, target))(x)
        assert loss == 0 and grad.shape == (0, 7)


# ------------------------------------------------------------------------------ checkpointing, autocast, modes, threads


def test_a_zero_weight_at_a_logit_of_minus_infinity_stays_finite_in_every_mode(device):
    """Checks that the plain PyTorch formula of the transforms does not compute 0 * -inf either."""
    x = torch.tensor([[1.0, -torch.inf, 2.0]], device=device)
    indices, values = torch.tensor([[0, 1]], device=device), torch.tensor([[1.0, 0.0]], device=device)
    weight = torch.tensor([1.0, 0.0, 1.0], device=device)
    expected = torch.softmax(x, 1) - torch.tensor([1.0, 0, 0], device=device)
    for target, w in (((indices, values), None), ((indices, torch.ones_like(values)), weight)):
        grad, loss = torch.func.grad_and_value(lambda x: cross_entropy(x, target, w))(x)
        torch.testing.assert_close(loss, -torch.log_softmax(x, 1)[0, 0])
        torch.testing.assert_close(cross_entropy(x, target, w), loss)
        torch.testing.assert_close(grad, expected)
    smoothed = torch.func.grad_and_value(lambda x: cross_entropy(x, (indices, values), weight, label_smoothing=0.1))(x)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, (indices, values), weight, label_smoothing=0.1)
    assert loss.isfinite()
    torch.testing.assert_close(smoothed, (torch.autograd.grad(loss, leaf)[0], loss.detach()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, device):
    x, indices, values, _ = example(device)

    def f(x, v):
        return cross_entropy(2 * x, (indices, v), label_smoothing=0.1)

    plain, saved = [(x.clone().requires_grad_(), values.clone().requires_grad_()) for _ in range(2)]
    f(*plain).backward()
    checkpoint(f, *saved, use_reentrant=use_reentrant).backward()
    for a, b in zip(plain, saved):
        assert_bitwise_equal(a.grad, b.grad)
    again = x.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        loss = f(again, values)
    loss.backward()
    assert_bitwise_equal(again.grad, plain[0].grad)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_under_autocast_the_loss_is_float32_of_the_logits_as_they_come(half, device):
    draw = Draw(device)
    hidden, head = draw.normal(6, 8), draw.normal(11, 8).requires_grad_()
    labels, values = draw.integers(11, 6), draw.uniform(6, 1).requires_grad_()
    with torch.autocast(device, half):
        logits = F.linear(hidden, head)
        assert logits.dtype == half
        loss = cross_entropy(logits, (labels[:, None], values), label_smoothing=0.1)
        functional = torch.func.grad(lambda z: cross_entropy(z, (labels[:, None], values.detach())))(logits)
    assert loss.dtype == torch.float32
    assert_bitwise_equal(loss, cross_entropy(logits, (labels[:, None], values), label_smoothing=0.1))
    loss.backward()
    assert head.grad.dtype == torch.float32 and values.grad.dtype == torch.float32
    assert functional.dtype == half and head.grad.abs().max() > 0
    exact = torch.func.grad(lambda z: cross_entropy(z, (labels[:, None], values.detach())))(logits.double())
    torch.testing.assert_close(functional.double(), exact, rtol=2e-2, atol=1e-3)


def test_without_grad_the_result_is_the_same(device):
    x, indices, values, _ = example(device)
    expected = cross_entropy(x.clone().requires_grad_(), (indices, values))
    with torch.no_grad():
        result = cross_entropy(x.requires_grad_(), (indices, values))
    assert not result.requires_grad and result == expected
    with torch.inference_mode():
        assert cross_entropy(x, (indices, values)) == expected
        assert cross_entropy(x.clone(), (indices, values)) == expected


@pytest.mark.parametrize("form", FORMS)
def test_repeated_runs_in_deterministic_mode_are_bitwise_equal(form, device, threads):
    draw = Draw(device)
    case = FORMS[form]((6, 8), 501, draw)
    x, grad_output = draw.normal(*case.shape, 501).requires_grad_(), draw.normal(*case.shape)

    def run():
        loss = cross_entropy(x, case.target, reduction="none", label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, x, grad_output)

    threads(2)
    plain = run()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            for a, b in zip(plain, run()):
                assert_bitwise_equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_losses_of_many_python_threads_do_not_disturb_each_other(device):
    from concurrent.futures import ThreadPoolExecutor
    x, indices, values, _ = example(device, rows=64)

    def run(i):
        leaf = (x * (1 + i % 3)).requires_grad_()
        loss = cross_entropy(leaf, (indices, values))
        loss.backward()
        return loss.detach(), leaf.grad

    expected = [run(i) for i in range(3)]
    with ThreadPoolExecutor(4) as pool:
        for i, result in enumerate(pool.map(run, range(30))):
            for a, b in zip(result, expected[i % 3]):
                assert_bitwise_equal(a, b)


def test_shapes_on_the_meta_device():
    logits = torch.empty(2, 3, 7, device="meta", dtype=torch.bfloat16, requires_grad=True)
    for target in (torch.empty(2, 3, dtype=torch.int64, device="meta"),
                   (torch.empty(2, 3, 4, dtype=torch.int64, device="meta"), torch.empty(2, 3, 4, device="meta"))):
        loss, lse = cross_entropy(logits, target, reduction="none", return_lse=True)[:2]
        assert loss.shape == lse.shape == (2, 3) and loss.dtype == lse.dtype == torch.float32
        grad, = torch.autograd.grad(loss.sum(), logits)
        assert grad.shape == logits.shape and grad.dtype == torch.bfloat16


def test_a_module_can_be_copied_and_pickled():
    import pickle

    from sparse_ce import SparseCrossEntropyLoss
    module = SparseCrossEntropyLoss(torch.rand(7), label_smoothing=0.1, softcap=3.0)
    x, labels = torch.randn(4, 7), torch.arange(4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_bitwise_equal(other(x, labels), module(x, labels))
