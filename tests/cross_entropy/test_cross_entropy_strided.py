"""Tests logits with strided classes, as (N, C, H, W) with the classes moved last, which are read without a copy."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import sparse_ce
from cases import DTYPES, FORMS, WITH_VALUES, Draw, sparsely
from close import assert_bitwise_equal, assert_close_to_float64
from dense import arithmetic, dense_cross_entropy
from loss_cases import OPTIONS, check
from refusals import assert_refused
from sparse_ce import cross_entropy
from sparse_ce.ops.logits import strided

ops = torch.ops.sparse_ce
IMAGES = (2, 5, 7)


def as_images(x):
    """Returns (N, ..., C) stored as (N, C, ...), and a matrix as its transpose."""
    second = 1 if x.dim() > 2 else 0
    return x.movedim(-1, second).contiguous().movedim(second, -1)


def classes_first(x):
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def with_gaps(x):
    """Returns images that are slices of larger ones, both in their classes and in a spatial dimension."""
    return as_images(F.pad(x, (1, 2) + (0, 0) * (x.dim() - 2) + (0, 1)))[:x.shape[0], ..., 1:-2]


LAYOUTS = {"images": as_images, "classes first": classes_first, "with gaps": with_gaps}


@pytest.fixture
def any_width(monkeypatch):
    """Takes the strided kernels however few rows there are."""
    monkeypatch.setattr(strided, "LEAST_INNER", 1)


def is_viewed(x):
    rows = strided.rows_of(x)
    assert rows.numel() == x.numel()
    return rows.dim() == 3 and rows.data_ptr() == x.data_ptr()


def checked(layout):
    def laid_out(x):
        x = layout(x)
        assert is_viewed(x)
        return x
    return laid_out


@pytest.mark.parametrize("form,options,dtype", sparsely(2, [*FORMS], [*OPTIONS], [torch.float32, torch.bfloat16]),
                         ids=str)
def test_loss_and_gradient_equal_the_dense_target(form, options, dtype, device, any_width):
    check(form, device, dtype, OPTIONS[options], ("none", "mean"), shape=IMAGES, laid_out=checked(as_images))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", WITH_VALUES)
def test_so_does_the_gradient_for_the_values(form, dtype, layout, device, any_width):
    check(form, device, dtype, OPTIONS["all"], ("none",), values_grad=True, shape=IMAGES, laid_out=checked(layout))


@pytest.mark.parametrize("images,classes,dtype", sparsely(
    3, [(1, 1), (3, 1), (1, 17), (2, 35), (1, 513), (3, 1030)], [1, 2, 21, 63, 64, 65, 150, 1000, 1100], DTYPES),
    ids=str)
def test_any_number_of_rows_and_classes(images, classes, dtype, device, any_width):
    outer, inner = images
    if outer * inner * classes > 1 << 20:
        inner = 260
    draw = Draw(device)
    labels = draw.integers(classes, outer, inner)
    dense = F.one_hot(labels, classes).double()
    logits = as_images(draw.logits(dense, dtype)) if classes > 1 else draw.normal(outer, inner, 1).to(dtype)
    assert is_viewed(logits) or inner == 1 or classes == 1
    grad_output = draw.normal(outer, inner)
    x = logits.detach().requires_grad_()
    loss = cross_entropy(x, labels, reduction="none")
    grad, = torch.autograd.grad(loss, x, grad_output.to(loss.dtype))
    assert grad.stride() == x.stride() or outer == 1 or inner == 1 or classes == 1
    if classes == 1:
        assert loss.abs().max() < 1e-6 and grad.abs().max() < 1e-6
        return

    def reference(dtype, leaf):
        loss, _ = dense_cross_entropy(leaf, dense, torch.zeros_like(labels, dtype=torch.bool), dtype=dtype,
                                      reduction="none")
        return loss, *torch.autograd.grad(loss, leaf, grad_output.to(loss.dtype))

    exact = reference(torch.float64, logits.double().requires_grad_())
    peer = reference(arithmetic(dtype), logits.detach().clone().requires_grad_())
    assert_close_to_float64(loss, peer[0], exact[0])
    assert_close_to_float64(grad, peer[1], exact[1], 2 * grad_output.abs()[..., None])


@pytest.mark.parametrize("classes", [7, 1200])
@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo-uncoalesced", "jagged-ranges"])
def test_options_of_the_rows_are_those_of_packed_rows(form, classes, device, any_width):
    """Checks per-row scales and weights, smoothing with weights and padded classes in float64, whose rounding hides
    nothing."""
    draw = Draw(device)
    case = FORMS[form](IMAGES, classes, draw)
    x = draw.logits(case.dense, torch.float64, classes + 3)
    x[case.ignored] = torch.nan
    x[0, :, :3, 0] = -torch.inf  # has weight 0
    weight, row_weight, scale = draw.uniform(classes), draw.normal(*IMAGES), draw.uniform(*IMAGES, low=0.5, high=2)
    weight[::3] = 0
    options = dict(num_classes=classes, weight=weight, label_smoothing=0.2, z_loss=0.1, return_lse=True)
    for more in (dict(logit_scale=scale), dict(logit_scale=scale, softcap=7.0), dict(logit_scale=scale.mean()),
                 dict(row_weight=row_weight), dict(row_weight=row_weight, logit_scale=0.3)):
        for reduction in ("none", "mean"):
            results = []
            for logits in (x, as_images(x), with_gaps(x)):
                logits = logits.detach().requires_grad_()
                loss, lse = cross_entropy(logits, case.target, reduction=reduction, **options, **more)[:2]
                results.append((loss, lse, *torch.autograd.grad([loss.sum(), lse.sum()], logits)))
            for other in results[1:]:
                for ours, expected in zip(other, results[0]):
                    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


# The maximum of a row moves from one part of the classes to the next. The loss is finite except in the last two rows.
def wanderers(classes, draw):
    at = torch.arange(classes, device=draw.device)
    rising, peak = at * 0.4 - 200, torch.where(at == 700, 90, 0)
    late, far = torch.where(at < 200, -torch.inf, 0), torch.where(at < 5, 300, -300)
    steps = 9 * (at // 64 % 3)
    nan, infinite = torch.where(at == 900, torch.nan, 0), torch.where(at == 900, torch.inf, 0)
    shapes = torch.stack([torch.zeros(classes, device=draw.device), rising, -rising, peak, late, far, steps, -steps,
                          torch.full_like(rising, 3000), nan, infinite])
    return 2 * draw.normal(3 * len(shapes), classes) + shapes.repeat(3, 1)


@pytest.mark.parametrize("options", ["plain", "scaled", "scaled rows", "softcap", "weights"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_whose_maximum_moves(dtype, options, device, any_width):
    """Compares with packed rows in float64, and checks that a row's bits do not depend on the other rows."""
    classes, draw = 1203, Draw(device)
    packed = wanderers(classes, draw).to(dtype)
    rows = len(packed)
    labels, weight, scale = draw.integers(classes, rows), draw.uniform(classes), draw.uniform(rows, low=0.5, high=2)
    labels[::7] = -100
    weight[:200] = 0  # some rows have -inf there
    labels[labels < 200] = 200
    labels[::7] = -100
    more = {"plain": {}, "scaled": dict(logit_scale=0.3), "scaled rows": dict(logit_scale=scale.to(arithmetic(dtype))),
            "softcap": dict(softcap=30.0),
            "weights": dict(label_smoothing=0.2, weight=weight.to(arithmetic(dtype)), z_loss=1e-3)}[options]

    def run(x, first=0):
        part = {name: v[first:first + len(x)] if v is more.get("logit_scale") and options == "scaled rows" else v
                for name, v in more.items()}
        exact = {name: v.to(arithmetic(x.dtype)) if torch.is_tensor(v) else v for name, v in part.items()}
        leaf = x.detach().requires_grad_()
        loss, lse = cross_entropy(leaf, labels[first:first + len(x)], reduction="none", return_lse=True, **exact)
        return loss, lse, torch.autograd.grad(loss.sum() + 0.1 * lse.sum(), leaf)[0]

    x = as_images(packed[None])[0]
    assert is_viewed(x)
    found, expected = run(x), run(packed.double())
    eps, stored = torch.finfo(arithmetic(dtype)).eps, torch.finfo(dtype)

    def assert_near(ours, exact, bound):
        apart = ((ours.double() - exact).abs() > bound) | (ours.isnan() != exact.isnan())
        assert not apart.any(), (ours[apart], exact[apart])

    # A scaled logit of 3000 is rounded, an unscaled one is exact.
    rounded = expected[1].abs() if "logit_scale" in more or "softcap" in more else torch.zeros_like(expected[1])
    for ours, exact in zip(found[:2], expected):
        assert_near(ours, exact, 4 * eps * (4 + exact.abs() + rounded))
    exact = expected[2]
    relative = 2 * eps * (8 + exact.abs().clamp(min=1e-300).log().abs() + rounded[:, None])
    if dtype.itemsize == 2:
        relative += 0.53 * stored.eps
    # Cancellation occurs at the label, in smoothed losses, and in a tanh near 1.
    absolute = eps * (0.01 * ("label_smoothing" in more) + 16 * F.one_hot(labels.clamp(min=0), classes))
    if "softcap" in more:
        absolute = absolute + 8 * eps * torch.softmax(30 * torch.tanh(packed.double() / 30), -1).nan_to_num()
    assert_near(found[2], exact, relative * exact.abs() + absolute + max(4e-38, stored.tiny * stored.eps))
    for first, last in ((0, 16), (0, 32), (16, 33)):
        for ours, whole in zip(run(as_images(packed[None, first:last])[0], first), found):
            assert_bitwise_equal(ours, whole[first:last])


@pytest.mark.parametrize("classes", [40, 2003])
@pytest.mark.parametrize("options", [dict(), dict(softcap=9.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinite_weight_of_a_class_that_no_row_has_is_no_nan(dtype, options, classes, device, any_width):
    """Checks weights that are inverse class frequencies, beside an ignored row. Gradients do not read them."""
    draw = Draw(device)
    x = as_images(draw.normal(1, 5, 5, classes).to(dtype))
    labels = draw.integers(classes - 1, 1, 5, 5) + 1
    labels[0, 2, 3] = -100
    weight = draw.uniform(classes, low=0.2, dtype=arithmetic(dtype))
    weight[0] = float("inf")
    grads = []
    for logits in (x, x.contiguous()):
        leaf = logits.detach().requires_grad_()
        loss = cross_entropy(leaf, labels, weight, reduction="sum", **options)
        grads.append(torch.autograd.grad(loss, leaf)[0])
        assert grads[-1].isfinite().all()
    torch.testing.assert_close(*grads)


# ------------------------------------------------------------------------------------------------------------- layout


def test_what_is_used_where_it_lies():
    x = torch.empty(2, 5, 6, 8)
    for t in (x.movedim(1, -1), x.movedim(0, -1), x.flatten(2).mT, x[:, 1:4].movedim(1, -1), x[:, :, 1:].movedim(1, -1),
              x[:1].movedim(1, -1), x[0].movedim(0, -1), x[0, 0].repeat(4, 4).t(), x[:, :, None].movedim(1, -1),
              torch.empty(3, 2, 5, 40).movedim(2, -1), torch.empty(40).expand(2, 3, 40).movedim(1, -1)):
        assert is_viewed(t), t.shape
    channels_last = x.to(memory_format=torch.channels_last).movedim(1, -1)
    for t in (channels_last, x, x[..., :3].movedim(1, -1), x.flip(0)[:, :, ::2].movedim(1, -1),
              torch.empty(2, 5, 31).mT, torch.empty(2, 1, 64).mT, torch.empty(3, 5, 40)[:0].mT,
              torch.empty(2, 3, 5, 40)[:, :2].movedim(2, -1)):
        assert strided.rows_of(t).shape == (t.numel() // t.shape[-1], t.shape[-1])
    assert strided.rows_of(channels_last).data_ptr() == channels_last.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_copy_is_made_and_the_gradient_is_laid_out_like_the_logits(dtype, device):
    draw = Draw(device)
    x = draw.normal(4, 32, 32, 64).to(dtype).requires_grad_()
    labels = draw.integers(32, 4, 32, 64)
    for _ in range(2):  # the second run computes the gradient in forward
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
        with profile(activities=activities, profile_memory=True) as seen:
            grad, = torch.autograd.grad(cross_entropy(x.movedim(1, -1), labels), x)
        taken = [max(e.self_cpu_memory_usage, getattr(e, "self_device_memory_usage", 0)) for e in seen.events()]
        assert sum(size >= x.nbytes // 2 for size in taken) <= 1
        assert grad.stride() == x.stride()


def test_a_parameter_takes_the_gradient_as_it_is(device):
    x = torch.randn(2, 5, 8, 8, device=device, requires_grad=True)
    given = []
    x.register_hook(lambda grad: given.append(grad.data_ptr()))
    cross_entropy(x.movedim(1, -1), torch.zeros(2, 8, 8, dtype=torch.long, device=device)).backward()
    assert [x.grad.data_ptr()] == given and x.grad.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [21, 1500])
def test_the_number_of_threads_changes_nothing(classes, dtype, threads):
    draw = Draw("cpu")
    x = as_images(draw.normal(3, 1300 if classes < 100 else 150, classes).to(dtype)).requires_grad_()
    labels = draw.integers(classes, *x.shape[:-1])
    results = []
    for count in (1, 2, 5):
        threads(count)
        for _ in range(2):  # the gradient after the losses, and together with them
            loss = cross_entropy(x, labels)
            results.append((loss, *torch.autograd.grad(loss, x)))
        results.append((loss, *torch.autograd.grad(cross_entropy(x, labels, label_smoothing=0), x)))
    for loss, grad in results[1:]:
        assert_bitwise_equal(loss, results[0][0])
        assert_bitwise_equal(grad, results[0][1])


@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, softcap=9.0)], ids=["plain", "options"])
@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo-uncoalesced", "jagged-ranges"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_was_foreseen_has_the_same_bits(form, options, dtype, device, any_width):
    for classes in (21, 1500):
        draw = Draw(device)
        case = FORMS[form](IMAGES, classes, draw)
        x = as_images(draw.logits(case.dense, dtype)).requires_grad_()
        first, second = (torch.autograd.grad(1.5 * cross_entropy(x, case.target, **options), x)[0] for _ in range(2))
        assert_bitwise_equal(first, second)


# ------------------------------------------------------------------------------------------------------------ in place


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("classes", [21, 1500])
@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo-uncoalesced", "jagged-ranges"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_the_gradient_takes_the_memory_of_the_logits(form, classes, layout, dtype, device, any_width):
    draw = Draw(device)
    case = FORMS[form](IMAGES, classes, draw)
    x = layout(draw.logits(case.dense, dtype))
    grad_output = draw.normal(*IMAGES)
    leaf = x.clone().requires_grad_()
    expected, = torch.autograd.grad(cross_entropy(leaf, case.target, reduction="none"), leaf, grad_output)
    storage = torch.full((x.untyped_storage().nbytes() // x.element_size(),), 7.0, dtype=dtype, device=device)
    logits = storage.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x).requires_grad_()
    grad, = torch.autograd.grad(cross_entropy(logits, case.target, reduction="none", inplace="backward"), logits,
                                grad_output)
    assert grad.data_ptr() == logits.data_ptr() and grad.stride() == logits.stride()
    assert_bitwise_equal(grad, expected)
    with torch.no_grad():
        logits.fill_(7)
    assert (storage == 7).all()  # the memory between the rows is unchanged


def test_logits_that_share_memory_are_not_overwritten(device, any_width):
    draw = Draw(device)
    x, labels = draw.normal(40), draw.integers(3, 2, 40)
    for logits in (x.expand(2, 3, 40).mT, draw.normal(3, 40).expand(2, 3, 40).mT,
                   draw.normal(200).as_strided((2, 40, 3), (100, 1, 20))):
        before = logits.clone()
        assert is_viewed(logits)
        logits.requires_grad_()
        grad, = torch.autograd.grad(cross_entropy(logits, labels, inplace="backward"), logits)
        expected, = torch.autograd.grad(cross_entropy(logits, labels), logits)
        assert_bitwise_equal(logits.detach(), before)
        assert_bitwise_equal(grad, expected)
        lse = torch.logsumexp(logits.detach(), -1).flatten()
        with pytest.raises(RuntimeError, match="non-overlapping rows to be overwritten"):
            ops.backward_(torch.ones(80, device=device), None, logits.detach(), lse, None, labels.flatten())


# --------------------------------------------------------------------------------------- autograd and related features


def test_gradgradcheck(device):
    draw = Draw(device)
    x = as_images(draw.normal(1, 33, 3, dtype=torch.float64)).requires_grad_()
    labels = draw.integers(3, 1, 33)
    values = draw.uniform(1, 33, 2, dtype=torch.float64).requires_grad_()

    def loss(x, values):
        return cross_entropy(x, (torch.stack([labels, 2 - labels], -1), values), label_smoothing=0.1, z_loss=0.1)

    assert is_viewed(x)
    torch.autograd.gradcheck(loss, (x, values))
    torch.autograd.gradgradcheck(loss, (x, values))


def test_functorch(device):
    draw = Draw(device)
    x, labels = draw.normal(3, 2, 5, 6, 8), draw.integers(5, 3, 2, 6, 8)
    for f in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))):
        ours = f(lambda x, t: cross_entropy(x.movedim(1, -1), t))(x, labels)
        torch.testing.assert_close(ours, f(F.cross_entropy)(x, labels))
    tangent = draw.normal(2, 5, 6, 8)
    ours, theirs = (torch.func.jvp(f, (x[0],), (tangent,)) for f in (
        lambda x: cross_entropy(x.movedim(1, -1), labels[0]), lambda x: F.cross_entropy(x, labels[0])))
    torch.testing.assert_close(ours, theirs)


def test_autocast_and_modules(device):
    draw = Draw(device)
    x, labels = draw.normal(2, 5, 6, 8).bfloat16().requires_grad_(), draw.integers(5, 2, 6, 8)
    with torch.autocast(device, torch.bfloat16):
        loss = sparse_ce.SparseCrossEntropyLoss()(x.movedim(1, -1), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(x.float(), labels))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inplace", [False, "backward"])
def test_the_op_compiles_without_a_break_and_keeps_the_layout(inplace, dynamic, device, fresh_compiler):
    draw = Draw(device)

    def step(x, labels):
        return cross_entropy(x.movedim(1, -1), labels, inplace=inplace)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (8, 10):
        x, labels = draw.normal(2, 5, 8, size).requires_grad_(), draw.integers(5, 2, 8, size)
        grads = [torch.autograd.grad(f(x * 1, labels), x)[0] for f in (compiled, step)]
        assert_bitwise_equal(*grads)
        assert grads[0].stride() == x.stride()
        torch.testing.assert_close(compiled(x, labels), F.cross_entropy(x, labels))


@pytest.mark.parametrize("requires_grad, layout", sparsely(2, [False, True], LAYOUTS))
def test_opcheck(requires_grad, layout, device):
    layout = LAYOUTS[layout]
    draw = Draw(device)
    x = layout(draw.normal(2, 6, 7)).requires_grad_(requires_grad)
    indices, values, rows = draw.integers(7, 12, 3), draw.uniform(12, 3), draw.normal(12)
    lse = torch.logsumexp(x.detach().flatten(0, 1), 1)
    options = dict(label_smoothing=0.1, z_loss=0.1, softcap=5.0)
    torch.library.opcheck(ops.forward.default, (x, indices, values), options)
    torch.library.opcheck(ops.backward.default, (rows, rows, x, lse, torch.zeros_like(lse), indices, values), options)
    torch.library.opcheck(ops.backward_values.default, (rows, x, lse, None, indices, values), options)
    if not requires_grad:
        torch.library.opcheck(ops.forward_with_residual.default, (x, indices, values), options)
        torch.library.opcheck(ops.forward_with_gradient.default, (rows[0].clone(), None, x, indices, values), options)
        torch.library.opcheck(ops.backward_.default, (rows, None, x, lse, None, indices, values), options)


def test_rows_that_are_not_side_by_side_are_right_too(device):
    draw = Draw(device)
    labels, grad_output = draw.integers(5, 24), draw.normal(24)
    packed = draw.normal(24, 5)
    expected = ops.forward_with_residual(packed, labels)
    grad = ops.backward(grad_output, None, packed, *expected[1:], labels)
    for x in (packed.view(2, 12, 5), packed.view(4, 6, 5).mT.contiguous().mT, packed.view(24, 1, 5),
              packed.view(1, 24, 5), as_images(packed.view(2, 12, 5)).repeat_interleave(2, 1)[:, ::2]):
        made = ops.forward_with_residual(x, labels)
        torch.testing.assert_close(made[:2], expected[:2])
        torch.testing.assert_close(ops.backward(grad_output, None, x, *made[1:], labels).flatten(0, 1), grad)
    for shape in ((0, 4, 5), (4, 0, 5)):
        x = packed.new_zeros(shape)
        assert ops.forward(x, labels[:0])[0].shape == (0,)
        assert ops.backward(grad_output[:0], None, x, grad_output[:0], None, labels[:0]).shape == shape


def test_wrong_arguments_of_the_ops(device):
    draw = Draw(device)
    x, labels, rows = draw.normal(2, 7, 6).mT, draw.integers(7, 12), draw.normal(12)
    assert_refused(lambda: ops.forward(x, labels[:6]), "indices", "(12,)", "[6]")
    assert_refused(lambda: ops.forward(x[None], labels), "logits", "[1, 2, 6, 7]")
    assert_refused(lambda: ops.forward(x[..., :0], labels), "logits", "[2, 6, 0]")
    assert_refused(lambda: ops.backward(rows[:2], None, x, rows, None, labels), "grad_loss", "(12,)", "[2]")
    assert_refused(lambda: ops.topk_ids(x, 2), "logits", "[2, 6, 7]")
    assert_refused(lambda: ops.select(x, labels), "logits", "[2, 6, 7]")
    thinned = as_images(draw.normal(2, 12, 7))[:, ::2]
    assert_refused(lambda: ops.backward_(rows, None, thinned, rows, None, labels), "logits", "inner stride 1", "2")
