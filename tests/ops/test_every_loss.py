"""Asks every loss the same questions about autograd, torch.func, hooks, checkpoints, modes and dtypes."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import sparse_ce
from cases import FORMS, Draw
from losses import CASES, IN_PLACE, LOSSES, MORE, Problem, results, upstream, weighted
from sparse_ce import SparseTarget


def near_of(same_bits):
    """Returns tolerances for bits that are the same, or for sums in another order."""
    return dict(rtol=0, atol=0) if same_bits else dict(rtol=1e-6, atol=1e-6)


every_case = pytest.mark.parametrize("name, reduction", CASES)


@pytest.mark.parametrize("name, reduction", CASES + MORE)
def test_first_and_second_derivatives_are_those_of_plain_pytorch(name, reduction, device):
    """Checks derivatives of a function of the loss and of a function of the gradient."""
    problem, found = Problem(name, reduction, device), []
    for f in (problem, problem.plain):
        leaves = problem.leaves()
        outputs = f(*leaves)
        first = torch.autograd.grad(weighted(outputs), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g.sin() * (1 + i)).sum() for i, g in enumerate(first)), leaves)
        found.append([*outputs, *first, *second])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
    plain = torch.autograd.grad(problem.total(*leaves), leaves)
    torch.testing.assert_close(plain, first, rtol=1e-9, atol=1e-11)


@every_case
def test_gradcheck_of_first_and_second_order(name, reduction, device):
    problem = Problem(name, reduction, device)
    leaves = problem.leaves()
    assert gradcheck(problem, leaves, check_forward_ad=True, check_batched_grad=True, check_undefined_grad=True,
                     fast_mode=True)
    assert gradgradcheck(problem, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name, reduction", [case for case in CASES if "segment" not in case[0]])
def test_ignored_rows_may_hold_anything(name, reduction, device):
    """Checks results and second derivatives. A row is ignored if it has no gradient."""
    problem, found = Problem(name, reduction, device), []
    ignored = torch.autograd.grad(problem.total(*(leaves := problem.leaves())), leaves)[0].eq(0).flatten(1).all(1)
    for poison in (False, True):
        leaves, fixed = problem.leaves(), problem.fixed
        if poison:
            of_rows = {of: t for of, t in zip(problem.loss.names, (*leaves, *fixed)) if of in ("z", "x", "r", "y", "t")}
            with torch.no_grad():
                for of, t in of_rows.items():
                    t[ignored[:len(t)]] = torch.nan
        total = problem.total(*leaves)
        first = torch.autograd.grad(total, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)
        of_func = torch.func.grad(problem.total, tuple(range(problem.count)))(*(t.detach() for t in leaves))
        found.append([total, *first, *second, *of_func])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


OF_FORMATS = {
    "cross_entropy": lambda z, w, target: [sparse_ce.cross_entropy(
        z, target, reduction="none", num_classes=37, label_smoothing=0.1, softcap=9.0)],
    "linear_cross_entropy": lambda z, w, target: sparse_ce.linear_cross_entropy(
        z, w, target, num_classes=37, label_smoothing=0.1, softcap=9.0, return_lse=True)[:2],
    "binary": lambda z, w, target: [sparse_ce.binary_cross_entropy_with_logits(
        z, target, reduction="none", num_classes=37, gamma=(1.0, 2.0), clip=0.1)],
    "linear_binary": lambda z, w, target: [sparse_ce.linear_binary_cross_entropy(
        z, w, target, num_classes=37, gamma=2.0, label_smoothing=0.1)],
    "selected_log_probs": lambda z, w, target: sparse_ce.selected_log_probs(
        z, target, num_classes=37, padding_value=0.0, softcap=5.0, return_log_tail=True, return_entropy=True,
        return_mean_logit=True, return_collision=True),
    "linear_selected_log_probs": lambda z, w, target: [sparse_ce.linear_selected_log_probs(
        z, w, target, num_classes=37, padding_value=0.0, return_entropy=True).entropy],
}


@pytest.mark.parametrize("name", OF_FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_every_format_under_torch_func_and_twice(form, name, device):
    draw = Draw(device)
    case, w = FORMS[form]((3, 4), 37, draw), draw.normal(41, 5, dtype=torch.float64)
    z = draw.normal(*case.shape, 5 if name.startswith("linear") else 41, dtype=torch.float64)
    z[case.ignored] = torch.nan
    target = case.target

    def f(z):
        return weighted(OF_FORMATS[name](z, w, target))

    leaf = z.clone().requires_grad_()
    value = f(leaf)
    first, = torch.autograd.grad(value, leaf, create_graph=True)
    second, = torch.autograd.grad(first.square().sum(), leaf)
    plain, = torch.autograd.grad(f(leaf), leaf)
    if isinstance(target, torch.Tensor) and target.layout != torch.strided:
        target = SparseTarget.from_coo(target) if target.layout == torch.sparse_coo else SparseTarget.from_csr(target)
    torch.testing.assert_close(torch.func.grad_and_value(f)(z), (plain, value.detach()))
    torch.testing.assert_close(first.detach(), plain)
    torch.testing.assert_close(torch.func.grad(lambda z: torch.func.grad(f)(z).square().sum())(z), second)
    assert value.isfinite() and second.isfinite().all() and second.any()


@every_case
def test_torch_func(name, reduction, device):
    problem = Problem(name, reduction, device)
    values, numbers = problem.values(), tuple(range(problem.count))
    leaves = problem.leaves()
    total = problem.total(*leaves)
    first = torch.autograd.grad(total, leaves, create_graph=True)
    expected = tuple(g.detach() for g in first)
    torch.testing.assert_close(torch.func.grad_and_value(problem.total, numbers)(*values), (expected, total.detach()))
    outputs, pull = torch.func.vjp(problem, *values)
    torch.testing.assert_close(pull(tuple(upstream(outputs))), tuple(results(problem, leaves)[len(outputs):]))
    tangents = tuple(upstream(values, seed=5))
    _, along = torch.func.jvp(problem.total, tuple(values), tangents)
    torch.testing.assert_close(along, sum((a * b).sum() for a, b in zip(expected, tangents)))
    jacobians = (jacobian(problem, numbers)(*values) for jacobian in (torch.func.jacrev, torch.func.jacfwd))
    torch.testing.assert_close(*jacobians)
    rows = [torch.autograd.grad(first[0], leaves, one, retain_graph=True) for one in torch.eye(
        first[0].numel(), dtype=first[0].dtype, device=device).view(-1, *first[0].shape)]
    hessian = torch.func.hessian(problem.total, numbers)(*values)[0]
    for block, *parts in zip(hessian, *rows):
        torch.testing.assert_close(block, torch.stack(parts).view(block.shape))


@every_case
def test_vmap(name, reduction, device):
    """Maps over all tensors at once, and over one of them while the others stay."""
    problem, other = (Problem(name, reduction, device, seed=seed) for seed in (0, 1))
    pairs = [[*p.values(), *p.fixed] for p in (problem, other)]
    gradient = torch.func.grad(problem.total, tuple(range(problem.count)))
    stacked = [torch.stack(pair) for pair in zip(*pairs)]
    for f in (problem, gradient):
        each = [f(*tensors) for tensors in pairs]
        torch.testing.assert_close(torch.func.vmap(f)(*stacked), tuple(map(torch.stack, zip(*each))))
        for i in range(len(stacked)):
            given = [stacked[i] if i == j else t for j, t in enumerate(pairs[0])]
            in_dims = tuple(0 if i == j else None for j in range(len(given)))
            each = [pairs[0][:i] + [pair[i]] + pairs[0][i + 1:] for pair in pairs]
            torch.testing.assert_close(torch.func.vmap(f, in_dims)(*given),
                                       tuple(map(torch.stack, zip(*(f(*tensors) for tensors in each)))))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_checkpoints_and_modes_have_the_same_bits(dtype, name, reduction, device):
    problem = Problem(name, reduction, device, dtype)
    expected = results(problem, problem.leaves())
    near = near_of(problem.loss.same_bits)
    for way in (save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t), nullcontext):
        with way():
            outputs = problem(*(leaves := problem.leaves()))
        grads = torch.autograd.grad(outputs, leaves, upstream(outputs))
        assert all(map(torch.equal, (*outputs, *grads), expected))
    for reentrant in (False, True):
        leaves = problem.leaves()
        outputs = checkpoint(problem, *leaves, use_reentrant=reentrant)
        torch.autograd.backward(outputs, upstream(outputs))
        torch.testing.assert_close(list(outputs), expected[:len(outputs)],
                                   **(near if reentrant else near_of(True)))
        assert all(map(torch.equal, (t.grad for t in leaves), expected[len(outputs):]))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for given in (problem.leaves(), problem.values()):
                outputs = problem(*given)
                assert not any(out.requires_grad for out in outputs)
                torch.testing.assert_close([out.clone() for out in outputs], expected[:len(outputs)], **near)


@pytest.mark.parametrize("name, reduction", [case for case in CASES if case[0] in IN_PLACE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inplace", ["backward", "forward"])
def test_in_place_it_has_the_same_bits(inplace, dtype, name, reduction, device):
    problem = Problem(name, reduction, device, dtype)
    expected = results(problem, problem.leaves())

    def f(z, *rest):
        return problem(z * 1, *rest, inplace=inplace)

    # The gradient of cross entropy that forward wrote is scaled in backward.
    scaled = inplace == "forward" and name.startswith("cross")
    near = dict(rtol=2 * torch.finfo(dtype).eps, atol=0) if scaled else dict(rtol=0, atol=0)
    for way in (nullcontext, save_on_cpu):
        with way():
            outputs = f(*(leaves := problem.leaves()))
        found = [*outputs, *torch.autograd.grad(outputs, leaves, upstream(outputs))]
        torch.testing.assert_close(found, expected, **near)
    found = results(lambda *leaves: checkpoint(f, *leaves, use_reentrant=False), problem.leaves())
    torch.testing.assert_close(found, expected, **near)


@pytest.mark.parametrize("name, reduction", [case for case in CASES if case[0] in IN_PLACE and "cross" not in case[0]])
def test_second_derivatives_in_place(name, reduction, device):
    problem, found = Problem(name, reduction, device), []
    for inplace in (False, "backward"):
        leaves = problem.leaves()
        total = weighted(problem(leaves[0] * 1, *leaves[1:], inplace=inplace)).exp()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_backward_twice_through_a_retained_graph(dtype, name, reduction, device):
    problem = Problem(name, reduction, device, dtype)
    leaves = problem.leaves()
    outputs = problem(*leaves)
    up = upstream(outputs)
    first, second = (torch.autograd.grad(outputs, leaves, up, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(first, second))
    assert [g.dtype for g in first] == [t.dtype for t in leaves]
    other = [-2 * t for t in up]
    assert all(map(torch.equal, torch.autograd.grad(outputs, leaves, other), torch.autograd.grad(
        problem(*leaves), leaves, other)))
    if outputs[0].grad_fn is not None and LOSSES[name].saved:
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(outputs, leaves, up)


@every_case
def test_several_gradients_at_once(name, reduction, device):
    problem = Problem(name, reduction, device)
    leaves = problem.leaves()
    outputs = problem(*leaves)
    many = [upstream(outputs, seed) for seed in range(3)]
    at_once = torch.autograd.grad(outputs, leaves, list(map(torch.stack, zip(*many))), is_grads_batched=True,
                                  retain_graph=True)
    each = [torch.autograd.grad(outputs, leaves, up, retain_graph=True) for up in many]
    torch.testing.assert_close(at_once, tuple(map(torch.stack, zip(*each))))


@every_case
def test_each_gradient_alone(name, reduction, device):
    problem = Problem(name, reduction, device)
    outputs = len(problem(*problem.leaves()))
    expected = results(problem, problem.leaves())[outputs:]
    for i, of_all in enumerate(expected):
        leaves = [t.requires_grad_(i == j) for j, t in enumerate(problem.values())]
        torch.testing.assert_close(results(problem, leaves)[outputs:], [of_all])


@every_case
def test_a_write_before_backward_is_noticed(name, reduction, device):
    problem = Problem(name, reduction, device)
    for at, of in enumerate(problem.loss.learned.split()):
        if of in problem.loss.saved:
            leaves = [t * 1 for t in problem.leaves()]
            total = problem.total(*leaves)
            with torch.no_grad():
                leaves[at].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_meta_and_fake_tensors(dtype, name, reduction, device):
    eager = Problem(name, reduction, device, dtype)
    expected = [(t.shape, t.dtype) for t in results(eager, eager.leaves())]
    for mode in (torch.device("meta"), FakeTensorMode()):
        problem = Problem(name, reduction, device, dtype)
        real = *problem.leaves(), *problem.fixed
        with mode:
            given = [torch.empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad) for t in real]
            outputs = problem(*given)
            grads = torch.autograd.grad([out.sum() for out in outputs], given[:problem.count])
            assert [(t.shape, t.dtype) for t in (*outputs, *grads)] == expected


@every_case
def test_no_rows(name, reduction, device):
    problem = Problem(name, reduction, device, torch.float32, rows=0)
    for found in (results(problem, problem.leaves()), torch.func.vjp(problem, *problem.values())[0]):
        assert not any(t.any() for t in found)


@every_case
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(half, name, reduction, device):
    """Checks that a head is multiplied in 16 bit, that logits and float64 stay as they are, and the gradients."""
    problem = Problem(name, reduction, device, torch.float32 if LOSSES[name].linear else half)
    narrow = [t.to(half) if of in "xt" else t for of, t in zip(problem.loss.names, (*problem.values(), *problem.fixed))]
    with torch.autocast(device, half):
        leaves = problem.leaves()
        found = [*problem(*leaves)]
        transformed = torch.func.grad(problem.total)(*problem.values())
        double = Problem(name, reduction, device)
        assert double(*double.values())[0].dtype == torch.float64
    outputs = len(found)
    found += torch.autograd.grad(found, leaves, upstream(found))
    given = [t.clone().requires_grad_() if i < problem.count else t for i, t in enumerate(narrow)]
    expected = problem(*given)
    expected += torch.autograd.grad(expected, given[:problem.count], upstream(expected))
    for t, e in zip(found, expected):
        torch.testing.assert_close(t, e.to(t.dtype), **near_of(True) if problem.loss.same_bits else dict(
            rtol=0.01, atol=0.001))  # two gradients that autocast adds in float32
    assert [t.dtype for t in found[outputs:]] == [t.dtype for t in leaves]
    assert transformed.dtype == leaves[0].dtype
    assert found[0].dtype == (torch.float32 if problem.loss.wide else half)
