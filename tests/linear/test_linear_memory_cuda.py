"""Tests the memory of the linear head on CUDA. The emulated package makes every allocation of the schedule without
running kernels and matrix products, so that shapes can be realistic."""

import re
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from recorded_memory import peak
from sparse_ce import linear_selected_log_probs
from sparse_ce.ops import instruction_set

pytestmark = pytest.mark.skipif(instruction_set() != "emulated CUDA", reason="the allocations of the CUDA bindings")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "linear-head.md"
ops = torch.ops.sparse_ce


@pytest.fixture
def nothing_runs():
    before = ops.emulation_runs(False)
    yield
    ops.emulation_runs(before)


def step(rows, width, vocab, head_dtype=torch.bfloat16, **options):
    """Returns the peak memory of a loss and its gradients for bfloat16 hidden states, whose memory is never touched."""
    x, w = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(vocab, width, dtype=head_dtype)
    one, labels = torch.ones(()), torch.zeros(rows, dtype=torch.long)
    return peak(lambda: ops.linear_forward_with_gradient(one, None, x, w, None, labels, **options))


# (rows, width, vocab), keyword arguments: one chunk; all rows in the gradient's memory; some of them beside it; sums of
# chunks; blocks of classes; a float32 head
WAYS = [((512, 256, 8016), {}), ((256, 256, 8016), {"chunk_rows": 128}), ((384, 256, 8016), {"chunk_rows": 128}),
        ((512, 256, 8016), {"chunk_rows": 128}), ((512, 256, 8016), {"chunk_rows": 64}),
        ((512, 256, 8016), {"chunk_rows": 128, "head_dtype": torch.float32}),
        ((640, 256, 8016), {"chunk_rows": 128, "head_dtype": torch.float32})]


@pytest.mark.parametrize("sizes,options", WAYS, ids=str)
def test_kernels_and_products_change_nothing_of_what_is_recorded(sizes, options):
    peaks = []
    for runs in (True, False):
        before = ops.emulation_runs(runs)
        try:
            peaks.append(step(*sizes, **options))
        finally:
            ops.emulation_runs(before)
    assert peaks[0] == peaks[1] > 2 * sizes[1] * sizes[2]


def table():
    """Returns the rows of the doc page's table as ((rows, width, vocab), GiB)."""
    found = re.findall(r"^\| (\d+) x (\d+) x (\d+) \|.*\| ([\d.]+) \|$", PAGE.read_text(), re.M)
    return [(tuple(map(int, sizes)), float(gib)) for *sizes, gib in found]


@pytest.mark.usefixtures("nothing_runs")
def test_the_table_of_the_page_and_the_aim():
    rows = table()
    assert len(rows) > 10
    recorded = [(sizes, round(step(*sizes) / 2**30, 2)) for sizes, _ in rows]
    assert recorded == rows
    assert dict(rows)[8192, 4096, 128256] <= 2.5


def events_of(rows, width, vocab, head_dtype=torch.bfloat16, bias=None, **options):
    """Returns the (name, shapes) of PyTorch's ops in a loss and its gradients."""
    x, w = torch.ones(rows, width, dtype=torch.bfloat16), torch.ones(vocab, width, dtype=head_dtype)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        labels = torch.zeros(rows, dtype=torch.long)
        ops.linear_forward_with_gradient(torch.ones(()), None, x, w, bias, labels, **options)
    return [(event.key, event.input_shapes[:2]) for event in record.events()]


@pytest.mark.parametrize("head_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [30, 40, 60, 61])
def test_half_more_rows_than_features_are_one_product_of_the_weights_gradient(rows, head_dtype):
    """Checks blocks of 128 classes each. With fewer rows in a chunk, the gradients would be computed by classes."""
    events = events_of(rows, 40, 520, head_dtype, chunk_rows=20)
    products = [shapes[0][0] for name, shapes in events
                if name == "aten::mm" and shapes == [[shapes[0][0], rows], [rows, 40]]]
    kept = rows <= (80 if head_dtype == torch.float32 else 60)
    assert products == ([128] * 4 + [8] if kept else [])


@pytest.mark.parametrize("chunk_rows", [None, 20])
def test_a_float32_head_is_converted_once(chunk_rows):
    events = events_of(100, 40, 520, torch.float32, chunk_rows=chunk_rows)
    assert sum(name == "aten::_to_copy" and shapes[0] == [520, 40] for name, shapes in events) == 1


def test_a_bias_is_added_by_the_product_of_a_chunk():
    """Checks that the product takes the bias as a vector, which the CPU's expands. No copy precedes it and no addition
    follows."""
    events = events_of(100, 40, 520, bias=torch.ones(520, dtype=torch.bfloat16), chunk_rows=30)
    assert sum(name == "aten::expand" and shapes[0] == [520] for name, shapes in events) == 4
    assert not any([520] in shapes for name, shapes in events if name in ("aten::copy_", "aten::add", "aten::add_"))


@pytest.mark.usefixtures("nothing_runs")
def test_logits_that_are_made_anew_anyway_need_nothing_beside_the_weights_gradient():
    """Checks passes by classes, which keep an eighth of the logits and one byte for each element of the input."""
    rows, width, vocab = 8192, 4096, 128256
    x, w = (torch.empty(n, width, dtype=torch.bfloat16, requires_grad=True) for n in (rows, vocab))
    labels = torch.zeros(rows, dtype=torch.long)
    held = peak(lambda: torch.autograd.grad(linear_selected_log_probs(x, w, labels).log_probs.sum(), (x, w)))
    gradients, chunk, cleared = 2 * (rows + vocab) * width, 2 * rows * vocab // 8, 2 * rows * width
    assert gradients + chunk < held < gradients + chunk + cleared + rows * width + (34 << 20)
