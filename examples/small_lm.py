"""A language small enough to learn in seconds, and a model of it whose forward is the loss."""

import math
from typing import Any, Dict, Union

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparse_ce import CrossEntropyOutput, LinearSparseCrossEntropyLoss, SparseTarget


class MarkovText(Dataset):
    """Sequences in which each token is followed by one of ``entries`` others, with known probabilities.

    These are the soft labels: no model can have a lower loss than their entropy. A third of the sequences has none, as
    text that no teacher has read: its labels are the tokens that follow. Sequences differ in length, what is left of
    each is padding. ``first``: the number of the first sequence, far off for text that nobody trains on.
    """

    def __init__(self, size: int, vocab: int = 1024, length: int = 32, entries: int = 4, first: int = 0):
        self.size, self.vocab, self.length, self.first = size, vocab, length, first
        generator = torch.Generator().manual_seed(0)
        self.next = torch.randint(vocab, (vocab, entries), generator=generator)
        self.probs = torch.softmax(2 * torch.randn(vocab, entries, generator=generator), 1)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Dict[str, Any]:
        """tokens: (S,) int64. target: SparseTarget of shape (S,), of the token after each: its label, or how likely
        each one is. ``sparse_ce.collate`` makes one target of a batch that has both."""
        if i >= len(self):
            raise IndexError(i)
        generator = torch.Generator().manual_seed(self.first + i)
        text = torch.empty(self.length + 1, dtype=torch.int64)
        token = int(torch.randint(self.vocab, (), generator=generator))
        for position in range(self.length):
            text[position] = token
            token = int(self.next[token, torch.multinomial(self.probs[token], 1, generator=generator)])
        text[self.length], tokens = token, text[:-1]
        used = int(torch.randint(self.length // 4, self.length + 1, (), generator=generator))
        counts = torch.arange(self.length) < used
        if i % 3 == 0:
            target = SparseTarget.from_index(text[1:], row_mask=counts, num_classes=self.vocab)
        else:
            target = SparseTarget.from_topk(self.next[tokens], self.probs[tokens], row_mask=counts,
                                            num_classes=self.vocab)
        return {"tokens": tokens, "target": target}


class SmallLM(nn.Module):
    """A Transformer that goes from its hidden states to the loss: the (B, S, V) logits never exist.

    The loss is computed inside of ``forward``, where DDP and FSDP2 have the head's weight ready.
    """

    def __init__(self, vocab: int, length: int, dim: int = 64, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(length))
        self.loss = LinearSparseCrossEntropyLoss()
        self.measure = LinearSparseCrossEntropyLoss(reduction="none", return_entropy=True, return_argmax=True)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B, S), S up to ``length`` -> what the head multiplies, (B, S, dim)."""
        length = tokens.shape[1]
        hidden = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.position[:length]
        for layer in self.layers:
            hidden = layer(hidden, self.causal[:length, :length], is_causal=True)
        return self.norm(hidden)

    def forward(self, tokens: Tensor, target: SparseTarget, normalizer=None,
                measure: bool = False) -> Union[Tensor, CrossEntropyOutput]:
        """tokens (B, S), target (B, S) -> the sum of the positions' losses by ``normalizer``, (), or their mean; with
        ``measure`` loss, entropy and argmax of each position, (B, S), of which metrics are made without logits."""
        loss = self.measure if measure else self.loss
        return loss(self.hidden(tokens), self.head.weight, target, self.head.bias, normalizer)


def token_sums(output: CrossEntropyOutput, target: SparseTarget) -> Tensor:
    """(4,): how many tokens count, and over them the sums of losses, of right guesses and of entropies. Unlike means
    these add up over batches and processes of unequally many tokens."""
    right = target.is_top_class(output.argmax)
    return torch.stack([target.ne(-100).sum(), output.loss.sum(), right.sum(), output.entropy.sum()])


def metrics(sums: Tensor) -> Dict[str, float]:
    """Of :func:`token_sums`, added up."""
    loss, accuracy, entropy = (sums[1:] / sums[0]).tolist()
    return {"loss": loss, "perplexity": math.exp(loss), "accuracy": accuracy, "entropy": entropy}
