"""Tests that wrong arguments of binary cross entropy are named, and the modules."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from sparse_ce import (
    LinearSparseBCEWithLogitsLoss,
    SparseBCEWithLogitsLoss,
    SparseTarget,
    binary_cross_entropy_with_logits,
    linear_binary_cross_entropy,
)

ops = torch.ops.sparse_ce
ROWS, CLASSES, WIDTH = 3, 5, 4
zeros = torch.zeros
INF, NAN = math.inf, math.nan


def learned(*shape):
    return zeros(shape).requires_grad_()


OF_BOTH = [
    (dict(gamma="2"), TypeError, "gamma must be a number or a pair of numbers, got '2'"),
    (dict(gamma=None), TypeError, "gamma must be a number or a pair of numbers, got None"),
    (dict(gamma=(1.0, 2.0, 3.0)), TypeError, r"gamma must be a number or a pair of numbers, got \(1.0, 2.0, 3.0\)"),
    (dict(gamma=(1.0, "2")), TypeError, "gamma must be a number or a pair of numbers"),
    (dict(gamma=torch.tensor(2.0)), TypeError, "gamma must be a number or a pair of numbers, got a Tensor"),
    (dict(gamma=True), TypeError, "gamma must be a number or a pair of numbers, got True"),
    (dict(gamma=-1), ValueError, "gamma must be finite and not negative, got -1"),
    (dict(gamma=(0.0, INF)), ValueError, r"gamma must be finite and not negative, got \(0.0, inf\)"),
    (dict(gamma=NAN), ValueError, "gamma must be finite and not negative, got nan"),
    (dict(clip="0"), TypeError, "clip must be a number, got '0'"),
    (dict(clip=None), TypeError, "clip must be a number, got None"),
    (dict(clip=1.0), ValueError, r"clip must be in \[0, 1\), got 1.0"),
    (dict(clip=-0.05), ValueError, r"clip must be in \[0, 1\), got -0.05"),
    (dict(clip=NAN), ValueError, r"clip must be in \[0, 1\), got nan"),
    (dict(label_smoothing=1.5), ValueError, r"label_smoothing must be .*\[0, 1\]"),
    (dict(ignore_index=0.5), TypeError, "ignore_index must be"),
    (dict(num_classes=0), ValueError, "num_classes must be"),
    (dict(num_classes=CLASSES + 1), ValueError, "num_classes must be in"),
    (dict(reduction="avg"), ValueError, "reduction must be 'none', 'sum', 'mean' or 'batchmean', got 'avg'"),
    (dict(reduction="sum", normalizer=2), ValueError,
     "normalizer must be None unless reduction is 'mean' or 'batchmean', got reduction='sum'"),
    (dict(normalizer=-1), ValueError, "normalizer must be finite and not negative, got -1"),
    (dict(row_mask=[True] * ROWS), TypeError, "row_mask must be a bool tensor"),
    (dict(row_mask=zeros(2).bool()), ValueError, r"row_mask must be of the leading shape \[3\], got \[2\]"),
    (dict(row_weight=zeros(2)), ValueError, r"row_weight must be of the leading shape \[3\], got \[2\]"),
    (dict(row_weight=1.0), TypeError, "row_weight must be a tensor of a floating dtype"),
]
for name in ("weight", "pos_weight"):
    OF_BOTH += [
        ({name: [1.0] * CLASSES}, TypeError, f"{name} must be a tensor, got list"),
        ({name: zeros(CLASSES).long()}, TypeError, f"{name} must be of a floating dtype, got torch.int64"),
        ({name: zeros(4)}, ValueError, rf"{name} must be \(5,\), one weight per class, got \[4\]"),
        ({name: zeros(1, CLASSES)}, ValueError, rf"{name} must be \(5,\), one weight per class, got \[1, 5\]"),
        ({name: zeros(CLASSES, device="meta")}, RuntimeError, f"{name} must be on the device of input, cpu, got meta"),
        ({name: learned(CLASSES)}, ValueError,
         rf"{name} must be a tensor that does not require grad, got one that does; pass {name}.detach\(\)"),
    ]
for name in ("logit_scale", "logit_bias"):
    OF_BOTH += [
        ({name: INF}, ValueError, rf"{name} must be a finite number or a tensor \(\), got inf"),
        ({name: NAN}, ValueError, rf"{name} must be a finite number or a tensor \(\), got nan"),
        ({name: "1"}, TypeError, rf"{name} must be a finite number or a tensor \(\), got '1'"),
        ({name: None}, TypeError, rf"{name} must be a finite number or a tensor \(\), got None"),
        ({name: torch.tensor(1)}, TypeError, f"{name} must be of a floating dtype, got torch.int64"),
        ({name: zeros(ROWS)}, ValueError, rf"{name} must be a number or a tensor \(\), got shape \[3\]"),
        ({name: zeros((), device="meta")}, RuntimeError, f"{name} must be on the device of input, cpu, got meta"),
    ]
both = pytest.mark.parametrize("options, error, message", OF_BOTH, ids=[
    f"{i} {next(reversed(options))}" for i, (options, *_) in enumerate(OF_BOTH)])


def of_logits(**options):
    arguments = {**dict(input=zeros(ROWS, CLASSES), target=torch.arange(ROWS)), **options}
    return binary_cross_entropy_with_logits(arguments.pop("input"), arguments.pop("target"), **arguments)


def of_head(**options):
    arguments = {**dict(input=zeros(ROWS, WIDTH), linear_weight=zeros(CLASSES, WIDTH), target=torch.arange(ROWS)),
                 **options}
    first = [arguments.pop(name) for name in ("input", "linear_weight", "target")]
    return linear_binary_cross_entropy(*first, **arguments)


@both
def test_options_of_logits(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: {message}"):
        of_logits(**options)


@both
def test_options_of_a_head(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: {message}"):
        of_head(**options)


@pytest.mark.parametrize("options, error, message", [
    (dict(input=zeros(())), ValueError, r"input must be \(..., V\), got shape \[\]"),
    (dict(input=zeros(ROWS, CLASSES).long()), TypeError, "input must be float16"),
    (dict(input=zeros(ROWS, 0)), ValueError, "input must have at least one class"),
    (dict(inplace=True), ValueError, "inplace must be False, 'backward' or 'forward', got True"),
    (dict(target=zeros(2).long()), ValueError, "target must"),
    (dict(target=zeros(ROWS, CLASSES)), (TypeError, ValueError), "target must"),
    (dict(target=torch.tensor([0, 1, CLASSES])), RuntimeError, r"target must have indices in \[0, 5\)"),
    (dict(target=(zeros(ROWS, 2).long(), zeros(ROWS, 3))), ValueError, ""),
    (dict(vocab_start=0), ValueError, "vocab_start must be None without a group"),
    (dict(group="tp"), TypeError, "group must be a torch.distributed.ProcessGroup"),
], ids=str)
def test_arguments_of_logits(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: {message}"):
        of_logits(**options)


@pytest.mark.parametrize("options, error, message", [
    (dict(linear_weight=zeros(CLASSES, 9)), ValueError, r"linear_weight must be \(V, 4\) to match input, got \[5, 9\]"),
    (dict(linear_weight=zeros(CLASSES, 2, WIDTH)), ValueError, r"linear_weight must be \(V, 4\)"),
    (dict(linear_weight=zeros(0, WIDTH)), ValueError, "linear_weight must have at least one class"),
    (dict(linear_bias=zeros(4)), ValueError, r"linear_bias must be \(5,\), got \[4\]"),
    (dict(chunk_classes=0), ValueError, "chunk_classes must be"),
    (dict(chunk_classes=2.5), ValueError, "chunk_classes must be"),
    (dict(logits_dtype=torch.float16), ValueError, "logits_dtype must be"),
    (dict(target=torch.tensor([0, 1, CLASSES])), RuntimeError, r"target must have indices in \[0, 5\)"),
    (dict(vocab_start=0), ValueError, "vocab_start must be None without a group"),
], ids=str)
def test_arguments_of_a_head(options, error, message):
    with pytest.raises(error, match=f"sparse_ce: {message}"):
        of_head(**options)


def test_an_index_of_an_ignored_row_may_be_any():
    mask = torch.tensor([True, False, True])
    for call in (of_logits, of_head):
        loss = call(target=torch.tensor([0, 99, 1]), row_mask=mask)
        torch.testing.assert_close(loss, torch.tensor(math.log(2)))


def test_numpy_scalars_are_numbers():
    options = dict(label_smoothing=np.float32(0.25), logit_scale=np.float16(2.0), logit_bias=np.int64(3),
                   gamma=(np.float64(2.0), np.int32(1)), clip=np.float32(0.125), ignore_index=np.int32(2),
                   num_classes=np.uint8(4), normalizer=np.int64(4))
    plain = {name: tuple(v.item() for v in value) if name == "gamma" else value.item()
             for name, value in options.items()}
    for call in (of_logits, of_head):
        assert torch.equal(call(**options), call(**plain))
    weight = torch.linspace(-1, 1, 300 * WIDTH).view(300, WIDTH)
    losses = [of_head(linear_weight=weight, input=torch.ones(ROWS, WIDTH), chunk_classes=size)
              for size in (np.uint8(50), 50)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("options", [dict(gamma=[1.0, 2.0]), dict(logit_scale=torch.ones(1)),
                                     dict(logit_bias=torch.ones(1, 1).bfloat16())], ids=str)
def test_a_list_and_a_tensor_of_one_element_are_accepted(options):
    plain = {name: (1.0, 2.0) if name == "gamma" else 1.0 for name in options}
    for call in (of_logits, of_head):
        assert torch.equal(call(**options), call(**plain))


# ------------------------------------------------------------------------------------------------------------ raw calls


def raw(**options):
    arguments = {**dict(logits=zeros(ROWS, CLASSES), indices=torch.arange(ROWS)), **options}
    return ops.binary_cross_entropy(arguments.pop("logits"), arguments.pop("indices"), **arguments)


@pytest.mark.parametrize("options, message", [
    (dict(logits=zeros(ROWS, 0)), r"logits must have at least one class, got \[3, 0\]"),
    (dict(num_classes=6), r"num_classes must be in \[1, 5\] \(the columns of logits\), got 6"),
    (dict(num_classes=0), r"num_classes must be in \[1, 5\]"),
    (dict(first_class=0), "num_classes must be the number of classes of all shards if first_class is given"),
    (dict(first_class=-1, num_classes=9), "first_class must be in"),
    (dict(affine=zeros(3)), r"affine must be \(2,\), got \[3\]"),
    (dict(affine=zeros(2).bfloat16()), "affine must be of dtype Float, got BFloat16"),
    (dict(label_smoothing=2.0), "label_smoothing must be"),
    (dict(label_smoothing=NAN), "label_smoothing must be"),
    (dict(gamma_positive=-1.0), "gamma_positive must be"),
    (dict(gamma_negative=INF), "gamma_negative must be"),
    (dict(clip=1.0), "clip must be"),
    (dict(clip=NAN), "clip must be"),
    (dict(indices=torch.tensor([0, 1, 5])), r"target must have indices in \[0, 5\)"),
], ids=str)
def test_raw_arguments(options, message):
    with pytest.raises(RuntimeError, match=message):
        raw(**options)


@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_a_learned_weight_is_named_by_the_ops(name):
    message = rf"{name} must be a tensor that does not require grad, got one that does; pass {name}.detach\(\)"
    with pytest.raises(RuntimeError, match=message):
        raw(logits=learned(ROWS, CLASSES), **{name: learned(CLASSES)})
    with pytest.raises(RuntimeError, match=message):
        ops.linear_binary_cross_entropy(learned(ROWS, WIDTH), zeros(CLASSES, WIDTH), None, torch.arange(ROWS),
                                        **{name: learned(CLASSES)})


def test_what_may_not_be_overwritten():
    def overwrite(logits, **options):
        options = {"grad": zeros(ROWS), "indices": torch.arange(ROWS), **options}
        ops.binary_cross_entropy_with_gradient_(options.pop("grad"), logits, **options)

    memory, whole = zeros(ROWS, 2 * CLASSES), zeros(40)
    overwrite(memory[:, :CLASSES])
    with pytest.raises(RuntimeError, match="logits must have column stride 1 to be overwritten, got 2"):
        overwrite(memory[:, ::2])
    with pytest.raises(RuntimeError, match="logits must have non-overlapping rows to be overwritten, got row stride 0"):
        overwrite(zeros(1, CLASSES).expand(ROWS, -1))
    logits = whole[5:20].view(ROWS, CLASSES)
    for name, view in (("grad", whole[4:7]), ("pos_weight", whole[3:8]), ("weight", whole[19:24]),
                       ("affine", whole[4:6])):
        with pytest.raises(RuntimeError, match=name):
            overwrite(logits, **{name: view})
    with pytest.raises(RuntimeError, match="values"):
        overwrite(logits, indices=zeros(ROWS, 1).long(), values=whole[17:20].view(ROWS, 1))


# -------------------------------------------------------------------------------------------------------------- modules

MODULES = [SparseBCEWithLogitsLoss, LinearSparseBCEWithLogitsLoss]
every_module = pytest.mark.parametrize("module", MODULES)
CALLED = {SparseBCEWithLogitsLoss: lambda m, **o: m(torch.linspace(-2, 2, 15).view(3, 5), torch.arange(3), **o),
          LinearSparseBCEWithLogitsLoss: lambda m, **o: m(torch.eye(3), torch.linspace(-2, 2, 15).view(5, 3),
                                                          torch.arange(3), **o)}


@every_module
@pytest.mark.parametrize("options, error, message", [case for case in OF_BOTH if not {
    "row_mask", "row_weight"} & case[0].keys() and "device of input" not in case[2] and "one weight" not in case[2]
    and not (case[0].get("num_classes") == CLASSES + 1)], ids=str)
def test_a_module_checks_its_options(options, error, message, module):
    name = next(reversed(options))
    tensors = isinstance(options[name], torch.Tensor) and name in ("logit_scale", "logit_bias")
    with pytest.raises((TypeError, ValueError) if tensors or options[name] is None else error,
                       match=f"sparse_ce: .*{name}"):
        module(**options)


@every_module
@pytest.mark.parametrize("name", ["logit_scale", "logit_bias"])
def test_a_learned_scalar_is_an_argument_of_the_call(name, module):
    """Checks that a module refuses a tensor, which neither `parameters()` nor `to()` would find."""
    for value in (torch.tensor(0.5), torch.nn.Parameter(torch.tensor(0.5))):
        with pytest.raises(TypeError, match=f"sparse_ce: {name} must be"):
            module(**{name: value})
    scalar = torch.tensor(0.5, requires_grad=True)
    loss = CALLED[module](module(**{name: 0.7}), **{name: scalar})
    assert torch.equal(loss, CALLED[module](module(**{name: 0.5})))
    assert torch.autograd.grad(loss, scalar)[0] != 0


@every_module
def test_copies_pickles_and_states(module):
    weight, pos_weight = torch.linspace(0.5, 1, 5), torch.linspace(1, 3, 5)
    one = module(weight=weight, pos_weight=pos_weight, gamma=(0.0, 2.0), reduction="batchmean", normalizer=3)
    expected = CALLED[module](one)
    assert "gamma=(0.0, 2.0)" in repr(one) and "reduction='batchmean'" in repr(one)
    assert one.state_dict().keys() == {"weight", "pos_weight"} and not list(one.parameters())
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(CALLED[module](other), expected)
    other = module(weight=torch.ones(5), pos_weight=torch.ones(5), gamma=(0.0, 2.0), reduction="batchmean",
                   normalizer=3)
    other.load_state_dict(one.state_dict())
    assert torch.equal(CALLED[module](other), expected)
    assert one.double().pos_weight.dtype == torch.float64 and one.to("meta").weight.is_meta
    assert module().state_dict() == {}


@every_module
def test_arguments_of_a_call_replace_those_of_the_module(module):
    call = CALLED[module]
    assert torch.equal(call(module(normalizer=3), normalizer=7), call(module(normalizer=7)))
    assert torch.equal(call(module(logit_scale=3.0, logit_bias=2.0), logit_scale=0.5, logit_bias=0.0),
                       call(module(logit_scale=0.5)))
    mask, weight = torch.tensor([True, False, True]), torch.tensor([1.0, 2.0, 3.0])
    losses = call(module(reduction="none"))
    torch.testing.assert_close(call(module(reduction="sum"), row_mask=mask, row_weight=weight),
                               losses[0] + 3 * losses[2])


def test_shapes_of_class_weights_at_construction():
    for name, more in (("weight", ""), ("pos_weight", ", or one number")):
        with pytest.raises(ValueError, match=(rf"sparse_ce: {name} must be \(V,\), one weight per class{more}, got "
                                              r"\[1, 5\]")):
            SparseBCEWithLogitsLoss(**{name: zeros(1, 5)})


def test_a_dense_target_is_named():
    with pytest.raises((TypeError, ValueError), match="sparse_ce: target must"):
        of_logits(target=torch.ones(ROWS, CLASSES))
    loss = of_logits(target=SparseTarget.from_dense(torch.ones(ROWS, CLASSES)))
    torch.testing.assert_close(loss, torch.tensor(math.log(2)))
