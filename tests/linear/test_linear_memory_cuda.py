"""Tests the memory of the linear head on CUDA, and its matrix products. The emulated package makes every allocation of
the schedule without running kernels and matrix products, so that shapes can be realistic."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from little_memory import little_memory
from recorded_memory import peak
from sparse_ce import linear_selected_log_probs
from sparse_ce.ops import expected_grad, instruction_set

pytestmark = pytest.mark.skipif(instruction_set() != "emulated CUDA", reason="the allocations of the CUDA bindings")
ops = torch.ops.sparse_ce
LOSS = dict(loss=True, log_probs=False)


@pytest.fixture(autouse=True)
def host_waits(monkeypatch):
    """Makes a head treat tensors like those on a GPU, where the host does not know which rows are ignored."""
    monkeypatch.setattr(expected_grad, "on_host", lambda t: False)


@pytest.fixture
def nothing_runs():
    before = ops.emulation_runs(False)
    yield
    ops.emulation_runs(before)


def step(rows, width, vocab, head_dtype=torch.bfloat16, **options):
    """Returns the peak memory of a loss and its gradients for bfloat16 hidden states, whose memory is never touched."""
    x, w = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(vocab, width, dtype=head_dtype)
    ones, labels = torch.ones(rows), torch.zeros(rows, dtype=torch.long)
    return peak(lambda: ops.linear_select_with_gradient(ones, x, w, None, labels, **LOSS, **options))


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


def products_of(call):
    """Returns the (m, k, n) of each matrix product of a call, and the bytes that it copies to a stored gradient."""
    ops.emulation_products(), ops.emulation_copied()
    call()
    sizes = ops.emulation_products()
    return list(zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True)), ops.emulation_copied()


def predicted(rows, width, vocab):
    """Returns the time of a step over that of its products, on a GPU that computes 770 TFLOP/s and moves 3.0 TB/s."""
    products, copied = products_of(lambda: step(rows, width, vocab))
    chunks = sum(n == vocab for _, _, n in products)
    assert sum(m * k * n for m, k, n in products) == 3 * rows * width * vocab
    # An element of a product is read in 4 bytes. Its sum over chunks takes 3 bytes, but the last one takes 2.
    accumulated = 0 if copied or chunks == 1 else (16 + 10 * (chunks - 2)) * width * vocab
    bytes_moved = 4 * rows * vocab + 2 * copied + accumulated
    return 1 + bytes_moved / 3.0e12 / (6 * rows * width * vocab / 770e12)


# The sizes of well-known models: (rows, width, vocab), predicted time over that of the products, GiB with gradients.
PREDICTED = [((4096, 4096, 128256), 1.04, 2.02), ((8192, 4096, 128256), 1.04, 3.06),
             ((16384, 4096, 128256), 1.08, 3.64), ((65536, 4096, 128256), 1.08, 4.34),
             ((8192, 2048, 128256), 1.08, 2.51), ((4096, 2560, 151936), 1.07, 1.92),
             ((8192, 2560, 151936), 1.07, 3.12), ((4096, 2304, 256000), 1.07, 3.09),
             ((8192, 2304, 256000), 1.16, 3.69), ((8192, 1152, 262144), 1.23, 2.90),
             ((8192, 7168, 129280), 1.02, 3.92)]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("sizes,time,held", PREDICTED, ids=str)
def test_memory_and_products_of_well_known_models(sizes, time, held):
    assert (round(predicted(*sizes), 2), round(step(*sizes) / 2**30, 2)) == (time, held)


LARGE = (8192, 4096, 128256)  # logits of 1.96 GiB
ALL_ROWS = {LARGE: 1, (8192, 128256, 4096): 1, (128256, 8192, 4096): 1}
CHUNKS = {(1024, 4096, 128256): 8, (1024, 128256, 4096): 8, (4096, 8192, 4096): 31, (1280, 8192, 4096): 1}


@pytest.fixture
def memory(nothing_runs):
    """Returns a function that sets the memory of the device, in bytes."""
    before = ops.emulation_memory(79 << 30)
    yield ops.emulation_memory
    ops.emulation_memory(before)


def filled(products):
    """Returns the share of the operations of an H100 (132 multiprocessors, tiles of 128 x 256) that products need."""
    def of_waves(m, n):
        return -(-(-(-m // 128) * -(-n // 256)) // 132) * 132 * 128 * 256

    return sum(m * k * n for m, k, n in products) / sum(k * of_waves(m, n) for m, k, n in products)


def test_all_rows_are_one_chunk_without_copies_if_the_device_has_32_times_their_memory(memory):
    ops.emulation_launches()
    products, copied = products_of(lambda: step(*LARGE))
    assert (Counter(products), copied, ops.emulation_launches()) == (ALL_ROWS, 0, 4)
    assert round(filled(products), 3) == 0.988
    memory(32 * 2 * 8192 * 128256 - 1)
    products, copied = products_of(lambda: step(*LARGE))
    # Per chunk a loss and two launches for its mean.
    assert (Counter(products), copied, ops.emulation_launches()) == (CHUNKS, 2 * 8192 * 128256, 3 * 8 + 1)
    assert round(filled(products), 3) == 0.971
    memory(32 * 2 * 8192 * 128256)
    assert Counter(products_of(lambda: step(*LARGE))[0]) == ALL_ROWS


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("chunk_rows", [100, 1024, 4096, 1 << 40])
def test_chunk_rows_is_kept_even_if_memory_is_ample(chunk_rows):
    products, _ = products_of(lambda: step(*LARGE, chunk_rows=chunk_rows))
    assert products[0] == (min(8192, chunk_rows), 4096, 128256)


def ops_of_a_head(x, w, labels):
    """Returns calls that compute a loss or outputs, and the rows of their first chunk: all for losses with gradients
    of the weight."""
    rows, few = torch.empty(len(x)), 1024

    def gradients(bias=None, **options):
        return lambda: ops.linear_select_with_gradient(rows, x, w, bias, labels, **LOSS, **options)

    def backward(*grads, **needed):
        saved = rows, *(None,) * 4
        return lambda: ops.linear_select_backward(*grads, *(None,) * 5, x, w, None, *saved, labels, **needed)

    def forward(learns, **options):
        return lambda: ops.linear_select(x, w.detach().requires_grad_(learns), None, labels, **options)

    return {
        "scalar loss": (gradients(), None),
        "with metrics": (gradients(entropy=True, argmax=True), None),
        "bias": (lambda: gradients(w[:, 0].contiguous())(), None),
        "losses of a backward": (forward(True, **LOSS), None),
        "metrics of a backward": (forward(True, **LOSS, entropy=True), None),
        "backward": (backward(rows, None), None),
        "backward of metrics": (backward(rows, rows), None),
        "frozen weight": (gradients(weight_grad=False), few),
        "backward, frozen weight": (backward(rows, None, weight_grad=False), few),
        "metrics, frozen weight": (backward(rows, rows, weight_grad=False), few),
        "no gradient": (forward(False, **LOSS), few),
        "mean without gradient": (forward(False, **LOSS, mean=True), few),
        "log-probabilities": (forward(True), few),
        "float32 logits": (gradients(float32_logits=True), few),
    }


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("name", ops_of_a_head(torch.empty(0), None, None))
def test_only_losses_that_need_the_weights_gradient_take_more_memory(name):
    rows, width, vocab = LARGE
    x, w = (torch.empty(n, width, dtype=torch.bfloat16) for n in (rows, vocab))
    call, chunk_rows = ops_of_a_head(x, w, torch.zeros(rows, dtype=torch.long))[name]
    products, _ = products_of(call)
    assert products[0] == (chunk_rows or rows, width, vocab)


@pytest.mark.parametrize("name,megabytes", [("scalar loss", 900), ("backward", 900), ("backward of metrics", 900),
                                            ("losses of a backward", 400), ("metrics of a backward", 400)])
def test_chunks_are_smaller_from_then_on_if_memory_is_short(name, megabytes, memory):
    """Checks logits of 512 MiB, whose loss needs 1088 MiB with gradients, and 736 MiB in chunks. A call that fails in
    chunks, too, changes nothing."""
    rows, width, vocab = 4096, 4096, 1 << 16
    x, w = (torch.empty(n, width, dtype=torch.bfloat16) for n in (rows, vocab))
    call, _ = ops_of_a_head(x, w, torch.zeros(rows, dtype=torch.long))[name]

    def first_chunk():
        return products_of(call)[0][0][0]

    assert first_chunk() == rows
    with little_memory(64), pytest.raises(RuntimeError, match="can't allocate memory"):
        call()
    assert first_chunk() == rows
    with little_memory(megabytes):
        call()
    assert first_chunk() == 1024
    memory(79 << 30)
    assert first_chunk() == rows


def events_of(rows, width, vocab, head_dtype=torch.bfloat16, bias=None, **options):
    """Returns the (name, shapes) of PyTorch's ops in a loss and its gradients."""
    x, w = torch.ones(rows, width, dtype=torch.bfloat16), torch.ones(vocab, width, dtype=head_dtype)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        labels = torch.zeros(rows, dtype=torch.long)
        ops.linear_select_with_gradient(torch.ones(rows), x, w, bias, labels, **LOSS, **options)
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
