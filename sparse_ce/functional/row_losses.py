"""Computes any loss that is a sum over rows of a linear head's log-probabilities, with three matrix products."""

import functools
import math
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .. import reference
from .._core.arguments import IGNORE_INDEX, Chunks, Normalizer, Scale, arithmetic_dtype
from .._core.errors import fail
from .._core.flags import check_flags
from .._core.outputs import OPTIONAL
from .._core.tensor_checks import check_reduction, scalar_normalizer
from .._core.tracing import eager, traced
from ..dtensor.dispatch import accepts_dtensors
from ..ops import expected_grad
from ..ops.chunking import of_shards, rows_at_a_time, steps
from ..ops.linear_cross_entropy import Head, scaled
from ..ops.linear_gradients import add_chunk, complete, new_gradients
from ..ops.registration import composite, needs_grad
from ..ops.select import Outputs, Selected
from ..ops.select import select as select_op
from ..ops.sharded_linear_select import Chunk, in_turn, linear_select, local_classes, merged
from ..ops.sharded_select import check_ranks, refuse_second
from ..ops.topk import linear_logits
from ..sharding.collectives import chunks_of
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..sharding.shard import Shard
from ..targets.convert import Target
from ..targets.sparse_target import SparseTarget
from .inputs import of_head, select_arguments
from .log_probs import requested_outputs
from .outputs import Reduction, packed_log_probs
from .row_chunks import Rows, flat, spread, spread_each

RowFunction = Callable[..., Any]


@agreed
@accepts_dtensors
def linear_row_loss(
    fn: RowFunction,
    input: Tensor,
    linear_weight: Tensor,
    target: Target,
    *row_args: Union[Tensor, SparseTarget],
    linear_bias: Optional[Tensor] = None,
    reduction: Reduction = "mean",
    normalizer: Optional[Normalizer] = None,
    has_aux: bool = False,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    padding_value: float = -math.inf,
    return_log_tail: bool = False,
    return_entropy: bool = False,
    return_mean_logit: bool = False,
    return_argmax: bool = False,
    group: Group = None,
    vocab_start: Optional[int] = None,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Any:
    """Computes the mean or sum of ``fn(log_probs, target, *row_args)`` over rows without materializing the logits.

    ``fn`` is plain PyTorch on tensors of the size of the ids, such as a policy gradient with any clipping, or any
    distillation loss. It is called for one chunk of rows at a time, and differentiated immediately. Its gradient is
    propagated into the head while the logits of the chunk exist, so that three matrix products suffice. If a loss
    couples rows (of a sequence, of a pair), use :func:`linear_selected_log_probs`, which takes four.

    Some calls need more products:

    - four with ``reduction="none"``, under ``torch.compile`` and ``torch.func``, for a ``logit_scale`` that requires
      grad, and in float16. The logits are computed twice, and ``fn`` is called once with all rows.
    - four or five under checkpointing, or six with a ``group``
    - seven for a gradient that is differentiated again

    Args:
        fn: a function ``fn(log_probs, target, *row_args) -> (rows,)``, or with ``has_aux``
            ``-> ((rows,), {name: (rows,)})``. ``log_probs`` is a :class:`LogProbs`. ``target`` and ``row_args`` are cut
            to the same rows, with one leading dimension. They are copies, so ``fn`` may write into them.

            - ``fn`` receives any number of active rows. On CUDA it also receives ignored rows, whose outputs, row
              arguments and values are 0; their losses are not used.
            - The loss of a row must depend on that row alone.
            - Pass tensors that require grad as ``row_args``. Capturing them in the closure of ``fn`` raises an error if
              the gradients are computed in forward. With ``reduction="none"`` captured tensors get their gradient.
        input, linear_weight, linear_bias: see :func:`sparse_ce.linear_cross_entropy`.
        target: see ``indices`` of :func:`sparse_ce.selected_log_probs`. Its values may require grad.
        row_args: tensors ``(*input.shape[:-1], ...)``, or targets of shape ``input.shape[:-1]``. The tensors, and the
            values of the targets, may require grad.
        reduction: ``"none"`` (shape ``input.shape[:-1]``), ``"sum"`` or ``"mean"``. The mean divides by the number of
            active rows, and is 0 if there are none.
        normalizer: see :func:`sparse_ce.cross_entropy`.
        has_aux: if True, ``fn`` also returns a dict of tensors (rows,), with the same names and dtypes in each call.
            They are returned detached, in shape ``input.shape[:-1]``, with 0 in ignored rows.
        ignore_index, logit_scale, softcap, num_classes, padding_value: see :func:`sparse_ce.selected_log_probs`.
        return_log_tail, return_entropy, return_mean_logit, return_argmax: see :func:`sparse_ce.selected_log_probs`.
        group, vocab_start: see :func:`sparse_ce.linear_cross_entropy`. ``fn`` and ``row_args`` must also be the same on
            every rank. The gradients for ``row_args`` are then the same, too.
        logits_dtype: see :func:`sparse_ce.linear_cross_entropy`.
        chunk_rows: maximum number of rows whose logits exist at a time, see :func:`sparse_ce.linear_topk_log_probs`;
            with a ``group`` see :func:`sparse_ce.linear_cross_entropy`.

    Returns:
        The loss, float32 (float64 for float64): of shape (), or ``input.shape[:-1]`` with ``reduction="none"``. With
        ``has_aux``, ``(loss, aux)``.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_selected_log_probs`. Also if ``fn`` returns a
            shape other than (rows,), or if it captures a tensor that requires grad unless ``reduction="none"``.

    Examples:
        >>> hidden, head = torch.randn(6, 8, requires_grad=True), torch.nn.Linear(8, 50)
        >>> actions, advantages = torch.randint(50, (6,)), torch.randn(6)
        >>> def policy_gradient(log_probs, actions, advantages):
        ...     return -advantages * log_probs.log_probs - 0.01 * log_probs.entropy
        >>> loss = sparse_ce.linear_row_loss(policy_gradient, hidden, head.weight, actions, advantages,
        ...                                  linear_bias=head.bias, return_entropy=True)
        >>> loss.backward()
    """
    check_function(fn)
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    check_reduction(reduction, normalizer)
    check_flags(has_aux=has_aux)
    a, ids = select_arguments(source, target, ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap)
    outputs = requested_outputs(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax)
    divisor = None if normalizer is None else scalar_normalizer(normalizer, input)
    assert source.head is not None
    head, chunks, shard, leading = source.head, source.chunks, source.shard, source.leading
    count = math.prod(leading)
    counts = ~reference.ignored_rows(a, count)
    rows = Rows(head.input, ids.flatten(), list(map(functools.partial(flat, leading), row_args)), a,
                not isinstance(target, SparseTarget))
    shares_rows = shard is not None and shard.shares_rows
    # A mode or a hook may be active on a single rank. With a shard it must not affect what all ranks do together.
    seen = eager() if shard is None else not traced()
    if seen and input.is_cpu and not composite(input) and not shares_rows and not bool(counts.all()):
        indices = counts.nonzero()[:, 0]
        rows, active = rows.at(indices, rows.input[indices]), None
    else:
        active = counts
    if reduction == "sum":
        divisor = counts.new_ones((), dtype=arithmetic_dtype(input.dtype))
    elif divisor is None:
        divisor = counts.sum(dtype=arithmetic_dtype(input.dtype))
    if shard is None:
        chunks = chunks._replace(chunk_rows=chunk_rows or rows_at_a_time(source.shape[-1]))
    divisor = torch.where(divisor == 0, torch.inf, divisor)
    call = _Call(fn, outputs, has_aux, active, divisor, chunks, shard, [])
    head = head._replace(input=rows.input)
    tensors = rows.tensors
    half = any(t is not None and t.dtype == torch.float16 and t.requires_grad for t in (*head, *tensors))
    plain = (seen and reduction != "none" and needs_grad(*head, *tensors) and not composite(input) and not half
             and not a.learns_scale)
    if plain:
        if shard is not None:
            check_ranks(head.input, head.linear_weight.shape[0], rows.arguments, shard, outputs, dtype=head.input.dtype,
                        chunk_rows=chunk_rows)
        loss, *aux_values = _LinearRowLoss.apply(*head, rows, call, *tensors)
        aux = dict(zip(call.names, aux_values))
    else:
        losses, aux = _four_products(head, rows, call)
        loss = losses if reduction == "none" else losses.sum() / call.divisor
    if reduction == "none":
        loss = spread(loss, counts, active, leading)
    return (loss, spread_each(aux, counts, active, leading)) if has_aux else loss


class _Call(NamedTuple):
    fn: RowFunction
    outputs: Outputs
    has_aux: bool
    active: Optional[Tensor]  # (rows,) bool, or None if all rows are active
    divisor: Tensor
    chunks: Chunks
    shard: Optional[Shard]
    names: List[str]  # the names in aux, once fn has been called


def _losses(out: Selected, rows: Rows, call: _Call, active: Optional[Tensor]) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns the losses (rows,) that ``fn`` computes, 0 in ignored rows, and its auxiliary outputs."""
    out = Selected(*(t.clone() for t in out))  # fn may write into its arguments
    rows = rows.copied(active)
    log_probs = packed_log_probs(out, call.outputs, out.log_probs.shape, out.lse.shape)
    losses: Any = call.fn(log_probs, rows.fn_target(), *rows.row_args)
    returned: Dict[str, Tensor] = {}
    if call.has_aux:
        if not isinstance(losses, tuple) or len(losses) != 2 or not isinstance(losses[1], dict):
            got = [type(t).__name__ for t in (losses if isinstance(losses, tuple) else [losses])]
            fail("fn must return (losses, aux), with aux a dict of tensors, if has_aux is True, got "
                 f"{', '.join(got)}", TypeError)
        losses, returned = losses
    count = out.lse.shape[0]
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        fail(f"fn must return losses of shape [{count}], one per row, got {_returned(losses, call.outputs)}")
    for name, t in returned.items():
        if not isinstance(t, Tensor) or t.shape != (count,):
            fail(f"fn must return aux tensors of shape [{count}], got {_returned(t, call.outputs)} for {name!r}")
    aux = {name: t.detach() for name, t in returned.items()}
    if active is not None:
        losses = torch.where(active, losses, 0.0)
        aux = {name: torch.where(active, t, torch.zeros((), dtype=t.dtype, device=t.device)) for name, t in aux.items()}
    return losses.to(out.lse.dtype), aux


def _returned(t: object, outputs: Outputs) -> str:
    """Describes a value that ``fn`` returned, for an error. If it may be an output that was not requested, names its
    option."""
    if isinstance(t, Tensor):
        return str(list(t.shape))
    flags = [f"return_{name}=True" for name in OPTIONAL
             if t is None and not getattr(outputs, name)]
    return f"{type(t).__name__} (an output is None without {' or '.join(flags)})" if flags else type(t).__name__


def _four_products(head: Head, rows: Rows, call: _Call) -> Tuple[Tensor, Dict[str, Tensor]]:
    out = linear_select(head, rows.arguments, call.outputs, call.chunks, call.shard)
    return _losses(out, rows, call, call.active)


class _LinearRowLoss(torch.autograd.Function):
    """Computes the loss and aux, with the gradients for the head and for the ``tensors`` of the rows."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], rows: Rows,
                call: _Call, *tensors: Tensor) -> Tuple[Tensor, ...]:
        ctx.grad_mask = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[5:])
        # Hooks on saved tensors free memory until backward, so the gradients are computed there.
        later = call.shard is None and expected_grad.hooked()
        loss, aux, gradients = _three_products(Head(input, linear_weight, linear_bias), rows, call,
                                               [needed and not later for needed in ctx.grad_mask])
        ctx.save_for_backward(input, linear_weight, linear_bias, *tensors)
        ctx.rows, ctx.call, ctx.cached = rows._replace(input=input.new_empty(0)), call, None if later else gradients
        ctx.mark_non_differentiable(*aux.values())
        call.names[:] = aux
        return loss, *aux.values()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Tuple[Optional[Tensor], ...]:
        input, linear_weight, linear_bias, *tensors = ctx.saved_tensors
        head = Head(input, linear_weight, linear_bias)
        gradients, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        rows = ctx.rows._replace(input=input).holding(tensors)
        if ctx.call.shard is not None:
            refuse_second((grad,))
        elif torch.is_grad_enabled():
            losses = _four_products(head, rows, ctx.call)[0]
            leaves = [t for t, needed in zip((*head, *tensors), ctx.grad_mask) if needed]
            found = iter(torch.autograd.grad(losses.sum() / ctx.call.divisor, leaves, grad, create_graph=True,
                                             allow_unused=True))
            grads = [next(found) if needed else None for needed in ctx.grad_mask]
            return *grads[:3], None, None, *grads[3:]
        if gradients is None:
            gradients = _three_products(head, rows, ctx.call, ctx.grad_mask)[2]
        grads = scaled(gradients, grad)
        return *grads[:3], None, None, *grads[3:]


def _three_products(head: Head, rows: Rows, call: _Call,
                    grad_mask: Sequence[bool]) -> Tuple[Tensor, Dict[str, Tensor], List[Optional[Tensor]]]:
    """Returns the loss (), aux, and the gradients for input, weight, bias and each of the rows' ``tensors``, for a
    ``grad_output`` of 1."""
    count = rows.input.shape[0] if call.shard is None else call.shard.rows(rows.input)
    classes = rows.a.num_classes if call.shard is None else local_classes(head.linear_weight, rows.a, call.shard)
    chunks = _chunks(head, rows, call)
    gradients = new_gradients(head, classes, grad_mask[:3], len(chunks) <= 1, call.shard)
    of_args = [torch.zeros_like(t) if needed else None for t, needed in zip(rows.tensors, grad_mask[3:])]
    numbered = rows.numbered() if any(grad_mask[3:]) else None
    total = torch.zeros((), dtype=call.divisor.dtype, device=head.input.device)
    aux: Optional[Dict[str, Tensor]] = None
    for (position, (at, chunk), of_chunk, a), z, out in _selected(head, rows, call, chunks):
        active = None if call.active is None else call.active[at]
        with torch.enable_grad(), _unhooked():
            leaves = Selected(*(t.detach().requires_grad_(t.is_floating_point()) for t in out))
            args = [t.detach().requires_grad_(needed) for t, needed in zip(chunk.tensors, grad_mask[3:])]
            losses, returned = _losses(leaves, chunk.holding(args), call, active)
            tensors = [t for t in args if t.requires_grad]
            _check_closure(losses, (*leaves, *tensors))
        total += losses.detach().sum()
        if aux is None:
            aux = {name: t.new_empty(count) for name, t in returned.items()}
        else:
            _check_alike(returned, aux)
        for name, t in returned.items():
            aux[name][at] = t
        found = _gradients(losses, [*leaves[:-1], *tensors], 1 / call.divisor)
        add_chunk(gradients, of_chunk, position, z, a, call.outputs, out, found[:len(leaves) - 1])
        del z  # frees the logits before those of the next chunk are computed
        of_tensors = iter(found[len(leaves) - 1:])
        places = [] if numbered is None else numbered.at(at, chunk.input).tensors
        for gradient, place in zip(of_args, places):
            part = None if gradient is None else next(of_tensors)
            if gradient is not None and part is not None:
                gradient.index_add_(0, place, part)  # a jagged chunk keeps entries of other rows; theirs is 0
    if call.has_aux and count == 0:  # fn is called for the names in aux
        with torch.no_grad():
            aux = _four_products(head, rows, call)[1]
    return total / call.divisor, aux or {}, [*complete(gradients), *of_args]


def _chunks(head: Head, rows: Rows, call: _Call) -> List[slice]:
    count, chunk_rows = rows.input.shape[0], call.chunks.chunk_rows
    if call.shard is not None:
        return of_shards(chunk_rows, count, rows.a, call.shard, head.input.is_cpu)
    assert chunk_rows is not None
    return steps(count, chunk_rows)


def _selected(head: Head, rows: Rows, call: _Call,
              chunks: Sequence[slice]) -> Iterator[Tuple[Chunk, Tensor, Selected]]:
    """Yields each chunk, its logits, and the outputs of ``select`` for them."""
    def each() -> Iterator[Chunk]:
        for position, at, input in chunks_of(rows.input, chunks, call.shard):
            if call.active is not None:
                input = torch.where(call.active[at][:, None], input, 0.0)
            chunk = rows.at(at, input)
            yield Chunk(position, (at, chunk), head._replace(input=input), chunk.arguments)

    if call.shard is not None:
        for chunk, z, gathered in in_turn(each(), call.outputs, call.chunks.float32_logits, call.shard):
            yield chunk, z, merged(gathered, chunk.a, call.outputs, call.shard)
            del z
        return
    for chunk in each():
        z = linear_logits(chunk.head, chunk.a.num_classes, call.chunks.float32_logits)
        chunk = chunk._replace(a=chunk.a._replace(num_classes=None))
        yield chunk, z, select_op(z, chunk.a, call.outputs)
        del z


def check_function(fn: Any) -> None:
    if not callable(fn):
        fail(f"fn must be a function of log-probabilities and target, got {fn!r}", TypeError)


def _unhooked() -> ContextManager[Any]:
    """Returns a context without hooks on saved tensors. The hooks of checkpointing would run forward again for a
    gradient that is computed in forward."""
    return saved_tensors_hooks(_same, _same) if expected_grad.hooked() else nullcontext()


def _same(t: Tensor) -> Tensor:
    return t


def _gradients(losses: Tensor, leaves: Sequence[Tensor], upstream: Tensor) -> List[Optional[Tensor]]:
    if not losses.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(losses, leaves, upstream.expand(losses.shape), allow_unused=True))


def _check_alike(returned: Dict[str, Tensor], before: Dict[str, Tensor]) -> None:
    got, expected = ({name: str(t.dtype) for name, t in aux.items()} for aux in (returned, before))
    if got != expected:
        fail(f"fn must return aux with the same names and dtypes in each call, got {got} after {expected}; "
             "return a value for each row, 0 if there is none")


def _check_closure(losses: Tensor, leaves: Sequence[Tensor]) -> None:
    """Checks that the losses depend on no tensor that requires grad besides ``leaves``. Its gradient would be lost."""
    known, seen, nodes = {id(t) for t in leaves}, set(), [losses.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            fail("fn must receive tensors that require grad as row arguments, got one of shape "
                 f"{list(variable.shape)} in its closure; detach it, or use linear_selected_log_probs")
        nodes += [next_node for next_node, _ in node.next_functions]
