"""Tests that ``torch.utils.flop_counter`` counts the matrix products that a head computes, each like PyTorch's
``linear``."""


import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import sparse_ce

ROWS, VOCAB, WIDTH, K = 6, 50, 8, 3


def head_of(device, *frozen):
    torch.manual_seed(0)
    return [torch.randn(size, WIDTH, device=device, requires_grad=name not in frozen)
            for size, name in ((ROWS, "input"), (VOCAB, "linear_weight"))]


def products(step, *head):
    """Returns the FLOPs of ``step`` in units of one matrix product, 2 N V D."""
    with FlopCounterMode(display=False) as counter:
        step(*head)
    return counter.get_total_flops() / (2 * ROWS * VOCAB * WIDTH)


def steps_of(device):
    torch.manual_seed(1)
    labels = torch.randint(VOCAB, (ROWS,), device=device)
    ids, advantages = torch.randint(VOCAB, (ROWS, K), device=device), torch.randn(ROWS, device=device)
    values = torch.rand(ROWS, K, device=device, requires_grad=True)
    loss = sparse_ce.linear_cross_entropy
    return {
        "plain": lambda x, w: F.cross_entropy(F.linear(x, w), labels).backward(),
        "mean": lambda x, w: loss(x, w, labels).backward(),
        "mean, values": lambda x, w: loss(x, w, (ids, values)).backward(),
        "none": lambda x, w: loss(x, w, labels, reduction="none").sum().backward(),
        "binary": lambda x, w: sparse_ce.linear_binary_cross_entropy(x, w, (ids, values.detach())).backward(),
        "binary, none": lambda x, w: sparse_ce.linear_binary_cross_entropy(
            x, w, labels, reduction="none").sum().backward(),
        "metrics": lambda x, w: loss(x, w, labels, return_entropy="detached").loss.backward(),
        "entropy": lambda x, w: loss(x, w, labels, return_entropy=True).entropy.sum().backward(),
        "log-probabilities": lambda x, w: sparse_ce.linear_selected_log_probs(x, w, ids).log_probs.sum().backward(),
        "row loss": lambda x, w: sparse_ce.linear_row_loss(
            lambda out, labels, advantages: -advantages * out.log_probs, x, w, labels, advantages).backward(),
        "few classes": lambda x, w: loss(x, w, labels % 20, num_classes=20).backward(),
        "candidates": lambda x, w: sparse_ce.candidate_logits(x, w, ids).sum().backward(),
        "candidates, sparse": lambda x, w: sparse_ce.candidate_logits(x, w, ids, sparse_grad=True).sum().backward()}


@pytest.mark.parametrize("name, made", [
    ("plain", 3), ("mean", 3), ("mean, values", 3), ("none", 4), ("metrics", 3), ("entropy", 4),
    ("binary", 3), ("binary, none", 4),
    ("log-probabilities", 4), ("row loss", 4), ("few classes", 3 * 20 / VOCAB), ("candidates", 3 * K / VOCAB),
    ("candidates, sparse", 3 * K / VOCAB)])
def test_a_step_counts_its_products(name, made, device):
    assert products(steps_of(device)[name], *head_of(device)) == made


@pytest.mark.parametrize("name, made", [
    ("plain", 2), ("mean", 2), ("none", 3), ("binary", 2), ("metrics", 2), ("log-probabilities", 3),
    ("candidates", 2 * K / VOCAB)])
def test_what_is_frozen_takes_no_product(name, made, device):
    step = steps_of(device)[name]
    for frozen in ("input", "linear_weight"):
        assert products(step, *head_of(device, frozen)) == made
    if name == "mean":
        assert products(steps_of(device)["mean, values"], *head_of(device, "input", "linear_weight")) == 1


def test_forward_alone_takes_one(device):
    labels = torch.zeros(ROWS, dtype=torch.int64, device=device)
    for forward in (lambda x, w: sparse_ce.linear_cross_entropy(x, w, labels),
                    lambda x, w: sparse_ce.linear_cross_entropy(x, w, labels, reduction="none"),
                    lambda x, w: sparse_ce.linear_cross_entropy(x, w, labels, return_argmax=True),
                    lambda x, w: sparse_ce.linear_topk_log_probs(x, w, K)):
        assert products(forward, *head_of(device, "input", "linear_weight")) == 1


def test_a_compiled_step_and_one_without_numbers(device):
    labels = torch.zeros(ROWS, dtype=torch.int64, device=device)
    compiled = torch.compile(sparse_ce.linear_cross_entropy, backend="aot_eager")
    assert products(lambda x, w: compiled(x, w, labels).backward(), *head_of(device)) == 3
    on_meta = labels.to("meta")
    assert products(lambda x, w: sparse_ce.linear_cross_entropy(x, w, on_meta).backward(), *head_of("meta")) == 3


def test_a_rank_counts_the_classes_that_it_has(device):
    """Checks calls that need no gradients. With gradients, the ops that a sharded head is composed of are counted."""
    count, labels = flop_registry[torch.ops.sparse_ce.linear_select], torch.zeros(2 * ROWS, dtype=torch.int64)
    for first_class, shares_rows, logits in ((0, False, ROWS * VOCAB), (50, False, ROWS * 30),
                                             (50, True, 2 * ROWS * 30), (90, True, 0)):
        made = count(*head_of(device), None, labels, num_classes=80, group="g", ranks=2, first_class=first_class,
                     shares_rows=shares_rows)
        assert made == 2 * logits * WIDTH
