"""Tests gradients of the linear head: which are computed, how often, for which ``grad_output``, with how many matrix
products."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import MIXED, ROUTES, dense_result, double, example, fused, make, plain, scaled
from loss_cases import GRAD_OUTPUTS
from sparse_ce import SparseTarget, linear_cross_entropy, reference
from sparse_ce.ops import instruction_set


def assert_all_close(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), **tolerance)


# ----------------------------------------------------------------------------------------- 12: requested gradients only


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)),
                         ids=lambda w: "".join(n for n, x in zip("iwbv", w) if x) or "none")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float64, torch.float32),
                                    (torch.bfloat16, torch.float64)], ids=["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("route", ROUTES)
def test_12_every_combination_of_who_requires_grad(route, dtypes, wanted, device):
    """Guards against grad_weight=None with a frozen trunk and a trainable head (Liger). ``dtypes`` are those of the
    head and of the values."""
    dtype, values_dtype = dtypes
    case, head, _ = make("tuple", device, dtype, {})
    for reduction in ("none", "mean"):
        leaves = [t.clone().requires_grad_(w) for t, w in zip((*head, case.values.to(values_dtype)), wanted)]
        with ROUTES[route]():
            loss = linear_cross_entropy(leaves[0], leaves[1], case.build(leaves[3]), linear_bias=leaves[2],
                                        reduction=reduction, chunk_rows=5)
            grad_output = Draw(device, 1).normal(*loss.shape).to(loss.dtype)
            assert loss.requires_grad == any(wanted)
            if any(wanted):
                loss.backward(grad_output)
        assert [t.grad is not None for t in leaves] == list(wanted)
        which = [i for i in range(4) if wanted[i]]
        exact, peer = (dense_result(case, head, dict(reduction=reduction), grad_output, None, e, wanted=which or [0])
                       for e in (True, False))
        assert_close_to_float64(loss, peer[0], exact[0])
        for i, p, e in zip(which, peer[2], exact[2]):
            assert leaves[i].grad.dtype == leaves[i].dtype
            assert_close_to_float64(leaves[i].grad, p.to(leaves[i].dtype), e, arithmetic=dtype)


def products(run):
    """Returns the number of matrix products of ``run``, without those that add to their output, which the profiler may
    miss."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        run()
    return sum(event.count for event in record.key_averages() if event.key == "aten::mm")


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_12_no_product_is_made_for_nobody(wanted, device):
    """Checks for three matrix products if forward computes the gradients, and four if backward recomputes the
    logits."""
    head, labels = example(device, ignored=False)
    for t, w in zip(head, wanted):
        t.requires_grad_(w)
    # At least one tensor must require grad.
    target = labels[:, None], torch.rand(10, 1, device=device, requires_grad=not any(wanted))
    for leaves in (head, [*head[:2], None]):
        if not any(t is not None and t.requires_grad for t in (*leaves, target[1])):
            continue
        with torch.no_grad():
            logits = products(lambda: fused(leaves, target))
        asked, losses = sum(t is not None and t.requires_grad for t in leaves), []
        assert products(lambda: losses.append(fused(leaves, target))) == logits + asked
        assert products(lambda: losses.pop().backward()) == 0
        assert products(lambda: losses.append(fused(leaves, target, reduction="none"))) == logits
        # Values get log-probabilities of forward.
        assert products(lambda: losses.pop().sum().backward()) == (logits + asked if asked else 0)
    assert logits == 1 or wanted == (False, False, True)  # without a bias nothing is added


@pytest.mark.skipif(instruction_set() == "emulated CUDA", reason="a GPU multiplies them all")
@pytest.mark.parametrize("cpu", ["cpu"])
def test_rows_that_are_ignored_are_left_out_of_the_products(cpu):
    """Checks the CPU. On CUDA the number of active rows is not known without synchronization."""
    head, labels = example(cpu, rows=100)
    labels[:60] = -100
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as record:
        fused([*head[:2], None], labels).backward()
    rows = [event.input_shapes[0][0] for event in record.events() if event.key == "aten::mm"]
    assert rows == [(labels >= 0).sum(), (labels >= 0).sum(), 33]


# ------------------------------------------------------------------------------------------------- 7, 8, 9: grad_output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_rows", [None, 1, 3])
def test_7_8_every_row_has_its_own_upstream_gradient(chunk_rows, dtype, device):
    """Guards against backward that multiplies by grad_output[0] (Liger#678) and wrong grad_weight and grad_bias
    (Liger#968)."""
    grad_output = torch.tensor([0, 1, -2, 3, 0, 0.5, 7, 1e-3], device=device)
    head, labels = example(device, dtype, rows=8, vocab=15, width=10, ignored=False)
    labels[0] = -100
    for first in (0.0, 5.0):  # a value of 5 must not leave the ignored row
        grad_output[0] = first
        for target in (labels, SparseTarget.from_topk(labels[:, None], torch.ones(8, 1, device=device))):
            loss = fused(head, target, reduction="none", chunk_rows=chunk_rows)
            ours = torch.autograd.grad(loss, head, grad_output.to(loss.dtype))
            exact, peer = double(head), [t.detach().requires_grad_() for t in head]
            expected = torch.autograd.grad(plain(exact, labels, reduction="none"), exact, grad_output.double())
            peers = torch.autograd.grad(plain(peer, labels, reduction="none"), peer, grad_output.to(dtype))
            assert ours[0][0].eq(0).all() and ours[0][4].eq(0).all()
            for row in (1, 2, 3, 5, 6, 7):  # each row is checked alone, so that 7 does not hide an error in 1e-3
                torch.testing.assert_close(ours[0][row].double(), expected[0][row], rtol=8 * torch.finfo(dtype).eps,
                                           atol=3 * torch.finfo(dtype).eps * float(expected[0][row].abs().max()) + 1e-9)
            for a, p, e in zip(ours, peers, expected):
                assert_close_to_float64(a, p, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_a_token_mask_over_batch_and_time(dtype, device):
    """Checks B, T, H, V = 2, 4, 10, 15 with a masked mean of the tokens' losses, computed outside."""
    draw = Draw(device)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]], device=device).float()
    head = [draw.normal(2, 4, 10).to(dtype), draw.normal(15, 10).to(dtype), draw.normal(15).to(dtype)]
    head = [t.requires_grad_() for t in head]
    labels, results = draw.integers(15, 2, 4), []

    def composed(head, dtype):
        return F.cross_entropy(F.linear(*head).to(dtype).flatten(0, 1), labels.flatten(), reduction="none").view(2, 4)

    for leaves, loss_of in ((head, lambda h: fused(h, labels, reduction="none", chunk_rows=3)),
                            (double(head), lambda h: composed(h, torch.float64)),
                            ([t.detach().requires_grad_() for t in head], lambda h: composed(h, torch.float32))):
        loss = (loss_of(leaves) * mask).sum() / mask.sum()
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    assert results[0][1][mask == 0].eq(0).all()
    for ours, exact, peer in zip(*results):
        assert_close_to_float64(ours, peer, exact)


@pytest.mark.parametrize("which", ["loss", "lse", "both"])
@pytest.mark.parametrize("grad_output", [name for name in GRAD_OUTPUTS if name != "one NaN"])
def test_9_upstream_gradients_of_any_stride(grad_output, which, device):
    head, labels = example(device, ignored=False)
    made = GRAD_OUTPUTS[grad_output](10, device), GRAD_OUTPUTS[grad_output](10, device)
    theirs, pick = double(head), {"loss": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[which]
    outputs = fused(head, labels, reduction="none", return_lse=True, chunk_rows=4)
    expected = plain(theirs, labels, reduction="none"), torch.logsumexp(F.linear(*theirs), 1)
    ours = torch.autograd.grad(outputs[pick], head, made[pick])
    exact = torch.autograd.grad(expected[pick], theirs, [g.double() for g in made[pick]])
    for a, e in zip(ours, exact):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


def test_9_an_upstream_of_nan_stays_in_its_row(device):
    head, labels = example(device, ignored=False)
    grad_output = torch.ones(10, device=device)
    grad_output[2] = torch.nan
    grad, = torch.autograd.grad(fused(head, labels, reduction="none", chunk_rows=4), head[:1], grad_output)
    assert grad.isnan().any(1).tolist() == [row == 2 for row in range(10)]


@pytest.mark.parametrize("scale", [1 / 65536, 65536.0])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("head_dtype", [torch.float16, torch.float32], ids=str)
def test_9_gradients_scaled_for_half_precision(head_dtype, reduction, scale, device):
    """Checks factors of GradScaler with fp16 hidden states (TransformerEngine#2402, #3193), in several steps of one
    run."""
    head, labels = example(device, torch.float16, head_dtype, rows=64, vocab=50)
    expected = scaled(head, labels, scale, reduction=reduction)
    for _ in range(3):
        loss = fused(head, labels, reduction=reduction, chunk_rows=16)
        for a, e in zip(torch.autograd.grad((loss * scale).sum(), head), expected):
            assert a.ne(0).any()
            if e.isfinite().all():
                torch.testing.assert_close(a, e.to(a.dtype), rtol=4e-3, atol=2e-3 * float(e.abs().max()) + 2e-7)
            else:  # beyond float16: a GradScaler must see the infinity
                assert not a.isfinite().all()


def test_9_a_gradscaler_steps(device):
    head, labels = example(device, torch.float16, torch.float32)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**14)
    optimizer = torch.optim.SGD(head[1:], lr=1.0)
    before = [t.detach().clone() for t in head[1:]]
    expected = [e / 2.0**14 for e in scaled(head, labels, 2.0**14)[1:]]
    scaler.scale(fused(head, labels)).backward()
    scaler.step(optimizer)
    for now, then, e in zip(head[1:], before, expected):
        torch.testing.assert_close(then - now.detach(), e.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("grad_output", [0.0, -0.0, float("inf"), float("nan"), -1.0, 1e-30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scalar_upstream_of_any_value(dtype, grad_output, device):
    head, labels = example(device, dtype)
    theirs, grad_output = double(head), torch.tensor(grad_output, dtype=torch.float64, device=device)
    expected = torch.autograd.grad(plain(theirs, labels), theirs, grad_output)
    for _ in range(2):
        loss = fused(head, labels, chunk_rows=4)
        for a, e in zip(torch.autograd.grad(loss, head, grad_output.to(loss.dtype)), expected):
            if grad_output == 0:
                assert a.eq(0).all()
            elif grad_output.isfinite():
                torch.testing.assert_close(a, e.to(dtype), rtol=8 * torch.finfo(dtype).eps,
                                           atol=4 * torch.finfo(dtype).eps * float(e.abs().max()))
            elif device == "cpu":  # ignored rows keep their 0; on CUDA the factor is not checked
                assert (a.isfinite() == e.isfinite()).all() and a[e.isfinite()].eq(0).all()


# ------------------------------------------------------------------------------------------------ 10: repeated backward


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_10_backward_twice_with_another_upstream(reduction, dtypes, device):
    """Checks that each backward returns the gradients of a fresh loss, in memory of its own."""
    head, labels = example(device, *dtypes)
    loss = fused(head, labels, reduction=reduction, label_smoothing=0.1, chunk_rows=4)
    draw = Draw(device, 3)
    # Powers of two do not round.
    upstreams = [(2.0 ** (draw.integers(7, *loss.shape) - 3)).to(loss.dtype) for _ in range(2)]
    kept = []
    for grad_output in (*upstreams, upstreams[0], upstreams[0]):
        ours = torch.autograd.grad(loss, head, grad_output, retain_graph=True)
        again = fused(head, labels, reduction=reduction, label_smoothing=0.1, chunk_rows=4)
        for a, b in zip(ours, torch.autograd.grad(again, head, grad_output)):
            assert_bitwise_equal(a, b)
        assert not {t.data_ptr() for t in ours} & {t.data_ptr() for t in kept}
        kept += ours
        for t in ours:
            t.detach().fill_(7)  # an optimizer may do this
    loss.backward(upstreams[0], retain_graph=True)
    first = [t.grad.clone() for t in head]
    loss.backward(upstreams[0])
    for t, once in zip(head, first):
        assert_bitwise_equal(t.grad, 2 * once)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_10_a_scaled_loss_has_a_scaled_gradient(reduction, device):
    head, labels = example(device)
    ones = torch.autograd.grad(fused(head, labels, reduction=reduction), head)
    twos = torch.autograd.grad(2 * fused(head, labels, reduction=reduction), head)
    for one, two in zip(ones, twos):
        assert_bitwise_equal(two, 2 * one)
    loss = fused(head, labels, reduction=reduction)
    loss *= 2  # in place (unsloth#2435)
    for a, two in zip(torch.autograd.grad(loss, head), twos):
        assert_bitwise_equal(a, two)


def test_10_weights_changed_before_backward_are_noticed(device):
    for i in range(3):
        head, labels = example(device, ignored=False)
        loss = fused(head, labels)
        with torch.no_grad():
            head[i].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + MIXED, ids=str)
def test_second_derivatives_have_their_tensors_dtypes(dtypes, device):
    head, labels = example(device, *dtypes)
    exact, peer, results = double(head), [t.detach().to(dtypes[0]).requires_grad_() for t in head], []
    for leaves, loss in ((head, fused(head, labels)), (peer, F.cross_entropy(F.linear(*peer).float(), labels)),
                         (exact, plain(exact, labels))):
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        assert [g.dtype for g in grads] == [t.dtype for t in leaves]
        results.append(torch.autograd.grad(sum(g.to(loss.dtype).square().sum() for g in grads), leaves))
    for t, ours, theirs, e in zip(head, *results):
        assert_close_to_float64(ours, theirs.to(t.dtype), e, arithmetic=dtypes[0])


def test_the_specification_is_the_loss_of_its_logits(device):
    """Compares reference.linear_select and its gradients, which the transforms run, with the loss on F.linear's
    logits."""
    draw = Draw(device)
    target = draw.integers(6, 4, 3), draw.uniform(4, 3, low=0.1, dtype=torch.float64)
    head = [draw.normal(*size, dtype=torch.float64).requires_grad_() for size in ((4, 3), (7, 3), (7,))]
    loss, lse, residual, *_ = reference.linear_select(*head, *target, loss=True, log_probs=False)
    expected = reference.forward(F.linear(*head), *target)
    torch.testing.assert_close((loss, lse), expected)
    upstreams = torch.randn_like(loss), torch.randn_like(loss)
    grads = reference.linear_select_backward(*upstreams, *(None,) * 5, *head, lse, residual, *(None,) * 3, *target)
    torch.testing.assert_close(grads[:3], torch.autograd.grad(expected, head, upstreams))
