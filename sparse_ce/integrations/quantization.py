"""Gives the losses the weight of a quantized head in blocks, for torchao and bitsandbytes (4 bits)."""

import sys
from functools import partial
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor, nn

from .._core.errors import fail
from .._core.listing import listing

__all__ = ["weight_blocks"]
__dir__ = listing(globals())

_OF_TORCHAO = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")
# Their attributes that quantize or scale the inputs of a layer.
_OF_INPUTS = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization")


class QuantizedWeight:
    """Computes blocks of a quantized weight (V, D) in ``dtype``, as a :class:`sparse_ce.WeightBlocks`."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, dequantized: Callable[[int, int], Tensor]) -> None:
        self.shape, self.dtype, self._dequantized = shape, dtype, dequantized

    def block(self, begin: int, end: int) -> Tensor:
        return self._dequantized(begin, end).to(self.dtype)

    def to(self, dtype: torch.dtype) -> "QuantizedWeight":
        return QuantizedWeight(self.shape, dtype, self._dequantized)

    def float(self) -> "QuantizedWeight":
        return self.to(torch.float32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"


def weight_blocks(head: Any, dtype: Optional[torch.dtype] = None) -> QuantizedWeight:
    """Returns the weight of a quantized head as the ``linear_weight`` of the losses, without dequantizing all of it.

    Args:
        head: a linear layer, or its weight, quantized by one of

            - torchao, if only the weight is quantized: ``Int8WeightOnlyConfig``, ``Float8WeightOnlyConfig``,
              ``IntxWeightOnlyConfig``
            - bitsandbytes in 4 bits: ``Linear4bit``, as ``BitsAndBytesConfig(load_in_4bit=True)`` creates it

        dtype: dtype of the blocks; by default that of the weight before it was quantized.

    Returns:
        A :class:`sparse_ce.WeightBlocks`.

    Raises:
        TypeError: if the head is not quantized, or by another library.
        ValueError: if the inputs of the head are quantized too, or if the weight is not in the format of training.

    Examples:
        >>> quantize_(model.lm_head, Int8WeightOnlyConfig())  # of torchao.quantization
        >>> weight_blocks(model.lm_head)
        QuantizedWeight(shape=[50, 8], dtype=torch.float32)
        >>> loss = sparse_ce.linear_cross_entropy(hidden, weight_blocks(model.lm_head), labels)
    """
    weight = getattr(head, "weight", head)
    if is_torchao(weight):
        if type(weight).__name__ not in _OF_TORCHAO:
            fail(f"head must have a torchao weight of type {', '.join(_OF_TORCHAO)}, got {type(weight).__name__}; "
                 "choose another config for the head, or leave it out of quantization", TypeError)
        inputs = [name for name in _OF_INPUTS if getattr(weight, name, None) is not None]
        if inputs:
            fail(f"head must be quantized in its weight only, got one with {', '.join(inputs)}; use a config without "
                 "activations, such as Int8WeightOnlyConfig")
        return QuantizedWeight(weight.shape, dtype or weight.dtype, lambda begin, end: weight[begin:end].dequantize())
    if hasattr(weight, "quant_state"):
        state = weight.quant_state
        if state is None or getattr(state, "packing_format_for_cpu", False):
            fail("head must be quantized in the format of training, got a weight that "
                 + ("is not quantized yet; move it to its device" if state is None else
                    "bitsandbytes packed for inference on a CPU; load the model again"))
        return QuantizedWeight(torch.Size(state.shape), dtype or state.dtype, partial(_of_4bits, weight))
    fail(f"head must be quantized by torchao, or by bitsandbytes in 4 bits, got {type(weight).__name__}", TypeError)


def is_torchao(weight: Any) -> bool:
    library: Any = sys.modules.get("torchao.utils")
    return library is not None and isinstance(weight, library.TorchAOBaseTensor)


def is_4bit(layer: Any) -> bool:
    """Returns True for a layer of bitsandbytes in 4 bits without an adapter."""
    library: Any = sys.modules.get("bitsandbytes")
    if library is None or not isinstance(layer, library.nn.Linear4bit):
        return False
    return type(layer).forward is library.nn.Linear4bit.forward


def is_quantized(layer: Any) -> bool:
    """Returns True for a layer without an adapter whose weight :func:`weight_blocks` may accept."""
    plain = getattr(type(layer), "forward", None) is nn.Linear.forward
    return plain and is_torchao(layer.weight) or is_4bit(layer)


def operands(layer: Any, hidden: Tensor) -> Tuple[Tensor, QuantizedWeight, Optional[Tensor]]:
    """Returns hidden states, weight and bias in the dtype in which a layer in 4 bits multiplies them."""
    dtype = hidden.dtype
    if layer.compute_type_is_set and layer.compute_dtype is not None:
        dtype = layer.compute_dtype
    return hidden.to(dtype), weight_blocks(layer, dtype), None if layer.bias is None else layer.bias.to(dtype)


def _of_4bits(weight: Any, begin: int, end: int) -> Tensor:
    """Returns the classes [begin, end) of a weight in 4 bits. Its scales belong to ``blocksize`` elements and, if they
    are quantized too, the scales of scales to ``unit`` elements."""
    functional: Any = sys.modules["bitsandbytes"].functional
    state, width = weight.quant_state, weight.quant_state.shape[1]
    unit = state.blocksize * (state.state2.blocksize if state.nested else 1)
    first, last = begin * width // unit, -(-end * width // unit)
    low, high = first * unit, min(last * unit, state.shape[0] * width)
    scales = state.absmax.reshape(-1)[low // state.blocksize:-(-high // state.blocksize)]
    if state.nested:
        outer = state.state2
        scales = state.offset + functional.dequantize_blockwise(scales, functional.QuantState(
            absmax=outer.absmax[first:last], code=outer.code, blocksize=outer.blocksize, dtype=outer.dtype))
    packed = weight.data.reshape(-1).view(torch.uint8)[low // 2:-(-high // 2), None]
    part: Tensor = functional.dequantize_4bit(packed, functional.QuantState(
        absmax=scales, shape=torch.Size((high - low,)), code=state.code, blocksize=state.blocksize,
        quant_type=state.quant_type, dtype=state.dtype))
    return part.reshape(-1)[begin * width - low:end * width - low].reshape(end - begin, width)
