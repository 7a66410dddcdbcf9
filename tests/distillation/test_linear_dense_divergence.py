"""Compares divergences between two linear heads, with labels beside them, with their definitions, in float64."""

import gc
import math
from typing import NamedTuple, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import recorded_memory
import sparse_ce
from cases import DTYPES, Draw, sparsely
from divergence_cases import KINDS, defined, of_kind, transformed
from sparse_ce import SparseTarget, linear_cross_entropy, linear_distillation_loss

ROWS, WIDTH, OF_TEACHER, CLASSES = 9, 7, 5, 33
NAN = math.nan
DTYPES_OF = {**{str(dtype)[6:]: (dtype,) * 4 for dtype in DTYPES},  # of input and head of the student, of the teacher
             "bfloat16 states": (torch.bfloat16, torch.float32, torch.float32, torch.float32),
             "bfloat16 student": (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
             "float16 teacher": (torch.float32, torch.float32, torch.float16, torch.float16),
             "float64 teacher": (torch.bfloat16, torch.float32, torch.float64, torch.float64)}
MASK = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1]).bool()


class Heads(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Optional[Tensor]
    of_teacher: Tensor
    teacher_weight: Tensor
    teacher_bias: Optional[Tensor]

    def learning(self, *which: bool) -> "Heads":
        leaves = [t if t is None else t.detach().requires_grad_(learns)
                  for t, learns in zip(self[:3], which or (True,) * 3)]
        return self._replace(input=leaves[0], weight=leaves[1], bias=leaves[2])

    @property
    def leaves(self) -> list:
        return [t for t in self[:3] if t is not None and t.requires_grad]

    def loss(self, target=None, **options) -> Tensor:
        if target is not None:
            options.setdefault("alpha", 1.0)
        return linear_distillation_loss(self.input, self.weight,
                                        (self.of_teacher, self.teacher_weight, self.teacher_bias), target,
                                        linear_bias=self.bias, **options)

    def logits(self):
        return F.linear(*self[:3]), F.linear(*self[3:])


def make(device, dtypes=(torch.float32,) * 4, bias=True, rows=ROWS, classes=CLASSES, seed=0):
    draw = Draw(device, seed)
    a, b, c, d = dtypes

    def normal(*size, dtype, by=1.0):
        return (by * draw.normal(*size, dtype=torch.float64)).to(dtype)

    return Heads(normal(rows, WIDTH, dtype=a), normal(classes, WIDTH, dtype=b),
                 normal(classes, dtype=b) if bias else None, normal(rows, OF_TEACHER, dtype=c),
                 normal(classes, OF_TEACHER, dtype=d), normal(classes, dtype=d) if bias else None)


def exact(heads, kind="forward_kl", beta=0.5, alpha=1.0, target=None, mask=None, weight=None, reduction="mean",
          normalizer=None, of_student=None, of_teacher=None, ignore_index=-100):
    """Returns the loss in float64, for heads in float64 whose target are class indices."""
    z, y = heads.logits()
    z, y = transformed(z, **(of_student or {})), transformed(y, **(of_teacher or {}))
    mask = torch.ones_like(z[:, 0], dtype=torch.bool) if mask is None else mask
    if target is not None:
        mask = mask & (target != ignore_index)
    weight = torch.ones_like(z[:, 0]) if weight is None else weight.double()
    total = 0
    for share, counts, losses in (
            (alpha, mask, lambda: defined(kind, beta, z, y)),
            (1 - alpha, mask, lambda: F.cross_entropy(z, torch.where(mask, target, 0), reduction="none"))):
        if share == 0:
            continue
        by = 1 if reduction != "mean" else normalizer or max(1, int(counts.sum()))
        total = total + share / by * torch.where(counts, losses(), 0.0) * weight
    return total if reduction == "none" else total.sum()


def wide(heads):
    return Heads(*(None if t is None else t.detach().to(torch.float64, copy=True) for t in heads)).learning(
        *(t is not None and t.requires_grad for t in heads[:3]))


def tolerance(*dtypes):
    """Returns the error that 16-bit logits (rounded once each, about 10 in size) and gradients have."""
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return {"rtol": 0, "atol": 1e-10} if eps < 1e-10 else {"rtol": 0, "atol": 40 * eps if eps < 1e-5 else 4 * eps}


def assert_same(found, expected, **allowed):
    """Compares tensors relative to the largest element of what is expected."""
    for a, b in zip(found, expected, strict=True):
        size = b.detach().abs().max().clamp(min=0.1)
        torch.testing.assert_close(a.detach().double() / size, b.detach().double() / size, **allowed)


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("kind, dtypes, reduction", sparsely(3, KINDS, DTYPES_OF, ["mean", "sum", "none"]))
def test_it_equals_the_definition(kind, dtypes, reduction, device):
    """Checks NaN in ignored rows of both models, labels, padding, transforms and weights together."""
    mask, draw = MASK.to(device), Draw(device, 7)
    heads = make(device, DTYPES_OF[dtypes]).learning()
    labels, weight = draw.integers(CLASSES, ROWS), draw.uniform(ROWS)
    labels[1] = -100
    scale = draw.uniform(ROWS, low=0.5, high=1)
    reference = wide(heads)
    expected = exact(reference, kind, 0.3, 0.7, labels, mask, weight, reduction, None, dict(scale=scale, softcap=9.0),
                     dict(scale=0.7, softcap=8.0))
    grad_output = draw.normal(*expected.shape, dtype=torch.float64)
    with torch.no_grad():
        heads.input[~mask], heads.of_teacher[~mask] = NAN, NAN
    loss = heads.loss(labels, **of_kind(kind, 0.3), alpha=0.7, row_mask=mask, row_weight=weight, reduction=reduction,
                      logit_scale=scale, softcap=9.0, teacher_logit_scale=0.7, teacher_softcap=8.0, chunk_rows=4)
    gradients = torch.autograd.grad(loss, heads.leaves, grad_output.to(loss.dtype))
    assert [g.dtype for g in gradients] == [t.dtype for t in heads.leaves] and (gradients[0][~mask] == 0).all()
    allowed = tolerance(*DTYPES_OF[dtypes])
    assert_same([loss], [expected], **allowed)
    assert_same(gradients, torch.autograd.grad(expected, reference.leaves, grad_output), **allowed)
    if reduction == "none":
        assert (loss[~mask] == 0).all()


@pytest.mark.parametrize("chunk_rows", [1, 4, 100, None])
@pytest.mark.parametrize("which", [(True, True, True), (True, False, False), (False, True, False), (False, False, True),
                                   (True, False, True), (False, True, True)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_and_frozen_parts(reduction, which, chunk_rows, device):
    heads = make(device).learning(*which)
    reference = wide(heads)
    expected = exact(reference, "jsd", reduction=reduction)
    grad_output = Draw(device).normal(*expected.shape)
    loss = heads.loss(kind="jsd", reduction=reduction, chunk_rows=chunk_rows)
    assert_same([loss], [expected], rtol=0, atol=2e-6)
    assert_same(torch.autograd.grad(loss, heads.leaves, grad_output),
                torch.autograd.grad(expected, reference.leaves, grad_output.double()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", ["both", "student", "teacher", "none"])
def test_biases(bias, device):
    heads = make(device)
    heads = heads._replace(bias=heads.bias if bias in ("both", "student") else None,
                           teacher_bias=heads.teacher_bias if bias in ("both", "teacher") else None).learning()
    reference = wide(heads)
    loss, expected = heads.loss(kind="reverse_kl"), exact(reference, "reverse_kl")
    assert_same([loss, *torch.autograd.grad(loss, heads.leaves)],
                [expected, *torch.autograd.grad(expected, reference.leaves)], rtol=0, atol=2e-6)


@pytest.mark.parametrize("reduction, normalizer", [("mean", None), ("mean", 3), ("sum", None), ("none", None)])
@pytest.mark.parametrize("labels_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("alpha", [0, 0.3, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_labels_beside_the_divergence(masked, alpha, labels_dtype, reduction, normalizer, device):
    """Checks alpha at its ends, and rows that have a divergence, a label, or both."""
    heads, mask = make(device).learning(), MASK.to(device) if masked else None
    labels = Draw(device, 1).integers(CLASSES, ROWS)
    labels[[0, 4, 5]] = 7
    reference = wide(heads)
    expected = exact(reference, "jsd", alpha=alpha, target=labels, mask=mask, reduction=reduction,
                     normalizer=normalizer, ignore_index=7)
    loss = heads.loss(labels.to(labels_dtype), kind="jsd", alpha=alpha, row_mask=mask, reduction=reduction,
                      normalizer=normalizer, ignore_index=7, chunk_rows=4)
    assert_same([loss, *torch.autograd.grad(loss.sum(), heads.leaves)],
                [expected, *torch.autograd.grad(expected.sum(), reference.leaves)], rtol=0, atol=2e-6)
    if alpha == 0 and not masked:
        of_labels = linear_cross_entropy(heads.input, heads.weight, labels, linear_bias=heads.bias, reduction=reduction,
                                         normalizer=normalizer, ignore_index=7)
        torch.testing.assert_close(loss, of_labels)


@pytest.mark.parametrize("alpha", [0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", ["a pair", "top-k"])
def test_soft_targets_beside_the_divergence(form, reduction, masked, alpha, device):
    heads, mask = make(device).learning(), MASK.to(device) if masked else torch.ones(ROWS, device=device).bool()
    soft = 2 * Draw(device, 1).normal(ROWS, CLASSES)
    values, ids = soft.topk(3)
    values = values.softmax(1)
    labelled = torch.arange(ROWS, device=device) != (3 if form == "top-k" else -1)  # a row that the target ignores
    target = (ids, values) if form == "a pair" else SparseTarget.from_topk(ids, values, row_mask=labelled)
    soft = torch.zeros_like(soft).scatter(1, ids, values)
    reference = wide(heads)
    labelled = mask & labelled
    z, by = reference.logits()[0], int(labelled.sum()) if reduction == "mean" else 1
    hard = torch.where(labelled, -(soft.double() * z.log_softmax(1)).sum(1), 0.0) / by
    hard = hard if reduction == "none" else hard.sum()
    expected = (1 - alpha) * hard
    if alpha:
        expected = expected + alpha * exact(reference, "tv", mask=labelled, reduction=reduction)
    loss = heads.loss(target, kind="tv", alpha=alpha, row_mask=mask, reduction=reduction, chunk_rows=4)
    assert_same([loss, *torch.autograd.grad(loss.sum(), heads.leaves)],
                [expected, *torch.autograd.grad(expected.sum(), reference.leaves)], rtol=0, atol=3e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("labelled", [False, True])
def test_no_active_rows(labelled, reduction, device):
    heads = make(device).learning()
    with torch.no_grad():
        heads.input.fill_(NAN)
        heads.of_teacher.fill_(NAN)
    options = dict(row_mask=torch.zeros(ROWS, dtype=torch.bool, device=device), reduction=reduction)
    labels = dict(target=torch.zeros(ROWS, dtype=torch.int64, device=device), alpha=0.5) if labelled else {}
    loss = heads.loss(**labels, **options)
    gradients = torch.autograd.grad(loss.sum(), heads.leaves)
    assert (loss == 0).all() and all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("leading", [(), (3, 3), (0,)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leading_shapes(reduction, leading, device):
    heads = make(device)
    n = math.prod(leading)
    flat = heads._replace(input=heads.input[:n], of_teacher=heads.of_teacher[:n]).learning()
    shaped = flat._replace(input=flat.input.reshape(*leading, WIDTH),
                           of_teacher=flat.of_teacher.reshape(*leading, OF_TEACHER))
    loss = shaped.loss(kind="hellinger", reduction=reduction)
    reference = wide(flat)
    expected = exact(reference, "hellinger", reduction=reduction)
    assert loss.shape == (leading if reduction == "none" else ())
    assert_same([loss.flatten() if reduction == "none" else loss, *torch.autograd.grad(loss.sum(), flat.leaves)] if n
                else [torch.autograd.grad(loss.sum(), flat.leaves)[1]],
                [expected, *torch.autograd.grad(expected.sum(), reference.leaves)] if n
                else [torch.zeros_like(reference.weight)], rtol=0, atol=4e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_padding_behind_the_classes(reduction, device):
    heads = make(device).learning()
    loss = heads.loss(reduction=reduction)
    gradients = torch.autograd.grad(loss.sum(), heads.leaves)

    def padded(t, rows):
        return torch.cat((t, t.new_full((rows, *t.shape[1:]), NAN)))

    big = Heads(heads.input, padded(heads.weight, 3), padded(heads.bias, 3), heads.of_teacher,
                padded(heads.teacher_weight, 8), padded(heads.teacher_bias, 8)).learning()
    found = big.loss(reduction=reduction, num_classes=CLASSES)
    of_big = torch.autograd.grad(found.sum(), big.leaves)
    assert torch.equal(found, loss) and torch.equal(of_big[0], gradients[0])
    for a, b in zip(of_big[1:], gradients[1:]):
        assert torch.equal(a[:CLASSES], b) and (a[CLASSES:] == 0).all()


def test_self_distillation_through_a_shared_weight(device):
    """Checks that the weight of both heads gets the gradient of the student alone."""
    heads = make(device).learning()
    of_teacher = Draw(device, 3).normal(ROWS, WIDTH)
    loss = linear_distillation_loss(heads.input, heads.weight, (of_teacher, heads.weight), kind="jsd")
    apart = linear_distillation_loss(heads.input, heads.weight, (of_teacher, heads.weight.detach().clone()),
                                     kind="jsd")
    assert torch.equal(loss, apart)
    leaves = heads.leaves[:2]
    assert all(map(torch.equal, torch.autograd.grad(loss, leaves), torch.autograd.grad(apart, leaves)))


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="a GPU masks rows without the host")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16 student"])
def test_memory_of_two_chunks_and_the_gradients(dtypes, reduction):
    """Checks that all logits of a model (8 MiB), or the teacher's weight (2.5 MiB), exist nowhere."""
    rows, classes, width, of_teacher, chunk_rows = 512, 4096, 32, 160, 8
    a, b, c, d = DTYPES_OF[dtypes]
    draw = Draw("cpu")
    x, w = draw.normal(rows, width, dtype=a).requires_grad_(), draw.normal(classes, width, dtype=b).requires_grad_()
    t, of_t = draw.normal(rows, of_teacher, dtype=c), draw.normal(classes, of_teacher, dtype=d)

    def call():
        loss = linear_distillation_loss(x, w, (t, of_t), kind="jsd", reduction=reduction, chunk_rows=chunk_rows)
        return torch.autograd.grad(loss.sum(), (x, w))

    call()
    gc.collect()
    gradients = x.numel() * x.element_size() + w.numel() * w.element_size()
    low = 5 * w.numel() if b == torch.bfloat16 else 0  # a byte of each sum over chunks, and its weight in float32
    chunks = 2 * chunk_rows * classes * 4
    most = recorded_memory.peak(call)
    assert most <= gradients + low + chunks + (64 << 10) + 64 * rows, f"{most >> 10} KiB"
    assert most < min(rows * classes * a.itemsize, gradients + of_t.numel() * of_t.element_size())
