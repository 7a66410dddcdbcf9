"""Tests that logits of 16-bit heads are not rounded. Values are as exact as in float32, on every device and in every
function of a head."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cases import Draw
from linear_cases import way_of_products
from refusals import assert_refused
from sparse_ce import (
    LinearSparseCrossEntropyLoss,
    linear_cross_entropy,
    linear_row_loss,
    linear_selected_log_probs,
    linear_topk_log_probs,
)
from sparse_ce.ops import instruction_set

ops = torch.ops.sparse_ce

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
ROWS, VOCAB, WIDTH = 12, 41, 16
# The log-probabilities are about -40; float32 resolves them to 4e-6, 16 bits to 0.06 and 0.008.
EXACT, ROUNDED = 2e-4, 2e-3


def make(half, device, head_dtype=None):
    """Returns [input, weight, bias] whose logits reach 60, labels of small probability, and the logits in float64. All
    values fit ``half``, so mixed precision does not change them wherever it converts."""
    draw = Draw(device)
    head = [(draw.normal(ROWS, WIDTH) * 4).to(half), (draw.normal(VOCAB, WIDTH) * 3).to(half),
            draw.normal(VOCAB).to(half)]
    labels = draw.integers(VOCAB, ROWS)
    labels[::5] = -100
    logits = F.linear(*(t.double() for t in head))
    return [t.to(head_dtype if head_dtype and i else half).requires_grad_() for i, t in enumerate(head)], labels, logits


def rounds(half, device):
    """Returns True if logits are rounded to 16 bits here by default."""
    native = half == torch.bfloat16 and way_of_products() == "native"
    return torch.device(device).type == "cuda" or instruction_set() == "emulated CUDA" or native


def losses(head, labels, logits_dtype, **options):
    """Yields (name, call) for each function of a head. A call returns values for the labels, (active rows,) or (1,)."""
    x, w, b = head
    valid = labels != -100
    options = dict(linear_bias=b, logits_dtype=logits_dtype, **options)

    def of_row(log_probs, labels):
        return -log_probs.log_probs

    yield "rows", lambda: linear_cross_entropy(x, w, labels, reduction="none", **options)[valid]
    yield "mean", lambda: linear_cross_entropy(x, w, labels, **options)[None]
    yield "metrics", lambda: linear_cross_entropy(x, w, labels, return_entropy=True, **options).loss[None]
    yield "selected", lambda: -linear_selected_log_probs(x, w, labels, **options).log_probs[valid]
    yield "row loss", lambda: linear_row_loss(of_row, x, w, labels, **options)[None]
    yield "row loss, four products", lambda: linear_row_loss(of_row, x, w, labels, reduction="none", **options)[valid]


def expected(z, labels, name):
    rows = F.cross_entropy(z, labels, reduction="none")[labels != -100]
    return rows.mean()[None] if name in ("mean", "metrics", "row loss") else rows


@HALVES
@pytest.mark.parametrize("options", [{}, {"chunk_rows": 5}], ids=["whole", "chunks"])
@pytest.mark.parametrize("head_dtype", [None, torch.float32], ids=["one dtype", "mixed"])
def test_losses_are_those_of_logits_that_are_not_rounded(half, head_dtype, options, device):
    head, labels, z = make(half, device, head_dtype)
    for name, loss in losses(head, labels, torch.float32, **options):
        error = (loss().double() - expected(z, labels, name)).abs().max()
        assert error < EXACT, name
    worst = {name: (loss().double() - expected(z, labels, name)).abs().max()
             for name, loss in losses(head, labels, None, **options)}
    if rounds(half, device):
        assert min(worst.values()) > ROUNDED, worst  # otherwise this test could not see rounding
    else:
        assert max(worst.values()) < EXACT, worst


@pytest.mark.parametrize("asked", [True, False])
def test_every_op_of_a_head_is_told(asked, device):
    """Checks forward, backward, and ops that compute the logits in calls of their own."""
    head, labels, _ = make(torch.bfloat16, device)
    told = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = dict(zip((argument.name for argument in func._schema.arguments), args), **kwargs or {})
            if any(argument.name == "float32_logits" for argument in func._schema.arguments):
                told.setdefault(func.name(), set()).add(given.get("float32_logits", False))
            return func(*args, **(kwargs or {}))

    with Record():
        for _, loss in losses(head, labels, torch.float32 if asked else None):
            loss().sum().backward()
        linear_topk_log_probs(*head[:2], 3, logits_dtype=torch.float32 if asked else None)
    assert len(told) >= 5 and all(values == {asked} for values in told.values()), told


@HALVES
def test_gradients_are_right_and_in_the_dtypes_of_the_head(half, device):
    head, labels, _ = make(half, device)
    exact = [t.detach().double().requires_grad_() for t in head]
    for name, loss in losses(head, labels, torch.float32, chunk_rows=5):
        grad_output = torch.linspace(0.5, 2, loss().numel(), device=device)
        grads = torch.autograd.grad((loss() * grad_output).sum(), head)
        reference = (expected(F.linear(*exact), labels, name) * grad_output.double()).sum()
        for got, want in zip(grads, torch.autograd.grad(reference, exact)):
            assert got.dtype == half
            close = 16 * torch.finfo(half).eps * want.abs().max()
            assert (got.double() - want).abs().max() < close, name


@HALVES
def test_the_teachers_top_k(half, device):
    head, _, z = make(half, device)
    target, log_tail = linear_topk_log_probs(*head[:2], 3, linear_bias=head[2], logits_dtype=torch.float32,
                                             return_log_tail=True)
    log_probs = z.log_softmax(-1)
    best = log_probs.topk(3)
    assert torch.equal(target.indices, best.indices)
    assert (target.values.double() - best.values).abs().max() < EXACT
    rest = log_probs.scatter(1, best.indices, -torch.inf).logsumexp(1)
    assert (log_tail.double() - rest).abs().max() < EXACT


@HALVES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_classes", [None, 30])
def test_the_op_of_the_logits(half, bias, num_classes, device):
    head, _, z = make(half, device)
    logits = ops.linear_logits(*head[:2], head[2] if bias else None, num_classes, True)
    exact = z if bias else z - head[2].double()
    assert logits.dtype == torch.float32
    assert (logits.double() - exact[:, :num_classes]).abs().max() < EXACT
    rounded = ops.linear_logits(*head, num_classes)
    assert rounded.dtype == (half if torch.device(device).type == "cuda" or
                             instruction_set() == "emulated CUDA" else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_changes_for_a_wider_head(dtype, device):
    head, labels, _ = make(torch.bfloat16, device)
    head = [t.detach().to(dtype).requires_grad_() for t in head]
    for (name, asked), (_, plain) in zip(losses(head, labels, torch.float32), losses(head, labels, None)):
        assert asked().dtype == dtype and torch.equal(asked(), plain()), name


def test_under_autocast_the_logits_alone(device):
    head, labels, z = make(torch.bfloat16, device)
    head = [t.detach().float().requires_grad_() for t in head]
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        for name, loss in losses(head, labels, torch.float32):
            assert (loss().double() - expected(z, labels, name)).abs().max() < EXACT, name


def test_a_compiled_loss(device):
    head, labels, z = make(torch.bfloat16, device)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(*head[:2], labels, linear_bias=head[2], logits_dtype=torch.float32)
    assert (loss.double() - expected(z, labels, "mean")).abs() < EXACT
    loss.backward()
    eager = linear_cross_entropy(*head[:2], labels, linear_bias=head[2], logits_dtype=torch.float32)
    for got, want in zip((t.grad for t in head), torch.autograd.grad(eager, head)):
        torch.testing.assert_close(got, want)


def test_the_module(device):
    head, labels, z = make(torch.bfloat16, device)
    criterion = LinearSparseCrossEntropyLoss(logits_dtype=torch.float32)
    assert "logits_dtype=torch.float32" in repr(criterion)
    loss = criterion(*head[:2], labels, linear_bias=head[2])
    assert (loss.double() - expected(z, labels, "mean")).abs() < EXACT


@pytest.mark.parametrize("wrong,error", [(torch.float64, ValueError), (torch.bfloat16, ValueError),
                                         ("float32", TypeError), (32, TypeError)], ids=str)
def test_other_dtypes_are_refused(wrong, error, device):
    head, labels, _ = make(torch.bfloat16, device)
    calls = [call for _, call in losses(head, labels, wrong)]
    calls += [lambda: linear_topk_log_probs(*head[:2], 3, logits_dtype=wrong),
              lambda: LinearSparseCrossEntropyLoss(logits_dtype=wrong)]
    for call in calls:
        assert_refused(call, "logits_dtype must be torch.float32 or None", repr(wrong), error=error)
