"""Tests binary cross entropy of every target format, dtype and option against the dense target in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from binary_cases import OPTIONS, REDUCTIONS, check, dense_binary, make
from cases import DTYPES, FORMS, Draw, sparsely
from loss_cases import ALL_IGNORED, all_ignored
from sparse_ce import SmoothedTarget, SparseTarget, binary_cross_entropy_with_logits

NAN, INF = math.nan, math.inf


def reductions_of(options):
    return ("mean", "batchmean") if "normalizer" in options else REDUCTIONS


@pytest.mark.parametrize("form, options, dtype", sparsely(5, FORMS, OPTIONS.items(), DTYPES))
def test_loss_and_gradients_equal_the_dense_target(form, options, dtype, device):
    for reduction in reductions_of(options):
        check(make(form, device, dtype, options), reduction)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", ["plain", "gammas", "all"])
def test_other_seeds_find_nothing_else(option, form, device):
    for seed in range(2, 6):
        check(make(form, device, torch.float32, OPTIONS[option], seed), "none", seed)


@pytest.mark.parametrize("option", ["plain", "weight", "pos_weight", "num_classes"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_definition_is_that_of_pytorch(reduction, option):
    """Compares the reference of these tests with F.binary_cross_entropy_with_logits."""
    case, logits, keywords = make("jagged", "cpu", torch.float64, OPTIONS[option])
    found = dense_binary(logits, case.dense, case.ignored, reduction=reduction, **keywords)
    kept = {name: t.double() for name, t in keywords.items() if name != "num_classes"}
    expected = F.binary_cross_entropy_with_logits(logits[..., :case.classes], case.dense, reduction=reduction, **kept)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_equals_pytorch(dtype, reduction, device):
    draw = Draw(device)
    logits, dense = (4 * draw.normal(6, 50)).to(dtype), (draw.uniform(6, 50) < 0.1).float()
    weight, pos_weight = draw.uniform(50), draw.uniform(50, high=9)
    loss = binary_cross_entropy_with_logits(logits, SparseTarget.from_dense(dense), weight, pos_weight=pos_weight,
                                            reduction=reduction)
    expected = F.binary_cross_entropy_with_logits(logits.double(), dense.double(), weight.double(),
                                                  pos_weight=pos_weight.double(), reduction=reduction)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_it_is_the_focal_loss_of_torchvision(device):
    """Compares with the formula of torchvision.ops.sigmoid_focal_loss: alpha weighs positives, 1 - alpha negatives."""
    draw = Draw(device)
    logits, dense = draw.normal(5, 20, dtype=torch.float64), (draw.uniform(5, 20) < 0.2).double()
    alpha, gamma, p = 0.25, 2.0, logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, dense, reduction="none")
    p_t = p * dense + (1 - p) * (1 - dense)
    expected = ((alpha * dense + (1 - alpha) * (1 - dense)) * ce * (1 - p_t) ** gamma).mean()
    weight = torch.full((20,), 1 - alpha, device=device)
    loss = binary_cross_entropy_with_logits(logits, SparseTarget.from_dense(dense), weight, gamma=gamma,
                                            pos_weight=torch.full((20,), alpha / (1 - alpha), device=device))
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)  # class weights are float32


@pytest.mark.parametrize("sum_classes", [False, True])
def test_it_is_the_binary_loss_of_timm(sum_classes, device):
    """Compares with the formula of timm.loss.BinaryCrossEntropy, whose smoothing adds e / V to each class."""
    draw, e = Draw(device), 0.1
    logits, labels, pos_weight = draw.normal(6, 20), draw.integers(20, 6), draw.uniform(20) + 0.5
    smoothed = torch.full_like(logits, e / 20).scatter(1, labels[:, None], 1 - e + e / 20)
    above = smoothed.gt(0.3).float()  # target_threshold
    reduction = "batchmean" if sum_classes else "mean"
    for dense, target in ((smoothed, SmoothedTarget(SparseTarget.from_index(labels), e)), (above, labels)):
        expected = F.binary_cross_entropy_with_logits(logits, dense, pos_weight=pos_weight, reduction="none")
        expected = expected.sum(-1).mean() if sum_classes else expected.mean()
        torch.testing.assert_close(binary_cross_entropy_with_logits(logits, target, pos_weight=pos_weight,
                                                                    reduction=reduction), expected)


def test_it_is_the_asymmetric_loss(device):
    """Compares with the formula of Alibaba-MIIL/ASL."""
    draw = Draw(device)
    logits, dense = 3 * draw.normal(5, 20, dtype=torch.float64), (draw.uniform(5, 20) < 0.2).double()
    p, q = logits.sigmoid(), (1 - logits.sigmoid() + 0.05).clamp(max=1)
    losses = dense * p.log() + (1 - dense) * q.log()
    expected = -(losses * (1 - (p * dense + q * (1 - dense))) ** (1 * dense + 4 * (1 - dense))).sum()
    loss = binary_cross_entropy_with_logits(logits, SparseTarget.from_dense(dense), gamma=(1, 4), clip=0.05,
                                            reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)


def test_it_is_the_loss_of_siglip(device):
    """Compares with the sigmoid loss of a batch of pairs: -logsigmoid(+-z), summed over all pairs, per row."""
    draw = Draw(device)
    images, texts = (F.normalize(draw.normal(8, 16, dtype=torch.float64)).requires_grad_() for _ in range(2))
    scale, bias = (torch.tensor(t, dtype=torch.float64, device=device, requires_grad=True) for t in (2.3, -10.0))
    labels = torch.arange(8, device=device)
    loss = binary_cross_entropy_with_logits(images @ texts.T, labels, reduction="batchmean", logit_scale=scale.exp(),
                                            logit_bias=bias)
    z = images @ texts.T * scale.exp() + bias
    expected = -F.logsigmoid(z * (2 * torch.eye(8, dtype=torch.float64, device=device) - 1)).sum() / 8
    leaves = (images, texts, scale, bias)
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, leaves)),
                               (expected, *torch.autograd.grad(expected, leaves)))


# -------------------------------------------------------------------------------------------------------- more targets


def test_entries_of_one_class_are_added(device):
    logits = Draw(device).normal(1, 5, dtype=torch.float64)
    indices = torch.tensor([[3, 1, 3, 3]], device=device)
    for values, total in (([0.5, 1.0, -2.0, 3.0], 1.5), ([1.0, 1.0, -1.0, 0.0], 0.0), ([7.0, 1.0, 7.0, -14.5], -0.5)):
        dense = torch.tensor([[0, 1, 0, total, 0]], dtype=torch.float64, device=device)
        loss = binary_cross_entropy_with_logits(logits, (indices, torch.tensor([values], device=device)))
        torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, dense))


def test_batched_csr_and_scipy(device):
    draw = Draw(device)
    logits = draw.normal(2, 3, 20)
    dense = torch.zeros(2, 3, 20, device=device).scatter(2, draw.integers(20, 2, 3, 2), 1.0)
    dense[..., 0], dense[..., 1] = 0.5, 0.0  # the same number of entries in both matrices
    dense = torch.zeros_like(dense).scatter(2, dense.topk(2).indices, draw.uniform(2, 3, 2, low=0.1, high=2))
    expected = F.binary_cross_entropy_with_logits(logits, dense)
    torch.testing.assert_close(binary_cross_entropy_with_logits(logits, dense.to_sparse_csr()), expected)
    scipy = pytest.importorskip("scipy.sparse")
    matrix = scipy.csr_matrix(dense.flatten(0, 1).cpu().numpy())
    target = SparseTarget.from_scipy(matrix).to(device)
    torch.testing.assert_close(binary_cross_entropy_with_logits(logits.flatten(0, 1), target), expected)


def test_a_row_without_labels_counts(device):
    logits = Draw(device).normal(3, 5)
    dense = torch.zeros(3, 5, device=device)
    for target in (torch.zeros(3, 5, device=device).to_sparse(), torch.zeros(3, 5, device=device).to_sparse_csr(),
                   (torch.zeros(3, 2, dtype=torch.long, device=device), torch.zeros(3, 2, device=device)),
                   SparseTarget.from_jagged(torch.zeros(0, dtype=torch.long, device=device), None,
                                            torch.zeros(4, dtype=torch.long, device=device))):
        loss = binary_cross_entropy_with_logits(logits, target)
        torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, dense))


@pytest.mark.parametrize("form", ALL_IGNORED)
@pytest.mark.parametrize("options", [{}, dict(gamma=2.0, label_smoothing=0.1, logit_bias=1.0)], ids=["", "options"])
def test_a_batch_without_active_rows(options, form, device):
    for reduction in REDUCTIONS:
        leaf = torch.full((4, 9), NAN, device=device, requires_grad=True)
        loss = binary_cross_entropy_with_logits(leaf, all_ignored(form, 4, 9, device), reduction=reduction, **options)
        gradient, = torch.autograd.grad(loss, leaf, torch.full_like(loss, INF))
        assert not loss.any() and not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, gamma_negative=2.0, clip=0.05)], ids=["", "options"])
def test_shards_of_the_classes_add_up(options, dtype, device):
    """Checks the op with shards of classes, some of them empty or of padding, in one process, and its composition."""
    draw, classes, wide = Draw(device), 70_001, torch.float64 if dtype == torch.float64 else torch.float32
    logits = F.pad(draw.normal(3, classes).to(dtype), (0, 90), value=NAN)
    indices, values, grad = draw.integers(classes, 3, 40), draw.uniform(3, 40), draw.normal(3).to(wide)
    affine, weights = torch.tensor([1.3, -0.2], dtype=wide, device=device), draw.uniform(2, classes).to(wide)
    options = dict(options, values=values, affine=affine, weight=weights[0], pos_weight=weights[1], affine_grad=True,
                   num_classes=classes, row_mask=torch.tensor([True, False, True], device=device))
    op = torch.ops.sparse_ce.binary_cross_entropy_with_gradient
    whole = op(grad, logits, indices, **options)
    bounds = [0, 0, 5, 32_768, 32_769, 65_600, classes + 3, classes + 90]
    spans = list(zip(bounds, bounds[1:]))
    shards = [op(grad, logits[:, begin:end], indices, first_class=begin, **options) for begin, end in spans]
    tolerances = dict(rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=1e-5)
    for at in (0, 2):
        torch.testing.assert_close(sum(shard[at] for shard in shards), whole[at], **tolerances)
    gradient = torch.cat([shard[1] for shard in shards], 1)
    torch.testing.assert_close(gradient, whole[1], rtol=1e-5 if dtype != torch.bfloat16 else 8e-3, atol=1e-12)
    assert not gradient[:, classes:].any()
    for (begin, end), shard in zip(spans, shards):
        composed = sparse_ce.reference.binary_cross_entropy_with_gradient(
            grad, logits[:, begin:end], indices, first_class=begin, **options)
        torch.testing.assert_close(shard[0], composed[0], **tolerances)
        torch.testing.assert_close(shard[1], composed[1], rtol=1e-5 if dtype != torch.bfloat16 else 8e-3, atol=1e-7)


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_leading_dimensions(reduction, leading, device):
    draw = Draw(device)
    logits = draw.normal(*leading, 7).requires_grad_()
    labels = draw.integers(7, *leading)
    loss = binary_cross_entropy_with_logits(logits, labels, reduction=reduction)
    dense = F.one_hot(labels, 7).float()
    per_row = F.binary_cross_entropy_with_logits(logits, dense, reduction="none").sum(-1)
    count = max(1, math.prod(leading))
    expected = {"none": per_row, "sum": per_row.sum(), "batchmean": per_row.sum() / count,
                "mean": per_row.sum() / (7 * count)}[reduction]
    torch.testing.assert_close(loss, expected)
    grad_output = draw.normal(*loss.shape)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits, grad_output) for t in (loss, expected)))


LAYOUTS = {
    "rows apart": lambda t: F.pad(t, (0, 5), value=NAN)[:, :t.shape[1]],
    "every second column": lambda t: torch.stack((t, torch.full_like(t, NAN)), -1).flatten(1)[:, ::2],
    "transposed": lambda t: t.t().contiguous().t(),
    "one row for all": lambda t: t[:1].expand_as(t),
    "an odd begin": lambda t: F.pad(t, (1, 0), value=NAN)[:, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["plain", "gamma"])
def test_strided_rows(option, dtype, layout, device):
    draw = Draw(device)
    target = draw.integers(2100, 3, 4), draw.uniform(3, 4)
    logits = LAYOUTS[layout](draw.normal(3, 2100).to(dtype))
    found = []
    for reduction in ("mean", "none"):
        for x in (logits, logits.contiguous()):
            leaf = x.detach().requires_grad_()
            loss = binary_cross_entropy_with_logits(leaf, target, reduction=reduction, **OPTIONS[option])
            found.append((loss, *torch.autograd.grad(loss, leaf, torch.full_like(loss, 0.3))))
        torch.testing.assert_close(*found[-2:], rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-7)


# ------------------------------------------------------------------------------------------------------- row arguments


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_row_masks_are_combined(reduction, device):
    """Checks a mask of the target, a mask of the call and a label that is ``ignore_index``."""
    draw = Draw(device)
    logits, labels = draw.normal(6, 5), draw.integers(5, 6)
    labels[0] = -100
    masks = [torch.tensor(mask, device=device).bool() for mask in ([1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1])]
    active = [3, 4, 5]
    target = SparseTarget.from_index(labels, row_mask=masks[0])
    loss = binary_cross_entropy_with_logits(logits, target, row_mask=masks[1], reduction=reduction)
    expected = binary_cross_entropy_with_logits(logits[active], labels[active], reduction=reduction)
    torch.testing.assert_close(loss[active] if reduction == "none" else loss, expected)
    assert reduction != "none" or not loss[:3].any()


@pytest.mark.parametrize("inplace", [False, "backward", "forward"], ids=str)
def test_a_row_of_weight_0_is_not_written(inplace, device):
    """Checks that a loss of NaN or infinity with weight 0 is 0, and its gradient too."""
    weight = torch.tensor([1.0, 0.0, 2.0], device=device)
    for value in (NAN, INF):
        for reduction in ("sum", "none"):
            leaf = Draw(device).normal(3, 9)
            leaf[1, 4] = value
            loss = binary_cross_entropy_with_logits(leaf.requires_grad_() * 1, torch.tensor([0, 1, 2], device=device),
                                                    row_weight=weight, reduction=reduction, inplace=inplace)
            gradient, = torch.autograd.grad(loss.sum(), leaf)
            assert loss.isfinite().all() and not gradient[1].any() and gradient[[0, 2]].ne(0).all()


@pytest.mark.parametrize("reduction", ["mean", "batchmean"])
def test_normalizers(reduction, device):
    logits, labels = Draw(device).normal(4, 5), torch.arange(4, device=device)
    total = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    for normalizer in (3, 2.5, torch.tensor(7, device=device), torch.tensor([0.5], device=device)):
        loss = binary_cross_entropy_with_logits(logits, labels, reduction=reduction, normalizer=normalizer)
        torch.testing.assert_close(loss, total / float(normalizer))
    assert binary_cross_entropy_with_logits(logits, labels, reduction=reduction, normalizer=0) == 0


def test_the_values_alone_require_grad(device):
    draw = Draw(device)
    logits, indices, values = draw.normal(4, 9), draw.integers(9, 4, 3), draw.uniform(4, 3).requires_grad_()
    for inplace in (False, "forward", "backward"):
        loss = binary_cross_entropy_with_logits(logits, (indices, values), inplace=inplace)
        expected = F.binary_cross_entropy_with_logits(logits, torch.zeros(4, 9, device=device).scatter_add(
            1, indices, values))
        torch.testing.assert_close(*(torch.autograd.grad(3 * t, values) for t in (loss, expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_values_has_the_digits_of_float32(dtype, device):
    draw = Draw(device)
    logits, indices = (3 * draw.normal(4, 9)).to(dtype), draw.integers(9, 4, 3)
    values = draw.uniform(4, 3).requires_grad_()
    loss = binary_cross_entropy_with_logits(logits, (indices, values), reduction="sum", logit_scale=0.7)
    gradient, = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient.double(), -0.7 * logits.double().gather(1, indices), rtol=1e-6, atol=1e-6)


def test_an_index_that_is_no_class(device):
    logits = torch.zeros(2, 4, device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"target must have indices in \[0, 4\) or ignore_index -100, got 4"):
            binary_cross_entropy_with_logits(logits, torch.tensor([0, 4]))
    mapped = torch.func.vmap(lambda z, y: binary_cross_entropy_with_logits(z, y, reduction="none"))
    losses = mapped(logits, torch.tensor([0, 4], device=device))
    assert losses.isnan().tolist() == [False, True]


def test_the_module_passes_every_keyword_on(device):
    case, logits, keywords = make("coo", device, torch.float32, OPTIONS["all"])
    expected = binary_cross_entropy_with_logits(logits, case.target, reduction="none", **keywords)
    of_call = {name: keywords.pop(name) for name in ("row_mask", "row_weight", "logit_scale", "logit_bias")}
    module = sparse_ce.SparseBCEWithLogitsLoss(reduction="none", **keywords)
    assert torch.equal(module(logits, case.target, **of_call), expected.detach())


@pytest.mark.parametrize("gamma", [0.0, 2.0])
@pytest.mark.parametrize("classes, labels", [(5, 1), (37, 1), (37, 30), (300, 1), (300, 200)])
def test_an_infinite_weight_of_positives_that_do_not_occur_has_no_effect(classes, labels, gamma, device):
    """Checks the classes at both ends of rows, which fill no pack, and all others, beside few or many labels."""
    logits = Draw(device).normal(3, classes).requires_grad_()
    target = torch.arange(2, 2 + labels, device=device).expand(3, -1)
    weight = torch.full((classes,), INF, device=device)
    weight[2:2 + labels] = 1
    values = [binary_cross_entropy_with_logits(logits, target, pos_weight=each, gamma=gamma)
              for each in (weight, torch.ones_like(weight))]
    gradients = [torch.autograd.grad(value, logits)[0] for value in values]
    assert values[0].isfinite() and torch.equal(*values) and torch.equal(*gradients)


def test_a_number_weights_positives_as_a_tensor_does():
    x, labels = torch.randn(3, 40, dtype=torch.float64), torch.tensor([[1, 5], [7, 2], [0, 39]])
    target = labels, torch.ones(3, 2, dtype=torch.float64)
    expected = sparse_ce.binary_cross_entropy_with_logits(x, target, pos_weight=torch.full((40,), 0.3 / 0.7).double())
    assert not torch.equal(expected, sparse_ce.binary_cross_entropy_with_logits(x, target, pos_weight=0.3 / 0.7))
    expected = sparse_ce.binary_cross_entropy_with_logits(
        x, target, pos_weight=torch.full((40,), 0.3 / 0.7, dtype=torch.float64))
    module = sparse_ce.SparseBCEWithLogitsLoss(pos_weight=0.3 / 0.7)
    for found in (sparse_ce.binary_cross_entropy_with_logits(x, target, pos_weight=0.3 / 0.7), module(x, target)):
        assert torch.equal(found, expected)
