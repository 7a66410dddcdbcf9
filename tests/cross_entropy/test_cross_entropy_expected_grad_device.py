"""Tests cached gradients when the host does not read values: kernels compare expected and actual ``grad_output``. The
CPU takes the same code paths as CUDA."""

import pytest
import torch

import sparse_ce
from cases import DTYPES, FORMS, Draw, devices
from close import assert_bitwise_equal
from loss_cases import SCALAR_OPTIONS
from sparse_ce import cross_entropy
from sparse_ce.ops import expected_grad

ops = torch.ops.sparse_ce


@pytest.fixture(autouse=True)
def unseen(monkeypatch):
    """Makes the values of every tensor unknown to the host, and clears what graphs have left."""
    monkeypatch.setattr(expected_grad, "on_host", lambda t: False)
    monkeypatch.setattr(sparse_ce.ops.logits.small_calls, "LOGITS", 0)
    expected_grad._replayed.clear()
    expected_grad._followed.clear()


@pytest.fixture
def calls(monkeypatch):
    """Returns a growing list of the gradient ops that ran."""
    names = []

    class Ops:
        def __getattr__(self, name):
            op = getattr(ops, name)
            return lambda *args: (names.append(name), op(*args))[1] if "gradient" in name else op(*args)

    def anew(*args, call=sparse_ce.ops.logits.cross_entropy._recompute):
        expected, came = (t.cpu().numpy().tobytes() for t in args[:2])
        names.append("made" if expected == came else "anew")
        return call(*args)

    monkeypatch.setattr(sparse_ce.ops.logits.cross_entropy, "ops", Ops())
    monkeypatch.setattr(sparse_ce.ops.logits.cross_entropy, "_recompute", anew)
    return names


def example(device, dtype=torch.float32, rows=6, vocab=50):
    draw = Draw(device)
    return draw.normal(rows, vocab).to(dtype).requires_grad_(), (draw.integers(vocab, rows, 3), draw.uniform(rows, 3))


def grad_of(loss, logits, grad_output=1.0, **keywords):
    if not isinstance(grad_output, torch.Tensor):
        grad_output = loss.new_full((), grad_output)  # filled on the device: a graph takes no number from the host
    grad_output = grad_output.to(loss)
    return torch.autograd.grad(loss, logits, grad_output, **keywords)[0]


def without(step):
    """Returns the result of ``step`` with separate kernels for loss and gradient."""
    expected_grad._expected.clear()
    expected_grad._followed.clear()
    return step()


@pytest.mark.parametrize("options", SCALAR_OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_made_or_anew(form, dtype, options, device, calls):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    x = draw.normal(*case.shape, 41 if options == "everything" else 37).to(dtype).requires_grad_()
    keywords = {name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in SCALAR_OPTIONS[options].items()}

    def step(grad_output):
        loss, lse = cross_entropy(x, case.target, return_lse=True, **keywords)
        return loss.detach(), lse.detach(), grad_of(loss, x, grad_output)

    expected = [without(lambda: step(grad_output)) for grad_output in (-0.375, 3.0)]
    found = [without(lambda: step(-0.375)), step(-0.375), step(3.0)]
    for a, b in zip((expected[0], expected[0], expected[1]), found):
        for one, other in zip(a, b):
            assert_bitwise_equal(one, other)
    assert calls == ["forward_with_gradient", "made", "forward_with_gradient", "anew"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_made_is_not_touched(dtype, device):
    x, target = example(device, dtype)
    x, acc = x.detach(), torch.float64 if dtype == torch.float64 else torch.float32
    loss, lse, residual = ops.forward_with_residual(x, *target)
    numbers = torch.tensor([2.0, 3.0, 0.0, -0.0, torch.nan, torch.inf], dtype=acc, device=device)
    for i, before in enumerate(numbers):
        for j, came in enumerate(numbers):
            grad = torch.full_like(x, 7)
            rows = came.expand(6)
            ops.backward_anew_(before, came, rows, x, lse, residual, grad, *target)
            expected = torch.full_like(x, 7) if i == j else ops.backward(rows, None, x, lse, residual, *target)
            assert_bitwise_equal(grad, expected)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 300, 40), (0, 4, 3), (4, 0, 3)])
def test_rows_that_lie_side_by_side(shape, device):
    """Checks logits of images, (outer, vocab, inner) in memory, as a view (outer, inner, vocab)."""
    outer, vocab, inner = shape[0], shape[2], shape[1]
    draw = Draw(device)
    x = draw.normal(outer, vocab, inner).transpose(1, 2)
    labels = draw.integers(vocab, outer * inner)
    one = torch.ones((), device=device)
    _, divisor, _, lse, residual, made = ops.forward_with_gradient(one, None, x, labels)
    grad = made.clone(memory_format=torch.preserve_format)
    assert grad.stride() == made.stride()
    grad.fill_(7)
    rows = (2 * one / divisor).expand(outer * inner)
    ops.backward_anew_(one, one, rows, x, lse, residual, grad, labels)
    assert (grad == 7).all()
    ops.backward_anew_(one, 2 * one, rows, x, lse, residual, grad, labels)
    assert_bitwise_equal(grad, ops.backward(rows, None, x, lse, residual, labels))
    if grad.numel() > 0:
        assert_bitwise_equal(grad, 2 * made)


@pytest.mark.parametrize("rows,vocab", [(1, 100_003), (5, 100_003), (700, 33), (0, 7), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_parts_many_rows_and_none(rows, vocab, dtype, device, calls):
    x, target = example(device, dtype, rows, vocab)
    weight = Draw(device, 1).uniform(vocab)
    for grad_output in (3.0, 3.0, 0.5):
        grad = grad_of(cross_entropy(x, target, weight), x, grad_output)
        kept = dict(expected_grad._expected)
        assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target, weight), x, grad_output)))
        expected_grad._expected.update(kept)
    assert [name for name in calls if name != "forward_with_gradient"] == ["made", "anew"]


def test_any_other_upstream_gradient(device, calls):
    x, target = example(device, torch.float16)
    grad_output = [1.0, 1.0, 65536.0, 65536.0, 0.0, -0.0, 0.0, float("nan"), float("nan"), 1 / 65536]
    ahead = [grad_of(cross_entropy(x, target), x, u) for u in grad_output]
    assert [name for name in calls if name != "forward_with_gradient"] == [
        "made", "anew", "made", "anew", "anew", "anew", "anew", "made", "anew"]
    for u, grad in zip(grad_output, ahead):
        assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target), x, u)))


def test_an_upstream_gradient_that_its_owner_overwrites(device):
    x, target = example(device)
    grad_output = torch.tensor(2.0, device=device)
    torch.autograd.grad(cross_entropy(x, target), x, grad_output)
    loss = cross_entropy(x, target)
    grad_output.mul_(3)
    grad, = torch.autograd.grad(loss, x, grad_output)
    assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target), x, 6.0)))


def test_backward_twice_second_derivatives_and_other_gradients(device, calls):
    x, (indices, values) = example(device, torch.float64)
    values = values.double().requires_grad_()
    weight = Draw(device, 2).uniform(6).double().requires_grad_()

    def derivatives():
        loss, lse = cross_entropy(x, (indices, values), return_lse=True, row_weight=weight)
        inputs = x, values, weight
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), inputs, retain_graph=True)
        mixed = torch.autograd.grad(loss + lse.sin().sum(), inputs, retain_graph=True)
        plain = torch.autograd.grad(loss, inputs, retain_graph=True)
        plain[0].mul_(0)  # an optimizer or a hook may do this
        again = torch.autograd.grad(loss, inputs)
        return *first, *second, *mixed, *plain[1:], *again

    def once():
        return torch.autograd.grad(cross_entropy(x, (indices, values), row_weight=weight), (x, values, weight))

    expected = without(derivatives)
    plain = without(once)
    assert not calls or "made" not in calls
    ahead = once()
    assert calls[-2:] == ["forward_with_gradient", "made"]
    for a, b in zip(plain, ahead):
        assert_bitwise_equal(a, b)
    for a, b in zip(expected, derivatives()):
        torch.testing.assert_close(a, b)


def test_two_losses_alive(device, calls):
    """Checks that the second loss has no cached gradient and that the first keeps its own."""
    x, target = example(device)
    grad_of(cross_entropy(x, target), x, 2.0)
    first, second = cross_entropy(x, target), cross_entropy(x, target)
    grads = [grad_of(second, x, 5.0), grad_of(first, x, 2.0)]
    assert calls == ["forward_with_gradient", "made"]
    for grad_output, grad in zip((5.0, 2.0), grads):
        assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target), x, grad_output)))


def test_two_places_have_forecasts_of_their_own(device, calls, monkeypatch):
    """Uses devices, or streams of one device, in turns, and checks that none uses what another expects."""
    x, target = example(device)
    for _ in range(3):
        for at, grad_output in (("a", 2.0), ("b", 3.0)):
            monkeypatch.setattr(expected_grad, "place", lambda t, at=at: at)
            grad = grad_of(cross_entropy(x, target), x, grad_output)
            kept = dict(expected_grad._expected)
            assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target), x, grad_output)))
            expected_grad._expected.clear()
            expected_grad._expected.update(kept)
    assert [name for name in calls if name != "forward_with_gradient"] == ["made"] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_have_forecasts_of_their_own(monkeypatch):
    monkeypatch.undo()
    for _ in range(3):
        for gpu, grad_output in (("cuda:0", 2.0), ("cuda:1", 3.0)):
            x, target = example(gpu, torch.bfloat16, 64, 5000)
            grad = grad_of(cross_entropy(x, target), x, grad_output)
            kept = dict(expected_grad._expected)
            assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target), x, grad_output)))
            expected_grad._expected.clear()
            expected_grad._expected.update(kept)


def test_logits_changed_before_backward_are_noticed(device):
    x, target = example(device)
    grad_of(cross_entropy(x, target), x)
    loss = cross_entropy(x, target)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_training_with_a_scale_that_changes(accumulated, device, monkeypatch):
    """Scales the loss like torch.amp.GradScaler: the scale grows, and halves when a gradient overflows."""
    def train(expects_grad):
        draw = Draw(device)
        if not expects_grad:
            monkeypatch.setattr(expected_grad, "take_for", lambda *given: None)
        head = torch.nn.Linear(8, 30, device=device)
        with torch.no_grad():
            head.weight.copy_(draw.normal(30, 8)), head.bias.zero_()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 14, growth_interval=2)
        scales = []
        for step in range(20):
            for _ in range(accumulated):
                x, labels = draw.normal(4, 8), draw.integers(30, 4)
                loss = cross_entropy(head(x).half(), labels) / accumulated
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert len(set(scales)) > 3 and any(b < a for a, b in zip(scales, scales[1:]))
        return scales, head.weight.detach()

    ahead, apart = train(True), train(False)
    assert ahead[0] == apart[0]
    assert_bitwise_equal(ahead[1], apart[1])


def test_what_a_graph_remembers(device, monkeypatch, calls):
    """Checks memory allocated before the capture, which backward overwrites and forward copies."""
    x, target = example(device)

    def captured(step):
        monkeypatch.setattr(expected_grad, "captured", lambda t: True)
        result = step()
        monkeypatch.setattr(expected_grad, "captured", lambda t: False)
        return result

    def step(grad_output):
        return lambda: grad_of(cross_entropy(x, target), x, grad_output)

    captured(step(2.0))
    assert calls == [] and not expected_grad._replayed, "what is allocated in a graph is not kept"
    grads = [step(2.0)()]
    (memory,) = expected_grad._replayed.values()
    address = memory.data_ptr()
    grads += [captured(step(2.0)), captured(step(3.0)), captured(step(3.0))]
    assert [name for name in calls if name != "forward_with_gradient"] == ["made", "anew", "made"]
    assert memory.item() == 3.0 and memory.data_ptr() == address
    step(7.0)()  # a step outside of the graph, between two replays
    loss = captured(lambda: cross_entropy(x, target))
    memory.fill_(11.0)  # another graph's replay, between forward and backward of this graph
    grads.append(captured(lambda: grad_of(loss, x, 11.0)))
    assert calls[-1] == "anew"
    for grad_output, grad in zip((2.0, 2.0, 3.0, 3.0, 11.0), grads):
        assert_bitwise_equal(grad, without(step(grad_output)))
    expected_grad._followed.clear()
    captured(step(2.0))
    captured(lambda: cross_entropy(x, target))
    count = len(calls)
    captured(lambda: cross_entropy(x, target))
    assert len(calls) == count, "one forward for a backward"


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
def test_replays_with_a_scale_that_changes(gpu, monkeypatch):
    """Runs two steps in a graph, whose memory each replay leaves to the next."""
    monkeypatch.undo()
    x, target = example(gpu, torch.bfloat16, 64, 5000)
    scale = torch.ones((), device=gpu)

    def steps():
        return [grad_of(scale * cross_entropy(x, target) * share, x) for share in (1.0, 0.5)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            steps()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = steps()
    for number in (1.0, 1.0, 8.0, 8.0, 0.25, float("inf"), 1.0):
        scale.fill_(number)
        graph.replay()
        for grad, share in zip(grads, (1.0, 0.5)):
            assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target), x, number * share)))


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
def test_streams_have_forecasts_of_their_own(gpu, monkeypatch):
    monkeypatch.undo()
    x, target = example(gpu, torch.bfloat16, 64, 5000)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(3):
        grads = []
        for stream, grad_output in zip(streams, (2.0, 3.0)):
            with torch.cuda.stream(stream):
                grads.append(grad_of(cross_entropy(x, target), x, grad_output))
        torch.cuda.synchronize()
        for grad, grad_output in zip(grads, (2.0, 3.0)):
            assert_bitwise_equal(grad, without(lambda: grad_of(cross_entropy(x, target), x, grad_output)))
