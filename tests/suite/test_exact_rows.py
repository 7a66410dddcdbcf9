"""Compares the oracle of exact rows with 60 digits of mpmath."""

import numpy as np
import pytest
import torch

from cases import Draw
from exact_rows import LEADS, ExactRows, Rough, confident_logits, long

mpmath = pytest.importorskip("mpmath")


def digits(numbers):
    return [[mpmath.mpf(float(x)) for x in row] for row in numbers]


def by_definition(z, weights, class_weights, e, z_loss, chosen):
    """Returns for a row (loss, entropy, collision, log_tail) and their derivatives, from p = exp(z) / sum."""
    n = len(z)
    total = sum(mpmath.exp(x) for x in z)
    p, lse = [mpmath.exp(x) / total for x in z], mpmath.log(total)
    w = [(1 - e) * a + mpmath.mpf(e) / n * b for a, b in zip(weights, class_weights)]
    entropy, squares = -sum(q * mpmath.log(q) for q in p), sum(q * q for q in p)
    tail = sum(q for q, c in zip(p, chosen) if not c)
    values = (-sum(a * mpmath.log(q) for a, q in zip(w, p)) + z_loss * lse ** 2, entropy, mpmath.log(squares),
              mpmath.log(tail))
    return values, ([q * (sum(w) + 2 * z_loss * lse) - a for a, q in zip(w, p)],
                    [-q * (mpmath.log(q) + entropy) for q in p], [2 * q * (q / squares - 1) for q in p],
                    [(0 if c else q / tail) - q for q, c in zip(p, chosen)])


@pytest.mark.parametrize("softcap", [None, 40.0])
def test_the_oracle_has_all_digits_of_a_long_double(softcap):
    draw, classes = Draw("cpu"), 6
    dense = draw.uniform(16, classes, low=-0.5, high=1.5, dtype=torch.float64)
    class_weights, chosen = draw.uniform(classes, dtype=torch.float64), dense > 1
    chosen[:, 0], chosen[:, 1] = True, False
    logits = confident_logits(dense, draw, torch.float64)
    e, z_loss = 0.25, 0.03125
    rows = ExactRows(logits, softcap=softcap)
    weights = Rough(long(dense))
    log_tail, of_tail = rows.tail(chosen.numpy())
    found = ((rows.cross_entropy(weights, long(class_weights), e, z_loss), rows.entropy, rows.collision, log_tail),
             (rows.of_cross_entropy(weights, long(class_weights), e, z_loss), rows.of_entropy(), rows.of_collision(),
              of_tail))
    with mpmath.workdps(60):
        z = digits(logits)
        if softcap is not None:
            z = [[softcap * mpmath.tanh(x / softcap) for x in row] for row in z]
        others = digits(dense), digits(class_weights[None])[0]
        for r in range(len(z)):
            exact = by_definition(z[r], others[0][r], others[1], e, z_loss, chosen[r].tolist())
            for rough, expected in zip((*found[0], *found[1]), (*exact[0], *exact[1])):
                numbers = expected if isinstance(expected, list) else [expected]
                mine, size, error = (np.atleast_1d(t[r]) for t in (rough.value, rough.size, rough.error))
                for number, is_, terms, away in zip(numbers, mine, size, error):
                    # A long double is exact as the sum of two doubles.
                    high = float(is_)
                    difference = mpmath.mpf(high) + mpmath.mpf(float(is_ - np.longdouble(high))) - number
                    assert abs(difference) <= float(np.finfo(np.longdouble).eps) * float(4 * terms + away + 1e-300)


def test_leads_are_those_that_were_asked_for():
    logits = confident_logits(torch.rand(4, 8, 37), Draw("cpu"), torch.float32).flatten(0, 1)
    top = logits.double().topk(2, 1).values
    for lead in LEADS:
        assert (top[:, 0] - top[:, 1]).sub(lead).abs().le(1e-5).sum() == 4
