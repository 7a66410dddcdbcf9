"""Tests that a ``grad_output`` of 0 gives a row of zeros whatever its logits hold: eager, composed, differentiated."""

import pytest
import torch

from close import assert_bitwise_equal
from sparse_ce import cross_entropy, linear_cross_entropy

BAD = {"-inf": -torch.inf, "NaN": torch.nan}
each_bad = pytest.mark.parametrize("bad", BAD)


def rows(bad, device):
    """Returns three rows in float64. The first has a bad logit at one of its entries."""
    x = torch.tensor([[1.0, BAD[bad], 2.0], [0.5, 1.5, -1.0], [3.0, 1.0, 2.0]], dtype=torch.float64, device=device)
    indices = torch.tensor([[0, 1], [2, 0], [1, 2]], device=device)
    values = torch.tensor([[0.3, 0.7], [0.5, 0.5], [1.0, -0.25]], dtype=torch.float64, device=device)
    return x, indices, values


def losses(indices, **options):
    return lambda x, values: cross_entropy(x, (indices, values), reduction="none", **options)


def eager(f, inputs, grad_output):
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(f(*leaves), leaves, grad_output)


def differentiable(f, inputs, grad_output):
    leaves = [t.detach().requires_grad_() for t in inputs]
    return [g.detach() for g in torch.autograd.grad(f(*leaves), leaves, grad_output, create_graph=True)]


def composed(f, inputs, grad_output):
    return torch.func.vjp(f, *inputs)[1](grad_output)


ROUTES = {"eager": eager, "create_graph": differentiable, "functorch": composed}
each_route = pytest.mark.parametrize("route", ROUTES)


@each_route
@each_bad
@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.2), dict(z_loss=0.1), dict(logit_scale=2.0)],
                         ids=str)
def test_a_row_that_nobody_asks_for_has_gradients_of_zero(options, bad, route, device):
    x, indices, values = rows(bad, device)
    grad_output = torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64, device=device)
    f = losses(indices, **options)
    grads = ROUTES[route](f, (x, values), grad_output)
    assert all(g[0].eq(0).all() for g in grads)
    kept = ROUTES[route](lambda *inputs: losses(indices[1:], **options)(*inputs), (x[1:], values[1:]), grad_output[1:])
    torch.testing.assert_close([g[1:] for g in grads], list(kept))
    assert all(g.ne(0).any() for g in kept)


@each_route
def test_labels_smoothed_wholly_leave_nothing_for_the_values(route, device):
    """Checks that 1 - label_smoothing is a factor like ``grad_output``. The logits have a gradient without it."""
    x, indices, values = rows("-inf", device)
    weight = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64, device=device)  # class 1's logit is not smoothed either
    f = lambda x, values: cross_entropy(x, (indices, values), weight, reduction="none", label_smoothing=1.0)
    grads = ROUTES[route](f, (x, values), torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64, device=device))
    assert grads[1].eq(0).all() and grads[0].isfinite().all() and grads[0][0, 0] != 0


@each_route
def test_a_class_of_weight_zero_gives_its_values_nothing(route, device):
    """Checks that the class adds 0 to the loss for every value, even at a logit of -inf."""
    x, indices, values = rows("-inf", device)
    weight = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64, device=device)
    f = lambda x, values: cross_entropy(x, (indices, values), weight, reduction="none")
    grads = ROUTES[route](f, (x, values), torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64, device=device))
    assert all(g.isfinite().all() for g in grads) and grads[1][0, 1] == 0 and grads[1][2, 0] == 0
    assert grads[1][0, 0] != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_bad
def test_the_kernels_in_other_dtypes(bad, dtype, device):
    x, indices, values = rows(bad, device)
    grads = eager(losses(indices), (x.to(dtype), values.float()), torch.tensor([0.0, 2.0, -1.0], device=device))
    assert all(g[0].eq(0).all() and g[1:].isfinite().all() for g in grads)


@each_bad
def test_a_row_that_somebody_asks_for_says_that_it_is_bad(bad, device):
    x, indices, values = rows(bad, device)
    for route in ROUTES.values():
        _, grad = route(losses(indices), (x, values), torch.ones(3, dtype=torch.float64, device=device))
        assert not grad[0].isfinite().all() and grad[1:].isfinite().all()


def test_the_head_has_the_same_rule(device):
    x, indices, values = rows("NaN", device)
    eye = torch.eye(3, dtype=torch.float64, device=device)
    f = lambda x, values: linear_cross_entropy(x, eye, (indices, values), reduction="none")
    for name in ("eager", "create_graph"):
        grads = ROUTES[name](f, (x, values), torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64, device=device))
        assert all(g[0].eq(0).all() and g[1:].isfinite().all() for g in grads)


@pytest.mark.parametrize("which", ["loss", "lse"])
def test_the_gradient_of_a_zero_upstream_still_has_its_derivative(which, device):
    """Checks torch.autograd.functional.jvp, which differentiates the gradient at a ``grad_output`` of zeros."""
    x, indices, values = rows("-inf", device)
    x[0, 1] = 0.3
    inputs, tangents = (x, values), (torch.randn_like(x), torch.randn_like(values))

    def f(x, values):
        options = dict(label_smoothing=0.1, z_loss=0.1, return_lse=True)
        return cross_entropy(x, (indices, values), reduction="none", **options)[which == "lse"]

    expected = torch.func.jvp(f, inputs, tangents)[1]
    torch.testing.assert_close(torch.autograd.functional.jvp(f, inputs, tangents, strict=False)[1], expected)
    assert expected.ne(0).all()


def test_a_zero_upstream_has_the_same_bits_on_every_route(device):
    x, indices, values = rows("-inf", device)
    grad_output = torch.zeros(3, dtype=torch.float64, device=device)
    for route in ROUTES.values():
        for grad in route(losses(indices), (x, values), grad_output):
            assert_bitwise_equal(grad, torch.zeros_like(grad))


@each_bad
@pytest.mark.parametrize("options", [dict(softcap=3.0), dict(softcap=3.0, logit_scale=0.5, label_smoothing=0.1)],
                         ids=str)
def test_a_softcap_changes_nothing_of_it(bad, options, device):
    x, indices, values = rows(bad, device)
    grad_output = torch.tensor([0.0, 0.7, -1.3], dtype=torch.float64, device=device)
    of = losses(indices, **options)
    expected = eager(of, (x, values), grad_output)
    for grads in (torch.func.vjp(of, x, values)[1](grad_output), differentiable(of, (x, values), grad_output)):
        for ours, exact in zip(grads, expected):
            torch.testing.assert_close(ours, exact)
            assert ours[0].eq(0).all()
    tangent = torch.zeros_like(x)
    tangent[1:] = 1.0
    out = torch.func.jvp(lambda a: of(a, values), (x,), (tangent,))[1]
    assert out[1:].isfinite().all() and out[1:].ne(0).all()
