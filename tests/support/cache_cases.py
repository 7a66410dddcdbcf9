"""Contains teacher caches for tests: sequences with values that are exact in every dtype, and files that hold them."""

import json

import pytest
import torch

from sparse_ce import SparseTarget
from sparse_ce.data import CacheWriter

V, K = 1000, 5
LENGTHS = (7, 1, 12, 3, 9)
FORMATS = ["safetensors", "parquet"]


def needs(format):
    if format == "parquet":
        pytest.importorskip("pyarrow", minversion="18")


def sequence(length, seed=0, vocab=V, ragged=False, k=K):
    """Returns a target of shape (S,) with log-probabilities that are exact in every dtype and some ignored positions,
    and its tokens and ``log_tail``."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(vocab, generator=draw)[:k] for _ in range(length)])
    ids[0, 0] = vocab - 1  # the last class occurs in every sequence
    values = -torch.randint(0, 256, (length, k), generator=draw) / 32.0
    counts = torch.randint(0, k + 1, (length,), generator=draw) if ragged else torch.full((length,), k)
    tokens = torch.randint(vocab, (length,), generator=draw)
    log_tail = -torch.rand(length, generator=draw)
    if not ragged:
        mask = torch.ones(length, dtype=torch.bool)
        mask[length // 2] = length == 1
        return SparseTarget.from_topk(ids, values,
                                      values_are="log_probs", row_mask=mask, num_classes=vocab), tokens, log_tail
    kept = torch.arange(k) < counts[:, None]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    target = SparseTarget.from_jagged(ids[kept], values[kept], offsets, values_are="log_probs", num_classes=vocab,
                                      ignore_empty=True)
    return target, tokens, log_tail


def write(path, lengths=LENGTHS, ragged=False, vocab=V, parts=True, **options):
    """Writes sequences into a file or folder and returns them."""
    sequences = [sequence(n, i, vocab, ragged) for i, n in enumerate(lengths)]
    with CacheWriter(path, num_classes=vocab, k=None if ragged else K, **options) as writer:
        for target, tokens, log_tail in sequences:
            writer.add(target, **(dict(tokens=tokens, log_tail=log_tail) if parts else {}))
    return sequences


def change_header(path, change):
    """Replaces the text of the header in a ``.safetensors`` file by ``change(text)``."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    said = json.loads(data[8:begin])
    said["__metadata__"]["cache"] = change(said["__metadata__"]["cache"])
    text = json.dumps(said).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])


def assert_same(sample, target, tokens=None, log_tail=None):
    """Checks that a sample equals the written one to the last bit; its values have the dtype of the file, which is
    exact here."""
    read = sample["target"]
    assert read.shape == target.shape and read.num_classes == target.num_classes and read.form == target.form
    assert read.values_are == "log_probs" and read.indices.dtype == torch.int64
    wide = SparseTarget(read.indices, read.values.to(target.values.dtype), read.offsets, read.row_mask,
                        read.num_classes, read.values_are)
    assert wide.equal(target), f"{wide.tolist()} is not {target.tolist()}"
    assert torch.equal(read.ne(-100), target.ne(-100))
    for name, expected in (("tokens", tokens), ("log_tail", log_tail)):
        assert (name in sample) == (expected is not None)
        assert expected is None or torch.equal(sample[name], expected) and sample[name].dtype == expected.dtype
