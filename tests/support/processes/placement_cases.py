"""Runs one of the four processes of test_placements.py.

    python placement_cases.py RANK FOLDER quick|slow

Each process computes the global result and compares it with its results for DTensors. It saves {name of the case:
{result: largest difference}} and the error messages to FOLDER/RANK.pt.
"""

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.profiler import profile

import sparse_ce
from cases import drawn
from linear_sharded_cases import Collectives
from placement_training import TRAINING
from placement_world import WORLD, D, Layout, R, V, World, compared, mesh_of
from sparse_ce import SparseTarget

LAYOUTS = {
    "classes": Layout("all", (4, 3), (Shard(2),)),
    "classes_uneven": Layout("all", (7,), (Shard(1),), 50257),
    "classes_none_here": Layout("all", (5,), (Shard(1),), 5),
    "data_classes": Layout("grid", (4, 3), (Shard(0), Shard(2))),
    "data_classes_uneven": Layout("grid", (5,), (Shard(0), Shard(1)), 1001),
    "classes_sequence": Layout("grid", (2, 3), (Shard(2), Shard(1))),
    "replicate_classes": Layout("grid", (4,), (R, Shard(1))),
    "no_rows_here": Layout("grid", (1, 3), (Shard(0), Shard(2))),
    "rows": Layout("grid", (4, 3), (Shard(0), Shard(1))),
    "rows_twice": Layout("grid", (5,), (Shard(0), Shard(0))),
    "without_rows": Layout("grid", (2, 0), (Shard(0), Shard(2))),
    "replicate": Layout("grid", (4, 3), (R, R)),
}
FORMS = "labels", "pair", "log_probs", "jagged", "coo"
GIVEN = "all", "here", "placed"  # a target of all rows, of the local rows, of DTensors
OPTIONS: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "sum": dict(reduction="sum", label_smoothing=0.1),
    "none": dict(reduction="none", z_loss=0.01, return_lse=True),
    "weight": dict(weight=True, label_smoothing=0.1, return_entropy=True, return_argmax=True),
    "scale": dict(logit_scale="learned", softcap=5.0, row_weight=True),
    "rows": dict(logit_scale="rows", row_weight=True, reduction="none"),
    "normalizer": dict(normalizer=7.0, return_lse=True),
    "padded": dict(num_classes=-3, weight=True),
}


def of_logits(layout: str, form: str, given: str, option: str, seed: int, twice: bool = False):
    """Tests cross_entropy."""
    world, leaves = World(LAYOUTS[layout], seed), {}
    whole, here, classes = world.options(OPTIONS[option], given, leaves)
    x = (world.normal(*world.layout.leading, world.layout.vocab) * 4).requires_grad_()
    local = world.place(x, world.layout.placements, True)
    target, ours, values, learned = world.target(form, given, classes)
    leaves["input"] = x, local
    if learned is not None:
        leaves["values"] = values, learned
    return compared(world, sparse_ce.cross_entropy(x, target, **whole), sparse_ce.cross_entropy(local, ours, **here),
                    leaves, world.rows, twice)


ALL = dict(return_log_tail=True, return_entropy=True, return_mean_logit=True, return_argmax=True, return_collision=True,
           return_rank=True)


def of_rows(out, ids, by):
    loss = by * torch.where(out.log_probs.isneginf(), 0.0, out.log_probs).sum(1) - 0.1 * out.entropy
    return loss, {"lse": out.lse, "argmax": out.argmax}


def fewer(labels):
    """Returns labels with fewer active rows than the teacher has."""
    return labels.masked_fill(labels % 3 == 0, -100)


def smoothed(target):
    """Returns a target of any format with label smoothing."""
    if isinstance(target, tuple):
        target = SparseTarget.from_topk(*target, values_are="probs")
    elif isinstance(target, torch.Tensor):
        target = SparseTarget.from_index(target)
    return sparse_ce.SmoothedTarget(target, 0.2)


def with_loose_entries(ids):
    """Adds two entries that belong to no row."""
    indices, values = (None if t is None else torch.cat((t, t[:2])) for t in (ids.indices, ids.values))
    return ids._replace(indices=indices, values=values)


CALLS: Dict[str, Callable[..., Any]] = {
    "selected": lambda x, ids, by, **o: sparse_ce.selected_log_probs(x, ids, **ALL, **o),
    "divergence": lambda x, t, by: sparse_ce.divergence(x, t, kind="jsd"),
    "smoothed": lambda x, t, by: sparse_ce.cross_entropy(x, smoothed(t)),
    "divergence_sum": lambda x, t, by: sparse_ce.divergence(x, t, kind="reverse_kl", tail="floor", reduction="sum"),
    "divergence_padded": lambda x, t, by: sparse_ce.divergence(x, t, num_classes=V),
    "divergence_of_log_probs": lambda x, t, by: sparse_ce.divergence(
        sparse_ce.selected_log_probs(x, t, return_log_tail=True), t, reduction="none"),
    "binary": lambda x, t, by: sparse_ce.binary_cross_entropy_with_logits(x, t, gamma=(0.0, 2.0), clip=0.05),
    "binary_batchmean": lambda x, t, by: sparse_ce.binary_cross_entropy_with_logits(
        x, smoothed(t), reduction="batchmean"),
    "binary_none": lambda x, t, by: sparse_ce.binary_cross_entropy_with_logits(x, t, reduction="none", logit_bias=0.5),
    "binary_padded": lambda x, t, by: sparse_ce.binary_cross_entropy_with_logits(
        x, t, num_classes=V, pos_weight=torch.linspace(1, 3, V).double()),
    "distillation": lambda x, t, by, labels: sparse_ce.distillation_loss(
        x, t, smoothed(fewer(labels)), alpha=0.3),
    "distillation_padded": lambda x, t, by, labels: sparse_ce.distillation_loss(
        x, t, labels, alpha=0.3, num_classes=V),
    "distillation_normalizer": lambda x, t, by, labels: sparse_ce.distillation_loss(
        x, t, labels, alpha=0.3, temperature=2.0, tail="renormalize", normalizer=5),
}
OF_LOG_PROBS: Dict[str, Callable[..., Any]] = {
    "loose": lambda x, ids, by: sparse_ce.selected_log_probs(x, with_loose_entries(ids), padding_value=-7.0),
    "mean": lambda x, t, by: sparse_ce.divergence(sparse_ce.selected_log_probs(x, t, return_log_tail=True), t),
    "gathered": lambda x, t, by: sparse_ce.divergence(
        gathered(sparse_ce.selected_log_probs(x, t, return_log_tail=True)), t),
}


def gathered(out):
    """Returns the outputs with the log-probabilities of all entries on every rank."""
    t = out.log_probs
    return replace(out, log_probs=t.redistribute(placements=[R] * t.device_mesh.ndim) if isinstance(t, DTensor) else t)


def fixed(target):
    """Returns a target whose values do not require grad."""
    if isinstance(target, tuple):
        return target[0], target[1].detach()
    return target._map(lambda part: part.detach()) if isinstance(target, SparseTarget) else target


def of_labels(out, labels, by):
    return -by * out.log_probs, {"lse": out.lse}


OF_HEAD: Dict[str, Callable[..., Any]] = {
    "aux_of_no_row": lambda x, w, t, by, **o: sparse_ce.linear_row_loss(
        of_labels, x, w, torch.tensor([[0, 1, 2]] * 2 + [[-100] * 3] * 2), by, has_aux=True, **o),
}
HEADS: Dict[str, Callable[..., Any]] = {
    "loss": lambda x, w, t, by, **o: sparse_ce.linear_cross_entropy(x, w, t, label_smoothing=0.1, **o),
    "loss_none": lambda x, w, t, by, **o: sparse_ce.linear_cross_entropy(
        x, w, t, row_weight=by, reduction="none", return_entropy=True, **o),
    "selected": lambda x, w, t, by, **o: sparse_ce.linear_selected_log_probs(x, w, t, **ALL, **o),
    "rows": lambda x, w, t, by, **o: sparse_ce.linear_row_loss(
        of_rows, x, w, t, by, has_aux=True, return_entropy=True, return_argmax=True, **o),
    "rows_none": lambda x, w, t, by, **o: sparse_ce.linear_row_loss(
        of_rows, x, w, t, by, has_aux=True, return_entropy=True, return_argmax=True, reduction="none", **o),
    "binary": lambda x, w, t, by, **o: sparse_ce.linear_binary_cross_entropy(
        x, w, fixed(t), row_weight=by, gamma=(0.0, 2.0), label_smoothing=0.1, chunk_classes=7, **o),
    "binary_batchmean": lambda x, w, t, by, **o: sparse_ce.linear_binary_cross_entropy(
        x, w, smoothed(fixed(t)), row_weight=by, reduction="batchmean", clip=0.05, logit_scale=1.3, **o),
    "binary_none": lambda x, w, t, by, **o: sparse_ce.linear_binary_cross_entropy(
        x, w, fixed(t), row_weight=by, reduction="none", logit_bias=0.3, **o),
    "distillation": lambda x, w, t, by, labels, **o: sparse_ce.linear_distillation_loss(
        x, w, t, fewer(labels), alpha=0.3, **o),
    "distillation_together": lambda x, w, t, by, labels, **o: sparse_ce.linear_distillation_loss(
        x, w, t._map(lambda part: part.detach()), fewer(labels), alpha=0.3, kind="jsd", tail="bucket", chunk_rows=5,
        **o),
    "topk": lambda x, w, t, by, **o: sparse_ce.linear_topk_log_probs(x, w, 4, **o),
    "topk_logits": lambda x, w, t, by, **o: sparse_ce.linear_topk_logits(x, w, 4, **o),
}


def of_functions(name: str, layout: str, form: str, given: str, seed: int):
    world, leaves = World(LAYOUTS[layout], seed), {}
    padding = 4 if name.endswith("padded") else 0
    x = (world.normal(*world.layout.leading, world.layout.vocab + padding) * 2).requires_grad_()
    local = world.place(x, world.layout.placements, True)
    target, ours, values, learned = world.target(form, given, world.layout.vocab)
    leaves["input"] = x, local
    if learned is not None and name != "selected":
        leaves["values"] = values, learned
    more, ours_more = {}, {}
    if name.startswith("distillation"):
        more["labels"], ours_more["labels"], *_ = world.target("labels", given, world.layout.vocab)
    call = {**CALLS, **OF_LOG_PROBS}[name]
    return compared(world, call(x, target, None, **more), call(local, ours, None, **ours_more), leaves, world.rows)


DENSE: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "mask": dict(kind="jsd", beta=0.3, row_mask=True, row_weight=True, softcap=5.0, teacher_softcap=4.0),
    "none": dict(kind="reverse_kl", row_mask=True, row_weight=True, reduction="none"),
    "scale": dict(kind="hellinger", logit_scale="rows", teacher_logit_scale="rows", reduction="sum"),
    "normalizer": dict(kind="tv", normalizer=7.0, row_mask=True, num_classes=-3, inplace="forward"),
    "padded": dict(kind="alpha_divergence", num_classes=-3, inplace="backward"),
}


def of_dense(layout: str, given: str, option: str, seed: int, twice: bool = False):
    """Tests dense_divergence."""
    world, leaves = World(LAYOUTS[layout], seed), {}
    whole, here, _ = world.options(DENSE[option], "all" if given == "replicated" else given, leaves)
    x, y = (world.normal(*world.layout.leading, world.layout.vocab) * 2 for _ in range(2))
    leaves["input"] = x.requires_grad_(), world.place(x, world.layout.placements, True)
    found = []
    for at, options in enumerate((whole, here)):
        teacher = y if at == 0 else world.given(y, given, world.layout.placements)
        found.append(sparse_ce.distillation_loss(leaves["input"][at] * 1, teacher, **options))
    return compared(world, *found, leaves, world.rows, twice)


BINARY: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "mask": dict(row_mask=True, row_weight=True, weight=True, reduction="batchmean"),
    "none": dict(row_weight=True, reduction="none", label_smoothing=0.1),
    "learned": dict(logit_scale="learned", logit_bias=-0.5, reduction="sum"),
    "normalizer": dict(normalizer=7.0, num_classes=-3, gamma=2.0, clip=0.05, inplace="forward"),
}


def of_binary(layout: str, form: str, given: str, option: str, seed: int, twice: bool = False):
    """Tests binary_cross_entropy_with_logits."""
    world, leaves = World(LAYOUTS[layout], seed), {}
    whole, here, classes = world.options(BINARY[option], given, leaves)
    x = (world.normal(*world.layout.leading, world.layout.vocab) * 2).requires_grad_()
    leaves["input"] = x, world.place(x, world.layout.placements, True)
    target, ours, values, learned = world.target(form, given, classes)
    if learned is not None:
        leaves["values"] = values, learned
    found = [sparse_ce.binary_cross_entropy_with_logits(leaves["input"][at] * 1, t, **options)
             for at, (t, options) in enumerate(((target, whole), (ours, here)))]
    return compared(world, *found, leaves, world.rows, twice)


def of_binary_twice(*arguments: Any):
    return of_binary(*arguments, twice=True)


# Placements of hidden states, weight and bias on the grid; None is a plain tensor.
HEAD_LAYOUTS = {
    "data_tensor": ((Shard(0), R), (R, Shard(0)), (R, Shard(0))),
    "tensor_first": ((R, Shard(1)), (Shard(0), R), None),
    "replicated_bias": ((Shard(0), R), (R, Shard(0)), (R, R)),
    "sequence": ((Shard(0), Shard(1)), (R, Shard(0)), (R, Shard(0))),
    "plain_hidden": (None, (R, Shard(0)), (R, Shard(0))),
    "plain_head": ((Shard(0), Shard(1)), None, None),
    "replicated": ((R, R), (R, R), (R, R)),
    "rows": ((Shard(0), Shard(0)), (R, R), None),
    # The shards of the sequence have equal sizes, so the hidden states are not gathered.
    "sequence_even": ((Shard(0), Shard(1)), (R, Shard(0)), (R, Shard(0))),
    "sequence_rows": ((Shard(0), Shard(0)), (R, Shard(0)), None),
    "sequence_alone": ((R, Shard(1)), (R, Shard(0)), (R, R)),
    "sequence_first": ((Shard(1), R), (Shard(0), R), (R, R)),
    "sequence_cut": ((Shard(0), Shard(0)), (Shard(0), R), None),  # rows also sharded on the other dimension
}


def leading_of(placed: str):
    return (4, 6) if placed.startswith("sequence_") else (4, 3)


def of_heads(name: str, placed: str, form: str, given: str, seed: int, twice: bool = False):
    hidden_at, weight_at, bias_at = HEAD_LAYOUTS[placed]
    rows = [R, R] if hidden_at is None else [R if w is not None and w.is_shard() else h for h, w in zip(
        hidden_at, weight_at or (None, None))]
    leading = leading_of(placed)
    world, leaves = World(Layout("grid", leading, tuple(rows)), seed), {}
    hidden, weight, bias = world.normal(*leading, D), world.normal(V, D), world.normal(V)
    for what, t, at in (("input", hidden, hidden_at), ("linear_weight", weight, weight_at), ("bias", bias, bias_at)):
        t = t.requires_grad_()
        leaves[what] = t, t.detach().clone().requires_grad_() if at is None else world.place(t, at, True)
    by = world.normal(*leading).requires_grad_()
    if name != "selected" and name != "loss":
        leaves["by"] = by, (by.detach().clone() if given == "all" else world.given(by, given)).requires_grad_()
    target, ours, values, learned = world.target(form, given, V)
    if learned is not None and name.startswith("loss"):
        leaves["values"] = values, learned
    more, ours_more = {}, {}
    if name.startswith("distillation"):
        leaves.pop("by")
        more["labels"], ours_more["labels"], *_ = world.target("labels", given, V)
    if name.startswith("rows") and form == "pair":
        target, ours = target[0], ours[0]
    found = []
    for at, t, m in ((0, target, more), (1, ours, ours_more)):
        own = {key: pair[at] for key, pair in leaves.items()}
        found.append({**HEADS, **OF_HEAD}[name](own["input"], own["linear_weight"], t, own.get("by"),
                                                linear_bias=own["bias"], **m))
    if given == "here":
        leaves.pop("by", None)
    return compared(world, *found, leaves, tuple(rows), twice)


OF_TEACHER = dict(return_forward_kl=True, return_reverse_kl=True, return_jsd=True, return_tv=True)


def of_divergences(out, labels, by):
    loss = by * (out.forward_kl - 2 * out.reverse_kl + out.jsd.sqrt()) + out.tv - 0.1 * out.entropy
    return loss, {"acceptance": 1 - out.tv}


# Functions of hidden states, weight, labels and numbers of the student, and of the teacher's hidden states and head.
DENSE_HEADS: Dict[str, Callable[..., Any]] = {
    "mean": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(x, w, head, kind="jsd", **o),
    "labels": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, head, fewer(t), alpha=0.3, chunk_rows=5, row_mask=t % 5 != 0, **o),
    "pairs": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, head, smoothed((fewer(t)[..., None], torch.ones_like(t[..., None], dtype=torch.float64))), alpha=0.6,
        kind="reverse_kl", row_mask=t % 5 != 0, **o),
    "labels_alone": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, head, fewer(t), alpha=0, row_mask=t % 5 != 0, **o),
    "none": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, head, row_weight=by, reduction="none", kind="tv", chunk_rows=5, **o),
    "sum": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, head, fewer(t), alpha=0.5, row_weight=by, reduction="sum", teacher_logit_scale=by.detach(), **o),
    "normalizer": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, head, t, alpha=0.5, normalizer=7, kind="hellinger", num_classes=V - 3, **o),
    "temperature": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, head, fewer(t), alpha=0.5, temperature=2.0, **o),
    "shared": lambda x, w, t, by, head, **o: sparse_ce.linear_distillation_loss(
        x, w, (x.detach() * 0.5, w), kind="skew_forward", **o),
    "rows": lambda x, w, t, by, head, **o: sparse_ce.linear_row_loss(
        of_divergences, x, w, t, by, teacher=head, has_aux=True, return_entropy=True, chunk_rows=5, **OF_TEACHER, **o),
    "rows_none": lambda x, w, t, by, head, **o: sparse_ce.linear_row_loss(
        lambda out, labels: out.tv, x, w, t, teacher=list(head), return_tv=True, reduction="none", **o),
    "rows_shared": lambda x, w, t, by, head, **o: sparse_ce.linear_row_loss(
        lambda out, labels: out.jsd, x, w, t, teacher=(head[0][..., :D], w), return_jsd=True, **o),
}
D2 = D + 2


def of_dense_heads(name: str, placed: str, given: str, seed: int, twice: bool = False):
    """Tests linear_dense_divergence and linear_row_loss with a teacher."""
    hidden_at, weight_at, bias_at = HEAD_LAYOUTS[placed]
    rows = [R, R] if hidden_at is None else [R if w is not None and w.is_shard() else h for h, w in zip(
        hidden_at, weight_at or (None, None))]
    leading = leading_of(placed)
    world, leaves = World(Layout("grid", leading, tuple(rows)), seed), {}
    for what, shape, at in (("input", (*leading, D), hidden_at), ("weight", (V, D), weight_at), ("bias", (V,), bias_at),
                            ("by", leading, None)):
        t = world.normal(*shape).requires_grad_()
        leaves[what] = t, t.detach().clone().requires_grad_() if at is None else world.place(t, at, True)
    labels = world.target("labels", given, V - 3)[:2]
    leaves["by"] = leaves["by"][0], leaves["by"][1] if given == "all" else world.given(
        leaves["by"][0], given).requires_grad_()
    teacher = [world.normal(*size) for size in ((*leading, D2), (V, D2), (V,))]
    ours: List[Any] = list(teacher)
    if given == "placed":
        ours = [t if at is None else world.place(t, at) for t, at in zip(teacher, (hidden_at, weight_at, weight_at))]
    elif given == "here" and hidden_at is not None:
        at = rows if placed in ("sequence", "sequence_cut") else hidden_at  # These are gathered first.
        ours = [world.place(teacher[0], at).to_local(), *(world.place(t, [R, R]) for t in teacher[1:])]
    found = []
    for at, of_teacher in enumerate((teacher, ours)):
        x, w, bias, by = (pair[at] for pair in leaves.values())
        found.append(DENSE_HEADS[name](x, w, labels[at], by, tuple(of_teacher), linear_bias=bias))
    if name not in ("none", "sum", "rows") or given == "here":
        leaves.pop("by")
    return compared(world, *found, leaves, tuple(rows), twice)


def of_one_rank(seed: int):
    """Tests classes that are sharded over a single rank, whose placement need not be that of the student."""
    mesh = dist.init_device_mesh("cpu", (WORLD, 1))
    world = World(Layout("grid", (4,), (R, R)), seed)
    x, y, w, v = (world.normal(*size) for size in ((4, D), (4, D), (V, D), (V, D)))

    def placed(t, *placements):
        return distribute_tensor(t, mesh, placements, src_data_rank=None)

    x_here, w_here = (t.requires_grad_() for t in (placed(x, Shard(0), R), placed(w, R, Shard(0))))
    found = {}
    for name, at in (("as the student", Shard(0)), ("replicated", R), ("features", Shard(1))):
        exact = sparse_ce.linear_distillation_loss(x, w, (y, v))
        ours = sparse_ce.linear_distillation_loss(x_here, w_here, (placed(y, Shard(0), R), placed(v, R, at)))
        found[name] = float((ours.full_tensor() - exact).abs())
    z, labels = y @ v.mT, torch.tensor([0, 3, -100, 5])
    exact = sparse_ce.linear_distillation_loss(x, w, z, labels, alpha=0.5)
    ours = sparse_ce.linear_distillation_loss(x_here, w_here, placed(z, Shard(0), R), labels, alpha=0.5)
    found["logits of a head's teacher"] = float((ours.full_tensor() - exact).abs())
    exact = sparse_ce.distillation_loss(x, y, kind="tv")
    ours = sparse_ce.distillation_loss(placed(x, Shard(0), Shard(1)), placed(y, Shard(0), R), kind="tv")
    return {**found, "logits": float((ours.full_tensor() - exact).abs())}


def of_logits_twice(*arguments: Any):
    return of_logits(*arguments, twice=True)


def of_heads_twice(*arguments: Any):
    return of_heads(*arguments, twice=True)


def of_dense_twice(*arguments: Any):
    return of_dense(*arguments, twice=True)


def of_dense_heads_twice(*arguments: Any):
    return of_dense_heads(*arguments, twice=True)


def cases(slow: bool) -> Dict[str, Tuple[Callable[..., Any], Tuple[Any, ...]]]:
    """Returns {name: (function, arguments)}."""
    found: Dict[str, Tuple[Callable[..., Any], Tuple[Any, ...]]] = {}

    def add(function, *arguments, rarely=None):
        name = "-".join([function.__name__, *arguments])
        if (not drawn(name) if rarely is None else rarely) == slow:
            found[name] = function, arguments

    for layout in LAYOUTS:
        add(of_logits, layout, "labels", "all", "plain")
        add(of_logits, layout, "pair", "here", "none")
        add(of_logits, layout, "log_probs", "placed", "weight")
    for form in FORMS:
        for given in GIVEN[:2] if form == "coo" else GIVEN:
            add(of_logits, "data_classes", form, given, "scale")
            add(of_logits, "rows", form, given, "rows")
    for layout in ("rows", "data_classes", "no_rows_here"):
        add(of_logits, layout, "ids in lists", "all", "scale", rarely=False)
    add(of_functions, "selected", "rows", "ids in lists", "all", rarely=False)
    for option in OPTIONS:
        for given in ("all", "placed"):
            add(of_logits, "data_classes", "pair", given, option)
        add(of_logits, "classes_sequence", "labels", "here", option)
        add(of_logits, "no_rows_here", "log_probs", "placed", option)
    for layout in ("data_classes", "classes"):
        add(of_logits, layout, "coo", "all", "padded")
    for form in ("pair", "log_probs"):
        for given in GIVEN:
            add(of_logits, "no_rows_here", form, given, "scale")
    for form in ("jagged", "coo"):
        add(of_functions, "selected", "without_rows", form, "all")
    for name in CALLS:
        for layout in ("classes", "data_classes", "classes_sequence", "rows", "replicate"):
            add(of_functions, name, layout, "log_probs", "all")
            add(of_functions, name, layout, "pair", "placed")
    for layout in ("data_classes", "classes_sequence", "rows_twice", "no_rows_here", "data_classes_uneven"):
        add(of_functions, "selected", layout, "jagged", "all")
        add(of_functions, "divergence_of_log_probs", layout, "jagged", "all")
    for name in ("selected", *OF_LOG_PROBS):
        add(of_functions, name, "rows", "jagged", "placed")
    for name in ("selected", "mean"):
        add(of_functions, name, "rows", "coo", "all")
    add(of_functions, "mean", "rows", "log_probs", "all")
    for placed in ("data_tensor", "sequence", "sequence_even", "sequence_cut", "rows"):
        add(of_heads, "selected", placed, "jagged", "all")
    for layout in LAYOUTS:
        for option, given in zip(DENSE, ("all", "here", "placed", "replicated") * 2):
            add(of_dense, layout, given, option)
            add(of_dense, layout, GIVEN[len(layout) % 3], option)
    for by, layout in enumerate(LAYOUTS):
        for at, option in enumerate(BINARY):
            add(of_binary, layout, ("labels", "pair", "log_probs")[(at + by) % 3], GIVEN[at % 3], option)
    for form in ("jagged", "coo"):
        add(of_binary, "data_classes", form, "all", "plain", rarely=False)
    for at, name in enumerate(HEADS):
        for by, placed in enumerate(HEAD_LAYOUTS):
            form = "pair" if name.startswith("rows") else "log_probs"
            odd = bool((at + by) % 2)
            add(of_heads, name, placed, form, "all", rarely=odd)
            add(of_heads, name, placed, "labels" if name.startswith("loss") else form, "placed", rarely=not odd)
    add(of_one_rank, rarely=False)
    for at, name in enumerate(DENSE_HEADS):
        for by, placed in enumerate(HEAD_LAYOUTS):
            add(of_dense_heads, name, placed, GIVEN[(at + by) % 3], rarely=bool((at + by) % 5))
    for placed in ("rows", "data_tensor"):
        add(of_heads, "aux_of_no_row", placed, "labels", "all")
    for form in FORMS:
        for placed in ("sequence_even", "sequence_rows", "sequence_alone"):
            for given in GIVEN[:2] if form == "coo" else GIVEN:
                add(of_heads, "loss", placed, form, given)
    add(of_heads, "selected", "sequence_alone", "jagged", "all")
    for given in ("all", "placed"):  # second derivatives: rows are sharded, classes are not
        add(of_logits_twice, "rows", "pair", given, "scale")
        for placed in ("rows", "plain_head"):
            add(of_heads_twice, "loss", placed, "pair", given)
            add(of_heads_twice, "rows", placed, "pair", given)
    add(of_binary_twice, "rows", "pair", "placed", "mask", rarely=False)
    add(of_heads_twice, "binary", "rows", "pair", "all", rarely=False)
    add(of_dense_twice, "rows", "here", "mask")
    add(of_dense_heads_twice, "labels", "rows", "placed")
    add(of_dense_heads_twice, "rows", "plain_head", "all")
    if torch.__version__ < "2.12":  # which cannot trace locals()
        return found
    add(compiled, "head", "loss", "sequence_even")
    for arguments in (("dense head", "labels", "sequence_even"), ("dense logits", "dense", "data_classes"),
                      ("dense head", "rows", "data_tensor"), ("dense head", "none", "sequence_even"),
                      ("logits", "loss", "data_classes"),
                      ("logits", "loss", "rows"),
                      ("logits", "selected", "data_classes"), ("logits", "divergence", "data_classes"),
                      ("head", "loss", "data_tensor"), ("head", "loss", "sequence"),
                      ("head", "loss_none", "data_tensor"), ("head", "rows", "data_tensor"),
                      ("head", "topk", "data_tensor"), ("head", "distillation", "data_tensor"),
                      ("head", "distillation_together", "data_tensor")):
        add(compiled, *arguments, rarely=True)  # each process takes seconds to trace one
    return found


def compiled(of: str, name: str, placed: str, seed: int):
    """Compiles one graph of a function of logits (``of`` "logits") or of a head ("head"), or of those and a teacher's
    ("dense logits", "dense head")."""
    torch.compiler.reset()
    of_teacher = of.startswith("dense")
    leaves, shapes, form = {}, {}, "log_probs" if name.startswith("distillation") else "pair"
    if of.endswith("logits"):
        layout = LAYOUTS[placed]
        function = {"loss": lambda x, t, by: sparse_ce.cross_entropy(x, t), **CALLS, "dense": (
            lambda x, t, by, tx: sparse_ce.distillation_loss(x, tx, kind="jsd", row_mask=by > 0))}[name]
        shapes["input"] = (4, 3, V), layout.placements
    else:
        hidden_at, weight_at, _ = HEAD_LAYOUTS[placed]
        rows = tuple(R if w.is_shard() else h for h, w in zip(hidden_at, weight_at))
        function, layout = (DENSE_HEADS if of_teacher else HEADS)[name], Layout("grid", leading_of(placed), rows)
        shapes = {"input": ((*layout.leading, D), hidden_at), "linear_weight": ((V, D), weight_at)}
    world = World(layout, seed)
    for what, (shape, at) in shapes.items():
        t = world.normal(*shape).requires_grad_()
        leaves[what] = t, world.place(t, at, True)
    targets = [(t[0], t[1].detach()) if form == "pair" else t._map(lambda part: part.detach())
               for t in world.target(form, "here", V)[:2]]
    by = world.normal(*world.layout.leading)
    more: Any = [{"labels": world.target("labels", "all", V)[0]} if form == "log_probs" else {}] * 2
    if of_teacher:
        targets, more = world.target("labels", "all", V)[:2], [{}, {}]
        for what, (shape, at) in zip(("tx", "tw"), shapes.values()):
            more[0][what] = world.normal(*shape)
            more[1][what] = world.place(more[0][what], at)
        if of.endswith("head"):
            more = [{"head": (given["tx"], given["tw"])} for given in more]
    found = []
    for at, call in enumerate((function, torch.compile(function, fullgraph=True, backend="aot_eager"))):
        target = targets[at][0] if name == "rows" and not of_teacher else targets[at]
        found.append(call(*(pair[at] for pair in leaves.values()), target, by, **more[at]))
    return compared(world, *found, leaves, world.rows)


def sent(placed: str) -> List[Tuple[str, int]]:
    """Returns the collectives of a head's loss and its gradients: their names and element counts."""
    world = World(Layout("grid", leading_of(placed), (R, R)), 3)
    leading = leading_of(placed)
    hidden_at, weight_at, _ = HEAD_LAYOUTS[placed]
    hidden, weight = world.place(world.normal(*leading, D), hidden_at, True), world.place(world.normal(V, D), weight_at)
    labels = world.integers(V, *leading)
    with Collectives() as counted:
        sparse_ce.linear_cross_entropy(hidden, weight, labels, chunk_rows=8).backward()
    return counted.seen


LOGITS = ("sparse_ce::linear_logits", "sparse_ce::linear_logits_")


def multiplied(placed: str) -> List[Tuple[int, int]]:
    """Returns how often a distillation loss of sharded rows computes logits, and how often their gradients.

    It tests the divergence alone and with an added cross entropy.
    """
    hidden_at, weight_at, _ = HEAD_LAYOUTS[placed]
    rows = tuple(R if w.is_shard() else h for h, w in zip(hidden_at, weight_at))
    world = World(Layout("grid", leading_of(placed), rows), 3)
    hidden = world.place(world.normal(*leading_of(placed), D), hidden_at, True)
    weight = world.place(world.normal(V, D), weight_at, True)
    teacher, _, *_ = world.target("pair", "all", V)
    labels, _, *_ = world.target("labels", "all", V)
    found = []
    for alpha in (1.0, 0.3):
        with profile() as seen:
            sparse_ce.linear_distillation_loss(hidden, weight, (teacher[0], teacher[1].detach()), labels, alpha=alpha,
                                               chunk_rows=4).backward()
        names = [e.name for e in seen.events()]
        found.append((sum(map(names.count, LOGITS)), names.count("sparse_ce::linear_add_gradients_")))
    return found


def refusals() -> Dict[str, str]:
    """Returns the error messages for unsupported placements."""
    grid, row = mesh_of("grid"), mesh_of("all")
    draw = torch.Generator().manual_seed(3)
    x, hidden, weight = (torch.randn(size, generator=draw) for size in ((4, 8), (4, D), (8, D)))
    labels, pairs = torch.tensor([0, 3, 5, 7]), (torch.tensor([[0, 1]] * 4), torch.rand(4, 2) / 2)
    jagged = SparseTarget.from_jagged(labels, None, torch.arange(5))

    def at(t, *placements, mesh=grid):
        return DTensor.from_local(t, mesh, [Partial()]) if placements == (Partial(),) else distribute_tensor(
            t, mesh, placements, src_data_rank=None)

    head = torch.nn.Linear(D, 8, bias=False)
    named = dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
    # Only the row with rank 0 has ascending ranks.
    turned = dist.DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]))
    loss, of_head, dense = sparse_ce.cross_entropy, sparse_ce.linear_cross_entropy, sparse_ce.distillation_loss

    def of_teacher(*teacher: Any, **options: Any) -> Any:
        return sparse_ce.linear_row_loss(lambda out, _: out.tv, hidden, at(weight, R, Shard(0)), labels,
                                         teacher=teacher, return_tv=True, **options)

    calls = {
        "partial": lambda: loss(at(x, Partial(), mesh=row), labels),
        "classes twice": lambda: loss(at(x, Shard(1), Shard(1)), labels),
        "group": lambda: loss(at(x, Shard(1), mesh=row), labels, group=dist.group.WORLD),
        "target": lambda: loss(at(x, Shard(0), R), labels[:3]),
        "other mesh": lambda: loss(at(x, Shard(0), R), at(labels, Shard(0), mesh=row)),
        "num_classes": lambda: loss(at(x, R, Shard(1)), labels, num_classes=9),
        "normalizer": lambda: loss(at(x, R, Shard(1)), labels, normalizer=at(torch.ones(4), R, Shard(0))),
        "no rows": lambda: loss(at(x, Shard(0), R), pairs, row_weight=torch.ones(5)),
        "jagged": lambda: sparse_ce.selected_log_probs(at(x, Shard(0), R), jagged[:2]),
        "features": lambda: of_head(at(hidden, R, Shard(1)), at(weight, R, Shard(0)), labels),
        "weight": lambda: of_head(hidden, at(weight, R, Shard(1)), labels),
        "head's mesh": lambda: of_head(at(hidden, R, R), at(weight, Shard(0), mesh=row), labels),
        "bias": lambda: of_head(hidden, at(weight, R, Shard(0)), labels, linear_bias=torch.zeros(4)),
        "named": lambda: of_head(hidden, at(weight, Shard(0), mesh=named), labels),
        "labels to be added up": lambda: loss(at(x, R, Shard(1)), DTensor.from_local(
            labels, grid, [Partial(), R])),
        "weights to be added up": lambda: loss(at(x, Shard(0), R), labels, row_weight=DTensor.from_local(
            torch.ones(4), grid, [R, Partial()])),
        "placed labels alone": lambda: loss(x, at(labels, R, R)),
        "placed pair alone": lambda: of_head(hidden, weight, tuple(at(t, R, R) for t in pairs)),
        "placed labels of a distillation": lambda: sparse_ce.linear_distillation_loss(
            hidden, weight, pairs, at(labels, R, R), alpha=0.5),
        "placed teacher": lambda: sparse_ce.linear_distillation_loss(
            hidden, weight, tuple(at(t, R, R) for t in pairs), labels, alpha=0.5),
        "dense teacher of other rows": lambda: dense(at(x, Shard(0), R), at(x[:3], Shard(0), R)),
        "dense teacher of other classes": lambda: dense(at(x, R, Shard(1)), at(x[:, 1:], R, Shard(1)), num_classes=7),
        "dense teacher of this rank's classes": lambda: dense(at(x, R, Shard(1)), x[:, :3]),
        "dense teacher on another mesh": lambda: dense(at(x, R, Shard(1)), at(x, Shard(1), mesh=row)),
        "dense teacher to be added up": lambda: dense(at(x, Shard(0), R), DTensor.from_local(x, grid, [Partial(), R])),
        "dense teacher with sharded classes": lambda: dense(at(x, Shard(0), R), at(x, R, Shard(1))),
        "placed dense teacher alone": lambda: dense(x, at(x, R, R)),
        "placed row mask alone": lambda: dense(x, x, row_mask=at(labels > 0, R, R)),
        "dense teacher that requires grad": lambda: dense(at(x, Shard(0), R), at(x, Shard(0), R).requires_grad_()),
        "normalizer of a dense teacher": lambda: dense(at(x, Shard(0), R), x, normalizer=-1),
        "teacher's hidden states": lambda: of_teacher(at(hidden, R, Shard(1)), weight),
        "teacher's weight": lambda: of_teacher(hidden, at(weight, Shard(0), R)),
        "teacher's weight on another mesh": lambda: of_teacher(hidden, at(weight, Shard(0), mesh=row)),
        "teacher's weight of other classes": lambda: of_teacher(hidden, weight[:7]),
        "teacher's bias": lambda: of_teacher(hidden, weight, torch.zeros(4)),
        "teacher's weight that requires grad": lambda: of_teacher(hidden, at(weight, R, Shard(0)).requires_grad_()),
        "no pair of a teacher": lambda: of_teacher(hidden),
        "hidden states of a placed teacher alone": lambda: sparse_ce.linear_distillation_loss(
            hidden, weight, (at(hidden, R, R), weight)),
        "placed class weights": lambda: loss(x, labels, at(torch.ones(8), R, R)),
        "order of ranks": lambda: loss(at(x, R, Shard(1), mesh=turned), labels),
        "order of ranks of a head": lambda: of_head(hidden, at(weight, R, Shard(0), mesh=turned), labels),
        "order of ranks, compiled": lambda: torch.compile(loss, backend="aot_eager", fullgraph=True)(
            at(x, R, Shard(1), mesh=turned), labels),
        "torch.func": lambda: torch.func.grad(lambda x: loss(x, labels))(at(x, Shard(0), R)),
        "masked_mean": lambda: sparse_ce.masked_mean(at(x, Shard(0), R), x > 0),
        "fsdp": lambda: of_head(hidden, fully_shard(head, mesh=row).weight, labels),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes run on this host, whatever its name resolves to
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
                            timeout=timedelta(seconds=60))
    found: Dict[str, Any] = {}
    slow = sys.argv[3] == "slow"
    for at, (name, (function, arguments)) in enumerate(cases(slow).items()):
        print(name, flush=True)  # identifies the case of a process that hangs
        try:
            found[name] = function(*arguments, at)
        except Exception as error:  # raised on all ranks, or the others would hang
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    if not slow:
        found["refused"] = refusals()
        found["sent"] = {placed: sent(placed) for placed in HEAD_LAYOUTS if placed.startswith("sequence")}
        for placed in ("rows", "data_tensor", "sequence_even", "sequence"):
            found[f"multiplied {placed}"] = multiplied(placed)
        for name, train in TRAINING.items():
            print(name, flush=True)
            found[f"training {name}"] = train()
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
