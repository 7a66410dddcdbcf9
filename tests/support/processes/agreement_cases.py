"""Runs one of several processes of test_sharded_agreement.py, which sets ``SPARSE_CE_VALIDATE=1``.

    RANK=r WORLD_SIZE=n python agreement_cases.py FOLDER

Saves the error or the loss of each call, by name, to FOLDER/RANK.pt.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

import sparse_ce
from linear_sharded_cases import Collectives
from sharded_cases import connect

CLASSES, WIDTH = 12, 4
LABELS, TOP_K = torch.tensor([0, 11, 5, -100]), (torch.tensor([[0, 11]] * 4), torch.full((4, 2), 0.5))
HIDDEN, WEIGHT = (torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
                  for n in (4, CLASSES))

MASK = torch.tensor([True, False, False, False])

# [first class, columns] of each rank, and the number of classes, global or of each rank.
PARTED: Dict[str, Tuple[Any, Any]] = {
    "even": ([[0, 4], [4, 4], [8, 4]], 12),
    "in another order": ([[8, 4], [0, 4], [4, 4]], 12),
    "one is empty": ([[0, 4], [4, 0], [4, 8]], 12),
    "one has all": ([[12, 0], [0, 12], [0, 0]], 12),
    "one is padding": ([[0, 4], [4, 8], [12, 4]], 12),
    "all that is left is padding": ([[0, 20], [12, 4], [16, 2]], 12),
    "not said": ([[None, 4], [None, 4], [None, 4]], None),
    "uneven, and not said": ([[None, 5], [None, 5], [None, 2]], None),
    "one is empty, and not said": ([[None, 4], [None, 0], [None, 8]], None),
    "padded, and not said": ([[None, 4], [None, 4], [None, 6]], 12),
}
NOT_PARTED: Dict[str, Tuple[Any, Any]] = {
    "overlap": ([[0, 5], [4, 4], [8, 4]], 12),
    "twice the same": ([[0, 4], [0, 4], [8, 4]], 12),
    "one within another": ([[0, 8], [2, 2], [8, 4]], 12),
    "gap": ([[0, 3], [4, 4], [8, 4]], 12),
    "as many as there are, with a gap": ([[0, 4], [5, 4], [8, 4]], 12),
    "the first is missing": ([[1, 3], [4, 4], [8, 4]], 12),
    "the last is missing": ([[0, 4], [4, 4], [8, 3]], 12),
    "numbers of classes": ([[0, 4], [4, 4], [8, 4]], [12, 12, 11]),
}


def row_loss(out: Any, target: Tensor) -> Tensor:
    return -out.log_probs


class Shared:
    """Calls every loss with a rank's shard of the classes."""

    def __init__(self, first: Any, columns: int, **named: Any):
        each = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(each, torch.tensor(columns))
        begin = int(sum(each[:dist.get_rank()]) if first is None else first) % CLASSES
        rows = (torch.arange(columns) + begin) % CLASSES  # any values in the padding
        self.weight = WEIGHT[rows].clone().requires_grad_()
        self.logits = (HIDDEN @ self.weight.detach().T).requires_grad_()
        self.hidden = HIDDEN.clone().requires_grad_()
        self.named = dict(group=dist.group.WORLD, vocab_start=first, **named)

    def cross_entropy(self, target: Any = LABELS, **more: Any) -> Tensor:
        return sparse_ce.cross_entropy(self.logits, target, **{**self.named, **more})

    def selected_log_probs(self, target: Any = LABELS, **more: Any) -> Tensor:
        found = sparse_ce.selected_log_probs(self.logits, target, **{**self.named, **more})
        return found.log_probs.clamp(min=-99).sum()

    def topk_log_probs(self, k: int = 2, **more: Any) -> Tensor:
        return sparse_ce.topk_log_probs(self.logits, k, **{**self.named, **more}).values.sum()

    def divergence(self, target: Any = TOP_K, **more: Any) -> Tensor:
        return sparse_ce.divergence(self.logits, target, **{**self.named, **more})

    def distillation_loss(self, target: Any = TOP_K, **more: Any) -> Tensor:
        return sparse_ce.distillation_loss(self.logits, target, LABELS, **{**self.named, **dict(alpha=0.5), **more})

    def linear_cross_entropy(self, target: Any = LABELS, **more: Any) -> Tensor:
        return sparse_ce.linear_cross_entropy(self.hidden, self.weight, target, **{**self.named, **more})

    def linear_selected_log_probs(self, target: Any = LABELS, **more: Any) -> Tensor:
        found = sparse_ce.linear_selected_log_probs(self.hidden, self.weight, target, **{**self.named, **more})
        return found.log_probs.clamp(min=-99).sum()

    def linear_row_loss(self, target: Any = LABELS, learns: bool = True, **more: Any) -> Tensor:
        hidden = self.hidden.requires_grad_(learns)
        return sparse_ce.linear_row_loss(row_loss, hidden, self.weight, target, **{**self.named, **more})

    def linear_topk_log_probs(self, k: int = 2, **more: Any) -> Tensor:
        return sparse_ce.linear_topk_log_probs(self.hidden, self.weight, k, **{**self.named, **more}).values.sum()

    def linear_distillation_loss(self, target: Any = TOP_K, **more: Any) -> Tensor:
        return sparse_ce.linear_distillation_loss(self.hidden, self.weight, target, LABELS,
                                                  **{**self.named, **dict(alpha=0.5), **more})

    def dense_divergence(self, **more: Any) -> Tensor:
        return sparse_ce.distillation_loss(self.logits, self.logits.detach().cos(), **{**self.named, **more})

    def linear_dense_divergence(self, target: Any = LABELS, **more: Any) -> Tensor:
        teacher = HIDDEN.cos(), self.weight, more.pop("teacher_bias", None)
        return sparse_ce.linear_distillation_loss(self.hidden, self.weight, teacher, target,
                                                  **{**self.named, **dict(alpha=0.5), **more})

    def binary(self, target: Any = TOP_K, **more: Any) -> Tensor:
        return sparse_ce.binary_cross_entropy_with_logits(self.logits, target, **{**self.named, **more})

    def linear_binary(self, target: Any = LABELS, **more: Any) -> Tensor:
        return sparse_ce.linear_binary_cross_entropy(self.hidden, self.weight, target,
                                                     **{**self.named, "reduction": "batchmean", **more})

    def dense_rows(self, target: Any = LABELS, **more: Any) -> Tensor:
        return sparse_ce.linear_row_loss(lambda out, target: out.tv, self.hidden, self.weight, target, return_tv=True,
                                         **{**self.named, **dict(teacher=(HIDDEN.cos(), self.weight)), **more})

    def in_sequence(self, target: Any = None, rows: int = 2, **more: Any) -> Tensor:
        labels = torch.tensor([0, 11, 5, -100, 3, 7]) if target is None else target
        group = sparse_ce.SequenceGroup(self.named["group"])
        return sparse_ce.linear_cross_entropy(self.hidden[:rows], self.weight, labels,
                                              **{**self.named, "group": group, **more})

    def _placed(self, bias: int = CLASSES) -> Tensor:
        weight = distribute_tensor(WEIGHT, dist.init_device_mesh("cpu", (3,)), [Shard(0)])
        return sparse_ce.linear_cross_entropy(HIDDEN, weight, LABELS, linear_bias=torch.zeros(bias).double())

    def topk_in_sequence(self, k: int = 2, **more: Any) -> Tensor:
        group = sparse_ce.SequenceGroup(self.named["group"])
        return sparse_ce.linear_topk_log_probs(self.hidden[:2], self.weight, k,
                                               **{**self.named, "group": group, **more}).values.sum()


LOSSES = [name for name in vars(Shared) if not name.startswith("_")]
# Invalid arguments that only rank 1 passes.
REFUSED: Dict[str, Tuple[str, Dict[str, Any]]] = {
    **{f"{name}, softcap": (name, dict(softcap=-1)) for name in LOSSES
       if name != "divergence" and "binary" not in name},
    **{f"{name}, {option}": (name, {option: -1.0}) for name in LOSSES if "binary" in name
       for option in ("gamma", "clip", "label_smoothing")},
    "binary, logit_bias": ("binary", dict(logit_bias=torch.zeros(3))),
    "binary, pos_weight": ("binary", dict(pos_weight=torch.zeros(3))),
    **{f"{name}, target": (name, dict(target=torch.tensor([0, 12, 5, -100]))) for name in LOSSES
       if "topk" not in name and name not in ("in_sequence", "dense_divergence")},
    "dense_divergence, teacher": ("dense_divergence", dict(teacher_softcap=-1.0)),
    "linear_dense_divergence, teacher": ("linear_dense_divergence", dict(teacher_bias=torch.zeros(3).double())),
    "dense_rows, teacher": ("dense_rows", dict(teacher=(HIDDEN[:3], WEIGHT[:4]))),
    "in_sequence, target": ("in_sequence", dict(target=torch.tensor([0, 12, 5, -100, 1, 2]))),
    **{f"{name}, k": (name, dict(k=13)) for name in LOSSES if "topk" in name},
    **{f"{name}, kind": (name, dict(kind="kl")) for name in ("divergence", "distillation_loss")},
    "cross_entropy, an argument that nobody knows": ("cross_entropy", dict(softcaps=1.0)),
    "cross_entropy, vocab_start": ("cross_entropy", dict(vocab_start=-1)),
    "linear_cross_entropy, the second chunk": ("linear_cross_entropy", dict(
        target=torch.tensor([0, 1, 5, 12]), chunk_rows=1)),
    "linear_distillation_loss, alpha": ("linear_distillation_loss", dict(alpha=2.0)),
    "a DTensor's bias": ("_placed", dict(bias=CLASSES - 1)),
}
# The same for calls without vocab_start: errors before the ranks exchange their columns, and after it.
REFUSED_NOT_SAID = {"a chunk of no row": dict(chunk_rows=0), "a softcap": dict(softcap=-1),
                    "a label": dict(target=torch.tensor([0, 12, 5, -100]))}
# Valid arguments of rank 1 that differ from those of the other ranks, and their name in the error.
DIFFERENT: Dict[str, Tuple[str, Dict[str, Any], str]] = {
    "num_classes": ("cross_entropy", dict(num_classes=13), "num_classes"),
    "softcap": ("cross_entropy", dict(softcap=3.0), "softcap"),
    "entropy": ("selected_log_probs", dict(return_entropy=True), "return_entropy"),
    "k": ("topk_log_probs", dict(k=3), "k"),
    "chunk_rows": ("linear_cross_entropy", dict(chunk_rows=3), "chunk_rows"),
    "reduction": ("linear_cross_entropy", dict(reduction="none"), "reduction"),
    "reduction of logits": ("cross_entropy", dict(reduction="sum"), "reduction"),
    "reduction of a row loss": ("linear_row_loss", dict(reduction="none"), "reduction"),
    "gamma": ("binary", dict(gamma=2.0), "gamma"),
    "clip": ("linear_binary", dict(clip=0.1), "clip"),
    "pos_weight": ("linear_binary", dict(pos_weight=torch.ones(12)), "pos_weight"),
    "reduction of binary losses": ("binary", dict(reduction="batchmean"), "reduction"),
    "chunk_classes": ("linear_binary", dict(chunk_classes=3), "chunk_classes"),
    "pairs of gamma": ("linear_binary", dict(gamma=(0.0, 2.0)), "gamma"),
    "values that learn of binary losses": ("binary", dict(target=(TOP_K[0], TOP_K[1].clone().requires_grad_())),
                                           "the values' requires_grad"),
    "a learned bias": ("binary", dict(logit_bias=torch.ones((), requires_grad=True)), "logit_bias.requires_grad"),
    "active rows of binary losses": ("binary", dict(row_mask=MASK), "the number of active rows"),
    "alpha": ("distillation_loss", dict(alpha=1.0), "alpha"),
    "row_weight": ("cross_entropy", dict(row_weight=torch.ones(4)), "row_weight"),
    "a learned scale": ("cross_entropy", dict(logit_scale=torch.ones((), requires_grad=True)),
                        "logit_scale.requires_grad"),
    "values that learn": ("cross_entropy", dict(target=(TOP_K[0], TOP_K[1].clone().requires_grad_())),
                          "the values' requires_grad"),
    "hidden states": ("linear_row_loss", dict(learns=False), "input.requires_grad"),
    "ignored rows": ("linear_cross_entropy", dict(target=torch.tensor([0, -100, 5, -100])),
                     "the number of active rows"),
    "active rows of a dense teacher": ("dense_divergence", dict(row_mask=MASK), "the number of active rows"),
    "active rows of a dense teacher's head": ("linear_dense_divergence", dict(row_mask=MASK),
                                              "the number of active rows"),
    "weights that learn": ("linear_dense_divergence", dict(row_weight=torch.ones(4).double().requires_grad_()),
                           "row_weight.requires_grad"),
    "kind of a dense teacher": ("dense_divergence", dict(kind="jsd"), "kind"),
    "rows": ("in_sequence", dict(rows=1, target=LABELS[:3]), "the number of rows"),
}
# The arguments of the other ranks, if they pass any.
USUAL: Dict[str, Dict[str, Any]] = {
    "values that learn": dict(target=TOP_K), "weights that learn": dict(row_weight=torch.ones(4).double()),
    "pairs of gamma": dict(gamma=(0.0, 1.0)), "a learned bias": dict(logit_bias=torch.ones(())),
    "active rows of binary losses": dict(row_mask=~MASK),
    **{f"active rows of a dense teacher{of}": dict(row_mask=~MASK) for of in ("", "'s head")}}


def text(call: Callable[[], Tensor]) -> Any:
    try:
        return float(call().detach().sum())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def several(shared: Shared) -> List[Any]:
    return [text(shared.cross_entropy), *(text(lambda: loss(reduction=reduction, **more)) for loss, more in (
        (shared.linear_cross_entropy, {}), (shared.linear_row_loss, {}), (shared.dense_rows, dict(chunk_rows=2)),
        (shared.linear_dense_divergence, {})) for reduction in ("mean", "none"))]


def main() -> None:
    connect()
    world, rank = dist.get_world_size(), dist.get_rank()
    found: Dict[Any, Any] = {}

    def shared(name: str = "even") -> Shared:
        columns, classes = {**PARTED, **NOT_PARTED}[name]
        return Shared(*columns[rank], num_classes=classes[rank] if isinstance(classes, list) else classes)

    assert world == 3
    for loss in LOSSES:
        for name in [*PARTED, *NOT_PARTED]:
            found[loss, name] = text(getattr(shared(name), loss))
    for name, (loss, wrong) in REFUSED.items():
        found[name] = text(lambda: getattr(shared(), loss)(**(wrong if rank == 1 else {})))
    for name, (loss, other, _) in DIFFERENT.items():
        found[name] = text(lambda: getattr(shared(), loss)(**(other if rank == 1 else USUAL.get(name, {}))))
    for name, wrong in REFUSED_NOT_SAID.items():
        found[name] = text(lambda: shared("not said").linear_cross_entropy(**(wrong if rank == 1 else {})))
    found["said on one rank"] = text(shared("even" if rank == 1 else "not said").linear_cross_entropy)
    found["NaN for padding"] = text(lambda: shared().selected_log_probs(padding_value=torch.nan))
    with Collectives() if rank == 1 else nullcontext():  # the rank with an active mode takes part like the others
        found["one looks on"] = several(shared())
    found["and then"] = several(shared())
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
