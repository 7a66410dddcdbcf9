"""Contains calls for type checkers: mypy reads this file in `make lint`.

If mypy misses a mistake, its `type: ignore` is unused, which is an error too.
"""

from typing import Optional

import torch
from torch import Tensor
from typing_extensions import assert_type

import sparse_ce
from sparse_ce import SparseTarget


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
    sparse_ce.cross_entropy(x, labels, return_entropy="none")  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, reduction="average")  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, inplace=True)  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, smoothing=0.1)  # type: ignore[call-overload]
    sparse_ce.cross_entropy(x, labels, softcap="30")  # type: ignore[call-overload]
    sparse_ce.linear_cross_entropy(x, head, labels, reduction="average")  # type: ignore[call-overload]


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
    target = SparseTarget.from_topk(ids, values, kind="logits")
    assert_type(target, SparseTarget)
    assert_type(target.size(), torch.Size)
    assert_type(target.size(0), int)
    assert_type(target.values, Optional[Tensor])
    assert_type(target[1:], SparseTarget)
    SparseTarget.from_topk([[3, 5]], [[0.9, 0.1]])
    SparseTarget.from_topk(ids, values, kind="logit")  # type: ignore[arg-type]
    SparseTarget.from_jagged(ids, values, ids, kind="logits")  # type: ignore[arg-type]
    SparseTarget(ids, values, kind="logits")  # type: ignore[arg-type]
    SparseTarget.from_index(3)  # type: ignore[arg-type]


def softmaxes(x: Tensor, index: Tensor) -> None:
    assert_type(sparse_ce.segment_softmax(x, index=index), Tensor)
    assert_type(sparse_ce.log_softmax(x, 1), Tensor)
    sparse_ce.segment_softmax(x, index)  # type: ignore[misc]
