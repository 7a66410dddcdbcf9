"""Tests logits far beyond the softcap: losses and gradients are as precise as PyTorch's, in every kernel and layout.

The slope of a tanh near 1 is the difference of two nearly equal numbers. With a cap of 30 it is 4e-3 if logits reach
124, as in Gemma, and 7e-2 if they are about 60."""

import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, Draw, sparsely
from close import assert_close_to_float64
from dense import arithmetic
from sparse_ce import candidate_logits, cross_entropy, linear_cross_entropy, selected_log_probs

CAP = 30.0
LOGITS = {"to 124": lambda x: 124 * x.clamp(-3, 3) / 3, "100 to 124": lambda x: 112 + 4 * x.clamp(-3, 3),
          "60 +- 10": lambda x: 60 + 10 * x, "-60 +- 10": lambda x: 10 * x - 60, "near 0": lambda x: 0.1 * x}
LAYOUTS = {"packed": lambda x: x, "strided": lambda x: x.T.contiguous().T}
OPTIONS = {"plain": {}, "smoothed": dict(label_smoothing=0.1), "class weights": dict(label_smoothing=0.1, weight=True),
           "z_loss": dict(z_loss=1e-3), "scaled": dict(logit_scale=0.9), "negative scale": dict(logit_scale=-1.1)}
CLASSES = (37, 601, 5003)  # of these, one class and a few classes fill no vector; strided, the last are not kept
ROWS = 64


def draw_logits(kind, classes, dtype, device, layout="packed"):
    draw = Draw(device, classes)
    return draw, LAYOUTS[layout](LOGITS[kind](draw.normal(ROWS, classes)).to(dtype))


def capped(x, scale=1.0):
    return CAP * torch.tanh(scale * x / CAP)


def check(function, peer, leaves, grad_output):
    """Compares results and gradients of ``function`` with ``peer`` in the arithmetic dtype and in float64.

    The gradient for a number among the leaves is a sum over all logits. It is returned together with those of
    ``peer``."""

    def run(f, to=None):
        given = [t.detach().to(to or t.dtype).requires_grad_() for t in leaves]
        out = f(*given)
        grads = torch.autograd.grad(out, given, [g.reshape(t.shape).to(t.dtype) for g, t in zip(grad_output, out)])
        return [*out, *grads]

    results = list(zip(run(function), run(peer), run(peer, torch.float64)))
    for ours, of_peer, exact in results:
        if ours.dim() > 0:
            assert_close_to_float64(ours, of_peer, exact)
    return results[-1]


@pytest.mark.parametrize("dtype, kind, options, layout", sparsely(
    2, DTYPES, LOGITS, OPTIONS, LAYOUTS))
def test_cross_entropy(dtype, kind, options, layout, device):
    for classes in CLASSES:
        draw, x = draw_logits(kind, classes, dtype, device, layout)
        labels, keywords = draw.integers(classes, ROWS), dict(OPTIONS[options])
        if keywords.pop("weight", False):
            keywords["weight"] = draw.uniform(classes, low=0.5, high=2)
        grad_output = draw.normal(ROWS), draw.normal(ROWS)

        def ours(x):
            return cross_entropy(x, labels, softcap=CAP, reduction="none", return_lse=True, **keywords)

        def peer(x):
            z = capped(x.to(arithmetic(x.dtype)), keywords.get("logit_scale", 1.0))
            weight = keywords.get("weight")
            loss = F.cross_entropy(z, labels, None if weight is None else weight.to(z.dtype), reduction="none",
                                   label_smoothing=keywords.get("label_smoothing", 0.0))
            lse = z.logsumexp(1)
            return loss + keywords.get("z_loss", 0.0) * lse.square(), lse

        check(ours, peer, [x], grad_output)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selected_log_probs(dtype, kind, layout, device):
    """Checks the gradient for a learned scale too."""
    for classes in CLASSES:
        draw, x = draw_logits(kind, classes, dtype, device, layout)
        ids = torch.stack([draw.integers(classes // 4, ROWS) + k * (classes // 4) for k in range(4)], 1)
        scale = torch.tensor(0.9, dtype=arithmetic(dtype), device=device)
        grad_output = [draw.normal(ROWS, 4), *(draw.normal(ROWS) for _ in range(4))]

        def ours(x, scale):
            out = selected_log_probs(x, ids, logit_scale=scale, softcap=CAP, return_log_tail=True, return_entropy=True,
                                     return_mean_logit=True)
            return [out.log_probs, out.lse, out.log_tail + out.lse, out.entropy, out.mean_logit]

        def peer(x, scale):
            z = capped(x.to(scale.dtype), scale)
            log_probs = z.log_softmax(1)
            outside = log_probs.scatter(1, ids, -torch.inf)
            lse = z.logsumexp(1)
            return [log_probs.gather(1, ids), lse, outside.logsumexp(1) + lse, -(log_probs.exp() * log_probs).sum(1),
                    z.mean(1)]

        found, of_peer, exact = check(ours, peer, [x, scale], grad_output)
        terms = [x.detach().double().requires_grad_(), scale.double()]
        of_terms = torch.autograd.grad(peer(*terms), terms[:1], [g.double() for g in grad_output])[0] * terms[0] / scale
        eps = 2.5e-13 if dtype == torch.float64 else torch.finfo(scale.dtype).eps  # as in close.py
        allowed = 2 * (of_peer - exact).abs() + 4 * eps * of_terms.abs().sum()
        assert (found - exact).abs() <= allowed


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_linear_heads(dtype, kind, device):
    """Checks inputs that each have a feature of their own, so that the logits equal the drawn ones."""
    classes = 601
    draw, x = draw_logits(kind, classes, dtype, device)
    labels, grad_output = draw.integers(classes, ROWS), draw.normal(ROWS)
    ids, eye = draw.integers(classes, ROWS, 5), torch.eye(ROWS, dtype=dtype, device=device)

    head = [eye, x.T.contiguous()]
    check(lambda x, w: [linear_cross_entropy(x, w, labels, softcap=CAP, reduction="none", chunk_rows=7)],
          lambda x, w: [F.cross_entropy(capped(x @ w.T), labels, reduction="none")], head, [grad_output])
    check(lambda x, w: [candidate_logits(x, w, ids, softcap=CAP)],
          lambda x, w: [capped(x @ w.T).gather(1, ids)], head, [draw.normal(ROWS, 5)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cap_that_all_logits_are_far_beyond(dtype, layout, device):
    """Checks slopes of 1e-6: computed as a difference they have three digits in float32, and in our row kernels all."""
    draw, x = draw_logits("near 0", 601, dtype, device, layout)
    x = (250 + 20 * x).to(dtype)
    labels = draw.integers(601, ROWS)
    ours, exact = x.clone().requires_grad_(), x.detach().double().requires_grad_()
    cross_entropy(ours, labels, softcap=CAP, reduction="sum").backward()
    t = exact.detach() / CAP
    slope = 4 * torch.exp(-2 * t) / (1 + torch.exp(-2 * t)).square()
    grad = (torch.softmax(capped(exact.detach()), 1) - F.one_hot(labels, 601)) * slope
    assert (ours.grad.double() - grad).abs().max() < 0.1 * grad.abs().max()
