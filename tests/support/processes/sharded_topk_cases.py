"""Runs one process of test_sharded_topk.py: compares top-k, divergences and distillation losses of sharded classes with
one process.

    python sharded_topk_cases.py FOLDER

Saves the failures of each trial to FOLDER/RANK.pt.
"""

import os
import sys
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

import sparse_ce
from linear_cases import Traced

TRIALS = 24
ROWS, CLASSES = 9, 203
KINDS = [("forward_kl", "zero"), ("forward_kl", "uniform"), ("reverse_kl", "floor"), ("jsd", "bucket"),
         ("tv", "renormalize")]


def close(ours, exact, tolerance=1e-12):
    torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance, equal_nan=True)


def top_k(trial, begin, end, classes, group):
    """Tests ties, rows of -inf and NaN, scales that reverse or destroy the order, and ranks with fewer than k
    classes."""
    dtype = (torch.float64, torch.bfloat16)[trial % 2]
    logits = 5 * torch.randn(ROWS, CLASSES, dtype=torch.float64)
    if trial % 3 == 0:
        logits = logits.round()
    logits = logits.to(dtype)
    if trial % 4 == 1:
        logits[0, :140], logits[1] = -torch.inf, -torch.inf
    if trial % 4 == 2:
        logits[2, 3:9] = torch.nan
    options = dict(num_classes=classes, logit_scale=(1.0, -0.7, 0.0)[trial // 4 % 3], return_log_tail=True)
    for k in (1, 5, 150):
        exact, exact_tail = sparse_ce.topk_log_probs(logits, k, **options)
        ours, tail = sparse_ce.topk_log_probs(logits[:, begin:end], k, group=group, vocab_start=begin, **options)
        assert torch.equal(ours.indices, exact.indices) and ours.num_classes == exact.num_classes
        tolerance = 1e-12 if dtype == torch.float64 else 4e-6
        close(ours.values, exact.values, tolerance)
        close(tail, exact_tail, tolerance)


def top_k_of_a_head(trial, begin, end, classes, group):
    hidden, weight, bias = torch.randn(3, 11, 16), torch.randn(CLASSES, 16), torch.randn(CLASSES)
    options = dict(num_classes=classes, chunk_rows=(None, 7)[trial % 2])
    exact = sparse_ce.linear_topk_log_probs(hidden, weight, 4, linear_bias=bias, **options)
    ours = sparse_ce.linear_topk_log_probs(hidden, weight[begin:end], 4, linear_bias=bias[begin:end], group=group,
                                           vocab_start=begin, **options)
    assert torch.equal(ours.indices, exact.indices)
    close(ours.values, exact.values, 1e-5)
    for dtype in (torch.float64, torch.bfloat16):
        of_dtype = [t.to(dtype) for t in (hidden, weight.round(), bias.round())]
        largest, ids = topk_logits_of_a_head(of_dtype, 0, CLASSES, options)
        logits, indices = topk_logits_of_a_head(of_dtype, begin, end, dict(options, group=group, vocab_start=begin))
        assert torch.equal(indices, ids) and logits.dtype == largest.dtype
        close(logits, largest)


def topk_logits_of_a_head(of_dtype, begin, end, options):
    """Returns the 6 largest logits for a single feature that is not 0, so that logits are exact and many tie."""
    hidden, weight, bias = of_dtype
    single = torch.zeros_like(hidden).index_fill_(-1, torch.tensor([0]), 1.0)
    return sparse_ce.linear_topk_logits(single, weight[begin:end], 6, linear_bias=bias[begin:end], **options)


def losses(trial, begin, end, classes, group):
    teacher = sparse_ce.topk_log_probs(torch.randn(ROWS, classes, dtype=torch.float64), 6)
    labels = torch.randint(0, classes, (ROWS,))
    labels[trial % ROWS] = -100
    logits = torch.randn(ROWS, CLASSES, dtype=torch.float64)
    hidden = torch.randn(ROWS, 8, dtype=torch.float64)
    weight = torch.randn(CLASSES, 8, dtype=torch.float64)
    for kind, tail in (KINDS[(trial + trial // 5 + i) % 5] for i in range(2)):  # each with every cut
        options = dict(kind=kind, tail=tail, num_classes=classes)
        given = dict(options, alpha=0.3, temperature=2.0 if tail in ("zero", "renormalize") else 1.0)

        def of_logits(x, w, h, **where):
            return sparse_ce.divergence(x, teacher, **options, **where)

        def of_both(x, w, h, **where):
            return sparse_ce.distillation_loss(x, teacher, labels, **given, **where)

        def of_head(x, w, h, **where):
            return sparse_ce.linear_distillation_loss(h, w, teacher, labels, **given, **where)

        for loss in (of_logits, of_both, of_head):
            whole, here = [[t.clone().requires_grad_() for t in tensors] for tensors in (
                (logits, weight, hidden), (logits[:, begin:end], weight[begin:end], hidden))]
            exact = loss(*whole)
            ours = loss(*here, group=group, vocab_start=begin)
            close(ours, exact)
            exact.backward()
            ours.backward()
            for mine, (t, cut) in zip(here, zip(whole, ((slice(None), slice(begin, end)), slice(begin, end), ...))):
                assert (mine.grad is None) == (t.grad is None)
                if mine.grad is not None:
                    close(mine.grad, t.grad[cut])


def looked_upon(trial, begin, end, classes, group):
    """Tests a mode or hooks for saved tensors that are active on one rank only, unknown to the others."""
    labels, advantages = torch.randint(0, classes, (ROWS,)), torch.randn(ROWS, dtype=torch.float64)
    labels[trial % ROWS] = -100
    teacher = sparse_ce.topk_log_probs(torch.randn(ROWS, classes, dtype=torch.float64), 6)
    hidden, weight = torch.randn(ROWS, 8, dtype=torch.float64), torch.randn(CLASSES, 8, dtype=torch.float64)

    def policy_gradient(h, w, **where):
        return sparse_ce.linear_row_loss(lambda out, _, by: -by * out.log_probs, h, w, labels, advantages, **where)

    def distillation(h, w, **where):
        return sparse_ce.linear_distillation_loss(h, w, teacher, labels, alpha=0.3, **where)

    for loss in (policy_gradient, distillation):
        whole, here = [[t.clone().requires_grad_() for t in (hidden, w)] for w in (weight, weight[begin:end])]
        exact = loss(*whole, num_classes=classes)
        looks = dist.get_rank() == trial // 2 % dist.get_world_size()
        unpacked = []
        hooks = saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t)
        with (Traced(), hooks)[trial % 2] if looks else nullcontext():
            ours = loss(*here, num_classes=classes, group=group, vocab_start=begin, chunk_rows=4)
            assert not unpacked  # checkpointing would otherwise rerun forward within forward
            grads = torch.autograd.grad(ours, here)
        close(ours, exact)
        of_hidden, of_weight = torch.autograd.grad(exact, whole)
        close(grads, (of_hidden, of_weight[begin:end]))


def main(folder):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    wrong = {}
    for check in (top_k, top_k_of_a_head, losses, looked_upon):
        for trial in range(TRIALS):
            torch.manual_seed(trial)  # the same on every rank
            cuts = [0, *torch.randint(0, CLASSES + 1, (world - 1,)).sort().values.tolist(), CLASSES]
            if trial % 5 > 2:  # one rank has all classes
                cuts[1:-1] = [(0, CLASSES)[trial % 5 - 3]] * (world - 1)
            begin, end = cuts[rank], cuts[rank + 1]
            try:
                check(trial, begin, end, CLASSES if trial % 3 else 151, group)
            except Exception:
                wrong[f"{check.__name__} {trial}"] = traceback.format_exc()
                break  # the ranks may have lost their common order of collectives
    torch.save(wrong, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
