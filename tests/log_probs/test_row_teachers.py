"""Compares losses of rows that use divergences from a teacher with formulas on all logits in float64: values,
gradients, published losses of draft models, products, memory, errors."""

import pytest
import torch
import torch.nn.functional as F

import recorded_memory
import sparse_ce
from cases import Draw, slow
from close import assert_bitwise_equal
from refusals import assert_refused
from sparse_ce import linear_row_loss
from sparse_ce.ops.head import comparison
from sparse_ce.ops.head.products import HeadProducts

FIELDS = "forward_kl", "reverse_kl", "jsd", "tv"
IGNORED = -100
VOCAB, PADDED = 23, 27


def flags(*fields):
    return {f"return_{name}": True for name in fields}


class Rows:
    """Holds what ``fn`` receives, for all rows, from autograd on the logits z of the student and y of the teacher."""

    def __init__(self, z, y, labels, beta=0.5):
        log_q, log_p = z.log_softmax(-1), y.log_softmax(-1)
        q, p = log_q.exp(), log_p.exp()
        log_m = (beta * p + (1 - beta) * q).log()
        self.forward_kl = (p * (log_p - log_q)).sum(-1)
        self.reverse_kl = (q * (log_q - log_p)).sum(-1)
        self.jsd = (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)
        self.tv = 0.5 * (p - q).abs().sum(-1)
        self.lse, self.entropy = z.logsumexp(-1), -(q * log_q).sum(-1)
        self.log_probs = log_q.gather(-1, labels[..., None])[..., 0]


class Problem:
    """Holds heads of different widths with padded classes of NaN, and rows of which some are ignored and NaN."""

    def __init__(self, device, rows=11, dtype=torch.float64, teacher_dtype=None, padded=True):
        draw = Draw(device)
        teacher_dtype = teacher_dtype or dtype
        vocab = PADDED if padded else VOCAB
        self.hidden, self.weight, self.bias = (draw.normal(*s).to(dtype) for s in ((rows, 6), (vocab, 6), (vocab,)))
        self.teacher = [draw.normal(*s).to(teacher_dtype) for s in ((rows, 9), (vocab, 9))]
        self.teacher_bias = draw.normal(vocab).to(teacher_dtype)
        self.labels = draw.integers(VOCAB, rows)
        self.by = draw.normal(rows).to(dtype)
        self.labels[[2, 7]] = IGNORED
        self.active = self.labels != IGNORED
        self.hidden[~self.active], self.teacher[0][~self.active] = torch.nan, torch.nan
        if padded:
            self.weight[VOCAB:], self.teacher[1][VOCAB:] = torch.nan, torch.nan

    def leaves(self):
        return [t.clone().requires_grad_() for t in (self.hidden, self.weight, self.bias, self.by)]

    def ours(self, fn, leaves, **options):
        hidden, weight, bias, by = leaves
        return linear_row_loss(fn, hidden, weight, self.labels, by, linear_bias=bias,
                               teacher=(*self.teacher, self.teacher_bias), num_classes=VOCAB, **options)

    def logits(self, hidden, weight, bias, softcap=None, scale=1.0):
        hidden, weight, bias = (t.double() for t in (hidden[self.active], weight[:VOCAB], bias[:VOCAB]))
        z = F.linear(hidden, weight, bias) * scale
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    def exact(self, fn, leaves, reduction="mean", beta=0.5, softcap=None, teacher_softcap=None, logit_scale=1.0,
              teacher_logit_scale=1.0):
        def of(scale):
            return scale[self.active, None].double() if isinstance(scale, torch.Tensor) else scale

        z = self.logits(*leaves[:3], softcap, of(logit_scale))
        y = self.logits(*self.teacher, self.teacher_bias, teacher_softcap, of(teacher_logit_scale))
        labels = self.labels[self.active]
        rows = fn(Rows(z, y, labels, beta), labels, leaves[3][self.active].double())
        if reduction == "none":
            return rows.new_zeros(len(self.labels)).index_put((self.active.nonzero()[:, 0],), rows)
        return rows.sum() if reduction == "sum" else rows.mean()


def compare(problem, fn, options, plain, rtol=1e-9):
    """Checks value and gradients of a loss times 3; ``plain`` are the options without those of the computation."""
    results = []
    for of in (lambda leaves: problem.ours(fn, leaves, **options, **plain),
               lambda leaves: problem.exact(fn, leaves, **plain)):
        leaves = problem.leaves()
        loss = of(leaves)
        results.append((loss, *torch.autograd.grad(3 * loss.sum(), leaves, allow_unused=True)))
    for ours, exact in zip(*results):
        exact = None if exact is None else exact.nan_to_num()
        if exact is None or not exact.any():
            assert ours is None or not ours.any()
        else:
            assert (ours.double() - exact).abs().max() <= rtol * exact.abs().max()
    gradient = results[0][1]
    assert gradient is None or (gradient[~problem.active] == 0).all()


def used(fields):
    """Returns a loss that weights each of ``fields`` differently."""
    def fn(out, labels, by):
        return by * sum((i + 1.0) * getattr(out, name) for i, name in enumerate(fields))
    return fn


def mixed(fields):
    """Returns a loss that also has gradients for log-probabilities, lse and entropy."""
    def fn(out, labels, by):
        return used(fields)(out, labels, by) - out.log_probs + 0.1 * out.lse.square() + 0.3 * out.entropy
    return fn


SCALES = dict(softcap=4.0, teacher_softcap=3.0, logit_scale=0.7, teacher_logit_scale=1.3)


@pytest.mark.parametrize("chunk_rows", [4, *slow(None, 1)])
@pytest.mark.parametrize("plain", [dict(), SCALES, dict(reduction="sum"), dict(SCALES, reduction="none")], ids=str)
@pytest.mark.parametrize("kind", [used, mixed])
@pytest.mark.parametrize("fields", [(name,) for name in FIELDS] + [("reverse_kl", "tv"), FIELDS], ids=str)
def test_values_and_gradients(fields, kind, plain, chunk_rows, device):
    if plain and "jsd" in fields:
        plain = dict(plain, beta=0.3)
    compare(Problem(device), kind(fields), dict(chunk_rows=chunk_rows, return_entropy=True, **flags(*fields)), plain)


def test_a_scale_of_each_row(device):
    draw = Draw(device, 1)
    plain = dict(logit_scale=draw.uniform(11, low=0.5, high=2, dtype=torch.float64),
                 teacher_logit_scale=draw.uniform(11, low=0.5, high=2, dtype=torch.float64))
    compare(Problem(device), mixed(FIELDS), dict(chunk_rows=4, return_entropy=True, **flags(*FIELDS)), plain)


def test_rows_without_an_ignored_one(device):
    problem = Problem(device)
    problem.labels[~problem.active] = 1
    for t in (problem.hidden, problem.teacher[0]):
        t[~problem.active] = 0.5
    problem.active = problem.labels != IGNORED
    compare(problem, mixed(FIELDS), dict(chunk_rows=4, return_entropy=True, **flags(*FIELDS)), {})


@pytest.mark.parametrize("kind", [used, mixed])
@pytest.mark.parametrize("dtype, teacher_dtype, logits_dtype", [
    (torch.bfloat16, torch.bfloat16, None), (torch.bfloat16, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16, None)], ids=str)
def test_sixteen_bits(dtype, teacher_dtype, logits_dtype, kind, device):
    """Checks dtypes of a teacher whose logits the gradient can overwrite, and others."""
    problem = Problem(device, dtype=dtype, teacher_dtype=teacher_dtype)
    compare(problem, kind(FIELDS), dict(chunk_rows=4, return_entropy=True, logits_dtype=logits_dtype, **flags(*FIELDS)),
            {}, rtol=16 * torch.finfo(torch.bfloat16).eps)


def test_a_teacher_of_more_digits(device):
    """Checks that no gradient is rounded to the dtype of the teacher."""
    problem = Problem(device, dtype=torch.float64, teacher_dtype=torch.float32)
    problem.teacher = [t.bfloat16().float() for t in problem.teacher]
    leaves = [problem.leaves() for _ in range(2)]
    grads = []
    for of_one, teacher_dtype in zip(leaves, (torch.float32, torch.float64)):
        problem.teacher = [t.to(teacher_dtype) for t in problem.teacher]
        problem.teacher_bias = problem.teacher_bias.to(teacher_dtype)
        loss = problem.ours(mixed(FIELDS), of_one, return_entropy=True, chunk_rows=4, **flags(*FIELDS))
        grads.append(torch.autograd.grad(loss, of_one))
    for narrow, wide in zip(*grads):
        error = (narrow - wide).abs().max() / wide.abs().max()
        assert error < 1e-6  # the teacher's logits are rounded to float32
    rounded = grads[0][1][:VOCAB]
    assert (rounded.float().double() != rounded).any()


# ----------------------------------------------------------------------------------------------------- published losses

def lk(out, labels, by):
    """Computes the LK loss of draft models, whose share of KL falls as more drafts are accepted."""
    share = (-3.0 * (1 - out.tv)).exp().detach()
    return share * out.forward_kl + (1 - share) * out.tv


def acceptance(out, labels, by):
    return -(1 - out.tv).log()


def dpace(out, labels, by):
    """Computes a cross entropy whose weight contains the acceptance rate of the row, without a gradient."""
    return -((1 - out.tv) * by.exp()).detach() * out.log_probs


def penalized(out, labels, by):
    """Computes a clipped policy gradient with a KL penalty."""
    ratio = (out.log_probs - out.log_probs.detach() + 0.1 * by.detach()).exp()
    return -torch.minimum(ratio * by, ratio.clamp(0.8, 1.2) * by) + 0.05 * out.reverse_kl - 0.01 * out.entropy


def weights_alone(out, labels, by):
    """Computes a loss whose gradient for the head is 0."""
    return by * (1 - out.tv).detach()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("fn, fields", [(weights_alone, ("tv",)), (lk, ("forward_kl", "tv")), (acceptance, ("tv",)),
                                        (dpace, ("tv",)), (penalized, ("reverse_kl",))])
def test_losses_of_draft_models(fn, fields, reduction, device):
    compare(Problem(device), fn, dict(chunk_rows=4, return_entropy=True, **flags(*fields)), dict(reduction=reduction))


def test_a_teachers_class_of_probability_0(device):
    """Checks that the infinite reverse KL has no effect on losses that do not use it."""
    problem = Problem(device)
    problem.teacher_bias[3] = -torch.inf
    leaves = problem.leaves()
    loss = problem.ours(lambda out, *_: out.forward_kl.detach() + out.tv + 0.0 * out.lse, leaves,
                        **flags(*FIELDS), chunk_rows=4)
    gradient = torch.autograd.grad(loss, leaves[:3])
    z, y = problem.logits(*problem.leaves()[:3]), problem.logits(*problem.teacher, problem.teacher_bias)
    p = y.softmax(-1)
    expected = (torch.special.xlogy(p, p) - p * z.log_softmax(-1)).sum(-1) + 0.5 * (p - z.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(loss, expected.mean())
    assert all(g[:VOCAB].isfinite().all() for g in gradient)
    assert problem.ours(lambda out, *_: out.reverse_kl, problem.leaves(), **flags("reverse_kl")).isposinf()


# ------------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_a_frozen_head_and_a_second_backward(frozen, device):
    problem = Problem(device)
    grads = []
    for reduction in ("mean", "none"):
        leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(map(torch.Tensor.detach, problem.leaves()))]
        needed = [t for t in leaves if t.requires_grad]
        loss = problem.ours(mixed(FIELDS), leaves, reduction=reduction, return_entropy=True, chunk_rows=4,
                            **flags(*FIELDS))
        loss = loss if reduction == "mean" else loss.sum() / problem.active.sum()
        grads.append(torch.autograd.grad(loss, needed, retain_graph=True))
        for first, second in zip(grads[-1], torch.autograd.grad(2 * loss, needed)):
            torch.testing.assert_close(2 * first, second)
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", [used, mixed])
def test_gradients_that_are_differentiated_or_batched(kind, reduction, device):
    problem, results = Problem(device, padded=False), []
    for of in (lambda fn, leaves: problem.ours(fn, leaves, return_entropy=True, chunk_rows=4, reduction=reduction,
                                               **flags(*FIELDS)),
               lambda fn, leaves: problem.exact(fn, leaves, reduction)):
        leaves = problem.leaves()
        loss = 3 * of(kind(FIELDS), leaves)
        several = torch.eye(loss.numel(), dtype=loss.dtype, device=device).reshape(-1, *loss.shape)
        batched = torch.autograd.grad(loss, leaves, several, retain_graph=True, is_grads_batched=True)
        grads = torch.autograd.grad(loss.sum(), leaves, create_graph=True)
        again = torch.autograd.grad(sum(g.nan_to_num().square().sum() for g in grads), leaves)
        results.append([*batched, *grads, *again])
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact.nan_to_num(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tensors_that_depend_on_the_weight(reduction, device):
    """Checks gradients of gradients of a tied head, whose parts must not count twice."""
    draw = Draw(device)
    weight = draw.normal(12, 4, dtype=torch.float64).requires_grad_()
    ids, labels = draw.integers(12, 6), draw.integers(12, 6)
    teacher = draw.normal(6, 5, dtype=torch.float64), draw.normal(12, 5, dtype=torch.float64)
    by = draw.normal(6, dtype=torch.float64)

    def fn(out, _, a, b):
        return a * out.jsd - b * out.log_probs

    def ours(hidden, bias, *args):
        return linear_row_loss(fn, hidden, weight, labels, *args, linear_bias=bias, teacher=teacher,
                               reduction=reduction, return_jsd=True).sum()

    def plain(hidden, bias, *args):
        losses = fn(Rows(hidden @ weight.T + bias, teacher[0] @ teacher[1].T, labels), labels, *args)
        return losses.mean() if reduction == "mean" else losses.sum()

    results = []
    for loss in (ours, plain):
        bias = weight.sum(1)
        by_bias = by * bias[labels]
        gradient, = torch.autograd.grad(loss(weight[ids].tanh(), bias, by_bias, by_bias.cos()), weight,
                                        create_graph=True)
        results.append([gradient, *torch.autograd.grad(gradient.square().sum(), weight)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("changed", ["teacher_logit_scale", "logit_scale", "labels"])
def test_an_argument_that_changes_before_backward(changed, reduction, device):
    problem = Problem(device)
    problem.labels[~problem.active] = 1
    problem.hidden, problem.teacher[0] = problem.hidden.nan_to_num(), problem.teacher[0].nan_to_num()
    scales = {name: torch.tensor(0.7, dtype=torch.float64, device=device) for name in ("logit_scale",
                                                                                      "teacher_logit_scale")}
    leaves = problem.leaves()
    loss = problem.ours(mixed(FIELDS), leaves, reduction=reduction, return_entropy=True, **scales,
                        **flags(*FIELDS)).sum()
    torch.autograd.grad(loss, leaves, retain_graph=True)
    {**scales, "labels": problem.labels}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves)


def test_a_wrong_label_is_found_in_its_row(device):
    if device != "cpu":
        pytest.skip("a GPU does not read labels")
    problem = Problem(device)
    problem.labels[8] = VOCAB
    for reduction in ("mean", "none"):
        assert_refused(lambda: problem.ours(used(FIELDS), problem.leaves(), reduction=reduction, chunk_rows=3,
                                            **flags(*FIELDS)), "in row 8", error=RuntimeError)


def test_rows_of_several_classes(device):
    """Checks padded and jagged targets, whose losses are of each row."""
    problem, draw = Problem(device), Draw(device, 1)
    ids, counts = draw.integers(VOCAB, 11, 3), torch.tensor([3, 0, 2, 1, 3, 3, 1, 0, 2, 3, 1], device=device)
    problem.hidden[~problem.active], problem.teacher[0][~problem.active] = 0.5, 0.5
    present = torch.arange(3, device=device) < counts[:, None]
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    jagged = sparse_ce.SparseTarget.from_jagged(ids[present], None, offsets)
    for target in (sparse_ce.SparseTarget.from_topk(ids, None), jagged):
        grads = []
        for reduction in ("sum", "none"):
            leaves = problem.leaves()

            def fn(out, target, by):
                log_probs = out.log_probs
                if log_probs.dim() == 1:
                    log_probs = log_probs.new_zeros(len(by)).index_add(0, target.row_indices(), log_probs)
                else:
                    log_probs = log_probs.sum(-1)
                return by * (out.jsd - log_probs + 0.3 * out.tv * out.entropy)

            problem.labels = target
            loss = problem.ours(fn, leaves, return_entropy=True, chunk_rows=4, reduction=reduction,
                                **flags("jsd", "tv")).sum()
            grads.append([loss, *torch.autograd.grad(loss, leaves)])
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_weight_that_both_models_share(reduction, device):
    """Checks that in self-distillation the weight gets the student's gradient."""
    draw = Draw(device)
    hidden, other = draw.normal(5, 6, dtype=torch.float64), draw.normal(5, 6, dtype=torch.float64)
    weight = draw.normal(12, 6, dtype=torch.float64).requires_grad_()
    labels = draw.integers(12, 5)
    loss = linear_row_loss(lambda out, _: out.jsd - out.log_probs, hidden, weight, labels, teacher=(other, weight),
                           return_jsd=True, reduction=reduction, chunk_rows=2)
    rows = Rows(hidden @ weight.T, other @ weight.detach().T, labels)
    expected, = torch.autograd.grad((rows.jsd - rows.log_probs).sum(), weight)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), weight)[0], expected / (5 if reduction == "mean" else 1))


@pytest.mark.parametrize("grad", [True, False])
def test_aux_and_a_function_that_writes_into_its_arguments(grad, device):
    problem = Problem(device)

    def fn(out, labels, by):
        aux = {"acceptance": 1 - out.tv}
        return out.tv.mul_(2.0) + out.jsd, aux

    leaves = problem.leaves() if grad else [t.detach() for t in problem.leaves()]
    loss, aux = problem.ours(fn, leaves, has_aux=True, chunk_rows=4, **flags("tv", "jsd"))
    expected = problem.exact(lambda out, *_: 1 - out.tv, problem.leaves(), "none").detach()
    torch.testing.assert_close(aux["acceptance"], expected)
    torch.testing.assert_close(loss.detach(), problem.exact(lambda out, *_: 2 * out.tv + out.jsd,
                                                            problem.leaves()).detach())
    if grad:
        exact = problem.leaves()
        problem.exact(lambda out, *_: 2 * out.tv + out.jsd, exact).backward()
        torch.testing.assert_close(torch.autograd.grad(loss, leaves[0])[0], exact[0].grad.nan_to_num())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_active_row(reduction, device):
    problem = Problem(device)
    problem.labels.fill_(IGNORED)
    leaves = problem.leaves()
    loss, aux = problem.ours(lambda out, *_: (out.tv, {"tv": out.tv}), leaves, has_aux=True, reduction=reduction,
                             **flags("tv"))
    assert not loss.any() and list(aux) == ["tv"] and not aux["tv"].any()
    assert not torch.autograd.grad(loss.sum(), leaves[0])[0].any()


# -------------------------------------------------------------------------------------------------- products and memory

@pytest.mark.parametrize("kind", [used, mixed])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_both_models_are_computed_once_or_again_in_backward(reduction, kind, device, monkeypatch):
    problem = Problem(device)
    computed = []
    right = HeadProducts.logits
    monkeypatch.setattr(HeadProducts, "logits", lambda self, input, of=None: computed.append(input.shape) or right(
        self, input, of))
    loss = problem.ours(kind(FIELDS), problem.leaves(), chunk_rows=5, reduction=reduction, return_entropy=True,
                        **flags(*FIELDS))
    each = [(5, 6), (5, 9), (4, 6), (4, 9)] if device == "cpu" else [(5, 6), (5, 9)] * 2 + [(1, 6), (1, 9)]
    assert computed == each
    loss.sum().backward()
    assert computed == each * (1 if reduction == "mean" else 2)


@pytest.mark.parametrize("requested", [("tv",), ("forward_kl", "jsd"), FIELDS], ids=str)
def test_what_was_not_requested_is_absent(requested, device, monkeypatch):
    """Checks that a single divergence is computed alone."""
    problem, found, kinds, right = Problem(device), [], [], comparison.evaluate
    monkeypatch.setattr(comparison, "evaluate", lambda z, d, shard: kinds.append(d.kind) or right(z, d, shard))

    def fn(out, *_):
        found.append(tuple(name for name in FIELDS if hasattr(out, name)))
        return out.lse

    for reduction in ("mean", "none"):
        problem.ours(fn, problem.leaves(), reduction=reduction, **flags(*requested))
    assert set(found) == {requested}
    assert kinds == [[6], [8]][len(requested) > 1] * 2


@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="records the CPU's allocator")
@pytest.mark.parametrize("kind, teacher_dtype, chunks", [
    (mixed, torch.float32, 2), (used, torch.float32, 2), (used, torch.float64, 3), (mixed, torch.float64, 4)])
def test_two_chunks_of_logits_exist(kind, teacher_dtype, chunks, device):
    """Checks that only a teacher of another dtype, here twice as wide, takes a third chunk for the gradient."""
    if device != "cpu":
        pytest.skip("records the CPU's allocator")
    draw = Draw(device)
    rows, vocab, step = 64, 5000, 16
    hidden, weight = draw.normal(rows, 4).requires_grad_(), draw.normal(vocab, 4)
    teacher = [draw.normal(*s).to(teacher_dtype) for s in ((rows, 3), (vocab, 3))]
    labels, by = draw.integers(vocab, rows), draw.normal(rows)

    def call():
        return linear_row_loss(kind(FIELDS), hidden, weight, labels, by, teacher=teacher, chunk_rows=step,
                               return_entropy=True, **flags(*FIELDS))

    call()
    chunk = step * vocab * 4
    most = recorded_memory.peak(call)
    assert (chunks - 0.2) * chunk <= most <= (chunks + 0.2) * chunk, most / chunk


def test_the_op_that_overwrites_the_teacher(device, fresh_compiler):
    draw = Draw(device)
    z, y, grad = draw.normal(5, 9), draw.normal(5, 9), draw.normal(5, 5)
    op = torch.ops.sparse_ce.dense_divergence_backward_teacher_
    stats, sums = torch.ops.sparse_ce.dense_divergence(z, y, kind=8)
    expected = torch.ops.sparse_ce.dense_divergence_backward(grad, stats, sums, z, y, kind=8)
    torch.library.opcheck(op.default, (grad, stats, sums, z, y.clone()), dict(kind=8))
    kept, written = z.clone(), y.clone()
    version = written._version
    op(grad, stats, sums, z, written, kind=8)
    assert_bitwise_equal(written, expected)
    assert_bitwise_equal(z, kept)
    assert written._version > version
    assert_refused(lambda: op(grad, stats, sums, z, y.double(), kind=8), "teacher must have the dtype and shape of ",
                   "[5, 9]", error=RuntimeError)
    assert_refused(lambda: op(grad, stats, sums, z[:, :7], y, kind=8, num_classes=7), "teacher must have the dtype",
                   "[5, 7]", error=RuntimeError)
    assert_refused(lambda: op(grad, stats, sums, z, z, kind=8), "logits must not share memory with teacher",
                   error=RuntimeError)
    assert_refused(lambda: op(grad, stats, sums, z, y[:1].expand(5, 9), kind=8), "non-overlapping rows",
                   error=RuntimeError)


# --------------------------------------------------------------------------------------------------- options and errors

def test_errors(device):
    draw = Draw(device)
    hidden, weight, labels = draw.normal(3, 4).requires_grad_(), draw.normal(7, 4), draw.integers(7, 3)
    teacher = draw.normal(3, 2), draw.normal(7, 2)

    def call(fn=lambda out, _: out.tv, **options):
        return linear_row_loss(fn, hidden, weight, labels, **{**dict(teacher=teacher, return_tv=True), **options})

    assert_refused(lambda: call(return_tv=False), "teacher must be None if no divergence is requested",
                   "return_forward_kl=True", error=ValueError)
    for option, value in (("teacher_softcap", 3.0), ("teacher_logit_scale", 2.0)):
        assert_refused(lambda: call(teacher=None, return_tv=False, **{option: value}),
                       f"{option} must be None without a teacher, got {value}", error=ValueError)
    assert_refused(lambda: call(beta=0.5), "beta must be None without return_jsd=True, got 0.5", error=ValueError)
    assert_refused(lambda: call(teacher=(teacher[0], torch.nn.Linear(2, 7))), "pass (teacher_input, head.weight",
                   error=TypeError)
    assert_refused(lambda: call(teacher=None), "teacher must be given for return_tv=True, got None", error=ValueError)
    for wrong in (teacher[0], teacher[:1], 3):
        assert_refused(lambda: call(teacher=wrong), "teacher must be (teacher_input, teacher_weight)", error=TypeError)
    for at in range(2):
        wrong = list(teacher)
        wrong[at] = wrong[at].clone().requires_grad_()
        assert_refused(lambda: call(teacher=wrong), "must not require grad", ".detach()", error=ValueError)
    assert_refused(lambda: call(teacher=(teacher[0][:2], teacher[1])), "teacher_input must be of the leading shape [3]",
                   error=ValueError)
    assert_refused(lambda: call(teacher=(teacher[0], teacher[1][:6])), "teacher_weight must have the rows", "got 6",
                   error=ValueError)
    assert_refused(lambda: call(logit_scale=torch.ones((), device=device, requires_grad=True)),
                   "logit_scale must not require grad", error=ValueError)
    assert_refused(lambda: call(beta=0.0, return_jsd=True), "beta must be a number between 0 and 1", error=ValueError)
    assert_refused(lambda: call(return_tv="yes"), "return_tv must be a bool", error=TypeError)
    for reduction in ("mean", "none"):
        assert_refused(lambda: call(lambda out, _: out.jsd, reduction=reduction), "return_jsd=True",
                       error=AttributeError)
    learned = torch.ones((), device=device, requires_grad=True)
    assert_refused(lambda: call(lambda out, _: out.tv * learned), "fn must receive tensors that require grad as row",
                   error=ValueError)
