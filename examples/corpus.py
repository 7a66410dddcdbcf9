"""Provides a text that every machine has, its tokens, and counts of which token follows which."""

import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

# Tests repeat the code they test, tables are not language, and site-packages differ between machines.
SKIPPED = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "lib2to3", "encodings",
           "pydoc_data", "turtledemo", "ensurepip", "__pycache__"}

# A line break with its indentation, then parts of words (camelCase and snake_case are split), digits, punctuation. A
# piece includes the space before it. Every character is in some piece.
PIECES = re.compile(r"\n *| ?[A-Z]?[a-z]+| ?[A-Z]+(?![a-z])| ?\d| ?_+| ?[^\w\s]+|\s| ?\w")


class Tokenizer:
    """Encodes text as its most frequent pieces. Any other piece is spelled in bytes, so no token is unknown.

    Ids 0 to 255 are bytes, ``END`` ends a file, and the rest are pieces by descending frequency.
    """

    END = 256

    def __init__(self, texts: Iterable[str], vocab_size: int):
        counts = Counter(piece for text in texts for piece in PIECES.findall(text))
        # Ties are broken by the piece itself, so the vocabulary depends only on the text.
        frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))[:vocab_size - self.END - 1]
        self.ids = {piece: (self.END + 1 + i,) for i, piece in enumerate(frequent)}

    def encode(self, text: str) -> List[int]:
        """Returns the token ids of a file, followed by ``END``."""
        tokens: List[int] = []
        for piece in PIECES.findall(text):
            tokens.extend(self.ids.get(piece) or piece.encode())
        return tokens + [self.END]


def read_corpus(vocab_size: int, max_files: Optional[int] = None,
                held_out_every: int = 10) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the token ids (train, held_out) of the standard library's source, int64 (tokens,) each.

    Whole files are held out. The vocabulary is built from the training split only.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files[:max_files]]
    train = [text for i, text in enumerate(texts) if i % held_out_every]
    held_out = texts[::held_out_every]
    tokenizer = Tokenizer(train, vocab_size)
    return (np.concatenate([np.array(tokenizer.encode(text)) for text in train]),
            np.concatenate([np.array(tokenizer.encode(text)) for text in held_out]))


class Order(NamedTuple):
    """Stores how often each token follows each context of ``n`` tokens. Contexts are numbered.

    context: (tokens,) number of the context before each position of the text.
    offsets: (contexts + 1,) context ``c`` has the entries ``[offsets[c], offsets[c + 1])``, most frequent first.
    next, count: (entries,) a token and how often it follows the context.
    total: (contexts,) occurrences of the context.
    """

    context: np.ndarray
    offsets: np.ndarray
    next: np.ndarray
    count: np.ndarray
    total: np.ndarray


class NextTokenCounts:
    """Counts next-token distributions of a text, as sparse soft labels for the text itself.

    Contexts of ``max_order`` tokens are interpolated with all shorter ones by absolute discounting. Each entry gives up
    ``discount`` counts, and the next shorter context distributes the probability mass that this frees.

    The position that a label is for is not counted (leave-one-out). Most contexts occur once. If counted, such a
    context would claim that its only continuation is certain. The labels would then be more confident on the training
    text than the same counts are on any other text.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, max_order: int = 2, top: int = 16, discount: float = 0.75):
        self.tokens, self.top, self.discount = tokens, top, discount
        self.orders: List[Order] = []
        context = np.zeros_like(tokens)  # one empty context; int64, because contexts * vocab_size exceeds 2^31
        for _ in range(max_order + 1):
            pairs, pair, count = np.unique(context * vocab_size + tokens, return_inverse=True, return_counts=True)
            owner, following = pairs // vocab_size, pairs % vocab_size
            by_count = np.lexsort((-count, owner))
            offsets = np.searchsorted(owner, np.arange(context.max() + 2))
            self.orders.append(Order(context, offsets, following[by_count], count[by_count],
                                     np.bincount(context)))
            # A context and the token after it form the next position's context, which is one token longer. The first
            # position gets the last pair: the text is read as a ring.
            context = np.roll(pair, 1)

    def next_distribution(self, begin: int, end: int, observed: float) -> Tuple[np.ndarray, np.ndarray]:
        """Returns soft labels of the tokens at positions ``[begin, end)``: (indices, values), int64 and float32,
        (S, K).

        ``observed`` is the weight of the observed token, which also gets the mass that no entry has. A class may occur
        in a row several times, once per order; sparse_ce adds duplicates up.
        """
        own = self.tokens[begin:end, None]  # (S, 1)
        mass = np.full(own.shape, 1.0 - observed)  # (S, 1): the mass that the orders so far have not distributed
        indices, values = [], []
        for order in reversed(self.orders):
            context = order.context[begin:end, None]
            slot = order.offsets[context] + np.arange(self.top)  # (S, top)
            valid = slot < order.offsets[context + 1]
            slot = np.where(valid, slot, 0)
            others = np.where(valid, order.count[slot] - (order.next[slot] == own), 0)
            share = np.maximum(others - self.discount, 0.0) / np.maximum(order.total[context] - 1, 1)
            indices.append(order.next[slot])
            values.append(mass * share)
            mass = mass * (1.0 - share.sum(1, keepdims=True))
        indices.append(own)
        values.append(observed + mass)
        return np.concatenate(indices, 1), np.concatenate(values, 1).astype(np.float32)
