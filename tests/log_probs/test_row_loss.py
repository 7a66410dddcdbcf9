"""Compares losses of rows on a linear head with the same function of all logits: values, gradients, aux, errors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cases import FORMS, WITH_VALUES, Draw
from close import assert_bitwise_equal
from refusals import assert_refused
from sparse_ce import LogProbs, SparseTarget, linear_cross_entropy, linear_row_loss, linear_selected_log_probs
from sparse_ce.ops.head.products import HeadProducts
from sparse_ce.targets.convert import as_ids

ASKED = dict(return_log_tail=True, return_entropy=True, return_mean_logit=True, return_collision=True)


def of_all(out, target, weight):
    """Returns a loss of each row that uses every output and the target."""
    log_probs = torch.where(out.log_probs.isneginf(), 0.0, out.log_probs)
    if isinstance(target, SparseTarget) and target.form == "jagged":
        per_row = torch.stack([log_probs[b:e].square().sum() for b, e in (
            target.offsets.tolist() if target.offsets.dim() == 2
            else zip(target.offsets[:-1].tolist(), target.offsets[1:].tolist()))])
    else:
        per_row = log_probs.square() if log_probs.dim() == 1 else log_probs.square().sum(1)
    of_outputs = 0.1 * out.lse + out.log_tail.exp() + 0.3 * out.entropy - 0.2 * out.collision
    return weight * (per_row + of_outputs) + 0.01 * out.mean_logit


def example(form, device, dtype=torch.float64):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 23, draw)
    hidden = draw.normal(*case.shape, 6, dtype=dtype)
    hidden[case.ignored] = torch.nan
    return case, hidden, draw.normal(27, 6, dtype=dtype), draw.normal(27, dtype=dtype), draw.normal(
        *case.shape, dtype=dtype)


@pytest.mark.parametrize("chunk_rows", [None, 1, 5])
@pytest.mark.parametrize("options", [dict(), dict(softcap=4.0, logit_scale=0.7, normalizer=5)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_four_products(form, options, chunk_rows, device):
    case, hidden, weight, bias, by = example(form, device)
    plain = {k: v for k, v in options.items() if k != "normalizer"}
    results = []
    for three in (True, False):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias, by)]
        if three:
            loss = linear_row_loss(of_all, leaves[0], leaves[1], case.target, leaves[3], linear_bias=leaves[2],
                                   num_classes=23, chunk_rows=chunk_rows, **options, **ASKED)
        else:
            target = case.target
            rows = linear_row_loss(of_all, leaves[0], leaves[1], target, leaves[3], linear_bias=leaves[2],
                                   num_classes=23, reduction="none", **plain, **ASKED)
            assert rows.shape == case.shape and (rows[case.ignored] == 0).all()
            loss = rows.sum() / options.get("normalizer", (~case.ignored).sum())
        results.append((loss, *torch.autograd.grad(3 * loss, leaves)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
    assert (results[0][1][case.ignored] == 0).all() and (results[0][4][case.ignored] == 0).all()


def test_the_cross_entropy_is_a_case_of_it(device):
    draw = Draw(device)
    hidden, head, labels = draw.normal(12, 6), draw.normal(30, 6), draw.integers(30, 12)
    labels[3] = -100
    results = []
    for ours in (True, False):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        loss = (linear_row_loss(lambda out, target: -out.log_probs, *leaves, labels, chunk_rows=5) if ours
                else linear_cross_entropy(*leaves, labels))
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_sixteen_bits_in_chunks_are_near_to_float64(mixed, dtype, device):
    draw = Draw(device)
    hidden, head = draw.normal(40, 16).to(dtype), draw.normal(300, 16).to(torch.float32 if mixed else dtype)
    labels = draw.integers(300, 40)
    results = []
    for wide in (False, True):
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (hidden, head)]
        loss = linear_row_loss(lambda out, _: -out.log_probs - 0.1 * out.entropy, *leaves, labels, return_entropy=True,
                               chunk_rows=7)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for ours, exact in zip(*results):
        assert (ours.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_the_logits_are_made_once(device, monkeypatch):
    """Checks that backward does not recompute them, except for losses of rows."""
    draw = Draw(device)
    hidden, head, labels = draw.normal(9, 4).requires_grad_(), draw.normal(11, 4), draw.integers(11, 9)
    made = []
    right = HeadProducts.logits
    monkeypatch.setattr(HeadProducts, "logits", lambda self, input, *of: made.append(len(input)) or right(self, input,
                                                                                                          *of))
    for _ in range(2):
        loss = linear_row_loss(lambda out, _: -out.log_probs, hidden, head, labels, chunk_rows=4)
        assert made == [4, 4, 1]
        loss.backward()
        assert made == [4, 4, 1]
        made.clear()
    linear_row_loss(lambda out, _: -out.log_probs, hidden, head, labels, reduction="none").sum().backward()
    assert made == [9, 9]


def test_aux_comes_back_in_the_leading_shape(device):
    case, hidden, weight, bias, by = example("labels-int64", device)

    def fn(out, target, by):
        return -by * out.log_probs, {"right": out.argmax == target, "entropy": out.entropy}

    for requires_grad in (True, False):
        leaf = hidden.clone().requires_grad_(requires_grad)
        loss, aux = linear_row_loss(fn, leaf, weight[:23], case.target, by, has_aux=True, return_argmax=True,
                                    return_entropy=True, chunk_rows=5)
        z = torch.where(case.ignored[..., None], 0.0, hidden) @ weight[:23].T
        assert torch.equal(aux["right"], (z.argmax(-1) == case.target) & ~case.ignored)
        log_probs = z.log_softmax(-1)
        entropy = torch.where(case.ignored, 0.0, -(log_probs.exp() * log_probs).sum(-1))
        torch.testing.assert_close(aux["entropy"], entropy)
        assert not aux["entropy"].requires_grad and loss.requires_grad == requires_grad


@pytest.mark.parametrize("wanted", [tuple(i == j for j in range(4)) for i in range(4)], ids=str)
def test_any_one_gradient(wanted, device):
    case, hidden, weight, bias, by = example("topk-ids", device)
    grads = []
    for reduction in ("mean", "none"):
        leaves = [t.clone().requires_grad_(want) for t, want in zip((hidden, weight, bias, by), wanted)]
        loss = linear_row_loss(of_all, leaves[0], leaves[1], case.target, leaves[3], linear_bias=leaves[2],
                               num_classes=23, chunk_rows=5, reduction=reduction, **ASKED)
        loss = loss if reduction == "mean" else loss.sum() / (~case.ignored).sum()
        grads.append(torch.autograd.grad(loss, leaves[wanted.index(True)])[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", WITH_VALUES)
def test_values_of_targets_have_gradients(form, frozen, device):
    case, hidden, weight, *_ = example(form, device)

    def cross_entropy(out, target, teacher):
        weights = (target.values + 2 * teacher.values).exp()
        terms = torch.where(out.log_probs.isneginf(), 0.0, out.log_probs) * weights
        return (terms.sum(1) if target.offsets is None
                else terms.new_zeros(len(target)).index_add(0, target.row_indices(), terms))

    grads = []
    for reduction in ("sum", "none"):
        leaves = [case.values.clone().requires_grad_(), (case.values / 2).requires_grad_(),
                  hidden.clone().requires_grad_(not frozen)]
        teacher = as_ids(case.build(leaves[1]), torch.Size((*case.shape, 23)))
        loss = linear_row_loss(cross_entropy, leaves[2], weight[:23], case.build(leaves[0]), teacher, chunk_rows=5,
                               reduction=reduction).sum()
        grads.append(torch.autograd.grad(loss, leaves[:3 - frozen], retain_graph=True))
        torch.testing.assert_close(torch.autograd.grad(loss, leaves[:3 - frozen]), grads[0])  # the second backward
    torch.testing.assert_close(*grads)
    assert grads[0][0].any() and grads[0][1].any()


@pytest.mark.parametrize("form", ["labels-target", "topk-ids", "tuple", "jagged"])
def test_another_ignore_index(form, device):
    """Checks that -100 still means padding in a SparseTarget, for the function too."""
    draw = Draw(device)
    case = FORMS[form]((3, 4), 23, draw, 5)
    hidden, head = draw.normal(*case.shape, 6), draw.normal(23, 6)
    target = case.target
    if form == "topk-ids":  # two kinds of padding mark
        target = SparseTarget.from_topk(torch.where(target.indices == 3, -100, target.indices), None)

    def fn(out, given):
        return fn.of_rows(torch.where(out.log_probs.isneginf(), 0.0, out.log_probs), given)

    def of_rows(log_probs, given):
        if form != "jagged":
            return log_probs if log_probs.dim() == 1 else log_probs.sum(1)
        return torch.stack([log_probs[b:e].sum() for b, e in given.offsets.tolist()] if given.offsets.dim() == 2 else [
            log_probs[b:e].sum() for b, e in zip(given.offsets[:-1].tolist(), given.offsets[1:].tolist())])

    fn.of_rows = of_rows
    of_all = linear_selected_log_probs(hidden, head, target, ignore_index=5)
    flat = LogProbs(of_all.log_probs if form == "jagged" else of_all.log_probs.flatten(0, 1), of_all.lse)
    expected = fn(flat, target)
    results = [linear_row_loss(fn, hidden.clone().requires_grad_(grad), head, target, ignore_index=5, chunk_rows=5,
                               reduction="sum") for grad in (True, False)]
    for loss in results:
        torch.testing.assert_close(loss.detach(), expected.sum())


def test_the_function_may_write_into_what_it_is_given(device):
    draw = Draw(device)
    hidden, head, ids = draw.normal(9, 4).requires_grad_(), draw.normal(11, 4), draw.integers(11, 9, 3)

    def clamped(log_probs, ids):
        return log_probs.lse.mul_(2.0) - log_probs.log_probs.clamp_(max=-2.0).sum(1)

    found = [torch.autograd.grad(linear_row_loss(clamped, hidden, head, ids, reduction=reduction)
                                 .sum(), hidden)[0] for reduction in ("sum", "none")]  # three matrix products and four
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("form", ["labels-int64", "topk-target", "jagged-ranges"])
def test_what_is_the_callers_stays_as_it_was(form, reduction, device):
    case, hidden, weight, _, by = example(form, device)

    def spoiling(out, target, by, teacher):
        loss = (by + 0) * out.lse
        for t in (by, target, teacher):
            for part in [t] if isinstance(t, torch.Tensor) else [t.indices, t.values]:
                part.mul_(0)
        return loss

    teacher = SparseTarget.from_topk(case.labels[..., None], by[..., None]) if case.labels is not None else case.target
    given = [by, *([case.labels] if case.labels is not None else [case.target.indices, case.values]), teacher.indices,
             teacher.values]
    before = [t.clone() for t in given]
    # With and without requires_grad for the row argument.
    for leaf in (hidden.requires_grad_(), by.clone().requires_grad_()):
        loss = linear_row_loss(spoiling, hidden, weight[:23], case.target, leaf if leaf.shape == by.shape else by,
                               teacher, reduction=reduction).sum()
        assert loss != 0 and torch.autograd.grad(loss, leaf)[0].any()
    for t, same in zip(given, before):
        assert_bitwise_equal(t, same)


def test_nothing_counts(device):
    hidden = torch.full((3, 4), torch.nan, device=device, requires_grad=True)
    head = torch.randn(7, 4, device=device, requires_grad=True)
    loss = linear_row_loss(lambda out, _: -out.log_probs, hidden, head, torch.full((3,), -100, device=device))
    grads = torch.autograd.grad(loss, [hidden, head])
    assert loss == 0 and all((g == 0).all() for g in grads)


def test_what_requires_grad_may_not_come_through_the_closure(device):
    hidden, head = torch.randn(3, 4, device=device, requires_grad=True), torch.randn(7, 4, device=device)
    labels, learned = torch.tensor([1, 2, 3], device=device), torch.ones((), device=device, requires_grad=True)
    with pytest.raises(ValueError, match="sparse_ce: fn must receive tensors that require grad as row arguments"):
        linear_row_loss(lambda out, _: -out.log_probs * learned, hidden, head, labels)
    with pytest.raises(ValueError, match=r"sparse_ce: fn must return losses of shape \[3\], one per row, got \[\]"):
        linear_row_loss(lambda out, _: -out.log_probs.sum(), hidden, head, labels)
    with pytest.raises(ValueError, match=r"sparse_ce: row_args must be of the leading shape \[3\], got \[4\]"):
        linear_row_loss(lambda out, _, by: -out.log_probs, hidden, head, labels, torch.ones(4, device=device))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_errors_about_what_fn_returns_name_the_fix(reduction, device):
    hidden, head = torch.randn(6, 4, device=device, requires_grad=True), torch.randn(7, 4, device=device)
    labels, by = torch.tensor([1, 2, 3, 0, 4, 5], device=device), torch.ones(6, 1, device=device)

    def call(fn, *row_args, leading=(6,)):
        return lambda: linear_row_loss(fn, hidden.view(*leading, 4), head, labels.view(leading), *row_args,
                                       reduction=reduction)

    with_aux = lambda out, _: (-out.log_probs, {"lse": out.lse})
    assert_refused(call(with_aux), "fn must return losses", "got tuple; pass has_aux=True")
    weighted = lambda out, _, by: by * out.log_probs
    assert_refused(call(weighted, by), "got [6, 6]; pass row_args of shape (N, 1)", "as (N,)")
    assert_refused(call(weighted, by[:3], leading=(3, 2)), "leading shape [3, 2], got [3, 1]; expand it")
    call(weighted, by[:3].expand(3, 2), leading=(3, 2))()
    call(lambda out, _, by: by[:, 0] * out.log_probs, by)()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_without_a_reduction_it_may_and_has_its_gradient(checkpointed, device):
    draw = Draw(device)
    hidden, head, labels = draw.normal(9, 4).requires_grad_(), draw.normal(11, 4), draw.integers(11, 9)
    labels[3] = -100
    learned, grad_output = draw.normal(4).requires_grad_(), draw.normal(9)

    def f(ours, hidden):
        def fn(out, _, x):
            return -out.log_probs * (x @ learned).exp() + learned.sum()

        if ours:
            return linear_row_loss(fn, hidden, head, labels, hidden, chunk_rows=2, reduction="none")
        counts = labels != -100
        chosen = (hidden @ head.T).log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return torch.where(counts, fn(LogProbs(chosen, chosen), labels, hidden), 0.0)

    call = functools.partial(checkpoint, use_reentrant=False) if checkpointed else lambda f, *given: f(*given)
    ours, expected = (torch.autograd.grad(call(f, of_ours, hidden), [hidden, learned], grad_output)
                      for of_ours in (True, False))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_output_that_was_not_asked_for_is_named(device):
    hidden, head = torch.randn(3, 4, device=device, requires_grad=True), torch.randn(7, 4, device=device)
    labels = torch.tensor([1, 2, 3], device=device)
    for reduction in ("mean", "none"):
        with pytest.raises(AttributeError, match="log_tail must be requested, got a LogProbs.*return_log_tail=True"):
            linear_row_loss(lambda out, _: out.log_tail, hidden, head, labels, return_entropy=True, reduction=reduction)
        with pytest.raises(AttributeError, match="return_entropy=True"):
            linear_row_loss(lambda out, _: (out.lse, {"entropy": out.entropy}), hidden, head, labels, has_aux=True,
                            reduction=reduction)
        with pytest.raises(ValueError, match="one per row, got NoneType$"):
            linear_row_loss(lambda out, _: None, hidden, head, labels, reduction=reduction)


def test_31_a_policy_gradient_by_rows_equals_that_of_all_logits(device):
    """Checks clipped ratios, a reference policy and an entropy bonus, as in GRPO."""
    draw = Draw(device)
    hidden, head, actions = draw.normal(2, 7, 6), draw.normal(40, 6), draw.integers(40, 2, 7)
    actions[0, 4:] = -100
    old, ref = -draw.uniform(2, 7, low=1, high=6), -draw.uniform(2, 7, low=1, high=6)
    advantages = draw.normal(2, 7)

    def grpo(out, _, old, ref, advantages):
        ratio = (out.log_probs - old).exp()
        clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        gap = ref - out.log_probs
        return -clipped + 0.04 * (gap.exp() - gap - 1) - 0.01 * out.entropy

    results = []
    for ours in (True, False):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        if ours:
            loss = linear_row_loss(grpo, *leaves, actions, old, ref, advantages, return_entropy=True, chunk_rows=5)
        else:
            counts = actions != -100
            log_probs = F.linear(*leaves).log_softmax(-1)
            chosen = log_probs.gather(-1, actions.clamp(min=0)[..., None])[..., 0]

            class Out:
                pass
            out = Out()
            out.log_probs, out.entropy = chosen, -(log_probs.exp() * log_probs).sum(-1)
            loss = torch.where(counts, grpo(out, None, old, ref, advantages), 0.0).sum() / counts.sum()
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert linear_selected_log_probs(hidden, head, actions).log_probs.shape == (2, 7)


def test_the_same_bits_from_run_to_run(device):
    draw = Draw(device)
    hidden, head, labels = draw.normal(30, 8), draw.normal(50, 8), draw.integers(50, 30)
    grads = []
    for _ in range(3):
        leaf = head.clone().requires_grad_()
        linear_row_loss(lambda out, _: -out.log_probs, hidden, leaf, labels, chunk_rows=8).backward()
        grads.append(leaf.grad)
    assert_bitwise_equal(grads[0], grads[1])
    assert_bitwise_equal(grads[0], grads[2])


# --------------------------------------------------------------------------------------------------- functions of rows

def with_lse(out, target):
    return -out.log_probs, {"lse": out.lse}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [0, 2])
def test_aux_has_its_names_where_nothing_counts(rows, reduction, device):
    hidden = torch.zeros(rows, 3, requires_grad=True, device=device)
    labels = torch.full((rows,), -100, device=device)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            loss, aux = linear_row_loss(with_lse, hidden, torch.ones(7, 3, device=device), labels, has_aux=True,
                                        reduction=reduction)
        assert not loss.any() and list(aux) == ["lse"]
        assert_bitwise_equal(aux["lse"], torch.zeros(rows, device=device))
        if grad:
            assert_bitwise_equal(torch.autograd.grad(loss.sum(), hidden)[0], torch.zeros_like(hidden))


@pytest.mark.parametrize("fn, message", [
    (lambda out, target: out.lse, "aux a dict of tensors, if has_aux is True, got Tensor"),
    (lambda out, target: (out.lse, None), "aux a dict of tensors, if has_aux is True, got Tensor, NoneType"),
    (lambda out, target: (out.lse, {"a": 1.0}), r"aux tensors of shape \[2\], got float for 'a'"),
    (lambda out, target: (out.lse, {"a": out.lse.sum()}), r"aux tensors of shape \[2\], got \[\] for 'a'")])
def test_what_is_not_losses_and_aux_is_named(fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        linear_row_loss(fn, torch.zeros(2, 3), torch.zeros(7, 3), torch.tensor([1, 2]), has_aux=True)


@pytest.mark.parametrize("of_odd", [{"odd": torch.float32}, {"even": torch.float64}, {}], ids=str)
def test_aux_is_alike_in_every_chunk(of_odd, device):
    """Guards against uninitialized memory if a name is missing in a chunk, and against lost digits if a dtype is
    narrower."""
    def fn(out, target):
        told = {"even": torch.float32} if bool((target % 2 == 0).all()) else of_odd
        return -out.log_probs, {name: out.lse.to(dtype) for name, dtype in told.items()}

    hidden, weight = torch.zeros(4, 3, device=device, requires_grad=True), torch.zeros(7, 3, device=device)
    for labels in ([2, 4, 1, 3], [1, 3, 2, 4]):
        with pytest.raises(ValueError, match="sparse_ce: fn must return aux with the same names and dtypes in each "):
            linear_row_loss(fn, hidden, weight, torch.tensor(labels, device=device), has_aux=True, chunk_rows=2)


def test_what_is_no_function_is_named():
    with pytest.raises(TypeError, match="sparse_ce: fn must be a function of log-probabilities and target, got 3"):
        linear_row_loss(3, torch.zeros(2, 3), torch.zeros(7, 3), torch.tensor([1, 2]))


def test_row_arguments_that_are_wider_than_the_head(device):
    draw = Draw(device)
    hidden, weight = draw.normal(4, 3).requires_grad_(), draw.normal(9, 3)
    by, labels = draw.normal(4, dtype=torch.float64).requires_grad_(), draw.integers(9, 4)
    loss = linear_row_loss(lambda out, labels, by: -out.log_probs * by, hidden, weight, labels, by)
    ours = torch.autograd.grad(0.3 * loss, (hidden, by))
    rows = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")
    for grad, expected in zip(ours, torch.autograd.grad(0.3 * (rows * by).mean(), (hidden, by))):
        torch.testing.assert_close(grad, expected)


def test_sets_of_any_length_of_no_rows(device):
    def of_sets(out, target):
        terms = torch.where(out.log_probs.isneginf(), 0.0, out.log_probs)
        return -terms.new_zeros(len(target)).index_add(0, target.row_indices(), terms)

    ids = SparseTarget.from_jagged(torch.tensor([1, 2, 3]), None, torch.tensor([0, 2, 3])).to(device)[:0]
    for reduction in ("mean", "none"):
        hidden = torch.zeros(0, 3, requires_grad=True, device=device)
        assert linear_row_loss(of_sets, hidden, torch.zeros(7, 3, device=device), ids, reduction=reduction).sum() == 0
