"""Tests log-probabilities and losses of rows as modules: every keyword, fields, errors, copies, graphs."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist

import sparse_ce
from cases import Draw
from close import assert_bitwise_equal
from refusals import assert_refused
from select_cases import ALL
from sparse_ce import LinearRowLoss, LinearSelectedLogProbs, SelectedLogProbs, SparseTarget

# Each keyword has another value than its default.
NUMBERS = dict(ignore_index=3, logit_scale=0.7, softcap=5.0, num_classes=30, padding_value=-2.0, group=None,
               vocab_start=None)
OF_CALLS = "normalizer", "group", "vocab_start"  # None in this test as well
CHUNKS = dict(logits_dtype=torch.float32, chunk_rows=5)
TEACHER = dict(teacher_logit_scale=0.9, teacher_softcap=4.0, beta=0.3, return_forward_kl=True, return_reverse_kl=True,
               return_jsd=True, return_tv=True)


def of_rows(out, target, by):
    """Returns a loss of each row that uses every output and the row argument. Pickling needs it at module level."""
    divergences = [t for t in (out.forward_kl, out.reverse_kl, out.jsd, out.tv) if t is not None]
    of_row = 0.3 * out.entropy + 0.01 * out.mean_logit - 0.2 * out.collision
    return by * out.log_probs.sum(1) + out.log_tail.exp() + of_row + sum(divergences)


def with_aux(out, target, by):
    return of_rows(out, target, by), {"lse": out.lse, "argmax": out.argmax}


MODULES = {  # the module of options, the equivalent function, its keywords
    "selected": (SelectedLogProbs, sparse_ce.selected_log_probs, dict(NUMBERS, inplace="backward", **ALL)),
    "linear": (LinearSelectedLogProbs, sparse_ce.linear_selected_log_probs, dict(NUMBERS, **CHUNKS, **ALL)),
    "rows": (lambda **options: LinearRowLoss(with_aux if options.get("has_aux") else of_rows, **options),
             sparse_ce.linear_row_loss,
             dict(NUMBERS, **CHUNKS, **ALL, **TEACHER, reduction="sum", normalizer=None, has_aux=True)),
}
each_module = pytest.mark.parametrize("name", MODULES)
FIELDS = dict(ALL, padding_value=0.0)  # the outputs that `of_rows` reads
ROW_FIELDS = dict(FIELDS, return_tv=True, return_jsd=True)  # a teacher needs a divergence


def example(name, device, dtype=torch.float64):
    """Returns (tensors for the function, tensors for the module, keywords that both take)."""
    draw = Draw(device)
    hidden, weight, bias = (draw.normal(*s, dtype=dtype) for s in ((3, 4, 6), (33, 6), (33,)))
    ids, by = draw.integers(30, 3, 4, 2), draw.normal(3, 4, dtype=dtype)
    ids[0, 1], ids[2, 2, 1] = 3, 3
    if name == "selected":
        return (draw.normal(3, 4, 33, dtype=dtype), ids), {}
    if name == "linear":
        return (hidden, weight, ids), dict(linear_bias=bias)
    teacher = draw.normal(3, 4, 2, dtype=dtype), draw.normal(33, 2, dtype=dtype)
    return (hidden, weight, ids, by), dict(linear_bias=bias, teacher=teacher, teacher_bias=bias)


def results(out):
    """Returns all tensors in a result."""
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]


def same(a, b):
    a, b = results(a), results(b)
    assert len(a) == len(b) > 0
    for ours, theirs in zip(a, b):
        assert_bitwise_equal(ours, theirs)


@each_module
def test_the_module_has_every_keyword_of_its_function_with_its_default(name):
    module, function, options = MODULES[name]
    of_function = {p.name: p.default for p in inspect.signature(function).parameters.values()
                   if p.kind == p.KEYWORD_ONLY and p.name not in ("linear_bias", "teacher", "teacher_bias")}
    kind = type(module())
    of_module = {p.name: p.default for p in inspect.signature(kind).parameters.values() if p.name != "fn"}
    assert of_module == of_function and set(options) == set(of_function)
    assert [k for k, v in options.items() if v == of_function[k] and k not in OF_CALLS] == []


@each_module
def test_the_module_passes_every_keyword_on(name, device):
    module, function, options = MODULES[name]
    tensors, named = example(name, device)
    full = ROW_FIELDS if name == "rows" else {}
    for keyword, value in options.items():
        given = {**full, keyword: value}
        fn = (with_aux if "has_aux" in given else of_rows,) if name == "rows" else ()
        same(module(**given)(*tensors, **named), function(*fn, *tensors, **named, **given))
    if name != "selected":  # only these compute a gradient
        leaves = [t.clone().requires_grad_() for t in tensors[:2]]
        out = module(**{**full, **CHUNKS})(*leaves, *tensors[2:], **named)
        sum(t.exp().sum() for t in results(out) if t.requires_grad).backward()
        assert all(t.grad.any() for t in leaves)


@each_module
def test_it_shows_its_options_and_keeps_nothing_in_its_state(name):
    module, _, options = MODULES[name]
    made = module(**options)
    assert made.state_dict() == {} and list(made.parameters()) == []
    for keyword, value in options.items():
        assert value is None or f"{keyword}={value!r}" in repr(made)
    if name == "rows":
        assert "fn=with_aux, " in repr(made)


@each_module
def test_it_can_be_copied_pickled_and_saved(name, device):
    module, _, options = MODULES[name]
    tensors, named = example(name, device)
    made = module(**options).to(device).train(False)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(file, weights_only=False)):
        same(other(*tensors, **named), made(*tensors, **named))
        assert repr(other) == repr(made)


@pytest.fixture
def group():
    """Yields a group of this process alone, which holds all classes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name, of_sequence", [
    *((name, False) for name in MODULES), *((name, True) for name in MODULES if name != "selected")])
def test_it_holds_a_process_group_which_copies_and_files_know_by_its_name(name, of_sequence, group):
    module, _, _ = MODULES[name]
    group = sparse_ce.SequenceGroup(group) if of_sequence else group
    tensors, named = example(name, "cpu")
    full = ROW_FIELDS if name == "rows" else {}
    made = module(group=group, vocab_start=0, num_classes=33, **full)
    file = pickle.dumps(made)
    for other in (made, copy.deepcopy(made), copy.copy(made), pickle.loads(file)):
        assert other.options["group"] == group and type(other.options["group"]) is type(group)
        assert other.state_dict() == {}
        for ours, exact in zip(results(other(*tensors, **named)), results(module(**full)(*tensors, **named))):
            torch.testing.assert_close(ours, exact)
    assert copy.deepcopy(module(group=sparse_ce.SequenceGroup(None), **full)).options["group"].group is None
    dist.destroy_process_group()
    assert_refused(lambda: pickle.loads(file), "group must exist in the process that a module is loaded into",
                   error=RuntimeError)


@pytest.mark.parametrize("scale", ["rows", "learned"])
@each_module
def test_33_a_scale_of_the_call_replaces_that_of_the_module(name, scale, device):
    module, function, _ = MODULES[name]
    tensors, named = example(name, device)
    draw = Draw(device, 1)
    given = (draw.uniform(3, 4, low=0.5, high=2, dtype=torch.float64) if scale == "rows"
             else torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True))
    if scale == "learned":  # divergences from a teacher require a fixed scale
        named = {k: t for k, t in named.items() if k == "linear_bias"}
    fn, full = ((of_rows,), ROW_FIELDS if "teacher" in named else FIELDS) if name == "rows" else ((), {})
    out = module(logit_scale=3.0, **full)(*tensors, **named, logit_scale=given)
    same(out, function(*fn, *tensors, **named, logit_scale=given, **full))
    if scale == "learned":
        assert torch.autograd.grad(results(out)[-1].sum(), given)[0] != 0


def test_the_normalizer_of_the_call_replaces_that_of_the_module(device):
    tensors, named = example("rows", device)
    by_one = LinearRowLoss(of_rows, reduction="sum", **ROW_FIELDS)(*tensors, **named)
    torch.testing.assert_close(LinearRowLoss(of_rows, **ROW_FIELDS)(*tensors, **named, normalizer=7), by_one / 7)
    torch.testing.assert_close(LinearRowLoss(of_rows, normalizer=3, **ROW_FIELDS)(*tensors, **named), by_one / 3)
    torch.testing.assert_close(
        LinearRowLoss(of_rows, normalizer=3, **ROW_FIELDS)(*tensors, **named, normalizer=torch.tensor(7)), by_one / 7)


class Weighted(torch.nn.Module):
    def __init__(self, requires_grad=False):
        super().__init__()
        self.register_buffer("of_classes", torch.linspace(0.5, 2, 33))
        self.factor = torch.nn.Parameter(torch.tensor(2.0), requires_grad=requires_grad)

    def forward(self, out, labels):
        return -self.factor * self.of_classes[labels] * out.log_probs


def test_a_function_that_is_a_module_is_a_part_of_it(device):
    """Checks that its buffers move with the module. A learned parameter in it would get no gradient, and raises an
    error."""
    draw = Draw(device)
    hidden, weight, labels = draw.normal(8, 6).requires_grad_(), draw.normal(33, 6), draw.integers(33, 8)
    made = LinearRowLoss(Weighted(), reduction="sum").to(device)
    assert set(made.state_dict()) == {"fn.of_classes", "fn.factor"} and "Weighted()" in repr(made)
    expected = -2 * (made.fn.of_classes[labels] * (hidden @ weight.T).log_softmax(-1)[range(8), labels]).sum()
    torch.testing.assert_close(made(hidden, weight, labels), expected)
    learns = LinearRowLoss(Weighted(requires_grad=True)).to(device)
    assert_refused(lambda: learns(hidden, weight, labels), "fn must receive tensors that require grad as row arguments")


def test_what_else_is_refused_at_construction():
    for module, _, options in MODULES.values():
        assert_refused(lambda: module(padding_value="0"), "padding_value", "'0'", error=TypeError)
        assert_refused(lambda: module(logit_scale=torch.tensor(1.0)), "logit_scale", "Tensor", error=TypeError)
        if "chunk_rows" in options:
            assert_refused(lambda: module(chunk_rows=0), "chunk_rows", "0", error=ValueError)
    assert_refused(lambda: LinearRowLoss(None), "fn must be a function", "None", error=TypeError)
    assert_refused(lambda: LinearRowLoss(of_rows, reduction="sum", normalizer=3), "normalizer", "'sum'",
                   error=ValueError)


@each_module
def test_compiled_it_is_one_graph(name, device, fresh_compiler):
    module = MODULES[name][0](**(ROW_FIELDS if name == "rows" else FIELDS), **({} if name == "selected" else CHUNKS))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    tensors, named = example(name, device)
    grads = []
    for run in (module, compiled):
        leaves = [t.clone().requires_grad_() if t.dtype.is_floating_point else t for t in tensors]
        out = results(run(*leaves, **named))
        differentiable = [t.sum() for t in out if t.requires_grad]
        grads.append([*out, *torch.autograd.grad(sum(differentiable), [t for t in leaves if t.requires_grad])])
    for ours, eager in zip(*grads):
        torch.testing.assert_close(ours, eager)


@each_module
def test_exported_with_dynamic_rows(name, device, fresh_compiler):
    module = MODULES[name][0](**FIELDS, **({} if name == "selected" else CHUNKS))
    tensors, named = example(name, device)
    named = {"linear_bias": named["linear_bias"]} if named else {}
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = tuple(None if t.dim() == 2 and t.shape[0] == 33 else {0: batch} for t in tensors)
    if name == "rows":
        shapes = (*shapes[:3], shapes[3:])
    program = torch.export.export(module, tensors, named, dynamic_shapes=dict(zip(
        inspect.signature(module.forward).parameters, shapes)) | {k: None for k in named})
    larger = [t if t.dim() == 2 and t.shape[0] == 33 else torch.cat([t, t[:2]]) for t in tensors]
    for ours, eager in zip(results(program.module()(*larger, **named)), results(module(*larger, **named))):
        torch.testing.assert_close(ours, eager)


def test_a_jagged_set_of_ids_through_the_module(device):
    draw = Draw(device)
    hidden, weight = draw.normal(3, 6), draw.normal(33, 6)
    kept = SparseTarget.from_jagged(draw.integers(33, 5), None, torch.tensor([0, 2, 2, 5], device=device))
    out = LinearSelectedLogProbs()(hidden, weight, kept)
    same(out, SelectedLogProbs()(hidden @ weight.T, kept))
