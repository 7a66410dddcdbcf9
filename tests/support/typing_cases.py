"""Contains calls for type checkers: mypy and pyright read this file in `make lint`.

If mypy or pyright misses a mistake, its `type: ignore` is unused, which is an error too.
"""

from typing import Optional

import torch
from torch import Tensor
from typing_extensions import assert_type

import sparse_ce
from sparse_ce import SparseTarget
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head, logits_of, loss_function
from sparse_ce.integrations.trl import DistillationTrainer


def losses(x: Tensor, labels: Tensor, head: Tensor, yes: bool) -> None:
    assert_type(sparse_ce.cross_entropy(x, labels), Tensor)
    assert_type(sparse_ce.cross_entropy(x, labels, return_lse=False), Tensor)
    assert_type(sparse_ce.cross_entropy(x, labels, return_lse=True), sparse_ce.CrossEntropyOutput)
    assert_type(sparse_ce.cross_entropy(x, labels, return_lse=yes), sparse_ce.CrossEntropyOutput)
    assert_type(sparse_ce.linear_cross_entropy(x, head, labels, reduction="sum"), Tensor)
    assert_type(sparse_ce.linear_cross_entropy(x, head, (labels, x), return_lse=True), sparse_ce.CrossEntropyOutput)
    for entropy in (sparse_ce.cross_entropy(x, labels, return_entropy="detached"),
                    sparse_ce.linear_cross_entropy(x, head, labels, return_entropy=True)):
        assert_type(entropy, sparse_ce.CrossEntropyOutput)
    loss, lse = sparse_ce.cross_entropy(x, labels, return_lse=True)
    assert_type(lse, Tensor)
    sparse_ce.cross_entropy(x, labels, return_entropy="none")  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, reduction="average")  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, inplace=True)  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, smoothing=0.1)  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, softcap="30")  # type: ignore[call-overload]
    sparse_ce.linear_cross_entropy(x, head, labels, reduction="average")  # type: ignore[call-overload]


def accepted_targets(x: Tensor, labels: Tensor, head: torch.nn.Linear, smoothed: sparse_ce.SmoothedTarget) -> None:
    sparse_ce.cross_entropy(x, labels).backward()
    for target in (labels, labels.numpy(), [1, 2], [[1, 2], [3]], (labels, x), (labels.numpy(), x.numpy()), smoothed):
        assert_type(sparse_ce.cross_entropy(x, target), Tensor)
        assert_type(sparse_ce.binary_cross_entropy_with_logits(x, target), Tensor)
        assert_type(sparse_ce.selected_log_probs(x, target), sparse_ce.LogProbs)
        assert_type(sparse_ce.candidate_logits(x, head.weight, target), Tensor)
    sparse_ce.cross_entropy(x, 3)  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, None)  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, temperature=2.0)  # type: ignore[call-overload]
    sparse_ce.linear_cross_entropy(x, head, labels)  # type: ignore[call-overload]
    sparse_ce.candidate_logits(x, head, labels)  # type: ignore[arg-type]


def binary_losses(x: Tensor, labels: Tensor, head: Tensor, scale: Tensor) -> None:
    assert_type(sparse_ce.binary_cross_entropy_with_logits(x, labels, reduction="batchmean"), Tensor)
    assert_type(sparse_ce.linear_binary_cross_entropy(x, head, (labels, x), gamma=(0.0, 2.0)), Tensor)
    sparse_ce.binary_cross_entropy_with_logits(x, labels, pos_weight=x, logit_scale=scale, logit_bias=-10, gamma=2)
    sparse_ce.binary_cross_entropy_with_logits(x, labels, reduction="average")  # type: ignore[arg-type]
    sparse_ce.binary_cross_entropy_with_logits(x, labels, inplace=True)  # type: ignore[arg-type]
    sparse_ce.binary_cross_entropy_with_logits(x, labels, gamma="2")  # type: ignore[arg-type]
    sparse_ce.binary_cross_entropy_with_logits(x, labels, gamma=(1.0, 2.0, 3.0))  # type: ignore[arg-type]
    sparse_ce.binary_cross_entropy_with_logits(x, labels, return_lse=True)  # type: ignore[call-arg]
    sparse_ce.linear_binary_cross_entropy(x, head, labels, chunk_rows=5)  # type: ignore[call-arg]


def modules(weight: Tensor) -> None:
    sparse_ce.SparseBCEWithLogitsLoss(weight, pos_weight=weight, reduction="batchmean")
    sparse_ce.LinearSparseBCEWithLogitsLoss(pos_weight=weight, chunk_classes=512, gamma=(0.0, 2.0))
    sparse_ce.SparseBCEWithLogitsLoss(reduction="average")  # type: ignore[arg-type]
    sparse_ce.SparseBCEWithLogitsLoss(softcap=3.0)  # type: ignore[call-arg]
    sparse_ce.LinearSparseBCEWithLogitsLoss(inplace="forward")  # type: ignore[call-arg]
    sparse_ce.SparseCrossEntropyLoss(weight, reduction="none")
    sparse_ce.SparseCrossEntropyLoss(reduction="average")  # type: ignore[arg-type]
    sparse_ce.LinearSparseCrossEntropyLoss(reduction="average")  # type: ignore[arg-type]


def targets(ids: Tensor, values: Tensor) -> None:
    target = SparseTarget.from_topk(ids, values, values_are="logits")
    assert_type(target, SparseTarget)
    assert_type(target.size(), torch.Size)
    assert_type(target.size(0), int)
    assert_type(target.values, Optional[Tensor])
    assert_type(target[1:], SparseTarget)
    SparseTarget.from_topk([[3, 5]], [[0.9, 0.1]])
    SparseTarget.from_topk(ids, values, values_are="logit")  # type: ignore[arg-type]
    SparseTarget.from_jagged(ids, values, ids, values_are="logits")  # type: ignore[arg-type]
    SparseTarget(ids, values, values_are="logits")  # type: ignore[arg-type]
    SparseTarget.from_index(3)  # type: ignore[arg-type]


def softmaxes(x: Tensor, index: Tensor) -> None:
    assert_type(sparse_ce.segment_softmax(x, index=index), Tensor)
    assert_type(sparse_ce.log_softmax(x, 1), Tensor)
    sparse_ce.segment_softmax(x, index)  # type: ignore[misc]


def integrations(model: torch.nn.Module, head: torch.nn.Linear, tokens: Tensor) -> None:
    fuse_lm_head(model, z_loss=1e-4, temperature=torch.tensor(2.0), chunk_rows=64, logits_dtype=torch.float32)
    fuse_lm_head(model, distillation={"kind": "jsd", "beta": 0.3, "tail": "bucket", "alpha": 0.5})
    fuse_lm_head(model, distillation={"teacher_head": head, "kind": "alpha_divergence", "teacher_softcap": 30.0})
    fuse_lm_head(model, distilation={})  # type: ignore[call-arg]
    fuse_lm_head(model, smoothing=0.1)  # type: ignore[call-arg]
    fuse_lm_head(model, softcap=30.0)  # type: ignore[call-arg]
    fuse_lm_head(model, reduction="none")  # type: ignore[arg-type]
    fuse_lm_head(model, distillation={"kind": "kl"})  # type: ignore[arg-type]
    fuse_lm_head(model, distillation={"tail": "top"})  # type: ignore[arg-type]
    fuse_lm_head(model, distillation={"temprature": 2.0})  # type: ignore[arg-type]
    for loss in (causal_lm_loss(shift=False, label_smoothing=0.1, softcap=30.0, inplace="forward", temperature=2.0),
                 loss_function(z_loss=1e-4)):
        assert_type(loss(tokens, tokens), Tensor)
    causal_lm_loss(logit_scale=0.5)  # type: ignore[call-arg]
    causal_lm_loss(z_loss="1e-4")  # type: ignore[arg-type]
    loss_function(chunk_rows=64)  # type: ignore[call-arg]
    logits = logits_of(model, {"input_ids": tokens})
    logits.loss(tokens, temperature=2.0, return_entropy="detached")
    logits.loss(tokens, logit_scale=0.5)  # type: ignore[call-arg]
    assert_type(logits.log_probs(tokens, return_rank=True), sparse_ce.LogProbs)
    logits.log_probs(tokens, z_loss=1e-4)  # type: ignore[call-arg]
    DistillationTrainer(model, teacher_model="path", beta=0.5, tail="renormalize", train_dataset=[])
    DistillationTrainer(model, temprature=2.0)  # type: ignore[call-arg]
    DistillationTrainer(model, kind="kl")  # type: ignore[arg-type]
