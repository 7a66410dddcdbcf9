"""Runs one of several processes of test_sharded_uneven.py.

    RANK=r WORLD_SIZE=n python uneven_cases.py FOLDER CASE ...

Calls every function that takes a group, without ``vocab_start``.
"""

import functools
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

import sparse_ce
from sharded_cases import main
from sharded_problems import assert_same

ROWS, WIDTH = 6, 5
# The columns of each rank in successive calls, some of which change the columns of one rank only.
SPLITS: Dict[int, List[List[int]]] = {
    2: [[4, 3], [4, 4], [4, 3], [4, 0], [0, 4], [7, 0], [7, 7], [1, 6], [3, 4]],
    3: [[3, 3, 1], [3, 3, 3], [3, 3, 0], [3, 0, 3], [0, 0, 3], [2, 5, 3], [2, 2, 2]],
}


def row_loss(out: Any, target: Tensor, by: Tensor) -> Tensor:
    return by * out.entropy - out.log_probs


def of_target(outputs: Any) -> Tensor:
    return outputs.values.sum() + outputs.indices.double().sum()


# Losses of hidden states, weight, its logits, labels, top-k ids and their weights.
LOSSES: Dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, w, z, y, ids, p, **shard: sparse_ce.cross_entropy(z, y, **shard),
    "smoothed": lambda x, w, z, y, ids, p, **shard: sparse_ce.cross_entropy(
        z, (ids, p), label_smoothing=0.2, **shard),
    "selected_log_probs": lambda x, w, z, y, ids, p, **shard: sparse_ce.selected_log_probs(
        z, y, padding_value=0.0, **shard).log_probs.sum(),
    "topk_log_probs": lambda x, w, z, y, ids, p, **shard: of_target(sparse_ce.topk_log_probs(z, 2, **shard)),
    "divergence": lambda x, w, z, y, ids, p, **shard: sparse_ce.divergence(z, (ids, p), **shard),
    "distillation_loss": lambda x, w, z, y, ids, p, **shard: sparse_ce.distillation_loss(
        z, (ids, p), y, alpha=0.5, **shard),
    "dense_divergence": lambda x, w, z, y, ids, p, **shard: sparse_ce.distillation_loss(
        z, z.detach().cos(), kind="jsd", row_mask=y != -100, **shard),
    "dense_unreduced": lambda x, w, z, y, ids, p, **shard: sparse_ce.distillation_loss(
        z, z.detach().cos(), kind="reverse_kl", reduction="none", **shard).square().sum(),
    "linear_dense_divergence": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_distillation_loss(
        x, w, (x.detach().cos(), w.detach()), y, alpha=0.5, kind="hellinger", chunk_rows=4, **shard),
    "linear_dense_unreduced": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_distillation_loss(
        x, w, (x.detach().cos(), w.detach()), kind="tv", reduction="none", **shard).square().sum(),
    "linear_dense_logits": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_distillation_loss(
        x, w, z.detach(), y, alpha=0.5, **shard),
    "binary": lambda x, w, z, y, ids, p, **shard: sparse_ce.binary_cross_entropy_with_logits(
        z, (ids, p), gamma=(0.0, 2.0), clip=0.05, label_smoothing=0.1, **shard),
    "binary_unreduced": lambda x, w, z, y, ids, p, **shard: sparse_ce.binary_cross_entropy_with_logits(
        z, y, reduction="none", logit_bias=0.5, **shard).square().sum(),
    "linear_binary": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_binary_cross_entropy(
        x, w, (ids, p), reduction="batchmean", chunk_classes=2, **shard),
    "linear_binary_unreduced": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_binary_cross_entropy(
        x, w, y, reduction="none", gamma=1.0, label_smoothing=0.1, **shard).square().sum(),
    "linear_cross_entropy": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_cross_entropy(x, w, y, **shard),
    "unreduced": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_cross_entropy(
        x, w, (ids, p), reduction="none", chunk_rows=4, **shard).square().sum(),
    "linear_selected_log_probs": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_selected_log_probs(
        x, w, y, padding_value=0.0, **shard).log_probs.sum(),
    "linear_row_loss": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_row_loss(
        row_loss, x, w, y, p[:, 0], return_entropy=True, **shard),
    "linear_topk_log_probs": lambda x, w, z, y, ids, p, **shard: of_target(
        sparse_ce.linear_topk_log_probs(x, w, 2, **shard)),
    "linear_distillation_loss": lambda x, w, z, y, ids, p, **shard: sparse_ce.linear_distillation_loss(
        x, w, (ids, p), y, alpha=0.5, **shard),
}


def given(each: List[int], seed: int = 0) -> Any:
    """Returns hidden states, the weight of all classes, labels, ids and weights; every class is a label."""
    draw = torch.Generator().manual_seed(seed)
    classes = sum(each)
    x, w = (torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in (ROWS, classes))
    labels = (classes - 1 - torch.arange(ROWS)) % classes
    labels[2] = -100
    return x, w, labels, torch.stack((labels, labels), 1), torch.full((ROWS, 2), 0.5, dtype=torch.float64)


def compare(loss: Callable[..., Tensor], each: List[int], padded: int = 0, sequence: bool = False) -> None:
    x, w, *target = given(each)
    begin, end = sum(each[:dist.get_rank()]), sum(each[:dist.get_rank() + 1])
    named: Dict[str, Any] = dict(num_classes=sum(each) - padded) if padded else {}
    found = []
    for whole in (True, False):
        weight = (w if whole else w[begin:end]).clone().requires_grad_()
        hidden = (x if whole or not sequence else x.chunk(dist.get_world_size())[dist.get_rank()]).clone()
        hidden.requires_grad_()
        logits = hidden @ weight.T if not sequence else hidden
        group = sparse_ce.SequenceGroup(dist.group.WORLD) if sequence else dist.group.WORLD
        shard = {} if whole else dict(group=group)
        out = loss(hidden, weight, logits, *target, **shard, **named)
        grads = torch.autograd.grad(out, [hidden, weight], allow_unused=True) if out.requires_grad else [None, None]
        if not sequence and grads[0] is not None and not whole and grads[0].shape == x.shape and logits_are_used(loss):
            dist.all_reduce(grads[0])  # the columns' contributions
        found.append((out.detach(), *grads))
    (expected, of_hidden, of_weight), (ours, our_hidden, our_weight) = found
    assert_same(ours, expected)
    if of_weight is not None:
        assert_same(our_weight, of_weight[begin:end])
    if of_hidden is not None:
        rows = of_hidden.chunk(dist.get_world_size())[dist.get_rank()] if sequence else of_hidden
        assert_same(our_hidden, rows)


def logits_are_used(loss: Callable[..., Tensor]) -> bool:
    return not any(LOSSES[name] is loss for name in LOSSES if name.startswith("linear") or name == "unreduced")


def every_split(name: str) -> None:
    for each in SPLITS[dist.get_world_size()]:
        if "topk" in name and sum(each) < 2:
            continue
        for _ in range(2):
            compare(LOSSES[name], each)


def padding() -> None:
    for name in LOSSES:
        for each in SPLITS[dist.get_world_size()]:
            if sum(each) > 3:
                x, w, labels, ids, p = given(each)
                usable = functools.partial(_clipped, LOSSES[name], sum(each) - 1)
                compare_padded(name, usable, each)


def _clipped(loss: Callable[..., Tensor], classes: int, x: Tensor, w: Tensor, z: Tensor, y: Tensor, ids: Tensor,
             p: Tensor, **shard: Any) -> Tensor:
    return loss(x, w, z, y.clamp(max=classes - 1), ids.clamp(max=classes - 1), p, **shard)


def compare_padded(name: str, loss: Callable[..., Tensor], each: List[int]) -> None:
    x, w, *target = given(each)
    begin, end = sum(each[:dist.get_rank()]), sum(each[:dist.get_rank() + 1])
    here = w[begin:end]
    expected = loss(x, w, x @ w.T, *target, num_classes=sum(each) - 1)
    found = loss(x, here, x @ here.T, *target, num_classes=sum(each) - 1, group=dist.group.WORLD)
    assert_same(found, expected)


def sequences() -> None:
    for each in SPLITS[dist.get_world_size()]:
        for name in ("linear_cross_entropy", "linear_selected_log_probs", "linear_row_loss", "linear_dense_divergence",
                     "linear_dense_unreduced", "linear_binary", "linear_binary_unreduced"):
            compare(LOSSES[name], each, sequence=True)


def another_group_of_the_same_ranks() -> None:
    for _ in range(2):
        group = dist.new_group()
        for each in SPLITS[dist.get_world_size()][:3]:
            x, w, labels, *_ = given(each)
            begin = sum(each[:dist.get_rank()])
            here = w[begin:begin + each[dist.get_rank()]]
            assert_same(sparse_ce.cross_entropy(x @ here.T, labels, group=group),
                        sparse_ce.cross_entropy(x @ w.T, labels))
        dist.destroy_process_group(group)


def refused_alike() -> None:
    """Checks that every rank raises the error and no rank hangs."""
    world, rank = dist.get_world_size(), dist.get_rank()
    each = SPLITS[world][0]
    classes = sum(each)
    x, w, labels, *_ = given(each)
    here = w[sum(each[:rank]):sum(each[:rank + 1])]

    def compiled(z: Tensor, labels: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(z, labels, group=dist.group.WORLD)

    calls = {
        "target must have indices in": lambda: sparse_ce.cross_entropy(
            x @ here.T, labels.clamp(min=0) + 1, group=dist.group.WORLD),
        "num_classes must be in": lambda: sparse_ce.linear_distillation_loss(
            x, here, (labels[:, None], torch.ones(ROWS, 1).double()), num_classes=classes + 1, group=dist.group.WORLD),
        "at least one class": lambda: sparse_ce.linear_cross_entropy(x, here[:0], labels, group=dist.group.WORLD),
        "vocab_start must be given": lambda: torch.compile(compiled, backend="eager")(x @ here.T, labels),
    }
    for text, call in calls.items():
        try:
            call()
        except Exception as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    compare(LOSSES["cross_entropy"], each)


def sent() -> None:
    """Checks that each rank sends eight bytes per call, and nothing with vocab_start."""
    x, w, labels, ids, p = given(SPLITS[dist.get_world_size()][0])
    each = SPLITS[dist.get_world_size()][0]
    begin = sum(each[:dist.get_rank()])
    here = w[begin:begin + each[dist.get_rank()]]
    for loss in LOSSES.values():
        counts = []
        for shard in (dict(group=dist.group.WORLD),
                      dict(group=dist.group.WORLD, vocab_start=begin, num_classes=sum(each))):
            with profile(record_shapes=True) as seen:
                loss(x, here, x @ here.T, labels, ids, p, **shard)
            counts.append(sorted(str(e.input_shapes[0]) for e in seen.events()
                                 if e.name.startswith("_c10d_functional::all")))
        assert counts[0] == sorted(["[1]", *counts[1]]), counts


def of_dense_teachers() -> None:
    """Checks dense teachers of no rows, and that transforms are refused."""
    group: Any = dist.group.WORLD
    z, x, w = torch.randn(2, 3), torch.randn(2, WIDTH), torch.randn(3, WIDTH)
    assert sparse_ce.distillation_loss(z[:0].requires_grad_(), z[:0], group=group) == 0
    assert sparse_ce.linear_distillation_loss(x[:0].requires_grad_(), w, (x[:0], w), group=group) == 0
    losses: List[Callable[[Tensor], Tensor]] = [
        lambda t: sparse_ce.distillation_loss(t[:, :3], z, group=group),
        lambda t: sparse_ce.linear_distillation_loss(t, w, (x, w), group=group)]
    for loss in losses:
        try:
            torch.func.grad(loss)(x)
        except RuntimeError as error:
            assert "input must be a regular tensor" in str(error), error
        else:
            raise AssertionError("a transform of sharded classes must be refused")


CASES: Dict[str, Callable[[], None]] = {
    **{f"every split, {name}": functools.partial(every_split, name) for name in LOSSES}, "padding": padding,
    "sequences": sequences, "another group of the same ranks": another_group_of_the_same_ranks,
    "refused alike": refused_alike, "sent": sent, "of dense teachers": of_dense_teachers}

if __name__ == "__main__":
    main(lambda name: CASES[name]())
