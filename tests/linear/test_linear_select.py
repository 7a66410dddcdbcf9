"""Tests log-probabilities of a linear head against those of its logits: values, gradients, memory, modes."""

import pytest
import torch
import torch.nn.functional as F

from cases import FORMS, Draw
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
    terms = [torch.where(out.log_probs.isneginf(), 0.0, out.log_probs), *(getattr(out, n, None) for n in OUTPUTS[1:])]
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
        results.append((*out, *torch.autograd.grad(total(out), leaves)))
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
