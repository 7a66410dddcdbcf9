"""Tests every op with invalid arguments, individually and at random: an error or the right result, never a crash."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
from cases import Draw
from close import assert_bitwise_equal
from refusals import assert_refused

ops = torch.ops.sparse_ce
PROGRAM = forked.PROCESSES / "raw_calls.py"
FILLED = "max_malloc_fill_size=1048576:malloc_fill_byte=254:allocator_may_return_null=1:max_allocation_size_mb=2048"


def run(first, calls, folder):
    """Runs the calls in a process whose fresh memory contains no zeros."""
    package = importlib.util.find_spec("sparse_ce").origin
    told = folder / "seed"
    environment = {**os.environ, "PYTHONPATH": str(Path(package).parent.parent), "OMP_NUM_THREADS": "1",
                   "MALLOC_PERTURB_": "1", "SPARSE_CE_BLOCK_CACHE": "0",
                   "ASAN_OPTIONS": ":".join(filter(None, [os.environ.get("ASAN_OPTIONS"), FILLED]))}
    done = subprocess.run([sys.executable, "-W", "ignore", PROGRAM, str(first), str(calls), told], env=environment,
                          capture_output=True, text=True)
    at = told.read_text().strip() if told.exists() else "none"
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"exit {done.returncode}, last seed {at}:\n{said}"
    return done.stdout


def test_wrong_arguments_are_refused_and_others_give_what_the_reference_gives(tmp_path):
    said = run(0, 600, tmp_path)
    assert all(word in said for word in ("refused by us", "refused by PyTorch", "answered", "compared")), said


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_hundred_thousand_calls_do_not_crash(part, tmp_path):
    run(1_000_000 + part * 12_500, 12_500, tmp_path)


# --------------------------------------------------------------------------------------------------------- one by one


def none_in_turn():
    """Yields for each op every tensor argument that its schema requires."""
    for name in sorted({s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("sparse_ce::")}):
        op = getattr(ops, name.split("::")[1])
        tensors = [a.name for a in op.default._schema.arguments if str(a.type) == "Tensor"]
        yield from ((name.split("::")[1], argument) for argument in tensors)


@pytest.mark.parametrize("name, argument", list(none_in_turn()))
def test_none_for_a_tensor_is_refused(name, argument):
    values = {"Tensor": torch.zeros(2, 3), "int": 1, "bool": True, "List[int]": [0], "float": 0.5, "str": ""}
    schema = getattr(ops, name).default._schema
    given = {a.name: torch.float32 if a.name == "dtype" else values[str(a.type)]
             for a in schema.arguments if not a.has_default_value() and "Optional" not in str(a.type)}
    given |= {a.name: None for a in schema.arguments if not a.has_default_value() and "Optional" in str(a.type)}
    if name.startswith("sharded"):
        given["num_classes"] = 3
    if name == "linear_select_with_gradient":
        given.update(grad_loss=torch.zeros(2), loss=True)  # checked before the target
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        getattr(ops, name)(**{**given, argument: None})
    assert str(caught.value).startswith("sparse_ce: ") and "None" in str(caught.value)


@pytest.fixture(scope="module")
def raw_calls():
    spec = importlib.util.spec_from_file_location("raw_calls", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def integers():
    """Yields for each op the integer arguments of its schema."""
    for name in sorted({s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("sparse_ce::")}):
        name = name.split("::")[1]
        schema = getattr(ops, name).default._schema
        yield from ((name, a.name) for a in schema.arguments if str(a.type) in ("int", "Optional[int]")
                    and a.name != "dtype" and not name.startswith("sharded"))


@pytest.mark.parametrize("name, argument", list(integers()))
def test_an_integer_out_of_range_is_refused_or_has_a_meaning(name, argument, raw_calls):
    for value, on in itertools.product((0, -1, 1 << 40), ("cpu", "meta")):
        p = raw_calls.Problem(3)
        p.rows, p.vocab, p.width, p.entries, p.num_classes, p.classes = 4, 7, 3, 2, None, 7
        given = {**p.call(name), argument: value}
        try:
            raw_calls.run(name, {k: t.to(on) if isinstance(t, torch.Tensor) else t for k, t in given.items()})
        except (RuntimeError, ValueError) as error:
            text = str(error)
            assert text.startswith("sparse_ce: ") or on == "meta" and any(t in text for t in raw_calls.TORCH), text


@pytest.mark.parametrize("name", ["sharded_select", "linear_select", "linear_dense_divergence",
                                  "linear_binary_cross_entropy"])
def test_a_group_needs_the_number_of_all_classes_and_of_its_ranks(name):
    x, head, labels = torch.randn(4, 3), torch.randn(7, 3), torch.randint(7, (4,))
    given = {"sharded_select": dict(logits=x), "linear_dense_divergence": dict(teacher=x, teacher_weight=head,
                                                                               teacher_bias=None)}.get(name, {})
    if name != "sharded_select":
        given.update(input=x, linear_weight=head, linear_bias=None)
    if name != "linear_dense_divergence":
        given.update(indices=labels)
    assert_refused(lambda: getattr(ops, name)(**given, group="g"), "num_classes", "None")
    assert_refused(lambda: getattr(ops, name)(**given, group="g", num_classes=7, ranks=0), "ranks", "0")


def chunk(device, dtype=torch.float32):
    """Returns valid arguments of linear_add_gradients_."""
    draw = Draw(device)
    head = dict(input=draw.normal(4, 5, dtype=dtype), linear_weight=draw.normal(7, 5, dtype=dtype),
                linear_bias=draw.normal(7, dtype=dtype))
    return dict(head, grad_logits=draw.normal(4, 6, dtype=dtype),
                grad_input=torch.zeros(4, 5, dtype=dtype, device=device),
                input_low=torch.zeros(4, 5, dtype=torch.uint8, device=device),
                grad_weight=torch.zeros(7, 5, dtype=dtype, device=device),
                weight_low=torch.zeros(6, 5, dtype=torch.uint8, device=device),
                grad_bias=torch.zeros(7, dtype=dtype, device=device),
                bias_low=torch.zeros(1, 6, dtype=torch.uint8, device=device), first=True, last=False,
                first_classes=True, last_classes=False)


WRITTEN = ("grad_input", "input_low", "grad_weight", "weight_low", "grad_bias", "bias_low")


@pytest.mark.parametrize("argument", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_chunks_that_does_not_fit_is_refused(argument, dtype, device):
    good = chunk(device, dtype)
    ops.linear_add_gradients_(**good)
    t = good[argument]
    for bad in (t[..., :-1], t[None], t[:0], t[:1, ..., None] if t.dim() == 1 else t[:, :1], t.to(torch.float64),
                t.to(torch.int16), torch.stack([t, t], -1)[..., 0], t.to("meta")):
        assert_refused(lambda: ops.linear_add_gradients_(**{**good, argument: bad}), argument, error=RuntimeError)
    for other in ("input", "linear_weight", "grad_logits", *WRITTEN):
        if good[other].dtype == t.dtype and good[other].numel() >= t.numel() and other != argument:
            shared = good[other].flatten()[:t.numel()].view(t.shape)
            assert_refused(lambda: ops.linear_add_gradients_(**{**good, argument: shared}), argument, "share memory")


def test_sums_over_chunks_need_what_belongs_to_them(device):
    good = chunk(device, torch.bfloat16)
    assert_refused(lambda: ops.linear_add_gradients_(**{**good, "linear_bias": None}), "grad_bias")
    for argument in ("weight_low", "bias_low"):
        for ends in (dict(first=False, last=True), dict(first=True, last=False), dict(first=False, last=False)):
            assert_refused(lambda: ops.linear_add_gradients_(**{**good, **ends, argument: None}), argument, "None")
        ops.linear_add_gradients_(**{**good, "first": True, "last": True, argument: None})
    for ends in (dict(first_classes=False, last_classes=True), dict(first_classes=True, last_classes=False)):
        assert_refused(lambda: ops.linear_add_gradients_(**{**good, **ends, "input_low": None}), "input_low", "None")
    ops.linear_add_gradients_(**{**good, "first_classes": True, "last_classes": True, "input_low": None})
    wrong = [good["grad_logits"].long(), good["grad_logits"][:3], torch.zeros(4, 8, device=device).bfloat16()]
    for bad in wrong:
        assert_refused(lambda: ops.linear_add_gradients_(**{**good, "grad_logits": bad}), "grad_logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_chunk_without_rows_adds_nothing_and_ends_or_begins_a_sum(at, dtype, device):
    good = chunk(device, dtype)
    dz, x = good["grad_logits"], good["input"]
    sizes = [2, 2]
    sizes.insert(at, 0)
    for name in ("grad_weight", "grad_bias"):
        good[name][:6] = torch.nan
    for i, (some, of_some) in enumerate(zip(x.split(sizes), dz.split(sizes))):
        ops.linear_add_gradients_(**{**good, "input": some, "grad_logits": of_some, "grad_input": None,
                                     "input_low": None, "first": i == 0, "last": i == 2})
    torch.testing.assert_close(good["grad_weight"][:6].float(), dz.float().T @ x.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(good["grad_bias"][:6].float(), dz.float().sum(0), rtol=1e-2, atol=1e-2)
    without = {**good, "grad_logits": dz[:, :0], "grad_input": torch.full_like(x, torch.nan), "weight_low": None,
               "last_classes": True, "grad_weight": None, "grad_bias": None, "bias_low": None}
    ops.linear_add_gradients_(**without)
    assert (without["grad_input"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_blocks_of_classes_add_up_to_the_gradient_of_the_input(dtype, device):
    draw = Draw(device)
    x, w, dz = (draw.normal(*size).to(dtype) for size in ((5, 3), (40, 3), (5, 40)))
    total, low = torch.full_like(x, torch.nan), torch.zeros(5, 3, dtype=torch.uint8, device=device)
    for begin in range(0, 40, 8):
        block = slice(begin, begin + 8)
        ops.linear_add_gradients_(x, w[block], None, dz[:, block], total, low, None, None, None, None, True, True,
                                  begin == 0, begin == 32)
    exact = dz.double() @ w.double()
    assert (total.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * (dz.double().abs() @ w.double().abs()
                                                                                 ).max()


@pytest.mark.parametrize("rows, width", [(6, 8), (9, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_gradient_of_stored_logits_is_rounded_once(dtype, rows, width, device):
    draw = Draw(device)
    x, dz = draw.normal(rows, width).to(dtype), draw.normal(rows, 300).to(dtype)
    gradient = torch.full((302, width), 7.0, dtype=dtype, device=device)
    chunk_rows, block, chunk_classes, _, logits, beside = ops.linear_plan(x, gradient, rows, 300, 4)
    assert (chunk_rows, chunk_classes) == (4, 0)
    if block == 0:  # the products do not have the dtype of the gradient, or more of dz would lie beside it
        return
    for row in range(0, rows, 4):
        ops.linear_store_(dz[row:row + 4], gradient, beside, row, rows, block)
    ops.linear_multiply_stored_(x, logits, gradient, beside, 300, block)
    exact = dz.double().mT @ x.double()
    assert (gradient[:300].double() - exact).abs().max() <= 0.6 * torch.finfo(dtype).eps * exact.abs().max()
    assert (gradient[300:] == 7).all()


def test_what_is_read_may_not_lie_in_what_is_overwritten(device):
    draw = Draw(device)
    memory = draw.normal(4, 9)
    logits, labels = memory[:, :7], torch.tensor([1, 2, 3, 4], device=device)
    one = torch.ones((), device=device)
    beside = dict(logits=logits, indices=labels, grad_loss=memory[:, 7], grad_lse=None, lse_residual=None,
                  lse=torch.ones(4, device=device))
    ops.backward_(**beside)  # memory between the rows does not overlap them
    inside = {"grad_loss": memory[:, 6], "grad_lse": memory[:, 0], "row_scale": memory[:, 2],
              "weight": memory.view(-1)[:7]}
    for argument, t in inside.items():
        before = memory.clone()
        assert_refused(lambda: ops.backward_(**{**beside, argument: t}), argument, "share memory with logits")
        assert_bitwise_equal(memory, before)
    for argument, t in (("grad_mean", memory[0, 0]), ("row_weight", memory[:, 1]), ("normalizer", memory[3, 6])):
        call = dict(grad_mean=one, normalizer=None, logits=logits, indices=labels)
        assert_refused(lambda: ops.forward_with_gradient_(**{**call, argument: t}), argument, "share memory")
    packed = memory[:, :7].contiguous()
    for given in ((packed, packed[0, 0]), (packed, one, packed[3, 6])):
        assert_refused(lambda: ops.scale_(*given), "share memory with gradient")
    assert_refused(lambda: ops.select_backward_(memory[:, 3], *(None,) * 6, logits, beside["lse"], *(None,) * 4,
                                                labels), "grad_loss", "share memory")
    anew = {**beside, "expected": packed[0, 0], "grad_mean": one, "grad_logits": packed, "grad_loss": one.expand(4)}
    del anew["grad_lse"]
    assert_refused(lambda: ops.backward_anew_(**anew), "expected", "share memory with grad_logits")


def test_an_order_is_a_permutation(device):
    values, offsets = torch.ones(4, device=device), torch.tensor([0, 2, 4], device=device)
    ops.sparse_softmax(values, offsets, torch.tensor([3, 1, 0, 2], device=device), False)
    for wrong in ([0, 1, 2, 2], [0, 0, 0, 0], [1, 2, 3, 4], [-1, 0, 1, 2]):
        order = torch.tensor(wrong, device=device)
        for call in (lambda: ops.sparse_softmax(values, offsets, order, False),
                     lambda: ops.sparse_softmax_backward(values, values, offsets, order, True)):
            if device == "cpu":
                assert_refused(call, "order", error=RuntimeError)
            else:
                assert call().isnan().any()


def test_a_result_too_large_to_have_a_size_is_refused():
    """Checks a size whose bytes modulo 2^64 are 64 MiB."""
    mask = torch.ones(1, dtype=torch.bool).expand(2**62 + 2**24)
    with pytest.raises(RuntimeError):
        ops.masked_mean_backward(torch.zeros(()), mask, [0], torch.float32)
