"""Makes torchao and bitsandbytes importable from ``.venv/quantization``, which ``make test`` fills, and quantizes the
heads of small models with them.

They are not in the main environment, because transformers and peft would import them in every test.
"""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(sys.prefix) / "quantization"


def required(name):
    """Returns the module ``name`` of one of them, or skips the test if it is missing."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.path.append(str(FOLDER))
    return pytest.importorskip(name)


def to_int8(model, config="Int8WeightOnlyConfig", **options):
    torchao = required("torchao.quantization")
    torchao.quantize_(model, getattr(torchao, config)(**options), filter_fn=lambda _, name: name == "lm_head")
    return model


def to_4bit(model, **options):
    bitsandbytes = required("bitsandbytes")
    head = model.get_output_embeddings()
    quantized = bitsandbytes.nn.Linear4bit(head.in_features, head.out_features, bias=head.bias is not None, **options)
    quantized.load_state_dict(head.state_dict())
    model.set_output_embeddings(quantized.to("cpu"))
    return model


def whole(weight):
    """Returns a quantized weight as a tensor.

    bitsandbytes 0.50 dequantizes weights of fewer than 64 columns wrongly on a CPU. These are computed here."""
    if not hasattr(weight, "quant_state"):
        return weight.dequantize()
    functional, state = required("bitsandbytes").functional, weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    packed, count = weight.data.reshape(-1).int(), state.shape.numel()
    codes = torch.stack((packed >> 4, packed & 15), 1).reshape(-1)[:count]
    return (state.code[codes] * scales.repeat_interleave(state.blocksize)[:count]).reshape(state.shape)


WAYS = {"torchao, int8": to_int8, "torchao, integers": lambda model: to_int8(model, "IntxWeightOnlyConfig"),
        "torchao, float8": lambda model: to_int8(model, "Float8WeightOnlyConfig"),
        "bitsandbytes, nf4": lambda model: to_4bit(model, quant_type="nf4"),
        "bitsandbytes, scales": lambda model: to_4bit(model, compress_statistics=False, compute_dtype=torch.float32)}


def quantized(model, way="torchao, int8"):
    """Returns the model with a quantized head."""
    return WAYS[way](model)


def with_plain_head(model, dtype):
    """Returns a copy with a frozen head of plain numbers."""
    copied, head = copy.deepcopy(model), model.get_output_embeddings()
    plain = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    plain.weight = nn.Parameter(whole(head.weight), requires_grad=False)
    if head.bias is not None:
        plain.bias = nn.Parameter(head.bias.detach().clone())
    copied.set_output_embeddings(plain)
    return copied.to(dtype)
