"""Tests log-probabilities of a linear head against those of its logits: values, gradients, memory, modes."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from cases import FORMS, Draw, slow
from close import assert_bitwise_equal
from compiling import op_arguments
from select_cases import ALL, OUTPUTS
from sparse_ce import linear_selected_log_probs, selected_log_probs

ops = torch.ops.sparse_ce
WIDTH, CLASSES = 8, 37


def example(form, device, dtype=torch.float64, shape=(3, 4), ignore_index=-100):
    draw = Draw(device)
    case = FORMS[form](shape, CLASSES, draw, ignore_index)
    hidden = draw.normal(*case.shape, WIDTH, dtype=dtype)
    hidden[case.ignored] = torch.nan
    return case, hidden, draw.normal(CLASSES + 4, WIDTH, dtype=dtype), draw.normal(CLASSES + 4, dtype=dtype)


def total(out, valid=None):
    """Returns a scalar with a different ``grad_output`` for each output, without padding."""
    terms = [torch.where(out.log_probs.isneginf(), 0.0, out.log_probs), *(getattr(out, n) for n in OUTPUTS[1:])]
    return sum(((i + 1) * t * torch.linspace(0.5, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)).sum()
               for i, t in enumerate(terms) if t is not None)


@pytest.mark.parametrize("chunk_rows", [None, 1, 5, 64])
@pytest.mark.parametrize("options", [dict(), dict(softcap=4.0, row_scale=True), dict(ignore_index=3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_log_probs_of_the_logits(form, options, chunk_rows, device):
    case, hidden, weight, bias = example(form, device, ignore_index=options.get("ignore_index", -100))
    keywords = dict(options, num_classes=CLASSES)
    if keywords.pop("row_scale", False):
        keywords["logit_scale"] = Draw(device, 3).uniform(*case.shape, low=0.3, high=2)
        keywords["logit_scale"][case.ignored] = torch.nan
    results = []
    for linear in (True, False):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        if linear:
            out = linear_selected_log_probs(leaves[0], leaves[1], case.target, linear_bias=leaves[2],
                                            chunk_rows=chunk_rows, **keywords, **ALL)
        else:
            x = torch.where(case.ignored[..., None], 0.0, leaves[0])
            out = selected_log_probs(F.linear(x, *leaves[1:]), case.target, **keywords, **ALL)
        results.append((*vars(out).values(), *torch.autograd.grad(total(out), leaves)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
    assert (results[0][-3][case.ignored] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_other_dtypes_are_near_to_float64(dtype, mixed, device):
    draw = Draw(device)
    hidden, weight = draw.normal(40, 16).to(dtype), draw.normal(300, 16).to(torch.float32 if mixed else dtype)
    ids = draw.integers(300, 40, 3)
    ids[::5] = -100
    results = []
    for wide in (False, True):
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (hidden, weight)]
        out = linear_selected_log_probs(*leaves, ids, return_entropy=True, return_log_tail=True, chunk_rows=16)
        results.append((out.log_probs, out.entropy, out.log_tail, *torch.autograd.grad(total(out), leaves)))
    rough = torch.finfo(dtype).eps
    for ours, exact in zip(*results):
        scale = exact[exact.isfinite()].abs().max()
        near = (ours.double() - exact).nan_to_num(0, 0, 0).abs().max()
        assert near <= 40 * rough * scale
    assert results[0][-2].dtype == dtype and results[0][-1].dtype == weight.dtype


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias", "scale", "weight bias", "hidden scale"])
def test_any_subset_of_gradients(wanted, device):
    case, hidden, weight, bias = example("topk-ids", device)
    tensors = dict(hidden=hidden, weight=weight, bias=bias, scale=torch.tensor(0.7, dtype=torch.float64, device=device))
    results = []
    for linear in (True, False):
        leaf = {k: t.clone().requires_grad_(k in wanted.split()) for k, t in tensors.items()}
        keywords = dict(logit_scale=leaf["scale"], num_classes=CLASSES, **ALL)
        if linear:
            out = linear_selected_log_probs(leaf["hidden"], leaf["weight"], case.target, linear_bias=leaf["bias"],
                                            **keywords)
        else:
            x = torch.where(case.ignored[..., None], 0.0, leaf["hidden"])
            out = selected_log_probs(F.linear(x, leaf["weight"], leaf["bias"]), case.target, **keywords)
        results.append(torch.autograd.grad(total(out), [leaf[k] for k in wanted.split()]))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck_of_first_and_second_order(device):
    draw = Draw(device)
    hidden, weight, bias = (draw.normal(*s, dtype=torch.float64).requires_grad_() for s in ((3, 4), (6, 4), (6,)))
    scale = torch.tensor(1.2, dtype=torch.float64, device=device, requires_grad=True)
    ids = torch.tensor([[0, 2], [3, 3], [5, -100]], device=device)

    def f(*leaves):
        out = linear_selected_log_probs(leaves[0], leaves[1], ids, linear_bias=leaves[2], logit_scale=leaves[3],
                                        softcap=5.0, padding_value=0.0, chunk_rows=2, return_log_tail=True,
                                        return_entropy=True, return_mean_logit=True, return_collision=True)
        return tuple(getattr(out, name) for name in OUTPUTS)

    assert gradcheck(f, (hidden, weight, bias, scale), check_forward_ad=True, check_undefined_grad=True)
    assert gradgradcheck(f, (hidden, weight, bias, scale))


def test_under_torch_func_and_vmap(device):
    draw = Draw(device)
    hidden, weight, ids = draw.normal(2, 3, 4), draw.normal(6, 4), draw.integers(6, 2, 3)

    def f(h, i):
        return linear_selected_log_probs(h, weight, i).log_probs.sum()

    torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(hidden, ids),
                               torch.stack([torch.func.grad(f)(h, i) for h, i in zip(hidden, ids)]))


def test_checkpointed_it_gives_the_same(device):
    draw = Draw(device)
    hidden, weight, ids = draw.normal(6, 4), draw.normal(9, 4), draw.integers(9, 6)
    grads = []
    for run in (lambda f, h: f(h), lambda f, h: checkpoint(f, h, use_reentrant=False)):
        leaf = hidden.clone().requires_grad_()
        run(lambda h: linear_selected_log_probs(h, weight, ids, return_entropy=True).entropy.sum(), leaf).backward()
        grads.append(leaf.grad)
    assert_bitwise_equal(*grads)


def test_autocast_multiplies_as_linear_would(device):
    draw = Draw(device)
    hidden, weight, ids = draw.normal(6, 8), draw.normal(30, 8).requires_grad_(), draw.integers(30, 6)
    with torch.autocast(device, torch.bfloat16):
        out = linear_selected_log_probs(hidden, weight, ids)
    same = linear_selected_log_probs(hidden.bfloat16(), weight, ids)
    assert_bitwise_equal(out.log_probs, same.log_probs)
    out.log_probs.sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kind,requires_grad", [("labels", False), ("ranges", False), *slow(("topk", True))])
def test_opcheck_of_linear_select(kind, requires_grad, device, fresh_compiler):
    _, target, rows = op_arguments(kind, requires_grad, device)
    draw = Draw(device)
    head = [draw.normal(*s).requires_grad_(requires_grad) for s in ((4, 5), (7, 5), (7,))]
    wanted = dict(loss=True, log_tail=True, entropy=True, mean_logit=True, argmax=True, collision=True, rank=True)
    torch.library.opcheck(ops.linear_select.default, (*head, *target), wanted)
    out = [t.detach() for t in ops.linear_select(*(t.detach() for t in head), *target, **wanted)]
    given = (rows, rows.detach(), torch.randn_like(out[3]), rows.detach(), rows.detach(), None,
             rows.detach(), *head, out[1], out[2], out[4], out[5], out[8], *target)
    torch.library.opcheck(ops.linear_select_backward.default, given, dict(values_grad=target[1] is not None))
    torch.library.opcheck(ops.linear_select_backward.default, given, dict(
        scale_grad=True, weight_grad=False, row_scale=torch.ones_like(rows[0]).detach()))


def test_compiled_it_is_one_graph(device, fresh_compiler):
    draw = Draw(device)
    hidden, weight, ids = draw.normal(6, 4), draw.normal(9, 4), draw.integers(9, 6, 2)

    def f(h, w):
        out = linear_selected_log_probs(h, w, ids, return_entropy=True)
        return out.log_probs.sum() + out.entropy.sum()

    results = []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = g(*leaves)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_32_a_frozen_head_allocates_nothing_of_its_size(device):
    hidden = torch.randn(64, 32, device=device, requires_grad=True)
    weight = torch.randn(4096, 32, device=device)
    ids = torch.randint(4096, (64,), device=device)
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_selected_log_probs(hidden, weight, ids, chunk_rows=4).log_probs.sum().backward()
    name = "device_memory_usage" if device == "cuda" else "cpu_memory_usage"
    assert max(getattr(event, name) for event in profile.events()) < weight.numel() * 4 // 2


def test_wrong_arguments_are_named(device):
    hidden, weight = torch.zeros(2, 4, device=device), torch.zeros(7, 4, device=device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    for keywords, message in ((dict(chunk_rows=0), "chunk_rows must be a positive integer"),
                              (dict(num_classes=8), r"num_classes must be in \[1, 7\] \(the rows of linear_weight\)"),
                              (dict(linear_bias=torch.zeros(6, device=device)), r"linear_bias must be \(7,\)")):
        with pytest.raises(ValueError, match=f"sparse_ce: {message}"):
            linear_selected_log_probs(hidden, weight, ids, **keywords)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="got 7 in row 1"):
            linear_selected_log_probs(hidden, weight, torch.tensor([0, 7]))
