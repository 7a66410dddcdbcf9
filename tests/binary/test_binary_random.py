"""Tests random arguments of binary cross entropy together, on logits and through a head, against float64."""

import pytest
import torch
import torch.nn.functional as F

from binary_cases import PADDED, REDUCTIONS, check, make
from cases import DTYPES, FORMS, Draw
from sparse_ce import binary_cross_entropy_with_logits, linear_binary_cross_entropy


def drawn(seed):
    """Returns form, dtype, options, reduction, way and laid-out logits of a random call."""
    draw = Draw("cpu", 1000 + seed)

    def one_of(*choices):
        return choices[int(draw.integers(len(choices), 1))]

    def chance(p):
        return float(draw.uniform(1)) < p

    options = {}
    for name in ("weight", "pos_weight", "row_mask", "row_weight"):
        if chance(0.4):
            options[name] = True
    if chance(0.5):
        options["label_smoothing"] = one_of(0.05, 0.3, 1.0)
    if chance(0.5):
        number = one_of(0.0, 0.5, 1.0, 2.0, 4.0)
        options["gamma"] = one_of(number, (number, 2.0), (1.0, number))
    if chance(0.3):
        options["clip"] = one_of(0.01, 0.05, 0.2)
        if options.get("gamma", 0.0) not in (0.0, 1.0, 2.0, 4.0):
            options["gamma"] = one_of((0.5, 2.0), (0.0, 1.0))  # small powers of a difference lose digits near 0
        elif options.get("gamma") == 0.5:
            options["gamma"] = 1.0
    if chance(0.3):
        options["logit_scale"] = one_of(0.3, 2.0, True)
    if chance(0.3) and options.get("logit_scale") is not True:
        options["logit_bias"] = one_of(-3.0, 0.5)
    if chance(0.3):
        options["num_classes"] = 37
    if chance(0.3):
        options["ignore_index"] = one_of(0, 3, -1)
    if options.get("logit_scale") is True:
        options["logit_bias"] = True
    reduction = one_of(*REDUCTIONS)
    if reduction in ("mean", "batchmean") and chance(0.3):
        options["normalizer"] = one_of(7, 0.5)
    form = one_of(*FORMS)
    if form == "labels-uint8" and options.get("ignore_index") == -1:
        options["ignore_index"] = 3
    return (form, one_of(*DTYPES, torch.float32), options, reduction, one_of("plain", "plain", "backward", "forward"),
            one_of("rows", "rows apart", "columns apart"))


LAYOUTS = {"rows": lambda t: t, "rows apart": lambda t: F.pad(t, (0, 3), value=float("nan"))[..., :t.shape[-1]],
           "columns apart": lambda t: torch.stack((t, torch.zeros_like(t)), -1)[..., 0]}


@pytest.mark.parametrize("seed", range(300))
def test_random_logits(seed, device):
    form, dtype, options, reduction, way, layout = drawn(seed)
    problem = make(form, device, dtype, options, seed)

    def function(logits, target, **keywords):
        inplace = False if way == "plain" else way
        return binary_cross_entropy_with_logits(LAYOUTS[layout](logits * 1), target, inplace=inplace, **keywords)

    check(problem, reduction, seed, function)


@pytest.mark.parametrize("seed", range(150))
def test_random_heads(seed, device, monkeypatch):
    """Checks a head that is the identity matrix, through which logits and their gradient pass unchanged."""
    form, dtype, options, reduction, way, _ = drawn(seed + 500)
    options.pop("num_classes", None)
    problem = make(form, device, dtype, options, seed)
    classes = problem.logits.shape[-1]
    assert classes < PADDED
    identity = torch.eye(classes, dtype=dtype, device=device)
    size = (None, 1, 7, classes, 100)[seed % 5]

    def function(logits, target, **keywords):
        return linear_binary_cross_entropy(logits, identity, target, chunk_classes=size, **keywords)

    check(problem, reduction, seed, function)
