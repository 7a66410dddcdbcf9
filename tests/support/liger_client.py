"""Makes Liger-Kernel importable from ``.venv/liger``, which ``make test-all`` fills, for tests on a CPU.

They launch none of its kernels, so a mock replaces Triton. Without Liger, a stand-in has its functions of the loss.
"""

import importlib.util
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo  # it looks for Triton once

FOLDER = Path(sys.prefix) / "liger"


def there() -> bool:
    return (FOLDER / "liger_kernel").exists() or importlib.util.find_spec("liger_kernel") is not None


class _Triton:
    """Finds a mock of Triton."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None

    def create_module(self, spec):
        return MagicMock(__version__="3.0.0", __path__=[])

    def exec_module(self, module):
        pass


@contextmanager
def liger():
    """Imports Liger or its stand-in, yields its module ``transformers.functional``, and forgets both afterwards."""
    path, finders, before = list(sys.path), list(sys.meta_path), set(sys.modules)
    try:
        if there():
            import transformers  # noqa: F401, it must not see the mock
            sys.path.append(str(FOLDER))
            if importlib.util.find_spec("triton") is None:
                sys.meta_path.append(_Triton())
            import liger_kernel.transformers.monkey_patch  # noqa: F401
        else:
            stand_in()
        sys.path[:], sys.meta_path[:] = path, finders
        for name in [name for name in sys.modules if name.split(".")[0] == "triton" and name not in before]:
            del sys.modules[name]
        yield sys.modules["liger_kernel.transformers.functional"]
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
            del sys.modules[name]


def stand_in() -> None:
    """Adds modules with the interface of Liger 0.8.5, whose loss raises an error like Liger's on a CPU."""
    names = ("", ".transformers", ".transformers.functional", ".transformers.fused_linear_cross_entropy",
             ".transformers.model", ".transformers.model.loss_utils")
    modules = [ModuleType("liger_kernel" + name) for name in names]
    for module in modules:
        parent, _, name = module.__name__.rpartition(".")
        module.__path__ = []
        sys.modules[module.__name__] = module
        if parent:
            setattr(sys.modules[parent], name, module)
    _, _, functional, fused, _, utils = modules
    functional.CrossEntropyOutput = CrossEntropyOutput
    functional.liger_fused_linear_cross_entropy = liger_fused_linear_cross_entropy
    fused.LigerFusedLinearCrossEntropyLoss = LigerFusedLinearCrossEntropyLoss
    utils.LigerForCausalLMLoss = LigerForCausalLMLoss


@dataclass
class CrossEntropyOutput:
    loss: Any
    z_loss: Any = None
    token_accuracy: Any = None
    predicted_tokens: Any = None


def liger_fused_linear_cross_entropy(
        input, weight, target, bias=None, ce_weight=None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap=None, return_z_loss: bool = False,
        accum_dtype=None, use_token_scaling: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False, chunk_mem_const: int = 1):
    raise TypeError("Triton is not installed")


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def __init__(self, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
                 softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
                 return_token_accuracy=False, return_predicted_tokens=False):
        super().__init__()
        self.__dict__.update({name: value for name, value in locals().items() if name not in ("self", "__class__")})

    def forward(self, lin_weight, _input, target, bias=None):
        raise TypeError("Triton is not installed")


def LigerForCausalLMLoss(hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100,
                         shift_labels=None, **kwargs):
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = sys.modules["liger_kernel.transformers.functional"].liger_fused_linear_cross_entropy(
        hidden_states.view(-1, hidden_size), lm_head_weight, shift_labels.reshape(-1) if isinstance(
            shift_labels, torch.Tensor) else shift_labels.view(-1), ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum")
    return loss if num_items_in_batch is None else loss / num_items_in_batch
