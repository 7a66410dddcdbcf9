"""Compares log-probabilities, their tail, entropy and collision, and each class's gradient, with the exact ones.

The rows are confident by up to 80 nats. Errors are limited as in test_cross_entropy_exact.py.
"""

import numpy as np
import pytest
import torch

import sparse_ce
from cases import DTYPES, FORMS, Draw, sparsely
from exact_rows import ExactRows, Rough, assert_exact, confident_logits, long
from select_cases import entries_of

CLASSES, SHAPE = 37, (4, 8)
OUTPUTS = ("log_probs", "lse", "log_tail", "entropy", "mean_logit", "collision")
ALL = dict(return_log_tail=True, return_entropy=True, return_mean_logit=True, return_collision=True)
OPTIONS = {"plain": {}, "row_scale": dict(row_scale=True), "softcap": dict(softcap=60.0)}


def make(form, device, dtype, options, shape=SHAPE, classes=CLASSES):
    draw = Draw(device)
    case = FORMS[form](shape, classes, draw)
    logits, keywords = confident_logits(case.dense, draw, dtype), dict(options)
    if keywords.pop("row_scale", False):
        keywords["logit_scale"] = draw.uniform(*case.shape, low=0.3, high=1.5)
    return case, logits, keywords, draw


def compare(case, logits, keywords, draw):
    """Compares each output, and its derivatives alone, with the exact ones in the active rows."""
    leaf = logits.detach().requires_grad_()
    out = sparse_ce.selected_log_probs(leaf, case.target, **keywords, **ALL)
    entries, entries_shape = entries_of(case.target, torch.Size((*case.shape, case.classes)))
    active = (~case.ignored).reshape(-1).cpu().numpy()
    entries = [own if on else [] for own, on in zip(entries, active)]
    rows = ExactRows(logits.reshape(-1, case.classes), **keywords)
    shape = rows.z.value.shape
    at = np.array([(i, r, c) for r, own in enumerate(entries) for i, c in own])
    chosen, per_class = np.zeros(shape, bool), np.zeros((2, *shape), np.longdouble)
    chosen[at[:, 1], at[:, 2]] = True
    chosen[chosen.all(1)] = False  # such a row has no tail
    with np.errstate(divide="ignore", invalid="ignore"):
        log_tail, of_tail = rows.tail(chosen)
    has_tail = np.array([len({c for _, c in own}) < case.classes for own in entries])
    exact = dict(lse=rows.lse, log_tail=log_tail, entropy=rows.entropy, mean_logit=rows.mean_logit,
                 collision=rows.collision)
    derivatives = dict(lse=rows.probs, log_tail=of_tail, entropy=rows.of_entropy(),
                       mean_logit=Rough(np.full(shape, 1 / np.longdouble(case.classes))), collision=rows.of_collision())
    for name in OUTPUTS:
        output = getattr(out, name)
        upstream = draw.normal(*output.shape).to(output.dtype)
        gradient, = torch.autograd.grad(output, leaf, upstream, retain_graph=True)
        upstream = long(upstream).reshape(-1)
        if name == "log_probs":
            flat = output.reshape(-1)[torch.from_numpy(at[:, 0]).to(output.device)]
            assert_exact(name, flat, rows.log_probs[at[:, 1], at[:, 2]], logits.dtype)
            for part, of in zip(per_class, (upstream, np.abs(upstream))):
                np.add.at(part, (at[:, 1], at[:, 2]), of[at[:, 0]])
            of_z = -rows.less_shares(Rough(*per_class))
        else:
            on = active & has_tail if name == "log_tail" else active
            compared = output.reshape(-1)[torch.from_numpy(on).to(output.device)]
            assert_exact(name, compared, exact[name][on], logits.dtype)
            of_z = derivatives[name] * (upstream * on)[:, None]
        on = torch.from_numpy(active & has_tail).to(gradient.device)
        assert_exact(f"gradient of {name}", gradient.reshape(shape)[on], rows.of_logits(of_z)[active & has_tail],
                     logits.dtype)
    assert gradient.reshape(shape)[case.ignored.reshape(-1)].eq(0).all()


@pytest.mark.parametrize("form,options,dtype", sparsely(5, FORMS, OPTIONS.items(), DTYPES))
def test_confident_rows(form, options, dtype, device):
    compare(*make(form, device, dtype, options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [10, 150, 4099])
def test_confident_rows_of_any_width(classes, dtype, device):
    for form in ("labels-int64", "topk-ids"):
        compare(*make(form, device, dtype, {}, (16,), classes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 7])
def test_topk_of_confident_rows(k, dtype, device):
    for classes in (37, 4099):
        draw = Draw(device)
        logits = confident_logits(draw.uniform(16, classes), draw, dtype)
        target, log_tail = sparse_ce.topk_log_probs(logits, k, return_log_tail=True)
        rows = ExactRows(logits)
        indices = target.indices.cpu().numpy()
        row = np.arange(len(indices))[:, None]
        assert_exact("log_probs", target.values, rows.log_probs[row, indices], dtype)
        chosen = np.zeros(rows.z.value.shape, bool)
        chosen[row, indices] = True
        assert_exact("log_tail", log_tail, rows.tail(chosen)[0], dtype)
