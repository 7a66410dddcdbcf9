"""Compares log-probabilities of chosen classes and their gradients with float64, in every format, dtype and option."""

import math

import pytest
import torch

import sparse_ce
from cases import DTYPES, FORMS, Draw, sparsely
from close import assert_bitwise_equal, assert_close_to_float64
from dense import arithmetic
from loss_cases import CLASSES, poisoned
from select_cases import ALL, OPTIONS, OUTPUTS, dense_select, entries_of
from sparse_ce import (
    SparseTarget,
    cross_entropy,
    linear_cross_entropy,
    linear_selected_log_probs,
    selected_log_probs,
)


def make(form, device, dtype, options, seed=0):
    """Returns (case, logits, keywords, entries, their shape)."""
    draw = Draw(device, seed)
    case, logits = poisoned(form, dtype, options, draw)
    keywords = dict(options)
    if keywords.pop("row_scale", False):
        keywords["logit_scale"] = draw.uniform(*case.shape, low=0.3, high=1.5)
        keywords["logit_scale"][case.ignored] = torch.nan
    if keywords.pop("num_classes", False):
        keywords["num_classes"] = CLASSES
    view = logits.view(*case.shape, -1)
    rows, entries_shape = entries_of(case.target, torch.Size((*case.shape, CLASSES)), options.get("ignore_index", -100))
    rows = [[] if ignored else entries for entries, ignored in zip(rows, case.ignored.reshape(-1).tolist())]
    return case, view, keywords, rows, entries_shape


def expected(logits, rows, entries_shape, ignored, keywords, dtype):
    given = {k: v for k, v in keywords.items() if k != "ignore_index"}
    scale = given.get("logit_scale", 1.0)
    if isinstance(scale, torch.Tensor):
        given["logit_scale"] = torch.where(ignored, 1.0, scale.to(dtype).reshape(-1))
    return dense_select(logits, rows, entries_shape, ignored, dtype=dtype, **given)


def padded_entries(target, rows, entries_shape, ignored, shape):
    """Returns a mask of the elements of log_probs that are entries of ignored rows, which are 0."""
    flat = sparse_ce.targets.convert.as_target(target, shape).flatten()
    zero = torch.zeros(math.prod(entries_shape), dtype=torch.bool)
    for r in range(len(ignored)):
        if not ignored[r]:
            continue
        if flat.offsets is None:
            width = flat.indices.shape[1] if flat.indices.dim() == 2 else 1
            zero[r * width:(r + 1) * width] = True
        else:
            begin, end = (flat.offsets[r:r + 2] if flat.offsets.dim() == 1 else flat.offsets[r]).tolist()
            zero[begin:end] = True
    return zero.reshape(entries_shape)


def check(form, device, dtype, options, wanted=OUTPUTS, seed=0):
    case, view, keywords, rows, entries_shape = make(form, device, dtype, options, seed)
    ignored = case.ignored.reshape(-1)
    draw = Draw(device, seed + 1)
    before = view.clone()
    leaf = view.detach().requires_grad_()
    out = selected_log_probs(leaf, case.target, **keywords, **ALL)
    flat = leaf.reshape(-1, leaf.shape[-1])
    exact_leaf = flat.detach().double().requires_grad_()
    peer_leaf = flat.detach().clone().requires_grad_()
    exact = expected(exact_leaf, rows, entries_shape, ignored, keywords, torch.float64)
    peer = expected(peer_leaf, rows, entries_shape, ignored, keywords, arithmetic(dtype))

    zero = padded_entries(case.target, rows, entries_shape, ignored, torch.Size((*case.shape, CLASSES))).to(device)
    valid = torch.zeros(math.prod(entries_shape), dtype=torch.bool)
    valid[[i for entries in rows for i, _ in entries]] = True
    valid = valid.reshape(entries_shape).to(device)
    ours = out.log_probs.reshape(entries_shape)
    assert (ours <= 0)[valid].all()
    assert (ours[zero] == 0).all()
    assert (ours[~valid & ~zero] == keywords.get("padding_value", -math.inf)).all()
    assert_close_to_float64(ours[valid], peer["log_probs"][valid], exact["log_probs"][valid])
    for name in OUTPUTS[1:]:
        t = getattr(out, name)
        assert t.shape == case.shape and t.dtype == arithmetic(dtype)
        assert_close_to_float64(t.reshape(-1), peer[name], exact[name])
    assert torch.equal(out.argmax.reshape(-1), exact["argmax"])
    assert torch.equal(out.rank.reshape(-1), exact["rank"])
    assert (out.collision <= 0).all()

    grad_output = {name: draw.normal(*(entries_shape if name == "log_probs" else (len(ignored),)), dtype=torch.float64)
                   for name in OUTPUTS}
    grad_output["log_probs"] = torch.where(valid, grad_output["log_probs"], torch.where(zero, torch.nan, torch.inf))

    def gradient(result, leaf):
        pairs = []
        for name in wanted:
            g = grad_output[name]
            if name == "log_probs":
                g = g if isinstance(result, sparse_ce.LogProbs) else torch.where(valid, g, 0.0)
            t = getattr(result, name) if isinstance(result, sparse_ce.LogProbs) else result[name]
            pairs.append((t, g.reshape(t.shape).to(t.dtype)))
        outputs, grads = zip(*pairs)
        return torch.autograd.grad(outputs, leaf, grads, retain_graph=True)[0]

    grad = gradient(out, leaf).reshape(flat.shape)
    size = sum((grad_output[n].abs() for n in wanted if n != "log_probs"),
               torch.zeros(len(ignored), dtype=torch.float64, device=device))
    if "log_probs" in wanted:
        of_entries = torch.where(valid, grad_output["log_probs"], 0.0).abs().reshape(-1)
        size = size + torch.stack([sum((of_entries[i] for i, _ in entries), of_entries.new_zeros(()))
                                   for entries in rows])
    scale = keywords.get("logit_scale", 1.0)
    size = size * (torch.where(ignored, 1.0, scale.reshape(-1)) if isinstance(scale, torch.Tensor) else scale)
    # The tail of a row without entries covers all classes, so there is nothing to compare with.
    terms = None if wanted == ("log_tail",) else 4 * size[:, None]
    assert_close_to_float64(grad, gradient(peer, peer_leaf), gradient(exact, exact_leaf), terms)
    assert_bitwise_equal(view, before)


@pytest.mark.parametrize("form, options, dtype", sparsely(2, FORMS, OPTIONS.items(), DTYPES))
def test_outputs_and_gradients_equal_the_dense_ones(form, options, dtype, device):
    check(form, device, dtype, options)


@pytest.mark.parametrize("wanted", OUTPUTS)
@pytest.mark.parametrize("form", ["labels-int64", "tuple", "topk-log_probs", "csr-int32", "jagged-ranges"])
def test_the_gradient_of_each_output_alone(form, wanted, device):
    for dtype in (torch.float64, torch.float32):
        check(form, device, dtype, OPTIONS["plain"], (wanted,))
        check(form, device, dtype, OPTIONS["all"], (wanted,))


@pytest.mark.parametrize("ids", ["labels", "one a row", "several", "nested", "list of no ids"])
def test_plain_integers_are_ids(ids, device):
    draw = Draw(device)
    x = draw.normal(2, 3, 11, dtype=torch.float64)
    labels = draw.integers(11, 2, 3)
    several = draw.integers(11, 2, 3, 4).int()
    given = {"labels": labels, "one a row": labels[..., None], "several": several,
             "nested": SparseTarget.from_topk(several, None), "list of no ids": several[..., :0]}[ids]
    out = selected_log_probs(x, given, return_log_tail=True)
    log_probs = x.log_softmax(-1)
    index = {"labels": labels[..., None], "one a row": labels[..., None], "list of no ids": several[..., :0]}.get(
        ids, several)
    torch.testing.assert_close(out.log_probs, log_probs.gather(-1, index.long()).reshape(out.log_probs.shape))
    assert out.log_probs.shape == (labels.shape if ids == "labels" else index.shape)
    if ids == "list of no ids":
        assert (out.log_tail == 0).all()


@pytest.mark.parametrize("vocab", [3, 40, 5000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_argmax_is_pytorchs_where_logits_are_the_lowest_there_are(dtype, vocab, device):
    """Checks rows that are masked by ``finfo.min`` and by -inf."""
    low, x = torch.finfo(dtype).min, torch.full((7, vocab), -torch.inf, dtype=dtype, device=device)
    x[0], x[1, 1:], x[2, 1], x[3, vocab // 2 :], x[4, -1], x[5, :2] = low, low, low, low, low, low  # row 6 is all -inf
    expected, head = x.argmax(1), torch.eye(vocab, dtype=dtype, device=device)
    for ids in (0, 1, vocab - 1):
        ids = torch.full((7,), ids, device=device)
        for asked in (dict(), dict(return_log_tail=True), dict(return_entropy=True), ALL):
            asked = {**asked, "return_argmax": True}
            assert torch.equal(selected_log_probs(x, ids, **asked).argmax, expected), asked
            assert torch.equal(selected_log_probs(x, ids, logit_scale=0.5, **asked).argmax[1:5], expected[1:5])
        for options in (dict(), dict(label_smoothing=0.1), dict(reduction="none")):
            assert torch.equal(cross_entropy(x, ids, return_argmax=True, **options).argmax, expected), options
    if vocab < 100 and dtype != torch.float16:
        few = x.clamp(min=low / 2)  # no matrix product makes these infinite
        assert torch.equal(linear_cross_entropy(few, head, ids, return_argmax=True).argmax, few.argmax(1))


def check_long_rows(x, ids, draw):
    """Compares ALL outputs and their gradients with float64, for x (N, V) and ids (N, K)."""
    rows = [[(k, c) for k, c in enumerate(row, r * len(row))] for r, row in enumerate(ids.tolist())]
    leaf, exact_leaf = x.clone().requires_grad_(), x.double().requires_grad_()
    out = selected_log_probs(leaf, ids, **ALL)
    exact = dense_select(exact_leaf, rows, ids.shape, torch.zeros(len(rows), dtype=torch.bool, device=x.device))
    assert torch.equal(out.argmax, x.double().argmax(1))
    assert torch.equal(out.rank, exact["rank"])
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(out, name).double(), exact[name], rtol=2e-6, atol=5e-6)
    for name in (*OUTPUTS[2:], "argmax", "rank"):  # alone they may be computed by other loops
        alone = getattr(selected_log_probs(x, ids, **{f"return_{name}": True}), name)
        torch.testing.assert_close(alone, getattr(out, name), rtol=4e-6, atol=1e-5)
    finite = [name for name in OUTPUTS if name != "mean_logit" and (name != "log_tail" or x.shape[1] > ids.shape[1])]
    if x.isfinite().all():
        finite.append("mean_logit")
    grad_output = [draw.normal(*exact[name].shape, dtype=torch.float64) for name in finite]
    ours, = torch.autograd.grad([getattr(out, n) for n in finite], leaf, [g.float() for g in grad_output])
    theirs, = torch.autograd.grad([exact[n] for n in finite], exact_leaf, grad_output)
    close = dict(rtol=2e-5, atol=2e-7) if x.dtype == torch.float32 else dict(rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(ours.double(), theirs, check_dtype=False, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 1023, 1024, 1025, 33000, 70001])
def test_vocabularies_of_any_width(vocab, dtype, device):
    """Checks the ends of tiles, spans and windows of marks."""
    draw = Draw(device, vocab)
    k = min(vocab, 9)
    x = (3 * draw.normal(3, vocab)).to(dtype)
    ids = torch.stack([torch.randperm(vocab, generator=draw.generator)[:k] for _ in range(3)]).to(device)
    ids[0, 0], ids[1, -1] = vocab - 1, 0
    if k > 2:
        ids[2, 1] = ids[2, 0]
    check_long_rows(x, ids, draw)


WIDTH = 9001
ROWS = {
    "a far tail": lambda noise: torch.where(torch.arange(WIDTH, device=noise.device) == 5000, 0.0, noise - 14),
    "rising": lambda noise: noise + torch.linspace(-150, 150, WIDTH, device=noise.device),
    "falling": lambda noise: noise + torch.linspace(150, -150, WIDTH, device=noise.device),
    "one of all": lambda noise: torch.where(torch.arange(WIDTH, device=noise.device) == 5000, 0.0, noise - 60),
    "far from 0": lambda noise: 2 * noise + 1e5,
    "beyond the exponent's digits": lambda noise: 4 * noise + 3e6,
    "of equals": lambda noise: torch.ones_like(noise),
    "mostly impossible": lambda noise: torch.where(noise > 0.5, noise, -torch.inf).index_fill(
        1, torch.arange(5000, device=noise.device), -torch.inf),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ROWS)
def test_long_rows_of_every_kind(kind, dtype, device):
    """Checks ids that exclude whole vectors from the sums, and at times the maximum."""
    draw = Draw(device)
    x = ROWS[kind](draw.normal(2, WIDTH)).to(dtype)
    ids = torch.cat((torch.arange(33, device=device).expand(2, -1), draw.integers(WIDTH, 2, 5)), 1)
    ids[0, -1], ids[1, -1] = x[0].argmax(), 4224
    if dtype == torch.float16:
        x = x.clamp(max=6e4)
    check_long_rows(x, ids, draw)


@pytest.mark.parametrize("learned", [False, True])
def test_those_of_a_coo_tensor_come_by_rows(learned, device):
    """Checks the order of the tensor's target. Duplicates are merged if autograd follows the values."""
    draw = Draw(device)
    x, rows, classes = draw.normal(3, 7), [2, 0, 1, 0, 2], [1, 4, 3, 2, 1]
    positions = torch.tensor([rows, classes], device=device)
    coo = torch.sparse_coo_tensor(positions, draw.uniform(5).requires_grad_(learned), (3, 7))
    target, expected = SparseTarget.from_coo(coo), x.log_softmax(1)
    assert target.row_indices().tolist() == ([0, 0, 1, 2] if learned else [0, 0, 1, 2, 2])
    assert target.indices.tolist() == ([2, 4, 3, 1] if learned else [4, 2, 3, 1, 1])
    for found in (selected_log_probs(x, coo), linear_selected_log_probs(torch.eye(3, device=device), x.T, coo)):
        torch.testing.assert_close(found.log_probs, expected[target.row_indices(), target.indices])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.1, z_loss=0.01, logit_scale=0.5), "weight"],
                         ids=str)
def test_the_loss_beside_the_other_outputs(options, dtype, device):
    """Checks the op with the outputs that the losses request."""
    draw = Draw(device)
    x, indices, values = draw.normal(5, 2003, dtype=dtype), draw.integers(2003, 5, 4), draw.uniform(5, 4)
    indices[1, 2] = indices[1, 0]
    weight = draw.uniform(2003, dtype=dtype) if options == "weight" else None
    named = dict(label_smoothing=0.2) if options == "weight" else options
    given = (indices, values, None, weight)
    of_select = {k: v for k, v in named.items() if k == "logit_scale"}
    grads = [draw.normal(5, dtype=dtype) for _ in range(3)] + [draw.normal(5, 4, dtype=dtype)]
    op = torch.ops.sparse_ce

    def ours(x, values):
        out = op.select(x, indices, values, None, weight, **named, loss=True, log_tail=True, entropy=True)
        return out[0], out[4], out[5], out[3]

    def apart(x, values):
        loss = op.forward(x, indices, values, None, weight, **named)[0]
        out = op.select(x, *given, **of_select, log_tail=True, entropy=True)
        return loss, out[4], out[5], out[3]

    results = []
    for f in (ours, apart):
        leaves = [x.clone().requires_grad_(), values.clone().requires_grad_()]
        out = f(*leaves)
        results.append((*out, *torch.autograd.grad(out, leaves, grads)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, **(dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else {}))


@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("tail", [1e-3, 1e-8, math.exp(-50), math.exp(-200)])
def test_a_small_tail_and_its_gradient_have_their_digits(tail, shift, device):
    draw = Draw(device)
    x, ids = draw.normal(64, 2000, dtype=torch.float64), draw.normal(64, 2000).argsort(1)[:, :64]
    inside = torch.zeros(x.shape, dtype=torch.bool, device=device).scatter(1, ids, True)

    def off(z, hidden):
        return z.masked_fill(hidden, -torch.inf).logsumexp(1, keepdim=True)

    x = torch.where(inside, x - off(x, ~inside) + math.log1p(-tail), x - off(x, inside) + math.log(tail))
    x = (x + shift).float().requires_grad_()
    wide = x.detach().double().requires_grad_()
    exact = off(wide, inside)[:, 0] - wide.logsumexp(1)
    ours = selected_log_probs(x, ids, return_log_tail=True).log_tail
    torch.testing.assert_close(ours.double(), exact, rtol=3e-7, atol=0)
    (grad,), (expected,) = (torch.autograd.grad(t.sum(), z) for t, z in ((ours, x), (exact, wide)))
    # The logarithm, and the value that it is subtracted from.
    rounded = 2 * torch.finfo(torch.float32).eps * -math.log(tail)
    torch.testing.assert_close(grad.double()[~inside], expected[~inside], rtol=max(1e-5, rounded), atol=0)


def test_argmax_of_a_saturated_softcap_is_the_lowest_class_of_those_that_tie(device):
    z = torch.tensor([[40.0, 80.0, 120.0, 100.0]], device=device)
    label = torch.zeros(1, dtype=torch.long, device=device)
    assert selected_log_probs(z, label, softcap=2.0, return_argmax=True).argmax.tolist() == [0]
    assert cross_entropy(z, label, softcap=2.0, return_argmax=True).argmax.tolist() == [0]
    assert sparse_ce.topk_log_probs(z, 1, softcap=2.0).indices.tolist() == [[2]]
