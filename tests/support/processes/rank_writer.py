"""Writes the shards of one of several processes: ``python rank_writer.py FOLDER RANK``. This rank stops in its second
shard."""

import functools
import os
import sys
import time
from pathlib import Path

import torch

import sparse_ce
from sparse_ce.data import CacheWriter

TOTAL, SHARD, VOCAB, K = 23, 4, 50, 3  # six shards; the last has three sequences


@functools.lru_cache(None)
def corpus():
    torch.manual_seed(0)
    return torch.randn(TOTAL, 6, VOCAB), torch.randint(VOCAB, (TOTAL, 6))


def writer(path, **named):
    return CacheWriter(path, num_classes=VOCAB, k=K, shard=SHARD, metadata={"teacher": 1}, **named)


def score(made, shards=None, batch=3, total=TOTAL, stop=None):
    """Adds what is missing, of at most ``shards`` shards. Returns the slices. ``stop`` is called before each batch."""
    logits, tokens = corpus()
    found = []
    for part in made.missing(total):
        if shards is not None and len(found) == shards:
            raise KeyboardInterrupt
        found.append(part)
        for rows in torch.arange(part.start, part.stop).split(batch):
            if stop is not None:
                stop(found)
            target, log_tail = sparse_ce.topk_log_probs(logits[rows], K, return_log_tail=True)
            made.add(target, tokens=tokens[rows], log_tail=log_tail)
    return found


def main(folder, stopped):
    rank = int(os.environ["RANK"])
    with writer(Path(folder), rank=rank, world_size=int(os.environ["WORLD_SIZE"]), resume=True) as made:
        if rank == int(stopped):
            score(made, stop=lambda found: len(found) == 2 and time.sleep(600))
        else:
            score(made)


if __name__ == "__main__":
    main(*sys.argv[1:])
