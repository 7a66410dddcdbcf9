"""Finds the model inside its wrappers, checks that its output head can be fused, and follows its logits."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from .._core.errors import check, described, fail
from .logits import INSTEAD, Head, HeadInput, Logits, ModelLogits, PartitionedHead, linear
from .quantization import is_4bit, is_quantized, operands, weight_blocks


def unwrapped(model: Any, *attributes: str) -> Optional[PreTrainedModel]:
    """Returns the model of transformers inside PEFT and wrappers that hold it in one of ``attributes``, or None."""
    while model is not None and not isinstance(model, PreTrainedModel):
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            model = next((inner for name in attributes if (inner := getattr(model, name, None)) is not None), None)
    return model


def base_of(model: Any) -> Any:
    base = unwrapped(model, "module")
    if base is None:
        fail(f"model must be a causal language model of transformers, got {type(model).__name__}", TypeError)
    return base


def model_of(model: Any, name: str = "teacher_model") -> Any:
    """Returns the model inside of one that is evaluated, which may also be compiled."""
    base = unwrapped(model, "module", "_orig_mod")
    if base is None:
        fail(f"{name} must be a causal language model of transformers, got {type(model).__name__}", TypeError)
    return base


def check_liger(model: Any) -> None:
    """Checks that Liger's fused loss has not replaced ``forward``, either of the class or of the model."""
    for forward in (model.__dict__.get("forward"), type(model).forward):
        if "liger_kernel" in getattr(inspect.unwrap(getattr(forward, "__func__", forward)), "__module__", ""):
            fail("model must keep its own forward, got that of liger_kernel; apply Liger with "
                 "fused_linear_cross_entropy=False, or leave out fuse_lm_head")


def check_prompt(model: Any) -> None:
    """Checks that the model is not one of PEFT's CPT, which computes a weighted loss from the logits of the model's
    output."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        kind = getattr(getattr(module, "active_peft_config", None), "peft_type", None)
        check(kind != "CPT", "fuse_lm_head does not support PEFT's CPT: CPT computes a loss of its own from the "
              "logits. Train without fuse_lm_head, with class indices.")


def head_of(model: Any) -> Any:
    """Returns the module that computes the logits. If PEFT keeps copies of the head (``modules_to_save``), this is the
    copy in use."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    active = head.active_adapters
    if head.disable_adapters or not active or any(name not in copies for name in active):
        return head.original_module
    return copies[active[0]]


def check_head(model: Any) -> Any:
    head = head_of(model)
    if head is None:
        fail(f"model must have an output head, got {type(model).__name__} without one", TypeError)
    quantized = is_quantized(head)
    if quantized:
        weight_blocks(head)  # raises an error for a format that has no blocks
    elif getattr(type(head), "forward", None) is not nn.Linear.forward:
        fail("model must have a plain nn.Linear as its output head, got "
             f"{type(head).__module__}.{type(head).__name__}; exclude the head from adapters (PEFT: "
             f'modules_to_save=["lm_head"] trains a copy of it) and from this kind of quantization, or use {INSTEAD}',
             TypeError)
    weight = head.weight
    # Between forwards, a weight that FSDP2 shards is a DTensor.
    wrapped = is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)
    if not quantized and (wrapped or not weight.dtype.is_floating_point):
        fail(f"model must have an output head with a plain floating weight, got {type(weight).__name__} of "
             f"{weight.dtype}; a head quantized in this way has no fused loss", TypeError)
    if not is_partitioned(head) and _enter_head not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_enter_head)
    return head


def is_partitioned(head: nn.Module) -> bool:
    """Returns True if DeepSpeed ZeRO-3 partitions a parameter of the head."""
    return any(hasattr(t, "ds_id") for t in head.parameters(recurse=False))


def rows_of(head: Any) -> int:
    """Returns the number of classes of a head, which may be partitioned or quantized."""
    if is_quantized(head):
        return weight_blocks(head).shape[0]
    return int(getattr(head.weight, "ds_shape", head.weight.shape)[0])


def _enter_head(head: nn.Module, args: Tuple[Any, ...]) -> Optional[Tuple[HeadInput]]:
    return (HeadInput(*args),) if getattr(head, "_sparse_ce_fusing", False) else None


class _Formula(nn.Module):
    """Takes the place of a partitioned head in its model."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.of_head = PartitionedHead(head)

    def forward(self, hidden: Tensor) -> Logits:
        return Logits(hidden, self.of_head)


def follow(model: nn.Module, head: Any) -> Callable[[], None]:
    """Makes the head return its logits as a formula. Returns a function that undoes this."""
    if is_4bit(head):
        return _in_place_of_forward(head, partial(quantized_logits, head))
    if not is_partitioned(head):
        if F.linear is not torch._C._nn.linear and "forward" not in vars(head):
            # DeepSpeed replaces F.linear in the whole process, and its replacement takes tensors only.
            head.forward = lambda hidden: linear(hidden, head.weight, head.bias)
            return partial(delattr, head, "forward")
        head._sparse_ce_fusing = True
        return partial(setattr, head, "_sparse_ce_fusing", False)
    places = [(parent._modules, name) for parent in model.modules() for name, child in parent._modules.items()
              if child is head]
    formula = _Formula(head)

    def put(module: Any) -> None:
        for modules, name in places:
            modules[name] = module

    put(formula)
    return partial(put, head)


def quantized_logits(head: Any, hidden: Tensor) -> Logits:
    """Returns the logits of a quantized head as a formula."""
    if not is_4bit(head):
        return linear(hidden, head.weight, head.bias)
    hidden, weight, bias = operands(head, hidden)
    return Logits(hidden, Head(weight, bias))


def _in_place_of_forward(head: Any, forward: Callable[[Tensor], Logits]) -> Callable[[], None]:
    """Replaces the forward of a head, inside of accelerate's hooks if it has any. Returns a function that undoes
    this."""
    name = "_old_forward" if "_old_forward" in vars(head) else "forward"
    before = vars(head).get(name)
    setattr(head, name, forward)
    return partial(delattr, head, name) if before is None else partial(setattr, head, name, before)


@torch.no_grad()
def logits_of(model: Any, inputs: Mapping[str, Any]) -> ModelLogits:
    """Returns the logits (B, S, V) of a causal language model as a formula, to evaluate it.

    The model's own forward computes hidden states, without a gradient. A factor, a softcap, a bias and PEFT adapters
    work as in the model. The methods of the result compute logits in chunks, and only for the selected positions. Call
    them under ``torch.no_grad()`` too.

    Args:
        model: a causal language model of transformers, which PEFT, DDP, FSDP or ``torch.compile`` may wrap.
        inputs: keyword arguments of the model's forward, such as ``input_ids`` and ``attention_mask``, without labels.

    Returns:
        A formula ``logits`` with these methods:

        - ``logits.of_rows(index)`` selects positions: a bool mask (B, S), or another index of the first two dimensions.
        - ``logits.log_probs(target, **options)`` calls :func:`sparse_ce.linear_selected_log_probs`.
        - ``logits.loss(target, **options)`` calls :func:`sparse_ce.linear_cross_entropy`.

        The options are those of the function, except ``linear_bias`` and ``softcap``, which the model defines,
        ``inplace``, ``group`` and ``vocab_start``. Instead of ``logit_scale`` there is ``temperature``, which divides
        the model's logits.

    Raises:
        TypeError, ValueError: if the model has no head, or its head is more than a matrix product (adapters, or a
            quantization that :func:`sparse_ce.integrations.quantization.weight_blocks` does not support).
        ValueError, AttributeError: if the model applies any other operation to its logits.

    Examples:
        >>> with torch.no_grad():
        ...     logits = logits_of(model, {"input_ids": tokens}).of_rows((slice(None), slice(None, -1)))
        ...     out = logits.log_probs(tokens[:, 1:], return_argmax=True)  # position i predicts token i + 1
        >>> out.log_probs.shape, out.argmax.shape
        (torch.Size([1, 2]), torch.Size([1, 2]))
    """
    base = model_of(model, "model")
    if not isinstance(inputs, Mapping):
        fail("inputs must be a dict of the arguments of the model's forward, such as {'input_ids': tokens}, got "
             f"{described(inputs)}", TypeError)
    check(inputs.get("labels") is None, "inputs must not hold labels, got some; pass them to the method loss of the "
          "result")
    head = check_head(base)
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(False, recurse=False)  # a loss reads the weight after the head's forward
    restore = follow(base, head)
    try:
        logits = model(**{**inputs, "use_cache": False}).logits
    finally:
        restore()
    if not isinstance(logits, Logits):
        fail(f"model must return the logits of its output head, got {type(logits).__name__} from "
             f"{type(model).__name__}")
    return ModelLogits(logits.hidden, logits.head, logits.scale, logits.gain)
