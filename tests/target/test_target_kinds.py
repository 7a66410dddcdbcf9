"""Tests that log-probabilities are stored unchanged and exponentiated by the kernels as they are read, and that ids
need no weights."""

import math
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_ce
from cases import FORMS, Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, collate, cross_entropy, linear_cross_entropy
from sparse_ce.targets.convert import as_target

LOGPROBS = ["topk-log_probs", "topk-log_probs-masked", "jagged-log_probs"]


def loss(logits, target):
    return cross_entropy(logits, target, reduction="none")


def example(form, device, dtype=torch.float64):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    return case, draw.normal(3, 4, 37, dtype=dtype)


# ---------------------------------------------------------------------------------------------------- nothing is read


def resident(t):
    """Returns the bytes of the file behind ``t`` that are resident in this process."""
    begin = t.untyped_storage().data_ptr()
    found = re.search(rf"^{begin:x}-.*?^Rss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S)
    return 1024 * int(found.group(1))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts resident pages as Linux does")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_of_a_memory_mapped_cache_reads_a_row(dtype, tmp_path):
    rows, k, vocab = 2**18, 64, 50257
    file = tmp_path / "log_probs"
    size = rows * k * dtype.itemsize
    with file.open("wb") as f:
        f.truncate(size)
    values = torch.from_file(str(file), shared=True, size=rows * k, dtype=dtype).view(rows, k)
    values[5] = torch.log_softmax(torch.arange(k, dtype=torch.float32), 0).to(dtype)
    row = values[5].clone()
    del values
    values = torch.from_file(str(file), shared=True, size=rows * k, dtype=dtype).view(rows, k)
    indices = torch.arange(k).expand(rows, k)
    before = resident(values)
    target = SparseTarget.from_topk(indices, values, values_are="log_probs", num_classes=vocab)
    assert target.values_are == "log_probs" and target.values is values
    part = collate([target[5], target[5:6][0]])
    x = torch.randn(2, vocab)
    torch.testing.assert_close(loss(x, part), loss(x, (indices[:2], row.float().exp().expand(2, k))))
    assert before <= resident(values) <= 2**20 < size / 8


# ---------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("exponent", [-80, -87.5, -88.5, -100, -103, -104.5, -700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_log_probabilities_keep_their_weight(dtype, exponent, device):
    """Checks float32 down to the smallest subnormal number, where a weight may be off by half of it."""
    x = torch.tensor([[0.0, 1000.0]], dtype=dtype, device=device)
    target = SparseTarget.from_topk(torch.zeros(1, 1, dtype=torch.int64, device=device),
                                    torch.full((1, 1), exponent, dtype=dtype, device=device), values_are="log_probs")
    exact = math.exp(exponent) * 1000
    allowed = 1e-12 * exact if dtype == torch.float64 else 3e-7 * exact + 0.51 * 2.0 ** -149 * 1000
    assert abs(loss(x, target).item() - exact) <= allowed
    assert (loss(x, target).item() > 0) == (dtype == torch.float64 or exponent > -104)


def test_an_underflowing_weight_still_needs_an_index(device):
    """Checks that -inf is padding and a log-probability whose weight underflows is not. At a logit of -inf it adds
    0."""
    x = torch.zeros(1, 4, device=device)
    x[0, 1] = -torch.inf
    values = torch.tensor([[-200.0, 0.0]], device=device).requires_grad_()
    for index, fails in ((2, False), (1, False), (9, True)):
        target = SparseTarget.from_topk(torch.tensor([[index, 0]], device=device), values, values_are="log_probs")
        if not fails:
            total = loss(x, target).sum()
            assert total.item() == pytest.approx(math.log(3))
            assert torch.autograd.grad(total, values)[0][0].tolist() == pytest.approx([0.0, math.log(3)])
        elif device == "cpu" and sparse_ce.ops.instruction_set() != "emulated CUDA":
            with pytest.raises(RuntimeError, match="sparse_ce: target must have indices in"):
                loss(x, target)
        else:
            try:
                assert loss(x, target).isnan().all()
            except RuntimeError as error:  # SPARSE_CE_VALIDATE=1
                assert "sparse_ce: target must have indices in" in str(error)


@pytest.mark.parametrize("kind", ["probs", "log_probs"])
def test_a_class_of_weight_0_has_no_gradient_even_at_a_logit_of_minus_infinity(kind, device):
    x, weight = torch.zeros(1, 4, device=device), torch.ones(4, device=device)
    x[0, 1], weight[1] = -torch.inf, 0
    values = torch.full((1, 2), 0.5, device=device).requires_grad_()
    target = SparseTarget.from_topk(torch.tensor([[1, 2]], device=device), values, values_are=kind)
    x.requires_grad_()
    gradient, = torch.autograd.grad(cross_entropy(x, target, weight), values)
    factor = math.exp(0.5) if kind == "log_probs" else 1.0
    assert gradient[0].tolist() == pytest.approx([0.0, factor * math.log(3)])
    parts = (target.indices, values.detach(), None, weight)
    lse = torch.logsumexp(x.detach(), 1)
    composite = sparse_ce.reference.backward_values(torch.ones_like(lse), x.detach(), lse, None, *parts,
                                                    logprobs=kind == "log_probs")
    torch.testing.assert_close(composite, gradient)


def test_nan_is_padding_where_a_mask_or_an_index_says_so(device):
    values = torch.tensor([[0.0, torch.nan], [torch.nan, -1.0]], device=device).requires_grad_()
    indices, mask = torch.tensor([[1, 2], [-100, 0]], device=device), torch.tensor([[1, 0], [1, 1]], device=device)
    target = SparseTarget.from_topk(indices, values, values_are="log_probs", mask=mask)
    x = torch.randn(2, 5, device=device)
    expected = -torch.log_softmax(x, 1)[[0, 1], [1, 0]] * torch.tensor([1.0, math.exp(-1)], device=device)
    torch.testing.assert_close(loss(x, target), expected)
    gradient, = torch.autograd.grad(loss(x, target).sum(), values)
    torch.testing.assert_close(gradient, torch.diag(expected.detach()))  # w d loss / d w is the entry's own loss
    bare = SparseTarget.from_topk(indices[1:], values[1:].detach(), values_are="log_probs")
    torch.testing.assert_close(loss(x[1:], bare), expected[1:])
    composite = torch.func.grad(lambda v: loss(x[1:], SparseTarget.from_topk(indices[1:], v,
                                                                             values_are="log_probs")).sum())
    torch.testing.assert_close(composite(bare.values), gradient[1:])


# ---------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("form", LOGPROBS)
def test_both_derivatives_are_those_of_the_log_probabilities(form, head, device):
    draw = Draw(device)
    case = FORMS[form]((2, 3), 5, draw)
    valid = torch.isfinite(case.values) & case.values.ne(0)
    w = draw.normal(5, 4, dtype=torch.float64)
    x = draw.normal(2, 3, 4 if head else 5, dtype=torch.float64).requires_grad_()
    v = torch.where(valid, case.values.double(), 0.0).requires_grad_()

    def f(x, v):
        target = case.build(torch.where(valid, v, -torch.inf))
        options = dict(reduction="none", label_smoothing=0.1, z_loss=0.02)
        return linear_cross_entropy(x, w, target, **options) if head else cross_entropy(x, target, **options)

    assert torch.autograd.gradcheck(f, (x, v))
    assert torch.autograd.gradgradcheck(f, (x, v))


@pytest.mark.parametrize("form", LOGPROBS)
def test_the_composite_agrees_under_functorch(form, device):
    case, x = example(form, device)
    values = case.values.double()

    def f(x, v):
        return cross_entropy(x, case.build(v), label_smoothing=0.1)

    v = values.clone().requires_grad_()
    y = x.clone().requires_grad_()
    eager = torch.autograd.grad(f(y, v), (y, v))
    func = torch.func.grad(f, argnums=(0, 1))(x, values)
    torch.testing.assert_close(func[0], eager[0])
    valid = values.isfinite()
    torch.testing.assert_close(func[1][valid], eager[1][valid])
    assert eager[1][~valid].eq(0).all() and func[1][~valid].eq(0).all()


@pytest.mark.parametrize("form", LOGPROBS)
def test_old_calls_of_the_ops_stand(form, device):
    """Checks that ``logprobs`` comes last and is False by default."""
    case, x = example(form, device)
    flat, rows = case.target.flatten(), x.reshape(-1, 37)
    parts = (flat.indices, flat.values, flat.offsets, None, flat.row_mask)
    given, _ = torch.ops.sparse_ce.forward(rows, *parts, logprobs=True)
    assert_bitwise_equal(given.view(case.shape), loss(x, case.target))
    probs = case.target.probs().flatten()
    torch.testing.assert_close(
        torch.ops.sparse_ce.forward(rows, probs.indices, probs.values, probs.offsets, None, probs.row_mask)[0], given,
        rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ like a tensor


@pytest.mark.parametrize("form", [*LOGPROBS, "topk-ids"])
def test_the_kind_survives(form, device):
    case, x = example(form, device)
    target, whole = case.target, loss(x, case.target)
    leaves, spec = torch.utils._pytree.tree_flatten(target)
    dumped = torch.utils._pytree.treespec_loads(torch.utils._pytree.treespec_dumps(spec))
    same = {
        "pickle": pickle.loads(pickle.dumps(target)), "pytree": torch.utils._pytree.tree_unflatten(leaves, spec),
        "dumped": torch.utils._pytree.tree_unflatten(leaves, dumped), "items": SparseTarget(dict(target.items())),
        "to": target.to(device), "detach": target.detach(), "slice": target[:], "shift": target.shift(1).shift(-1),
        "probs": target.probs(), "log_probs": target.log_probs(), "to and fro": target.probs().log_probs(),
        "collate": collate([target, target])[0], "flatten": target.flatten(),
    }
    for how, other in same.items():
        kind = "probs" if how == "probs" or form == "topk-ids" and "prob" not in how else "log_probs"
        assert other.values_are == ("log_probs" if how == "to and fro" or how == "log_probs" else kind), how
        got = loss(x.reshape(*other.shape, 37), other)
        assert got.shape == other.shape
        if how == "shift":
            got, expected = got[:, 1:], whole[:, 1:]
        else:
            expected = whole
        torch.testing.assert_close(got.reshape(expected.shape), expected, rtol=1e-6, atol=1e-6)
        dense = other.to_dense(torch.float64).reshape(*case.shape, 37)
        full = case.dense * ~case.ignored[..., None]
        torch.testing.assert_close(dense[:, 1:] if how == "shift" else dense, full[:, 1:] if how == "shift" else full,
                                   rtol=1e-6, atol=1e-7)
    for row, x_row, expected in zip(target, x, whole):
        torch.testing.assert_close(loss(x_row, row), expected)
        torch.testing.assert_close(torch.stack([loss(a, b) for a, b in zip(x_row, row)]), expected)


def test_a_single_row_of_a_jagged_target_keeps_its_padding():
    target = SparseTarget.from_jagged(torch.tensor([3, -100, -100]), torch.tensor([-0.5, -1.0, 0.0]),
                                      torch.tensor([0, 2, 3]), values_are="log_probs", num_classes=5)
    assert [bool(row.ne(-100)) for row in target] == [True, True]
    assert [row.to_dense().tolist() for row in target] == target.to_dense().tolist()


def test_dense_of_half_log_probabilities_is_not_rounded_twice():
    target = SparseTarget.from_topk(torch.tensor([[1]]), torch.tensor([[-0.1]]).half(),
                                    values_are="log_probs", num_classes=3)
    exact = torch.tensor(-0.1).half().double().exp()
    assert target.to_dense().dtype == torch.float32 and target.probs().values.dtype == torch.float32
    assert target.to_dense(torch.float64)[0, 1] == exact and target.to_dense(torch.float16)[0, 1] == exact.half()


def test_the_repr_names_the_kind():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    target = SparseTarget.from_topk(ids, torch.zeros(2, 3).half(), values_are="log_probs")
    assert repr(target) == "SparseTarget(topk, shape=[2], k=3, num_classes=None, log_probs=float16, device=cpu)"
    assert repr(SparseTarget.from_topk(ids, None)) == "SparseTarget(topk, shape=[2], k=3, num_classes=None, device=cpu)"
    assert SparseTarget.from_jagged(ids[0], None, torch.tensor([0, 3]), values_are="log_probs").values_are == "probs"
    with pytest.raises(ValueError, match="sparse_ce: values_are must be 'probs' or 'log_probs', got 'logits'"):
        SparseTarget.from_jagged(ids[0], torch.zeros(3), torch.tensor([0, 3]), values_are="logits")


def test_samples_of_different_k_and_kinds():
    wide = SparseTarget.from_topk(torch.tensor([[1, 2, 3]]), torch.tensor([[0.1, 0.2, 0.3]]).log(),
                                  values_are="log_probs",
                                  num_classes=9)
    narrow = SparseTarget.from_topk(torch.tensor([[4], [-100]]), torch.zeros(2, 1),
                                    values_are="log_probs", num_classes=9)
    ids = SparseTarget.from_topk(torch.tensor([[5, 6]]), None, num_classes=9)
    jagged = SparseTarget.from_jagged(torch.tensor([7, 8]), torch.tensor([-1.0, -torch.inf]), torch.tensor([0, 2]),
                                      values_are="log_probs", num_classes=9)
    for samples in ([wide, narrow], [narrow, ids], [wide, jagged, ids], [jagged, jagged]):
        batch = collate(samples)
        assert batch.values_are == "log_probs"
        for i, t in enumerate(samples):
            torch.testing.assert_close(batch[i, :len(t)].to_dense(), t.to_dense())
            assert batch.ne(-100)[i].tolist() == t.ne(-100).tolist() + [False] * (batch.shape[1] - len(t))
    with pytest.raises(ValueError, match=r"the same kind, got \['log_probs', 'probs'\]; convert them with .probs\(\)"):
        collate([wide, wide.probs()])
    torch.testing.assert_close(collate([wide.probs(), ids]).to_dense()[0], wide.to_dense())


def test_parts_of_narrow_log_probabilities_and_ids():
    """Checks at least two entries per row, for frameworks: the added ones are padding."""
    column = torch.tensor([[1], [-100], [2]])
    for target in (SparseTarget.from_topk(column, torch.tensor([[-1.0], [0.0], [-torch.inf]]), values_are="log_probs"),
                   SparseTarget.from_topk(column, None),
                   SparseTarget.from_topk(column[:, :0], None),
                   SparseTarget.from_topk(column[:, :0], torch.zeros(3, 0), values_are="log_probs")):
        again = SparseTarget(dict(target.items()))
        assert again.ne(-100).tolist() == target.ne(-100).tolist()
        x = torch.randn(3, 5)
        torch.testing.assert_close(loss(x, again), loss(x, target))


# ------------------------------------------------------------------------------------------------ ids without weights


def test_ids_count_once_each(device):
    indices = torch.tensor([[1, 2, 2], [3, -100, -100], [-100, -100, -100], [4, 4, 4]], device=device)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]], device=device)
    target = SparseTarget.from_topk(indices, None, mask=mask, num_classes=6)
    assert target.values is None and target.form == "topk" and target.shape == (4,) and target.values_are == "probs"
    dense = torch.tensor([[0, 1, 2, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0] * 6, [0, 0, 0, 0, 2, 0]], device=device)
    torch.testing.assert_close(target.to_dense(), dense.float())
    x = torch.randn(4, 6, device=device)
    torch.testing.assert_close(loss(x, target), -(torch.log_softmax(x, 1) * dense).sum(1))
    assert target.ne(-100).tolist() == [True, True, False, True]
    assert SparseTarget.from_topk(indices, None).indices is indices


def test_one_id_a_row_is_a_soft_target_to_the_mean(device):
    """Checks that only the mean over labels is divided by class weights."""
    x, weight = torch.randn(3, 5, device=device), torch.rand(5, device=device) + 0.5
    ids = torch.tensor([[1], [4], [-100]], device=device)
    ones = torch.ones(3, 1, device=device)
    for target in (SparseTarget.from_topk(ids, None), SparseTarget.from_topk(ids, ones)):
        ours = cross_entropy(x, target, weight)
        expected = cross_entropy(x, target, weight, reduction="sum") / 2
        torch.testing.assert_close(ours, expected)
        y = x.clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(lambda x: cross_entropy(x, target, weight))(x),
                                   torch.autograd.grad(cross_entropy(y, target, weight), y)[0])


def test_ids_of_different_k_are_padded_with_the_mark():
    two = SparseTarget.from_topk(torch.tensor([[1, 2]]), None, num_classes=5)
    three = SparseTarget.from_topk(torch.tensor([[4, 3, 0], [-100, -100, -100]]), None, num_classes=5)
    batch = collate([two, three])
    assert batch.values is None and batch.indices[0].tolist() == [[1, 2, -100], [-100, -100, -100]]
    assert batch.ne(-100).tolist() == [[True, False], [True, False]]
    none = SparseTarget.from_topk(torch.zeros(1, 0, dtype=torch.int64), None, num_classes=5)
    batch = collate([none, two])
    assert batch.ne(-100).all() and batch[0].to_dense().eq(0).all() and batch[1].to_dense().sum() == 2


# -------------------------------------------------------------------------------------------------------- torch.compile


def test_a_kind_is_a_constant_of_the_graph(device):
    counter = CompileCounterWithBackend("aot_eager")
    draw = Draw(device)

    def f(x, target):
        return cross_entropy(x, target, label_smoothing=0.1)

    compiled = torch.compile(f, backend=counter, fullgraph=True)
    for n in (5, 9, 12, 3):
        x, i, v = draw.normal(6, 11), draw.integers(11, 6, n), draw.normal(6, n)
        y = x.clone().requires_grad_()
        x.requires_grad_()
        target = SparseTarget.from_topk(i, v, values_are="log_probs")
        ours, eager = compiled(x, target), f(y, target)
        assert_bitwise_equal(ours, eager)
        ours.backward()
        eager.backward()
        assert_bitwise_equal(x.grad, y.grad)
    assert counter.frame_count <= 2
    assert_bitwise_equal(compiled(x, target.probs()), f(x, target.probs()))


@pytest.mark.parametrize("form", [*LOGPROBS, "topk-ids"])
def test_the_ops_say_what_they_do(form, device):
    case, x = example(form, device, torch.float32)
    flat = case.target.flatten()
    values = None if flat.values is None else flat.values.detach().requires_grad_()
    parts = (flat.indices, values, flat.offsets, None, flat.row_mask)
    kind = dict(logprobs=flat.values_are == "log_probs")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    rows = x.reshape(-1, 37).requires_grad_()
    torch.library.opcheck(torch.ops.sparse_ce.forward.default, (rows, *parts), kind, test_utils=tests)
    _, lse = torch.ops.sparse_ce.forward(rows, *parts, **kind)
    grad, lse = torch.randn_like(lse), lse.detach()
    if values is not None:
        torch.library.opcheck(torch.ops.sparse_ce.backward_values.default, (grad, rows, lse, None, *parts), kind,
                              test_utils=tests)
    hidden, weight = torch.randn(rows.shape[0], 5, device=device), torch.randn(37, 5, device=device)
    torch.library.opcheck(torch.ops.sparse_ce.linear_select.default, (hidden, weight, None, *parts),
                          dict(kind, loss=True, mean=True), test_utils=tests)


# ------------------------------------------------------------------------------ warnings about likely log-probabilities


LOOKS = torch.log_softmax(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), 1)
IDS = torch.arange(12).view(3, 4)


def warned(f):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        f()
    return [str(w.message) for w in seen if issubclass(w.category, UserWarning) and "sparse_ce" in str(w.message)]


def test_log_probabilities_in_a_plain_tuple_warn():
    x = torch.randn(3, 12)
    padded = torch.cat((IDS, torch.full((3, 1), -100)), 1), torch.cat((LOOKS, torch.zeros(3, 1)), 1)
    for call in (lambda: cross_entropy(x, (IDS, LOOKS)), lambda: cross_entropy(x, (IDS, LOOKS.requires_grad_())),
                 lambda: cross_entropy(x, (IDS, LOOKS.bfloat16())), lambda: cross_entropy(x, padded),
                 lambda: linear_cross_entropy(x, torch.randn(20, 12), (IDS, LOOKS)),
                 lambda: collate([{"t": (IDS, LOOKS)}] * 2), lambda: SparseTarget.from_topk(IDS, LOOKS),
                 lambda: SparseTarget.from_topk(IDS[0], LOOKS[0])):
        messages = warned(call)
        assert messages and "values_are='log_probs'" in messages[0]


def test_ordinary_weights_do_not_warn():
    x, draw = torch.randn(3, 12), Draw("cpu")
    one_positive = LOOKS.detach().clone()
    one_positive[2, 3] = 0.1
    for values in (LOOKS.exp(), -LOOKS.exp(), torch.zeros(3, 4), one_positive, LOOKS + 1, draw.normal(3, 4),
                   torch.full((3, 4), torch.nan), 0 * LOOKS - 0.5, torch.ones(3, 4, dtype=torch.int64),
                   torch.cat((torch.zeros(1, 4), LOOKS[1:]))):
        assert warned(lambda: cross_entropy(x, (IDS, values.detach()))) == []
    empty = torch.zeros(0, 4), torch.zeros(3, 0)
    assert warned(lambda: [as_target((t.long(), t), torch.Size((*t.shape[:-1], 9))) for t in empty]) == []


def test_a_named_kind_a_graph_and_a_transform_do_not_warn():
    x, values = torch.randn(3, 12), LOOKS.detach()
    for kind in ("probs", "log_probs", "logits"):
        assert warned(lambda: cross_entropy(x, SparseTarget.from_topk(IDS, values, values_are=kind))) == []
    assert warned(lambda: torch.compile(cross_entropy, backend="eager", fullgraph=True)(x, (IDS, values))) == []
    assert warned(lambda: torch.func.grad(lambda x: cross_entropy(x, (IDS, values)))(x)) == []
    assert warned(lambda: torch.func.vmap(lambda v: cross_entropy(x, (IDS, v)))(values[None])) == []
    assert warned(lambda: SparseTarget.from_coo(torch.sparse_coo_tensor(IDS[:1], values[0], (12,)))) == []
    assert warned(lambda: SparseTarget.from_topk(IDS.to("meta"), values.to("meta"))) == []


@pytest.mark.parametrize("form", ["topk-log_probs", "topk-log_probs-masked", "topk-ids", "tuple"])
def test_what_is_filled_up_on_its_way_is_padding(form, device):
    """Checks gathered targets of processes whose K differ, as in accelerate."""
    pytest.importorskip("accelerate")
    from sparse_ce.integrations.accelerate import _filled
    case, logits = example(form, device)
    target = as_target(case.target, logits)
    wider = _filled(target, target.indices.shape[-1] + 40)
    assert wider.values_are == target.values_are and wider._is_topk == target._is_topk and wider.indices.shape[-1] > 40
    torch.testing.assert_close(loss(logits, wider), loss(logits, target))
