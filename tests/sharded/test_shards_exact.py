"""Compares what shards of confident rows make together with the exact results, by ops in one process.

The errors are limited as in test_cross_entropy_exact.py. The largest class and the label may be in any shard.
"""

import numpy as np
import pytest
import torch

from cases import Draw
from dense import arithmetic
from exact_rows import ExactRows, Rough, assert_exact, confident_logits, long
from sparse_ce import reference
from sparse_ce._core.arguments import Arguments
from sparse_ce._core.outputs import DIFFERENTIABLE
from sparse_ce.ops.select import SAVED, Outputs, Selected

ops = torch.ops.sparse_ce
ROWS = 16
ASKED = Outputs(loss=True, log_tail=True, entropy=True, collision=True)
CUTS = {"one": (0, 1), "halves": (0, 0.5, 1), "some are empty": (0, 0, 0.02, 0.5, 0.5, 0.97, 1),
        "many": tuple(np.linspace(0, 1, 17))}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("classes", [37, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shards_of_confident_rows(dtype, classes, cuts, device):
    for seed, offset in enumerate((0, 1, classes // 2)):
        draw = Draw(device, seed)
        logits = confident_logits(draw.uniform(ROWS, classes), draw, dtype)
        labels = (logits.argmax(1) + offset) % classes
        a, rows = Arguments(labels, num_classes=classes), ExactRows(logits)
        at, weights = (np.arange(ROWS), labels.cpu().numpy()), np.zeros((ROWS, classes), np.longdouble)
        weights[at] = 1
        weights, one = Rough(weights), np.ones(classes, np.longdouble)
        log_tail, of_tail = rows.tail(weights.value > 0)
        exact = dict(loss=rows.cross_entropy(weights, one), lse=rows.lse, log_probs=rows.log_probs[at],
                     log_tail=log_tail, entropy=rows.entropy, collision=rows.collision)
        of_logits = dict(loss=rows.of_cross_entropy(weights, one), lse=rows.probs, log_probs=-rows.less_shares(weights),
                         log_tail=of_tail, entropy=rows.of_entropy(), collision=rows.of_collision())
        bounds = [round(cut * classes) for cut in CUTS[cuts]]
        spans = list(zip(bounds, bounds[1:]))
        for select_shard, merge in ((ops.select_shard, ops.select_merge),
                                    (reference.select_shard, reference.select_merge)):
            parts = [select_shard(logits[:, begin:end], *a, *ASKED, begin, None) for begin, end in spans]
            chosen = sum(of_entries for _, of_entries in parts)
            out = Selected(*merge(torch.cat([numbers for numbers, _ in parts]), len(spans), chosen, *a, *ASKED))
            for name in exact:
                assert_exact(name, getattr(out, name), exact[name], dtype)
            saved = [getattr(out, name) for name in SAVED]
            for name, gradient in of_logits.items():
                upstream = draw.normal(ROWS).to(arithmetic(dtype))
                grads = [upstream if name == output else None for output in DIFFERENTIABLE]
                ours = torch.cat([ops.select_backward(*grads, logits[:, begin:end], *saved, *a, False, begin)[0]
                                  for begin, end in spans], 1)
                assert_exact(f"gradient of {name}", ours, gradient * long(upstream)[:, None], dtype)
