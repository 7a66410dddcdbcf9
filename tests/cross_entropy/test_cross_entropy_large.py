"""Tests that gradients too large for the caches, which take non-temporal stores (csrc/cpu/memory/nontemporal.h), have
the bits of in-place gradients, which do not. The CPU code treats 33 MiB as too large for any cache."""

import pytest
import torch

import sparse_ce
from cases import DTYPES, Draw, sparsely
from dense import arithmetic

BYTES = 33 << 20
WAYS = {
    "labels": dict(),
    "rows after rows": dict(reduction="none"),
    "smoothed": dict(label_smoothing=0.1),
    "weighted and smoothed": dict(label_smoothing=0.1, weight=True),
    "capped": dict(softcap=9.0),
    "scaled": dict(logit_scale=0.7),
    "fewer classes": dict(num_classes=40_003),
    "some entries": dict(k=9),
    "rows full of entries": dict(k=2000),
}


def logits(dtype, *shape):
    """Returns random values that repeat after about a hundred thousand."""
    some = 3 * Draw("cpu").normal(99_991)
    count = torch.Size(shape).numel()
    return some.repeat(count // 99_991 + 1)[:count].view(shape).to(dtype)


def gradients(x, target, inplace, reduction="mean", **options):
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    loss = sparse_ce.cross_entropy(leaf * 1, target, reduction=reduction, inplace=inplace, **options)
    return torch.autograd.grad(loss.sum(), leaf)[0]


def target_of(draw, shape, vocab, k):
    if k:
        return draw.integers(vocab, *shape, k), draw.uniform(*shape, k, low=0.05)
    return draw.integers(vocab, *shape).masked_fill_(draw.uniform(*shape) < 0.1, -100)


# Rows begin within cache lines, and at cache lines.
@pytest.mark.parametrize("dtype, vocab", sparsely(2, DTYPES, [50_257, 51_200]))
def test_rows_have_the_bits_of_gradients_in_place(dtype, vocab):
    rows = BYTES // (vocab * dtype.itemsize) + 1
    x = logits(dtype, rows, vocab)
    for way, given in WAYS.items():
        options, draw = dict(given), Draw("cpu")
        target = target_of(draw, (rows,), options.get("num_classes", vocab), options.pop("k", 0))
        if options.pop("weight", False):
            options["weight"] = draw.uniform(vocab, low=0.2, dtype=arithmetic(dtype))
        found, expected = (gradients(x, target, inplace, **options) for inplace in (False, "backward"))
        assert torch.equal(found, expected), way


@pytest.mark.parametrize("dtype, side, classes", sparsely(2, DTYPES, [64, 61], [150, 4000]))
def test_strided_classes_have_the_bits_of_gradients_in_place(dtype, side, classes):
    """Checks columns that begin at cache lines and within them. A block of columns with 150 classes fits a cache."""
    images = BYTES // (side * side * classes * dtype.itemsize) + 1
    x = logits(dtype, images, classes, side, side).movedim(1, -1)
    target = target_of(Draw("cpu"), (images, side, side), classes, 0)
    for options in (dict(), dict(label_smoothing=0.1, logit_scale=0.7)):
        found, expected = (gradients(x, target, inplace, **options) for inplace in (False, "backward"))
        assert torch.equal(found, expected), options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_have_the_bits_of_gradients_in_place(dtype):
    """Checks them alone, with an entropy, and with a learned scale."""
    vocab = 50_257
    rows = BYTES // (vocab * dtype.itemsize) + 1
    x, ids = logits(dtype, rows, vocab), Draw("cpu").integers(vocab, rows, 9)
    for entropy, learned in ((False, False), (True, False), (True, True)):
        found = []
        for inplace in (False, "backward"):
            leaf = x.clone().requires_grad_()
            scale = torch.tensor(0.7, requires_grad=True) if learned else 0.7
            out = sparse_ce.selected_log_probs(leaf * 1, ids, logit_scale=scale, return_entropy=entropy,
                                               inplace=inplace)
            made = [out.log_probs, out.entropy] if entropy else [out.log_probs]
            found.append(torch.autograd.grad(sum(t.sum() for t in made), leaf)[0])
        assert torch.equal(*found), (entropy, learned)
