"""Tests ``inplace="forward"``: the loss writes the gradient over its logits, also if ``grad_output`` is unexpected."""

import pytest
import torch
from torch.profiler import profile

import sparse_ce
from cases import FORMS, Draw, sparsely
from close import assert_bitwise_equal
from inplace_cases import example, number, overwritten, plain, scaled
from loss_cases import SCALAR_OPTIONS
from sparse_ce import SparseCrossEntropyLoss, cross_entropy
from sparse_ce.ops import instruction_set

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
OPTIONS = {**SCALAR_OPTIONS, "weight": {}, "row_weight": {}, "row_weight, sum": dict(reduction="sum"),
           "logit_scale": {}}


@pytest.mark.parametrize("form,dtype,options", sparsely(2, [*FORMS], DTYPES, [*OPTIONS]), ids=str)
def test_the_gradient_is_the_same_and_lies_where_the_logits_were(form, dtype, options, device):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    x = draw.normal(*case.shape, 41 if options == "everything" else 37).to(dtype)
    if options == "everything":
        x[..., 37:] = torch.nan
    x[case.ignored] = torch.nan
    keywords = dict(OPTIONS[options])
    if options == "weight":
        keywords["weight"] = draw.uniform(37, low=0.2)
    if options.startswith("row_weight"):
        keywords["row_weight"] = draw.normal(*case.shape)
        keywords["row_weight"].view(-1)[3] = 0
    if options == "logit_scale":
        keywords["logit_scale"] = draw.uniform(*case.shape, low=0.5)
    expected_loss, expected = plain(x, case.target, 1.0, **keywords)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    loss = cross_entropy(logits, case.target, inplace="forward", **keywords)
    assert_bitwise_equal(loss.detach(), expected_loss)
    assert_bitwise_equal(logits.detach(), expected)  # forward has written the gradient
    grad, = torch.autograd.grad(loss, logits, number(-0.7, loss))
    assert grad.data_ptr() == logits.data_ptr()
    assert_bitwise_equal(grad, scaled(expected, -0.7, loss))
    assert_bitwise_equal(leaf.detach(), x)


@pytest.mark.parametrize("rows,vocab", [(1, 100_003), (5, 100_003), (700, 33), (0, 7), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_parts_many_rows_and_none(rows, vocab, dtype, device, threads):
    """Checks rows that the CPU splits into parts of 32768 columns, which several threads share if there are few
    rows."""
    x, target = example(device, dtype, rows, vocab)
    weight = Draw(device, 1).uniform(vocab, low=0.2)
    for count in (1, 4):
        threads(count)
        expected = plain(x, target, 1.0, weight)
        logits = x * 1
        loss = cross_entropy(logits, target, weight, inplace="forward")
        assert_bitwise_equal(loss.detach(), expected[0])
        assert_bitwise_equal(logits.detach(), expected[1])
        grad, = torch.autograd.grad(loss, logits, number(3.0, loss))
        assert_bitwise_equal(grad, scaled(expected[1], 3.0, loss))


@pytest.mark.parametrize("grad_output", [1.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images_whose_classes_are_second(dtype, grad_output, device):
    """Checks that the gradient has the logits' layout and memory. For a slice of the classes, backward computes it."""
    draw = Draw(device)
    images, labels = draw.normal(2, 7, 8, 9).to(dtype).requires_grad_(), draw.integers(5, 2, 8, 9)
    for classes in (slice(0, 7), slice(1, 6)):
        at_once = classes == slice(0, 7)
        leaf = images.detach()[:, classes].movedim(1, -1).requires_grad_()
        loss = cross_entropy(leaf, labels)
        expected, = torch.autograd.grad(loss, leaf, number(1.0 if at_once else grad_output, loss))
        if at_once:
            expected = scaled(expected, grad_output, loss)
        made = images * 1
        logits, grads = made[:, classes].movedim(1, -1), []
        logits.register_hook(grads.append)
        loss = cross_entropy(logits, labels, inplace="forward")
        assert overwritten(made, images) == at_once
        loss.backward(number(grad_output, loss))
        assert_bitwise_equal(grads[0], expected)
        assert grads[0].data_ptr() == logits.data_ptr() and grads[0].stride() == logits.stride()


@pytest.mark.parametrize("grad_output", [1.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_beside_strided_rows_are_not_written(dtype, grad_output, device):
    wide, (indices, values) = example(device, dtype, 6, 83)
    target = indices % 50, values
    for columns in (slice(0, 50), slice(3, 53)):
        base = wide * 1
        logits, before = base[:, columns], base.detach().clone()
        leaf, grads = before.clone()[:, columns].requires_grad_(), []  # of the same alignment
        expected, = torch.autograd.grad(cross_entropy(leaf, target), leaf)
        logits.register_hook(grads.append)  # a view gets another grad_fn once it is written to
        loss = cross_entropy(logits, target, inplace="forward")
        assert_bitwise_equal(logits.detach(), expected)
        loss.backward(number(grad_output, loss))
        grad, = grads
        assert grad.data_ptr() == logits.data_ptr()
        assert_bitwise_equal(grad, scaled(expected, grad_output, loss))
        before[:, columns] = grad
        assert_bitwise_equal(base.detach(), before)
        before.zero_()[:, columns] = grad
        assert_bitwise_equal(wide.grad, before)
        wide.grad = None


def test_logits_of_a_function_that_returns_several_views(device):
    x, target = example(device)
    _, logits = torch.cat((x, x)).mul(1).chunk(2)
    loss = cross_entropy(logits, target, inplace="forward")
    assert overwritten(logits, x)
    loss.backward()
    assert_bitwise_equal(x.grad, plain(x, target)[1])


def test_the_gradient_flows_on_to_those_who_made_the_logits(device):
    draw = Draw(device)
    hidden, labels = draw.normal(2, 6, 5), draw.integers(11, 2, 6)
    grads = []
    for inplace in (False, "forward"):
        head, bias = draw.normal(11, 5).mul(0).add(torch.arange(5, device=device)), torch.zeros(11, device=device)
        for t in (head, bias):
            t.requires_grad_()
        logits = torch.nn.functional.linear(hidden, head, bias)
        before = logits.detach().clone()
        cross_entropy(logits, labels, inplace=inplace).backward()
        assert overwritten(logits, before) == (inplace == "forward")
        grads.append((head.grad, bias.grad))
    for a, b in zip(*grads):
        assert_bitwise_equal(a, b)


def test_weights_of_rows_get_their_gradient(device):
    x, target = example(device)
    results = []
    for inplace in (False, "forward"):
        row_weight = Draw(device, 5).normal(6)
        row_weight[2] = 0
        row_weight.requires_grad_()
        logits = x * 1
        loss = cross_entropy(logits, target, row_weight=row_weight, inplace=inplace)
        assert overwritten(logits, x) == (inplace == "forward")
        of_logits, of_weights = torch.autograd.grad(loss, (logits, row_weight), number(4.0, loss))
        results.append((of_logits, of_weights))
    for a, b in zip(*results):
        assert_bitwise_equal(a, b)
    assert results[1][1][2] != 0


def test_no_memory_of_the_size_of_the_logits_is_taken(device):
    x, target = example(device, rows=64, vocab=4099)
    size = x.numel() * x.element_size()
    logits = x * 1
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grad, = torch.autograd.grad(cross_entropy(logits, target, inplace="forward"), logits)
        taken = torch.cuda.max_memory_allocated() - before
    else:
        with profile(profile_memory=True) as seen:
            grad, = torch.autograd.grad(cross_entropy(logits, target, inplace="forward"), logits)
        taken = sum(max(0, event.self_cpu_memory_usage) for event in seen.events())
    assert grad.data_ptr() == logits.data_ptr()
    assert taken < size / 2


@pytest.mark.parametrize("inplace", ["forward", "backward"])
def test_modules_and_the_other_functions_take_it(inplace, device):
    x, target = example(device)
    expected = plain(x, target, 1.0, label_smoothing=0.1)[1]
    logits = x * 1
    loss = SparseCrossEntropyLoss(label_smoothing=0.1, inplace=inplace)(logits, target)
    assert overwritten(logits, x) == (inplace == "forward")
    assert_bitwise_equal(torch.autograd.grad(loss, logits)[0], expected)
    logits = x * 1
    out = sparse_ce.selected_log_probs(logits, target[0], inplace=inplace).log_probs.sum()
    assert not overwritten(logits, x)  # "forward" falls back to "backward" here
    grad, = torch.autograd.grad(out, logits)
    assert grad.data_ptr() == logits.data_ptr()


# -------------------------------------------------------------------------------------------------- another grad_output


@pytest.mark.parametrize("before", [None, 1.0, 0.7, 65536.0, 0.0, float("nan")])
@pytest.mark.parametrize("grad_output", [1.0, 0.7, 65536.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_upstream_gradient_rounds_once_more(dtype, grad_output, before, device):
    """Checks this in the first step and whatever ``grad_output`` the step before had."""
    x, target = example(device, dtype)
    if before is not None:
        loss = cross_entropy(x * 1, target, inplace="forward")
        loss.backward(number(before, loss))
    logits = x * 1
    loss = cross_entropy(logits, target, inplace="forward")
    made = logits.detach().clone()
    assert_bitwise_equal(made, plain(x, target)[1])
    grad, = torch.autograd.grad(loss, logits, number(grad_output, loss))
    assert grad.data_ptr() == logits.data_ptr()
    assert_bitwise_equal(grad, scaled(made, grad_output, loss))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad, plain(x, target, grad_output)[1], rtol=2 * eps, atol=0)


@pytest.mark.parametrize("grad_output", [0.0, float("nan"), float("inf"), -float("inf")])
def test_an_upstream_gradient_of_zero_or_not_finite(grad_output, device):
    """Checks a loss with a weight of 0, as an auxiliary loss may start with. The next step must not lose its
    gradient."""
    x, target = example(device)
    target[0][1] = -100  # an ignored row
    x = x.detach()
    x[2] = torch.nan
    x.requires_grad_()
    logits = x * 1
    loss = cross_entropy(logits, target, inplace="forward")
    assert overwritten(logits, x)
    grad, = torch.autograd.grad(loss, logits, number(grad_output, loss))
    assert grad[1].eq(0).all()
    if grad_output == 0:
        assert grad.eq(0).all()  # the row of NaN too
    else:
        assert not grad[[0, 3, 4, 5]].isfinite().any()
    expected = plain(x, target)[1]
    for _ in range(2):
        logits = x * 1
        loss = cross_entropy(logits, target, inplace="forward")
        assert_bitwise_equal(torch.autograd.grad(loss, logits)[0], expected)


@pytest.mark.parametrize("grad_output", [2.0 ** 40, -2.0 ** 50])
def test_an_upstream_gradient_too_large_to_scale_by_is_an_error_and_on_cuda_nan(grad_output, device):
    x, target = example(device)
    logits = x * 1
    loss = cross_entropy(logits, target, inplace="forward")
    if device == "cuda" or instruction_set() == "emulated CUDA":
        assert torch.autograd.grad(loss, logits, number(grad_output, loss))[0].isnan().all()
    else:
        with pytest.raises(RuntimeError, match="sparse_ce: expected must be finite, nonzero and at least 2"):
            torch.autograd.grad(loss, logits, number(grad_output, loss))


def test_an_upstream_gradient_that_its_owner_overwrites(device):
    x, target = example(device)
    loss = cross_entropy(x * 1, target, inplace="forward")
    grad_output = number(2.0, loss)
    loss.backward(grad_output)
    logits = x * 1
    loss = cross_entropy(logits, target, inplace="forward")
    grad_output.mul_(2)
    assert_bitwise_equal(torch.autograd.grad(loss, logits, grad_output)[0], plain(x, target, 4.0)[1])


def test_accumulated_steps_and_what_scales_the_loss(device):
    x, target = example(device)
    parts = [tuple(t[i:i + 2] for t in target) for i in (0, 2, 4)]
    grads = []
    for inplace in (False, "forward"):
        seen, leaf = [], x.detach().clone().requires_grad_()
        for _ in range(2):
            for i, part in enumerate(parts):
                logits = leaf[2 * i:2 * i + 2] * 1
                loss = cross_entropy(logits, part, inplace=inplace) / 4
                seen.append(overwritten(logits, leaf[2 * i:2 * i + 2]))
                loss.backward()
        assert seen == [bool(inplace)] * 6
        grads.append(leaf.grad)
    assert_bitwise_equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_grad_scaler(dtype, device):
    x, target = example(device)
    grads = []
    for inplace in (False, "forward"):
        leaf, scaler = x.detach().clone().requires_grad_(), torch.amp.GradScaler(device, growth_interval=2)
        optimizer = torch.optim.SGD([leaf], lr=0.01)
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(cross_entropy((leaf * 1).to(dtype), target, inplace=inplace)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0 ** 19
        grads.append(leaf.grad / scaler.get_scale())
    assert_bitwise_equal(*grads)  # powers of two do not round
