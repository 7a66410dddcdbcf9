"""Defines the problem, and the peers: other implementations of the same loss, each a function of the same inputs.

A peer that supports class indices only is run on those, and its row says so. cut-cross-entropy is not included: it
starts from hidden states and never sees logits.
"""

import functools
import importlib
import importlib.util
import math
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, List

import torch
import torch.nn.functional as F
from torch import Tensor

LIGER_BACKENDS = ("cutedsl", "cutile")  # besides Triton


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of a problem: logits (rows, vocab), and ``entries`` weighted classes per row."""

    rows: int
    vocab: int
    entries: int
    dtype: torch.dtype
    small: bool = False  # bound by launch overhead instead of memory, see bench.py

    @property
    def logits_bytes(self) -> int:
        """Returns E: the bytes of the logits, and of their gradient."""
        return self.rows * self.vocab * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.rows} x {self.vocab}, K={self.entries}, {str(self.dtype)[6:]}"


class Problem:
    """Creates peaked random logits, a soft target with K classes per row, and labels that are the first of these
    classes."""

    def __init__(self, shape: Shape, device: torch.device):
        generator = torch.Generator().manual_seed(1)
        rows, vocab, entries = shape.rows, shape.vocab, shape.entries
        self.shape, self.device = shape, device
        # One class out of each of K equal parts of the vocabulary, so that classes are scattered and distinct.
        stride = vocab // entries
        columns = torch.arange(entries) * stride + torch.randint(stride, (rows, entries), generator=generator)
        self.indices = columns.gather(1, torch.rand(rows, entries, generator=generator).argsort(1)).to(device)
        values = torch.softmax(2 * torch.randn(rows, entries, generator=generator), 1)
        # The values are exact in every dtype, so a dense target in bfloat16 is the same target.
        self.values = values.bfloat16().float().to(device)
        self.labels = self.indices[:, 0].contiguous()
        noise = torch.Generator(device).manual_seed(2)
        logits = torch.randn(rows, vocab, generator=noise, device=device, dtype=torch.float32).mul_(2)
        # The target's classes then hold about nine tenths of the probability, in the proportions of the target.
        logits.scatter_add_(1, self.indices, math.log(vocab) + 2 + self.values.log())
        self.logits = logits.to(shape.dtype).requires_grad_()
        del logits
        self.overwritten = self.logits.detach().clone().requires_grad_()  # for calls that overwrite the logits

    def restore(self) -> None:
        self.overwritten.data.copy_(self.logits.data)

    @functools.cached_property
    def dense(self) -> Tensor:
        """Returns the soft target (rows, vocab) as ``F.cross_entropy`` takes it."""
        zeros = torch.zeros_like(self.logits, requires_grad=False)
        return zeros.scatter_(1, self.indices, self.values.to(zeros.dtype))


@dataclass(frozen=True)
class Peer:
    name: str
    loss: Callable[[Tensor], Tensor]  # mean loss of logits (rows, vocab)
    soft: bool  # supports the soft target; otherwise class indices are used
    overwrites: bool = False  # the gradient overwrites the logits
    note: str = ""


def gather_route(logits: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Computes ``-(log_softmax(x)[rows, cols] * values).sum() / N``."""
    return -(F.log_softmax(logits, 1).gather(1, indices) * values).sum() / logits.shape[0]


def logsumexp_route(logits: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Computes ``((logsumexp(x) - x[rows, cols]) * values).sum() / N``."""
    return ((torch.logsumexp(logits, 1, keepdim=True) - logits.gather(1, indices)) * values).sum() / logits.shape[0]


def compiled_when_called(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the function with torch.compile, applied at the first call. If the compiler fails on this machine, it
    fails when the peer is run."""
    torch.compiler.reset()

    @functools.cache
    def compiled() -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=False)

    return lambda *arguments: compiled()(*arguments)


def peers(problem: Problem) -> List[Peer]:
    """Returns the peers for the device of the problem."""
    labels, indices, values = problem.labels, problem.indices, problem.values
    compiled = compiled_when_called(F.cross_entropy)
    beside_input = "its dense target, E more, is not counted in its memory"
    found = [
        Peer("F.cross_entropy, class index", lambda x: F.cross_entropy(x, labels), soft=False),
        Peer("F.cross_entropy, dense probability", lambda x: F.cross_entropy(x, problem.dense), soft=True,
             note=beside_input),
        Peer("torch.compile, class index", lambda x: compiled(x, labels), soft=False),
        Peer("torch.compile, dense probability", lambda x: compiled(x, problem.dense), soft=True, note=beside_input),
        Peer("log_softmax + gather", lambda x: gather_route(x, indices, values), soft=True),
        Peer("logsumexp + gather", lambda x: logsumexp_route(x, indices, values), soft=True),
    ]
    if problem.device.type == "cuda":
        no_soft = "it has no soft targets"
        found += [
            Peer("liger-kernel, class index, in place", lambda x: _liger(x, labels), soft=False, overwrites=True,
                 note=no_soft + ", and its forward writes the gradient"),
            *(Peer(f"liger-kernel with {name}, class index, in place",
                   lambda x, name=name: liger_with(name).LigerCrossEntropyFunction.apply(x, labels, None)[0],
                   soft=False, overwrites=True, note=no_soft) for name in LIGER_BACKENDS),
            Peer("unsloth, class index", lambda x: _unsloth(x, labels), soft=False,
                 overwrites=True, note=no_soft),  # some of its releases work in place
            Peer("quack-kernels, class index", lambda x: _quack(x, labels), soft=False, note=no_soft),
            Peer("quack-kernels, class index, in place", lambda x: _quack(x, labels, inplace_backward=True), soft=False,
                 overwrites=True, note=no_soft),
        ]
    return found


# Peers are imported when called: one that is not installed, or does not load, is reported as not run.


def _liger(logits: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy
    return liger_cross_entropy(logits, labels)


def liger_with(backend: str) -> ModuleType:
    """Returns the module of operators that Liger uses everywhere if LIGER_KERNEL_IMPL is this backend. Liger reads the
    variable when it is imported, so that one process could measure only one backend."""
    return importlib.import_module(f"liger_kernel.ops.{backend}.ops")


def unsloth_module(name: str) -> Any:
    """Imports a module of unsloth or unsloth_zoo without running the ``__init__`` of its packages, which changes
    transformers, TRL and torch in the whole process."""
    for package in ("unsloth", "unsloth.kernels", "unsloth_zoo", "unsloth_zoo.temporary_patches"):
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {package!r}")
            sys.modules[package] = importlib.util.module_from_spec(spec)
    sys.modules["unsloth_zoo"].DEVICE_TYPE = "cuda"  # type: ignore[attr-defined] # its modules import this
    return importlib.import_module(name)


def _unsloth(logits: Tensor, labels: Tensor) -> Tensor:
    return unsloth_module("unsloth.kernels.cross_entropy_loss").fast_cross_entropy_loss(logits[None], labels[None])


def _quack(logits: Tensor, labels: Tensor, **options: bool) -> Tensor:
    from quack.cross_entropy import cross_entropy
    return cross_entropy(logits, labels, **options)
