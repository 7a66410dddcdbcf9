"""Stores a teacher's top-k on disk: written once, batch by batch, and read by students as a dataset.

::

    with CacheWriter("teacher", num_classes=V, k=64, metadata={"model": ...}) as writer:
        for tokens in batches:                                           # (B, S)
            target, log_tail = sparse_ce.topk_log_probs(teacher(tokens).logits, 64, return_log_tail=True)
            writer.add(target, tokens=tokens, log_tail=log_tail)         # SparseTarget (B, S)

    cache = TeacherCache("teacher")                                      # reads headers, no data
    cache[3]                                                             # {"tokens", "target", "log_tail"}, each (S,)
    DataLoader(cache, batch_size=8, shuffle=True, num_workers=2, collate_fn=collate_sequences)

The suffix of the path determines the format. ``x.parquet`` and ``x.safetensors`` each hold any number of sequences. Any
other path is a folder of such shards. A shard gets its name only when it is complete, so an interrupted writer can
continue with ``resume=True``. Closing the writer adds ``.complete``, a JSON file with the numbers of shards and
sequences. Without this file the folder is read as it is, with a warning. While a writer is open, the folder contains
``.lock``: one writer may be open, or the ranks of one job. All data is little-endian. Shards contain:

    ids         (P, K), or (E,) if positions have different numbers of entries; uint16, or uint32 for more classes
    log_probs   shape of ids; float16, bfloat16 or float32; -inf marks padding, whose id is 0
    entries     (P + 1,) int64, only with (E,): position p has the entries [entries[p], entries[p + 1])
    sequences   (N + 1,) int64: sequence i has the positions [sequences[i], sequences[i + 1])
    tokens      (P,), optional; the dtype of ids
    log_tail    (P,) float32, optional: the log of the probability of all classes that are not among the ids
    predicts    (P,) uint8: row p is the teacher's prediction for token p + predicts[p]; 1: "next", 0: "token"
    crc32       (N,) uint32: a checksum of each sequence, computed when written and compared when read

In a ``.safetensors`` file these are tensors. A ``.parquet`` file has one row per sequence:

    input_ids   list<uint16 or uint32>              the tokens
    ids         list<list<uint16 or uint32>>        the entries of each position: K, or any number
    log_probs   list<list<halffloat or float>>      bfloat16: log_probs_bfloat16, list<list<uint16>>, its bits
    log_tail    list<float>
    predicts    list<uint8>

``datasets.load_dataset("parquet", ...)`` reads such files. Parquet's own checksums replace crc32. The header is JSON,
the text "cache" in the metadata of the file. It contains num_classes, k (null: different numbers of entries), dtype,
predicts, columns, first (the number of sequences in earlier shards), sequences (the number in this shard), metadata,
and a checksum of all these.

Losses ignore positions without an entry. With ``predicts="next"`` row p is the teacher's prediction for token p + 1, as
its logits at p are. With ``predicts="token"`` it is the prediction for token p, as in vLLM's prompt_logprobs. Both the
header and each position store this, so rows separated from their file still have it.

:class:`DistillKitCache` reads teachers captured by DistillKit; :func:`from_vllm` and
:func:`from_sglang` read the log-probabilities of vLLM and SGLang.

Examples:
    >>> path = tempfile.mkdtemp() + "/teacher.safetensors"
    >>> with CacheWriter(path, num_classes=1000, k=4) as writer:
    ...     writer.add(sparse_ce.topk_log_probs(torch.randn(2, 8, 1000), 4))
    >>> cache = TeacherCache(path)
    >>> len(cache), cache[1]["target"]
    (2, SparseTarget(topk, shape=[8], k=4, num_classes=1000, log_probs=float16, row_mask, device=cpu))
"""

from .._core.listing import listing
from .cache import TeacherCache, collate_sequences
from .distillkit import DistillKitCache
from .sglang import from_sglang
from .vllm import from_vllm
from .writer import CacheWriter

__all__ = ["CacheWriter", "DistillKitCache", "TeacherCache", "collate_sequences", "from_sglang", "from_vllm"]
__dir__ = listing(globals())
