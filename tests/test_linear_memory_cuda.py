"""What the linear head holds on CUDA: every allocation of the schedule that its bindings have, as the emulated package
makes them. Kernels and products need not run for that, so that its shapes can be those of users."""

import re
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sparse_ce.ops import instruction_set

pytestmark = pytest.mark.skipif(instruction_set() != "emulated CUDA", reason="the allocations of the CUDA bindings")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "linear-head.md"
ops = torch.ops.sparse_ce


@pytest.fixture
def nothing_runs():
    before = ops.emulation_runs(False)
    yield
    ops.emulation_runs(before)


def peak(call):
    """The most bytes that are held at a time while it runs, its results included, but not what a CPU's products take
    for themselves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        results = call()
    events = record.profiler.kineto_results.events()
    products = [(event.start_ns(), event.end_ns()) for event in events if event.name() == "aten::mm"]
    held = most = 0
    for event in events:
        if event.name() == "[memory]" and not any(a <= event.start_ns() <= b for a, b in products):
            held += event.nbytes()
            most = max(most, held)
    del results
    return most


def step(rows, width, vocab, head_dtype=torch.bfloat16, **options):
    """The peak of a loss and its gradients for hidden states of bfloat16, whose memory nobody touches."""
    x, w = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(vocab, width, dtype=head_dtype)
    one, labels = torch.ones(()), torch.zeros(rows, dtype=torch.long)
    return peak(lambda: ops.linear_forward_with_gradient(one, None, x, w, None, labels, **options))


# (rows, width, vocab), keyword arguments: one chunk; kept in the gradient's memory, half beside it; sums of chunks;
# blocks of classes; a float32 head
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
    """The rows of the page's table: ((rows, width, vocab), GiB)."""
    found = re.findall(r"^\| (\d+) x (\d+) x (\d+) \|.*\| ([\d.]+) \|$", PAGE.read_text(), re.M)
    return [(tuple(map(int, sizes)), float(gib)) for *sizes, gib in found]


@pytest.mark.usefixtures("nothing_runs")
def test_the_table_of_the_page_and_the_aim():
    rows = table()
    assert len(rows) > 10
    recorded = [(sizes, round(step(*sizes) / 2**30, 2)) for sizes, _ in rows]
    assert recorded == rows
    assert dict(rows)[8192, 4096, 128256] <= 2.5
