"""Provides a language small enough to learn in seconds, and a model whose forward computes the loss."""

import math
from typing import Any, Dict, Union

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparse_ce import CrossEntropyOutput, LinearSparseCrossEntropyLoss, SparseTarget


class MarkovText(Dataset):
    """Generates sequences in which each token is followed by one of ``entries`` others, with known probabilities.

    These probabilities are the soft labels; their entropy is the lowest loss that a model can reach. A third of the
    sequences has hard labels, the next tokens, like text without a teacher. Sequences differ in length, and the rest of
    each is padding. ``first`` is the number of the first sequence; choose a distant one for held-out text.
    """

    def __init__(self, size: int, vocab: int = 1024, length: int = 32, entries: int = 4, first: int = 0):
        self.size, self.vocab, self.length, self.first = size, vocab, length, first
        generator = torch.Generator().manual_seed(0)
        self.next = torch.randint(vocab, (vocab, entries), generator=generator)
        self.probs = torch.softmax(2 * torch.randn(vocab, entries, generator=generator), 1)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Dict[str, Any]:
        """Returns tokens (S,) int64 and target, a SparseTarget (S,): the token after each position, or its
        distribution. ``sparse_ce.collate`` combines both kinds into one target."""
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
    """Implements a Transformer that computes its loss from hidden states: the (B, S, V) logits are never materialized.

    The loss is computed inside ``forward``, where DDP and FSDP2 have gathered the head's weight.
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
        """Maps tokens (B, S), S at most ``length``, to the input of the head, (B, S, dim)."""
        length = tokens.shape[1]
        hidden = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.position[:length]
        for layer in self.layers:
            hidden = layer(hidden, self.causal[:length, :length], is_causal=True)
        return self.norm(hidden)

    def forward(self, tokens: Tensor, target: SparseTarget, normalizer=None,
                measure: bool = False) -> Union[Tensor, CrossEntropyOutput]:
        """Computes the loss of tokens (B, S) and target (B, S): the sum over positions divided by ``normalizer``, or
        the mean, ().

        With ``measure`` it returns loss, entropy and argmax of each position, (B, S). Metrics need no logits then.
        """
        loss = self.measure if measure else self.loss
        return loss(self.hidden(tokens), self.head.weight, target, linear_bias=self.head.bias,
                    normalizer=normalizer)


def token_sums(output: CrossEntropyOutput, target: SparseTarget) -> Tensor:
    """Returns (4,): the number of active tokens, and the sums of their losses, correct predictions and entropies.
    Unlike means, sums can be added over batches and processes with different numbers of tokens."""
    right = target.is_top_class(output.argmax)
    return torch.stack([target.ne(-100).sum(), output.loss.sum(), right.sum(), output.entropy.sum()])


def metrics(sums: Tensor) -> Dict[str, float]:
    """Computes means from added-up :func:`token_sums`."""
    loss, accuracy, entropy = (sums[1:] / sums[0]).tolist()
    return {"loss": loss, "perplexity": math.exp(loss), "accuracy": accuracy, "entropy": entropy}
