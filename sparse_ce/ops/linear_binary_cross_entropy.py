"""Implements ``torch.ops.sparse_ce.linear_binary_cross_entropy``: binary cross entropy of the logits of a linear head.

No class waits for another, so a block of classes is processed at a time, for all rows: its logits, their loss and their
gradient, which overwrites them and is multiplied immediately. Each row of the weight is read twice, and each row of its
gradient is written once, without a sum over blocks. A mean or a sum computes the gradients in forward, for a
``grad_output`` of 1, with three matrix products. Otherwise backward computes the logits again, with four in all.
"""

import functools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import BinaryArguments, Candidates, Chunks, arithmetic_dtype
from .._core.errors import fail
from .._core.tracing import eager, traced
from .._core.weight_blocks import Blocks
from ..reference.binary_cross_entropy import gradient_of_values
from ..reference.safe_math import times
from ..sharding.collectives import add_up, gather, scatter_sum
from ..sharding.shard import Shard
from ..targets.decode import entries_of, ignored_rows
from . import expected_grad
from .binary_cross_entropy import add_shards, check_learned, overwrite
from .candidates import candidate_logits
from .linear_blocks import _add_product as add_product
from .linear_cross_entropy import Head, scaled
from .registration import (
    batched,
    below_autograd,
    composite,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_composition,
    register_fake,
)
from .sharded_select import refuse_composite, refuse_second

_LOGITS_BYTES = 1 << 26  # of a block; smaller blocks have slower products
_LEAST_CLASSES = 512  # of a block; more rows are processed in chunks
_F = TypeVar("_F", bound=Callable[..., Any])


class _Call(NamedTuple):
    """Stores the arguments of an op. The weight of the head may be :class:`Blocks`."""

    head: Head
    b: BinaryArguments
    chunks: Chunks  # ``chunk_rows`` counts classes
    shard: Optional[Shard]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Dict[str, Any]) -> "_Call":
        of_b = BinaryArguments._fields
        names = ("input", "linear_weight", "linear_bias", *of_b, "chunk_classes", "float32_logits", "group", "ranks",
                 "shares_rows")
        values = {**dict(linear_bias=None, chunk_classes=None, float32_logits=False, group="", ranks=1,
                         shares_rows=False), **dict(zip(names, args)), **kwargs}
        b = BinaryArguments(**{name: values[name] for name in of_b if name in values})
        shard = (Shard(values["group"], values["ranks"], b.first_class or 0, values["shares_rows"])
                 if values["group"] else None)
        return cls(Head(values["input"], values["linear_weight"], values["linear_bias"]), b,
                   Chunks(values["chunk_classes"], values["float32_logits"]), shard)

    def arguments(self) -> Tuple[Any, ...]:
        """Returns the arguments of the ops."""
        group, ranks, _, shares_rows = self.shard or Shard("", 1, 0)
        return *self.head, *self.b, *self.chunks, group, ranks, shares_rows

    @property
    def rows(self) -> int:
        """Returns the number of rows of all ranks."""
        input = self.head.input
        return input.shape[0] if self.shard is None else self.shard.rows(input)

    @property
    def classes(self) -> int:
        """Returns the number of local classes without padding."""
        vocab, total = self.head.linear_weight.shape[0], self.b.num_classes
        if self.shard is None:
            return vocab if total is None else total
        assert total is not None
        return max(0, min(vocab, total - self.shard.first_class))

    @property
    def total_classes(self) -> int:
        """Returns the number of classes of all shards."""
        return self.classes if self.shard is None or self.b.num_classes is None else self.b.num_classes


class _Rows(NamedTuple):
    """Stores hidden states (n, D) of all ranks, with their arguments and their indices among all rows, None for all."""

    input: Tensor
    b: BinaryArguments
    at: Optional[Tensor]

    def spread(self, t: Tensor, rows: int) -> Tensor:
        """Returns the values of all rows, with 0 for rows that were left out."""
        return t if self.at is None else t.new_zeros(rows, *t.shape[1:]).index_copy_(0, self.at, t)


def _active(call: _Call) -> _Rows:
    """Returns the active rows. On a GPU, whose number of active rows the host does not know, the others are 0."""
    input, b = call.head.input, call.b
    if call.shard is not None and call.shard.shares_rows:
        input = gather(input, call.shard).wait()
    ignored = ignored_rows(b, input.shape[0])
    if not input.is_cpu or traced():
        return _Rows(torch.where(ignored[:, None], 0.0, input), b, None)
    if not bool(ignored.any()):
        return _Rows(input, b, None)
    at = (~ignored).nonzero()[:, 0]
    return _Rows(input[at], _of_rows(b, at), at)


def _of_rows(b: BinaryArguments, rows: Any) -> BinaryArguments:
    """Returns the arguments of some rows. A jagged target keeps all entries; those of other rows then have no row."""
    def cut(t: Optional[Tensor]) -> Optional[Tensor]:
        return None if t is None else t[rows]

    b = b._replace(row_mask=cut(b.row_mask))
    if b.offsets is None:
        return b._replace(indices=b.indices[rows], values=cut(b.values))
    offsets = torch.stack((b.offsets[:-1], b.offsets[1:]), 1) if b.offsets.dim() == 1 else b.offsets
    return b._replace(offsets=offsets[rows])


def _cut(call: _Call, rows: int) -> Tuple[List[slice], List[Tuple[int, int]]]:
    """Returns the chunks of rows, usually one, and the classes [begin, end) of each block."""
    size = 8 if call.head.input.dtype == torch.float64 else 4
    most = max(1, _LOGITS_BYTES // (size * _LEAST_CLASSES))
    chunks = [slice(begin, min(begin + most, rows)) for begin in range(0, rows, most)]
    step = call.chunks.chunk_rows
    if step is None:
        step = max(1, _LOGITS_BYTES // (size * max(1, min(rows, most))))
        blocks = max(1, -(-call.classes // step))
        step = max(1, -(-call.classes // (16 * blocks)) * 16)  # aligns the rows of the logits
    return chunks, [(begin, min(begin + step, call.classes)) for begin in range(0, call.classes, step)]


def _blocks(call: _Call, spans: Sequence[Tuple[int, int]]) -> Iterator[Tuple[int, Tensor, Optional[Tensor]]]:
    """Yields the first class of each block among the local classes, its weight, and its bias."""
    weight, bias = call.head.linear_weight, call.head.linear_bias
    for begin, end in spans:
        block = weight.block(begin, end) if isinstance(weight, Blocks) else weight[begin:end]
        yield begin, block, None if bias is None else bias[begin:end]


def _of_block(call: _Call, b: BinaryArguments, begin: int) -> BinaryArguments:
    first = begin if call.shard is None else begin + call.shard.first_class
    return b._replace(first_class=first, num_classes=call.total_classes)


def _losses(call: _Call) -> Tensor:
    rows = _active(call)
    chunks, spans = _cut(call, rows.input.shape[0])
    losses = per_row(rows.input).zero_()
    for begin, weight, bias in _blocks(call, spans):
        b = _of_block(call, rows.b, begin)
        for chunk in chunks:
            z = ops.linear_logits(rows.input[chunk], weight, bias, None, call.chunks.float32_logits)
            losses[chunk] += ops.binary_cross_entropy(z, *_of_chunk(b, chunk, len(chunks)))
            del z  # frees the logits before those of the next block are computed
    return add_shards(rows.spread(losses, call.rows), call.shard)


def _of_chunk(b: BinaryArguments, chunk: slice, chunks: int) -> BinaryArguments:
    return b if chunks == 1 else _of_rows(b, chunk)


def _with_gradient(grad: Tensor, call: _Call, grad_mask: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    """Returns the losses, and the gradients for input, weight, bias and ``affine``, for the ``grad`` (N,) of the
    losses."""
    needs_input, needs_weight, needs_bias, needs_affine = grad_mask
    input, weight, bias = call.head
    rows = _active(call)
    of_rows = grad if rows.at is None else grad[rows.at]
    chunks, spans = _cut(call, rows.input.shape[0])
    losses = per_row(rows.input).zero_()
    of_input = losses.new_zeros(rows.input.shape) if needs_input else None
    of_weight = _new_gradient(weight, call.classes, spans, chunks) if needs_weight else None
    of_bias = _new_gradient(bias, call.classes, spans, chunks) if needs_bias and bias is not None else None
    of_affine = losses.new_zeros(2) if needs_affine else None
    low = _Low(of_weight, of_bias, len(chunks) > 1)
    for begin, block, of_classes in _blocks(call, spans):
        b, end = _of_block(call, rows.b, begin), begin + block.shape[0]
        for i, chunk in enumerate(chunks):
            x = rows.input[chunk]
            z = ops.linear_logits(x, block, of_classes, None, call.chunks.float32_logits)
            of_chunk = _of_chunk(b, chunk, len(chunks))
            of_losses, affine = overwrite(of_rows[chunk], z, of_chunk, needs_affine)
            losses[chunk] += of_losses
            if of_affine is not None:
                of_affine += affine.sum(0)
            if of_input is not None:
                add_product(of_input[chunk], z, block, x.dtype, call.chunks.float32_logits)
            if of_weight is not None or of_bias is not None:
                ops.linear_add_gradients_(x, block, of_classes, z, None, *low.of(begin, end), i == 0,
                                          i + 1 == len(chunks))
            del z
    if of_input is not None:
        of_input = _reduced(rows, of_input, call)
    if of_affine is not None:
        of_affine = add_shards(of_affine[None], call.shard)[0]
    return add_shards(rows.spread(losses, call.rows), call.shard), of_input, of_weight, of_bias, of_affine


class _Low:
    """Holds the gradients for weight and bias, and the low bits of a 16-bit block while chunks of rows are added."""

    def __init__(self, of_weight: Optional[Tensor], of_bias: Optional[Tensor], several: bool):
        self.of_weight, self.of_bias, self.several = of_weight, of_bias, several

    def of(self, begin: int, end: int) -> Tuple[Optional[Tensor], ...]:
        of_weight, of_bias = (None if t is None else t[begin:end] for t in (self.of_weight, self.of_bias))
        if self.several and begin != getattr(self, "begin", None):
            self.begin, self.low = begin, [
                None if t is None or t.element_size() > 2 else
                torch.empty(rows, t.numel() // rows, dtype=torch.uint8, device=t.device)
                for t, rows in ((of_weight, end - begin), (of_bias, 1))]
        low = self.low if self.several else (None, None)
        return of_weight, low[0], of_bias, low[1]


def _new_gradient(t: Tensor, classes: int, spans: Sequence[Any], chunks: Sequence[Any]) -> Tensor:
    if spans and chunks and classes == t.shape[0]:
        return torch.empty_like(t, memory_format=torch.contiguous_format)
    return torch.zeros_like(t, memory_format=torch.contiguous_format)


def _reduced(rows: _Rows, of_input: Tensor, call: _Call) -> Tensor:
    """Returns the gradient for the input, of all ranks, in its dtype."""
    of_input = of_input.to(call.head.input.dtype)
    if call.shard is None:
        return rows.spread(of_input, call.rows)
    if call.shard.shares_rows:
        return scatter_sum(rows.spread(of_input, call.rows), call.shard).wait()
    return rows.spread(add_up(of_input, call.shard).wait(), call.rows)


register_composition("linear_binary_cross_entropy", lambda *args, **kwargs: _losses(_Call.of(args, kwargs)))
register_composition("linear_binary_cross_entropy_sum",
                     lambda share, *args, **kwargs: times(share, _losses(_Call.of(args, kwargs))).sum())


@functools.partial(register_composition, "linear_binary_cross_entropy_with_gradient")
def _op_with_gradient(grad: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    args, grad_mask = _split_mask(args, kwargs)
    call = _Call.of(args, kwargs)
    with torch.no_grad():
        losses, *gradients = _with_gradient(grad, call, grad_mask)
    assert losses is not None
    return losses, *(losses.new_empty(0) if g is None else g for g in gradients)


def _split_mask(args: Sequence[Any], kwargs: Dict[str, Any]) -> Tuple[Sequence[Any], List[bool]]:
    """Splits the arguments of a call and the flags that follow, which it removes from ``kwargs``."""
    count = len(BinaryArguments._fields) + 8
    mask = [kwargs.pop(name, True) for name in ("input_grad", "weight_grad", "bias_grad", "affine_grad")]
    mask[:len(args[count:])] = args[count:]
    return args[:count], mask


class _LinearBinaryCrossEntropy(torch.autograd.Function):
    """Computes the losses (N,), or if ``share`` is given the sum of their products with it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor], values: Optional[Tensor],
                affine: Optional[Tensor], call: _Call, share: Optional[Tensor]) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.grad_mask, ctx.cached = (*needs[:3], needs[4]), None
        # A collective may not depend on hooks, which may be active on one rank only.
        later = expected_grad.hooked() if call.shard is None else expected_grad.checkpointed()
        if share is not None and not later:
            losses, *ctx.cached = _evaluate_with_gradient(share, call, ctx.grad_mask)
        else:
            losses = _evaluate(call)
        in_blocks = isinstance(linear_weight, Blocks)
        ctx.save_for_backward(input, None if in_blocks else linear_weight, linear_bias, share, *call.b.tensors)
        ctx.blocks = linear_weight if in_blocks else None
        ctx.numbers, ctx.chunks, ctx.shard = call.b.numbers, call.chunks, call.shard
        return losses if share is None else times(share, losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        input, weight, bias, share, *tensors = ctx.saved_tensors
        b = BinaryArguments.of(tensors, ctx.numbers)
        call = _Call(Head(input, weight if ctx.blocks is None else ctx.blocks, bias), b, ctx.chunks, ctx.shard)
        gradients, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        if ctx.shard is not None:
            refuse_second((grad,))
        again = torch.is_grad_enabled() or batched(grad)
        if ctx.blocks is not None and again:
            fail("create_graph and is_grads_batched must be False if linear_weight is given in blocks, got True; pass "
                 "the weight as a tensor", RuntimeError)
        upstream = grad if share is None else times(share, grad.expand(share.shape))
        of_values = _gradient_of_values(upstream, call) if ctx.needs_input_grad[3] else None
        once = share is not None and not again
        if gradients is None or not once:
            gradients = _evaluate_with_gradient(share if once else upstream, call, ctx.grad_mask)[1:]
        if once:
            gradients = scaled(gradients, grad)
        of_head, of_affine = gradients[:3], gradients[3]
        return *(g if needed else None for g, needed in zip(of_head, ctx.grad_mask)), of_values, (
            of_affine if ctx.grad_mask[3] else None), None, None


def _gradient_of_values(grad: Tensor, call: _Call) -> Tensor:
    """Returns the gradient for the values of the entries, from their logits alone."""
    b, head = call.b, call.head
    assert b.values is not None
    if call.shard is not None or isinstance(head.linear_weight, Blocks):
        fail("target must have values that do not require grad for a head that is sharded or given in blocks, got "
             "values that do", RuntimeError)
    entries = entries_of(b, call.total_classes, arithmetic_dtype(head.input.dtype))
    values = b.values.detach()
    c = Candidates(b.indices, values, b.offsets, b.row_mask, b.ignore_index, b.logprobs)
    chosen = candidate_logits(head, c, False).reshape(entries.columns.shape)
    return gradient_of_values(grad, chosen, entries, b).reshape(values.shape).to(values.dtype)


def _evaluate(call: _Call) -> Tensor:
    losses: Tensor
    if eager() or isinstance(call.head.linear_weight, Blocks):
        with torch.no_grad():
            return _losses(call)
    with below_autograd():
        losses = ops.linear_binary_cross_entropy(*call.arguments())
    return losses


def _evaluate_with_gradient(grad: Tensor, call: _Call, grad_mask: Sequence[bool]) -> Tuple[Any, ...]:
    out: Tuple[Any, ...]
    if eager() and not torch.is_grad_enabled() and not batched(grad) or isinstance(call.head.linear_weight, Blocks):
        with torch.no_grad():
            return _with_gradient(grad, call, grad_mask)
    out = ops.linear_binary_cross_entropy_with_gradient(grad, *call.arguments(), *grad_mask)
    return out


@register_autograd("linear_binary_cross_entropy")
def _op(*args: Any, **kwargs: Any) -> Tensor:
    return _run(_Call.of(args, kwargs), None)


@register_autograd("linear_binary_cross_entropy_sum")
def _op_of_sum(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _run(_Call.of(args, kwargs), share.detach())


def _run(call: _Call, share: Optional[Tensor]) -> Tensor:
    losses: Tensor
    head, b = call.head, call.b
    learned = (*head, b.values, b.affine)
    half = any(t is not None and t.dtype == torch.float16 and t.requires_grad for t in head)
    if call.shard is not None:
        refuse_composite(head.input)
    if composite(head.input):
        if isinstance(head.linear_weight, Blocks):
            fail("linear_weight must be a tensor under torch.func, forward-mode AD, and on devices without kernels, "
                 "got blocks", RuntimeError)
        losses = reference.linear_binary_cross_entropy(*call.arguments())
    elif needs_grad(*learned):
        check_learned(b)
        losses = _LinearBinaryCrossEntropy.apply(*learned, call, None if half else share)
        if not half:
            return losses
    else:
        losses = _evaluate(call)
    return losses if share is None else times(share, losses).sum()


@register_autograd("linear_binary_cross_entropy_with_gradient")
def _(grad: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    if composite(input) or needs_grad(grad, input, *args[:2], *args[2:2 + len(BinaryArguments._fields)]):
        return reference.linear_binary_cross_entropy_with_gradient(grad, input, *args, **kwargs)
    with below_autograd():
        out: Tuple[Tensor, ...] = ops.linear_binary_cross_entropy_with_gradient(grad, input, *args, **kwargs)
    return out


@register_fake("linear_binary_cross_entropy")
def _(*args: Any, **kwargs: Any) -> Tensor:
    call = _Call.of(args, kwargs)
    return per_row(call.head.input).new_empty(call.rows)


@register_fake("linear_binary_cross_entropy_sum")
def _(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return share.new_empty(())


@register_fake("linear_binary_cross_entropy_with_gradient")
def _(grad: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
      **kwargs: Any) -> Tuple[Tensor, ...]:
    (*_, ), grad_mask = _split_mask((input, linear_weight, linear_bias, *args), kwargs)
    of_affine = per_row(input).new_empty(2 if grad_mask[3] else 0)
    return torch.empty_like(grad), *(
        input.new_empty(0) if t is None or not needed else t.new_empty(t.shape)
        for t, needed in zip((input, linear_weight, linear_bias), grad_mask)), of_affine


def _uncompiled(function: _F) -> _F:
    """Wraps a function so that ``torch.compile`` runs it eagerly if the weight is given in blocks."""
    @functools.wraps(function)
    def wrapper(head: Head, *args: Any) -> Any:
        disabled = torch.compiler.is_compiling() and isinstance(head.linear_weight, Blocks)
        return (torch.compiler.disable(function) if disabled else function)(head, *args)

    return wrapper  # type: ignore[return-value]


@_uncompiled
def linear_binary_losses(head: Head, b: BinaryArguments, chunks: Chunks, shard: Optional[Shard],
                         share: Optional[Tensor] = None) -> Tensor:
    """Returns the losses (N,), or if ``share`` (N,) is given the sum, (), of their products with it.

    ``share`` has no gradient. In float16, whose range may not hold gradients for a ``grad_output`` of 1, the gradients
    of a sum are computed in backward, too."""
    call = _Call(head, b, chunks, shard)
    losses: Tensor
    if eager() or isinstance(head.linear_weight, Blocks):
        losses = _run(call, share)
    elif share is None:
        losses = ops.linear_binary_cross_entropy(*call.arguments())
    else:
        losses = ops.linear_binary_cross_entropy_sum(share, *call.arguments())
    return losses
