"""Tests graphs whose sizes and integers are symbols: one graph serves all values, in torch.compile and torch.export."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend

from cases import Draw, slow
from sparse_ce import (
    SparseTarget,
    binary_cross_entropy_with_logits,
    candidate_logits,
    cross_entropy,
    distillation_loss,
    divergence,
    linear_binary_cross_entropy,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_row_loss,
    linear_selected_log_probs,
    linear_topk_log_probs,
    linear_topk_logits,
    masked_mean,
    segment_softmax,
    selected_log_probs,
    topk_log_probs,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def positive(h):
    return h[:, :3].detach().exp()


def per_row(h, ids):
    """Returns a target of three entries per row, in rows of different lengths."""
    return SparseTarget.from_jagged(ids.flatten(), positive(h).flatten(),
                                    torch.arange(ids.shape[0] + 1, device=h.device) * 3)


# The arguments are logits (N, 11), hidden states (N, 6) with a head, ids (N, 3) below 5, and an integer from 5 to 10
# that a shape gave.
CALLS = {
    "labels": lambda x, h, w, ids, n: [
        cross_entropy(x, ids[:, 0], num_classes=n),
        cross_entropy(x[:, None], ids[:, :1], ignore_index=n - 5, reduction="none"),
        *cross_entropy(x, ids[:, 0], x.detach()[0].exp(), row_weight=h[:, 0].detach(), logit_scale=h[:, 1].detach(),
                       return_lse=True, return_entropy=True)[:3]],
    "targets": lambda x, h, w, ids, n: [
        cross_entropy(x, (ids, positive(h)), num_classes=n, label_smoothing=0.1),
        cross_entropy(x, SparseTarget.from_topk(ids, positive(h), mask=ids > 2, row_mask=ids[:, 0] > 1,
                                                num_classes=n, ignore_empty=True), num_classes=n),
        cross_entropy(x, per_row(h, ids)), cross_entropy(x[1:], SparseTarget.from_index(ids[:, 0])[1:]),
        cross_entropy(x[:, None], SparseTarget.from_topk(ids[:, None], None).shift(1)),
        cross_entropy(x, SparseTarget.from_dense(x.detach().exp(), n - 2)),
        SparseTarget.from_topk(ids, h[:, :3]).to_dense(num_classes=n)],
    "head": lambda x, h, w, ids, n: [
        linear_cross_entropy(h, w, ids[:, 0], num_classes=n, chunk_rows=n),
        linear_cross_entropy(h, w, (ids, positive(h)), num_classes=n, chunk_rows=n, reduction="none"),
        candidate_logits(h, w, ids)],
    "log-probabilities": lambda x, h, w, ids, n: [
        selected_log_probs(x, ids, num_classes=n, return_entropy=True).entropy, selected_log_probs(x, ids).log_probs,
        linear_selected_log_probs(h, w, per_row(h, ids), num_classes=n, chunk_rows=n).log_probs,
        linear_row_loss(lambda out, _, by: -by * out.log_probs, h, w, ids[:, 0], h[:, 0], num_classes=n, chunk_rows=n)],
    "teacher of rows": lambda x, h, w, ids, n: [
        linear_row_loss(lambda out, _: out.forward_kl, h, w, ids[:, 0], teacher=(h.detach() + 1, w.flip(0)),
                        return_forward_kl=True, num_classes=n, chunk_rows=n)],
    "top-k": lambda x, h, w, ids, n: [
        topk_log_probs(x, n).values.sum(1), cross_entropy(x, topk_log_probs(x, n - 2, num_classes=n), num_classes=n),
        linear_topk_log_probs(h, w, n - 3, num_classes=n, return_log_tail=True)[1],
        linear_topk_logits(h, w, n, chunk_rows=n + 8)[0].sum(1)],
    "binary": lambda x, h, w, ids, n: [
        binary_cross_entropy_with_logits(x, ids[:, 0], num_classes=n, pos_weight=2.0),
        linear_binary_cross_entropy(h, w, ids[:, 0], num_classes=n, chunk_classes=n),
        linear_binary_cross_entropy(h, w, (ids, positive(h)), num_classes=n, reduction="none")],
    "dense": lambda x, h, w, ids, n: [
        distillation_loss(x, x.detach().flip(1), num_classes=n),
        linear_distillation_loss(h, w, (h.detach() + 1, w), num_classes=n, chunk_rows=n),
        linear_distillation_loss(h, w, (h.detach() + 1, w), num_classes=n, reduction="none")],
    "distillation": lambda x, h, w, ids, n: [
        divergence(x, SparseTarget.from_topk(ids, positive(h) / 30), num_classes=n, tail="bucket"),
        distillation_loss(x, topk_log_probs(x.detach() + 1, 3, num_classes=n), labels=ids[:, 0], num_classes=n,
                          alpha=0.5),
        linear_distillation_loss(h, w, topk_log_probs(x.detach() + 1, 3, num_classes=n), labels=ids[:, 0],
                                 num_classes=n, alpha=0.5, chunk_rows=n)],
    "segments": lambda x, h, w, ids, n: [
        segment_softmax(x[:, 0], index=ids[:, 0], num_segments=n), masked_mean(x, ids[:, :1] > 2, -1)],
}


def outputs_of(name, x, h, w, ids, like):
    return CALLS[name](x, h, w, ids, like.shape[0])


def given(draw, rows, n):
    h, w = draw.normal(rows, 6), draw.normal(11, 6)
    return F.linear(h, w).requires_grad_(), h.requires_grad_(), w, draw.integers(5, rows, 3), draw.normal(n)


@pytest.mark.parametrize("mark", [mark_unbacked, *slow(mark_dynamic)])
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_serves_all_numbers_of_rows_and_all_integers(name, mark, device):
    """Marks the rows of each tensor. A compiler assumes nothing about sizes that are marked as unbacked."""
    counter, draw = CompileCounterWithBackend("aot_eager"), Draw(device)
    compiled = torch.compile(outputs_of, backend=counter, fullgraph=True)
    for rows, n in ((13, 7), (9, 5), (12, 10)):
        arguments = given(draw, rows, n)
        for t in (*arguments[:2], arguments[3]):
            mark(t, 0)
        mark_dynamic(arguments[4], 0)
        results = []
        for run in (compiled, outputs_of):
            out = run(name, *arguments)
            total = sum(t.float().square().sum() for t in out if t.requires_grad)
            grads = torch.autograd.grad(total, arguments[:2], allow_unused=True) if torch.is_tensor(total) else []
            results.append([*out, *(g for g in grads if g is not None)])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_a_mask_selects_are_compared_at_run_time(device):
    draw = Draw(device)
    x, labels, keep = draw.normal(4, 11), draw.integers(11, 4), torch.tensor([True, False, True, True], device=device)

    def f(x, labels, of_logits, of_labels):
        return cross_entropy(x[of_logits], labels[of_labels])

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, labels, keep, keep), f(x, labels, keep, keep))
    with pytest.raises(RuntimeError):
        compiled(x, labels, keep, ~keep)


class AllCalls(torch.nn.Module):
    def forward(self, *arguments):
        names = [name for name in CALLS if name not in ("targets", "top-k", "segments")]  # these bound the sizes
        return [t for name in names for t in outputs_of(name, *arguments)]


@pytest.mark.parametrize("packaged", [False, *slow(True)])
def test_an_exported_program_takes_integers_from_shapes(packaged, device, tmp_path):
    draw = Draw(device)
    rows, n = torch.export.Dim("rows", min=4, max=100), torch.export.Dim("n", min=5, max=10)
    shapes = ({0: rows}, {0: rows}, None, {0: rows}, {0: n})
    program = torch.export.export(AllCalls(), given(draw, 13, 7), dynamic_shapes=(shapes,))
    run = program.module()
    if packaged:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "calls.pt2"))
        run = torch._inductor.aoti_load_package(path)
    for size, k in ((9, 5), (12, 10)):
        arguments = given(draw, size, k)
        torch.testing.assert_close(run(*arguments), AllCalls()(*arguments))


def schemas():
    return [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("sparse_ce::")]


def test_ops_take_symbols_for_all_integers_that_a_shape_may_give():
    fixed = {name for s in schemas() for name in re.findall(r"\bint(?:\[\])?\?? (\w+)", str(s))}
    assert fixed == {"kind", "ranks", "dim"}


def test_ops_are_tagged_as_compliant_with_compilers():
    """Expects tags from torch 2.12 on, as in the stable ABI."""
    tagged = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
    for schema in schemas():
        op = getattr(torch.ops.sparse_ce, schema.name.split("::")[1]).default
        assert (torch.Tag.pt2_compliant_tag in op.tags) == tagged, schema.name
