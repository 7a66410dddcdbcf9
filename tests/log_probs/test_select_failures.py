"""Tests bugs of other implementations of log-probabilities: tests/failures.md, 26 to 39."""

import math

import pytest
import torch

from cases import Draw
from close import assert_bitwise_equal
from select_cases import ALL
from sparse_ce import SparseTarget, cross_entropy, selected_log_probs


def exact_tail(x, ids):
    z = x.double()
    outside = torch.ones(z.shape, dtype=torch.bool, device=z.device).scatter(1, ids, False)
    return torch.where(outside, z, -torch.inf).logsumexp(1) - z.logsumexp(1)


def test_26_the_entropy_has_a_gradient_alone_and_beside_log_probs_without_one(device):
    draw = Draw(device)
    x, ids = draw.normal(4, 50, dtype=torch.float64), draw.integers(50, 4)
    expected_leaf = x.clone().requires_grad_()
    q = expected_leaf.softmax(1)
    expected, = torch.autograd.grad(-(q * q.log()).sum(1), expected_leaf, torch.arange(4.0, device=device).double())
    leaf = x.clone().requires_grad_()
    out = selected_log_probs(leaf, ids, return_entropy=True)
    (out.entropy * torch.arange(4.0, device=device) + 0 * out.log_probs.detach()).sum().backward()
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("offset", [-1e4, -100.0, 0.0, 1e4])
def test_27_a_log_probability_is_never_positive(offset, device):
    draw = Draw(device)
    for dtype in (torch.float32, torch.bfloat16):
        x = draw.normal(64, 3000) * 0.01
        x[:, 7] += draw.uniform(64, low=0, high=40)
        out = selected_log_probs((x + offset).to(dtype), torch.full((64,), 7, device=device), return_log_tail=True)
        assert (out.log_probs <= 0).all() and (out.log_tail <= 0).all() and (out.log_probs > -30).all()


@pytest.mark.parametrize("gap", [8.0, 12.0, 16.0, 20.0])
def test_30_the_tail_is_summed_and_not_subtracted(gap, device):
    """Checks the tail and its gradient down to 1e-7 and below, where 1 minus the other probabilities has no digits."""
    draw = Draw(device)
    x, ids = draw.normal(4, 128256 // 16), torch.stack([
        torch.randperm(128256 // 16, generator=draw.generator)[:64] for _ in range(4)]).to(device)
    x.scatter_add_(1, ids, torch.full(ids.shape, gap, device=device))
    leaf = x.clone().requires_grad_()
    out = selected_log_probs(leaf, ids, return_log_tail=True)
    torch.testing.assert_close(out.log_tail.exp().double(), exact_tail(x, ids).exp(), rtol=3e-6, atol=0)
    wide = x.double().requires_grad_()
    ours, = torch.autograd.grad(out.log_tail.sum(), leaf)
    theirs, = torch.autograd.grad(exact_tail(wide, ids).sum(), wide)
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("tail", [-50.0, -90.0, -200.0])
def test_30_a_tail_beyond_the_range_of_float32(tail, device):
    draw = Draw(device)
    x = draw.normal(3, 5000)
    x[:, 7] -= tail
    x[1, 8:2000] = -torch.inf  # excluded classes
    leaf = x.clone().requires_grad_()
    out = selected_log_probs(leaf, torch.full((3,), 7, device=device), return_log_tail=True)
    torch.testing.assert_close(out.log_tail.double(), exact_tail(x, torch.full((3, 1), 7, device=device)))
    grad, = torch.autograd.grad(out.log_tail.sum(), leaf)
    outside = torch.where(torch.arange(5000, device=device) == 7, -torch.inf, x.double()).softmax(1)
    torch.testing.assert_close(grad[:, 8:].double(), outside[:, 8:], rtol=2e-5, atol=1e-10)


def test_30_no_tail_where_the_ids_cover_what_is_finite(device):
    x = torch.tensor([[1.0, 2.0, 3.0], [1.0, -torch.inf, -torch.inf]], device=device, requires_grad=True)
    out = selected_log_probs(x, torch.tensor([[0, 1, 2], [0, 0, -100]], device=device), return_log_tail=True)
    assert (out.log_tail == -torch.inf).all()
    grad, = torch.autograd.grad(out.log_tail, x, torch.ones(2, device=device))
    assert (grad == 0).all()


def test_33_a_temperature_for_each_row(device):
    draw = Draw(device)
    x, ids, temperature = draw.normal(2, 5, 40, dtype=torch.float64), draw.integers(40, 2, 5), draw.uniform(2, 5) + 0.2
    ours = selected_log_probs(x, ids, logit_scale=1 / temperature).log_probs
    expected = (x / temperature.double()[..., None]).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)  # of float32 temperatures
    loss = cross_entropy(x, ids, logit_scale=1 / temperature)
    torch.testing.assert_close(loss, -expected.mean(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["padded", "jagged"])
def test_34_an_id_twice(form, device):
    """Checks that each id has its log-probability, that the tail excludes the class once, and that gradients add up."""
    x = Draw(device).normal(2, 9, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[3, 5, 3, 3], [1, 1, 2, 0]], device=device)
    target = ids if form == "padded" else SparseTarget.from_jagged(ids.view(-1), None,
                                                                  torch.tensor([0, 4, 8], device=device))
    out = selected_log_probs(x, target, return_log_tail=True)
    log_probs = x.log_softmax(1)
    grad_output = torch.arange(1.0, 9, device=device, dtype=torch.float64)
    expected, = torch.autograd.grad((log_probs.gather(1, ids).view(-1) * grad_output).sum(), x, retain_graph=True)
    ours, = torch.autograd.grad(out.log_probs.reshape(-1), x, grad_output, retain_graph=True)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(out.log_tail, exact_tail(x.detach(), ids))


def test_35_padding_of_minus_infinity_meets_a_weight_of_zero(device):
    """Checks that the gradient there is 0, also if ``grad_output`` at the padding is NaN or infinite."""
    x = Draw(device).normal(2, 9).requires_grad_()
    ids = torch.tensor([[3, -100], [4, 5]], device=device)
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]], device=device)
    log_probs = selected_log_probs(x, ids).log_probs
    assert log_probs[0, 1] == -torch.inf
    loss = -(weights * torch.where(weights == 0, 0.0, log_probs)).sum()
    loss.backward()
    assert x.grad.isfinite().all()
    for bad in (torch.nan, torch.inf):
        grad_output = torch.tensor([[1.0, bad], [0.0, 1.0]], device=device)
        grad, = torch.autograd.grad(selected_log_probs(x, ids).log_probs, x, grad_output)
        assert grad.isfinite().all()


def test_37_a_kept_set_without_the_sampled_token(device):
    """Checks the replay of truncated sampling: log p(y given S) is -inf or at most 0, and always defined."""
    x = Draw(device).normal(3, 20)
    kept = SparseTarget.from_jagged(torch.tensor([1, 2, 3, 5], device=device), None,
                                    torch.tensor([0, 2, 3, 4], device=device))
    sampled = selected_log_probs(x, torch.tensor([7, 3, 5], device=device)).log_probs
    of_kept = selected_log_probs(x, kept).log_probs
    normalised = sampled - torch.stack([of_kept[:2].logsumexp(0), of_kept[2], of_kept[3]])
    assert normalised.isfinite().all() and normalised[1] == 0 and normalised[2] == 0


def test_38_rows_with_a_kept_set_beside_rows_without_one(device):
    """Computes the entropy of all classes and the log-probabilities of some in one pass. The tail of a row without ids
    covers all classes."""
    x = Draw(device).normal(2, 20, dtype=torch.float64)
    kept = SparseTarget.from_jagged(torch.tensor([1, 2], device=device), None,
                                    torch.tensor([0, 2, 2], device=device))
    out = selected_log_probs(x, kept, return_entropy=True, return_log_tail=True)
    q = x.softmax(1)
    torch.testing.assert_close(out.entropy, -(q * q.log()).sum(1))
    assert out.log_tail[1] == 0
    torch.testing.assert_close(out.log_tail[0].exp(), 1 - q[0, 1] - q[0, 2])


def test_39_scale_and_softcap_count_in_every_output(device):
    draw = Draw(device)
    x, ids = 3 * draw.normal(3, 30, dtype=torch.float64), draw.integers(30, 3, 2)
    z = 4 * torch.tanh(0.7 * x / 4)
    ours = selected_log_probs(x, ids, logit_scale=0.7, softcap=4.0, **ALL)
    for a, b in zip((ours.log_probs, ours.lse, ours.log_tail, ours.entropy, ours.mean_logit, ours.argmax),
                    selected_log_probs(z, ids, **ALL)):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------------------- extreme values


@pytest.mark.parametrize("classes", [65, 5000])
@pytest.mark.parametrize("offset", [30.0, 100.0, 1000.0])
def test_the_scales_gradient_does_not_take_what_all_logits_have_in_common(classes, offset, device):
    draw = Draw(device)
    x, labels, weight = draw.normal(8, classes) + offset, draw.integers(classes, 8), draw.uniform(classes)

    def of_scale(x, of, **options):
        scale = torch.tensor(1.3, dtype=x.dtype, device=device, requires_grad=True)
        cross_entropy(x, labels, weight.to(x.dtype), label_smoothing=0.1, logit_scale=scale, **options).backward()
        out = selected_log_probs(x, labels, logit_scale=scale, **ALL)
        sum(getattr(out, name) for name in of).sum().backward()
        return scale.grad.item()

    # The logits of a row, and so their distances of about 4, are exact except for rounding.
    of = "log_probs", "log_tail", "entropy"
    assert abs(of_scale(x, of) - of_scale(x.double(), of)) <= 2 * 8 * offset * 2**-24
    of = "lse", "mean_logit"  # these shift with all logits
    torch.testing.assert_close(of_scale(x, of, z_loss=1e-4), of_scale(x.double(), of, z_loss=1e-4), rtol=2**-20, atol=0)


@pytest.mark.parametrize("far", [-100.0, -1e4, -1e9])
@pytest.mark.parametrize("scale", [1.3, 1e-3])
def test_the_scales_gradient_is_not_that_of_a_class_far_from_the_others(scale, far, device):
    draw = Draw(device)
    x, ids = 3 * draw.normal(4, 5000), draw.integers(5000, 4, 3)
    x.scatter_(1, ids, far)

    def of_scale(x):
        leaf = torch.tensor(scale, dtype=x.dtype, device=device, requires_grad=True)
        out = selected_log_probs(x, ids, logit_scale=leaf, return_entropy=True)
        (1e-10 * out.log_probs.sum() + out.entropy.sum()).backward()
        return leaf.grad.item()

    expected = of_scale(x.double())
    assert abs(of_scale(x) - expected) <= 1e-5 * max(1, abs(expected))


def test_an_infinite_logit_under_a_softcap_adds_nothing_to_the_scales_gradient(device):
    x, labels = torch.tensor([[1.0, -math.inf, 2.0, 0.0]], device=device), torch.tensor([0], device=device)

    def of_scale(x):
        scale = torch.tensor(1.3, dtype=torch.float64, device=device, requires_grad=True)
        cross_entropy(x.double(), labels, logit_scale=scale, softcap=5.0).backward()
        return scale.grad

    torch.testing.assert_close(of_scale(x), of_scale(x.clamp_min(-1e6)))


def test_classes_of_minus_infinity_add_nothing(device):
    """Checks the entropy, the gradient, and the mean logit, which is -inf as a mean is."""
    draw = Draw(device)
    x = draw.normal(3, 3000)
    masked = x.clone()
    masked[:, 5::3] = -torch.inf
    valid = torch.ones(3000, dtype=torch.bool, device=device)
    valid[5::3] = False
    leaf, small = masked.clone().requires_grad_(), x[:, valid].double().requires_grad_()
    ids = torch.tensor([[0, 1], [2, 3], [4, 4]], device=device)
    out = selected_log_probs(leaf, ids, **ALL)
    expected = selected_log_probs(small, ids, **ALL)  # the first classes keep their ids
    assert (out.mean_logit == -torch.inf).all()
    grads = []
    for o, x in ((out, leaf), (expected, small)):
        torch.testing.assert_close(o.entropy.double(), expected.entropy, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(o.log_tail.double(), expected.log_tail, rtol=1e-6, atol=1e-6)
        grads.append(torch.autograd.grad((o.entropy + o.log_tail + o.log_probs.sum(1)).sum(), x)[0])
    assert (grads[0][:, ~valid] == 0).all()
    torch.testing.assert_close(grads[0][:, valid].double(), grads[1], rtol=1e-5, atol=1e-7)


def test_a_row_that_nobody_wants_a_gradient_of_is_not_read(device):
    draw = Draw(device)
    x = draw.normal(3, 40)
    x[1] = torch.nan
    x.requires_grad_()
    out = selected_log_probs(x, draw.integers(40, 3, 2), return_entropy=True, return_log_tail=True)
    grad_output = torch.tensor([1.0, 0.0, 2.0], device=device)
    grad, = torch.autograd.grad([out.log_probs, out.entropy, out.log_tail], x,
                                [grad_output[:, None].expand(3, 2), grad_output, grad_output])
    assert (grad[1] == 0).all() and grad.isfinite().all() and (grad[0] != 0).any()


def test_a_row_of_minus_infinity_has_no_distribution(device):
    x = torch.full((1, 5), -torch.inf, device=device)
    out = selected_log_probs(x, torch.tensor([[1]], device=device), **ALL)
    assert out.lse == -torch.inf and out.log_probs.isnan() and out.argmax == 0


def test_ties_go_to_the_lowest_class(device):
    x = torch.zeros(4, 5000, device=device)
    x[1, [17, 4999]] = 1
    x[2, [2048, 1000]] = 3
    x[3] = -5
    out = selected_log_probs(x, torch.tensor([[17, 4], [17, 4999], [2048, 3], [4, 2]], device=device), **ALL)
    assert out.argmax.tolist() == [0, 17, 1000, 0]


@pytest.mark.parametrize("shape,k", [((0, 7), 3), ((2, 0, 7), 2), ((3, 7), 0)])
def test_nothing_to_select(shape, k, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    out = selected_log_probs(x, torch.zeros(*shape[:-1], k, dtype=torch.int64, device=device), **ALL)
    assert out.log_probs.shape == (*shape[:-1], k) and out.entropy.shape == shape[:-1]
    (out.log_probs.sum() + out.entropy.sum()).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("threads_of", [1, 2])
def test_few_long_rows_are_shared_among_threads(threads_of, threads, device):
    """Checks that the result does not depend on the number of threads."""
    draw = Draw(device)
    x, ids = draw.normal(1, 140001), draw.integers(140001, 1, 20)
    ids[0, 3] = ids[0, 9]
    results = []
    for n in (1, threads_of):
        threads(n)
        leaf, scale = x.clone().requires_grad_(), torch.tensor(0.7, device=device, requires_grad=True)
        out = selected_log_probs(leaf, ids, logit_scale=scale, **ALL)
        grads = torch.autograd.grad((out.log_probs.sum() + out.entropy + out.log_tail + out.mean_logit).sum(),
                                    [leaf, scale])
        results.append((out.log_probs, out.log_tail, out.entropy, out.mean_logit, *grads))
    for a, b in zip(*results):
        assert_bitwise_equal(a, b)
    assert math.isfinite(results[0][-1])


@pytest.mark.parametrize("form", ["topk", "jagged"])
def test_a_teachers_log_probability_of_minus_500_is_no_padding(form, device):
    """Checks a weight that underflows to 0: the id still has a log-probability and is not in the tail."""
    draw = Draw(device)
    x = draw.normal(2, 30, dtype=torch.float64)
    ids = torch.tensor([[3, 5], [7, 9]], device=device)
    logprobs = torch.tensor([[-0.1, -500.0], [-torch.inf, -0.2]], device=device)
    target = SparseTarget.from_topk(ids, logprobs,
                                    values_are="log_probs") if form == "topk" else SparseTarget.from_jagged(
        ids.view(-1), logprobs.view(-1), torch.tensor([0, 2, 4], device=device), values_are="log_probs")
    leaf = x.clone().requires_grad_()
    out = selected_log_probs(leaf, target, return_log_tail=True)
    of_all = x.log_softmax(1)
    expected = torch.where(logprobs.isneginf(), -torch.inf, of_all.gather(1, ids))
    torch.testing.assert_close(out.log_probs.reshape(2, 2), expected)
    kept = torch.tensor([[3, 5], [9, 9]], device=device)
    torch.testing.assert_close(out.log_tail, exact_tail(x, kept))
    ours, = torch.autograd.grad(out.log_probs.reshape(2, 2)[0, 1] + out.log_tail.sum(), leaf)
    wide = x.clone().requires_grad_()
    theirs, = torch.autograd.grad(wide.log_softmax(1)[0, 5] + exact_tail(wide, kept).sum(), wide)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.func.grad(lambda x: selected_log_probs(x, target).log_probs.flatten()[1])(x),
                               torch.func.grad(lambda x: x.log_softmax(1)[0, 5])(x))
