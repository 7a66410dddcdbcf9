"""Tests that the gradient which forward computes ahead has the bits of backward's own, whatever happens between
them."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sparse_ce
from cases import DTYPES, FORMS, Draw
from close import assert_bitwise_equal
from loss_cases import SCALAR_OPTIONS
from sparse_ce import cross_entropy
from sparse_ce.ops import expected_grad
from sparse_ce.ops.logits import small_calls as small_calls


@pytest.fixture
def makes(monkeypatch):
    """Returns a growing list with the ``grad_output`` of each forward that computed a gradient."""
    calls, op = [], torch.ops.sparse_ce.forward_with_gradient

    class Ops:
        def __getattr__(self, name):
            return getattr(torch.ops.sparse_ce, name)

        def forward_with_gradient(self, *args):
            calls.append(args[0].item())
            return op(*args)

    def small(*args, call=small_calls.cross_entropy):
        found, grad_mean = call(*args), args[-1]
        if found is not None and grad_mean is not None:
            calls.append(grad_mean.item())
        return found

    monkeypatch.setattr(sparse_ce.ops.logits.cross_entropy, "ops", Ops())
    monkeypatch.setattr(small_calls, "cross_entropy", small)
    return calls


def example(dtype=torch.float32, rows=6, vocab=50):
    draw = Draw("cpu")
    return draw.normal(rows, vocab).to(dtype).requires_grad_(), draw.integers(vocab, rows, 3), draw.uniform(rows, 3)


def grad_of(loss, logits, grad_output=1.0, **keywords):
    return torch.autograd.grad(loss, logits, torch.tensor(grad_output, dtype=loss.dtype), **keywords)[0]


@pytest.mark.parametrize("options", SCALAR_OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_loss_and_gradient_bit_for_bit(form, dtype, options, makes):
    draw = Draw("cpu")
    case = FORMS[form]((3, 4), 37, draw)
    x = draw.normal(*case.shape, 41 if options == "everything" else 37).to(dtype).requires_grad_()
    keywords = dict(SCALAR_OPTIONS[options], return_lse=True)
    results = []
    for _ in range(2):
        loss, lse = cross_entropy(x, case.target, **keywords)[:2]
        results.append((loss.detach(), lse.detach(), grad_of(loss, x, -0.375)))
    assert makes == [-0.375]
    for a, b in zip(*results):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize("rows,vocab", [(1, 100_003), (5, 100_003), (700, 33), (0, 7), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_parts_many_rows_and_none(rows, vocab, dtype, makes):
    x, *target = example(dtype, rows, vocab)
    weight = Draw("cpu", 1).uniform(vocab)
    grads = [grad_of(cross_entropy(x, tuple(target), weight), x, 3.0) for _ in range(2)]
    assert makes == [3.0]
    assert_bitwise_equal(*grads)
    assert grads[0].shape == (rows, vocab)


LONG_ROWS = {
    "plain": {}, "scaled": dict(logit_scale=0.7),
    "scaled by row": dict(logit_scale=torch.tensor([-0.3, 2.0, 0.0])),
    "softcap": dict(softcap=5.0, logit_scale=1.5), "smoothed": dict(label_smoothing=0.2),
    "all": dict(softcap=5.0, label_smoothing=0.2, z_loss=0.1),
}


@pytest.mark.parametrize("options", LONG_ROWS)
@pytest.mark.parametrize("vocab", [4096, 33_003, 102_401])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_of_a_long_row_between_loss_and_gradient(dtype, vocab, options, makes):
    """Checks exponentials relative to the maximum of their part, which may be far from the row's, -inf or hidden by a
    NaN. Entries repeat classes in any order."""
    draw = Draw("cpu")
    x = draw.normal(3, vocab).to(dtype)
    x[0, vocab // 2] = 40  # nearly all of the row's mass
    x[1, :vocab - 5] = -torch.inf if "scaled" not in options else -99  # 0 * inf is NaN
    x[2, ::3] -= 200
    indices = draw.integers(vocab, 3, 9)
    indices[:, 5:] = indices[:, :4]
    target = (indices, draw.uniform(3, 9))
    keywords = dict(LONG_ROWS[options], num_classes=vocab - 2, weight=draw.uniform(vocab - 2))
    if options == "plain" or "scaled" in options:
        keywords.pop("weight")
    indices.clamp_(max=vocab - 3)
    for row in (slice(0, 2), slice(0, 3)):
        part = x[row].clone().requires_grad_()
        scale = keywords.get("logit_scale")
        given = dict(keywords, logit_scale=scale[row]) if isinstance(scale, torch.Tensor) else keywords
        results = []
        expected_grad._expected.clear()
        for _ in range(2):
            loss, lse = cross_entropy(part, tuple(t[row] for t in target), return_lse=True, **given)
            results.append((loss.detach(), lse.detach(), grad_of(loss, part, 0.75)))
        assert results[0][2].isfinite().all() and results[0][2][:, -2:].count_nonzero() == 0
        for a, b in zip(*results):
            assert_bitwise_equal(a, b)
    assert makes == [0.75] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_too_long_to_keep_anything_of(dtype, makes):
    x, *target = example(dtype, 2, (1 << 20) + 5)
    grads = [grad_of(cross_entropy(x, tuple(target)), x, 3.0) for _ in range(2)]
    assert makes == [3.0]
    assert_bitwise_equal(*grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_is_kept_too(dtype, makes):
    """Checks that the NaN stays in its own row."""
    x, *target = example(dtype, 3, 9000)
    with torch.no_grad():
        x[1, 4500] = torch.nan
    for _ in range(2):
        grad = grad_of(cross_entropy(x, tuple(target)), x)
        assert grad[1].isnan().all() and grad[::2].isfinite().all()
    assert makes == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_long_rows_are_shared_out_by_parts(dtype, makes, threads):
    x, *target = example(dtype, 2, 100_003)
    expected = grad_of(cross_entropy(x, tuple(target)), x, 3.0)
    expected_grad._expected.clear()
    threads(4)  # more than there are rows
    grads = [grad_of(cross_entropy(x, tuple(target)), x, 3.0) for _ in range(2)]
    assert makes == [3.0]
    for grad in grads:
        assert_bitwise_equal(grad, expected)


def test_another_upstream_gradient_gives_another_gradient(makes):
    x, *target = example(torch.float16)
    grad_output = [1.0, 1.0, 65536.0, 65536.0, 0.0, float("nan"), 1 / 65536]
    ahead = [grad_of(cross_entropy(x, tuple(target)), x, u) for u in grad_output]
    assert makes[:5] == [1.0, 1.0, 65536.0, 65536.0, 0.0] and len(makes) == 6
    for u, grad in zip(grad_output, ahead):
        expected_grad._expected.clear()
        assert_bitwise_equal(grad, grad_of(cross_entropy(x, tuple(target)), x, u))


def test_an_upstream_gradient_that_its_owner_overwrites(makes):
    """Checks that forward does not take the new value for the one that it computed the gradient with."""
    x, *target = example()
    grad_output = torch.tensor(2.0)
    torch.autograd.grad(cross_entropy(x, tuple(target)), x, grad_output)
    loss = cross_entropy(x, tuple(target))
    grad_output.mul_(3)
    grad, = torch.autograd.grad(loss, x, grad_output)
    expected_grad._expected.clear()
    assert_bitwise_equal(grad, grad_of(cross_entropy(x, tuple(target)), x, 6.0))
    assert makes == [2.0]


def test_backward_twice_gives_two_gradients(makes):
    x, *target = example()
    grad_of(cross_entropy(x, tuple(target)), x)
    loss = cross_entropy(x, tuple(target))
    first = grad_of(loss, x, retain_graph=True)
    kept = first.clone()
    first.mul_(0)  # an optimizer or a hook may do this
    second, third = grad_of(loss, x, retain_graph=True), grad_of(loss, x, 2.0)
    assert makes == [1.0]
    assert_bitwise_equal(second, kept)
    assert_bitwise_equal(third, 2 * kept)


def test_second_derivatives_and_gradients_of_lse_and_of_values(makes):
    x, indices, values = example(torch.float64)
    values = values.double().requires_grad_()

    def derivatives():
        loss, lse = cross_entropy(x, (indices, values), return_lse=True)
        first = torch.autograd.grad(loss, (x, values), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (x, values), retain_graph=True)
        mixed = torch.autograd.grad(loss + lse.sin().sum(), (x, values))
        return (*first, *second, *mixed)

    expected = derivatives()
    plain = torch.autograd.grad(cross_entropy(x, (indices, values)), (x, values))
    ahead = derivatives()
    grad_of(cross_entropy(x, (indices, values)), x)
    again = torch.autograd.grad(cross_entropy(x, (indices, values)), (x, values))
    assert makes == [1.0, 1.0]
    for a, b in zip(expected, ahead):
        torch.testing.assert_close(a, b)
    for a, b in zip(plain, again):
        assert_bitwise_equal(a, b)


def test_logits_changed_before_backward_are_noticed():
    x, *target = example()
    grad_of(cross_entropy(x, tuple(target)), x)
    loss = cross_entropy(x, tuple(target))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_without_a_backward_makes_one_gradient_and_no_more(makes):
    x, *target = example()
    grad_of(cross_entropy(x, tuple(target)), x)
    for _ in range(5):
        cross_entropy(x, tuple(target))
    assert makes == [1.0]
    grad_of(cross_entropy(x, tuple(target)), x)
    with torch.no_grad():
        cross_entropy(x, tuple(target))
    cross_entropy(x.detach(), tuple(target))
    cross_entropy(x, tuple(target), reduction="none")
    cross_entropy(x, tuple(target), inplace="backward")
    assert makes == [1.0]
    cross_entropy(x, tuple(target))
    assert makes == [1.0, 1.0]


def test_no_gradient_waits_where_checkpointing_and_offloading_save_memory(makes):
    x, *target = example()
    grad_of(cross_entropy(x, tuple(target)), x)
    expected = grad_of(cross_entropy(x, tuple(target)), x)
    loss = checkpoint(lambda x: cross_entropy(x, tuple(target)), x, use_reentrant=False)
    assert_bitwise_equal(grad_of(loss, x), expected)
    with torch.autograd.graph.save_on_cpu():
        loss = cross_entropy(x, tuple(target))
    assert_bitwise_equal(grad_of(loss, x), expected)
    assert makes == [1.0]


def test_the_gradient_belongs_to_the_graph_alone():
    x, *target = example(rows=64, vocab=5000)

    def gradients():
        gc.collect()
        alive = {o.data_ptr() for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == x.shape}
        return len(alive - {x.data_ptr()})

    grad_of(cross_entropy(x, tuple(target)), x)
    loss = cross_entropy(x, tuple(target))
    assert gradients() == 1
    grad = grad_of(loss, x, retain_graph=True)
    assert gradients() == 1  # the one that the caller holds
    del grad
    assert gradients() == 0
    grad_of(cross_entropy(x, tuple(target)), x)
    loss = cross_entropy(x, tuple(target))
    del loss
    assert gradients() == 0


def test_a_dtype_has_a_forecast_of_its_own(makes):
    single, double = example(), example(torch.float64)
    for x, *target in (single, double):
        cross_entropy(x, tuple(target)).backward()
    assert makes == []
    for x, *target in (double, single):
        cross_entropy(x, tuple(target)).backward()
    assert makes == [1.0, 1.0]
    torch.testing.assert_close(double[0].grad.float(), single[0].grad)


@pytest.mark.parametrize("loss", [
    lambda x: sparse_ce.distillation_loss(x, torch.zeros_like(x)),
    lambda x: sparse_ce.distillation_loss(x, torch.zeros_like(x), kind="reverse_kl"),
    lambda x: sparse_ce.binary_cross_entropy_with_logits(x, torch.arange(len(x), device=x.device)),
    lambda x: sparse_ce.cross_entropy(x, torch.arange(len(x), device=x.device)),
], ids=["dense", "dense reverse", "binary", "index"])
def test_scaled_gradients_of_a_float16_mean_do_not_underflow(loss, device):
    """Uses the scale of a GradScaler. A gradient for grad_output 1, scaled afterwards, has lost its low bits."""
    x = torch.randn(64, 20000, generator=torch.Generator().manual_seed(0)).half().to(device)
    for _ in range(2):  # The second call expects the grad_output of the first.
        leaves = x.clone().requires_grad_(), x.double().requires_grad_()
        grads = [torch.autograd.grad(loss(t) * 65536, t)[0] for t in leaves]
        assert (grads[0] - grads[1]).norm() < 1e-3 * grads[1].norm()
