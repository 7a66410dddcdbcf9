"""Text that every machine has, its tokens, and what follows what in it, counted."""

import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

# Tests repeat what they test, tables are not language, and site-packages differ from machine to machine.
SKIPPED = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "lib2to3", "encodings",
           "pydoc_data", "turtledemo", "ensurepip", "__pycache__"}

# A line break with its indentation, then parts of words (camelCase and snake_case come apart), digits, punctuation; a
# piece carries the space before it. Every character is in some piece.
PIECES = re.compile(r"\n *| ?[A-Z]?[a-z]+| ?[A-Z]+(?![a-z])| ?\d| ?_+| ?[^\w\s]+|\s| ?\w")


class Tokenizer:
    """The most frequent pieces of a text. Any other piece is spelled in bytes, so that no token is unknown.

    Ids: 0 to 255 are bytes, ``END`` ends a file, the rest are pieces by descending frequency.
    """

    END = 256

    def __init__(self, texts: Iterable[str], vocab_size: int):
        counts = Counter(piece for text in texts for piece in PIECES.findall(text))
        # Ties are broken by the piece itself: the vocabulary depends on nothing but the text.
        frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))[:vocab_size - self.END - 1]
        self.ids = {piece: (self.END + 1 + i,) for i, piece in enumerate(frequent)}

    def encode(self, text: str) -> List[int]:
        """Token ids of a file, ``END`` behind them."""
        tokens: List[int] = []
        for piece in PIECES.findall(text):
            tokens.extend(self.ids.get(piece) or piece.encode())
        return tokens + [self.END]


def read_corpus(vocab_size: int, max_files: Optional[int] = None,
                held_out_every: int = 10) -> Tuple[np.ndarray, np.ndarray]:
    """(train, held_out) token ids of the standard library's source, int64 (tokens,) each.

    Whole files are held out, and the vocabulary is that of the training split.
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
    """How often each token follows each context of ``n`` tokens; contexts are numbered.

    context: (tokens,) number of the context before each position of the text.
    offsets: (contexts + 1,) context ``c`` has the entries ``[offsets[c], offsets[c + 1])``, the most frequent first.
    next, count: (entries,) a token and how often it follows the context.
    total: (contexts,) occurrences of the context.
    """

    context: np.ndarray
    offsets: np.ndarray
    next: np.ndarray
    count: np.ndarray
    total: np.ndarray


class NextTokenCounts:
    """Next-token distributions counted from a text, as sparse soft labels for the text itself.

    Contexts of ``max_order`` tokens are interpolated with all the shorter ones by absolute discounting: each entry
    gives up ``discount`` counts, and what a context gives up, its mass, is shared out by the next shorter context.

    The position that a label is for is not counted (leave-one-out). Otherwise a context that occurs once, as most do,
    would claim that its one continuation is certain, and the labels would be surer on the training text than the same
    counts are on any other.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, max_order: int = 2, top: int = 16, discount: float = 0.75):
        self.tokens, self.top, self.discount = tokens, top, discount
        self.orders: List[Order] = []
        context = np.zeros_like(tokens)  # one empty context; int64, as contexts * vocab_size exceeds 2^31
        for _ in range(max_order + 1):
            pairs, pair, count = np.unique(context * vocab_size + tokens, return_inverse=True, return_counts=True)
            owner, following = pairs // vocab_size, pairs % vocab_size
            by_count = np.lexsort((-count, owner))
            offsets = np.searchsorted(owner, np.arange(context.max() + 2))
            self.orders.append(Order(context, offsets, following[by_count], count[by_count],
                                     np.bincount(context)))
            # A context and the token behind it are the next position's context, one longer. The first position gets
            # the last pair: the text is read as a ring.
            context = np.roll(pair, 1)

    def next_distribution(self, begin: int, end: int, observed: float) -> Tuple[np.ndarray, np.ndarray]:
        """Soft labels of the tokens at positions ``[begin, end)``: (indices, values), int64 and float32, (S, K).

        ``observed`` is the share of the token that is really there; it also gets the mass that no entry has. A class
        may stand in a row several times, once for each order: sparse_ce adds duplicates up.
        """
        own = self.tokens[begin:end, None]  # (S, 1)
        mass = np.full(own.shape, 1.0 - observed)  # (S, 1): what the orders so far have not given away
        indices, values = [], []
        for order in reversed(self.orders):
            context = order.context[begin:end, None]
            slot = order.offsets[context] + np.arange(self.top)  # (S, top)
            live = slot < order.offsets[context + 1]
            slot = np.where(live, slot, 0)
            others = np.where(live, order.count[slot] - (order.next[slot] == own), 0)
            share = np.maximum(others - self.discount, 0.0) / np.maximum(order.total[context] - 1, 1)
            indices.append(order.next[slot])
            values.append(mass * share)
            mass = mass * (1.0 - share.sum(1, keepdims=True))
        indices.append(own)
        values.append(observed + mass)
        return np.concatenate(indices, 1), np.concatenate(values, 1).astype(np.float32)
