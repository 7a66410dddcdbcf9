"""Tests the linear head with bugs of published losses: no active rows, NaN, -inf, uninitialized memory."""

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from cases import DTYPES, FORMS, Draw
from close import assert_bitwise_equal
from linear_cases import ROUTES, double, example, fused, make_head, plain
from loss_cases import ALL_IGNORED, REDUCTIONS, SOME, all_ignored
from sparse_ce import SparseTarget, linear_cross_entropy
from sparse_ce.ops import expected_grad
from sparse_ce.ops.head.products import HeadProducts

each_route = pytest.mark.parametrize("route", ROUTES)


# --------------------------------------------------------------------------------------------------- 15: no active rows


@pytest.mark.parametrize("options", [dict(), SOME, dict(weight=True), dict(num_classes=5)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", ALL_IGNORED)
@each_route
def test_15_everything_ignored_gives_zero_with_a_graph(route, form, reduction, options, device):
    """Guards against unsloth#1417, which raises ZeroDivisionError, and torch, which returns NaN."""
    classes = options.get("num_classes", 7)
    if "weight" in options:
        options = dict(options, weight=torch.rand(7, device=device))
    head = [torch.full((5, 3), torch.nan), torch.randn(7, 3), torch.randn(7)]
    head = [t.to(device).requires_grad_() for t in head]
    with ROUTES[route]():
        target = all_ignored(form, 5, classes, device)
        loss, lse = fused(head, target, reduction=reduction, return_lse=True, chunk_rows=2, **options)
        assert loss.shape == ((5,) if reduction == "none" else ()) and loss.eq(0).all() and lse.eq(0).all()
        (loss.sum() * 3 + (lse * torch.randn_like(lse)).sum()).backward(retain_graph=True)
        assert all(t.grad.eq(0).all() for t in head)
        loss.sum().backward()
    assert all(t.grad.eq(0).all() for t in head)


def no_rows(device):
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return {
        "labels": empty, "topk": (empty.view(0, 2), torch.zeros(0, 2, device=device)),
        "coo": torch.zeros(0, 7, device=device).to_sparse(),
        "csr": torch.sparse_csr_tensor(empty.new_zeros(1), empty, torch.zeros(0, device=device), (0, 7)),
        "jagged": SparseTarget.from_jagged(empty, None, empty.new_zeros(1)),
        "jagged ranges": SparseTarget.from_jagged(empty, None, empty.view(0, 2)),
    }


@pytest.mark.parametrize("chunk_rows", [None, 3])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", no_rows("cpu"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_route
def test_15_no_rows_give_zero_with_a_graph(route, dtype, form, reduction, chunk_rows, device):
    head = [torch.randn(*size, device=device).to(dtype).requires_grad_() for size in ((0, 3), (7, 3), (7,))]
    with ROUTES[route]():
        loss, lse = fused(head, no_rows(device)[form], reduction=reduction, chunk_rows=chunk_rows, return_lse=True)
        assert loss.shape == ((0,) if reduction == "none" else ()) and loss.eq(0).all() and lse.shape == (0,)
        (5 * loss.sum()).backward(retain_graph=True)
        loss.sum().backward()
    assert [t.grad.shape for t in head] == [t.shape for t in head] and all(t.grad.eq(0).all() for t in head)


def test_15_no_leading_rows_in_several_dimensions(device):
    x = torch.randn(2, 0, 3, 5, device=device, requires_grad=True)
    w = torch.randn(7, 5, device=device, requires_grad=True)
    labels = torch.zeros(2, 0, 3, dtype=torch.int64, device=device)
    loss, lse = linear_cross_entropy(x, w, labels, reduction="none", return_lse=True)
    assert loss.shape == lse.shape == (2, 0, 3)
    linear_cross_entropy(x, w, labels).backward()
    assert x.grad.shape == x.shape and w.grad.eq(0).all()


def test_15_class_weights_that_sum_to_zero_give_zero(device):
    """Checks weights that sum to zero over the labels that occur and over all classes."""
    labels = torch.tensor([1, 2, 1, -100], device=device)
    for weight in (torch.tensor([1.0, 0, 0, 1], device=device), torch.zeros(4, device=device)):
        for reduction in REDUCTIONS:
            head, _ = example(device, rows=4, vocab=4)
            loss = fused(head, labels, weight=weight, reduction=reduction, chunk_rows=2)
            assert loss.eq(0).all()
            loss.backward(torch.randn_like(loss))
            assert all(t.grad.eq(0).all() for t in head)


def test_15_a_step_of_padding_alone_changes_nothing(device):
    """Checks this with gradient accumulation."""
    head, labels = example(device, ignored=False)
    fused(head, labels, normalizer=6).backward()
    before = [t.grad.clone() for t in head]
    for normalizer in (6, None, 0):
        fused(head, torch.full_like(labels, -100), normalizer=normalizer).backward()
        for t, then in zip(head, before):
            assert_bitwise_equal(t.grad, then)


def test_15_accumulated_steps_equal_one_step(device):
    """Compares 1 x 8, 4 x 2 and 8 x 1 rows with unequal token counts and one normalizer."""
    (x, w, b), labels = example(device, rows=8)
    exact = double([x, w, b])
    expected = torch.autograd.grad(plain(exact, labels), exact)
    for steps in (1, 4, 8):
        for t in (x, w, b):
            t.grad = None
        for part, few in zip(x.chunk(steps), labels.chunk(steps)):
            fused((part, w, b), few, normalizer=(labels >= 0).sum()).backward()
        for t, e in zip((x, w, b), expected):
            torch.testing.assert_close(t.grad.double(), e, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------- 16: ignored rows and padded classes


@pytest.mark.parametrize("chunk_rows", [None, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["cross entropy", "losses of rows", "log-probabilities", "rows", "binary", "teacher",
                                  "rows with a teacher"])
def test_ignored_rows_may_hold_anything_if_the_host_would_wait_for_them(form, dtype, chunk_rows, device, monkeypatch):
    """Checks the way of a GPU, which multiplies all rows, with ignored ones set to 0."""
    draw = Draw(device)
    x, w = draw.normal(12, 16).to(dtype), draw.normal(40, 16).to(dtype)
    labels = draw.integers(40, 12)
    labels[[0, 4, 5, 11]] = -100
    x[labels < 0] = torch.nan
    teacher = draw.normal(12, 16).to(dtype)
    teacher[labels < 0] = torch.nan
    multiplied = []
    right = HeadProducts.logits
    monkeypatch.setattr(HeadProducts, "logits",
                        lambda self, input, of=None: multiplied.append(input) or right(self, input, of))
    losses = {
        "cross entropy": lambda x, w: linear_cross_entropy(x, w, labels, chunk_rows=chunk_rows),
        "losses of rows": lambda x, w: linear_cross_entropy(x, w, labels, reduction="none",
                                                            chunk_rows=chunk_rows).sum(),
        "log-probabilities": lambda x, w: sparse_ce.linear_selected_log_probs(
            x, w, labels, chunk_rows=chunk_rows).log_probs.sum(),
        "rows": lambda x, w: sparse_ce.linear_row_loss(lambda out, _: -out.log_probs, x, w, labels,
                                                       chunk_rows=chunk_rows),
        "teacher": lambda x, w: sparse_ce.linear_distillation_loss(x, w, (teacher, w.detach()), chunk_rows=chunk_rows,
                                                                   row_mask=labels >= 0),
        "rows with a teacher": lambda x, w: sparse_ce.linear_row_loss(
            lambda out, _: out.tv - out.log_probs, x, w, labels, chunk_rows=chunk_rows, teacher=(teacher, w.detach()),
            return_tv=True, reduction="none").sum(),
        "binary": lambda x, w: sparse_ce.linear_binary_cross_entropy(x, w, labels[:, None], chunk_classes=chunk_rows),
    }
    results = []
    for waits in (False, True):
        monkeypatch.setattr(expected_grad, "on_host", lambda t, waits=waits: not waits)
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        loss = losses[form](*leaves)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    assert results[1][1][labels < 0].eq(0).all()
    assert multiplied and all(t.isfinite().all() for t in multiplied)  # products of 16 bits may mix rows
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", FORMS)
@each_route
def test_16_what_is_ignored_may_hold_anything(route, form, poison, device):
    """Checks the hidden states of ignored rows, and weights and biases of a padded vocabulary."""
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    clean = make_head(case, draw, torch.float32, vocab=41)
    clean = [torch.where(t.isfinite(), t, 0.0) for t in clean]
    dirty = [t.clone() for t in clean]
    dirty[0][case.ignored] = poison
    dirty[1][37:], dirty[2][37:] = poison, -poison
    rows = draw.normal(*case.shape)
    rows[case.ignored] = poison  # 0 * inf would be NaN
    for reduction in REDUCTIONS:
        results = []
        for head in (clean, dirty):
            leaves = [t.clone().requires_grad_() for t in head]
            grad_output = rows if reduction == "none" else torch.tensor(1.7, device=device)
            options = dict(SOME, reduction=reduction, num_classes=37, return_lse=True, chunk_rows=5)
            with ROUTES[route]():
                loss, lse = fused(leaves, case.target, **options)[:2]
                both = torch.autograd.grad([loss, lse], leaves, [grad_output, rows], retain_graph=True)
                results.append((loss, lse, *both, *torch.autograd.grad(loss, leaves, grad_output)))
            assert all(t.isfinite().all() for t in results[-1])
            for x, w, b in (results[-1][2:5], results[-1][5:]):
                assert x[case.ignored].eq(0).all() and w[37:].eq(0).all() and b[37:].eq(0).all()
        for a, b in zip(*results):
            assert_bitwise_equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_16_nothing_of_it_reaches_a_second_derivative_or_a_transform(form, device):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    head, target = make_head(case, draw, torch.float64, vocab=41), case.target  # holds the poison
    if isinstance(target, torch.Tensor) and target.layout != torch.strided:
        target = SparseTarget.from_coo(target) if target.layout == torch.sparse_coo else SparseTarget.from_csr(target)

    def f(*head):
        return fused(head, target, num_classes=37, chunk_rows=5, **SOME)

    leaves = [t.clone().requires_grad_() for t in head]
    first = torch.autograd.grad(f(*leaves), leaves)
    graph = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    for made in (graph, torch.func.grad(f, (0, 1, 2))(*head)):
        torch.testing.assert_close(made, first)
    second = torch.autograd.grad(sum(g.square().sum() for g in graph), leaves)
    assert all(t.isfinite().all() for t in second) and second[0].ne(0).any()
    assert second[0][case.ignored].eq(0).all() and second[1][37:].eq(0).all() and second[2][37:].eq(0).all()


# ------------------------------------------------------------------------------------------ 17, 20: -inf, reused memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_17_a_first_tile_of_minus_infinity(dtype, device):
    """Checks V = 16392 with logits of -inf except z[9000] = 10, set by the bias (flash-attention#1930)."""
    b = torch.full((16392,), -torch.inf, dtype=dtype, device=device)
    b[9000] = 10
    head = [torch.ones(1, 2, dtype=dtype, device=device), torch.zeros(16392, 2, dtype=dtype, device=device), b]
    head = [t.requires_grad_() for t in head]
    loss, lse = fused(head, torch.tensor([9000], device=device), return_lse=True)
    assert loss == 0 and lse == 10
    (2 * loss + 3 * lse).backward()
    expected = torch.zeros(16392, dtype=dtype, device=device)
    expected[9000] = 3
    torch.testing.assert_close(head[2].grad, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(head[1].grad, expected[:, None].expand(16392, 2), rtol=0, atol=1e-6)
    assert fused(head, torch.tensor([5], device=device)) == torch.inf


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32)], ids=str)
def test_20_every_element_is_written_over_old_memory(dtypes, device):
    """Runs with an allocator full of NaN, which shows if a matrix product does not overwrite its output."""
    def dirty():
        sizes = [12, 37, 12 * 20, 37 * 20, 12 * 37, 5 * 37, 5 * 20, 1200 * 20, 3700 * 20]
        blocks = [torch.full((n,), torch.nan, dtype=dtype, device=device) for n in sizes for dtype in set(dtypes)
                  for _ in range(6)]
        del blocks

    for rows, vocab in ((12, 37), (1200, 3700)):
        head, labels = example(device, *dtypes, rows=rows, vocab=vocab, width=20)
        options = dict(num_classes=vocab - 2, label_smoothing=0.1, chunk_rows=rows // 2 - 1)
        labels.clamp_(max=vocab - 3)
        for reduction in ("none", "mean"):
            results = []
            for spoil in (dirty, lambda: None):
                spoil()
                loss, lse = fused(head, labels, reduction=reduction, return_lse=True, **options)
                spoil()
                results.append((loss, lse, *torch.autograd.grad(loss.sum() * 4, head)))
            for a, b in zip(*results):
                assert a.isfinite().all()
                assert_bitwise_equal(a, b)


def test_ignored_rows_leave_the_sum_of_the_classes_alone(device):
    """Checks that the bias gradient equals that of the active rows alone, bit for bit."""
    head, labels = example(device, rows=16)
    counts = labels >= 0
    dropped = [head[0][counts].detach().requires_grad_(), *head[1:]]
    for reduction in ("sum", "mean"):
        ours = torch.autograd.grad(fused(head, labels, reduction=reduction), head)
        theirs = torch.autograd.grad(fused(dropped, labels[counts], reduction=reduction), dropped)
        for a, b in zip((ours[0][counts], *ours[1:]), theirs):
            torch.testing.assert_close(a, b)
        expected = F.cross_entropy(F.linear(*head), labels, reduction=reduction)
        torch.testing.assert_close(torch.autograd.grad(expected, head[2])[0], ours[2])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_23_tied_embeddings_get_the_gradients_of_both_ends(reduction, device):
    """Checks a head's weight that also embeds the hidden states, so that the gradients of both uses add up."""
    tokens = torch.tensor([[1, 4, 4, 0], [6, 2, 2, 1]], device=device)
    labels = torch.tensor([[4, 4, 0, -100], [2, 2, 1, -100]], device=device)
    weight, results = Draw(device).normal(7, 5, dtype=torch.float64), []
    for loss_of in (lambda x, w: linear_cross_entropy(x, w, labels, reduction=reduction, chunk_rows=3).sum(),
                    lambda x, w: plain((x.flatten(0, 1), w), labels.flatten(), reduction=reduction).sum()):
        w = weight.clone().requires_grad_()
        x = F.embedding(tokens, w).tanh()
        (3 * loss_of(x, w) + loss_of(x.flip(1), w)).backward()
        results.append(w.grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("grad_output", [torch.inf, torch.nan])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_16_an_infinite_upstream_gradient_leaves_ignored_rows_alone(compiled, grad_output, device):
    """Checks gradients that forward has already computed: 0 * inf would be NaN."""
    head, labels = example(device)
    labels[3] = -100
    f = lambda *head: linear_cross_entropy(head[0], head[1], labels, linear_bias=head[2])
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(f, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(f(*head), head, torch.tensor(grad_output, device=device))
    assert grads[0][labels == -100].eq(0).all() and not grads[1].isfinite().all()
