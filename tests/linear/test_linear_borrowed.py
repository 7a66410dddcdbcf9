"""Tests a linear head whose rows are no more than its features. The weight gradient's memory first holds the gradient
of all logits, and the weight gradient is one matrix product over all rows."""

import pytest
import torch
import torch.nn.functional as F

from cases import FORMS, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import ROUTES, dense_result, double, example, fused, make_head, plain, way_of_products
from loss_cases import gradients
from sparse_ce import linear_cross_entropy, linear_row_loss
from sparse_ce.ops import instruction_set

DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
          (torch.float16, torch.float16)]  # of the input, of the head
ROOM = [0, 1, 30, -1]  # features beyond the active rows; -1: there is no room


def check(case, head, keywords, wanted, chunk_rows, route="eager"):
    """Compares the loss and the ``wanted`` gradients for input, weight and bias, and returns the gradients."""
    grad_output = Draw(head[0].device, 1).normal(*(case.shape if keywords["reduction"] == "none" else ()))
    exact, peer = (dense_result(case, head, keywords, grad_output, None, exact=e, wanted=wanted) for e in (True, False))
    leaves = [None if t is None else t.clone().requires_grad_(i in wanted) for i, t in enumerate(head)]
    with ROUTES[route]():
        loss = fused(leaves, case.target, chunk_rows=chunk_rows, **keywords)
        ours = gradients(loss, None, [leaves[i] for i in wanted], grad_output, None)
    assert_close_to_float64(loss, peer[0], exact[0])
    for a, p, e in zip(ours, peer[2], exact[2], strict=True):
        assert_close_to_float64(a, p, e, arithmetic=head[0].dtype)
    return ours


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 7, 30, None])
def test_loss_and_gradients_where_there_is_just_room_and_just_none(chunk_rows, dtypes, room, route, device):
    """Checks blocks of 256, 256 and 98 classes if matrix products are not in float32."""
    draw = Draw(device)
    case = FORMS["tuple"]((50,), 610, draw)
    assert 30 < (~case.ignored).sum() < 50
    head = make_head(case, draw, *dtypes, vocab=615, width=int((~case.ignored).sum()) + room)
    for reduction in ("none", "mean"):  # gradients computed in backward, in forward
        keywords = dict(reduction=reduction, num_classes=610, label_smoothing=0.1, softcap=20.0)
        grads = check(case, head, keywords, (0, 1, 2), chunk_rows, route)
        assert grads[1][610:].eq(0).all() and grads[2][610:].eq(0).all()


@pytest.mark.parametrize("wanted", [(1,), (0, 1), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_whoever_else_requires_a_gradient_in_bfloat16(wanted, bias, device):
    draw = Draw(device)
    case = FORMS["labels-int64"]((40,), 300, draw)
    head = make_head(case, draw, torch.bfloat16, bias=bias, width=40)
    for reduction in ("none", "mean"):
        check(case, head, dict(reduction=reduction), [i for i in wanted if i < 2 or bias], chunk_rows=9)


@pytest.mark.parametrize("rows", [2000, 100])
def test_blocks_of_a_wide_head_in_bfloat16(rows, device):
    """Checks blocks of 256 classes each, also if matrix products are in float32."""
    draw = Draw(device)
    head = [(draw.normal(*size) * by).bfloat16().requires_grad_()
            for size, by in (((rows, 4160), 1 / 64), ((300, 4160), 1), ((300,), 1))]
    labels = draw.integers(300, rows)
    exact = double(head)
    expected = torch.autograd.grad(plain(exact, labels), exact)
    peers = torch.autograd.grad(F.cross_entropy(F.linear(*head).float(), labels), head)
    ours = torch.autograd.grad(fused(head, labels, chunk_rows=max(30, rows // 3)), head)
    for a, p, e in zip(ours, peers, expected):
        assert_close_to_float64(a, p, e)


@pytest.mark.skipif(instruction_set() == "emulated CUDA", reason="a choice of the CPU's")
@pytest.mark.parametrize("cpu", ["cpu"])
def test_it_is_one_product_of_bfloat16_over_all_rows(cpu):
    if way_of_products() == "float32":
        pytest.skip("sums float32 products")
    for rows, products in ((40, 1), (41, 0)):
        head, labels = example(cpu, torch.bfloat16, rows=rows, vocab=33, width=40, ignored=False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as record:
            fused(head, labels, chunk_rows=16).backward()
        shapes = [event.input_shapes[:2] for event in record.events() if event.key == "aten::mm"]
        assert shapes.count([[33, rows], [rows, 40]]) == products, shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_that_float16_cannot_hold_reaches_the_weight(dtype, device):
    """Checks p - 1 times ``grad_output`` beyond float16's range, while its product with the hidden states is within."""
    if instruction_set() == "emulated CUDA" or torch.device(device).type == "cuda":
        pytest.skip("rounds the logits' gradient to 16 bits")
    head, labels = example(device, dtype, rows=8, vocab=15, width=10, ignored=False)
    head[0].data *= 2.0**-6
    exact = double(head[:2])
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels, reduction="sum") * 2.0**17, exact)[1]
    loss = linear_cross_entropy(*head[:2], labels, reduction="none", chunk_rows=3)
    ours, = torch.autograd.grad(loss, head[1], torch.full_like(loss, 2.0**17))
    assert (ours.double() - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_a_loss_of_rows_has_the_same_gradients_in_bfloat16(device):
    """Checks another op with another backward, chunk by chunk."""
    head, labels = example(device, torch.bfloat16, rows=60, vocab=300, width=64)
    valid, grad_output = labels != -100, Draw(device, 1).normal(60)
    rows = linear_row_loss(lambda log_probs, _: -log_probs.log_probs, *head[:2], labels, linear_bias=head[2],
                           reduction="none", chunk_rows=13)
    exact = double(head)
    expected = torch.autograd.grad(plain(exact, labels, reduction="none"), exact, grad_output.double() * valid)
    peer = F.cross_entropy(F.linear(*head).float(), labels, reduction="none")
    peers = torch.autograd.grad(peer, head, grad_output * valid)
    for a, p, e in zip(torch.autograd.grad(rows, head, grad_output * valid), peers, expected):
        assert_close_to_float64(a, p, e)


@pytest.mark.parametrize("ignored", [True, False])
def test_the_number_of_threads_changes_nothing_in_bfloat16(ignored, threads, device):
    """Checks this except where PyTorch's own matrix products depend on it: with AMX, oneDNN splits their sums among
    threads."""
    head, labels = example(device, torch.bfloat16, rows=400, vocab=1000, width=400, ignored=ignored)
    dz = Draw(device, 1).normal(400, 1000).bfloat16()
    x, w, _ = (t.detach() for t in head)
    results, products = [], []
    for n in (1, 2):
        threads(n)
        results.append(torch.autograd.grad(fused(head, labels, chunk_rows=90), head))
        products.append([product for m in (*range(70, 91), 400)
                         for product in (x[:m] @ w.t(), dz[:m] @ w, dz[:m].t() @ x[:m])])
    same = all(map(torch.equal, *products))
    for a, b in zip(*results):
        if same:
            assert_bitwise_equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-2 * a.abs().max().item())


def test_no_chunk_asks_for_memory_of_no_bytes():
    """Checks rows that all fit into the weight's gradient, rows that fit in part, and rows that do not."""
    counts = []
    for rows in (30, 50, 100):
        x, w = torch.ones(rows, 40, dtype=torch.bfloat16), torch.ones(520, 40, dtype=torch.bfloat16)
        labels = torch.zeros(rows, dtype=torch.long)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as record:
            torch.ops.sparse_ce.linear_select_with_gradient(torch.ones(rows), x, w, None, labels, loss=True,
                                                            log_probs=False, chunk_rows=20)
        asked = [event.concrete_inputs[0] for event in record.events() if event.key == "aten::empty"]
        assert [rows] in asked
        counts.append(sum(0 in sizes for sizes in asked))
    assert max(counts) - min(counts) <= 1  # for two to five chunks
