"""Tests the memory that the linear head needs beyond its inputs and gradients on a CPU, against the formula of
docs/linear-head.md, also with ignored rows."""

import os

import pytest
import torch

import forked
import sparse_ce
from cases import slow
from flavours import available_instruction_sets

PRELUDE = """
import ctypes, re, sys, torch
from types import SimpleNamespace
from sparse_ce import *

torch.set_num_threads(1)
# Has glibc return large memory when it is freed (M_MMAP_THRESHOLD), as the cache of blocks keeps it in one piece. The
# process is a fork, for which glibc does not read MALLOC_MMAP_THRESHOLD_.
ctypes.CDLL(None).mallopt(-3, 65536)

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def extra(loss, leaves):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    grads = torch.autograd.grad(loss(), leaves, allow_unused=True)
    return status("VmHWM") - before - sum(g.numel() * g.element_size() for g in grads if g is not None)
"""
"""Defines ``extra``: the bytes at the peak of a forward and a backward, beyond those before and the gradients."""

PEAK = PRELUDE + """
rows, vocab, width, ignored, reduction, dtype, chunk_rows = (
    eval(a) if i != 4 else a for i, a in enumerate(sys.argv[1:]))
x, w, b = (torch.randn(*size).to(dtype) for size in ((rows, width), (vocab, width), (vocab,)))
labels = torch.randint(vocab, (rows,))
labels[torch.rand(rows) < ignored] = -100

def run(n):
    leaves = [t.detach().requires_grad_() for t in (x[:n], w, b)]
    return extra(lambda: linear_cross_entropy(leaves[0], leaves[1], labels[:n], linear_bias=leaves[2],
                                              reduction=reduction, chunk_rows=chunk_rows).sum(), leaves)

run(16)
print(run(rows))
"""


AMX = os.path.exists("/proc/cpuinfo") and "amx_bf16" in open("/proc/cpuinfo").read()
PRODUCTS = (24 if AMX else 6) << 20
"""What PyTorch's own products of 16 bits may hold: with AMX oneDNN packs a part of each matrix."""

# Without AVX-512 PyTorch multiplies 16-bit numbers one by one, which takes minutes and is not a case in use.
WAYS = ["float32"] + ["native"] * ("avx512" in available_instruction_sets())


def printed(folder, program, *arguments, **env):
    package = os.path.dirname(os.path.dirname(os.path.abspath(sparse_ce.__file__)))
    done = forked.run("-c", program, *arguments, cwd=folder, env={**os.environ, "PYTHONPATH": package, **env})
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def peak(folder, *arguments, chunk_rows=None, **env):
    return printed(folder, PEAK, *arguments, chunk_rows, **env)


SHAPES = {"small head, wide hidden states": (8192, 500, 1024), "large head": (1024, 36000, 64),
          "two classes": (20000, 2, 512)}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads /proc")
@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="the formula of the CPU")
@pytest.mark.parametrize("reduction", ["mean", *slow("none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_formula_of_the_readme(shape, ignored, dtype, reduction, tmp_path):
    rows, vocab, width = SHAPES[shape]
    logits = rows * vocab * 4
    chunk = logits if logits <= 128 << 20 else max(rows * vocab * dtype.itemsize // 40, 128 << 20)
    if ignored or dtype == torch.bfloat16:
        chunk = max(chunk * 5 // 4, 16 << 20)
    beside = vocab * width if dtype == torch.bfloat16 else 0
    extra = peak(tmp_path, rows, vocab, width, ignored, reduction, dtype)
    assert extra <= chunk + beside + (10 << 20) + (100 if ignored else 20) * rows, f"{extra / 2**20:.1f} MiB"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads /proc")
@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="the formula of the CPU")
@pytest.mark.parametrize("products", WAYS)
@pytest.mark.parametrize("ignored", [0.0, 0.1])
def test_no_more_rows_than_features_need_no_byte_a_weight(ignored, products, tmp_path):
    """Checks a chunk of 16 MiB of 78 MiB of logits. A sum over chunks needs 39 MiB beside the gradient."""
    rows, vocab, width = 512, 80000, 512
    extra = peak(tmp_path, rows, vocab, width, ignored, "mean", torch.bfloat16, SPARSE_CE_CPU_BFLOAT16=products,
                 SPARSE_CE_BLOCK_CACHE="0")
    copied = 2 * rows * width if ignored else 0
    blocks = 0 if products == "native" else 16 << 20
    assert extra <= (16 << 20) + copied + blocks + PRODUCTS, f"{extra / 2**20:.1f} MiB"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads /proc")
@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="the formula of the CPU")
@pytest.mark.parametrize("products", WAYS)
@pytest.mark.parametrize("reduction, ignored", [("mean", 0.1), ("none", 0.0), *slow(("mean", 0.0), ("none", 0.1))])
def test_few_rows_in_a_chunk_need_no_byte_a_weight_either(reduction, ignored, products, tmp_path):
    """Checks chunks of 4 MiB, without the 31 MiB of such bytes. Copies of the input take their place."""
    rows, vocab, width, chunk_rows = 512, 128000, 256, 16
    extra = peak(tmp_path, rows, vocab, width, ignored, reduction, torch.bfloat16, chunk_rows=chunk_rows,
                 SPARSE_CE_CPU_BFLOAT16=products, SPARSE_CE_BLOCK_CACHE="0")
    size = 2 if products == "native" else 4
    chunk, blocks = chunk_rows * vocab * size, (2 << 20) if products == "native" else (8 << 20)
    copied = rows * width * (size + 2) if ignored or size == 4 else 0
    assert extra <= chunk + rows * width + copied + blocks + PRODUCTS, f"{extra / 2**20:.1f} MiB"


FUNCTIONS = {
    "linear_cross_entropy": "linear_cross_entropy(x, w, y, chunk_rows=R)",
    "losses of rows": "linear_cross_entropy(x, w, y, chunk_rows=R, reduction='none').sum()",
    "entropy": "linear_cross_entropy(x, w, y, chunk_rows=R, return_entropy=True)[0]",
    "linear_selected_log_probs": "linear_selected_log_probs(x, w, y, chunk_rows=R).log_probs.sum()",
    "linear_row_loss": "linear_row_loss(lambda out, _: -out.log_probs, x, w, y, chunk_rows=R)",
    "teacher": "linear_row_loss(lambda out, _: out.forward_kl, x, w, y, chunk_rows=R, teacher=(t, w.detach()),"
               " return_forward_kl=True)",
    "losses of rows with a teacher": "linear_row_loss(lambda out, _: out.forward_kl - out.log_probs, x, w, y,"
                                     " chunk_rows=R, teacher=(t, w.detach()), return_forward_kl=True,"
                                     " reduction='none').sum()",
    "linear_distillation_loss": "linear_distillation_loss(x, w, (t, w.detach()), chunk_rows=R)",
    "linear_binary_cross_entropy": "linear_binary_cross_entropy(x, w, y[:, None], chunk_classes=R * V // N)",
    "linear_topk_log_probs": "linear_topk_log_probs(x.detach(), w.detach(), 4, chunk_rows=R).values.sum()"
                             " + 0 * x.sum()",
    "blocks": "linear_cross_entropy(x, SimpleNamespace(shape=w.shape, dtype=w.dtype, block=lambda a, b: w[a:b]), y,"
              " chunk_rows=R)",
    "frozen": "linear_cross_entropy(x, w.detach(), y, chunk_rows=R)",
}
OF_TWO_MODELS = ("teacher", "losses of rows with a teacher", "linear_distillation_loss")

PEAK_OF_A_FUNCTION = PRELUDE + """
N, V, D, R, dtype = 1024, 36000, 64, 64, eval(sys.argv[2])

def run(N):
    x, w, t = (torch.randn(n, D).to(dtype).requires_grad_(i < 2) for i, n in enumerate((N, V, N)))
    names = {**globals(), "x": x, "w": w, "t": t, "y": torch.randint(V, (N,)), "N": N}
    return extra(lambda: eval(sys.argv[1], names), (x, w))

run(16)
print(run(N))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads /proc")
@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="the formula of the CPU")
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_needs_a_chunk_of_logits(function, dtype, tmp_path):
    """Checks chunks of 9 MiB of 141 MiB of logits, two if there are two models. In 16 bits a sum of the weight's
    gradient over chunks needs one byte an element."""
    chunks, size = 1 + (function in OF_TWO_MODELS), 4 if dtype == "torch.float32" or not AMX else 2
    chunk, low = 64 * 36000 * size, 0 if dtype == "torch.float32" else 36000 * 64
    extra = printed(tmp_path, PEAK_OF_A_FUNCTION, FUNCTIONS[function], dtype, SPARSE_CE_BLOCK_CACHE="0")
    assert extra <= chunks * chunk + low + PRODUCTS, f"{extra / 2**20:.1f} MiB"
