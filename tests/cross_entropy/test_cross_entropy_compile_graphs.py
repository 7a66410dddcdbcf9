"""What the graphs of a compiled scalar loss read, keep and write, and the pass that makes loss and gradient at once."""

from collections import namedtuple

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from cases import Draw
from close import assert_bitwise_equal
from compiling import ops_in, recording
from sparse_ce import SparseTarget, cross_entropy
from sparse_ce.inductor import one_pass

ops = torch.ops.sparse_ce
pytestmark = pytest.mark.usefixtures("fresh_compiler")
ROWS, CLASSES = 6, 11
TWO_PASSES = ["forward_with_residual", "loss_mean", "backward"]


@pytest.fixture(autouse=True)
def whole_steps():
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def given(device):
    """Logits, labels, ids, their weights, and weights of rows."""
    draw = Draw(device)
    labels = draw.integers(CLASSES, ROWS)
    labels[2] = -100
    return (draw.normal(ROWS, CLASSES).requires_grad_(), labels, draw.integers(CLASSES, ROWS, 3), draw.uniform(ROWS, 3),
            draw.uniform(ROWS))


def gradient(loss, *of):
    return (loss.detach(), *torch.autograd.grad(loss, of))


# ------------------------------------------------------------------------------------------- backward of its own graph


@pytest.mark.parametrize("passes", [(), (one_pass,)], ids=["as it is", "with the pass"])
@pytest.mark.parametrize("options", [dict(), dict(reduction="sum", inplace="forward", label_smoothing=0.1)], ids=str)
def test_between_two_graphs_only_logits_and_rows_are_kept(options, passes, device):
    """The upstream gradient is an input of the second graph, so that the first cannot make the gradient for it."""
    x, labels, *_, row_weight = given(device)

    def loss_of(x):
        return cross_entropy(x, labels, row_weight=row_weight, **options)

    graphs = []
    compiled = torch.compile(loss_of, backend=recording(graphs, *passes), fullgraph=True)
    for ours, eager in zip(gradient(compiled(x), x), gradient(loss_of(x), x)):
        assert_bitwise_equal(ours, eager)
    forward, backward = graphs
    assert [ops_in(forward), ops_in(backward)] == [TWO_PASSES[:2], TWO_PASSES[2:]]
    assert "tangents_1" in [node.name for node in backward.find_nodes(op="placeholder")]
    _, *kept = [node for node in forward.output_node().args[0] if node is not None]
    whole = [node for node in kept if node.meta["val"].numel() >= x.numel()]
    assert [node.op for node in whole] == ["placeholder"], "the logits that were given, and no copy"
    assert sum(node.meta["val"].numel() for node in kept if node not in whole) <= 5 * ROWS


# ------------------------------------------------------------------------------------------- loss and backward in one


def several(*losses):
    """A step that differentiates each of ``losses`` of other logits."""
    def step(x, *others):
        return [t for n, loss in enumerate(losses, 1) for t in gradient(loss(x * n, *others), x)]
    return step, len(losses)


def of_weights(x, y, i, v, w):
    """Gradients for the logits, the target's values and the rows' weights."""
    return gradient(cross_entropy(x, (i, v), row_weight=w), x, v, w)


ONE_PASS = {
    "upstream": several(
        lambda x, y, i, v, w: cross_entropy(x, y),
        lambda x, y, i, v, w: cross_entropy(x, y) / 8,
        lambda x, y, i, v, w: cross_entropy(x, y) * w[0],
        lambda x, y, i, v, w: (cross_entropy(x, y) + 1) * w.exp().sum()),
    "options": several(
        lambda x, y, i, v, w: cross_entropy(x, y, reduction="sum"),
        lambda x, y, i, v, w: cross_entropy(x, y, row_weight=w) / 3,
        lambda x, y, i, v, w: cross_entropy(x, y, normalizer=w.sum()),
        lambda x, y, i, v, w: cross_entropy(x, y, x.detach()[0].exp(), label_smoothing=0.1, z_loss=0.1, softcap=3.0),
        lambda x, y, i, v, w: cross_entropy(x, y, return_lse=True)[0],
        lambda x, y, i, v, w: cross_entropy(x, y, inplace="backward"),
        lambda x, y, i, v, w: cross_entropy(x, y, inplace="forward")),
    "forms": several(
        lambda x, y, i, v, w: cross_entropy(x, SparseTarget.from_topk(i, v, row_mask=w > 0.5)),
        lambda x, y, i, v, w: cross_entropy(x.repeat(8, 1).t().contiguous().t(), y.repeat(8)),
        lambda x, y, i, v, w: cross_entropy(x.bfloat16(), y),
        lambda x, y, i, v, w: cross_entropy(x[:1], y[:1], row_weight=w[:1])),
    "weights that learn": (of_weights, 1),
}


def compiled(step, passes, device, dynamic=None):
    """The ops in the graph of a compiled step, which has the bits of the eager one."""
    graphs, arguments = [], given(device)
    if step is of_weights:  # out here: torch.compile of 2.11 cannot trace requires_grad_()
        for t in arguments[-2:]:
            t.requires_grad_()
    run = torch.compile(step, backend=recording(graphs, *passes), fullgraph=True, dynamic=dynamic)
    results = []
    for f in (run, step):
        torch.manual_seed(0)
        results.append(f(*arguments))
    for ours, eager in zip(*results):
        assert_bitwise_equal(ours, eager)
    graph, = graphs
    graph.lint()
    return [name for name in ops_in(graph) if name != "backward_values"]


@pytest.mark.parametrize("name", ONE_PASS)
def test_loss_and_gradient_in_one_graph_are_made_at_once(name, device):
    step, losses = ONE_PASS[name]
    assert compiled(step, (one_pass,), device) == ["forward_with_gradient"] * losses


@pytest.mark.parametrize("device", ["cpu"])
def test_one_graph_of_any_number_of_rows(device):
    assert compiled(of_weights, (one_pass,), device, dynamic=True) == ["forward_with_gradient"]


def and_lse(of):
    return lambda x, y, i, v, w: of(*cross_entropy(x, y, return_lse=True)[:2])


TWO_PASSES_STILL, _ = several(
    lambda x, y, i, v, w: cross_entropy(x, y).square(),
    lambda x, y, i, v, w: cross_entropy(x, y, reduction="none").mean(),
    and_lse(lambda loss, lse: loss + lse.sum()),
    and_lse(lambda loss, lse: loss * lse.detach().sum()))


def test_a_gradient_that_waits_for_its_loss_is_made_behind_it(device):
    """Or one that is not that of a mean alone."""
    made = compiled(TWO_PASSES_STILL, (one_pass,), device)
    assert made.count("backward") == 4 and "forward_with_gradient" not in made


Call = namedtuple("Call", "one share mean divisor z lse rest y w")
# What the op `backward` is given. `one`, (), is the upstream gradient over the divisor, `share`, (N,), the same a row.
ITS_BACKWARD = [
    lambda c: (c.share, None, c.z, c.lse, c.rest, c.y),
    lambda c: (torch.where(c.share == 0, 0.0, c.share * c.w), None, c.z, c.lse, c.rest, c.y),
]
NOT_ITS_BACKWARD = [
    lambda c: (c.share, None, c.z, c.lse, c.rest, c.y.roll(1)),
    lambda c: (c.share, None, c.z.exp(), c.lse, c.rest, c.y),
    lambda c: (c.share, None, c.z, c.lse.exp(), c.rest, c.y),
    lambda c: (c.share, None, c.z, c.lse, None, c.y),
    lambda c: (c.share, None, c.z, c.rest, c.lse, c.y),
    lambda c: (c.share, c.lse, c.z, c.lse, c.rest, c.y),
    lambda c: (c.share + 1, None, c.z, c.lse, c.rest, c.y),
    lambda c: (c.one * c.w, None, c.z, c.lse, c.rest, c.y),
    lambda c: ((c.w[0] / c.mean).expand(ROWS), None, c.z, c.lse, c.rest, c.y),
    lambda c: ((c.w[0] * c.divisor).expand(ROWS), None, c.z, c.lse, c.rest, c.y),
    lambda c: ((c.w[:1] / c.divisor).expand(ROWS), None, c.z, c.lse, c.rest, c.y),
    lambda c: (torch.where(c.share == 0, 0.0, c.share * c.w), None, c.z, c.lse, c.rest, c.y),
]
NOT_ITS_WEIGHTS = [
    lambda c: (c.share, None, c.z, c.lse, c.rest, c.y),
    lambda c: (c.share * c.w, None, c.z, c.lse, c.rest, c.y),
    lambda c: (torch.where(c.share == 0, 0.0, c.share * c.w.exp()), None, c.z, c.lse, c.rest, c.y),
    lambda c: (torch.where(c.share == 0, 1.0, c.share * c.w), None, c.z, c.lse, c.rest, c.y),
    lambda c: (torch.where(c.share == 1, 0.0, c.share * c.w), None, c.z, c.lse, c.rest, c.y),
    lambda c: (torch.where(c.w == 0, 0.0, c.share * c.w), None, c.z, c.lse, c.rest, c.y),
]


def by_hand(calls, weighted):
    """Loss and gradient by the ops themselves."""
    def step(x, y, i, v, w):
        results = []
        for n, (call, weighs) in enumerate(zip(calls, weighted), 1):
            z = x.detach() * n
            loss, lse, rest = ops.forward_with_residual(z, y)
            mean, divisor = ops.loss_mean(loss, None, y, row_weight=w if weighs else None)
            one = w[0] / divisor
            results += [mean, ops.backward(*call(Call(one, one.expand(ROWS), mean, divisor, z, lse, rest, y, w)))]
        return results
    return step


@pytest.mark.parametrize("device", ["cpu"])
def test_only_the_backward_of_a_mean_is_made_with_it(device):
    assert compiled(by_hand(ITS_BACKWARD, [False, True]), (one_pass,), device) == ["forward_with_gradient"] * 2
    torch._dynamo.reset()
    others = NOT_ITS_BACKWARD + NOT_ITS_WEIGHTS
    weighted = [False] * len(NOT_ITS_BACKWARD) + [True] * len(NOT_ITS_WEIGHTS)
    assert compiled(by_hand(others, weighted), (one_pass,), device) == TWO_PASSES * len(others)


@pytest.mark.parametrize("device", ["cpu"])
def test_random_numbers_are_drawn_in_their_order(device):
    def step(x, y, *_):
        loss = cross_entropy(x, y)
        return torch.rand(3), *gradient(loss * torch.rand(()), x)

    with torch._inductor.config.patch(fallback_random=True):
        assert compiled(step, (one_pass,), device) == TWO_PASSES


@pytest.mark.parametrize("device", ["cpu"])
def test_a_second_gradient_of_a_loss_reads_the_logits_again(device):
    def step(x, y, *_):
        loss = cross_entropy(x, y)
        return *torch.autograd.grad(loss, x, retain_graph=True), *gradient(3 * loss, x)

    assert compiled(step, (one_pass,), device) == ["forward_with_gradient", "backward"]


@pytest.mark.parametrize("device", ["cpu"])
def test_inductor_takes_the_pass_as_an_option(device):
    x, labels, *_, upstream = given(device)

    def step(x, labels, upstream):
        return torch.autograd.grad(cross_entropy(x, labels), x, upstream)

    run = torch.compile(step, fullgraph=True, options={"post_grad_custom_pre_pass": one_pass})
    counters.clear()
    (ours,), (code,) = run_and_get_code(run, x, labels, upstream[0])
    assert not any("bypass" in name for kind in counters.values() for name in kind), "its graphs may be cached"
    assert "sparse_ce.forward_with_gradient.default(" in code and "sparse_ce.backward" not in code
    assert_bitwise_equal(ours, step(x, labels, upstream[0])[0])
