"""Compares ``candidate_logits`` with all logits, gathered at the ids, in float64."""

import itertools
import os

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import forked
import sparse_ce
from cases import DTYPES, FORMS, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import MIXED, make_head
from loss_cases import CLASSES, SHAPE
from refusals import assert_refused
from sparse_ce import SparseTarget, candidate_logits, reference
from sparse_ce._core.arguments import Candidates
from sparse_ce.targets.convert import as_target

ops = torch.ops.sparse_ce
OPTIONS = {"plain": {}, "scale": dict(logit_scale=-0.7), "softcap": dict(softcap=3.0),
           "both": dict(logit_scale=1.3, softcap=4.0)}


def places(target, shape):
    """Returns the shape of the ids and, for each id that is not padding, its position, its row and the id."""
    t = as_target(target, torch.Size((*shape, CLASSES)))
    rows = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    count = torch.ones(shape, dtype=torch.bool) if t.row_mask is None else t.row_mask.cpu()
    empty = 0 if t.values_are == "probs" else -torch.inf
    found = []
    for at in itertools.product(*map(range, shape)):
        if t.form == "jagged":
            ranges = t.offsets if t.offsets.dim() > 1 else torch.stack((t.offsets[:-1], t.offsets[1:]), -1)
            each = [(i,) for i in range(*ranges[at].tolist())]
        else:
            each = [at] if t.form == "index" else [(*at, k) for k in range(t.indices.shape[-1])]
        for place in each if count[at] else []:
            value = 1.0 if t.values is None else t.values[place].item()
            if t.indices[place].item() != -100 and value != empty:
                found.append((place, int(rows[at]), int(t.indices[place])))
    return t.indices.shape, found


def plain(head, target, shape, logit_scale=1.0, softcap=None):
    """Returns all logits, gathered at the ids, in the arithmetic dtype. Gradients have the dtypes of their tensors."""
    x, w, b = head
    arithmetic = torch.float64 if x.dtype == torch.float64 else torch.float32
    size, found = places(target, shape)
    at, rows, ids = (list(t) for t in zip(*found)) if found else ([], [], [])
    used = torch.zeros(torch.Size(shape).numel(), dtype=torch.bool, device=x.device)
    used[torch.tensor(rows, dtype=torch.int64, device=x.device)] = True
    x = torch.where(used[:, None], x.reshape(-1, x.shape[-1]), 0.0)
    z = logit_scale * F.linear(x.to(arithmetic), w.to(arithmetic), None if b is None else b.to(arithmetic))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    out = z.new_full(size, -torch.inf)
    index = tuple(torch.tensor(at, dtype=torch.int64, device=x.device).reshape(-1, len(size)).T)
    return out.index_put(index, z[torch.tensor(rows, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)])


def ours(head, target, **options):
    return candidate_logits(head[0], head[1], target, linear_bias=head[2], **options)


def example(form, device, dtype=torch.float32, head_dtype=None, bias=True, width=19):
    """Returns (target, its leading shape, head, grad_output). Rows of padding alone hold NaN."""
    draw = Draw(device)
    case = FORMS[form](SHAPE, CLASSES, draw)
    head = make_head(case, draw, dtype, head_dtype, bias=bias, width=width)
    size, found = places(case.target, case.shape)
    dead = torch.ones(torch.Size(case.shape).numel(), dtype=torch.bool)
    dead[[row for _, row, _ in found]] = False
    head[0].view(-1, width)[dead.to(device)] = torch.nan
    grad_output = draw.normal(*size, dtype=torch.float64)
    return case.target, case.shape, [None if t is None else t.requires_grad_() for t in head], grad_output


def grads(out, leaves, grad_output):
    return torch.autograd.grad(out, [t for t in leaves if t is not None], grad_output.to(out.dtype))


def check(form, device, dtypes, bias=True, width=19, **options):
    target, shape, head, grad_output = example(form, device, *dtypes, bias=bias, width=width)
    exact, peer = ([None if t is None else t.detach().to(d or t.dtype).requires_grad_() for t in head]
                   for d in (torch.float64, None))
    results = [ours(head, target, **options), *(plain(h, target, shape, **options) for h in (peer, exact))]
    valid = results[2].isfinite()
    assert results[0].shape == results[2].shape and valid.any()
    assert results[0][~valid].eq(-torch.inf).all()
    assert_close_to_float64(*(t[valid] for t in results))
    # A NaN or infinite grad_output at padding must not reach a gradient.
    grad_output = torch.where(valid, grad_output, torch.nan)
    ours_, (peer_, exact_) = grads(results[0], head, grad_output), (
        grads(torch.where(valid, z, 0.0), h, torch.where(valid, grad_output, 0.0)) for z, h in zip(results[1:],
                                                                                             (peer, exact)))
    for a, b, c, t in zip(ours_, peer_, exact_, [t for t in head if t is not None]):
        assert a.dtype == t.dtype
        assert_close_to_float64(a, b, c)


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + MIXED, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_of_every_form(form, dtypes, device):
    check(form, device, dtypes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["labels-target", "topk-masked", "jagged-ranges"])
@pytest.mark.parametrize("option", OPTIONS)
def test_scale_and_softcap(option, form, bias, device):
    for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        check(form, device, dtypes, bias, **OPTIONS[option])


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 64, 129, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype, width, device):
    check("tuple", device, (dtype, dtype), width=width)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 8, 33, 70])
def test_any_number_of_ids(k, device):
    draw = Draw(device)
    x, w, ids = draw.normal(6, 24).requires_grad_(), draw.normal(40, 24).requires_grad_(), draw.integers(40, 6, k)
    z, expected = candidate_logits(x, w, ids), F.linear(x, w).gather(1, ids)
    assert z.shape == (6, k)
    torch.testing.assert_close(z, expected)
    grad_output = draw.normal(6, k)
    torch.testing.assert_close(grads(z, (x, w), grad_output), grads(expected, (x, w), grad_output))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_only_what_requires_grad_gets_one(wanted, device):
    target, _, head, grad_output = example("topk-target", device)
    every = grads(ours(head, target, softcap=3.0), head, grad_output)
    leaves = [t.detach().requires_grad_(want) for t, want in zip(head, wanted)]
    out = ours(leaves, target, softcap=3.0)
    some = torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad_output.float())
    for a, b in zip(some, [t for t, want in zip(every, wanted) if want]):
        assert_bitwise_equal(a, b)
    t = target.flatten()
    of_op = ops.candidate_logits_backward(
        grad_output.float().view(t.indices.shape), out.detach().view(t.indices.shape), head[0].detach().flatten(0, 1),
        head[1].detach(), head[2].detach(), t.indices, t.values, None, t.row_mask, -100, False, 1.0, 3.0, *wanted)
    for a, b, want in zip(of_op, every, wanted):
        assert a.shape == (0,) if not want else torch.equal(a.view(b.shape), b)


def test_nothing_requires_grad(device):
    target, shape, head, _ = example("topk-target", device)
    expected = ours(head, target)
    with torch.no_grad():
        assert_bitwise_equal(ours(head, target), expected.detach())
    assert_bitwise_equal(ours([t.detach() for t in head], target), expected.detach())


ROWS = torch.tensor([[3, 1, 2], [0, 4, 4], [2, 2, 2]])


@pytest.mark.parametrize("padding", ["index", "weight", "logprob", "mask", "row"])
def test_padding_takes_part_in_nothing(padding, device):
    """Checks padding with any index, weight row and ``grad_output``, and hidden states of rows that have padding
    alone."""
    draw = Draw(device)
    ids = ROWS.to(device)
    dead = torch.tensor([[False, True, False], [False] * 3, [True] * 3], device=device)
    if padding == "row":
        dead[0] = False
    broken = torch.where(dead, 99, ids)
    row_mask = torch.tensor([True, True, False], device=device)
    target = {
        "index": lambda: torch.where(dead, -100, ids),
        "weight": lambda: (broken, (~dead).float()),
        "logprob": lambda: SparseTarget.from_topk(broken, torch.where(dead, -torch.inf, -500.0),
                                                  values_are="log_probs"),
        "mask": lambda: SparseTarget.from_topk(broken, None, mask=~dead),
        "row": lambda: SparseTarget.from_topk(broken, torch.ones(3, 3, device=device), row_mask=row_mask),
    }[padding]()
    x, w, b = draw.normal(3, 8), draw.normal(5, 8), draw.normal(5)
    expected = F.linear(x, w, b).gather(1, ids)
    x[2] = torch.nan
    if padding != "row":
        w[1], b[1] = torch.nan, torch.inf  # an id of padding alone
    head = [t.requires_grad_() for t in (x, w, b)]
    for softcap in (None, 50.0):
        z = ours(head, target, softcap=softcap)
        capped = expected if softcap is None else softcap * torch.tanh(expected / softcap)
        torch.testing.assert_close(z, torch.where(dead, -torch.inf, capped))
        grad_output = torch.where(dead, torch.nan, 1.0)
        for sparse in (False, True):
            gx, gw, gb = grads(ours(head, target, softcap=softcap, sparse_grad=sparse), head, grad_output)
            gw = gw.to_dense()
            assert gx[2].eq(0).all() and gx[:2].isfinite().all() and gx[:2].ne(0).any()
            assert padding == "row" or gw[1].eq(0).all() and gb[1] == 0
            assert gw.isfinite().all() and gb.isfinite().all() and gw[4].ne(0).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_an_upstream_gradient_of_zero_reads_nothing(sparse, device):
    draw = Draw(device)
    x, w = draw.normal(3, 8), draw.normal(5, 8)
    x[2], w[1] = torch.nan, torch.nan
    x, w = x.requires_grad_(), w.requires_grad_()
    z = candidate_logits(x, w, ROWS.to(device), sparse_grad=sparse)
    grad_output = torch.tensor([[1.0, 0, 2], [3, 4, 5], [0, 0, 0]], device=device)
    gx, gw = grads(z, (x, w), grad_output)
    assert gx.isfinite().all() and gw.to_dense().isfinite().all() and gx[2].eq(0).all()
    assert gw.to_dense().ne(0).any(1).tolist() == [True, False, True, True, True]
    assert not sparse or gw.indices().tolist() == [[0, 2, 3, 4]]


@pytest.mark.parametrize("form", ["labels-target", "topk-masked", "topk-ids", "jagged-ranges", "coo"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_the_sparse_gradient_is_the_dense_one(dtypes, form, device):
    target, shape, head, grad_output = example(form, device, *dtypes)
    dense = grads(ours(head, target, **OPTIONS["both"]), head, grad_output)
    out = ours(head, target, sparse_grad=True, **OPTIONS["both"])
    gx, gw, gb = grads(out, head, grad_output)
    assert gw.layout == torch.sparse_coo and gw.is_coalesced() and gw.dtype == head[1].dtype
    assert_bitwise_equal(gw.to_dense(), dense[1])
    assert_bitwise_equal(gx, dense[0])
    assert_bitwise_equal(gb, dense[2])
    assert gw.indices()[0].tolist() == sorted({column for *_, column in places(target, shape)[1]})
    torch.sparse_coo_tensor(gw.indices(), gw.values(), gw.shape, check_invariants=True)


def test_a_sparse_gradient_goes_where_those_of_an_embedding_go(device):
    draw = Draw(device)
    w, x = torch.nn.Parameter(draw.normal(50, 8)), draw.normal(4, 8)
    before = w.detach().clone()
    optimizer = torch.optim.SparseAdam([w])
    for _ in range(2):
        candidate_logits(x, w, draw.integers(20, 4, 3), sparse_grad=True).square().sum().backward()
        candidate_logits(x, w, draw.integers(20, 4, 3), sparse_grad=True).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(w[20:], before[20:]) and not torch.equal(w[:20], before[:20])


def test_no_rows_no_ids_and_nothing_but_padding(device):
    draw = Draw(device)
    w, b = draw.normal(5, 8).requires_grad_(), draw.normal(5).requires_grad_()
    none, offsets = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    of = {  # {description: (rows of the input, ids, shape of the result)}
        "no rows": (0, none.view(0, 3), (0, 3)), "no rows of labels": (0, none, (0,)),
        "no ids": (3, none.view(3, 0), (3, 0)), "no entries": (3, SparseTarget.from_jagged(none, None, offsets), (0,)),
        "padding": (3, torch.full((3, 2), -100, device=device), (3, 2)),
        "no row has it": (0, SparseTarget.from_jagged(none.new_tensor([1, 2]), None, offsets[:1]), (2,)),
    }
    for rows, ids, shape in of.values():
        for sparse in (False, True):
            x = torch.full((rows, 8), torch.nan, device=device, requires_grad=True)
            z = ours((x, w, b), ids, sparse_grad=sparse, softcap=2.0)
            assert z.shape == shape and z.eq(-torch.inf).all()
            gx, gw, gb = grads(z, (x, w, b), torch.ones(shape, device=device))
            assert gx.shape == x.shape and not gx.any() and not gb.any() and gw.shape == w.shape
            assert not gw.to_dense().any() and (not sparse or gw._nnz() == 0)


def test_a_single_row_without_leading_dimensions(device):
    draw = Draw(device)
    x, w = draw.normal(8), draw.normal(5, 8)
    torch.testing.assert_close(candidate_logits(x, w, torch.tensor([3, 1], device=device)), (w @ x)[[3, 1]])
    one = candidate_logits(x, w, torch.tensor(4, device=device))
    assert one.shape == ()
    torch.testing.assert_close(one, (w @ x)[4])


def test_as_many_dimensions_as_the_input_are_ids_and_one_less_labels(device):
    draw = Draw(device)
    x, w = draw.normal(3, 3, 8), draw.normal(5, 8)
    labels = draw.integers(5, 3, 3)
    assert candidate_logits(x, w, labels).shape == (3, 3)
    assert candidate_logits(x, w, labels[..., None]).shape == (3, 3, 1)
    assert candidate_logits(x[0], w, labels).shape == (3, 3)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert_bitwise_equal(candidate_logits(x, w, labels.to(dtype)), candidate_logits(x, w, labels))


def test_entries_come_in_the_order_in_which_they_were_given(device):
    draw = Draw(device)
    x, w = draw.normal(2, 8), draw.normal(9, 8)
    full = F.linear(x, w)
    index = torch.tensor([[1, 0, 1], [4, 7, 2]], device=device)
    coo = torch.sparse_coo_tensor(index, torch.ones(3, device=device), (2, 9))
    torch.testing.assert_close(candidate_logits(x, w, coo), torch.stack([full[0, 7], full[1, 4], full[1, 2]]))
    kept = SparseTarget.from_jagged(torch.tensor([4, 2, 7], device=device), None,
                                    torch.tensor([0, 2, 3], device=device))
    torch.testing.assert_close(candidate_logits(x, w, kept), torch.stack([full[0, 4], full[0, 2], full[1, 7]]))


def test_ids_of_samples_come_in_their_shape(device):
    draw = Draw(device)
    jagged = SparseTarget.from_jagged(draw.integers(9, 5), None, torch.tensor([0, 2, 5], device=device))
    by_sample = SparseTarget(dict(jagged.items()))
    hidden, weight = draw.normal(2, 4), draw.normal(9, 4)
    found = candidate_logits(hidden, weight, by_sample)
    assert found.shape == by_sample.indices.shape == (2, 3)
    assert torch.equal(found[by_sample.indices >= 0], candidate_logits(hidden, weight, jagged))


def test_strides_of_every_kind(device):
    draw = Draw(device)
    ids, grad_output = draw.integers(9, 4, 3), draw.normal()
    wide, tall = draw.normal(8, 20), draw.normal(16, 30)
    x, w = draw.normal(4, 8), draw.normal(9, 8)
    for x_, w_ in ((wide[::2, 3:11], w), (wide[:, ::2].T[:4], w), (x, tall[:9, 5:13]), (x, tall[:9, ::2][:, :8]),
                   (x, tall[:8, :9].T), (x[:1].expand(4, 8), w), (x, w[:1].expand(9, 8))):
        head = [t.detach().requires_grad_() for t in (x_, w_)]
        z, expected = candidate_logits(*head, ids), F.linear(*head).gather(1, ids)
        torch.testing.assert_close(z, expected)
        torch.testing.assert_close(torch.autograd.grad(z.sum(), head, grad_output),  # grad_output is expanded
                                   torch.autograd.grad(expected.sum(), head, grad_output))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hot", [False, True])
def test_any_number_of_threads_gives_the_same_bits(hot, dtype, threads, device):
    draw = Draw(device)
    x, w = draw.normal(160, 300).to(dtype).requires_grad_(), draw.normal(99, 300).to(dtype).requires_grad_()
    ids = draw.integers(99, 160, 9)
    if hot:  # one id in every row
        ids[:, 4] = 7
    grad_output, results = draw.normal(160, 9), []
    for count in (1, 2, 3, 1):
        threads(count)
        z = candidate_logits(x, w, ids)
        sparse = candidate_logits(x, w, ids, sparse_grad=True)
        results.append([z.detach(), *grads(z, (x, w), grad_output), grads(sparse, (x, w), grad_output)[1].to_dense()])
    for result in results:
        for a, b in zip(result, results[0]):
            assert_bitwise_equal(a, b)
    assert_bitwise_equal(results[0][2], results[0][3])


# ------------------------------------------------------------------------------------------- derivatives and transforms

def small(device, form="topk-masked"):
    target, shape, head, _ = example(form, device, torch.float64, width=3)
    head = [torch.where(t.isfinite(), t, 0.0).detach().requires_grad_() for t in head]  # differences of NaN are NaN
    padding = plain(head, target, shape).isinf()
    return head, target, lambda x, w, b, **o: torch.where(padding, 0.0, ours((x, w, b), target, **o))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", ["labels-target", "topk-masked", "jagged-ranges"])
def test_gradcheck_of_first_and_second_order(form, option, device):
    head, _, f = small(device, form)
    assert gradcheck(lambda *h: f(*h, **OPTIONS[option]), head, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda *h: f(*h, **OPTIONS[option]), head, fast_mode=True)


def test_a_gradient_that_is_differentiated_is_dense(device):
    head, _, f = small(device)
    results = []
    for sparse in (False, True):
        first = torch.autograd.grad(f(*head, sparse_grad=sparse).sin().sum(), head, create_graph=True)
        results.append(torch.autograd.grad(sum(t.square().sum() for t in first), head))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_the_composition_is_the_op(form, device):
    target, shape, head, grad_output = example(form, device, torch.float64)
    t = as_target(target, torch.Size((*shape, CLASSES))).flatten()
    c = Candidates(t.indices, t.values, t.offsets, t.row_mask, logprobs=t.values_are == "log_probs", **OPTIONS["both"])
    flat = [head[0].detach().flatten(0, -2), head[1].detach(), head[2].detach()]
    op = ops.candidate_logits(*flat, *c)
    torch.testing.assert_close(op, reference.candidate_logits(*flat, *c))
    grad = grad_output.view(op.shape)
    for a, b in zip(ops.candidate_logits_backward(grad, op, *flat, *c),
                    reference.candidate_logits_backward(grad, op, *flat, *c)):
        torch.testing.assert_close(a, b)


def test_out_of_range_the_composition_is_nan_without_a_gradient(device):
    head = [t.requires_grad_() for t in (Draw(device).normal(2, 8), Draw(device).normal(5, 8))]
    z = reference.candidate_logits(*head, None, torch.tensor([[5, 1], [-1, 0]], device=device))
    assert z.isnan().tolist() == [[True, False], [True, False]]
    assert all(g.isfinite().all() for g in torch.autograd.grad(z.sum(), head))


def test_a_compiled_function_refuses_a_sparse_gradient(device, fresh_compiler):
    x, w = Draw(device).normal(4, 8), Draw(device).normal(9, 8).requires_grad_()
    f = torch.compile(lambda x: candidate_logits(x, w, torch.zeros(4, 1, dtype=torch.int64, device=device),
                                                 sparse_grad=True), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="sparse_grad must be False under torch.compile"):
        f(x)


def test_without_a_device_there_are_shapes(device):
    x, w = torch.empty(2, 3, 8, device="meta", requires_grad=True), torch.empty(9, 8, device="meta", requires_grad=True)
    for dtype in (torch.bfloat16, torch.float64):
        z = candidate_logits(x.to(dtype), w.to(dtype), torch.zeros(2, 3, 4, dtype=torch.int64, device="meta"))
        assert z.shape == (2, 3, 4) and z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert [g.shape for g in torch.autograd.grad(z.sum(), (x, w))] == [x.shape, w.shape]
    z = candidate_logits(x, w, torch.zeros(2, 3, dtype=torch.int64, device="meta"), sparse_grad=True)
    assert_refused(lambda: torch.autograd.grad(z.sum(), w), "sparse_grad", "meta")


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_a_gradient_is_of_its_weights_dtype(half, weights, sparse, device):
    draw = Draw(device)
    x, w = draw.normal(4, 8).requires_grad_(), draw.normal(9, 8).to(weights).requires_grad_()
    ids, grad_output = draw.integers(9, 4, 3), draw.normal(4, 3)
    with torch.autocast(device, half):
        z = candidate_logits(x, w, ids, sparse_grad=sparse)
    of_x, of_w = torch.autograd.grad(z, (x, w), grad_output)
    assert of_w.is_sparse == sparse and of_w.dtype == weights
    near = torch.finfo(half).eps
    of_entries = grad_output[..., None] * x[:, None]
    exact = torch.zeros(9, 8, device=device).index_add(0, ids.flatten(), of_entries.flatten(0, 1))
    torch.testing.assert_close(of_w.to_dense().float(), exact, rtol=4 * near, atol=8 * near)
    torch.testing.assert_close(of_x, (grad_output[..., None] * w[ids]).sum(1), rtol=4 * near, atol=8 * near)


# ---------------------------------------------------------------------------------------------------- memory and errors

PEAK = """
import re, torch
from sparse_ce import candidate_logits
torch.set_num_threads(1)
def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
def run(n):
    z = candidate_logits(x[:n], w, ids[:n])
    return torch.autograd.grad(z.sum(), x)[0]
x, w, ids = torch.randn(256, 1024, requires_grad=True), torch.randn(32000, 1024), torch.randint(32000, (256, 128))
run(2)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
run(256)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads /proc")
def test_neither_the_rows_of_the_ids_nor_a_frozen_heads_gradient_are_held(tmp_path):
    """Checks the peak memory: either tensor takes 125 MiB, the gradient for the input 1 MiB."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(sparse_ce.__file__)))
    done = forked.run("-c", PEAK, cwd=tmp_path, env={**os.environ, "PYTHONPATH": package})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 12 << 20, f"{int(done.stdout) / 2**20:.1f} MiB"


def test_what_is_refused(device):
    draw = Draw(device)
    x, w, b, ids = draw.normal(2, 3, 8), draw.normal(9, 8), draw.normal(9), draw.integers(9, 2, 3, 4)
    refused = {
        "linear_weight must be (V, 8)": lambda: candidate_logits(x, w[:, :7], ids),
        "linear_bias must be (9,)": lambda: candidate_logits(x, w, ids, linear_bias=b[:4]),
        "linear_weight must have the dtype of input (Float), got Double": lambda: candidate_logits(x, w.double(), ids),
        "linear_bias must have the dtype of input": lambda: candidate_logits(x, w, ids, linear_bias=b.half()),
        "input must be float16": lambda: candidate_logits(x.long(), w, ids),
        "indices must be [2, 3, 'K'], K ids for each row of input, or [2, 3], one id per row, got [2, 3, 4, 1]":
            lambda: candidate_logits(x, w, ids[..., None]),
        "got [3, 2]": lambda: candidate_logits(x, w, ids[..., 0].T),
        "got [2, 2, 4]": lambda: candidate_logits(x, w, ids[:, :2]),
        "indices must be of an integer dtype, got torch.float32": lambda: candidate_logits(x, w, ids.float()),
        "indices must have leading shape [2, 3]": lambda: candidate_logits(x, w, SparseTarget.from_topk(ids[0], None)),
        "indices must have 9 classes, got 8":
            lambda: candidate_logits(x, w, SparseTarget.from_topk(ids, None, num_classes=8)),
        "logit_scale must be a number, got a Tensor of shape [2, 3]":
            lambda: candidate_logits(x, w, ids, logit_scale=torch.ones(2, 3)),
        "logit_scale must be finite": lambda: candidate_logits(x, w, ids, logit_scale=float("inf")),
        "softcap must be a positive number or None, got 0": lambda: candidate_logits(x, w, ids, softcap=0),
        "sparse_grad must be a bool, got 1": lambda: candidate_logits(x, w, ids, sparse_grad=1),
        "indices on meta": lambda: candidate_logits(x, w, ids.to("meta")),
    }
    for message, call in refused.items():
        assert_refused(call, message)


def test_an_id_that_is_no_class_is_named_with_its_row(device):
    if device != "cpu":
        pytest.skip("NaN there, which the emulated kernels' program tests")
    x, w = Draw(device).normal(3, 8), Draw(device).normal(9, 8)
    for wrong in (9, -1, 2**31 - 1):
        ids = torch.tensor([[1, 2], [3, wrong], [4, 5]])
        assert_refused(lambda: candidate_logits(x, w, ids), "[0, 9)", f"got {wrong} in row 1", error=RuntimeError)
        assert_refused(lambda: ops.candidate_logits_backward(torch.ones(3, 2), None, x, w, None, ids), "row 1")


def test_the_ops_refuse_what_does_not_fit(device):
    draw = Draw(device)
    x, w, ids, grad = draw.normal(3, 8), draw.normal(9, 8), draw.integers(9, 3, 2), draw.normal(3, 2)
    backward = ops.candidate_logits_backward
    refused = {
        "input must be (rows, width)": lambda: ops.candidate_logits(x[None], w, None, ids),
        "indices must be (3,) or (3, K)": lambda: ops.candidate_logits(x, w, None, ids[:2]),
        "values must have the shape of indices": lambda: ops.candidate_logits(x, w, None, ids, grad[:2]),
        "row_mask must be of dtype bool": lambda: ops.candidate_logits(x, w, None, ids, None, None, ids[:, 0]),
        "softcap must be a positive number": lambda: ops.candidate_logits(x, w, None, ids, softcap=-1.0),
        "logit_scale must be finite": lambda: ops.candidate_logits(x, w, None, ids, logit_scale=float("nan")),
        "grad must have the shape of indices": lambda: backward(grad[:2], None, x, w, None, ids),
        "grad must be of dtype Float": lambda: backward(grad.double(), None, x, w, None, ids),
        "output must be the result of candidate_logits": lambda: backward(grad, None, x, w, None, ids, softcap=1.0),
        "output must have the shape of indices": lambda: backward(grad, grad[:2], x, w, None, ids, softcap=1.0),
        "weight_grad must be True": lambda: ops.candidate_logits_backward_sparse(grad, None, x, w, None, ids,
                                                                                 weight_grad=False),
        "grad must be on the device of input": lambda: ops.candidate_logits_backward_sparse(
            grad.to("meta"), None, x, w, None, ids),
    }
    for message, call in refused.items():
        assert_refused(call, message)
