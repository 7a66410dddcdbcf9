"""Changes shape, dtype, stride and device of each tensor of each op: an error names the tensor and what was given."""

import importlib.util

import pytest
import torch

import forked

ops = torch.ops.sparse_ce
spec = importlib.util.spec_from_file_location("raw_calls", forked.PROCESSES / "raw_calls.py")
raw_calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(raw_calls)

# Tensors that others are compared with: an error may name another one after a change of their size or float dtype.
ANCHORS = {"logits", "input", "linear_weight", "teacher", "teacher_weight", "loss", "statistics", "mask", "gradient",
           "grad_logits", "grad_weight", "beside"}
OF_ANCHORS = {"no classes", "no dimension", "shorter", "fewer rows", "float64", "float16"}
# Tensors that an op does not read for every combination of options, or that it converts.
FREE = {"log_tail", "entropy", "collision", "chosen", "ranked_logits", "share", "mask", "gradient", "input_low",
        "weight_low", "bias_low", "output", "statistics"}
NAMES = {"float64": ("Double", "float64"), "float16": ("Half", "float16"), "int64": ("Long", "int64"),
         "float32": ("Float", "float32"), "int16": ("Short", "int16"), "uint8": ("Byte", "uint8")}


def changes(name, t):
    """Yields what is wrong, the wrong tensor, and words of which the message must contain one."""
    shapes = {"shorter": lambda: t[..., :-1], "fewer rows": lambda: t[:-1],
              "one more dimension": lambda: t[None, None] if name == "logits" else t[None],
              "flat": lambda: t.reshape(-1), "no dimension": lambda: t.reshape(-1)[0],
              "no classes": lambda: t[:0] if name == "linear_weight" else t[..., :0]}
    for wrong, change in shapes.items():
        few = {"shorter": 1, "fewer rows": 2, "flat": 2, "no dimension": 1}.get(wrong, 0)
        if t.dim() >= few and t.numel() > 1 and (wrong != "no classes" or name in ("logits", "linear_weight")):
            yield wrong, change(), [str(list(change().shape))]
    for wrong in ("float64", "float16", "int64") if t.is_floating_point() else ("float32", "int16", "uint8"):
        if name != "values" or wrong == "int64":
            yield wrong, t.to(getattr(torch, wrong)), NAMES[wrong]
    if name in ("lse", "lse_residual"):
        yield "stride", t[:1].expand(t.shape), ["contiguous"]
    yield "device", t.to("meta"), ["got meta", "meta, got"]


def valid(name, seed):
    p = raw_calls.Problem(seed)
    p.rows, p.vocab, p.width, p.entries, p.num_classes, p.classes = 5, 7, 3, 2, None, 7
    p.dtype = p.acc = torch.float32
    given = p.call(name)
    return {a.name: given.get(a.name, a.default_value) for a in getattr(ops, name).default._schema.arguments}


# linear_plan and large_empty_like accept any matrix.
CHECKED = [name for name in raw_calls.NAMES
           if not name.startswith(("masked_mean", "sparse_softmax", "topk", "linear_plan", "large_empty"))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CHECKED)
def test_every_op_refuses_a_wrong_tensor(name, seed):
    op = getattr(ops, name)
    op(**valid(name, seed))  # without a valid call the errors below prove nothing
    for argument, t in valid(name, seed).items():
        for wrong, bad, words in changes(argument, t) if isinstance(t, torch.Tensor) else ():
            given = valid(name, seed)
            before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
            # Fewer entries are valid without values.
            anchor = argument in ANCHORS and wrong in OF_ANCHORS or (argument, wrong) == ("indices", "shorter")
            try:
                op(**{**given, argument: bad})
            except (RuntimeError, ValueError, TypeError) as error:
                message = str(error)
                assert message.startswith("sparse_ce: ") or argument in FREE, (argument, wrong, message)
                named = argument in message and any(word in message for word in words)
                assert named or anchor or argument in FREE, (argument, wrong, message)
                assert all(torch.equal(given[key], value) for key, value in before.items()), (argument, wrong)
            else:
                assert wrong != "no classes" or name == "select_shard", "only a shard may hold no classes"
                assert anchor or argument in FREE, (argument, wrong)


@pytest.mark.parametrize("name", [n for n in CHECKED if n.startswith("linear_") and "add" not in n])
def test_every_op_of_a_head_refuses_wrong_numbers(name):
    given = valid(name, 0)
    for argument, value in (("chunk_rows", 0), ("chunk_rows", -4), ("num_classes", 8), ("label_smoothing", 1.5)):
        if argument in given:
            with pytest.raises((RuntimeError, ValueError), match=f"sparse_ce: {argument} must .* got {value}"):
                getattr(ops, name)(**{**given, argument: value})
