"""Interprets the placements of DTensors, and returns their local parts."""

import functools
import sys
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from .._core.errors import fail
from .._core.tensor_checks import is_distributed
from .._core.tracing import traced

_OF_DATA = "dp", "data", "fsdp", "hsdp"  # prefixes of the names of data-parallel mesh dimensions


def local_range(size: int, dim: int, mesh: DeviceMesh, placements: Sequence[Any]) -> Tuple[int, int]:
    """Returns the local range [begin, end) of dimension ``dim``; each mesh dimension splits it like ``torch.chunk``."""
    begin = 0
    for at, placement in enumerate(placements):
        if placement.is_shard() and placement.dim == dim:
            step = -(-size // mesh.size(at))
            low = min(mesh.get_local_rank(at) * step, size)
            begin, size = begin + low, min(step, size - low)
    return begin, begin + size


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # A compiler would trace into the cache.
def check_order(mesh: DeviceMesh) -> None:
    """Checks that the ranks of a mesh ascend along each dimension.

    PyTorch numbers the ranks of a group in ascending order. Some of its functions shard by this number and others by
    the position in the mesh, so the location of a shard would be unknown. All ranks raise the error, since all have the
    same mesh."""
    if not _ascends(mesh):
        _check_group(mesh)


@functools.lru_cache(maxsize=64)
def _ascends(mesh: DeviceMesh) -> bool:
    with _disable_current_modes():  # A fake tensor has no values to compare.
        return all(bool((mesh.mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.mesh.dim()))


def _check_group(mesh: DeviceMesh) -> None:
    """Checks that the group of a mesh with unsorted ranks keeps their order, and that the mesh has no other dimension.

    Meshes are also equal if their groups order the ranks differently."""
    with _disable_current_modes():
        ranks = mesh.mesh.tolist()
        if mesh.ndim > 1 or torch.distributed.get_process_group_ranks(mesh.get_group(0)) != ranks:
            fail("the ranks of a DTensor's device mesh must ascend along each of its dimensions, since PyTorch "
                 f"otherwise confuses the parts of different ranks, got {ranks}")


def leading_placements(name: str, t: Any, last: int) -> Tuple[Tuple[Any, ...], Optional[int]]:
    """Returns the placements of the leading dimensions, and the mesh dimension that shards dimension ``last``."""
    rows, found = [], None
    for at, p in enumerate(t.placements):
        if isinstance(p, Shard) and p.dim == last and found is None:
            found = at
            rows.append(Replicate())
        elif p.is_replicate() or isinstance(p, Shard) and p.dim < last:
            rows.append(p)
        else:
            refuse_placements(name, t, "Replicate or Shard, with its last dimension sharded at most once", [
                q if q.is_replicate() or isinstance(q, Shard) and i != at else Replicate()
                for i, q in enumerate(t.placements)])
    return tuple(rows), found


def dimension_of_classes(weight: Any) -> Optional[int]:
    """Returns the mesh dimension over which the classes of a head are sharded, or None."""
    found = None
    for at, p in enumerate(weight.placements):
        if isinstance(p, Shard) and p.dim == 0 and found is None:
            found = at
        elif not p.is_replicate():
            refuse_placements("linear_weight", weight, "Replicate, or Shard(0) on one mesh dimension", [
                q if q.is_replicate() or isinstance(q, Shard) and q.dim == 0 and i != at else Replicate()
                for i, q in enumerate(weight.placements)])
    return found


def dimension_of_sequence(hidden: Any, vocab: Optional[int]) -> Optional[int]:
    """Returns the leading dimension of hidden states that is sharded over the same mesh dimension as the classes.

    ``vocab`` is the mesh dimension of the classes. The result is None if it shards no leading dimension, if the parts
    differ in size, or if the mesh splits them further."""
    if vocab is None or hidden.device_mesh.size(vocab) == 1:
        return None
    placement = hidden.placements[vocab]
    if not isinstance(placement, Shard):
        return None
    dim: int = placement.dim
    if any(p.is_shard() and p.dim == dim for p in hidden.placements[vocab + 1:]):
        return None
    before = [Replicate() if at == vocab else p for at, p in enumerate(hidden.placements)]
    begin, end = local_range(hidden.shape[dim], dim, hidden.device_mesh, before)
    return dim if (end - begin) % hidden.device_mesh.size(vocab) == 0 else None


def ranks_first(t: Tensor, dim: int, ranks: int) -> Tensor:
    """Moves the parts of ``ranks`` in dimension ``dim`` to the first dimension, where they are concatenated."""
    return t if dim == 0 else t.unflatten(dim, (ranks, t.shape[dim] // ranks)).movedim(dim, 0).flatten(0, 1)


def ranks_within(t: Tensor, dim: int, ranks: int) -> Tensor:
    """Restores the argument of :func:`ranks_first` from its result."""
    return t if dim == 0 else t.unflatten(0, (ranks, t.shape[0] // ranks)).movedim(0, dim).flatten(dim, dim + 1)


def refuse_placements(name: str, t: Any, expectation: str, fixed: Sequence[Any]) -> None:
    fail(f"{name} must be placed {expectation}, got a DTensor with placements {list(t.placements)}; pass "
         f"{name}.redistribute(placements={list(fixed)})", TypeError)


def holds_data(weight: Any) -> bool:
    """Returns True if a weight is sharded over data-parallel ranks, whose plain hidden states therefore differ.

    Such a weight is a parameter of FSDP2 outside of its module's forward, or has a mesh with a data-parallel name.
    FSDP2 does not mark the parameters that it shards, so they are looked up in its states.
    """
    names = weight.device_mesh.mesh_dim_names or ()
    if any(p.is_shard() and name.startswith(_OF_DATA) for p, name in zip(weight.placements, names)):
        return True
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None or torch.compiler.is_compiling():
        return False
    for reference_to_state in list(getattr(states, "_module_state_mapping", {}).values()):
        state: Any = reference_to_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            if any(p.sharded_param is weight for p in getattr(group, "fsdp_params", ())):
                return True
    return False


def several(mesh: DeviceMesh, at: Optional[int]) -> Optional[int]:
    return None if at is None or mesh.size(at) == 1 else at


def local_part(t: Any, placements: Tuple[Any, ...]) -> Tensor:
    """Returns the local part of ``t``, whose gradient has ``placements``."""
    local = t.to_local(grad_placements=placements)
    wait = getattr(local, "wait", None)  # A collective may be in progress.
    result: Tensor = local if wait is None else wait()
    return result


def bias_part(name: str, bias: Tensor, mesh: DeviceMesh, placements: Sequence[Any], classes: int) -> Tensor:
    """Returns the bias of the local classes, from a plain tensor of all classes or from a DTensor."""
    placed: Any = bias
    if not is_distributed(bias):
        if bias.shape != (classes,):
            fail(f"{name} must be ({classes},), or a DTensor of that shape, got {list(bias.shape)}")
        placed = DTensor.from_local(bias, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif placed.device_mesh != mesh:
        fail(f"{name} must be on the mesh of {name.replace('bias', 'weight')}, {mesh}, got {placed.device_mesh}")
    if tuple(placed.placements) != tuple(placements):
        placed = placed.redistribute(placements=placements)
    return local_part(placed, tuple(placements))


class _Once(torch.autograd.Function):
    """Returns ``t``, and raises an error if its gradient is differentiated."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not traced():
            fail("torch must be 2.12 or newer for second derivatives of DTensors (create_graph=True), got "
                 f"{torch.__version__}", RuntimeError)
        return grad


# Before 2.12, conversions from and to DTensors in backward are not recorded, so second derivatives would be incomplete.
_ONCE = torch.__version__ < "2.12"


def as_placed(t: Tensor, mesh: DeviceMesh, placements: Sequence[Any], **layout: Any) -> Tensor:
    """Returns a DTensor with local part ``t``. ``layout`` is its shape and stride, if the parts do not imply them."""
    if _ONCE and t.requires_grad:
        t = _Once.apply(t)
    placed: Tensor = DTensor.from_local(t, mesh, placements, run_check=False, **layout)
    return placed


def replicated(name: str, t: Tensor) -> Tensor:
    """Returns a plain tensor unchanged, or the local part of a replicated DTensor."""
    if not is_distributed(t):
        return t
    placed: Any = t
    if not all(p.is_replicate() for p in placed.placements):
        fail(f"{name} must be the same on every rank, got a DTensor with placements {list(placed.placements)}; pass "
             f"{name}.full_tensor()", TypeError)
    return local_part(placed, tuple(placed.placements))


def check_cut(name: str, local: Tensor, shape: Sequence[int]) -> None:
    if local.shape != torch.Size(shape):
        fail(f"{name} must be sharded as torch.chunk splits it, {list(shape)} on this rank, got {list(local.shape)}")
