"""Runs one of several processes of test_sharded_recipes.py.

    RANK=r WORLD_SIZE=n python recipe_cases.py FOLDER CASE ...

Each rank holds some of the queries and documents. Losses and gradients are compared with all scores in one process.
"""

import math
from typing import Any, Callable, Dict, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparse_ce
from recipes import recipes
from sharded_cases import main
from sharded_problems import assert_same, assert_the_same_everywhere

RECIPES = recipes()
ROWS, WIDTH, SCALE = 5, 4, 7.0


def embeddings(negatives: int = 0, seed: int = 0) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns the queries and documents of all ranks, and the positives. The first documents of two ranks are equal."""
    draw = torch.Generator().manual_seed(seed)
    ranks, each = dist.get_world_size(), ROWS * (1 + negatives)
    queries, documents = (F.normalize(torch.randn(n, WIDTH, generator=draw, dtype=torch.float64), dim=1)
                          for n in (ranks * ROWS, ranks * each))
    documents[each] = documents[0]
    positives = (each * torch.arange(ranks)[:, None] + torch.arange(ROWS)).flatten()
    return queries, documents, positives


def own(t: Tensor) -> Tensor:
    return t.chunk(dist.get_world_size())[dist.get_rank()].clone()


def compare(ours: Callable[..., Tensor], dense: Callable[..., Tensor], *every: Tensor) -> None:
    """Compares a loss of this rank's embeddings with one of all embeddings, and the gradients of this rank's."""
    local, all_of_them = ([cut(t).requires_grad_() for t in every] for cut in (own, torch.clone))
    loss, exact = ours(*local), dense(*all_of_them)
    assert_same(loss, exact)
    assert_the_same_everywhere({"loss": loss})
    for found, expected in zip(torch.autograd.grad(-1.3 * loss, local), torch.autograd.grad(-1.3 * exact, all_of_them)):
        assert_same(found, own(expected))


def info_nce(queries: Tensor, documents: Tensor, positives: Tensor) -> Tensor:
    return RECIPES["info_nce"](queries, documents, positives, dist.group.WORLD, SCALE)


def dense(queries: Tensor, documents: Tensor, positives: Tensor) -> Tensor:
    scores = SCALE * queries @ documents.T
    kept = [i for i, y in enumerate(positives.tolist()) if y != -100]
    return torch.stack([scores[i].logsumexp(0) - scores[i, positives[i]] for i in kept]).mean()


def of_positives(positives: Tensor) -> Tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return (lambda q, d: info_nce(q, d, positives)), (lambda q, d: dense(q, d, positives))


def one_document_a_query() -> None:
    for seed in range(3):
        queries, documents, positives = embeddings(seed=seed)
        assert torch.equal(positives, torch.arange(dist.get_world_size() * ROWS))
        compare(*of_positives(positives), queries, documents)


def hard_negatives() -> None:
    queries, documents, positives = embeddings(2)
    compare(*of_positives(positives), queries, documents)


def ignored_queries() -> None:
    """Ignores some queries of each rank, and all queries of the last."""
    queries, documents, positives = embeddings(1)
    positives[[0, ROWS + 2]] = positives[-ROWS:] = -100
    compare(*of_positives(positives), queries, documents)


def both_directions() -> None:
    queries, documents, positives = embeddings()
    compare(lambda q, d: (info_nce(q, d, positives) + info_nce(d, q, positives)) / 2,
            lambda q, d: (dense(q, d, positives) + dense(d, q, positives)) / 2, queries, documents)


def without_excluded() -> None:
    queries, documents, positives = embeddings(1)
    scores = torch.randn(len(queries), len(documents), generator=torch.Generator().manual_seed(3))
    excluded = (scores > 0.5).scatter(1, positives[:, None], False)
    ids = torch.cat((positives[:, None], RECIPES["columns"](excluded)), 1)

    def ours(q: Tensor, d: Tensor) -> Any:
        return sparse_ce.linear_row_loss(
            RECIPES["without_excluded"], q, d, ids, group=sparse_ce.SequenceGroup(dist.group.WORLD), logit_scale=SCALE,
            vocab_start=dist.get_rank() * len(d), num_classes=len(documents), return_log_tail=True)

    def masked(q: Tensor, d: Tensor) -> Tensor:
        return F.cross_entropy((SCALE * q @ d.T).masked_fill(excluded, -math.inf), positives)

    compare(ours, masked, queries, documents)


def of_siglip(images: Tensor, texts: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(images), dtype=torch.float64) - 1
    return -F.logsigmoid(signs * (log_scale.exp() * images @ texts.T + bias)).sum(1).mean()


def compare_siglip(ours: Callable[..., Tensor], ranks: int) -> None:
    """Compares a loss of this rank's embeddings, a scale and a bias with that of all embeddings in one process.

    The gradients of the scale and the bias are complete after a sum over ``ranks`` ranks.
    """
    images, texts, _ = embeddings()
    learned = torch.tensor(10.0, dtype=torch.float64).log(), torch.tensor(-3.0, dtype=torch.float64)
    local, every = ([t.clone().requires_grad_() for t in (*features, *learned)]
                    for features in ((own(images), own(texts)), (images, texts)))
    loss, exact = ours(*local), of_siglip(*every)
    assert_same(loss, exact)
    assert_the_same_everywhere({"loss": loss})
    found, expected = torch.autograd.grad(-1.3 * loss, local), torch.autograd.grad(-1.3 * exact, every)
    for i in range(2):
        assert_same(found[i], own(expected[i]))
    for i in range(2, 4):
        total = found[i].clone()
        if ranks > 1:
            dist.all_reduce(total)
        assert_same(total, expected[i])


def siglip() -> None:
    compare_siglip(lambda *args: RECIPES["siglip_over_processes"](*args, dist.group.WORLD), dist.get_world_size())


def siglip_with_complete_gradients() -> None:
    """Passes the scale and the bias as arguments: each rank gets their complete gradients, as the page says."""
    def ours(images: Tensor, texts: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
        count = dist.get_world_size() * ROWS
        return sparse_ce.linear_binary_cross_entropy(
            images, texts, torch.arange(count), logit_scale=log_scale.exp(), logit_bias=bias, reduction="batchmean",
            group=sparse_ce.SequenceGroup(dist.group.WORLD), vocab_start=dist.get_rank() * ROWS, num_classes=count)

    compare_siglip(ours, 1)


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))
        self.scale = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, queries: Tensor, documents: Tensor) -> Tuple[Tensor, Tensor]:
        return self.scale.exp() * F.normalize(queries @ self.weight, dim=1), F.normalize(documents @ self.weight, dim=1)


def data_parallel() -> None:
    """Multiplies the loss by the number of ranks, and the queries by a learned scale, as the page advises for DDP."""
    queries, documents, positives = embeddings(1)
    model, one = DistributedDataParallel(Encoder()), Encoder()
    loss = info_nce(*model(own(queries), own(documents)), positives)
    (dist.get_world_size() * loss).backward()
    exact = dense(*one(queries, documents), positives)
    exact.backward()
    assert_same(loss, exact)
    for ours, expected in zip(model.module.parameters(), one.parameters()):
        assert expected.grad is not None and expected.grad.any()
        assert_same(ours.grad, expected.grad)


class TwoTowers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))
        self.log_scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.tensor(-3.0, dtype=torch.float64))

    def forward(self, images: Tensor, texts: Tensor) -> Tuple[Tensor, ...]:
        return F.normalize(images @ self.weight, dim=1), F.normalize(texts, dim=1), self.log_scale, self.bias


def siglip_data_parallel() -> None:
    """Multiplies the loss by the number of ranks, as the page advises for DDP."""
    images, texts, _ = embeddings()
    model, one = DistributedDataParallel(TwoTowers()), TwoTowers()
    loss = RECIPES["siglip_over_processes"](*model(own(images), own(texts)), dist.group.WORLD)
    (dist.get_world_size() * loss).backward()
    exact = of_siglip(*one(images, texts))
    exact.backward()
    assert_same(loss, exact)
    for ours, expected in zip(model.module.parameters(), one.parameters()):
        assert expected.grad is not None and expected.grad.any()
        assert_same(ours.grad, expected.grad)


CASES: Dict[str, Callable[[], None]] = {f.__name__: f for f in (
    one_document_a_query, hard_negatives, ignored_queries, both_directions, without_excluded, data_parallel, siglip,
    siglip_with_complete_gradients, siglip_data_parallel)}


if __name__ == "__main__":
    main(lambda name: CASES[name]())
