"""Data: a teacher's top-k on disk, written once, batch by batch, and read by students as a dataset.

::

    with CacheWriter("teacher", num_classes=V, k=64, metadata={"model": ...}) as writer:
        for tokens in batches:                                           # (B, S)
            target, log_tail = sparse_ce.topk_log_probs(teacher(tokens).logits, 64, return_log_tail=True)
            writer.add(target, tokens=tokens, log_tail=log_tail)         # SparseTarget (B, S)

    cache = TeacherCache("teacher")                                      # reads headers, no data
    cache[3]                                                             # {"tokens", "target", "log_tail"}, each (S,)
    DataLoader(cache, batch_size=8, shuffle=True, num_workers=2, collate_fn=collate_sequences)

The suffix of the path says the format. ``x.parquet``, ``x.safetensors`` and ``x.npy``, a folder of ``.npy`` files, each
hold any number of sequences; any other path is a folder of such shards, each of which gets its name when it is whole:
a writer that was stopped goes on with ``resume=True``. When it is closed it adds ``.complete``, JSON: how many shards
and sequences there are; without it the folder is what is in it, and is read with a warning. ``.lock`` is there while
it has a writer, the only one. Everything is little-endian. Shards hold

    ids         (P, K), or (E,) where positions have different numbers of entries; uint16, or uint32 for more classes
    log_probs   like ids; float16, bfloat16 or float32; -inf marks padding, whose id is 0
    entries     (P + 1,) int64, only beside (E,): position p has the entries [entries[p], entries[p + 1])
    sequences   (N + 1,) int64: sequence i has the positions [sequences[i], sequences[i + 1])
    tokens      (P,), optional; the dtype of ids
    log_tail    (P,) float32, optional: the logarithm of the probability of all classes that are not among the ids
    predicts    (P,) uint8: row p is what the teacher predicts of token p + predicts[p]; 1: "next", 0: "token"
    crc32       (N,) uint32: a checksum of each sequence, taken when it is written and compared when it is read

In a ``.safetensors`` file these are tensors, in a ``.npy`` folder files of these names that ``numpy.load`` takes, with
``mmap_mode="r"`` too, and bfloat16 is the uint16 of its bits. A ``.parquet`` file has a row for each sequence:

    input_ids   list<uint16 or uint32>              the tokens
    ids         list<list<uint16 or uint32>>        of each position its entries, K or as many as it has
    log_probs   list<list<halffloat or float>>      bfloat16: log_probs_bfloat16, list<list<uint16>>, its bits
    log_tail    list<float>
    predicts    list<uint8>

so that ``datasets.load_dataset("parquet", ...)`` reads it; Parquet's own checksums take the place of crc32. The header,
JSON, is the text "cache" of the metadata of a ``.safetensors`` or ``.parquet`` file, and ``header.json`` of the folder:
num_classes, k (null: different numbers of entries), dtype, predicts, columns, first (how many sequences are in the
shards before), sequences (how many are in this one), metadata, and a checksum of all this.

Positions without an entry are ignored by losses. Row p is what the teacher predicts behind token p, as its logits at p
do (``predicts="next"``), or what it predicts of token p, as vLLM's prompt_logprobs do (``predicts="token"``). The
header says it and so does each position, so that rows still say it that lost their file.

DistillKit's captured teachers are read by :class:`DistillKitCache`, vLLM's log-probabilities by :func:`from_vllm`.

Examples:
    >>> path = tempfile.mkdtemp() + "/teacher.safetensors"
    >>> with CacheWriter(path, num_classes=1000, k=4) as writer:
    ...     writer.add(sparse_ce.topk_log_probs(torch.randn(2, 8, 1000), 4))
    >>> cache = TeacherCache(path)
    >>> len(cache), cache[1]["target"]
    (2, SparseTarget(topk, shape=[8], k=4, num_classes=1000, logprobs=float16, row_mask, device=cpu))
"""

from .cache import TeacherCache, collate_sequences
from .distillkit import DistillKitCache
from .vllm import from_vllm
from .writer import CacheWriter

__all__ = ["CacheWriter", "DistillKitCache", "TeacherCache", "collate_sequences", "from_vllm"]
