"""Generates random losses with logits sharded over the classes, and the same loss in one process."""

import math
import zlib
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

import sparse_ce
from cases import FORMS, WITH_VALUES, Draw
from close import assert_close_to_float64

EXTRAS = ("lse", "entropy", "argmax")
OUTPUTS = ("log_tail", "entropy", "mean_logit", "argmax", "collision", "rank")
CUTS = ("even", "any", "any", "any", "first empty", "last empty", "all in one")
LAYOUTS = ("contiguous", "contiguous", "strided", "columns first")


class Shard(NamedTuple):
    begin: int
    end: int
    start: Optional[int]  # vocab_start


class Problem:
    """Holds the arguments of a call, the same on every rank. ``fixed`` overrides random choices."""

    def __init__(self, seed: int, world: int, **fixed: Any):
        self.draw = draw = Draw("cpu", seed)

        def one_of(name: str, *choices: Any) -> Any:
            chosen = choices[int(draw.integers(len(choices), 1))]
            return fixed.get(name, chosen)

        def chance(name: str, p: float) -> bool:
            happens = float(draw.uniform(1)) < p
            return fixed.get(name, happens)

        self.select = chance("select", 0.3)
        self.form = one_of("form", *FORMS)
        self.dtype = one_of("dtype", *[torch.float64] * 5, torch.float32, torch.float32, torch.bfloat16, torch.float16)
        self.classes = one_of("classes", 7, 37, 37, 37, 130, 700, 5000)
        shape = one_of("shape", (6,), (11,), (3, 4), (2, 3, 2))
        ignore_index = one_of("ignore_index", -100, -100, 3)
        self.case = case = FORMS[self.form](shape, self.classes, draw, ignore_index)
        self.reduction = one_of("reduction", "none", "sum", "mean")
        self.layout, self.inplace = one_of("layout", *LAYOUTS), one_of("inplace", False, False, "backward", "forward")
        extras = OUTPUTS if self.select else EXTRAS
        self.extras = [name for name in extras if chance(name, 0.4)]
        self.values_grad = self.form in WITH_VALUES and not self.select and chance("values_grad", 0.6)

        self.keywords: Dict[str, Any] = {} if ignore_index == -100 else dict(ignore_index=ignore_index)
        if chance("softcap", 0.3):
            self.keywords["softcap"] = 8.0
        self.scale = one_of("scale", None, None, "number", "rows", "learned")
        if not self.select:
            if chance("weight", 0.3):
                weight = draw.uniform(self.classes, low=0.2, high=2)
                weight[::5] = 0
                self.keywords["weight"] = weight
            self.keywords["label_smoothing"] = one_of("label_smoothing", 0.0, 0.0, 0.0, 0.1, 1.0)
            self.keywords["z_loss"] = one_of("z_loss", 0.0, 0.01)
            if self.reduction == "mean" and chance("normalizer", 0.2):
                self.keywords["normalizer"] = torch.tensor(7)
        self.row_weight = None
        if not self.select and chance("row_weight", 0.3):
            self.row_weight = draw.uniform(*case.shape, low=-1, high=2, dtype=torch.float64)
            self.row_weight[0] = 0
        size = one_of("size", 1, 1, 1, 600)
        self.scales = None
        if self.dtype != torch.float64 and size > 1:
            self.scale = None  # 16-bit rounding of its product is as large as the error of probabilities
        if self.scale is not None:
            shape = case.shape if self.scale == "rows" else ()
            self.scales = draw.uniform(*shape, low=0.5, high=1.5, dtype=torch.float64)

        self.cuts = self._cuts(one_of("cuts", *CUTS), world)
        self.logits = self._logits(size, chance("infinite", 0.3))
        self.grad_seed = seed + 1

    def _cuts(self, kind: str, world: int) -> List[int]:
        """Returns the bounds [0, ..., columns] of the shards. The columns from ``classes`` on are padding."""
        self.start = kind != "even" or bool(self.draw.integers(2, 1))
        if kind == "even":
            each = -(-self.classes // world)
            return [i * each for i in range(world + 1)]
        n = self.classes + int(self.draw.integers(2, 1)) * int(self.draw.integers(6, 1))
        if kind == "padding":
            return [*self._inner(self.classes, world - 2), self.classes, self.classes + 5]
        if kind == "first empty":
            return [0, *self._inner(n, world - 2), n]
        if kind == "last empty":
            return [*self._inner(n, world - 2), n, n]
        if kind == "all in one":
            at = int(self.draw.integers(world, 1))
            return [0] * (at + 1) + [n] * (world - at)
        return [*self._inner(n, world - 1), n]

    def _inner(self, n: int, count: int) -> List[int]:
        return [0, *sorted(self.draw.integers(n + 1, count).tolist())]

    def _logits(self, size: float, infinite: bool) -> Tensor:
        columns, case, draw = self.cuts[-1], self.case, self.draw
        logits = size * draw.logits(case.dense, torch.float64, columns).reshape(-1, columns)
        logits = logits.clamp(-6e4, 6e4)
        ties = draw.integers(self.classes, 3)
        logits[1, ties] = logits[1, :self.classes].max()
        if infinite:
            begin, end = self.cuts[1:3]
            logits[0, draw.integers(self.classes, max(1, self.classes // 3))] = -math.inf
            logits[2, begin:end] = -math.inf
            logits[3, :self.classes - 1] = -math.inf
            logits[5] = -math.inf
        logits = logits.reshape(*case.shape, columns)
        logits[..., self.classes:] = math.nan
        logits[..., self.classes + 1:] = math.inf
        logits[case.ignored] = math.nan
        logits[case.ignored, :2] = math.inf
        return logits.to(self.dtype)

    def shard(self, rank: int) -> Shard:
        begin, end = self.cuts[rank:rank + 2]
        return Shard(begin, end, begin if self.start else None)

    def run(self, dtype: torch.dtype, shard: Optional[Shard] = None, group: Any = None) -> Dict[str, Tensor]:
        """Returns outputs by name, and gradients as ``d name``. Without ``shard`` one process holds all classes."""
        keywords = dict(self.keywords, inplace=self.inplace, num_classes=self.classes)
        local = self.logits.to(dtype)
        if shard is not None:
            local = local[..., shard.begin:shard.end]
            keywords.update(group=group, vocab_start=shard.start)
        leaf = laid_out(local, self.layout).requires_grad_()
        leaves = {"logits": leaf}
        values = self.case.values
        if values is not None and dtype == torch.float64:
            values = values.double()
        if self.values_grad:
            leaves["values"] = values = values.clone().requires_grad_()
        if self.scales is not None:
            scales = self.scales.to(torch.float64 if dtype == torch.float64 else torch.float32)
            if self.scale == "learned":
                leaves["scale"] = scales = scales.clone().requires_grad_()
            keywords["logit_scale"] = float(self.scales) if self.scale == "number" else scales
        if self.row_weight is not None:
            leaves["row_weight"] = keywords["row_weight"] = self.row_weight.to(
                torch.float64 if dtype == torch.float64 else torch.float32).clone().requires_grad_()
        keywords.update({f"return_{name}": True for name in self.extras})
        x = leaf.view_as(leaf) if self.inplace else leaf
        x = _Kept.apply(x) if self.inplace else x
        target = self.case.build(values)
        if self.select:
            out = sparse_ce.selected_log_probs(x, target, padding_value=-3.0, **keywords)
            found = {name: getattr(out, name) for name in ("log_probs", "lse", *self.extras)}
        else:
            out = sparse_ce.cross_entropy(x, target, reduction=self.reduction, **keywords)
            found = out._asdict() if isinstance(out, tuple) else {"loss": out}
        draw = Draw("cpu", self.grad_seed)
        differentiable = [t for t in found.values() if t.requires_grad]
        grad_output = []
        for t in differentiable:
            g = draw.normal(*t.shape, dtype=torch.float64)
            if t.dim():
                g[draw.uniform(*t.shape) < 0.2] = 0
                if t.shape == self.case.shape:
                    g[self.case.ignored] = math.nan
            grad_output.append(g.to(t.dtype))
        grads = torch.autograd.grad(differentiable, list(leaves.values()), grad_output)
        found = {name: t.detach() for name, t in found.items()}
        return {**found, **{f"d {name}": g for name, g in zip(leaves, grads)}}


class _Kept(torch.autograd.Function):
    """Copies a tensor to its own memory, which may be overwritten, with any strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def laid_out(t: Tensor, layout: str) -> Tensor:
    if layout == "strided":
        return t.new_full((*t.shape[:-1], t.shape[-1] + 3), math.nan)[..., 1:t.shape[-1] + 1].copy_(t)
    if layout == "columns first":
        return t.movedim(-1, 0).clone(memory_format=torch.contiguous_format).movedim(0, -1)
    return t.clone(memory_format=torch.contiguous_format)


def compare(problem: Problem, rank: int, world: int, group: Any = None) -> None:
    """Compares this rank's results, and the sum over all ranks, with those of one process, and with the other ranks."""
    shard = problem.shard(rank)
    ours = problem.run(problem.dtype, shard, dist.group.WORLD if group is None else group)
    assert_the_same_everywhere({name: t for name, t in ours.items() if name != "d logits"})
    if "d logits" in ours:
        whole = torch.zeros(problem.logits.shape, dtype=torch.float64)
        whole[..., shard.begin:shard.end] = ours["d logits"]
        dist.all_reduce(whole)
        ours["d logits"] = whole.to(problem.dtype)
    one = problem.run(problem.dtype)
    exact = one if problem.dtype == torch.float64 else problem.run(torch.float64)
    assert ours.keys() == one.keys()
    for name, t in ours.items():
        if name == "d scale" and problem.dtype != torch.float64:
            terms = (exact["d logits"] * problem.logits).nan_to_num(0, 0, 0).abs().sum()  # the terms whose sum it is
            torch.testing.assert_close(t.double(), exact[name], rtol=0, atol=float(1e-6 * terms), equal_nan=True)
        elif t.is_floating_point():
            near(name, t, one[name], exact[name].double(), problem.dtype)
        elif "softcap" not in problem.keywords or problem.dtype == torch.float64:
            assert torch.equal(t, one[name]), f"{name}: {t}, in one process {one[name]}"


def near(name: str, ours: Tensor, one: Tensor, exact: Tensor, logits: torch.dtype) -> None:
    assert ours.dtype == one.dtype and ours.shape == one.shape, f"{name}: {ours.dtype} {list(ours.shape)}"
    finite = one.isfinite() & exact.isfinite()
    try:
        torch.testing.assert_close(ours[~finite], one[~finite], rtol=0, atol=0, equal_nan=True)
        if logits != torch.float64 and name != "d logits":  # logarithms of values near 1
            finite &= ((ours.double() - exact).abs() > 1e-5)
        if finite.any():
            assert_close_to_float64(ours[finite], one[finite], exact[finite],
                                    arithmetic=torch.float32 if logits != torch.float64 else None)
    except AssertionError as error:
        if "vacuous" in str(error) and one.dtype != torch.float64:
            return  # some random problems have no digits in 16 bits
        raise AssertionError(f"{name}: {error}") from None


def share(t: Tensor, **named: Any) -> Tuple[Tensor, Dict[str, Any]]:
    """Returns this rank's columns, an uneven share, and the keywords that describe them."""
    world, rank, n = dist.get_world_size(), dist.get_rank(), t.shape[-1]
    cuts = [0, *(n * (i + 1) // world - 1 for i in range(world - 1)), n]
    begin, end = cuts[rank:rank + 2]
    local = t.detach()[..., begin:end].clone().requires_grad_(t.requires_grad)
    return local, dict(group=dist.group.WORLD, vocab_start=begin, num_classes=n, **named)


def assert_same(ours: Any, one: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, one, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_the_same_everywhere(found: Dict[str, Tensor]) -> None:
    """Checks that all ranks hold bitwise the same tensors."""
    for name, t in found.items():
        raw = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        mine = torch.tensor([zlib.crc32(raw), t.numel()])
        lowest, highest = mine.clone(), mine.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        assert torch.equal(lowest, highest), f"{name} differs between ranks, here {t}"
