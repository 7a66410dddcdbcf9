"""Tests divergences between two linear heads whose frozen weights are given in blocks: they equal those of tensors."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import recorded_memory
from cases import Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import InBlocks, make_blocks_small
from sparse_ce import LinearDistillationLoss, linear_distillation_loss, linear_row_loss
from sparse_ce.functional.dense_inputs import teacher_head_of
from sparse_ce.functional.inputs import of_head
from sparse_ce.ops import instruction_set
from sparse_ce.ops.head import products as head_products
from sparse_ce.sharding.shard import Shard

V, D, OF_TEACHER = 37, 7, 6
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.bfloat16),
          (torch.float16, torch.float16)]  # of the student and of the teacher


IN_BLOCKS = [(False, True), (True, False), (True, True)]  # the weights of the student and of the teacher


def make(device, monkeypatch, student=torch.float64, teacher=torch.float64):
    """Returns [hidden, weight, bias] of the student, and of the teacher. A block of the teacher has 16 classes."""
    draw = Draw(device)
    heads = [[draw.normal(*size, dtype=torch.float64).to(dtype) for size in ((2, 5, width), (V, width), (V,))]
             for width, dtype in ((D, student), (OF_TEACHER, teacher))]
    make_blocks_small(monkeypatch, heads[1][1])
    return heads


def given(heads, in_blocks):
    """Returns the weights of both heads, some of them in blocks."""
    return [InBlocks(weight) if blocks else weight for (_, weight, _), blocks in zip(heads, in_blocks)]


def loss_of(heads, weight, of_teacher, target=None, **options):
    """Returns the loss, the gradients for hidden states and bias of the student, and that for a tensor ``weight``."""
    (hidden, _, bias), (teacher, _, teacher_bias) = heads
    leaves = [t.clone().requires_grad_() for t in (hidden, bias, weight) if isinstance(t, torch.Tensor)]
    loss = linear_distillation_loss(leaves[0], (*leaves, weight)[2], (teacher, of_teacher, teacher_bias), target,
                                    linear_bias=leaves[1], **options)
    return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)


@pytest.mark.parametrize("in_blocks", IN_BLOCKS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("options", [
    {}, dict(kind="reverse_kl", chunk_rows=3), dict(kind="jsd", reduction="none"), dict(alpha=0.7),
    dict(kind="tv", num_classes=33, teacher_softcap=3.0, teacher_logit_scale=0.5),
    dict(logits_dtype=torch.float32, chunk_rows=4)], ids=str)
def test_loss_and_gradients_equal_those_of_tensors(options, dtypes, in_blocks, device, monkeypatch):
    heads = make(device, monkeypatch, *dtypes)
    target = Draw(device, 1).integers(33, 2, 5) if "alpha" in options else None
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]], device=device).bool()
    weights = given(heads, in_blocks)
    ours = loss_of(heads, *weights, target, row_mask=mask, **options)
    peers = loss_of(heads, *given(heads, (False, False)), target, row_mask=mask, **options)
    heads = [[t.double() for t in head] for head in heads]
    exact = loss_of(heads, *given(heads, (False, False)), target, row_mask=mask, **options)
    for one, peer, defined in zip(ours, peers, exact):
        assert_close_to_float64(one, peer, defined, arithmetic=dtypes[0])
    for weight in weights:  # all classes are never requested at once
        assert all(end - begin <= 32 for begin, end in getattr(weight, "requested", ()))


@pytest.mark.parametrize("in_blocks", IN_BLOCKS)
def test_a_module_and_a_row_loss(in_blocks, device, monkeypatch):
    heads = make(device, monkeypatch)
    (hidden, _, bias), (of_teacher, _, teacher_bias) = heads
    labels = Draw(device, 1).integers(V, 2, 5)
    labels[0, 1] = -100
    module = LinearDistillationLoss(kind="jsd", alpha=0.9)

    def by_module(x, weight, teacher):
        return module(x, weight, (of_teacher, teacher, teacher_bias), labels, linear_bias=bias)

    def by_rows(x, weight, teacher, **options):
        return linear_row_loss(lambda out, labels: out.tv - out.log_probs * out.forward_kl, x, weight, labels,
                               linear_bias=bias, teacher=(of_teacher, teacher, teacher_bias),
                               return_tv=True, return_forward_kl=True, **options)

    for function in (by_module, by_rows, lambda *args: by_rows(*args, chunk_rows=3),
                     lambda *args: by_rows(*args, reduction="none").sum(),
                     lambda *args: checkpoint(by_rows, *args, use_reentrant=False)):
        results = []
        for blocks in (in_blocks, (False, False)):
            x = hidden.clone().requires_grad_()
            loss = function(x, *given(heads, blocks))
            results.append((loss.detach(), *torch.autograd.grad(loss, x)))
        for one, other in zip(*results):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("in_blocks", IN_BLOCKS)
def test_modes(in_blocks, device, monkeypatch):
    heads = make(device, monkeypatch)
    (hidden, _, bias), (of_teacher, _, _) = heads
    (weight, teacher_weight), x = given(heads, in_blocks), hidden.clone().requires_grad_()

    def f(x):
        return linear_distillation_loss(x * 1, weight, (of_teacher, teacher_weight), linear_bias=bias) * 3

    loss = f(x)
    first, = torch.autograd.grad(loss, x, retain_graph=True)
    for again in (loss, checkpoint(f, x, use_reentrant=False), torch.compile(f, backend="aot_eager")(x)):
        assert_bitwise_equal(torch.autograd.grad(again, x)[0], first)
    with torch.no_grad():
        torch.testing.assert_close(f(x), loss.detach())
    heads = [[t.float() for t in head] for head in heads]
    with torch.autocast(device, dtype=torch.bfloat16):
        mixed = loss_of(heads, *given(heads, in_blocks))[0]
        torch.testing.assert_close(mixed, loss_of(heads, *given(heads, (False, False)))[0], rtol=1e-2, atol=0)


def test_memory_does_not_hold_the_weight(device, monkeypatch):
    if device != "cpu" or instruction_set() == "emulated CUDA":
        pytest.skip("reads the records of the CPU's allocator, for the products of CPUs")
    rows, width, vocab = 16, 256, 4096
    monkeypatch.setattr(head_products, "_WEIGHT_BYTES", 1 << 18)
    integers, scales = torch.randint(-127, 128, (vocab, width), dtype=torch.int8), torch.rand(vocab, 1) / 99
    weight, hidden = torch.randn(vocab, 8), torch.randn(rows, 8)

    class Int8Weight:
        shape, dtype = integers.shape, scales.dtype

        def block(self, begin, end):
            return integers[begin:end] * scales[begin:end]

    of_teacher = torch.randn(rows, width)

    def step():
        x = hidden.clone().requires_grad_()
        return torch.autograd.grad(linear_distillation_loss(x, weight, (of_teacher, Int8Weight())), x)

    step()
    logits, block = 4 * rows * vocab, 1 << 18
    assert recorded_memory.peak(step) <= 1.2 * (2 * logits + 2 * block) < vocab * width * 4 / 2


class Broken(InBlocks):
    def block(self, begin, end):
        return super().block(begin, end)[1:]


def test_what_blocks_of_a_teacher_do_not_support(device, monkeypatch):
    (hidden, weight, _), (of_teacher, teacher_weight, _) = make(device, monkeypatch)
    blocks, trained = InBlocks(teacher_weight), InBlocks(teacher_weight)
    trained.requires_grad = True
    for teacher, message in (
            (Broken(teacher_weight), r"teacher_weight.block\(0, 16\) must be a tensor \[16, 6\]"),
            (InBlocks(teacher_weight[:, 1:]), r"teacher_weight must be \(V, 6\) to match teacher_input, got \[37,"),
            (InBlocks(teacher_weight[1:]), "teacher_weight must have the rows of linear_weight, 37, got 36"),
            (trained, "teacher_weight must not require grad")):
        with pytest.raises((TypeError, ValueError), match=f"sparse_ce: {message}"):
            linear_distillation_loss(hidden, weight, (of_teacher, teacher))
    source = of_head(hidden, weight, None, None, None, None, None, None)._replace(shard=Shard("", 2, 0), num_classes=V)
    with pytest.raises(ValueError, match="group does not support a teacher_weight in blocks"):
        teacher_head_of(of_teacher, blocks, None, weight, source)
    for name, weights in (("teacher_weight", (weight, blocks)), ("linear_weight", (InBlocks(weight), teacher_weight))):
        def f(x, weights=weights):
            return linear_distillation_loss(x, weights[0], (of_teacher, weights[1]), reduction="none")

        with pytest.raises(RuntimeError, match=f"{name} must be a tensor under torch.func"):
            torch.func.vjp(f, hidden)
        x = hidden.clone().requires_grad_()
        loss = f(x)
        with pytest.raises(RuntimeError, match=f"create_graph must be False if {name} is given in blocks"):
            torch.autograd.grad(loss.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"is_grads_batched must be False if {name} is given in blocks"):
            torch.autograd.grad(loss, x, torch.ones(3, *loss.shape, dtype=loss.dtype), is_grads_batched=True)
