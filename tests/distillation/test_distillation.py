"""Tests losses of distillation: both parts on logits, the same on a linear head, and as modules."""

import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from cases import Draw, sparsely
from refusals import assert_refused
from sparse_ce import (
    DistillationLoss,
    LinearDistillationLoss,
    SparseTarget,
    cross_entropy,
    distillation_loss,
    divergence,
    linear_distillation_loss,
    topk_log_probs,
)
from sparse_ce._core.arguments import DIVERGENCES as KINDS
from sparse_ce._core.arguments import Normalizers
from sparse_ce.functional.divergences import TAILS, needed

DEFINED = [(kind, tail) for kind, tail in itertools.product(KINDS, TAILS) if not isinstance(needed(kind, tail), str)]
SHAPE, CLASSES, WIDTH, IDS = (2, 4), 19, 6, 3
TEACHERS = ("topk", "masked", "repeated", "empty", "jagged", "labels")


def make(device):
    """Returns [input, weight, bias], labels, the teacher in each format, and log_tail for the formats that accept
    it."""
    draw, dtype = Draw(device), torch.float64
    head = [t.requires_grad_() for t in (draw.normal(*SHAPE, WIDTH, dtype=dtype),
                                         draw.normal(CLASSES, WIDTH, dtype=dtype), draw.normal(CLASSES, dtype=dtype))]
    top, log_tail = topk_log_probs(2 * draw.normal(*SHAPE, CLASSES, dtype=dtype), IDS, return_log_tail=True)
    labels = draw.integers(CLASSES, *SHAPE)
    labels[0, 1] = -100
    # These labels are among the teacher's classes.
    labels[1, 2], labels[1, 3] = top.indices[1, 2, 1], top.indices[1, 3, 0]
    ids, log_p = top.indices, top.values
    row_mask = torch.tensor([[True, True, False, True], [False, True, True, True]], device=device)
    begin = torch.arange(0, 8 * IDS, IDS, device=device)
    # Rows without entries that are active nevertheless.
    no_entry = torch.tensor([[False, True, True, False], [False] * 4], device=device)
    teachers = {
        "topk": top, "masked": SparseTarget.from_topk(ids, log_p, values_are="log_probs", row_mask=row_mask),
        "repeated": SparseTarget.from_topk(torch.cat((ids, ids[..., :1]), -1),
                                           torch.cat((log_p - 0.5, log_p[..., :1] - 1), -1), values_are="log_probs"),
        "empty": SparseTarget.from_topk(ids, log_p.masked_fill(no_entry[..., None], -torch.inf),
                                        values_are="log_probs"),
        "jagged": SparseTarget.from_jagged(ids.flatten(), log_p.flatten(), values_are="log_probs", offsets=torch.stack(
            (begin, begin + IDS), -1).reshape(*SHAPE, 2)),
        "labels": SparseTarget.from_index(labels.clamp(min=0)),
    }
    return head, labels, teachers, log_tail


def close(found, expected, leaves):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    grad_output = torch.linspace(0.5, 2, found.numel(), dtype=found.dtype, device=found.device).reshape(found.shape)
    grads = [torch.autograd.grad(t, leaves, grad_output, retain_graph=True) for t in (found, expected)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case, form", sparsely(2, DEFINED, TEACHERS))
def test_a_head_equals_its_logits(case, form, device):
    """Checks each combination of options, whatever number of matrix products it needs for both losses."""
    kind, tail = case
    head, labels, teachers, log_tail = make(device)
    reductions = itertools.cycle(("mean", "sum", "none"))
    for temperature, alpha, given, softcap, reduction in zip(*zip(*itertools.product(
            (1.0, 2.0), (1.0, 0.3), (None, log_tail), (None, 3.0))), reductions):
        if temperature != 1 and (tail not in ("zero", "renormalize") or given is not None):
            continue
        if given is not None and (form in ("repeated", "empty", "labels") or tail not in ("bucket", "uniform")):
            continue
        options = dict(kind=kind, tail=tail, teacher_log_tail=given, temperature=temperature, alpha=alpha,
                       reduction=reduction, softcap=softcap, logit_scale=0.7)
        expected = distillation_loss(F.linear(*head), teachers[form], labels, **options)
        found = linear_distillation_loss(*head[:2], teachers[form], labels, linear_bias=head[2], chunk_rows=3,
                                         **options)
        close(found, expected, head)


@pytest.mark.parametrize("form", TEACHERS)
def test_both_losses_of_one_pass_over_the_head(form, device, monkeypatch):
    """Checks that with class indices at temperature 1 the head needs three matrix products, not six."""
    head, labels, teachers, _ = make(device)
    asked = []
    for name in ("linear_row_loss", "linear_cross_entropy"):
        right = getattr(sparse_ce.functional.sparse_distillation, name)
        monkeypatch.setattr(sparse_ce.functional.sparse_distillation, name,
                            lambda *args, right=right, **named: asked.append(right) or right(*args, **named))
    for ignore_index, dtype in ((-100, torch.int64), (-100, torch.int16), (int(labels[0, 0]), torch.int32)):
        labels = torch.where(labels == -100, ignore_index, labels).to(dtype)
        found = linear_distillation_loss(*head[:2], teachers[form], labels, kind="jsd", tail="bucket", alpha=0.5,
                                         ignore_index=ignore_index)
        assert len(asked) == (2 if form == "jagged" else 1)
        asked.clear()
        z = F.linear(*head[:2])
        parts = [divergence(z, teachers[form], kind="jsd", row_mask=labels != ignore_index),
                 cross_entropy(z, labels.long(), ignore_index=ignore_index)]
        close(found, (parts[0] + parts[1]) / 2, head[:2])

    def of_labels_out_of_range():
        return linear_distillation_loss(*head[:2], teachers[form], torch.full_like(labels, -100), alpha=0.5,
                                        ignore_index=0)

    if device == "cpu":
        assert_refused(of_labels_out_of_range, "target must have indices in", error=RuntimeError)
    else:
        assert of_labels_out_of_range().isnan()


@pytest.mark.parametrize("kind,tail", DEFINED)
def test_second_derivatives_of_one_pass_over_the_head(kind, tail, device):
    """Checks an ignored label, a label among the teacher's classes, and rows without other classes, whose log_tail is
    -inf."""
    head, labels, teachers, _ = make(device)
    only = torch.full_like(head[2], -torch.inf).index_fill(0, teachers["topk"].indices[1, 3], 0.0)
    for row, bias in ((slice(None), head[2].detach()), ((1, 3), only)):
        if bias is only and (kind, tail) == ("forward_kl", "uniform"):  # the loss is infinite
            continue
        second, options = [], dict(kind=kind, tail=tail, alpha=0.5)
        x, teacher, of_row = head[0].detach()[row].requires_grad_(), teachers["topk"][row], labels[row]
        for loss in (linear_distillation_loss(x, head[1], teacher, of_row, linear_bias=bias, **options),
                     distillation_loss(F.linear(x, head[1], bias), teacher, of_row, **options)):
            grad, = torch.autograd.grad(loss, x, create_graph=True)
            second += torch.autograd.grad(grad.sin().sum(), x)
        torch.testing.assert_close(*second, rtol=1e-8, atol=1e-10)


def test_its_parts_and_what_is_left_out(device):
    head, labels, teachers, _ = make(device)
    z = F.linear(*head).detach().requires_grad_()
    options = dict(tail="renormalize")
    of_teacher = divergence(z, teachers["masked"], **options, row_mask=labels != -100)
    of_labels = cross_entropy(z, labels)
    close(distillation_loss(z, teachers["masked"], labels, alpha=0.25, **options), 0.25 * of_teacher + 0.75 * of_labels,
          [z])
    close(distillation_loss(z, teachers["masked"], labels, alpha=1, **options), of_teacher, [z])
    close(distillation_loss(z, teachers["masked"], **options), divergence(z, teachers["masked"], **options), [z])
    close(distillation_loss(z, teachers["masked"], labels, alpha=0, **options), of_labels, [z])
    by = distillation_loss(z, teachers["masked"], labels, alpha=0.25, normalizer=5, **options)
    sums = distillation_loss(z, teachers["masked"], labels, alpha=0.25, reduction="sum", **options)
    close(by, sums / 5, [z])


@pytest.mark.parametrize("tail", ["zero", "uniform"])
def test_columns_that_are_no_classes_have_no_part(tail, device):
    """Checks the labels' loss and a tail that is spread over all classes."""
    head, labels, teachers, _ = make(device)
    z, options = F.linear(*head), dict(tail=tail, alpha=0.3, reduction="none")
    teacher = SparseTarget.from_topk(teachers["topk"].indices, teachers["topk"].values, values_are="log_probs")
    padded = torch.cat((z, torch.full_like(z[..., :3], 5.0)), -1)
    close(distillation_loss(padded, teacher, labels, num_classes=CLASSES, **options),
          distillation_loss(z, teacher, labels, **options), head)
    weight, bias = (torch.cat((t, torch.full_like(t[:3], 5.0))) for t in head[1:])
    close(linear_distillation_loss(head[0], weight, teacher, labels, linear_bias=bias, num_classes=CLASSES, **options),
          distillation_loss(z, teacher, labels, **options), head)


def test_each_part_has_its_own_normalizer(device):
    head, labels, teachers, _ = make(device)
    z = F.linear(*head)
    expected = (0.3 * divergence(z, teachers["topk"], tail="zero", reduction="sum", row_mask=labels != -100) / 5
                + 0.7 * cross_entropy(z, labels, reduction="sum") / 3)
    for temperature in (1.0, 2.0):  # at 1 a head computes both parts in one pass
        options = dict(alpha=0.3, normalizer=Normalizers(torch.tensor(5), torch.tensor(3)), temperature=temperature,
                       tail="zero")
        found = distillation_loss(z, teachers["topk"], labels, **options)
        if temperature == 1:
            close(found, expected, head)
        close(linear_distillation_loss(*head[:2], teachers["topk"], labels, linear_bias=head[2], **options), found,
              head)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tail", ["zero", "renormalize"])
def test_temperature(tail, softcap, device):
    """Checks the student behind its softcap, and the teacher within its classes, where a repeated class counts once."""
    head, _, teachers, _ = make(device)
    z, temperature = F.linear(*head).detach().requires_grad_(), 2.5
    for form in ("topk", "repeated"):
        teacher = teachers[form].probs()
        p = torch.zeros_like(z).scatter_add(-1, teacher.indices, teacher.values)
        inside = p > 0
        p = torch.where(inside, torch.where(inside, p, 1).log() / temperature, -torch.inf).softmax(-1)
        x = 0.7 * z if softcap is None else softcap * torch.tanh(0.7 * z / softcap)
        x = x / temperature
        log_q = torch.where(inside, x, -torch.inf).log_softmax(-1) if tail == "renormalize" else x.log_softmax(-1)
        exact = torch.where(inside, p * (torch.where(inside, p, 1).log() - torch.where(inside, log_q, 0)), 0).sum(-1)
        options = dict(tail=tail, temperature=temperature, softcap=softcap, logit_scale=0.7)
        close(distillation_loss(z, teachers[form], **options), exact.mean(), [z])
        close(distillation_loss(z, teachers[form], temperature_squared=True, **options),
              exact.mean() * temperature**2, [z])


def test_a_temperature_is_taken_of_a_teacher_in_the_digits_of_the_student(device):
    draw = Draw(device)
    z, ids, values = draw.normal(3, 9, dtype=torch.float64), draw.integers(9, 3, 2), draw.uniform(3, 2)
    wide = SparseTarget.from_topk(ids, values.double())
    head = [draw.normal(3, 4, dtype=torch.float64), draw.normal(9, 4, dtype=torch.float64)]
    for kind in ("forward_kl", "jsd"):
        losses = [(distillation_loss(z, teacher, kind=kind, tail="zero", temperature=2.0),
                   linear_distillation_loss(*head, teacher, kind=kind, tail="zero", temperature=2.0))
                  for teacher in (SparseTarget.from_topk(ids, values), wide)]
        for narrow, exact in zip(*losses):
            torch.testing.assert_close(narrow, exact, rtol=1e-14, atol=0)


def test_a_learned_teacher_gets_its_gradient(device):
    head, labels, teachers, _ = make(device)
    log_p = teachers["topk"].values.clone().requires_grad_()
    teacher = SparseTarget.from_topk(teachers["topk"].indices, log_p, values_are="log_probs")
    for alpha in (1.0, 0.5):
        options = dict(kind="jsd", tail="bucket", alpha=alpha)
        close(linear_distillation_loss(*head[:2], teacher, labels, **options),
              distillation_loss(F.linear(*head[:2]), teacher, labels, **options), [*head[:2], log_p])


def test_nothing_counts(device):
    """Checks that neither part computes 0 / 0."""
    head, labels, teachers, _ = make(device)
    nothing = torch.zeros(SHAPE, dtype=torch.bool, device=device)
    teacher = SparseTarget.from_topk(teachers["topk"].indices, teachers["topk"].values, values_are="log_probs",
                                     row_mask=nothing)
    loss = linear_distillation_loss(*head[:2], teacher, torch.full_like(labels, -100), alpha=0.5)
    assert loss.item() == 0
    assert all(g.eq(0).all() for g in torch.autograd.grad(loss, head[:2]))


OPTIONS = dict(kind="jsd", tail="renormalize", beta=0.4, floor=None, temperature=2.0, temperature_squared=True,
               alpha=0.3, ignore_index=-1, logit_scale=0.5, softcap=7.0, teacher_logit_scale=None, teacher_softcap=None,
               num_classes=18, reduction="sum", inplace=False, normalizer=None, group=None, vocab_start=None)


@pytest.mark.parametrize("module,function,extra", [
    (DistillationLoss, distillation_loss, {}),
    (LinearDistillationLoss, linear_distillation_loss, dict(logits_dtype=torch.float32, chunk_rows=3))],
    ids=lambda x: getattr(x, "__name__", ""))
def test_modules_are_their_functions(module, function, extra, device):
    head, labels, teachers, log_tail = make(device)
    labels = torch.where(labels == -100, -1, labels)
    names = [name for name, p in inspect.signature(function).parameters.items() if p.kind == p.KEYWORD_ONLY]
    held = {name: value for name, value in {**OPTIONS, **extra}.items() if name in names}
    assert set(held) | {"teacher_log_tail", "linear_bias", "row_mask", "row_weight"} >= set(names)
    assert set(inspect.signature(module).parameters) == set(held)
    criterion = module(**held)
    assert all(f"{name}=" in repr(criterion) for name in held if held[name] is not None)
    inputs = (F.linear(*head),) if module is DistillationLoss else head[:2]
    more = {} if module is DistillationLoss else dict(linear_bias=head[2])
    held["num_classes"] = None if len(inputs) == 1 else 19
    criterion = module(**held)
    close(criterion(*inputs, teachers["topk"], labels, **more), function(*inputs, teachers["topk"], labels, **more,
                                                                        **held), head)
    called = criterion(*inputs, teachers["topk"], labels, **more, logit_scale=2.0)
    close(called, function(*inputs, teachers["topk"], labels, **more, **{**held, "logit_scale": 2.0}), head)


@pytest.mark.parametrize("options,words", [
    (dict(alpha=0.5), ["labels must be given unless alpha is 1"]),
    (dict(alpha=1.5), ["alpha must be in [0, 1], got 1.5"]), (dict(alpha="all"), ["alpha must be a number"]),
    (dict(temperature=0.0), ["temperature must be positive, got 0.0"]),
    (dict(temperature=None), ["temperature must be a number, got None"]),
    (dict(temperature=2.0, tail="bucket"), ["tail must be 'renormalize' or 'zero' for a temperature of 2.0, got "
                                            "'bucket'"]),
    (dict(temperature=2.0), ["tail must be 'renormalize' or 'zero'", "got None, which is 'bucket'"]),
    (dict(teacher_log_tail=0.1), ["teacher_log_tail must be a tensor, got float"]),
    (dict(kind="reverse_kl", tail="zero"), ["kind='reverse_kl' does not support tail='zero'", "infinite"]),
    (dict(kind="kl"), ["kind must be one of", "did you mean 'reverse_kl' or 'forward_kl'?"]),
    (dict(beta=0.5), ["beta must be None for kind='forward_kl'", "pass kind='jsd'"]),
    (dict(tail="zero", floor=-1.0), ["floor must be None for tail='zero', got -1.0"]),
    (dict(tail="zero", teacher_log_tail=torch.zeros(SHAPE)), ["teacher_log_tail must be None for tail='zero'"]),
    (dict(teacher_softcap=3.0), ["teacher_softcap must be None for a teacher of a few classes"]),
    (dict(reduction="batchmean"), ["reduction must be 'none', 'sum' or 'mean'", "pass 'mean'"]),
], ids=str)
def test_wrong_options_are_named(options, words, device):
    head, _, teachers, _ = make(device)
    calls = [lambda: distillation_loss(F.linear(*head), teachers["topk"], **options),
             lambda: linear_distillation_loss(*head[:2], teachers["topk"], **options)]
    if options != dict(alpha=0.5) and not {"teacher_log_tail", "teacher_softcap"} & options.keys() and options != dict(
            temperature=2.0):
        calls += [lambda: DistillationLoss(**options), lambda: LinearDistillationLoss(**options)]
    for call in calls:
        assert_refused(call, *words, error=(TypeError, ValueError))


@pytest.mark.parametrize("make_teacher", [lambda z: topk_log_probs(z, IDS), lambda z: z,
                                          lambda z: (z[..., :3], torch.ones(CLASSES, 3, dtype=z.dtype))],
                         ids=["a few classes", "logits", "a head"])
def test_options_of_another_teacher_are_refused(make_teacher, device):
    """Checks that an option without a use raises an error, and that labels need a decision on their weight."""
    head, labels, _, log_tail = make(device)
    teacher, z = make_teacher(F.linear(*head).detach()), F.linear(*head)
    dense = not isinstance(teacher, SparseTarget)
    for options in (dict(tail="bucket"), dict(floor=-3.0), dict(teacher_log_tail=log_tail)) if dense else (
            dict(teacher_logit_scale=2.0), dict(teacher_softcap=3.0)):
        for call in (lambda: distillation_loss(z, teacher, **options),
                     lambda: linear_distillation_loss(*head[:2], teacher, **options)):
            assert_refused(call, f"{next(iter(options))} must be None for")
    for call in (lambda: distillation_loss(z, teacher, labels),
                 lambda: linear_distillation_loss(*head[:2], teacher, labels)):
        assert_refused(call, "alpha must be given with labels, got None", "alpha=0.5")


TEACHERS_OF_ALL = {"logits": lambda y, head: y, "a head": lambda y, head: head, "a few classes": lambda y, head:
                   topk_log_probs(y, CLASSES)}


@pytest.mark.parametrize("of", TEACHERS_OF_ALL)
@pytest.mark.parametrize("temperature, alpha", [(1.0, 1.0), (1.0, 0.4), (2.5, 1.0), (2.5, 0.4), (1.0, 0.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_teacher_gives_the_same_loss(of, temperature, alpha, reduction, device):
    """Checks teachers that have a probability of each class, on logits and on a head, with labels that ignore rows, a
    mask and weights, against the definition."""
    draw, (head, labels, _, _) = Draw(device, 3), make(device)
    hidden, weight = draw.normal(*SHAPE, 5, dtype=torch.float64), draw.normal(CLASSES, 5, dtype=torch.float64)
    y, z = hidden @ weight.mT, F.linear(*head)
    mask, by = draw.uniform(*SHAPE) > 0.3, draw.uniform(*SHAPE, dtype=torch.float64)
    log_p, log_q = ((t / temperature).log_softmax(-1) for t in (y, z))
    active = mask & (labels != -100)
    parts = [temperature ** 2 * (log_p.exp() * (log_p - log_q)).sum(-1),
             F.cross_entropy(z.movedim(-1, 1), labels, reduction="none")]
    losses = [torch.where(active, part, 0.0) * by / (active.sum() if reduction == "mean" else 1) for part in parts]
    exact = alpha * losses[0] + (1 - alpha) * losses[1]
    exact = exact if reduction == "none" else exact.sum()
    options = dict(temperature=temperature, temperature_squared=True, alpha=alpha, row_mask=mask, row_weight=by,
                   reduction=reduction, **(dict(tail="renormalize") if of == "a few classes" else {}))
    teacher = TEACHERS_OF_ALL[of](y, (hidden, weight))
    close(distillation_loss(z, teacher, labels, **options), exact, head)
    loss = linear_distillation_loss(*head[:2], teacher, labels, linear_bias=head[2], chunk_rows=3, **options)
    close(loss, exact, head)


def test_labels_that_ignore_rows_leave_no_trace_of_them(device):
    """Checks NaN in ignored rows, with every kind of teacher and of labels."""
    head, labels, _, _ = make(device)
    ignored = labels == -100
    z, y = F.linear(*head).detach(), torch.randn(*SHAPE, CLASSES, dtype=torch.float64, device=device)
    soft = SparseTarget.from_topk(labels.clamp(min=0)[..., None], None, row_mask=~ignored)
    for teacher in (y, topk_log_probs(y, IDS)):
        for of_labels in (labels, SparseTarget.from_index(labels), soft,
                          SparseTarget.from_index(labels.clamp(min=0), row_mask=~ignored)):
            for alpha in (0.5, 1.0):
                expected = distillation_loss(z[~ignored], teacher[~ignored], labels[~ignored], alpha=alpha)
                leaf = torch.where(ignored[..., None], torch.nan, z).requires_grad_()
                loss = distillation_loss(leaf, teacher, of_labels, alpha=alpha)
                torch.testing.assert_close(loss, expected)
                grad, = torch.autograd.grad(loss, leaf)
                assert (grad[ignored] == 0).all() and not grad.isnan().any()


@pytest.mark.parametrize("of", TEACHERS_OF_ALL)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hidden_states_of_ignored_rows_may_be_nan(of, reduction, device):
    (x, w, b), labels, _, _ = make(device)
    ignored, draw = labels == -100, Draw(device, 3)
    hidden, weight = draw.normal(*SHAPE, 5, dtype=torch.float64), draw.normal(CLASSES, 5, dtype=torch.float64)
    found = []
    for fill in (0.0, torch.nan):
        leaf = torch.where(ignored[..., None], fill, x.detach()).requires_grad_()
        y = torch.where(ignored[..., None], fill, hidden)
        teacher = TEACHERS_OF_ALL[of]((hidden if of == "a few classes" else y) @ weight.mT, (y, weight))
        loss = linear_distillation_loss(leaf, w, teacher, labels, linear_bias=b, alpha=0.4, reduction=reduction)
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), (leaf, w, b))))
    torch.testing.assert_close(*found)
    assert all(t.isfinite().all() for t in found[1])


@pytest.mark.parametrize("labels", [False, True])
def test_the_gradient_overwrites_the_logits(labels, device):
    head, of_rows, _, _ = make(device)
    z, y = F.linear(*head).detach(), torch.randn(*SHAPE, CLASSES, dtype=torch.float64, device=device)
    given = (of_rows,) if labels else ()
    options = dict(alpha=0.5) if labels else {}
    leaf = z.clone().requires_grad_()
    expected, = torch.autograd.grad(distillation_loss(leaf, y, *given, **options), leaf)
    for inplace in ("backward", "forward"):
        logits = leaf * 1
        found, = torch.autograd.grad(distillation_loss(logits, y, *given, inplace=inplace, **options), leaf)
        torch.testing.assert_close(found, expected)
        assert torch.equal(logits.detach(), found)
    for teacher, more in ((y, dict(temperature=2.0)), (topk_log_probs(y, IDS), {})):
        if labels:
            assert_refused(lambda: distillation_loss(leaf * 1, teacher, of_rows, alpha=0.5, inplace="forward", **more),
                           "inplace must be False for two losses")


def test_probabilities_that_sum_to_more_than_1(device):
    if device != "cpu":
        pytest.skip("values on a GPU are not read")
    head, labels, _, _ = make(device)
    teacher = SparseTarget.from_topk(labels.clamp(min=1)[..., None].expand(*SHAPE, 2) - torch.tensor([0, 1]),
                                     torch.tensor([0.9, 0.8]).expand(*SHAPE, 2))
    z = F.linear(*head)
    for call in (lambda: divergence(z, teacher), lambda: distillation_loss(z, teacher),
                 lambda: linear_distillation_loss(*head[:2], teacher), lambda: divergence(z, teacher, tail="uniform")):
        assert_refused(call, "teacher must have probabilities that sum to at most 1 in each row", "got a sum of 1.7")
    divergence(z, teacher, tail="zero"), divergence(z, teacher, tail="renormalize")


def test_the_mean_divides_by_the_rows(device):
    """Compares with F.kl_div and reduction="batchmean", which divides by the first dimension alone."""
    draw, dtype = Draw(device), torch.float64
    logits, y = draw.normal(5, CLASSES, dtype=dtype), draw.normal(5, CLASSES, dtype=dtype)
    expected = F.kl_div(logits.log_softmax(-1), y.softmax(-1), reduction="batchmean")
    torch.testing.assert_close(distillation_loss(logits, y), expected)
    torch.testing.assert_close(DistillationLoss()(logits, y), expected)


def test_log_probabilities_passed_as_probabilities(device):
    """Checks the pair of indices and log-probabilities of a user of TRL, for every tail."""
    if device != "cpu":
        pytest.skip("values on a GPU are not read")
    z, pair = torch.zeros(2, 5), (torch.tensor([[0, 1], [2, 3]]), torch.tensor([[-0.7, -1.6], [-0.2, -2.5]]))
    for tail in TAILS:
        kind = "reverse_kl" if tail == "floor" else "forward_kl"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the conversion of a pair warns
            assert_refused(lambda: distillation_loss(z, pair, kind=kind, tail=tail),
                           "teacher must have probabilities, got a negative value", "values_are='log_probs'")
