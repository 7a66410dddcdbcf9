"""Tests the k most likely classes: their ids and order, their log-probabilities, and their use as a target of a
loss."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from cases import DTYPES, Draw
from linear_cases import InBlocks, make_blocks_small
from recorded_memory import peak
from refusals import assert_refused
from sparse_ce import (
    cross_entropy,
    linear_topk_log_probs,
    linear_topk_logits,
    reference,
    topk_log_probs,
)
from sparse_ce.ops.head.products import HeadProducts

ops = torch.ops.sparse_ce


def expected_ids(z, k):
    """Returns the ids sorted by value, then by id, with a stable sort."""
    return z.double().sort(dim=-1, descending=True, stable=True).indices[..., :k]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab,k", [(1, 1), (7, 7), (33, 5), (1000, 64), (5003, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_ids_and_log_probabilities_equal_a_stable_sort(ties, vocab, k, dtype, device):
    draw = Draw(device)
    z = draw.normal(2, 5, vocab) * 3
    z = (z.round() if ties else z).to(dtype)
    target, log_tail = topk_log_probs(z, k, return_log_tail=True)
    ids = expected_ids(z, k)
    assert target.form == "topk" and target.values_are == "log_probs" and target.num_classes == vocab
    assert torch.equal(target.indices, ids)
    log_probs = z.double().log_softmax(-1)
    torch.testing.assert_close(target.values.double(), log_probs.gather(-1, ids), rtol=1e-5, atol=1e-5)
    rest = torch.ones(z.shape, dtype=torch.bool, device=device).scatter(-1, ids, False)
    torch.testing.assert_close(log_tail.double(), torch.where(rest, log_probs, -torch.inf).logsumexp(-1), rtol=1e-5,
                               atol=1e-5)


def test_all_classes_tie(device):
    for dtype in (torch.bfloat16, torch.float32):
        for row in (0.0, -torch.inf):
            z = torch.full((3, 4000), row, dtype=dtype, device=device)
            z[:, 2] = 0
            assert topk_log_probs(z, 9).indices.tolist() == [
                list(range(9)) if row == 0 else [2, 0, 1, 3, 4, 5, 6, 7, 8]] * 3


@pytest.mark.parametrize("scale", [0.5, -2.0, 0.0, "row", "tensor"])
def test_scale_softcap_and_classes_that_do_not_exist(scale, device):
    draw = Draw(device)
    z = draw.normal(4, 30, dtype=torch.float64)
    z[:, 25:] = torch.nan
    by = {"row": lambda: draw.uniform(4, low=0.5, high=2, dtype=torch.float64),
          "tensor": lambda: torch.tensor(1.7, dtype=torch.float64, device=device)}.get(scale, lambda: scale)()
    target = topk_log_probs(z, 6, logit_scale=by, softcap=5.0, num_classes=25)
    factor = by[:, None] if isinstance(by, torch.Tensor) and by.dim() else by
    scaled = 5 * torch.tanh(z[:, :25] * factor / 5)
    assert torch.equal(target.indices, expected_ids(scaled, 6)) and target.num_classes == 25
    torch.testing.assert_close(target.values, scaled.log_softmax(1).gather(1, target.indices))


def test_strided_and_misaligned_logits(device):
    draw = Draw(device)
    base = draw.normal(6, 4 * 777 + 8).round().bfloat16()
    for z in (base[:, 1:700], base[:, 3:], base.t()[:9], base[:, ::2], base[1::2, 5:2000]):
        assert torch.equal(topk_log_probs(z, 7 if z.shape[1] > 6 else 2).indices,
                           expected_ids(z, 7 if z.shape[1] > 6 else 2))


def test_a_row_of_nan_stays_a_row_of_nan(device):
    z = Draw(device).normal(3, 40)
    z[1] = torch.nan
    target = topk_log_probs(z, 3)
    assert target.values[1].isnan().all() and torch.equal(target.indices[[0, 2]], expected_ids(z[[0, 2]], 3))
    assert ((0 <= target.indices) & (target.indices < 40)).all()


def test_a_loss_takes_the_target_as_it_is(device):
    draw = Draw(device)
    teacher, student = 2 * draw.normal(2, 3, 50), draw.normal(2, 3, 50).requires_grad_()
    ours = cross_entropy(student, topk_log_probs(teacher.requires_grad_(), 50))
    theirs = F.cross_entropy(student.flatten(0, 1), teacher.detach().softmax(-1).flatten(0, 1))
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    assert teacher.grad is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [None, 1, 4])
def test_of_a_head_it_is_that_of_its_logits(chunk_rows, dtype, device):
    draw = Draw(device)
    hidden, weight, bias = draw.normal(2, 5, 16, dtype=dtype), draw.normal(301, 16, dtype=dtype), draw.normal(
        301, dtype=dtype)
    scale = draw.uniform(2, 5, low=0.5, high=2, dtype=torch.float64).to(
        torch.float64 if dtype == torch.float64 else torch.float32)
    target, log_tail = linear_topk_log_probs(hidden, weight, 8, linear_bias=bias, logit_scale=scale, num_classes=290,
                                             return_log_tail=True, chunk_rows=chunk_rows)
    z = ops.linear_logits(hidden.view(10, 16), weight, bias)
    same, same_rest = topk_log_probs(z.view(2, 5, -1), 8, logit_scale=scale, num_classes=290, return_log_tail=True)
    assert target.shape == (2, 5) and target.num_classes == 290
    exact = F.linear(hidden.double(), weight.double(), bias.double())
    torch.testing.assert_close(z.double().view(exact.shape), exact, rtol=2 * torch.finfo(dtype).eps,
                               atol=40 * torch.finfo(dtype).eps)
    if dtype == torch.float64:
        assert torch.equal(target.indices, same.indices)
    torch.testing.assert_close(target.values, same.values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_tail, same_rest, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [None, 1, 4])
@pytest.mark.parametrize("num_classes", [None, 290])
def test_the_largest_logits_of_a_head(num_classes, chunk_rows, dtype, device):
    """Tests integers, so that many logits tie and none is rounded. Classes that do not exist have the largest."""
    draw = Draw(device)
    hidden, weight, bias = (draw.normal(*size).round().to(dtype) for size in ((2, 5, 16), (301, 16), (301,)))
    bias[290:] += 100
    z = F.linear(hidden.double(), weight.double(), bias.double())[..., :num_classes]
    logits, ids = linear_topk_logits(hidden.requires_grad_(), weight, 8, linear_bias=bias, num_classes=num_classes,
                                     chunk_rows=chunk_rows)
    assert torch.equal(ids, expected_ids(z, 8)) and torch.equal(logits.double(), z.gather(-1, ids))
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and not logits.requires_grad
    same = linear_topk_log_probs(hidden, weight, 8, linear_bias=bias, num_classes=num_classes, chunk_rows=chunk_rows)
    assert torch.equal(ids, same.indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_logits_of_a_head_in_blocks(dtype, monkeypatch, device):
    draw = Draw(device)
    hidden, weight, bias = (draw.normal(*size).round().to(dtype) for size in ((2, 5, 16), (70, 16), (70,)))
    make_blocks_small(monkeypatch, weight)
    for options in (dict(), dict(num_classes=50), dict(chunk_rows=3)):
        blocks = InBlocks(weight)
        ours, expected = (linear_topk_logits(hidden.requires_grad_(), w, 20, linear_bias=bias, **options)
                          for w in (blocks, weight))
        assert torch.equal(ours[1], expected[1]) and torch.equal(ours[0], expected[0])
        assert ours[0].dtype == expected[0].dtype and not ours[0].requires_grad
        chunks = 4 if "chunk_rows" in options else 1
        assert [begin for begin, _ in blocks.requested] == [*range(0, options.get("num_classes", 70), 16)] * chunks


def test_the_largest_logits_of_one_row_of_none_and_of_nan(device):
    head = torch.eye(4, device=device)
    row = torch.tensor([1.0, -torch.inf, torch.nan, 3.0], device=device)
    logits, ids = linear_topk_logits(torch.tensor([2.0, 0.0, 1.0, 3.0], device=device), head, 2)
    assert logits.tolist() == [3, 2] and ids.tolist() == [3, 0]
    for w in (head, InBlocks(head)):
        logits, ids = linear_topk_logits(torch.zeros(2, 0, 4, device=device), w, 3)
        assert logits.shape == ids.shape == (2, 0, 3) and logits.dtype == torch.float32 and ids.dtype == torch.int64
    logits, ids = linear_topk_logits(torch.ones(1, 1, device=device), row[:, None], 4)
    assert ids.tolist() == [[2, 3, 0, 1]]
    torch.testing.assert_close(logits, row[[2, 3, 0, 1]][None], equal_nan=True)


@pytest.mark.parametrize("chunk_rows,expected", [(4, [4, 4, 2]), (10, [10]), (None, [10])])
def test_the_logits_of_a_chunk_are_there_at_a_time(chunk_rows, expected, monkeypatch, device):
    made = []

    right = HeadProducts.logits
    monkeypatch.setattr(HeadProducts, "logits", lambda self, input: made.append(input) or right(self, input))
    for call in (linear_topk_log_probs, linear_topk_logits):
        made.clear()
        call(torch.randn(2, 5, 4, device=device), torch.randn(7, 4, device=device), 3, chunk_rows=chunk_rows)
        assert [logits.shape[0] for logits in made] == expected


def test_no_rows(device):
    assert topk_log_probs(torch.zeros(0, 7, device=device), 3).indices.shape == (0, 3)
    empty = linear_topk_log_probs(torch.zeros(2, 0, 4, device=device), torch.zeros(7, 4, device=device), 3)
    assert empty.indices.shape == (2, 0, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab,k", [(1, 1), (63, 40), (64, 3), (130, 130), (700, 9), (4100, 1), (4100, 1500)])
def test_the_op_equals_its_specification(vocab, k, dtype, device):
    """Checks the smallest as well, with ties, infinities, NaN, both zeros, and sorted rows, whose k largest are
    adjacent."""
    draw = Draw(device)
    z = torch.stack((draw.normal(vocab), draw.normal(vocab).round(), torch.arange(vocab, device=device).float(),
                     -torch.arange(vocab, device=device).float(), torch.full((vocab,), -torch.inf, device=device),
                     torch.zeros(vocab, device=device), *draw.normal(3, vocab).round()))
    z[5, ::2] = -0.0
    z[6, ::5], z[7, vocab // 2:], z[8, ::3] = torch.nan, torch.inf, -torch.inf
    z[8, ::7] = -torch.nan
    z = z.to(dtype)
    for largest in (True, False):
        assert torch.equal(ops.topk_ids(z, k, largest), reference.topk_ids(z, k, largest))


def test_the_op_passes_opcheck_and_is_mapped(device, fresh_compiler):
    draw = Draw(device)
    z = draw.normal(5, 60).round()
    for largest in (True, False):
        torch.library.opcheck(ops.topk_ids.default, (z, 9, largest))
        many = torch.func.vmap(lambda row: ops.topk_ids(row[None], 9, largest)[0])
        assert torch.equal(many(z), ops.topk_ids(z, 9, largest))
    torch.library.opcheck(ops.linear_logits.default, (draw.normal(4, 3), draw.normal(7, 3), None))
    torch.library.opcheck(ops.linear_logits.default, (draw.normal(4, 3), draw.normal(7, 3), draw.normal(7)),
                          dict(num_classes=5))


@pytest.mark.parametrize("k", [-1, 8])
def test_the_op_names_a_wrong_k(k, device):
    with pytest.raises(RuntimeError, match=r"sparse_ce: k must be in \[0, 7\] \(the number of classes\), got"):
        ops.topk_ids(torch.zeros(2, 7, device=device), k)
    assert ops.topk_ids(torch.zeros(2, 7, device=device), 0).shape == (2, 0)


def test_the_chunks_of_a_head_compile_for_any_number_of_rows(device, fresh_compiler):
    """Compiles for the first number of rows, for any number in one chunk, for any in two, and for four chunks."""
    draw, counter = Draw(device), CompileCounterWithBackend("aot_eager")
    weight, scale = draw.normal(30, 4), draw.uniform(48, low=0.5, high=2)
    compiled = torch.compile(lambda *given, **options: linear_topk_log_probs(*given, 5, **options), backend=counter,
                             fullgraph=True)
    for rows in (7, 9, 12, 13, 14, 17, 20, 24, 25, 31, 37, 43, 48):
        given, options = (draw.normal(rows, 4), weight), dict(logit_scale=scale[:rows] * 1, chunk_rows=12)
        ours, eager = compiled(*given, **options), linear_topk_log_probs(*given, 5, **options)
        assert torch.equal(ours.indices, eager.indices)
        torch.testing.assert_close(ours.values, eager.values)
    assert counter.frame_count <= 4


@pytest.mark.parametrize("k,error", [(0, ValueError), (8, ValueError), (2.0, ValueError), (True, ValueError)])
def test_a_wrong_k_is_named(k, error, device):
    with pytest.raises(error, match=r"sparse_ce: k must be an integer in \[1, 7\] \(the number of classes\), got"):
        topk_log_probs(torch.zeros(2, 7, device=device), k)
    for call in (linear_topk_log_probs, linear_topk_logits):
        with pytest.raises(error, match=r"sparse_ce: k must be an integer in \[1, 7\]"):
            call(torch.zeros(2, 4, device=device), torch.zeros(7, 4, device=device), k)
    with pytest.raises(error, match=r"sparse_ce: k must be an integer in \[1, 7\]"):
        topk_log_probs(torch.zeros(2, 9, device=device), k, num_classes=7)


def test_no_classes_are_named(device):
    with pytest.raises(ValueError, match=r"sparse_ce: input must have at least one class, got shape \[2, 0\]"):
        topk_log_probs(torch.zeros(2, 0, device=device), 1)


def test_a_scale_that_turns_the_order(device):
    """Checks that a negative number selects the smallest logits. A negative tensor raises an error if the check needs
    no synchronization, so not on CUDA."""
    z, head = torch.tensor([[3.0, 1.0, 2.0, 0.0]], device=device), torch.eye(4, device=device)
    assert topk_log_probs(z, 2, logit_scale=-1.0).indices.tolist() == [[3, 1]]
    for scale in (-1.0, 0.0, torch.nan):
        for given in (torch.tensor(scale, device=device), torch.tensor([scale], device=device)):
            for call in (lambda given=given: topk_log_probs(z, 2, logit_scale=given),
                         lambda given=given: linear_topk_log_probs(z, head, 2, logit_scale=given)):
                if device == "cpu":
                    assert_refused(call, "logit_scale must be a number or a tensor of positive numbers",
                                   error=ValueError)
                else:
                    ids = call().indices
                    assert ((0 <= ids) & (ids < 4)).all()


def test_the_logits_of_one_chunk_exist_at_a_time():
    hidden, head = torch.randn(64, 8), torch.randn(5000, 8)
    of_chunk = 16 * 5000 * 4
    for call in (linear_topk_log_probs, linear_topk_logits):
        assert of_chunk <= peak(lambda: call(hidden, head, 3, chunk_rows=16)) < 1.5 * of_chunk
