"""Converts teacher caches to datasets of Hugging Face's ``datasets``."""

from typing import Any, Dict, Iterator, List, Tuple, Union

import torch
from torch import Tensor

from .._core.errors import check
from ..data.cache import TeacherCache
from ..data.distillkit import DistillKitCache
from ..data.sequence import Header, Place
from ..data.storing import stored_of

Cache = Union[TeacherCache, DistillKitCache]
_CACHES = (TeacherCache, DistillKitCache)


def as_dataset(data: Any) -> Any:
    """Returns a cache as a ``datasets.Dataset`` with the columns of a Parquet cache. Converts the values of a dict, and
    returns anything else unchanged.

    ``datasets`` copies the sequences once to its own folder of caches, and again if a file has changed."""
    if isinstance(data, dict) and any(isinstance(part, _CACHES) for part in data.values()):
        return {name: as_dataset(part) for name, part in data.items()}
    if not isinstance(data, _CACHES):
        return data
    import datasets

    columns = _columns_of(data, 0)
    types = {"log_probs": next((str(row.dtype) for row in columns["log_probs"]), "float32"), "log_tail": "float32",
             "predicts": "uint8"}
    features = {}
    for name in columns:
        number = datasets.Value(types.get(name, "uint32"))
        features[name] = datasets.Sequence(datasets.Sequence(number) if name in ("ids", "log_probs") else number)
    return datasets.Dataset.from_generator(_rows, features=datasets.Features(features),
                                           gen_kwargs={"cache": data, "files": tuple(_files_of(data))})


def _rows(cache: Cache, files: Tuple[Any, ...]) -> Iterator[Dict[str, Any]]:
    """Yields the sequences. ``datasets`` repeats the copy if an argument has changed, so ``files`` is one."""
    for i in range(len(cache)):
        yield _columns_of(cache, i)


def _files_of(cache: Cache) -> Iterator[Tuple[str, int, int]]:
    for shard in cache.shards.all:
        info = shard.path.stat()
        yield str(shard.path.absolute()), info.st_size, info.st_mtime_ns


def _columns_of(cache: Cache, i: int) -> Dict[str, Any]:
    """Returns a sequence as arrays, in the columns of a Parquet cache."""
    sample: Dict[str, Any] = cache[i]
    place = Place(str(cache.path), i)
    names: List[str] = [cache.names.get(name, name) for name in ("tokens", "target", "log_tail")]
    tokens, target, log_tail = map(sample.get, names)
    assert target is not None
    check(tokens is not None, f"a cache for a trainer must hold tokens, got none at {place.at()}; pass tokens= to "
          "CacheWriter.add")
    dtype = "float16" if target.values.dtype == torch.float16 else "float32"
    k = target.indices.shape[-1] if target.form == "topk" else None
    stored = stored_of(target, {"tokens": tokens, "log_tail": log_tail},
                       Header(cache.num_classes, k, dtype, cache.predicts or "next"), False, place)

    def of_positions(t: Tensor) -> List[Any]:
        return list(t if stored.counts is None else t.split(stored.counts.tolist()))

    columns = {"input_ids": stored.tokens, "ids": of_positions(stored.ids), "log_probs": of_positions(stored.log_probs),
               "log_tail": stored.log_tail, "predicts": None if cache.predicts is None else stored.predicts}
    return {name: [part.numpy() for part in column] if isinstance(column, list) else column.numpy()
            for name, column in columns.items() if column is not None}
