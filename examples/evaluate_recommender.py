"""Computes HR@10, NDCG@10 and MRR of held-out items among a whole catalogue, one block of users at a time.

    python examples/evaluate_recommender.py [--items 500000] [--users 1024] [--quick] [--compare]

A user is a vector, and the score of an item is the dot product with its embedding, as in two-tower models, SASRec and
GRU4Rec. Items that the user has already seen do not count. The embeddings are synthetic: replace `catalogue` by those
of your model.
"""

import argparse
import resource
import time
from typing import Dict, Tuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--items", type=int, default=500_000)
parser.add_argument("--users", type=int, default=1024)
parser.add_argument("--quick", action="store_true", help="20,000 items and 128 users")
parser.add_argument("--compare", action="store_true", help="compare with the matrix of scores")
parser.add_argument("--device", help="by default a GPU if there is one")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce


def ranks(users: Tensor, items: Tensor, held_out: Tensor, seen: Tensor, chunk_rows: int = 64) -> Tensor:
    """Returns the number of unseen items that score higher than the held-out one, plus half of those that tie with it.

    The scores of ``chunk_rows`` users exist at a time. Items that do not count get the score of the held-out one, which
    is not higher. The number of ties is found by a second comparison, with the next lower number.

    Args:
        users: (users, D).
        items: (items, D), embeddings of the whole catalogue.
        held_out: (users,), item to be found, or -100 to ignore a user, whose rank is then -1.
        seen: (users, K), items that the user has seen, padded with -100.
        chunk_rows: number of users whose scores exist at a time.
    """
    ids, found = torch.cat((held_out[:, None], seen), 1), []
    for rows, chosen in zip(users.split(chunk_rows), ids.split(chunk_rows)):
        scores = rows @ items.T
        left_out = torch.where(chosen < 0, chosen[:, :1], chosen).clamp(min=0)
        own = scores.gather(1, left_out[:, :1])
        for score in (own, own.nextafter(torch.full_like(own, -torch.inf))):
            scores.scatter_(1, left_out, score.expand_as(left_out))
            found.append(sparse_ce.selected_log_probs(scores, chosen[:, 0], return_rank=True).rank)
    return (torch.cat(found[::2]) + torch.cat(found[1::2])) / 2


def metrics(ranks: Tensor, k: int = 10) -> Dict[str, float]:
    """Averages over the users that are not ignored, each of whom has one held-out item."""
    place = ranks[ranks >= 0].double() + 1
    found = place <= k
    return {f"HR@{k}": found.double().mean().item(),
            f"NDCG@{k}": torch.where(found, 1 / torch.log2(place + 1), 0.0).mean().item(),
            "MRR": (1 / place).mean().item()}


def catalogue(users: int, items: int, width: int = 64, length: int = 50) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns synthetic users and items, and each user's held-out and seen items."""
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(items, width, generator=generator), dim=1)
    history = torch.randint(items, (users, length + 1), generator=generator)
    noise = torch.randn(users, width, generator=generator) / width**0.5
    vectors = F.normalize(embeddings[history].mean(1) * length**0.5 + embeddings[history[:, 0]] + noise, dim=1)
    return vectors, embeddings, history[:, 0], history[:, 1:]


def dense_ranks(users: Tensor, items: Tensor, held_out: Tensor, seen: Tensor) -> Tensor:
    """Computes the same from the matrix of all scores (users, items)."""
    scores = users @ items.T
    of_held_out = scores.gather(1, held_out[:, None])
    scores.scatter_(1, torch.cat((held_out[:, None], seen), 1), -torch.inf)
    return (scores > of_held_out).sum(1) + (scores == of_held_out).sum(1) / 2


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = (128, 20_000) if args.quick else (args.users, args.items)
    users, items, held_out, seen = (t.to(args.device) for t in catalogue(*shape))
    for function in (ranks, dense_ranks)[:1 + args.compare]:
        before, start = peak_memory(args.device), time.perf_counter()
        found = metrics(function(users, items, held_out, seen))
        seconds, grown = time.perf_counter() - start, (peak_memory(args.device) - before) / 2**20
        print(f"{function.__name__}: " + "  ".join(f"{name} {value:.4f}" for name, value in found.items()) +
              f"  ({seconds:.2f} s, {grown:.0f} MiB more memory)")


def peak_memory(device: str) -> int:
    """Returns the peak memory in bytes, of the GPU or else of the process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
