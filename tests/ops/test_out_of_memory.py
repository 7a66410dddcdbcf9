"""Tests that a failed allocation raises PyTorch's error, so that training libraries retry with a smaller batch."""

import functools

import pytest
import torch

import sparse_ce
from little_memory import little_memory
from sparse_ce import cross_entropy, linear_cross_entropy
from sparse_ce.ops.registration import below_autograd

ops = torch.ops.sparse_ce
ROWS, VOCAB, WIDTH = 512, 1 << 16, 16  # logits of 128 MiB
TEXT = "DefaultCPUAllocator: can't allocate memory"


def caught(call, megabytes=64):
    with little_memory(megabytes), pytest.raises(RuntimeError) as error:
        call()
    return error.value


def arguments():
    labels = torch.arange(ROWS) % VOCAB
    return torch.zeros(ROWS, VOCAB), labels, torch.zeros(ROWS, WIDTH), torch.zeros(VOCAB, WIDTH)


def of_ops():
    """Returns calls that need more memory than available, by name."""
    z, labels, x, w = arguments()
    rows, one = torch.zeros(ROWS), torch.ones(())
    return {
        "gradient in forward": lambda: ops.forward_with_gradient(one, None, z, labels),
        "gradient in backward": lambda: ops.backward(rows, None, z, rows, None, labels),
        "gradient of select": lambda: ops.select_backward(rows, *(None,) * 6, z, rows, *(None,) * 4, labels),
        "packed logits": functools.partial(ops.select, z.mT.contiguous().mT, labels),
        "top-k": lambda: ops.topk_ids(torch.zeros(1, 8).expand(2**40, 8), 1),
        "logits of a head": lambda: ops.linear_logits(x, w, None),
        "head": lambda: ops.linear_select(x, w, None, labels, chunk_rows=ROWS),
        "head with gradients": lambda: ops.linear_select_with_gradient(rows, x, w, None, labels, loss=True,
                                                                       log_probs=False, chunk_rows=ROWS),
        "head in backward": lambda: ops.linear_select_backward(rows, *(None,) * 6, x, w, None, rows, *(None,) * 4,
                                                               labels, chunk_rows=ROWS),
        "mask": lambda: ops.masked_mean_backward(torch.zeros(()), torch.ones(1).expand(2**40), [0], torch.float32),
    }


@pytest.mark.parametrize("name", of_ops())
def test_an_op_says_what_the_allocator_said(name):
    call = of_ops()[name]
    error = caught(call)
    assert type(error) is RuntimeError and TEXT in str(error) and "API call failed" not in str(error)
    assert len(error.args) == 1


def test_public_functions_and_backward_say_so_too():
    z, labels, x, w = arguments()
    z.requires_grad_(), x.requires_grad_(), w.requires_grad_()
    loss = cross_entropy(z, labels, reduction="none").sum()
    assert TEXT in str(caught(loss.backward))
    assert TEXT in str(caught(lambda: linear_cross_entropy(x, w, labels, chunk_rows=ROWS)))
    loss = cross_entropy(z, labels)  # the next call succeeds
    loss.backward()
    assert z.grad.isfinite().all()
    assert TEXT in str(caught(lambda: cross_entropy(z, labels)))  # forward computes the gradient


def test_accelerate_takes_a_smaller_batch():
    memory = pytest.importorskip("accelerate.utils.memory")
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=ROWS, reduce_batch_size_fn=lambda: max(1, tried[-1] // 2))
    def train(batch_size):
        tried.append(batch_size)
        z = torch.zeros(batch_size, 3 * VOCAB, requires_grad=True)  # larger than a block left by an earlier test
        loss = cross_entropy(z, torch.zeros(batch_size, dtype=torch.int64), reduction="none").sum()
        if batch_size < ROWS // 2:
            loss.backward()
            return
        with little_memory(16):
            loss.backward()

    train()
    assert tried == [ROWS, ROWS // 2, ROWS // 4]
    assert memory.should_reduce_batch_size(caught(of_ops()["top-k"]))


def test_a_kernels_own_memory_is_memory_too():
    """Tests an allocation of a C++ vector."""
    z, ids = torch.ones(1, 2**22), torch.arange(2**22)[None]  # a row that lists its entries
    assert TEXT in str(caught(lambda: ops.forward(z, ids, z), 24))


def test_a_gpus_allocator_has_its_own_error():
    text = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory. Tried") as error:
        with below_autograd():
            raise RuntimeError(text)
    assert error.value.args == (text,)
    for other in (RuntimeError("sparse_ce: k must be 1, got CUDA out of memory."), ValueError("CUDA out of memory.")):
        with pytest.raises(type(other)) as error:
            with below_autograd():
                raise other
        assert error.value is other


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_what_an_op_of_pytorch_says_arrives():
    library = torch.library.Library("aten", "IMPL")

    def refused(*given, **named):
        raise ValueError("the sort of this test is out of order")

    try:
        library.impl("sort.stable", refused, "CPU")
        with pytest.raises(RuntimeError, match="the sort of this test is out of order"):
            x, w, ids = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 1, dtype=torch.int64)
            ops.candidate_logits_backward(torch.zeros(2, 1), None, x, w, None, ids)
    finally:
        library._destroy()
    assert sparse_ce.ops.instruction_set()
