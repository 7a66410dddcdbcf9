"""Tests opcheck, torch.compile, torch.export and AOTInductor with log-probabilities, and their memory."""

import math

import pytest
import torch
from torch._dynamo import compiled_autograd

from cases import Draw
from sparse_ce import (
    SparseTarget,
    candidate_logits,
    cross_entropy,
    linear_cross_entropy,
    linear_row_loss,
    linear_selected_log_probs,
    linear_topk_log_probs,
    selected_log_probs,
    topk_log_probs,
)

ops = torch.ops.sparse_ce
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def ascending(rows, device):
    return torch.arange(rows + 1, device=device) * 2


class OfLogits(torch.nn.Module):
    def forward(self, x, ids, kept):
        return {"selected": selected_log_probs(x, ids, return_log_tail=True, return_entropy=True,
                                               return_mean_logit=True, return_argmax=True),
                "jagged": selected_log_probs(x[:, 0], kept, softcap=5.0, padding_value=0.0),
                "topk": topk_log_probs(x, 3, return_log_tail=True),
                "loss": cross_entropy(x, ids[..., 0], label_smoothing=0.1)}


class OfHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(6, 11).requires_grad_(False)

    def forward(self, h, ids, kept):
        w, b = self.head.weight, self.head.bias
        return {"selected": linear_selected_log_probs(h, w, ids, linear_bias=b, return_log_tail=True,
                                                      return_entropy=True, logit_scale=h[..., 0].exp()),
                "jagged": linear_selected_log_probs(h[:, 0], w, kept),
                "candidates": candidate_logits(h, w, ids, linear_bias=b),
                "topk": linear_topk_log_probs(h, w, 3, linear_bias=b),
                "rows": linear_row_loss(lambda out, _, by: -by * out.log_probs - 0.1 * out.entropy, h, w, ids[..., 0],
                                        h[..., 1], linear_bias=b, return_entropy=True),
                "loss": linear_cross_entropy(h, w, ids[..., 0], linear_bias=b)}


def packaged(program, folder):
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "module.pt2"), inductor_configs={
        "aot_inductor.compile_wrapper_opt_level": "O0"})
    return torch._inductor.aoti_load_package(path)


@pytest.mark.slow
@pytest.mark.parametrize("module,width", [(OfLogits, 11), (OfHead, 6)], ids=["logits", "head"])
def test_aot_inductor_with_a_dynamic_batch(module, width, device, tmp_path):
    """Passes every output and every format of target through the executor of AOTInductor for custom ops."""
    draw, module = Draw(device), module().to(device)

    def given(batch):
        ids = draw.integers(11, batch, 4, 3)
        ids[0, 1, 2], ids[1, 0] = -100, -100
        kept = SparseTarget.from_jagged(draw.integers(11, 2 * batch), None, ascending(batch, device))
        return draw.normal(batch, 4, width), ids, kept

    batch, entries = torch.export.Dim("batch", min=2, max=200), torch.export.Dim("entries", min=2, max=400)
    program = torch.export.export(module, given(6), dynamic_shapes=(
        {0: batch}, {0: batch}, [{0: entries}, {0: batch + 1}]))
    loaded = packaged(program, tmp_path)
    for size in (6, 2, 9, 77):
        arguments = given(size)
        ours, eager = (torch.utils._pytree.tree_flatten(f(*arguments)) for f in (loaded, module))
        assert ours[1] == eager[1]
        for a, b in zip(ours[0], eager[0]):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_aot_inductor_knows_no_padding_value_of_nan(device, tmp_path):
    """Expects an error of PyTorch, whose graphs are JSON, which has no NaN. The default, -inf, does not reach the
    graph."""
    class Score(torch.nn.Module):
        def forward(self, x, ids):
            return selected_log_probs(x, ids, padding_value=math.nan).log_probs

    draw = Draw(device)
    with pytest.raises(RuntimeError, match="type must be number, but is string"):
        packaged(torch.export.export(Score(), (draw.normal(6, 11), draw.integers(11, 6, 3))), tmp_path)


@pytest.mark.parametrize("inplace", ["backward", "forward"])
def test_compiled_autograd_of_a_gradient_in_place(inplace, device):
    draw = Draw(device)
    leaves, ids = [draw.normal(6, 11).requires_grad_(), draw.normal(1)[0].requires_grad_()], draw.integers(11, 6, 3)

    def loss_of(inplace):
        x, scale = leaves
        out = selected_log_probs(x * 1, ids, logit_scale=scale, inplace=inplace, return_entropy=True)
        return (out.log_probs.sum(-1) * out.entropy).sum()

    expected = torch.autograd.grad(loss_of(False), leaves)
    loss = loss_of(inplace)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    for leaf, e in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad, e)


def test_36_beside_one_gradient_nothing_of_the_size_of_the_logits(device):
    """Checks also that 16-bit logits are not converted to float32."""
    x = torch.randn(64, 4096, device=device).bfloat16().requires_grad_()
    ids = SparseTarget.from_topk(torch.randint(4096, (64, 8), device=device), None)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = selected_log_probs(x, ids, return_entropy=True, return_log_tail=True)
        torch.autograd.grad([out.log_probs, out.entropy, out.log_tail], x,
                            [torch.ones_like(t) for t in (out.log_probs, out.entropy, out.log_tail)])
    name = "device_memory_usage" if device == "cuda" else "cpu_memory_usage"
    largest = max(getattr(event, name) for event in profile.events())
    assert largest <= x.numel() * 2 + 4096
    total = sum(max(0, e.cpu_memory_usage) for e in profile.events() if not e.cpu_children) if device == "cpu" else 0
    assert total <= x.numel() * 2 + 64 * 4 * (3 * 8 + 40)
