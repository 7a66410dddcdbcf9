"""Defines a small language model and small batches for the tests of training loops."""

from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparse_ce
from sparse_ce import SparseTarget

VOCAB, DIM, SEQUENCES, LENGTH = 53, 16, 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class FusedHead(nn.Linear):
    """Wraps a head whose forward returns the loss."""

    def __init__(self):
        super().__init__(DIM, VOCAB)
        self.loss = sparse_ce.LinearSparseCrossEntropyLoss(label_smoothing=0.1)

    def forward(self, hidden: Tensor, target: SparseTarget, normalizer) -> Tensor:
        return self.loss(hidden, self.weight, target, linear_bias=self.bias, normalizer=normalizer)


class TinyLM(nn.Module):
    """Represents a tiny language model with a choice of heads.

    ``head`` is "logits" (loss of logits), "fused" (loss of the head's weight), "tied" (the same, with the embedding's
    weight) or "module" (fused, in a module of its own).
    """

    def __init__(self, head: str = "fused", **options):
        super().__init__()
        torch.manual_seed(7)
        self.kind = head
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)
        self.head = FusedHead() if head == "module" else nn.Linear(DIM, VOCAB, bias=head != "tied")
        with torch.no_grad():
            self.head.weight.mul_(8)  # makes the logits peaked
        if head == "tied":
            self.head.weight = self.embedding.weight
        loss = sparse_ce.SparseCrossEntropyLoss if head == "logits" else sparse_ce.LinearSparseCrossEntropyLoss
        self.loss = loss(label_smoothing=0.1, **options)

    def trunk(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)

    def logits(self, tokens: Tensor) -> Tensor:
        return F.linear(self.trunk(tokens), self.head.weight, self.head.bias)

    def forward(self, tokens: Tensor, target: Optional[SparseTarget] = None, normalizer=None) -> Tensor:
        """Returns the loss, or the hidden states (B, S, DIM) if ``target`` is None."""
        hidden = self.trunk(tokens)
        if target is None:
            return hidden
        if self.kind == "module":
            return self.head(hidden, target, normalizer)
        if self.kind == "logits":
            return self.loss(self.head(hidden), target, normalizer=normalizer)
        return self.loss(hidden, self.head.weight, target, linear_bias=self.head.bias, normalizer=normalizer)


def reference_loss(model: TinyLM, tokens: Tensor, target: SparseTarget, normalizer: float) -> Tensor:
    """Returns the loss in PyTorch's own ops with a dense target."""
    logits = model.logits(tokens)
    if logits.dtype != torch.float64:
        logits = logits.float()
    smooth = 0.9 * target.to_dense(logits.dtype) + 0.1 / VOCAB
    rows = torch.where(target.ne(-100), -(smooth * torch.log_softmax(logits, -1)).sum(-1), 0.0)
    return rows.sum() / normalizer if normalizer else rows.sum() * 0.0


def batch(form: str = "topk", padding: str = "unequal") -> Tuple[Tensor, SparseTarget]:
    """Returns tokens and a target of (SEQUENCES, LENGTH) positions; the number of active rows differs between
    sequences.

    ``padding`` is "unequal", "half" (the second half of the sequences is ignored) or "all" (everything is ignored).
    """
    generator = torch.Generator().manual_seed(11)
    shape = SEQUENCES, LENGTH

    def integers(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator)

    tokens, counts = integers(VOCAB, *shape), torch.arange(LENGTH) <= integers(LENGTH, SEQUENCES, 1)
    if padding != "unequal":
        counts[SEQUENCES // 2 if padding == "half" else 0:] = False
    if form == "labels":
        return tokens, SparseTarget.from_index(integers(VOCAB, *shape).masked_fill(~counts, -100), num_classes=VOCAB)
    if form == "topk":
        indices, values = integers(VOCAB, *shape, 3), torch.rand(*shape, 3, generator=generator)
        return tokens, SparseTarget.from_topk(indices, values, row_mask=counts, num_classes=VOCAB)
    lengths = integers(4, SEQUENCES * LENGTH)
    ends = lengths.cumsum(0)
    ranges = torch.stack((ends - lengths, ends), -1).reshape(*shape, 2)
    entries = int(ends[-1])
    return tokens, SparseTarget.from_jagged(integers(VOCAB, entries), torch.rand(entries, generator=generator), ranges,
                                            row_mask=counts, num_classes=VOCAB)


def gradients(model: nn.Module) -> Dict[str, Tensor]:
    """Returns full copies of the gradients by name; parameters without a gradient are missing."""
    def full(grad: Tensor) -> Tensor:
        return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().cpu().clone()
    return {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def reference_step(head: str, form: str, padding: str, dtype: torch.dtype) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns the loss and gradients of one process that has the whole batch, computed in ``dtype``."""
    model = TinyLM(head).to(dtype)
    tokens, target = batch(form, padding)
    loss = reference_loss(model, tokens, target, float(target.ne(-100).sum()))
    loss.backward()
    return loss.detach(), gradients(model)
