"""Implements autograd of :func:`sparse_ce.linear_row_loss`: calls ``fn``, and computes the gradients in forward."""

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._core.arguments import Chunks, Head
from .._core.errors import fail
from .._core.outputs import Outputs, Selected
from .._core.sizes import same_shape
from .._core.weight_blocks import Blocks
from ..ops import expected_grad
from ..ops.head.blocks import refuse_several
from ..ops.head.comparison import Comparison
from ..ops.head.passes import in_turn, merged
from ..ops.head.rows import Chunk, HeadRows
from ..ops.head.select import linear_select
from ..ops.head.teacher import RowTeacher, select_and_compare
from ..ops.logits.autograd import refuse_second, scaled
from ..ops.logits.select import overwrite
from ..ops.logits.select import select as select_op
from ..sharding.shard import ALL_CLASSES, Shard
from .outputs import packed_log_probs
from .row_chunks import RowArguments

RowFunction = Callable[..., Any]


class Call(NamedTuple):
    fn: RowFunction
    outputs: Outputs
    has_aux: bool
    active: Optional[Tensor]  # (rows,) bool, or None if all rows are active
    divisor: Tensor
    chunks: Chunks
    shard: Optional[Shard]
    teacher: Optional[RowTeacher]
    names: List[str]  # the names in aux, once fn has been called


def _losses(out: Selected, divergences: Dict[str, Tensor], rows: RowArguments, call: Call,
            active: Optional[Tensor]) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns the losses (rows,) that ``fn`` computes, 0 in ignored rows, and its auxiliary outputs."""
    out = Selected(*(t.clone() for t in out))  # fn may write into its arguments
    rows = rows.copied(active)
    log_probs = packed_log_probs(out, call.outputs, out.log_probs.shape, out.lse.shape,
                                 {name: t.clone() for name, t in divergences.items()})
    losses: Any = call.fn(log_probs, rows.fn_target(), *rows.row_args)
    returned: Dict[str, Tensor] = {}
    if call.has_aux:
        if not isinstance(losses, tuple) or len(losses) != 2 or not isinstance(losses[1], dict):
            got = [type(t).__name__ for t in (losses if isinstance(losses, tuple) else [losses])]
            fail("fn must return (losses, aux), with aux a dict of tensors, if has_aux is True, got "
                 f"{', '.join(got)}", TypeError)
        losses, returned = losses
    count = out.lse.shape[0]
    if not isinstance(losses, Tensor) or not same_shape(losses.shape, (count,)):
        fail(f"fn must return losses of shape [{count}], one per row, got "
             f"{_returned(losses)}{_fix_of(losses, rows, call)}")
    for name, t in returned.items():
        if not isinstance(t, Tensor) or not same_shape(t.shape, (count,)):
            fail(f"fn must return aux tensors of shape [{count}], got "
                 f"{_returned(t)} for {name!r}")
    aux = {name: t.detach() for name, t in returned.items()}
    if active is not None:
        losses = torch.where(active, losses, 0.0)
        aux = {name: torch.where(active, t, torch.zeros((), dtype=t.dtype, device=t.device)) for name, t in aux.items()}
    return losses.to(out.lse.dtype), aux


def _fix_of(losses: object, rows: RowArguments, call: Call) -> str:
    """Returns the end of an error message about the losses that ``fn`` returned."""
    if not call.has_aux and isinstance(losses, tuple) and len(losses) == 2 and isinstance(losses[1], dict):
        return "; pass has_aux=True to return (losses, aux)"
    for t in rows.row_args:
        if isinstance(losses, Tensor) and isinstance(t, Tensor) and t.shape[1:] == (1,):
            return "; pass row_args of shape (N, 1), which broadcast against (N,), as (N,)"
    return ""


def _returned(t: object) -> str:
    """Describes a value that ``fn`` returned, for an error."""
    return str(list(t.shape)) if isinstance(t, Tensor) else type(t).__name__


def losses_of_rows(head: Head, rows: RowArguments, call: Call) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns the losses (rows,) and aux. Their backward computes the logits again."""
    divergences: Dict[str, Tensor] = {}
    if call.teacher is None:
        out = linear_select(head, rows.arguments, call.outputs, call.chunks, call.shard)
    else:
        out, divergences = select_and_compare(head, rows.arguments, call.outputs, call.teacher, call.chunks, call.shard)
    return _losses(out, divergences, rows, call, call.active)


class LinearRowLoss(torch.autograd.Function):
    """Computes the loss and aux, with the gradients for the head and for the ``tensors`` of the rows."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor], rows: RowArguments,
                call: Call, *tensors: Tensor) -> Tuple[Tensor, ...]:
        ctx.grad_mask = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[5:])
        # Hooks on saved tensors free memory until backward, so the gradients are computed there.
        later = call.shard is None and expected_grad.hooked()
        loss, aux, gradients = _three_products(Head(input, linear_weight, linear_bias), rows, call,
                                               [needed and not later for needed in ctx.grad_mask])
        ctx.call, of_teacher = call, call.teacher.tensors if call.teacher else ()
        if call.teacher:
            ctx.call = call._replace(teacher=call.teacher.holding([None] * len(of_teacher)))
        ctx.blocks = linear_weight if isinstance(linear_weight, Blocks) else None
        target = rows.target
        read = target.indices, target.offsets, target.row_mask, rows.a.row_scale  # an error if they change in place
        ctx.save_for_backward(input, None if ctx.blocks else linear_weight, linear_bias, *of_teacher, *tensors, *read)
        ctx.rows, ctx.cached = rows._replace(input=input.new_empty(0)), None if later else gradients
        ctx.mark_non_differentiable(*aux.values())
        call.names[:] = aux
        return loss, *aux.values()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Tuple[Optional[Tensor], ...]:
        input, linear_weight, linear_bias, *others = ctx.saved_tensors
        rows, call, head = ctx.rows, ctx.call, Head(input, ctx.blocks or linear_weight, linear_bias)
        if torch.is_grad_enabled() and not ctx.blocks:  # for partial derivatives, if one depends on another
            head = Head(*(None if t is None else t.view_as(t) for t in head))  # type: ignore[arg-type]
        if call.teacher:
            call = call._replace(teacher=call.teacher.holding(others))
            others = others[len(call.teacher.tensors):]
        tensors = others[:len(rows.tensors)]
        rows = rows._replace(input=head.input).holding(tensors)
        gradients, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        if call.shard is not None:
            refuse_second((grad,))
        if ctx.blocks:
            refuse_several(grad)
        elif call.shard is None and torch.is_grad_enabled():
            losses = losses_of_rows(head, rows, call)[0]
            leaves = [t for t, needed in zip((*head, *tensors), ctx.grad_mask) if needed]
            found = iter(torch.autograd.grad(losses.sum() / call.divisor, leaves, grad, create_graph=True,
                                             allow_unused=True))
            grads = [next(found) if needed else None for needed in ctx.grad_mask]
            return *grads[:3], None, None, *grads[3:]
        if gradients is None:
            gradients = _three_products(head, rows, call, ctx.grad_mask)[2]
        grads = scaled(gradients, grad)
        return *grads[:3], None, None, *grads[3:]


def _three_products(head: Head, rows: RowArguments, call: Call,
                    grad_mask: Sequence[bool]) -> Tuple[Tensor, Dict[str, Tensor], List[Optional[Tensor]]]:
    """Returns the loss (), aux, and the gradients for input, weight, bias and each of the rows' ``tensors``, for a
    ``grad_output`` of 1."""
    of_head = HeadRows(head, rows.arguments, call.chunks, call.shard or ALL_CLASSES, grad_mask[:3],
                       buffers=1 if call.shard is None else 2)
    teacher = call.teacher
    compared = None if teacher is None else Comparison(of_head, teacher.d, teacher.head, call.chunks)
    first_class = None if call.shard is None else call.shard.first_class
    of_args = [torch.zeros_like(t) if needed else None for t, needed in zip(rows.tensors, grad_mask[3:])]
    numbered = rows.numbered() if any(grad_mask[3:]) else None
    total = torch.zeros((), dtype=call.divisor.dtype, device=head.input.device)
    aux: Optional[Dict[str, Tensor]] = None
    for chunk, z, out in _selected(of_head, rows, call):
        at, of_fn = chunk.of
        active = None if call.active is None else call.active[at]
        if compared is not None:
            compared.evaluate(at, z)
        with torch.enable_grad(), _unhooked():
            leaves = Selected(*(t.detach().requires_grad_(t.is_floating_point()) for t in out))
            args = [t.detach().requires_grad_(needed) for t, needed in zip(of_fn.tensors, grad_mask[3:])]
            divergences = {} if teacher is None or compared is None else {
                name: t.detach().requires_grad_() for name, t in teacher.named(compared.sums[:, at].unbind()).items()}
            losses, returned = _losses(leaves, divergences, of_fn.holding(args), call, active)
            tensors = [*divergences.values(), *(t for t in args if t.requires_grad)]
            _check_closure(losses, (*leaves, *tensors))
        total += losses.detach().sum()
        if aux is None:
            aux = {name: t.new_empty(of_head.all) for name, t in returned.items()}
        else:
            _check_alike(returned, aux)
        for name, t in returned.items():
            aux[name][at] = t
        of_tensors = iter(_gradients(losses, [t for t in (*leaves, *tensors) if t.requires_grad], 1 / call.divisor))
        of_outputs = [next(of_tensors) if t.requires_grad else None for t in leaves]
        of_divergences = {name: g for name, g in zip(divergences, of_tensors) if g is not None}
        beside = None
        if teacher is not None and compared is not None and of_divergences and any(grad_mask[:3]):
            grad = teacher.grad_sums(of_divergences, out.lse)
            beside = compared.gradient(grad, at, z, alone=all(g is None for g in of_outputs))
        if any(grad_mask[:3]):
            z, _ = overwrite(z, chunk.a, call.outputs, out, of_outputs, first_class=first_class, beside=beside)
            of_head.products.add(chunk.head.input, chunk.rows, z)
        del z, beside
        places = [] if numbered is None else numbered.at(at, of_fn.input).tensors
        for gradient, place in zip(of_args, places):
            part = None if gradient is None else next(of_tensors)
            if gradient is not None and part is not None:
                gradient.index_add_(0, place, part)  # a jagged chunk keeps entries of other rows; theirs is 0
    if call.has_aux and of_head.all == 0:  # fn is called for the names in aux
        with torch.no_grad():
            aux = losses_of_rows(head, rows, call)[1]
    return total / call.divisor, aux or {}, [*of_head.products.gradients(), *of_args]


def _selected(of_head: HeadRows, rows: RowArguments, call: Call) -> Iterator[Tuple[Chunk, Tensor, Selected]]:
    """Yields each chunk, its logits, and the outputs of ``select``. A chunk's ``of`` is its rows and the arguments of
    ``fn``."""
    def each() -> Iterator[Chunk]:
        for chunk in of_head:
            of_fn = rows.at(chunk.of, chunk.head.input)
            yield chunk._replace(of=(chunk.of, of_fn), a=of_fn.arguments)

    if call.shard is not None:
        for chunk, z, gathered in in_turn(each(), of_head.products, call.outputs, call.shard):
            yield chunk, z, merged(gathered, chunk.a, call.outputs, call.shard)
            del z
        return
    for chunk in each():
        z = of_head.products.logits(chunk.head.input)
        yield chunk, z, select_op(z, chunk.a, call.outputs)
        del z


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
