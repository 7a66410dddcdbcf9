"""Asks every loss the same questions about torch.compile and torch.export, and every op about opcheck."""

import importlib.util
import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import forked
from cases import slow, sparsely
from losses import CASES, IN_PLACE, LOSSES, Problem, results

ops = torch.ops.sparse_ce
pytestmark = pytest.mark.usefixtures("fresh_compiler")
REDUCTIONS = ["none", "mean"]
# Losses whose compiled code differs; the other kinds and options change numbers alone.
SHORT = [name for name in LOSSES if "dense_divergence" not in name or name.endswith((" jsd", " tv"))]


def losses(every, names=SHORT, *axes):
    """Returns combinations of losses, reductions and other values, of which every ``every``-th is not slow."""
    return [pytest.param(*p.values, marks=p.marks, id=p.id) for p in sparsely(every, names, REDUCTIONS, *axes)
            if tuple(p.values[:2]) in CASES]


@pytest.mark.parametrize("name, reduction", losses(2))
def test_one_graph_serves_changing_numbers_of_rows_and_entries(name, reduction, device):
    """Checks one graph for the first sizes, and one for all others, with the bits of the eager loss and gradients."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Problem(name, reduction, device).free, backend=counter, fullgraph=True)
    for rows, entries in ((5, 3), (9, 4), (12, 5), (7, 3)):
        problem, found = Problem(name, reduction, device, torch.float32, rows=rows, entries=entries), []
        for f in (compiled, problem.free):
            found.append(results(lambda *leaves: f(*leaves, *problem.fixed), problem.leaves()))
        torch.testing.assert_close(*found)
    assert counter.frame_count <= 2


TRANSFORMS = {
    "grad_and_value": lambda f, n: torch.func.grad_and_value(f, n),
    "vjp": lambda f, n: lambda *x: (lambda value, pull: pull(torch.ones_like(value)))(*torch.func.vjp(f, *x)),
    "vmap of grad": lambda f, n: lambda *x: torch.func.vmap(torch.func.grad(f, n))(
        *(torch.stack((t, 2 * t)) for t in x)),
    "jvp": lambda f, n: lambda *x: torch.func.jvp(f, x, tuple(t.cos() for t in x)),
    "hessian": lambda f, n: lambda *x: torch.func.hessian(lambda first: f(first, *x[1:]))(x[0]),
}


@pytest.mark.parametrize("name, reduction, transform", losses(5, SHORT, TRANSFORMS))
def test_compiled_transforms_give_what_they_give_uncompiled(name, reduction, transform, device):
    """Checks the ops' kernels that Dynamo runs under functorch, which applies no autograd.Function there."""
    problem = Problem(name, reduction, device)
    f = TRANSFORMS[transform](problem.total, tuple(range(problem.count)))
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(*problem.values()),
                               f(*problem.values()))


@pytest.mark.parametrize("name, reduction", losses(12))
def test_inductor(name, reduction, device):
    problem, found = Problem(name, reduction, device, torch.float32), []
    for f in (torch.compile(problem.free, fullgraph=True), problem.free):
        found.append(results(lambda first, *rest: f(2 * first, *rest, *problem.fixed), problem.leaves()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("inplace", ["backward", "forward"])
@pytest.mark.parametrize("name, reduction", [case for case in CASES if case[0] in IN_PLACE])
def test_compiled_with_inplace(name, reduction, inplace, device):
    problem, found = Problem(name, reduction, device), []
    for f in (torch.compile(lambda z, *rest: problem(z * 1, *rest, inplace=inplace), fullgraph=True,
                            backend="aot_eager"), problem):
        found.append(results(f, problem.leaves()))
    torch.testing.assert_close(*found)


class Called(torch.nn.Module):
    def __init__(self, problem):
        super().__init__()
        self.problem = problem

    def forward(self, *given):
        return self.problem.free(*given)


@pytest.mark.parametrize("name, reduction", losses(3))
def test_exported_with_dynamic_rows_and_back_from_a_file(name, reduction, device):
    problem = Problem(name, reduction, device, torch.float32, rows=6)
    rows = torch.export.Dim("rows", min=4, max=1000)
    given = (*problem.values(), *problem.fixed)
    shapes = tuple({0: rows} if t.dim() and t.shape[0] == 6 and of not in "c" else None
                   for of, t in zip(problem.loss.names, given))
    module = Called(problem)
    program, file = torch.export.export(module, given, dynamic_shapes=(shapes,)), io.BytesIO()
    assert any("sparse_ce" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, file)
    file.seek(0)
    other = Problem(name, reduction, device, torch.float32, rows=17)
    given = (*other.values(), *other.fixed)
    expected = module(*given)
    for again in (program, torch.export.load(file), program.run_decompositions()):
        torch.testing.assert_close(again.module()(*given), expected)


# ------------------------------------------------------------------------------------------------------------ opcheck


def load(path):
    spec = importlib.util.spec_from_file_location("raw_calls", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


raw_calls = load(forked.PROCESSES / "raw_calls.py")
DIFFERENTIABLE = {"logits", "values", "input", "linear_weight", "linear_bias", "grad", "grad_loss", "affine", "loss"}


def valid(name, seed, requires_grad):
    """Returns valid arguments of an op, with another format of the target for most seeds."""
    p = raw_calls.Problem(seed)
    p.rows, p.vocab, p.width, p.entries, p.num_classes, p.classes = 5, 7, 3, 2, None, 7
    p.dtype = p.acc = torch.float32
    given = p.call(name)
    arguments = {a.name: given.get(a.name) for a in getattr(ops, name).default._schema.arguments
                 if a.name in given or not a.has_default_value()}
    if requires_grad:
        for argument in DIFFERENTIABLE & arguments.keys():
            t = arguments[argument]
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                arguments[argument] = t.clone().requires_grad_()
    return arguments


def differentiable(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"sparse_ce::{name}", "Autograd")


OPS = [(name, requires_grad) for name in raw_calls.NAMES for requires_grad in (False, True)
       if not requires_grad or differentiable(name)]


@pytest.mark.parametrize("name, requires_grad, seed", [(*op, 0) for op in OPS] + slow(*(
    (*op, seed) for op in OPS for seed in (1, 2, 3))))
def test_opcheck(name, requires_grad, seed, device):
    """Checks schema, fake tensors, autograd registration and AOT dispatch with dynamic shapes."""
    # Their outputs depend on values in shape, on the device, or are uninitialized.
    of_values = name in ("candidate_logits_backward_sparse", "linear_plan", "large_empty_like")
    more = dict(test_utils="test_schema") if of_values else {}
    torch.library.opcheck(getattr(ops, name).default, (), valid(name, seed, requires_grad), **more)
