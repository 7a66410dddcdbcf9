"""Tests options that are easily misread: tensors, parameters and bools for numbers, signs, and options of module
constructors."""

import numpy as np
import pytest
import torch
from torch import nn

import sparse_ce
from cases import Draw
from refusals import assert_refused, good
from sparse_ce import LinearSparseCrossEntropyLoss, SparseCrossEntropyLoss, cross_entropy, linear_cross_entropy

# The schema determines the options: floats, and floats together with integers.
OF_THE_SCHEMA = {a.name: str(a.type) for a in torch.ops.sparse_ce.forward.default._schema.arguments}
REAL = [name for name, kind in OF_THE_SCHEMA.items() if "float" in kind]
NUMBERS = (*REAL, *(name for name, kind in OF_THE_SCHEMA.items() if "int" in kind), "chunk_rows")


def calls(device, **options):
    """Returns calls of the losses that have these options."""
    x, labels = good(device)
    head = Draw(device).normal(7, 7)
    linear = [lambda: linear_cross_entropy(x, head, labels, **options)]
    return linear if "chunk_rows" in options else [lambda: cross_entropy(x, labels, **options), *linear]


def modules(**options):
    linear = [lambda: LinearSparseCrossEntropyLoss(**options)]
    return linear if "chunk_rows" in options else [lambda: SparseCrossEntropyLoss(**options), *linear]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_tensor_where_a_number_is_meant_is_refused(name, device):
    default = 1.0 if name in ("logit_scale", "softcap") else 1 if name == "chunk_rows" else 0.0
    for value in (torch.tensor([default, 0.5]), torch.tensor(default), nn.Parameter(torch.tensor(float(default)))):
        word = "ensor" if name == "chunk_rows" else type(value).__name__
        of_functions = () if name == "logit_scale" else calls(device, **{name: value})  # the functions accept a tensor
        for call in (*of_functions, *modules(**{name: value})):
            assert_refused(call, name, word, error=(TypeError, ValueError))
    if name == "softcap":  # the message explains how to learn it
        assert_refused(calls(device, **{name: nn.Parameter(torch.tensor(1.0))})[0], "input", error=TypeError)


@pytest.mark.parametrize("name", NUMBERS)  # a normalizer may count one item as True
@pytest.mark.parametrize("value", [True, False, np.True_])
def test_a_bool_where_a_number_is_meant_is_refused(name, value, device):
    for call in (*calls(device, **{name: value}), *modules(**{name: value})):
        assert_refused(call, name, repr(value), error=(TypeError, ValueError))


def test_numpy_scalars_are_numbers(device):
    options = dict(label_smoothing=np.float32(0.25), z_loss=np.float64(0.5), logit_scale=np.float16(2.0),
                   softcap=np.int64(3), ignore_index=np.int32(2), num_classes=np.uint8(6), normalizer=np.int64(4))
    plain = {name: value.item() for name, value in options.items()}
    for ours, same in zip(calls(device, **options), calls(device, **plain)):
        assert torch.equal(ours(), same())
    for module in modules(**options):
        module()


NEGATIVE = [("z_loss", -1e-4), ("z_loss", -1), ("normalizer", -1), ("normalizer", -0.5)]
NOT_FINITE = [(name, value) for name in (*REAL, "normalizer")
              for value in (float("nan"), float("inf"), -float("inf"), np.float32("nan"))]


@pytest.mark.parametrize("name,value", [*NEGATIVE, *NOT_FINITE])
def test_a_number_of_the_wrong_sign_or_none_at_all_is_refused(name, value, device):
    for call in (*calls(device, **{name: value}), *modules(**{name: value})):
        assert_refused(call, name, value, error=ValueError)
    if name in REAL:
        x, labels = good(device)
        assert_refused(lambda: torch.ops.sparse_ce.forward(x, labels, **{name: float(value)}), name, value)


@pytest.mark.parametrize("normalizer,word", [
    (torch.tensor([3.0, 4.0]), "equal elements"), (torch.tensor([[3], [3], [2]]), "equal elements"),
    (torch.tensor(-1), "-1"), (torch.tensor([-2.0, -2.0]), "-2.0"), (torch.tensor(float("nan")), "nan"),
    (torch.tensor([float("inf")]), "inf"), (torch.tensor([5.0, float("nan")]), "equal elements")], ids=str)
def test_the_values_of_a_normalizer_on_the_host_are_looked_at(normalizer, word, device):
    for call in (*calls(device, normalizer=normalizer), *modules(normalizer=normalizer)):
        assert_refused(call, "normalizer", word, error=ValueError)
    x, labels = good(device)
    module = SparseCrossEntropyLoss()
    assert_refused(lambda: module(x, labels, normalizer=normalizer), "normalizer", word, error=ValueError)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.float64])
def test_equal_elements_are_a_normalizer(shape, dtype, device):
    for call, plain in zip(calls(device, normalizer=torch.full(shape, 3, dtype=dtype)), calls(device, normalizer=3)):
        assert torch.equal(call(), plain())


def test_a_normalizer_inside_a_graph_or_a_transform_is_not_looked_at(device):
    """Checks that the first element is used, because the values are not known while tracing."""
    x, labels = good(device)
    expected = cross_entropy(x, labels, normalizer=3)

    def f(x, n):
        return cross_entropy(x, labels, normalizer=n)

    unequal = torch.tensor([3.0, 4.0], device=device)
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(x, unequal), expected)
    each = torch.func.vmap(f, in_dims=(None, 0))(x, torch.stack([unequal, 2 * unequal]))
    torch.testing.assert_close(each, torch.stack([expected, expected / 2]))


def test_changing_numbers_of_items_compile_twice_at_most(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, y, n: cross_entropy(x, y, normalizer=n), backend=counter, fullgraph=True)
    x, labels = good(device)
    for n in (3, 7, 11, 20):
        torch.testing.assert_close(compiled(x, labels, n), cross_entropy(x, labels, normalizer=n))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


# -------------------------------------------------------------------------------------------------------------- modules


def test_modules_refuse_what_else_can_be_seen_at_construction():
    refused = [(dict(reduction="sum", normalizer=3), "normalizer", "'sum'"),
               (dict(weight=[1.0, 2.0]), "weight", "list"), (dict(weight=torch.ones(2, 2)), "weight", "[2, 2]"),
               (dict(weight=torch.ones(2).long()), "weight", "int64"),
               (dict(weight=nn.Parameter(torch.ones(2))), "weight", "detach()")]
    for options, *words in refused:
        for module in modules(**options):
            assert_refused(module, *words, error=(TypeError, ValueError))
    assert_refused(lambda: LinearSparseCrossEntropyLoss(chunk_rows=0), "chunk_rows", "0", error=ValueError)
    for dim in ("rows", 1.0, (0, "1"), True, (0, 0)):
        assert_refused(lambda: sparse_ce.MaskedMean(dim=dim), "dim", dim, error=(TypeError, ValueError))


@pytest.mark.parametrize("dim", [None, "1", 1.0, True, (1,)])
def test_the_dimension_of_a_sparse_softmax_is_an_integer(dim, device):
    rows = torch.eye(3, device=device).to_sparse()
    assert_refused(lambda: sparse_ce.log_softmax(rows, dim), "dim", repr(dim), error=TypeError)


@pytest.mark.parametrize("module", [SparseCrossEntropyLoss, LinearSparseCrossEntropyLoss])
def test_a_module_says_what_it_holds_whoever_gave_it(module):
    text = repr(module(z_loss=0.5))
    assert all(part in text for part in ("z_loss=0.5", "reduction='mean'", "label_smoothing=0.0", "ignore_index=-100"))
