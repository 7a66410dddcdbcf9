"""Tests which tensors the graphs of a compiled scalar loss read, save and write."""

import pytest
import torch

from cases import Draw
from close import assert_bitwise_equal
from compiling import ops_in, recording
from sparse_ce import SparseTarget, cross_entropy

pytestmark = pytest.mark.usefixtures("fresh_compiler")
ROWS, CLASSES = 6, 11
TWO_PASSES = ["forward_with_residual", "loss_mean", "backward"]


@pytest.fixture(autouse=True)
def whole_steps():
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def given(device):
    """Returns logits, labels, ids, the weights of the ids, and ``row_weight``."""
    draw = Draw(device)
    labels = draw.integers(CLASSES, ROWS)
    labels[2] = -100
    return (draw.normal(ROWS, CLASSES).requires_grad_(), labels, draw.integers(CLASSES, ROWS, 3), draw.uniform(ROWS, 3),
            draw.uniform(ROWS))


def gradient(loss, *of):
    return (loss.detach(), *torch.autograd.grad(loss, of))


# ------------------------------------------------------------------------------------------- backward in its own graph


@pytest.mark.parametrize("options", [dict(), dict(reduction="sum", inplace="forward", label_smoothing=0.1)], ids=str)
def test_between_two_graphs_only_logits_and_rows_are_kept(options, device):
    """Checks this because ``grad_output`` is an input of the second graph, so the first cannot compute the gradient for
    it."""
    x, labels, *_, row_weight = given(device)

    def loss_of(x):
        return cross_entropy(x, labels, row_weight=row_weight, **options)

    graphs = []
    compiled = torch.compile(loss_of, backend=recording(graphs), fullgraph=True)
    for ours, eager in zip(gradient(compiled(x), x), gradient(loss_of(x), x)):
        assert_bitwise_equal(ours, eager)
    forward, backward = graphs
    assert [ops_in(forward), ops_in(backward)] == [TWO_PASSES[:2], TWO_PASSES[2:]]
    assert "tangents_1" in [node.name for node in backward.find_nodes(op="placeholder")]
    _, *kept = [node for node in forward.output_node().args[0] if node is not None]
    whole = [node for node in kept if node.meta["val"].numel() >= x.numel()]
    assert [node.op for node in whole] == ["placeholder"], "the logits that were given, and no copy"
    assert sum(node.meta["val"].numel() for node in kept if node not in whole) <= 5 * ROWS


# ------------------------------------------------------------------------------------- loss and backward in one graph


def several(*losses):
    """Returns a step that differentiates each of ``losses`` with its own multiple of the logits."""
    def step(x, *others):
        return [t for n, loss in enumerate(losses, 1) for t in gradient(loss(x * n, *others), x)]
    return step, len(losses)


def of_weights(x, y, i, v, w):
    """Returns the gradients for the logits, the target's values and ``row_weight``."""
    return gradient(cross_entropy(x, (i, v), row_weight=w), x, v, w)


STEPS = {
    "grad_output": several(
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
    "lse": several(
        lambda x, y, i, v, w: sum(t.sum() for t in cross_entropy(x, y, return_lse=True))),
    "weights that learn": (of_weights, 1),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", STEPS)
def test_loss_and_gradient_in_one_graph_have_the_bits_of_the_eager_step(name, dynamic, device):
    step, losses = STEPS[name]
    graphs, arguments = [], given(device)
    if step is of_weights:  # torch.compile of 2.11 cannot trace requires_grad_()
        for t in arguments[-2:]:
            t.requires_grad_()
    run = torch.compile(step, backend=recording(graphs), fullgraph=True, dynamic=dynamic)
    for ours, eager in zip(run(*arguments), step(*arguments)):
        assert_bitwise_equal(ours, eager)
    graph, = graphs
    made = [op for op in ops_in(graph) if op != "backward_values"]
    assert sorted(made) == sorted(TWO_PASSES * losses)
