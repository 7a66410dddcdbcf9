"""Tests torch.compile with symbolic sizes: the vocabulary, its class weights, the shape of a mask."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend

from cases import Draw, sparsely
from close import assert_bitwise_equal
from compiling import DYNAMIC
from sparse_ce import (
    SparseCrossEntropyLoss,
    SparseTarget,
    binary_cross_entropy_with_logits,
    collate,
    cross_entropy,
    linear_cross_entropy,
    masked_mean,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")

VOCABULARIES = (7, 9, 11)  # torch.compile makes them symbols by the third


def through_head(x, target, **options):
    return linear_cross_entropy(x, torch.eye(x.shape[1], device=x.device), target, **options)


def assert_compiled_equals_eager(loss, x, *arguments):
    """Compares value and gradient of the two functions in ``loss``, (compiled, eager)."""
    results = []
    for run in loss:
        z = x.clone().requires_grad_()
        out = run(z, *arguments)
        out.backward()
        results.append((out.detach(), z.grad))
    for ours, eager in zip(*results):
        assert_bitwise_equal(ours, eager)


def targets(form, draw, vocab):
    dense = draw.uniform(6, vocab) * draw.uniform(6, vocab).gt(0.6)
    return {
        "labels": lambda: draw.integers(vocab, 6),
        "tuple": lambda: (draw.integers(vocab, 6, 3), draw.uniform(6, 3)),
        "coo": lambda: SparseTarget.from_coo(dense.to_sparse()),
        "csr": lambda: SparseTarget.from_csr(dense.to_sparse_csr()),
    }[form]()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", [cross_entropy, binary_cross_entropy_with_logits])
def test_a_mean_is_compiled_once_for_all_vocabularies(loss, weighted, device):
    counter, draw = CompileCounterWithBackend("aot_eager"), Draw(device)
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for vocab in (*VOCABULARIES, 13):
        weight = draw.uniform(vocab) if weighted else None
        assert_compiled_equals_eager((compiled, loss), draw.normal(6, vocab), draw.integers(vocab, 6), weight)
    assert counter.frame_count == 2  # one for the first size, one for any size


@pytest.mark.parametrize("form, head", sparsely(2, ["labels", "tuple", "coo", "csr"], [cross_entropy, through_head]))
def test_class_weights_of_a_symbolic_vocabulary(head, form, device):
    counter, draw = CompileCounterWithBackend("aot_eager"), Draw(device)

    def f(x, target, weight):
        return head(x, target, weight=weight)

    compiled = torch.compile(f, backend=counter, fullgraph=True)
    for vocab in VOCABULARIES:
        assert_compiled_equals_eager((compiled, f), draw.normal(6, vocab), targets(form, draw, vocab),
                                     draw.uniform(vocab))
    # The number of classes of a SparseTarget is a constant of the graph, and so is that of the op `mean`.
    assert counter.frame_count <= (2 if head is through_head and form in ("labels", "tuple") else len(VOCABULARIES))


@pytest.mark.parametrize("head", [cross_entropy, through_head])
def test_a_coo_target_where_the_vocabulary_became_symbolic(head, device):
    draw = Draw(device)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    for vocab, form in zip(VOCABULARIES, ("labels", "tuple", "coo")):
        assert_compiled_equals_eager((compiled, head), draw.normal(6, vocab), targets(form, draw, vocab))


@pytest.mark.parametrize("head", [cross_entropy, through_head])
def test_wrong_sizes_are_refused_where_they_are_symbolic(head, device):
    draw = Draw(device)
    compiled = torch.compile(lambda x, y, w: head(x, y, weight=w), backend="eager", dynamic=True)
    compiled(draw.normal(6, 7), draw.integers(7, 6), draw.uniform(7))
    for wrong in (6, 8):
        with pytest.raises(Exception, match=r"weight must be \(7,\)"):
            compiled(draw.normal(6, 7), draw.integers(7, 6), draw.uniform(wrong))
    with pytest.raises(Exception, match="target must have 9 classes, got 7"):
        compiled(draw.normal(6, 9), targets("coo", draw, 7), draw.uniform(9))


def test_num_classes_and_weights_of_either_width(device):
    draw = Draw(device)

    def f(x, y, w):
        return cross_entropy(x, y, w, num_classes=5)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for vocab, width in zip(VOCABULARIES, (7, 5, 11)):
        assert_compiled_equals_eager((compiled, f), draw.normal(6, vocab), draw.integers(5, 6), draw.uniform(width))


@pytest.mark.parametrize("mask", [(6, 1), (1, 8), (8,), (1,), (6, 8)], ids=str)
@pytest.mark.parametrize("dynamic", ["input", "mask"])
def test_one_of_input_and_mask_is_dynamic(dynamic, mask, device):
    draw = Draw(device)
    x, m = draw.normal(6, 8), draw.uniform(*mask).gt(0.4)
    for d in range({"input": x, "mask": m}[dynamic].dim()):
        torch._dynamo.maybe_mark_dynamic({"input": x, "mask": m}[dynamic], d)
    for dim in (None, 0, (-1,)):
        torch.testing.assert_close(torch.compile(masked_mean, backend="aot_eager", fullgraph=True)(x, m, dim),
                                   masked_mean(x, m, dim))


def test_a_mask_that_stays_under_an_input_that_changes(device):
    counter, draw = CompileCounterWithBackend("aot_eager"), Draw(device)
    compiled = torch.compile(masked_mean, backend=counter, fullgraph=True)
    mask = torch.tensor([True, False, True], device=device)
    for rows in (5, 6, 8, 9):
        x = draw.normal(rows, 3)
        torch.testing.assert_close(compiled(x, mask, 0), masked_mean(x, mask, 0))
    assert counter.frame_count <= 2


def test_targets_made_and_shifted_where_sizes_are_symbols(device):
    draw = Draw(device)

    def f(x, i, v):
        target = SparseTarget.from_topk(i, v, mask=i > 1, ignore_empty=True, num_classes=5).shift(1)
        return cross_entropy(x, target, label_smoothing=0.1)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for length, k in ((6, 3), (7, 2), (9, 4)):
        assert_compiled_equals_eager((compiled, f), draw.normal(2, length, 5), draw.integers(5, 2, length, k),
                                     draw.uniform(2, length, k))


def of_rows(form, rows, draw):
    """Returns a target with more entries than any other size here, so that no two sizes are equal by chance."""
    entries = 40 * rows
    if form == "index":
        return SparseTarget.from_index(draw.integers(5, rows))
    if form == "topk":
        return SparseTarget.from_topk(draw.integers(5, rows, 3), draw.uniform(rows, 3))
    return SparseTarget.from_jagged(draw.integers(5, entries), draw.uniform(entries),
                                    torch.arange(rows + 1, device=draw.device) * 40)


PARTS = {
    "from": lambda t: t[1:], "to": lambda t: t[:-1], "first": lambda t: t[:2], "between": lambda t: t[1:3],
    "last": lambda t: t[-3:], "every other": lambda t: t[::2], "a part of the size": lambda t: t[:t.shape[0] - 2],
    "dots": lambda t: t[1:, ...], "sections": lambda t: t.split([2, t.shape[0] - 2])[1],
}


def compiled_once(f, form, device):
    """Returns True if one compilation serves every number of rows, whatever PyTorch needs for the first number."""
    counter, draw, counts = CompileCounterWithBackend("aot_eager"), Draw(device), set()
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for rows in (6, 9, 13):
        assert_compiled_equals_eager((compiled, f), draw.normal(rows, 5), of_rows(form, rows, draw))
        counts.add(counter.frame_count)
    return len(counts) == 1


@pytest.mark.parametrize("part, form", sparsely(3, PARTS, ["index", "topk", "jagged"]))
def test_parts_of_targets_are_compiled_once_for_all_numbers_of_rows(part, form, device):
    assert compiled_once(lambda x, target: cross_entropy(PARTS[part](x), PARTS[part](target)), form, device)


@pytest.mark.parametrize("join", [SparseTarget.cat, collate], ids=["cat", "collate"])
@pytest.mark.parametrize("form", ["index", "topk", "jagged"])
def test_targets_are_joined_where_sizes_are_symbols(form, join, device):
    of_logits = torch.stack if join is collate else torch.cat
    assert compiled_once(lambda x, target: cross_entropy(of_logits((x, x)), join([target, target])), form, device)


def test_a_compiler_follows_lists_and_arrays(device):
    x = Draw(device).normal(2, 5)
    given = SparseTarget.from_topk(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5, 0.25], [1.0, 0.5]])).to(device)
    made = {
        "labels": lambda t: SparseTarget.from_index([1, 2], row_mask=[True, False]).to(x.device),
        "top-k": lambda t: SparseTarget.from_topk([[1, 2], [3, 4]], [[0.5, 0.25], [1.0, 0.5]]).to(x.device),
        "jagged": lambda t: SparseTarget.from_jagged([1, 2, 3], [0.5, 0.25, 1.0], [0, 2, 3]).to(x.device),
        "a list of rows": lambda t: t[[1, 0]], "an array of rows": lambda t: t[np.array([1, 0])],
    }
    for make in made.values():
        torch.compiler.reset()

        def f(x, t, make=make):
            return cross_entropy(x, make(t))

        assert_compiled_equals_eager((torch.compile(f, backend="aot_eager", fullgraph=True), f), x, given)


def test_a_functional_equals_pytorch_at_every_vocabulary(device):
    draw = Draw(device)
    compiled = torch.compile(lambda x, y, w: cross_entropy(x, y, w), backend="aot_eager", fullgraph=True)
    for vocab in VOCABULARIES:
        x, y, w = draw.normal(6, vocab), draw.integers(vocab, 6), draw.uniform(vocab)
        torch.testing.assert_close(compiled(x, y, w), F.cross_entropy(x, y, w))


@pytest.mark.parametrize("form", DYNAMIC)
def test_ten_batches_of_different_counts_compile_a_step_twice_at_most(form, device):
    """Compiles model and loss in one graph with the target as an argument. The second compilation serves any count."""
    counter, draw = CompileCounterWithBackend("aot_eager"), Draw(device)
    layer, loss = torch.nn.Linear(5, 11).to(device), SparseCrossEntropyLoss(num_classes=11)

    def step(x, target):
        return loss(layer(x), target)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for entries in (5, 9, 12, 3, 20, 7, 30, 11, 4, 6):
        x, target = draw.normal(6, 5), DYNAMIC[form](entries, draw)
        grads = []
        for run in (compiled, step):
            layer.zero_grad()
            run(x, target).backward()
            grads.append(layer.weight.grad)
        assert_bitwise_equal(*grads)
    assert counter.frame_count <= 2


def test_a_target_is_guarded_by_little_more_than_labels(device):
    """Counts the guards that run before each call of compiled code: a target adds its tensors, kind and width."""
    draw = Draw(device)
    x, labels = draw.normal(6, 11), draw.integers(11, 6)
    targets = {"topk": SparseTarget.from_topk(draw.integers(11, 6, 3), draw.uniform(6, 3)),
               "jagged": SparseTarget.from_jagged(draw.integers(11, 12), draw.uniform(12),
                                                  torch.arange(7, device=device) * 2)}

    def guards(target):
        torch.compiler.reset()

        def step(x, target):
            return cross_entropy(x, target)

        torch.compile(step, backend="aot_eager", fullgraph=True)(x, target)
        entry, = _debug_get_cache_entry_list(step.__code__)
        return sum(": source=" not in line for line in str(entry.guard_manager).splitlines())

    least = guards(labels)
    for target in targets.values():
        assert guards(target) <= least + 45
