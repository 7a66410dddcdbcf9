"""Contains linear heads with targets, their loss in plain PyTorch, and the ways to run the loss under test."""

import contextlib

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cases import FORMS, Draw
from dense import arithmetic, dense_cross_entropy
from loss_cases import CLASSES, PADDED, SHAPE, gradients
from sparse_ce import linear_cross_entropy
from sparse_ce.ops import instruction_set
from sparse_ce.ops.head import products as head_products

WIDTH = 19
MIXED = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]  # dtypes of the input and of the head


class Traced(TorchDispatchMode):
    """Makes the code inside believe it is traced, so that ignored rows stay in the arguments of the kernels."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


ROUTES = {"eager": contextlib.nullcontext, "traced": Traced}


def make_head(case, draw, dtype, head_dtype=None, vocab=None, bias=True, width=WIDTH):
    """Returns [input (*shape, width), weight (V, width), bias (V,) or None] with logits that are peaked in two of three
    rows.

    Values that must not be read are poisoned: ignored rows, and classes beyond those of the target.
    """
    classes = case.classes
    w = draw.normal(classes, width, dtype=torch.float64)
    direction = w[case.dense.argmax(-1)]
    peaks = draw.uniform(*case.shape, 1, low=-4, high=8, dtype=torch.float64)
    noise = draw.normal(*case.shape, width, dtype=torch.float64) * 1.3 / width**0.5
    x = noise + peaks * direction / direction.square().sum(-1, True)
    x[case.ignored] = torch.nan
    x[case.ignored, :2] = torch.inf
    beyond = (vocab or classes) - classes
    w = torch.cat([w, w.new_full((beyond, width), torch.nan)])
    b = torch.cat([draw.normal(classes, dtype=torch.float64), w.new_full((beyond,), torch.nan)]) if bias else None
    return [x.to(dtype), w.to(head_dtype or dtype), None if b is None else b.to(head_dtype or dtype)]


def make(form, device, dtype, options, head_dtype=None, bias=True, seed=0, shape=SHAPE):
    """Returns (case, head, keyword arguments of the loss)."""
    draw = Draw(device, seed)
    case = FORMS[form](shape, CLASSES, draw, options.get("ignore_index", -100))
    head = make_head(case, draw, dtype, head_dtype, PADDED if "num_classes" in options else None, bias)
    keywords = dict(options)
    if "weight" in options:
        keywords["weight"] = draw.uniform(CLASSES, low=0.2, high=2)
        keywords["weight"][2] = 0
    return case, head, keywords


def dense_result(case, head, keywords, grad_output, grad_lse, exact, wanted=None):
    """Returns (loss, lse, gradients for input, weight, bias and values) of F.linear and the dense target.

    If ``exact``, everything is float64. Otherwise it follows PyTorch: GEMMs in the dtype of the input, the loss in the
    arithmetic dtype, gradients in their tensors' dtypes. 16-bit logits are rounded once: their errors may cancel by
    chance in a loss, and not in a loss whose F.linear rounds differently, such as on a GPU.
    """
    dtype = torch.float64 if exact else arithmetic(head[0].dtype)
    keywords = {k: v for k, v in keywords.items() if k not in ("return_lse", "ignore_index", "chunk_rows")}
    leaves = [None if t is None else t.detach().to(torch.float64 if exact else t.dtype).requires_grad_()
              for t in (*head, case.values)]
    x, w, b, v = leaves
    n, product = keywords.get("num_classes"), torch.float64 if exact else x.dtype
    w, b = w[:n].to(product), None if b is None else b[:n].to(product)
    x = torch.where(case.ignored[..., None], 0, x)
    z = F.linear(x, w, b)
    if torch.finfo(z.dtype).bits == 16:
        once = F.linear(*(None if t is None else t.detach().double() for t in (x, w, b))).to(z.dtype)
        z = z + (once - z).detach()  # equals `once`: numbers this close have an exact difference
    dense = case.dense_of(None if v is None else v.to(dtype))
    loss, lse = dense_cross_entropy(z, dense, case.ignored, case.labels, dtype=dtype, **keywords)
    wanted = [i for i in range(4) if leaves[i] is not None] if wanted is None else wanted
    return loss, lse, gradients(loss, lse, [leaves[i] for i in wanted], grad_output, grad_lse)


def example(device, dtype=torch.float32, head_dtype=None, rows=10, vocab=33, width=8, ignored=True):
    """Returns [input, weight, bias], all requiring grad, and labels."""
    draw = Draw(device)
    head = [draw.normal(rows, width).to(dtype), draw.normal(vocab, width).to(head_dtype or dtype),
            draw.normal(vocab).to(head_dtype or dtype)]
    labels = draw.integers(vocab, rows)
    if ignored:
        labels[::4] = -100
    return [t.requires_grad_() for t in head], labels


def fused(head, target, **options):
    return linear_cross_entropy(head[0], head[1], target, linear_bias=head[2], **options)


def plain(head, labels, **options):
    return F.cross_entropy(F.linear(*head), labels, **options)


def double(head):
    return [t.detach().double().requires_grad_() for t in head]


def scaled(head, labels, scale, **options):
    """Returns the float64 gradients of ``scale`` times the loss.

    On CUDA float16 logits and their gradient are rounded and overflow, as in ``F.cross_entropy``.
    """
    exact = double(head)
    z = F.linear(*exact)
    rounds = head[0].dtype == torch.float16 and (head[0].is_cuda or instruction_set() == "emulated CUDA")
    logits = (z.half().double() if rounds else z).detach().requires_grad_()
    dz, = torch.autograd.grad((F.cross_entropy(logits, labels, **options) * scale).sum(), logits)
    return torch.autograd.grad(z, exact, dz.half().double() if rounds else dz)


def way_of_products():
    """Returns how this process multiplies bfloat16 on a CPU, from whether a logit of 1 + 2^-9 is rounded to 1."""
    x, w = torch.ones(1, 2).bfloat16(), torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    logits = [linear_cross_entropy(x, head, torch.tensor([0]), return_lse=True)[1] for head in (w, w.float())]
    assert logits[0] == logits[1]
    return {1: "native", 1 + 2.0**-9: "float32"}[logits[0].item()]


class InBlocks:
    """Gives a weight in blocks, and records the requested classes."""

    def __init__(self, weight):
        self.weight, self.shape, self.dtype, self.requested = weight, weight.shape, weight.dtype, []

    def block(self, begin, end):
        self.requested.append((begin, end))
        return self.weight[begin:end].clone()


def recorded_gradients(monkeypatch):
    """Returns a set to which the names of the gradients are added that heads compute chunk by chunk."""
    made, ops = set(), torch.ops.sparse_ce

    def add(*args):
        made.update(name for name, t in zip(("input", "input_low", "weight", "weight_low", "bias"), args[4:])
                    if t is not None)
        return ops.linear_add_gradients_(*args)

    class Recorded:
        linear_add_gradients_ = staticmethod(add)

        def __getattr__(self, name):
            return getattr(ops, name)

    monkeypatch.setattr(head_products, "ops", Recorded())
    return made


def make_blocks_small(monkeypatch, weight):
    """Makes each block of a ``weight`` hold 16 classes."""
    monkeypatch.setattr(head_products, "_WEIGHT_BYTES", 16 * weight.shape[1] * weight.element_size())


V, D = 37, 7  # the shape of the weight of head_of_blocks


def head_of_blocks(device, monkeypatch):
    """Returns hidden states (2, 5, D), weight (V, D) and bias, in float64. A block of the weight has 16 classes."""
    draw = Draw(device)
    hidden, weight, bias = (draw.normal(*size, dtype=torch.float64) for size in ((2, 5, D), (V, D), (V,)))
    make_blocks_small(monkeypatch, weight)
    return hidden * 2, weight, bias


def labels_of(device):
    """Returns labels (2, 5), two of which are ignored."""
    labels = Draw(device, 1).integers(V, 2, 5)
    labels[0, 1] = labels[1, 4] = -100
    return labels
