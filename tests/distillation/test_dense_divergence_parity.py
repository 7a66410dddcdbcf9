"""Compares values and gradients with the losses of other frameworks on dense teachers: TRL's own function, and formulas
of others written anew in plain PyTorch. Each formula names its source."""

import math

import pytest
import torch
import torch.nn.functional as F

from cases import Draw
from sparse_ce import cross_entropy, distillation_loss, linear_distillation_loss

ROWS, CLASSES, WIDTH, OF_TEACHER = 19, 83, 12, 20
IGNORE = -100
DTYPES = [torch.float64, torch.float32]


def make(device, dtype, bias=True):
    """Returns (student, teacher), each a list of hidden states, weight and bias, from flat to peaked rows."""
    draw = Draw(device)
    peaks = torch.linspace(0.3, 4, ROWS, dtype=torch.float64, device=device)[:, None]
    direction = draw.normal(OF_TEACHER, WIDTH, dtype=torch.float64)
    hidden = draw.normal(ROWS, OF_TEACHER, dtype=torch.float64)
    weight = draw.normal(CLASSES, OF_TEACHER, dtype=torch.float64) / OF_TEACHER**0.5
    student = [(hidden * peaks) @ direction / 5, weight @ direction / 5, draw.normal(CLASSES, dtype=torch.float64)]
    student[1] = student[1] + 0.5 * draw.normal(CLASSES, WIDTH, dtype=torch.float64)
    teacher = [hidden * peaks, weight, draw.normal(CLASSES, dtype=torch.float64)]
    return tuple([t.to(dtype) if t.dim() > 1 or bias else None for t in head] for head in (student, teacher))


def learning(head, dtype=None):
    return [None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in head]


def assert_equal(found, exact, dtype, lost=1.0):
    """Checks to 1e-10 of the largest value in float64, and in float32 to 1e-6 of it or of 1, times ``lost``."""
    for a, b in zip(found, exact, strict=True):
        error, size = (a.double() - b.double()).abs().max(), b.abs().max()
        assert b.isfinite().all() and size > 1e-3
        allowed = lost * (1e-10 * size if dtype == torch.float64 else 1e-6 * size.clamp(min=1))
        assert error <= allowed, f"error {error:.2e}, {allowed:.2e} allowed"


def with_gradients(loss, head, grad_output=None):
    """Returns the loss, and gradients for ``grad_output`` or the sum over rows of which the loss is the mean."""
    leaves = [t for t in head if t is not None]
    grad_output = torch.full_like(loss, ROWS) if grad_output is None else grad_output
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad_output)]


# ------------------------------------------------------------------------------------------------------------------ TRL


@pytest.fixture(scope="module")
def trl_divergence():
    pytest.importorskip("trl", minversion="1.16")
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def divergence(student, teacher, *options):
        return ChunkedDivergenceFunction.apply(*student, *teacher, *options)[0]

    return divergence


def of_beta(beta):
    """Returns the equivalent arguments of sparse_ce."""
    return {0.0: dict(kind="forward_kl"), 1.0: dict(kind="reverse_kl")}.get(beta, dict(kind="jsd", beta=beta))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature, scales, softcaps", [
    (1.0, (1.0, 1.0), (None, None)), (2.0, (1.0, 1.0), (None, None)), (1.0, (0.5, 0.7), (None, None)),
    (0.8, (0.5, 1.2), (9.0, None)), (1.5, (1.0, 0.9), (7.0, 8.0))], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_trl_chunked_divergence(beta, temperature, scales, softcaps, bias, dtype, trl_divergence):
    """Compares with trl/kernels/chunked_divergence.py, whose arithmetic is float32. It divides what its softcap
    returns by the temperature, which is a softcap and a scale that are divided."""
    student, teacher = make("cpu", torch.float32, bias)
    ours, theirs = learning(student, dtype), learning(student)
    of_teacher = [None if t is None else t.to(dtype) for t in teacher]
    loss = linear_distillation_loss(ours[0], ours[1], of_teacher, linear_bias=ours[2], reduction="none",
                                    temperature=temperature, logit_scale=scales[0], teacher_logit_scale=scales[1],
                                    softcap=softcaps[0], teacher_softcap=softcaps[1], chunk_rows=7, **of_beta(beta))
    expected = trl_divergence(theirs, teacher, beta, temperature, scales[0], softcaps[0], scales[1], softcaps[1])
    grad_output = Draw("cpu", 1).normal(ROWS)
    found, exact = (with_gradients(value, head, grad_output.to(value.dtype))
                    for value, head in ((loss, ours), (expected, theirs)))
    for a, b in zip(found, exact, strict=True):  # TRL's KL is a difference of normalizers, of about 10
        assert b.abs().max() > 0.01
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=2e-6 * max(1, b.abs().max()))


# ---------------------------------------------------------------------------------------------------------------- Liger


def liger_jsd(student, teacher, beta, temperature, labels=None):
    """Computes linkedin/Liger-Kernel 0eaa2d5, ops/fused_linear_jsd.py, without biases. Rows of ignored labels are left
    out, and the sum is divided by the number of others."""
    x, y = ((hidden @ weight.t() / temperature).log_softmax(1) for hidden, weight, _ in (student, teacher))
    if beta == 0:
        each = y.exp() * (y - x)
    elif beta == 1:
        each = x.exp() * (x - y)
    else:
        log_m = (beta * y.exp() + (1 - beta) * x.exp()).log()
        each = beta * y.exp() * (y - log_m) + (1 - beta) * x.exp() * (x - log_m)
    counts = torch.ones_like(each[:, 0]) if labels is None else (labels != IGNORE).to(each.dtype)
    return (each.sum(1) * counts).sum() / counts.sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_liger_fused_linear_jsd(beta, temperature, labelled, dtype, device):
    student, teacher = make(device, dtype, bias=False)
    labels = Draw(device, 1).integers(CLASSES, ROWS)
    labels[::4] = IGNORE
    labels = labels if labelled else None
    ours, theirs = learning(student), learning(student, torch.float64)
    loss = linear_distillation_loss(ours[0], ours[1], teacher, logit_scale=1 / temperature, chunk_rows=5,
                                    teacher_logit_scale=1 / temperature,
                                    row_mask=None if labels is None else labels != IGNORE, **of_beta(beta))
    of_teacher = [None if t is None else t.double() for t in teacher]
    exact = liger_jsd(theirs, of_teacher, beta, temperature, labels)
    assert_equal(with_gradients(loss, ours), with_gradients(exact, theirs), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hard, soft", [(0.5, 0.5), (0.2, 0.8), (0.0, 1.0)])
def test_liger_chunked_jsd_with_labels(hard, soft, dtype, device):
    """Compares with Liger-Kernel 08f12c6, chunked_loss/jsd_loss.py, with biases and beta 0.5. Both of its parts are
    divided by the number of labels, but its divergence is summed over all rows, ours over those with a label."""
    student, teacher = make(device, dtype)
    labels = Draw(device, 1).integers(CLASSES, ROWS)
    labels[::4] = IGNORE
    ours, theirs = learning(student), learning(student, torch.float64)
    z, y = (F.linear(*(t.double() for t in head)) for head in (theirs, teacher))
    x, y = (t.log_softmax(1)[labels != IGNORE] for t in (z, y))
    log_m = ((x.exp() + y.exp()) / 2).log()
    of_soft = F.kl_div(log_m, x, reduction="sum", log_target=True) / 2
    of_soft = of_soft + F.kl_div(log_m, y, reduction="sum", log_target=True) / 2
    count = (labels != IGNORE).sum()
    exact = (hard * F.cross_entropy(z, labels, ignore_index=IGNORE, reduction="sum") + soft * of_soft) / count
    loss = linear_distillation_loss(ours[0], ours[1], teacher, labels, linear_bias=ours[2], kind="jsd", alpha=soft,
                                    normalizer=int(count), chunk_rows=5)
    assert_equal(with_gradients(loss, ours), with_gradients(exact, theirs), dtype)


# ------------------------------------------------------------------------------------------------- speculators, NeMo-RL


def both(device, dtype):
    """Returns the logits of the student (a leaf), its copy in float64 (a leaf), and the teacher's."""
    student, teacher = make(device, dtype)
    z, y = F.linear(*student), F.linear(*teacher)
    return z.detach().requires_grad_(), z.detach().to(torch.float64, copy=True).requires_grad_(), y


def acceptance(z, y):
    """Returns the probability that a draft model's token is accepted: the sum of min(p, q), which is 1 - TV."""
    return torch.minimum(z.softmax(1), y.softmax(1)).sum(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eta", [0.0, 3.0])
def test_lk_loss_of_draft_models(eta, dtype, device):
    """Compares with the loss of vllm-project/speculators: lambda KL + (1 - lambda) TV, where lambda = exp(-eta
    acceptance) has no gradient. Two calls of sparse_ce are user code of one number per row each."""
    ours, theirs, y = both(device, dtype)

    def mixed(kl, tv, accepted):
        share = (-eta * accepted.detach()).exp()
        return (share * kl + (1 - share) * tv).mean()

    wide = y.double()
    exact = mixed(F.kl_div(theirs.log_softmax(1), wide.log_softmax(1), log_target=True, reduction="none").sum(1),
                  (theirs.softmax(1) - wide.softmax(1)).abs().sum(1) / 2, acceptance(theirs, wide))
    kl, tv = (distillation_loss(ours, y, kind=kind, reduction="none") for kind in ("forward_kl", "tv"))
    loss = mixed(kl, tv, 1 - tv)
    assert_equal(with_gradients(loss, [ours]), with_gradients(exact, [theirs]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_log_of_the_acceptance(dtype, device):
    """Compares with -log of the acceptance, also through two heads whose logits are not kept. 1 - TV loses digits if TV
    is close to 1."""
    ours, theirs, y = both(device, dtype)
    accepted = acceptance(theirs, y.double())
    lost, exact = 1 / accepted.min().item(), -accepted.log().mean()
    loss = -(1 - distillation_loss(ours, y, kind="tv", reduction="none")).log().mean()
    assert_equal(with_gradients(loss, [ours]), with_gradients(exact, [theirs]), dtype, lost)

    student, teacher = make(device, dtype)
    ours, theirs = learning(student), learning(student, torch.float64)
    tv = linear_distillation_loss(ours[0], ours[1], teacher, linear_bias=ours[2],
                                  kind="tv", reduction="none", chunk_rows=5)
    exact = -acceptance(F.linear(*theirs), F.linear(*(t.double() for t in teacher))).log().mean()
    assert_equal(with_gradients(-(1 - tv).log().mean(), ours), with_gradients(exact, theirs), dtype, lost)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nemo_rl_reverse_kl_of_two_heads(dtype, device):
    """Compares with the reverse KL of NVIDIA-NeMo/RL between a student and the hidden states of a teacher: the mean
    over the tokens of a mask, also with a weight of each token."""
    student, teacher = make(device, dtype)
    draw = Draw(device, 1)
    mask, weight = draw.uniform(ROWS) < 0.7, draw.uniform(ROWS, dtype=dtype)
    ours, theirs = learning(student), learning(student, torch.float64)
    log_q = F.linear(*theirs).log_softmax(1)
    log_p = F.linear(*(t.double() for t in teacher)).log_softmax(1)
    rows = (log_q.exp() * (log_q - log_p)).sum(1)
    for options, exact in ((dict(), rows[mask].mean()),
                           (dict(row_weight=weight, normalizer=weight[mask].sum()),
                            (rows * weight.double())[mask].sum() / weight.double()[mask].sum())):
        loss = linear_distillation_loss(ours[0], ours[1], teacher, linear_bias=ours[2],
                                        kind="reverse_kl", row_mask=mask, chunk_rows=5, **options)
        found = with_gradients(loss, ours)
        leaves = torch.autograd.grad(ROWS * exact, theirs, retain_graph=True)
        assert_equal(found, [exact.detach(), *leaves], dtype, lost=4)


# ----------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_teacher_of_labels_is_cross_entropy(dtype, device):
    """Checks a teacher that has probability 1 at one class: forward KL is the cross entropy of it."""
    ours, theirs, _ = both(device, dtype)
    labels = Draw(device, 1).integers(CLASSES, ROWS)
    teacher = torch.full_like(ours, -math.inf).scatter(1, labels[:, None], 0.0)
    loss = distillation_loss(ours, teacher)
    assert_equal(with_gradients(loss, [ours]), with_gradients(cross_entropy(theirs, labels), [theirs]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_kl_is_the_cross_entropy_of_soft_targets_less_their_entropy(dtype, device):
    ours, theirs, y = both(device, dtype)
    p = y.double().softmax(1)
    exact = F.cross_entropy(theirs, p) + (p * p.log()).sum(1).mean()
    assert_equal(with_gradients(distillation_loss(ours, y), [ours]), with_gradients(exact, [theirs]), dtype)
