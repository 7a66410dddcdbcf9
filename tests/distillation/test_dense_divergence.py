"""Compares divergences from a dense teacher on logits with their definitions, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, Draw, devices
from dense import arithmetic
from divergence_cases import CASES, EPS, KINDS, assert_within, defined, expected, of_kind, stored_error
from sparse_ce import distillation_loss, linear_distillation_loss

ops = torch.ops.sparse_ce
PAIRS = [(student, teacher) for student in DTYPES for teacher in DTYPES]
INF, NAN = math.inf, math.nan
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
every_kind = pytest.mark.parametrize("kind", KINDS)


def rows_of(*leading, classes=33, spread=2.0, near=None, dtypes=(torch.float32, torch.float32), device="cpu", seed=0):
    """Returns logits of a student, of a teacher that is independent or differs by ``near``, and a ``grad_output``."""
    draw = Draw(device, seed)
    x = spread * draw.normal(*leading, classes, dtype=torch.float64)
    teacher = x + near * draw.normal(*leading, classes, dtype=torch.float64) if near is not None else (
        spread * draw.normal(*leading, classes, dtype=torch.float64))
    grad_output = draw.normal(*leading, dtype=torch.float64)
    return x.to(dtypes[0]), teacher.to(dtypes[1]), grad_output.to(arithmetic(dtypes[0]))


def run(x, teacher, grad_output, **options):
    """Returns values and gradient."""
    leaf = x.detach().requires_grad_()
    value = distillation_loss(leaf, teacher, **options)
    return value.detach(), *torch.autograd.grad(value, leaf, grad_output)


def check(kind, beta, x, teacher, grad_output, of_student=None, of_teacher=None, **options):
    exact = expected(kind, beta, x, teacher, grad_output, of_student, of_teacher)
    value, gradient = run(x, teacher, grad_output, **of_kind(kind, beta), reduction="none", **options)
    assert value.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32) and gradient.dtype == x.dtype
    assert_within(value, exact.value, exact.value_error)
    assert_within(gradient, exact.gradient, exact.gradient_error + stored_error(exact.gradient, x.dtype))
    return value, exact


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("classes", [1, 2, 17, 513, 1030])
@pytest.mark.parametrize("kind, beta", CASES)
def test_it_equals_the_definition(kind, beta, classes, device):
    """Checks flat rows, peaked rows of each dtype, and rows whose largest classes have all the probability."""
    for spread in (1.0, 8.0, 60.0):
        for dtype in (torch.float64, torch.float32):
            value, exact = check(kind, beta, *rows_of(5, classes=classes, spread=spread, dtypes=(dtype, dtype),
                                                      device=device))
            assert classes > 1 or (value == 0).all()
            if classes > 2 and spread == 1 and beta < 0.99:  # what is allowed is no more than a wrong last digit
                assert (exact.value_error <= 1e-4 * exact.value).all()
                assert (exact.gradient_error <= 1e-3 * exact.gradient.abs().max(1, keepdim=True).values).all()


@pytest.mark.parametrize("student, teacher", PAIRS, ids=str)
@pytest.mark.parametrize("kind, beta", [(kind, 0.9) for kind in KINDS])
def test_dtypes_of_both_models(kind, beta, student, teacher, device):
    for spread in (1.0, 20.0):
        check(kind, beta, *rows_of(6, classes=70, spread=spread, dtypes=(student, teacher), device=device))


@pytest.mark.parametrize("kind, beta", [("jsd", 1e-9), ("skew_forward", 1e-9), ("skew_reverse", 1 - 1e-9)])
def test_a_mixture_with_a_tiny_share_keeps_the_digits_of_float64(kind, beta, device):
    """Uses log ratios around 40, where a share of 1e-9 dominates the mixture, but not by the 16 digits of float64."""
    x, teacher = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    x[:, 1] = -torch.tensor([39.0, 41.0, 45.0], dtype=torch.float64)
    value, _ = run(x.to(device), teacher.to(device), torch.ones(3, dtype=torch.float64, device=device), kind=kind,
                   beta=beta, reduction="none")
    log_p, log_q, b = teacher.log_softmax(-1), x.log_softmax(-1), torch.tensor(beta, dtype=torch.float64)
    share = {"jsd": b, "skew_forward": b, "skew_reverse": 1 - b}[kind]
    log_m = torch.logaddexp(log_p + share.log(), log_q + (1 - share).log())
    kl_p, kl_q = ((t.exp() * (t - log_m)).sum(-1) for t in (log_p, log_q))
    exact = {"jsd": b * kl_p + (1 - b) * kl_q, "skew_forward": kl_p, "skew_reverse": kl_q}[kind]
    torch.testing.assert_close(value.cpu(), exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("near", [0.1, 1e-2, 1e-3])
@pytest.mark.parametrize("kind, beta", CASES)
def test_a_student_close_to_its_teacher(kind, beta, near, device):
    x, teacher, grad_output = rows_of(8, classes=301, near=near, spread=1.0, device=device)
    value, _ = check(kind, beta, x, teacher, grad_output)
    exact = defined(kind, beta, x.double(), teacher.double())
    if kind == "hellinger":  # a sum of squares keeps its digits
        torch.testing.assert_close(value.double(), exact, rtol=2e-6 / near, atol=0)
    if kind in ("forward_kl", "reverse_kl"):  # not a difference of two cross entropies
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0.5 * EPS)


@every_kind
@both_dtypes
def test_equal_models_have_no_divergence(kind, dtype, device):
    """Checks a value and a gradient of exactly 0, or of a rounding."""
    x, _, grad_output = rows_of(4, classes=77, spread=9.0, dtypes=(dtype, dtype), device=device)
    value, gradient = run(x, x.clone(), grad_output, **of_kind(kind, 0.3), reduction="none")
    assert (value == 0).all()
    assert (gradient.abs() <= torch.finfo(dtype).eps * grad_output.abs()[:, None]).all()


@pytest.mark.parametrize("threads_of", [1, 2])
@every_kind
def test_rows_of_several_spans(kind, threads_of, threads, device):
    """Checks more classes than one span, with fewer and with more rows than threads: the same bits."""
    x, teacher, grad_output = rows_of(3, classes=70001, dtypes=(torch.bfloat16, torch.float32), device=device)
    check(kind, 0.3, x, teacher, grad_output)
    whole = run(x, teacher, grad_output, kind=kind, reduction="none")
    threads(threads_of)
    for r in range(3):
        one = run(x[r:r + 1], teacher[r:r + 1], grad_output[r:r + 1], kind=kind, reduction="none")
        for a, b in zip(one, whole):
            assert torch.equal(a, b[r:r + 1])


@pytest.mark.parametrize("leading", [(), (2, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_leading_shapes(reduction, leading, device):
    x, teacher, grad_output = rows_of(*leading, device=device)
    exact = expected("jsd", 0.5, x, teacher, grad_output)
    value, gradient = run(x, teacher, grad_output if reduction == "none" else None, kind="jsd", reduction=reduction)
    count = max(1, math.prod(leading))
    if reduction == "none":
        assert value.shape == leading
        torch.testing.assert_close(value.double(), exact.value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient.double(), exact.gradient, rtol=1e-5, atol=1e-6)
    else:
        by = count if reduction == "mean" else 1
        torch.testing.assert_close(value.double(), exact.value.sum() / by, rtol=1e-5, atol=1e-6)
        ones = expected("jsd", 0.5, x, teacher, torch.ones_like(grad_output))
        torch.testing.assert_close(gradient.double(), ones.gradient / by, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, "backward", "forward"], ids=str)
@pytest.mark.parametrize("reduction, normalizer", [("mean", None), ("sum", None), ("none", None), ("mean", 7.5),
                                                   ("mean", torch.tensor(3.0))], ids=str)
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned weights"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_weights_and_reductions(dtype, learned, reduction, normalizer, inplace, device):
    """Checks that ignored rows may hold NaN, are not counted, and have loss and gradient 0."""
    x, teacher, grad_output = rows_of(3, 4, dtypes=(dtype, torch.float32), device=device)
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]], device=device).bool()
    weight = Draw(device, 5).uniform(3, 4, dtype=grad_output.dtype).requires_grad_(learned)
    grad_output = grad_output if reduction == "none" else grad_output[0, 0]
    by = float(normalizer or mask.sum()) if reduction == "mean" else 1
    wide = weight.detach().double().requires_grad_()
    rows = torch.where(mask, defined("reverse_kl", 0.5, x.double(), teacher.double()) * wide / by, 0.0)
    exact_value = rows if reduction == "none" else rows.sum()
    each = (grad_output.expand(3, 4) * wide.detach() / by * mask)
    exact = expected("reverse_kl", 0.5, x, teacher, each)
    x[~mask], teacher[~mask] = NAN, NAN
    leaf = x.requires_grad_()
    value = distillation_loss(leaf.clone() if inplace else leaf, teacher, kind="reverse_kl", row_mask=mask,
                              row_weight=weight, reduction=reduction, normalizer=normalizer, inplace=inplace)
    torch.testing.assert_close(value.double(), exact_value, rtol=1e-5, atol=1e-6)
    gradient, *of_weight = torch.autograd.grad(value, (leaf, weight) if learned else leaf, grad_output)
    assert (gradient[~mask] == 0).all() and gradient.dtype == dtype
    twice = 2 * stored_error(exact.gradient, dtype)  # a mean's gradient is scaled after it was stored
    assert_within(gradient, exact.gradient, exact.gradient_error + twice)
    if learned:
        expected_weight, = torch.autograd.grad(exact_value, wide, grad_output.double())
        torch.testing.assert_close(of_weight[0].double(), expected_weight, rtol=1e-5, atol=1e-6)
        assert (of_weight[0][~mask] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_active_rows(reduction, device):
    x, teacher, _ = rows_of(5, device=device)
    leaf = torch.full_like(x, NAN).requires_grad_()
    mask = torch.zeros(5, dtype=torch.bool, device=device)
    value = distillation_loss(leaf, teacher, row_mask=mask, reduction=reduction)
    assert (value == 0).all()
    assert (torch.autograd.grad(value.sum(), leaf)[0] == 0).all()
    assert distillation_loss(leaf.detach(), teacher, row_mask=mask, reduction=reduction).eq(0).all()


def test_a_row_with_nan_stays_alone(device):
    x, teacher, grad_output = rows_of(4, device=device)
    expected_value, expected_gradient = run(x, teacher, grad_output, kind="jsd", reduction="none")
    x[1, 3], teacher[2, 5] = NAN, NAN
    value, gradient = run(x, teacher, grad_output, kind="jsd", reduction="none")
    assert value.isnan().tolist() == gradient.isnan().all(1).tolist() == [False, True, True, False]
    for r in (0, 3):
        assert torch.equal(value[r], expected_value[r]) and torch.equal(gradient[r], expected_gradient[r])


# ---------------------------------------------------------------------------------------------------- transform, layout


@pytest.mark.parametrize("of_rows", [False, True], ids=["number", "of each row"])
@pytest.mark.parametrize("softcap, teacher_softcap", [(None, None), (5.0, None), (None, 3.0), (5.0, 3.0)])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scales_and_softcaps_of_both_models(dtype, kind, softcap, teacher_softcap, of_rows, device):
    x, teacher, grad_output = rows_of(5, classes=41, spread=6.0, dtypes=(dtype, torch.float32), device=device)
    scales = (0.7, 1.3)
    if of_rows:
        scales = tuple(Draw(device, 3).uniform(2, 5, low=0.3, high=1.5, dtype=grad_output.dtype))
    check(kind, 0.4, x, teacher, grad_output, dict(scale=scales[0], softcap=softcap),
          dict(scale=scales[1], softcap=teacher_softcap), logit_scale=scales[0], teacher_logit_scale=scales[1],
          softcap=softcap, teacher_softcap=teacher_softcap)


@pytest.mark.parametrize("of_student, of_teacher", [(33, 40), (40, 33), (45, 37), (33, 33)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@every_kind
def test_padding_behind_the_classes(kind, reduction, of_student, of_teacher, device):
    x, teacher, grad_output = rows_of(4, device=device)
    classes, options = x.shape[1], dict(**of_kind(kind, 0.3), reduction=reduction)
    grad_output = grad_output if reduction == "none" else None
    value, gradient = run(x, teacher, grad_output, **options)
    pad = torch.nn.functional.pad
    found = run(pad(x, (0, of_student - classes), value=NAN), pad(teacher, (0, of_teacher - classes), value=NAN),
                grad_output, num_classes=classes, **options)
    # CUDA kernels sum aligned rows in another order.
    torch.testing.assert_close(found[0], value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1][:, :classes], gradient, rtol=1e-5, atol=1e-7)
    assert (found[1][:, classes:] == 0).all()


LAYOUTS = {
    "rows apart": lambda t: torch.nn.functional.pad(t, (0, 5), value=NAN)[:, :t.shape[1]],
    "every second column": lambda t: torch.stack((t, torch.full_like(t, NAN)), -1).flatten(1)[:, ::2],
    "transposed": lambda t: t.t().contiguous().t(),
    "one row for all": lambda t: t[:1].expand_as(t),
    "an odd begin": lambda t: torch.nn.functional.pad(t, (1, 0), value=NAN)[:, 1:],
}


@pytest.mark.parametrize("of_teacher", LAYOUTS)
@pytest.mark.parametrize("of_student", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_rows(dtype, of_student, of_teacher, device):
    x, teacher, grad_output = rows_of(4, classes=600, dtypes=(dtype, dtype), device=device)
    x, teacher = LAYOUTS[of_student](x), LAYOUTS[of_teacher](teacher)
    for inplace in (False, "backward"):
        leaf = x.detach().requires_grad_()
        at = leaf * 1 if inplace else leaf
        value = distillation_loss(at, teacher, kind="jsd", reduction="none", inplace=inplace)
        gradient, = torch.autograd.grad(value, leaf, grad_output)
        exact = run(x.contiguous(), teacher.contiguous(), grad_output, kind="jsd", reduction="none")
        torch.testing.assert_close((value.detach(), gradient), exact, rtol=1e-5 if dtype == torch.float32 else 8e-3,
                                   atol=1e-7)


# ------------------------------------------------------------------------------------------------------------- in place


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", ["backward", "forward"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_overwrites_the_logits(dtype, inplace, reduction, device):
    x, teacher, grad_output = rows_of(4, classes=50, dtypes=(dtype, dtype), device=device)
    grad_output = grad_output if reduction == "none" else grad_output[0]
    options = dict(kind="jsd", reduction=reduction)
    expected_value, expected_gradient = run(x, teacher, grad_output, **options)
    leaf = x.clone().requires_grad_()
    logits, seen = leaf * 1, []
    logits.register_hook(lambda g: seen.append((g.data_ptr(), g.clone())))
    before = logits.detach().clone()
    value = distillation_loss(logits, teacher, inplace=inplace, **options)
    early = inplace == "forward" and reduction != "none" and dtype != torch.float16
    assert torch.equal(logits.detach(), before) != early
    value.backward(grad_output, retain_graph=True)
    assert torch.equal(value, expected_value)
    assert seen[0][0] == logits.data_ptr() and torch.equal(seen[0][1], leaf.grad)
    torch.testing.assert_close(leaf.grad, expected_gradient, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    with pytest.raises(RuntimeError):
        value.backward(grad_output)
    if early:  # nothing is left of the logits
        several = dict(grad_outputs=torch.ones(2, device=device).to(value), is_grads_batched=True)
        for way, of in (("second derivatives", dict(create_graph=True)), ("several gradients at once", several)):
            value = distillation_loss(leaf * 1, teacher, inplace=inplace, **options)
            with pytest.raises(RuntimeError, match=f"inplace='forward' does not support {way}"):
                torch.autograd.grad(value, leaf, **of)


@pytest.mark.parametrize("leading", [(4,), (2, 3)], ids=str)
def test_a_leaf_is_overwritten_in_backward_alone(leading, device):
    x, teacher, _ = rows_of(*leading, device=device)
    leaf = x.clone().requires_grad_()
    value = distillation_loss(leaf, teacher, inplace="forward")
    assert torch.equal(leaf.detach(), x)
    value.backward()
    assert torch.equal(leaf.detach(), leaf.grad) and torch.equal(leaf.grad, run(x, teacher, None)[1])


# -------------------------------------------------------------------------------------------------------- probability 0


@every_kind
@both_dtypes
def test_classes_that_the_teacher_excludes(kind, dtype, device):
    x, teacher, grad_output = rows_of(4, dtypes=(dtype, dtype), device=device)
    teacher[1, ::3] = -INF
    value, gradient = run(x, teacher, grad_output, **of_kind(kind, 0.3), reduction="none")
    if kind == "reverse_kl":
        assert value.isinf().tolist() == [False, True, False, False]
        assert gradient[1].isnan().any() and gradient[[0, 2, 3]].isfinite().all()
        return
    low = torch.where(teacher.isinf(), -1e4, teacher)
    exact = expected(kind, 0.3, x, low, grad_output)
    assert_within(value, exact.value, exact.value_error + EPS)
    torch.testing.assert_close(gradient.double(), exact.gradient, rtol=1e-5, atol=1e-6)


@every_kind
@both_dtypes
def test_classes_that_the_student_excludes(kind, dtype, device):
    x, teacher, grad_output = rows_of(4, dtypes=(dtype, dtype), device=device)
    x[1, ::3] = -INF
    value, gradient = run(x, teacher, grad_output, **of_kind(kind, 0.3), reduction="none")
    assert gradient.isfinite().all()
    low = torch.where(x.isinf(), -1e4, x)
    exact = expected(kind, 0.3, low, teacher, grad_output)
    torch.testing.assert_close(gradient.double(), exact.gradient, rtol=1e-5, atol=1e-6)
    if kind == "forward_kl":
        assert value.isinf().tolist() == [False, True, False, False]
    else:
        torch.testing.assert_close(value.double(), exact.value, rtol=1e-5, atol=1e-6)


@every_kind
@both_dtypes
def test_classes_that_both_exclude(kind, dtype, device):
    """Checks a vocabulary that is masked alike: the divergence of the other classes."""
    x, teacher, grad_output = rows_of(4, dtypes=(dtype, dtype), device=device)
    value, gradient = run(x[:, 5:], teacher[:, 5:], grad_output, **of_kind(kind, 0.8), reduction="none")
    x[:, :5] = teacher[:, :5] = -INF
    found = run(x, teacher, grad_output, **of_kind(kind, 0.8), reduction="none")
    torch.testing.assert_close((found[0], found[1][:, 5:]), (value, gradient), rtol=1e-5, atol=1e-6)
    assert (found[1][:, :5] == 0).all()


def test_a_shard_without_classes_has_no_divergence(device):
    x, teacher, _ = rows_of(2, device=device)
    for kind in range(9):
        grad = torch.ones(5 if kind == 8 else 2, 2, device=device)
        none = dict(num_classes=5, first_class=5)
        _, sums, gradient = ops.dense_divergence_with_gradient(grad, x, teacher, kind=kind, **none)
        assert (sums == 0).all() and (gradient == 0).all()


@pytest.mark.parametrize("kind, beta", [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.125),
                                        ("jsd", 0.02), ("skew_forward", 0.9), ("skew_reverse", 0.9)])
def test_small_divergences_of_coarse_logits_have_their_digits(kind, beta, device):
    """Checks rows that are just far enough apart for the ordinary formula. All logits of a row round alike."""
    draw = Draw(device)
    x = draw.normal(16, 20000).half()
    teacher = (x.float() + 0.27 * draw.normal(16, 20000)).half()
    options = dict(**of_kind(kind, beta), reduction="none")
    exact = distillation_loss(x.double(), teacher.double(), **options)
    torch.testing.assert_close(distillation_loss(x, teacher, **options).double(), exact, rtol=1e-5, atol=0)


def test_a_gradient_over_the_logits_of_a_row_that_is_hardly_far(device):
    """Checks that the classes after those which show that a row is far cannot make it near again."""
    draw = Draw(device, 5)
    x, noise = draw.normal(1, 20000), draw.normal(1, 1024)

    def teacher_of(scale):
        some = x[:, :1024] + scale * noise
        return torch.cat((some - (some.logsumexp(1) - x[:, :1024].logsumexp(1)), x[:, 1024:]), 1)

    low, high = 0.5, 2.0
    for _ in range(24):  # finds the divergence from which on a row is not near
        middle = (low + high) / 2
        small = distillation_loss(x, teacher_of(middle), kind="forward_kl") < 1 / 32
        low, high = (middle, high) if small else (low, middle)
    for i in range(200):
        teacher, results = teacher_of(low + (i - 100) * 1e-7), []
        for inplace in (False, "forward"):
            leaf = x.clone().requires_grad_()
            value = distillation_loss(leaf * 1, teacher, kind="forward_kl", reduction="sum", inplace=inplace)
            results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_row_without_weight_is_not_written(device):
    """Checks that a divergence with weight 0 has loss and gradient 0, even if it is infinite or NaN."""
    x, teacher, _ = rows_of(3, device=device)
    weight = torch.tensor([1.0, 0.0, 2.0], device=device)
    for reduction, spoilt in (("sum", -INF), ("none", -INF), ("sum", NAN), ("none", NAN)):
        (teacher if spoilt == -INF else x)[1, 4] = spoilt
        value, gradient = run(x, teacher, None if reduction == "sum" else torch.ones_like(weight), kind="reverse_kl",
                              row_weight=weight, reduction=reduction)
        assert value.isfinite().all() and (gradient[1] == 0).all() and gradient[[0, 2]].ne(0).any(1).all()


# ------------------------------------------------------------------------------------------------- several at once, raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_divergences_and_the_labels_at_once(dtype, device):
    """Checks that kind 8 is the four kinds, and that every op computes the same gradient."""
    x, teacher, _ = rows_of(5, classes=700, dtypes=(dtype, dtype), device=device)
    mask, labels = torch.tensor([1, 0, 1, 0, 1], device=device).bool(), torch.tensor([3, 699, -1, -7, 0], device=device)
    grad = Draw(device).normal(5, 5)
    options = dict(row_mask=mask, labels=labels, beta=0.3)
    stats, sums = ops.dense_divergence(x, teacher, kind=8, **options)
    one_by_one = [ops.dense_divergence(x, teacher, kind=KINDS.index(kind), **options)[1]
                  for kind in ("forward_kl", "reverse_kl", "jsd", "tv")]
    torch.testing.assert_close(sums[:4], torch.stack([each[0] for each in one_by_one]), rtol=1e-6, atol=1e-6)
    # Nothing reads the sum of slopes of forward KL, which is -1.
    torch.testing.assert_close(sums[6:9], torch.stack([each[2] for each in one_by_one[1:]]), rtol=1e-6, atol=1e-6)
    has_label = labels >= 0
    of_label = F.cross_entropy(x.float(), labels.clamp(min=-1), ignore_index=-1, reduction="none")
    torch.testing.assert_close(sums[4], of_label)
    assert (sums[:, ~mask & ~has_label] == 0).all() and (sums[:4, ~mask] == 0).all()

    gradient = ops.dense_divergence_backward(grad, stats, sums, x, teacher, kind=8, **options)
    assert (gradient[~mask & ~has_label] == 0).all()
    again = ops.dense_divergence_with_gradient(grad, x, teacher, kind=8, **options)
    assert all(map(torch.equal, again, (stats, sums, gradient)))
    for call in (lambda t: ops.dense_divergence_with_gradient_(grad, t, teacher, kind=8, **options),
                 lambda t: ops.dense_divergence_backward_(grad, stats, sums, t, teacher, kind=8, **options)):
        logits = x.clone()
        call(logits)
        assert torch.equal(logits, gradient)
    z = x.double().requires_grad_()
    total = torch.where(has_label, F.cross_entropy(z, labels.clamp(min=0), reduction="none"), 0.0) * grad[4]
    for kind, g in zip(("forward_kl", "reverse_kl", "jsd", "tv"), grad):
        total = total + torch.where(mask, defined(kind, 0.3, z, teacher.double()), 0.0) * g
    exact, = torch.autograd.grad(total.sum(), z)
    torch.testing.assert_close(gradient.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_divergence_that_is_infinite_reaches_no_other(device):
    """Checks several divergences at once, of which reverse KL is infinite and has no gradient."""
    x, teacher, _ = rows_of(3, device=device)
    teacher[1, 4] = -INF
    grad = Draw(device).normal(5, 3)
    grad[1] = 0
    _, sums, gradient = ops.dense_divergence_with_gradient(grad, x, teacher, kind=8)
    assert sums[1].isinf().tolist() == [False, True, False] and sums[[0, 2, 3]].isfinite().all()
    assert gradient.isfinite().all() and gradient[1].ne(0).any()


@every_kind
def test_a_factor_of_0_hides_a_broken_teacher(kind, device):
    x, teacher, _ = rows_of(3, device=device)
    teacher[1], teacher[2, 4] = NAN, INF
    labels, grad = torch.tensor([3, 5, 0], device=device), torch.zeros(2, 3, device=device)
    grad[1] = 2
    _, _, gradient = ops.dense_divergence_with_gradient(grad, x, teacher, kind=KINDS.index(kind), labels=labels)
    torch.testing.assert_close(gradient, 2 * (x.softmax(1) - F.one_hot(labels, 33)))


@pytest.mark.parametrize("kind, beta", CASES)
def test_a_shift_of_the_logits_of_one_model_costs_no_digits(kind, beta, device):
    x, teacher, grad_output = rows_of(4, spread=4.0, device=device)
    x, teacher = ((64 * t).round() / 64 for t in (x, teacher))  # a shift by 4096 is exact
    exact = expected(kind, beta, x, teacher, grad_output)
    for shifted in ((x + 4096, teacher), (x, teacher - 4096)):
        value, gradient = run(*shifted, grad_output, **of_kind(kind, beta), reduction="none")
        assert_within(value, exact.value, 2 * exact.value_error)
        assert_within(gradient, exact.gradient, 2 * exact.gradient_error + stored_error(exact.gradient, x.dtype))


# ----------------------------------------------------------------------------------------------- largest sizes, a GPU


@pytest.mark.slow
@pytest.mark.parametrize("classes", [1024, 5120])
def test_18_rows_far_apart_in_memory(classes, device, threads):
    """Checks a row stride that puts the last row of a model beyond 2^31 elements. An in-place backward writes to the
    rows alone, and the memory between them is never touched."""
    threads(2)
    stride = 2**30 + 2**29 + 64  # keeps the alignment of rows, and thereby the order of sums
    storage = torch.empty(2 * stride + 2 * classes, dtype=torch.float16, device=device)
    far, far_teacher = (storage[begin:].as_strided((3, classes), (stride, 1)) for begin in (0, classes))
    x, teacher, grad_output = rows_of(3, classes=classes, dtypes=(torch.float16, torch.float16), device=device)
    far.copy_(x), far_teacher.copy_(teacher)
    options = dict(kind="jsd", reduction="none")
    expected_results = check("jsd", 0.5, x, teacher, grad_output)[0], run(x, teacher, grad_output, **options)[1]
    for models, inplace in (((far, teacher), False), ((x, far_teacher), False), ((far, teacher), "backward")):
        found = run(*models, grad_output, inplace=inplace, **options)
        assert all(map(torch.equal, found, expected_results))
    assert torch.equal(far, expected_results[1]) and torch.equal(far_teacher, teacher)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
def test_18_a_gradient_of_more_than_two_to_the_31_elements(gpu):
    """Allocates 4 GiB in float16, for logits that expand a row of each model."""
    rows, classes = 2**31 // 131072 + 2, 131072
    x, teacher, _ = rows_of(1, classes=classes, device=gpu)
    active = [0, rows - 1]
    mask, grad_output = torch.zeros(rows, device=gpu).bool(), torch.zeros(rows, device=gpu)
    mask[active], grad_output[active] = True, torch.tensor([2.0, -3.0], device=gpu) * 4096
    value, gradient = run(x.half().expand(rows, -1), teacher.half().expand(rows, -1), grad_output, row_mask=mask,
                          reduction="none")
    z = x.half().double().requires_grad_()
    exact = defined("forward_kl", 0.5, z, teacher.half().double())
    of_row, = torch.autograd.grad(exact.sum(), z)
    torch.testing.assert_close(value[active].double(), exact.detach().expand(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[active].double(), grad_output[active, None] * of_row, rtol=2e-3, atol=1e-4)
    assert value.ne(0).sum() == 2 and all(gradient[r].eq(0).all() for r in (1, 2, rows // 2, rows - 3, rows - 2))


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
@every_kind
def test_nothing_waits_for_the_gpu(kind, gpu):
    draw = Draw(gpu)
    x, teacher, grad_output = rows_of(6, device=gpu)
    mask, labels, weight = draw.integers(2, 6).bool(), draw.integers(33, 6), draw.uniform(6)
    hidden, head, of_teacher = draw.normal(6, 5), draw.normal(33, 5), (draw.normal(6, 4), draw.normal(33, 4))
    leaves = [t.requires_grad_() for t in (x, hidden, head)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduction in ("none", "mean"):
            options = dict(kind=kind, row_mask=mask, row_weight=weight, reduction=reduction, logit_scale=weight)
            losses = (distillation_loss(x, teacher, **options), distillation_loss(x * 1, teacher, inplace="forward",
                                                                                  **options),
                      linear_distillation_loss(hidden, head, of_teacher, labels, alpha=0.5, chunk_rows=4, **options))
            torch.autograd.grad(losses, leaves, [grad_output if reduction == "none" else grad_output[0]] * 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_scale_of_an_ignored_row_does_not_reach_second_derivatives(device):
    """Checks that NaN in the scale of an ignored row gives no NaN with ``create_graph``."""
    mask, scale = torch.tensor([True, False, True], device=device), torch.tensor([1.0, math.nan, 0.5], device=device)
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    loss = distillation_loss(logits, torch.randn(3, 5, device=device), row_mask=mask, logit_scale=scale)
    gradient, = torch.autograd.grad(loss, logits, create_graph=True)
    assert gradient.isfinite().all() and (gradient[1] == 0).all()
