"""Asks every function and module of the package to refuse wrong options, and tensors on another device.

If a tensor is on "meta", PyTorch calls the shape function, which returns unwritten memory."""

import collections
import inspect
import typing

import pytest
import torch

import sparse_ce
from cases import Draw
from refusals import OPTIONS, assert_refused
from sparse_ce import SparseTarget, cross_entropy, linear_cross_entropy, masked_mean
from sparse_ce.targets.storage import Parts

ops = torch.ops.sparse_ce


def targets(device):
    draw = Draw(device)
    indices, values = draw.integers(7, 4, 3), draw.uniform(4, 3)
    mask, offsets = torch.ones(4, dtype=torch.bool, device=device), torch.arange(5, device=device) * 3
    return {
        "index": SparseTarget.from_index(indices[:, 0], row_mask=mask),
        "topk": SparseTarget.from_topk(indices, values, row_mask=mask),
        "jagged": SparseTarget.from_jagged(indices.view(-1), values.view(-1), offsets, row_mask=mask),
    }


def parts(target):
    return {name: getattr(target, name) for name in Parts.__slots__}


PARTS = [(form, name) for form, target in targets("cpu").items() for name, t in parts(target).items()
         if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("form,name", PARTS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_part_of_a_target_on_another_device_is_refused(form, name, requires_grad, device):
    draw = Draw(device)
    x, w = draw.normal(4, 7).requires_grad_(requires_grad), draw.normal(7, 7).requires_grad_(requires_grad)
    target = parts(targets(device)[form])
    target = SparseTarget(**{**target, name: target[name].to("meta")})
    for reduction in ("none", "sum", "mean"):
        for call in (lambda x: cross_entropy(x, target, reduction=reduction),
                     lambda x: linear_cross_entropy(x, w, target, reduction=reduction)):
            assert_refused(lambda: call(x), "target", device, f"{name} on meta", ".to(", error=RuntimeError)
    assert_refused(lambda: torch.func.grad(lambda x: cross_entropy(x, target))(x.detach()), f"{name} on meta")
    if name != "indices":
        assert_refused(lambda: cross_entropy(x.to("meta"), target), f"indices on {device}", "meta")


def test_a_normalizer_without_memory_is_refused(device):
    x, target = Draw(device).normal(4, 7), targets(device)["topk"]
    normalizer = torch.ones(1, device="meta")
    assert_refused(lambda: cross_entropy(x, target, normalizer=normalizer), "normalizer", "meta")
    assert_refused(lambda: linear_cross_entropy(x, x[:, :7], target, normalizer=normalizer), "normalizer", "meta")
    assert cross_entropy(x.to("meta"), target.to("meta"), normalizer=normalizer).is_meta


def test_a_mask_on_another_device_is_refused(device):
    x = Draw(device).normal(4, 7)
    assert_refused(lambda: masked_mean(x, torch.ones(4, 7, device="meta")), "mask", f"input, {device}", "got meta")
    assert_refused(lambda: masked_mean(x.to("meta"), torch.ones(4, 7, device=device)), "mask", "meta", f"got {device}")


# ------------------------------------------------------------------------------------- every argument of every function

IN_LISTS = ("cat", "collate")  # Their targets are in a list, as those of torch.cat and default_collate.
FUNCTIONS = {name: f for module in (sparse_ce, sparse_ce.metrics) for name in module.__all__
             if inspect.isfunction(f := getattr(module, name)) and name not in IN_LISTS}


def may_hold_tensors(annotation):
    if typing.get_origin(annotation) is collections.abc.Callable:
        return False
    return annotation in (torch.Tensor, typing.Any) or any(map(may_hold_tensors, typing.get_args(annotation)))


def tensor_arguments(name):
    return [p.name for p in inspect.signature(FUNCTIONS[name]).parameters.values() if may_hold_tensors(p.annotation)]


ARGUMENTS = [(name, argument) for name in FUNCTIONS for argument in tensor_arguments(name)[1:]]


def valid_arguments(name, device):
    """Returns valid arguments of a public function, by name. Each new argument that may be a tensor needs a value."""
    draw = Draw(device)
    x, ids, rows, one = draw.normal(4, 7), draw.integers(7, 4, 3), draw.normal(4), torch.ones((), device=device)
    topk, head, classes = (ids, draw.uniform(4, 3)), draw.normal(7, 7), draw.uniform(7) + 0.5
    values = dict(
        input=x, linear_weight=head, linear_bias=classes, target=topk, indices=ids, labels=ids[:, 0], student=x,
        teacher=(ids, topk[1] / 4), teacher_log_tail=-rows.square() - 1, weight=classes, pos_weight=classes,
        row_mask=rows > 0, row_weight=rows, row_args=rows, normalizer=one, logit_scale=one, logit_bias=one,
        teacher_logit_scale=one, mask=x, offsets=ids[0, :2] * 0 + torch.tensor([0, 4], device=device), index=ids[:, 0],
        propensity=classes, counts=classes, alpha=0.5, k=3, tail="bucket", dim=1, num_rows=100)
    if name == "linear_row_loss":
        values.update(target=ids, teacher=(x + 1, head + 1), return_jsd=True,
                      fn=lambda out, ids, rows: out.log_probs.sum(1) + out.jsd + rows)
    if name.startswith("segment"):
        values.update(input=rows)
    if name == "log_softmax":
        values.update(input=x.to_sparse())
    if name == "candidate_logits":
        values.update(logit_scale=2.0)
    return {name: values[name] for name in inspect.signature(FUNCTIONS[name]).parameters if name in values}


def call(name, given, argument):
    """Calls a function. ``argument`` is that of two alternatives which is passed."""
    given = {key: value for key, value in given.items() if {key, argument} != {"index", "offsets"}}
    if argument == "teacher_logit_scale" and "teacher_log_tail" in given:  # that of a dense teacher
        given = {**given, "teacher": (given["input"] + 1, torch.ones(7, 7, device=given["input"].device))}
        del given["tail"], given["teacher_log_tail"]
    elif name != "linear_row_loss":
        given.pop("teacher_logit_scale", None)
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    positional = [given.pop(key) for key, p in parameters.items()
                  if key in given and p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    return FUNCTIONS[name](*positional, **given)


def moved(value):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), value)


def each_moved(value):
    """Yields the value with all of its tensors on "meta", and with each of them there."""
    yield moved(value)
    if isinstance(value, tuple):
        yield from ((*value[:i], moved(value[i]), *value[i + 1:]) for i in range(len(value)))


def options_of(names):
    """Returns the wrong options of functions or modules."""
    found = {**{name: getattr(sparse_ce, name, None) for name in names}, **{
        name: f for name, f in FUNCTIONS.items() if name in names}}
    return [pytest.param(name, *wrong, id=f"{name}-{wrong[0]}={wrong[1]!r}") for name in names for wrong in REFUSED
            if wrong[0] in inspect.signature(found[name]).parameters]


REFUSED = [*OPTIONS, *(("chunk_rows", rows, repr(rows)) for rows in (0, -1, 1.5, "8", torch.tensor(4), torch.inf))]
LOSSES = [name for name in FUNCTIONS if hasattr(sparse_ce, name)]
MODULES = [name for name in sparse_ce.__all__ if isinstance(getattr(sparse_ce, name), type)
           and issubclass(getattr(sparse_ce, name), torch.nn.Module)]


@pytest.mark.parametrize("name, option, value, word", options_of(LOSSES))
def test_every_function_refuses_a_wrong_option(name, option, value, word, device):
    given = valid_arguments(name, device)
    assert_refused(lambda: call(name, {**given, option: value}, option), option, word)
    if option == "normalizer":
        for reduction in ("sum", "none"):
            assert_refused(lambda: call(name, {**given, option: 4, "reduction": reduction}, option), option, reduction,
                           error=ValueError)


@pytest.mark.parametrize("name, option, value, word", options_of(MODULES))
def test_every_module_refuses_at_construction_what_its_call_would(name, option, value, word):
    """Lets a number of classes pass that may be too large for a call that is not known yet."""
    module = getattr(sparse_ce, name)
    if (option, value) == ("num_classes", 8):
        assert repr(module(num_classes=value))
    else:
        assert_refused(lambda: module(**{option: value}), option,
                       value if option == "num_classes" else word, error=(TypeError, ValueError))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_tensor_argument_has_a_value(name):
    assert set(tensor_arguments(name)) <= set(valid_arguments(name, "cpu"))


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_every_argument_on_another_device_is_refused(name, argument, device):
    given = valid_arguments(name, device)
    call(name, given, argument)
    words = f"sparse_ce: {argument}", device, "meta"
    others = [{}]
    if name == "linear_distillation_loss" and argument not in ("teacher_log_tail", "teacher_logit_scale"):
        others.append(dict(temperature=2.0, tail="zero", teacher_log_tail=None))
    for value in each_moved(given[argument]):
        for other in others:  # Two passes over the head are needed at another temperature.
            assert_refused(lambda: call(name, {**given, argument: value, **other}, argument), *words)
    wrong = {key: given[key] if key == argument else moved(value) for key, value in given.items()}
    if argument == "normalizer":  # It is moved, since a loop may count its rows on the CPU.
        assert call(name, wrong, argument).is_meta
    else:
        assert_refused(lambda: call(name, wrong, argument), *words)


def test_a_small_call_refuses_a_part_on_another_device(device):
    x, (ids, values) = Draw(device).normal(4, 7).requires_grad_(), valid_arguments("cross_entropy", device)["target"]
    for _ in range(3):  # The third forward computes the gradient for the expected grad_output.
        cross_entropy(x, (ids, values)).backward()
    for pair in [*each_moved((ids, values))]:
        for target in (pair, SparseTarget(*pair)):
            for logits in (x, x.detach()):
                assert_refused(lambda: cross_entropy(logits, target), "target", device, "meta", error=RuntimeError)
