"""Compares what shards of confident rows, and of rows that agree with a teacher, make together with exact results, in
one process.

The errors are limited as in test_cross_entropy_exact.py. The largest class and the label may be in any shard.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch

from cases import Draw
from dense import arithmetic
from exact_divergences import KINDS, assert_gradient, case
from exact_rows import ExactRows, Rough, assert_exact, confident_logits, long
from sparse_ce import reference
from sparse_ce._core.arguments import DIVERGENCES, Arguments, DenseArguments
from sparse_ce._core.outputs import DIFFERENTIABLE, SAVED, Outputs, Selected
from sparse_ce.ops.logits import dense_divergence
from sparse_ce.sharding.collectives import Gathered
from sparse_ce.sharding.shard import Shard

ops = torch.ops.sparse_ce
ROWS = 16
ASKED = Outputs(loss=True, log_tail=True, entropy=True, collision=True)
CUTS = {"one": (0, 1), "halves": (0, 0.5, 1), "some are empty": (0, 0, 0.02, 0.5, 0.5, 0.97, 1),
        "many": tuple(np.linspace(0, 1, 17))}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("classes", [37, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shards_of_confident_rows(dtype, classes, cuts, device):
    for seed, offset in enumerate((0, 1, classes // 2)):
        draw = Draw(device, seed)
        logits = confident_logits(draw.uniform(ROWS, classes), draw, dtype)
        labels = (logits.argmax(1) + offset) % classes
        a, rows = Arguments(labels, num_classes=classes), ExactRows(logits)
        at, weights = (np.arange(ROWS), labels.cpu().numpy()), np.zeros((ROWS, classes), np.longdouble)
        weights[at] = 1
        weights, one = Rough(weights), np.ones(classes, np.longdouble)
        log_tail, of_tail = rows.tail(weights.value > 0)
        exact = dict(loss=rows.cross_entropy(weights, one), lse=rows.lse, log_probs=rows.log_probs[at],
                     log_tail=log_tail, entropy=rows.entropy, collision=rows.collision)
        of_logits = dict(loss=rows.of_cross_entropy(weights, one), lse=rows.probs, log_probs=-rows.less_shares(weights),
                         log_tail=of_tail, entropy=rows.of_entropy(), collision=rows.of_collision())
        bounds = [round(cut * classes) for cut in CUTS[cuts]]
        spans = list(zip(bounds, bounds[1:]))
        for select_shard, merge in ((ops.select_shard, ops.select_merge),
                                    (reference.select_shard, reference.select_merge)):
            parts = [select_shard(logits[:, begin:end], *a, *ASKED, begin, None) for begin, end in spans]
            chosen = sum(of_entries for _, of_entries in parts)
            out = Selected(*merge(torch.cat([numbers for numbers, _ in parts]), len(spans), chosen, *a, *ASKED))
            for name in exact:
                assert_exact(name, getattr(out, name), exact[name], dtype)
            saved = [getattr(out, name) for name in SAVED]
            for name, gradient in of_logits.items():
                upstream = draw.normal(ROWS).to(arithmetic(dtype))
                grads = [upstream if name == output else None for output in DIFFERENTIABLE]
                ours = torch.cat([ops.select_backward(*grads, logits[:, begin:end], *saved, *a, False, begin)[0]
                                  for begin, end in spans], 1)
                assert_exact(f"gradient of {name}", ours, gradient * long(upstream)[:, None], dtype)


def in_ranks(f, ranks, monkeypatch):
    """Returns f(rank) of each rank, which runs in a thread."""
    barrier, parts, own = threading.Barrier(ranks, timeout=60), [None] * ranks, threading.local()

    def gather(t, shard):
        parts[own.rank] = t
        barrier.wait()
        gathered = torch.cat(parts)
        barrier.wait()
        return Gathered(gathered, has_come=True)

    def run(rank):
        own.rank = rank
        return f(rank)

    monkeypatch.setattr(dense_divergence, "gather", gather)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, beta", KINDS)
def test_shards_of_rows_that_agree(kind, beta, dtype, traced, device, monkeypatch):
    """Checks rows that agree together with one that does not, and one without a divergence."""
    if traced:
        monkeypatch.setattr(dense_divergence, "traced", lambda: True)
    cases = case(kind, beta, dtype)
    z, y = (torch.cat([of_case[i] for of_case in cases]).to(device) for i in (0, 1))
    z, y = torch.cat((z, z[:2].flip(1))), torch.cat((y, y[:2]))
    mask, labels = torch.arange(len(z), device=device) != len(z) - 1, torch.arange(len(z), device=device) % 23 - 1
    bounds = (0, 0, 2, 16, 23)
    spans = list(pairwise(bounds))
    upstream = torch.ones(2, len(z), dtype=arithmetic(dtype), device=device)
    upstream[1] = 0

    def of_rank(rank):
        begin, end = spans[rank]
        d = DenseArguments(y[:, begin:end], mask, labels, DIVERGENCES.index(kind), beta, num_classes=23,
                           first_class=begin)
        stats, sums = dense_divergence.evaluate(z[:, begin:end], d, Shard("", len(spans), begin))
        return sums, ops.dense_divergence_backward(upstream, stats, sums, z[:, begin:end], *d)

    found = in_ranks(of_rank, len(spans), monkeypatch)
    sums, gradients = found[0][0], torch.cat([gradient for _, gradient in found], 1)
    assert all(torch.equal(of_rank, sums) for of_rank, _ in found)
    d = DenseArguments(y, mask, labels, DIVERGENCES.index(kind), beta)
    expected, expected_gradient = (f.double() for f in (
        ops.dense_divergence(z, *d)[1], ops.dense_divergence_with_gradient(upstream, z, *d)[2]))
    torch.testing.assert_close(sums[:2, -2:].double(), expected[:2, -2:], rtol=1e-5, atol=0)
    torch.testing.assert_close(sums[1].double(), expected[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients[-2:].double(), expected_gradient[-2:], rtol=1e-2, atol=1e-6)
    for found, of_z, (*_, exact, gradient, probs, allowed) in zip(sums[0].tolist(), gradients, cases):
        assert abs(found - exact) <= allowed * exact + torch.finfo(sums.dtype).smallest_normal
        assert_gradient(of_z, gradient, probs, allowed)
