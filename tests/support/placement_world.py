"""Creates global tensors and the part that each of four processes holds, for placement_cases.py."""

import functools
from typing import Any, Dict, NamedTuple, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from sparse_ce import SparseTarget

WORLD, V, D = 4, 53, 6
R = Replicate()


class Layout(NamedTuple):
    """Describes how logits are placed.

    ``mesh`` is "all", four in a row, or "grid", two by two; ``placements`` are those of logits (*leading, V).
    """

    mesh: str
    leading: Tuple[int, ...]
    placements: Tuple[Any, ...]
    vocab: int = V


@functools.cache
def mesh_of(kind: str):
    if kind == "all":
        return dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tensor",))
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


class World:
    """Draws global tensors and returns their local parts."""

    def __init__(self, layout: Layout, seed: int):
        self.mesh, self.layout = mesh_of(layout.mesh), layout
        self.last = len(layout.leading)
        self.rows = tuple(R if p.is_shard() and p.dim == self.last else p for p in layout.placements)
        self.draw = torch.Generator().manual_seed(seed)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.draw, dtype=torch.float64)

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=self.draw)

    def place(self, t: Tensor, placements=None, grad: bool = False) -> Any:
        placed = distribute_tensor(t.detach(), self.mesh, self.rows if placements is None else placements,
                                   src_data_rank=None)
        return placed.requires_grad_(grad)

    def target(self, form: str, given: str, classes: int):
        """Returns the global target, the target passed in a process, and the values of both, or None if they do not
        require grad."""
        leading, weighs = self.layout.leading, None
        if form in ("labels", "ids in lists"):
            labels = self.integers(classes, *leading, *(2,) * (form != "labels"))
            labels.view(-1)[1:2] = -100
            return labels, labels.tolist() if form != "labels" else self.given(labels, given), None, None
        if form in ("pair", "log_probs"):
            indices = self.integers(classes, *leading, 3)
            indices.view(-1, 3)[1:2] = -100
            values = torch.rand(*leading, 3, generator=self.draw, dtype=torch.float64) / 3  # sums are at most 1
            whole = (values.log() if form == "log_probs" else values).requires_grad_()
            here = whole.detach().clone().requires_grad_() if given == "all" else self.given(whole.detach(), given)
            weighs = here.requires_grad_() if given != "here" else None
            if form == "pair":
                return (indices, whole), (self.given(indices, given), here), whole, weighs
            make = SparseTarget.from_topk
            return (make(indices, whole, values_are="log_probs", num_classes=classes),
                    make(self.given(indices, given), here, values_are="log_probs", num_classes=classes), whole, weighs)
        dense = torch.rand(*leading, classes, generator=self.draw, dtype=torch.float64)
        dense = dense.masked_fill(dense < 0.5, 0.0) / classes
        whole = dense.to_sparse()
        if form == "jagged":
            whole = SparseTarget.from_coo(whole)
            if given == "placed":
                return whole, whole._map(lambda t: self.place(t, [R] * self.mesh.ndim)), None, None
            return whole, whole[self.ranges()] if given == "here" else whole, None, None
        return whole, dense[self.ranges()].to_sparse() if given == "here" else whole, None, None

    def ranges(self):
        box = self.place(torch.arange(torch.Size(self.layout.leading).numel()).reshape(self.layout.leading)).to_local()
        grid = torch.stack(torch.meshgrid(*(torch.arange(n) for n in self.layout.leading), indexing="ij"), -1)
        grid = grid.reshape(-1, self.last)[box.reshape(-1)]
        if not len(grid):
            return tuple(slice(0, n) for n in box.shape)
        return tuple(slice(int(low), int(high) + 1) for low, high in zip(grid.amin(0), grid.amax(0)))

    def given(self, t: Tensor, given: str, placements=None) -> Any:
        if given == "all":
            return t
        if given == "replicated":
            return self.place(t, [R] * self.mesh.ndim)
        placed = self.place(t, placements)
        return placed if given == "placed" else placed.to_local()

    def options(self, named: Dict[str, Any], given: str, found: Dict[str, Tuple[Tensor, Any]]):
        """Returns the global options and those of a process. Adds each tensor that requires grad and its local twin to
        ``found``."""
        whole, here = dict(named), dict(named)
        classes = self.layout.vocab
        if "num_classes" in named:
            classes = max(1, classes + named["num_classes"])
            whole["num_classes"] = here["num_classes"] = classes
        if named.get("weight"):
            whole["weight"] = torch.rand(self.layout.vocab, generator=self.draw, dtype=torch.float64)
            here["weight"] = self.place(whole["weight"], [R] * self.mesh.ndim) if given == "placed" else whole["weight"]
        for name in ("row_weight", "row_mask", "logit_scale", "teacher_logit_scale"):
            if named.get(name) in (True, "rows"):
                t = torch.rand(*self.layout.leading, generator=self.draw, dtype=torch.float64)
                t = whole[name] = t < 0.7 if name == "row_mask" else t
                here[name] = self.given(t, given)
                if name == "row_weight" and given != "here":
                    whole[name].requires_grad_()
                    here[name] = here[name].detach().clone().requires_grad_()
                    found[name] = whole[name], here[name]
        if named.get("logit_scale") == "learned":
            whole["logit_scale"] = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
            here["logit_scale"] = (self.place(whole["logit_scale"], [R] * self.mesh.ndim, True) if given == "placed"
                                   else whole["logit_scale"].detach().clone().requires_grad_())
            found["logit_scale"] = whole["logit_scale"], here["logit_scale"]
        return whole, here, classes


def tensors(out: Any):
    """Returns the tensors in any result of these functions, by name."""
    if isinstance(out, Tensor):
        return {"loss": out}
    if isinstance(out, SparseTarget):
        out = {"indices": out.indices, "values": out.values}
    elif hasattr(out, "_asdict"):
        out = out._asdict()
    elif isinstance(out, tuple):
        first, second = out
        second = second if isinstance(second, dict) else {"second": second}
        out = {**tensors(first), **second}
    return out


def difference(ours: Any, exact: Tensor) -> float:
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    if ours.shape != exact.shape or ours.dtype != exact.dtype:
        return float("inf")
    if exact.numel() == 0 or torch.equal(ours, exact):
        return 0.0
    exact, ours = exact.detach(), ours.detach()
    scale = max(1.0, float(exact[exact.isfinite()].abs().max()))
    return float((ours - exact).abs().nan_to_num(torch.inf).max()) / scale


def compared(world: World, exact: Any, ours: Any, leaves: Dict[str, Tuple[Tensor, Any]], rows,
             twice: bool = False) -> Dict[str, Any]:
    """Returns the differences of results and gradients; a different placement counts as a difference.

    If ``twice``, the gradients of the sum of squares of these gradients are compared too.
    """
    exact, ours, found = tensors(exact), tensors(ours), {}
    assert list(exact) == list(ours)
    grad_output, here = [], []
    for name, t in ours.items():
        assert isinstance(t, DTensor), name
        of_entries = name == "log_probs" and t.shape[:world.last] != world.layout.leading
        placed = tuple(R for _ in rows) if t.dim() == 0 or of_entries else rows
        expected = tuple(Partial() if p.is_shard() else R for p in rows) if of_entries else placed
        found[name] = difference(t, exact[name]) if tuple(t.placements) == expected else f"placed {t.placements}"
        # The log-probability of padding is -inf and has no gradient.
        u = torch.where(exact[name].isfinite(), world.normal(*exact[name].shape), 0.0)
        grad_output.append(u)
        here.append(distribute_tensor(u, world.mesh, placed, src_data_rank=None))
    differentiable = [i for i, t in enumerate(exact.values()) if t.requires_grad]
    if not differentiable or not leaves:
        return found

    def grads(outs, ups, of):
        return torch.autograd.grad([list(outs.values())[i] for i in differentiable], of,
                                   [ups[i] for i in differentiable], create_graph=twice)

    def grads_of_squares(grads, of):
        grads = (g.full_tensor() if isinstance(g, DTensor) else g for g in grads)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), of)

    of_whole = grads(exact, grad_output, [pair[0] for pair in leaves.values()])
    of_here = grads(ours, here, [pair[1] for pair in leaves.values()])
    pairs = {"grad": (of_whole, of_here)}
    if twice:
        pairs["second"] = tuple(grads_of_squares(grads, [pair[at] for pair in leaves.values()])
                                for at, grads in enumerate((of_whole, of_here)))
    for order, (of_whole, of_here) in pairs.items():
        for (name, (_, leaf)), a, b in zip(leaves.items(), of_whole, of_here):
            same = not isinstance(leaf, DTensor) or tuple(b.placements) == tuple(leaf.placements)
            found[f"{order} of {name}"] = difference(b, a) if same else f"placed {b.placements}"
    return found
