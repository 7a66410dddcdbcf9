"""A language small enough to learn in seconds, and a model of it whose forward is the loss."""

import math
from typing import Any, Dict

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparse_ce import LinearSparseCrossEntropyLoss, SparseTarget


class MarkovText(Dataset):
    """Sequences in which each token is followed by one of ``entries`` others, with known probabilities.

    These are the soft labels: no model can have a lower loss than their entropy. Sequences differ in length, what is
    left of each is padding.
    """

    def __init__(self, size: int, vocab: int = 1024, length: int = 32, entries: int = 4):
        self.size, self.vocab, self.length = size, vocab, length
        generator = torch.Generator().manual_seed(0)
        self.next = torch.randint(vocab, (vocab, entries), generator=generator)
        self.probs = torch.softmax(2 * torch.randn(vocab, entries, generator=generator), 1)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Dict[str, Any]:
        """tokens: (S,) int64. target: SparseTarget of shape (S,), the distribution of the token after each."""
        if i >= len(self):
            raise IndexError(i)
        generator = torch.Generator().manual_seed(i)
        tokens = torch.empty(self.length, dtype=torch.int64)
        token = int(torch.randint(self.vocab, (), generator=generator))
        for position in range(self.length):
            tokens[position] = token
            token = int(self.next[token, torch.multinomial(self.probs[token], 1, generator=generator)])
        used = int(torch.randint(self.length // 4, self.length + 1, (), generator=generator))
        target = SparseTarget.from_topk(self.next[tokens], self.probs[tokens],
                                        row_mask=torch.arange(self.length) < used, num_classes=self.vocab)
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

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B, S), S up to ``length`` -> what the head multiplies, (B, S, dim)."""
        length = tokens.shape[1]
        hidden = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.position[:length]
        for layer in self.layers:
            hidden = layer(hidden, self.causal[:length, :length], is_causal=True)
        return self.norm(hidden)

    def forward(self, tokens: Tensor, target: SparseTarget, normalizer=None) -> Tensor:
        """tokens (B, S), target (B, S) -> the sum of the positions' losses by ``normalizer``, (), or their mean."""
        return self.loss(self.hidden(tokens), self.head.weight, target, self.head.bias, normalizer)
