"""The specification: every op of ``sparse_ce`` in plain PyTorch.

Slow (it holds the N x V log-probabilities and, for second derivatives, the dense target), and differentiable any number
of times in any mode. The kernels must agree with it; under ``torch.func`` transforms, forward-mode AD and double
backward it is what runs. Arguments and shapes are those of ``torch.ops.sparse_ce`` (``csrc/schema.cpp``), ``arguments``
those of :class:`sparse_ce.arguments.Arguments`; the formulas are derived in ``csrc/math.h``.
"""

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import Arguments, Candidates, arithmetic_dtype, split, split_candidates
from .guarded import normalize, softcapped, times


class Entries(NamedTuple):
    """The entries of a target, in the shape of ``indices``: (N, K), or (E,) with the row that each belongs to."""

    rows: Optional[Tensor]  # (E,) int64 where there are offsets, else None: entry (r, k) belongs to row r
    columns: Tensor  # int64, 0 where there is nothing to read
    values: Tensor  # arithmetic dtype; 0 for padding, NaN for an index out of range
    invalid_rows: Optional[Tensor]  # (N,) bool: offsets that lead outside the entries

    def gather(self, dense: Tensor) -> Tensor:
        """The elements of ``dense`` (N, V) at the entries."""
        return dense.gather(1, self.columns) if self.rows is None else dense[self.rows, self.columns]

    def sum(self, terms: Tensor, num_rows: int) -> Tensor:
        """(N,): ``terms``, one for each entry, summed by row; NaN for an invalid row."""
        if self.rows is None:
            return terms.sum(1)
        total = terms.new_zeros(num_rows).index_add(0, self.rows, terms)
        assert self.invalid_rows is not None
        return torch.where(self.invalid_rows, float("nan"), total)

    def to_dense(self, terms: Tensor, num_rows: int, num_classes: int) -> Tensor:
        """(N, V) with ``terms`` added up at the entries."""
        if self.rows is None:
            return terms.new_zeros(num_rows, num_classes).scatter_add(1, self.columns, terms)
        flat = terms.new_zeros(num_rows * num_classes)
        return flat.index_add(0, self.rows * num_classes + self.columns, terms).view(num_rows, num_classes)


def ignored_rows(a: Arguments, num_rows: int) -> Tensor:
    """(N,) bool: the label, or every index of a top-k row, is ``ignore_index``, or ``row_mask`` is False."""
    if a.offsets is not None:
        ignored = torch.zeros(num_rows, dtype=torch.bool, device=a.indices.device)
    elif a.indices.dim() == 1:
        ignored = a.indices == a.ignore_index
    elif a.indices.shape[1]:
        ignored = (a.indices == a.ignore_index).all(1)
    else:
        ignored = torch.zeros_like(a.indices[:, :0].any(1))
    return ignored if a.row_mask is None else ignored | ~a.row_mask


def loss_mean(loss: Tensor, normalizer: Optional[Tensor], *arguments: Any) -> Tuple[Tensor, Tensor]:
    """The mean of ``loss`` (N,) over the rows that count, (), and the divisor, (): inf over nothing, for a mean of 0.

    ``normalizer``, (), divides instead of the count. ``arguments``: the target's, up to ``ignore_index``.
    """
    divisor = _count(loss, Arguments(*arguments)) if normalizer is None else normalizer
    empty = divisor == 0
    divisor = torch.where(empty, torch.inf, divisor)
    return torch.where(empty, 0.0, loss.sum() / divisor), divisor


def _count(loss: Tensor, a: Arguments) -> Tensor:
    counts = ~ignored_rows(a, loss.shape[0])
    if a.weight is not None and a.labels:
        labels = torch.where(counts, a.indices, 0).clamp(0, a.weight.shape[0] - 1).long()
        counts = torch.where(counts, a.weight[labels], 0.0)
    return counts.sum(dtype=loss.dtype)


def entries_of(a: Arguments, num_classes: int, dtype: torch.dtype) -> Entries:
    rows, invalid_rows, indices, values = None, None, a.indices, a.values
    if a.offsets is None and indices.dim() == 1:
        indices = indices[:, None]
        values = None if values is None else values[:, None]
    columns = indices.long()
    logprobs = a.logprobs and values is not None
    values = torch.ones_like(columns, dtype=dtype) if values is None else values.to(dtype)
    padding = (values == (-torch.inf if logprobs else 0)) | (columns == a.ignore_index)
    if a.offsets is not None:
        begin, end = (a.offsets[:-1], a.offsets[1:]) if a.offsets.dim() == 1 else a.offsets.unbind(1)
        if begin.shape[0] == 0:  # no rows: no entry belongs to one
            return Entries(columns[:0], columns[:0], values[:0], begin.bool())
        count = columns.shape[0]
        invalid_rows = (begin < 0) | (begin > end) | (end > count)
        end = torch.where(invalid_rows, begin, end)
        begin = torch.where(end > begin, begin, count)  # an empty row must not hide the one that shares its begin
        begin, order = torch.sort(begin)
        position = torch.arange(count, device=columns.device)
        rows = order[(torch.searchsorted(begin.contiguous(), position, right=True) - 1).clamp(min=0)]
        padding = padding | (position >= end[rows]) | (position < begin[0])
    outside = ~padding & ((columns < 0) | (columns >= num_classes))
    columns = torch.where(padding | outside, 0, columns)
    if logprobs:  # where before exp: NaN in a padding entry must not touch the gradient
        values = torch.where(padding, -torch.inf, values).exp()
    values = torch.where(padding, 0.0, torch.where(outside, float("nan"), values))
    return Entries(rows, columns, values, invalid_rows)


def transform(logits: Tensor, logit_scale: float, softcap: Optional[float]) -> Tensor:
    z = logits if logit_scale == 1.0 else logits * logit_scale
    return z if softcap is None else softcapped(z, softcap)


class Row(NamedTuple):
    """What forward and backward share: everything per row and per entry, before any gradient."""

    ignored: Tensor  # (N,) bool
    z: Tensor  # (N, num_classes) transformed logits, 0 in ignored rows
    lse: Tensor  # (N,)
    log_probs: Tensor  # (N, num_classes)
    entries: Entries
    entry_weights: Tensor  # shape of entries.values: w~
    class_weights: Tensor  # (num_classes,)


def _row(logits: Tensor, a: Arguments) -> Row:
    dtype = arithmetic_dtype(logits.dtype)
    num_classes = logits.shape[1] if a.num_classes is None else a.num_classes
    ignored = ignored_rows(a, logits.shape[0])
    # where, not a product: NaN and inf in an ignored row must touch neither the loss nor the gradient.
    z = transform(torch.where(ignored[:, None], 0.0, logits[:, :num_classes].to(dtype)), a.logit_scale, a.softcap)
    lse, log_probs = normalize(z)
    entries = entries_of(a, num_classes, dtype)
    class_weights = z.new_ones(num_classes) if a.weight is None else a.weight.to(dtype)
    return Row(ignored, z, lse, log_probs, entries, entries.values * class_weights[entries.columns], class_weights)


def forward(logits: Tensor, *arguments: Any, **named: Any) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.forward``: (loss (N,), lse (N,)) in the arithmetic dtype."""
    a = Arguments(*arguments, **named)
    row = _row(logits, a)
    w = row.entry_weights
    # A weight of 0 at a logit of -inf adds 0, not 0 * inf.
    terms = -times(w, torch.where(w == 0, 0.0, row.entries.gather(row.log_probs)))
    loss = (1 - a.label_smoothing) * row.entries.sum(terms, logits.shape[0])
    if a.label_smoothing:
        o = row.class_weights
        smoothed = torch.where(o == 0, 0.0, -o * row.log_probs).sum(1)
        loss = loss + a.label_smoothing / row.z.shape[1] * smoothed
    if a.z_loss:
        loss = loss + a.z_loss * times(row.lse, row.lse)
    return torch.where(row.ignored, 0.0, loss), torch.where(row.ignored, 0.0, row.lse)


def backward(grad_loss: Tensor, grad_lse: Optional[Tensor], logits: Tensor, lse: Tensor,
             lse_residual: Optional[Tensor], *arguments: Any, **named: Any) -> Tensor:
    """``torch.ops.sparse_ce.backward``: grad_logits (N, V). Recomputes ``lse``, so that it too is differentiated."""
    a = Arguments(*arguments, **named)
    row = _row(logits, a)
    num_rows, vocab = logits.shape
    share = a.label_smoothing / row.z.shape[1]
    mass = row.entries.sum(row.entry_weights, num_rows)
    per_q = (1 - a.label_smoothing) * mass + share * row.class_weights.sum() + 2 * a.z_loss * row.lse
    of_q = times(grad_loss, per_q)
    if grad_lse is not None:
        of_q = of_q + grad_lse
    target = row.entries.to_dense(row.entry_weights, num_rows, row.z.shape[1])
    grad = times(of_q[:, None], row.log_probs.exp()) - times(
        grad_loss[:, None], share * row.class_weights + (1 - a.label_smoothing) * target)
    slope = a.logit_scale * (torch.ones_like(row.z) if a.softcap is None else 1 - (row.z / a.softcap).square())
    grad = torch.where(row.ignored[:, None], 0.0, times(grad, slope))
    return F.pad(grad, (0, vocab - row.z.shape[1])).to(logits.dtype)


def backward_values(grad_loss: Tensor, logits: Tensor, lse: Tensor, lse_residual: Optional[Tensor], *arguments: Any,
                    **named: Any) -> Tensor:
    """``torch.ops.sparse_ce.backward_values``: the gradient for the entries' values, 0 for padding."""
    a = Arguments(*arguments, **named)
    row = _row(logits, a)
    entries = row.entries
    if logits.shape[0] == 0:
        return torch.zeros_like(a.indices, dtype=row.lse.dtype)
    grad = torch.where(row.ignored, 0.0, grad_loss)
    grad = grad[:, None] if entries.rows is None else grad[entries.rows]
    slope = entries.values if a.logprobs else 1  # of a weight by its value
    share = (1 - a.label_smoothing) * row.class_weights[entries.columns] * slope
    skipped = (entries.values == 0) | entries.values.isnan() | (share == 0)
    by, log_probs = (torch.where(skipped, 0.0, t) for t in (grad * share, entries.gather(row.log_probs)))
    return -times(by, log_probs).reshape(a.indices.shape)


def _head_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                 a: Arguments) -> Tuple[Tensor, Tensor, Tensor]:
    """(input, weight, logits) in the arithmetic dtype, of the classes that exist; ignored rows of the input are 0."""
    dtype, ignored = arithmetic_dtype(input.dtype), ignored_rows(a, input.shape[0])
    x, w = torch.where(ignored[:, None], 0.0, input.to(dtype)), linear_weight[:a.num_classes].to(dtype)
    return x, w, F.linear(x, w, None if linear_bias is None else linear_bias[:a.num_classes].to(dtype))


def linear_forward(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
                   **named: Any) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_forward``; how the rows are chunked makes no difference here."""
    a, _ = split(given, named, chunk_rows=None)
    return forward(_head_logits(input, linear_weight, linear_bias, a)[2], *a)


def linear_mean(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
                **named: Any) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_mean``."""
    a, (normalizer, _) = split(given, named, normalizer=None, chunk_rows=None)
    loss, lse = linear_forward(input, linear_weight, linear_bias, *a)
    return loss_mean(loss, normalizer, *a.tensors, a.ignore_index)[0], lse


def linear_backward(grad_loss: Tensor, grad_lse: Optional[Tensor], input: Tensor, linear_weight: Tensor,
                    linear_bias: Optional[Tensor], lse: Tensor, lse_residual: Optional[Tensor], *given: Any,
                    **named: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_backward``: the gradients for input, weight, bias and values, (0,) if not wanted."""
    a, (_, input_grad, weight_grad, bias_grad, values_grad) = split(
        given, named, chunk_rows=None, input_grad=True, weight_grad=True, bias_grad=True, values_grad=False)
    x, w, logits = _head_logits(input, linear_weight, linear_bias, a)
    padding = linear_weight.shape[0] - w.shape[0]
    dz = backward(grad_loss, grad_lse, logits, lse, lse_residual, *a)
    none = input.new_empty(0)
    return (
        (dz @ w).to(input.dtype) if input_grad else none,
        F.pad((dz.T @ x).to(linear_weight.dtype), (0, 0, 0, padding)) if weight_grad else none,
        F.pad(dz.sum(0).to(linear_bias.dtype), (0, padding)) if bias_grad and linear_bias is not None else none.clone(),
        backward_values(grad_loss, logits, lse, lse_residual, *a) if values_grad else none.clone(),
    )


def _candidates(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                c: Candidates) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of each entry, in a flat order: its row, its class, its row of the input and of the weight, its logit before the
    transform, and whether it is padding (1), has no class (2), or neither (0)."""
    dtype, num_rows = arithmetic_dtype(input.dtype), input.shape[0]
    values = None if c.values is None else c.values.to(dtype).ne(-torch.inf if c.logprobs else 0).to(dtype)
    a = Arguments(c.indices, values, c.offsets, None, c.row_mask, c.ignore_index)
    entries = entries_of(a, linear_weight.shape[0], dtype)
    columns, kinds = entries.columns.reshape(-1), entries.values.reshape(-1)
    rows = entries.rows
    if rows is None:
        rows = torch.arange(num_rows, device=input.device)[:, None].expand_as(entries.columns).reshape(-1)
    padding = (kinds == 0) | ignored_rows(a, num_rows)[rows]
    without = torch.where(padding, 1, torch.where(kinds.isnan(), 2, 0))
    # where, not a product: NaN and inf that no logit is made of must touch neither a logit nor a gradient.
    dead = (without != 0)[:, None]
    x, w = (torch.where(dead, 0.0, t.to(dtype)) for t in (input[rows], linear_weight[columns]))
    logits = (x * w).sum(1)
    return rows, columns, x, w, logits if linear_bias is None else logits + linear_bias.to(dtype)[columns], without


def candidate_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
                     **named: Any) -> Tensor:
    """``torch.ops.sparse_ce.candidate_logits``, in the shape of the ids."""
    c = Candidates(*given, **named)
    if input.shape[0] == 0:
        return input.new_full(c.indices.shape, -torch.inf, dtype=arithmetic_dtype(input.dtype))
    *_, logits, without = _candidates(input, linear_weight, linear_bias, c)
    z = transform(torch.where(without != 0, 0.0, logits), c.logit_scale, c.softcap)
    return torch.where(without == 1, -torch.inf, torch.where(without == 2, torch.nan, z)).reshape(c.indices.shape)


def candidate_logits_backward(grad: Tensor, output: Optional[Tensor], input: Tensor, linear_weight: Tensor,
                              linear_bias: Optional[Tensor], *given: Any, **named: Any) -> Tuple[Tensor, ...]:
    """``torch.ops.sparse_ce.candidate_logits_backward``: the gradients for input, weight and bias, (0,) if not wanted.
    Recomputes ``output``, so that it too is differentiated."""
    c, (input_grad, weight_grad, bias_grad) = split_candidates(given, named)
    none = input.new_empty(0)
    if input.shape[0] == 0:
        likes = input, linear_weight, linear_bias
        return tuple(torch.zeros_like(like) if wanted and like is not None else none.clone()
                     for like, wanted in zip(likes, (input_grad, weight_grad, bias_grad)))
    rows, columns, x, w, logits, without = _candidates(input, linear_weight, linear_bias, c)
    slope: Any = c.logit_scale
    if c.softcap is not None:
        slope = slope * (1 - (transform(logits, c.logit_scale, c.softcap) / c.softcap).square())
    d = torch.where(without != 0, 0.0, grad.reshape(-1))
    d = d * slope if c.softcap is None else times(d, slope)

    def added(size: int, at: Tensor, terms: Tensor, like: Tensor) -> Tensor:
        return terms.new_zeros(size, *terms.shape[1:]).index_add(0, at, terms).to(like.dtype)

    return (
        added(input.shape[0], rows, times(d[:, None], w), input) if input_grad else none,
        added(linear_weight.shape[0], columns, times(d[:, None], x), linear_weight) if weight_grad else none.clone(),
        added(linear_weight.shape[0], columns, d, linear_bias) if bias_grad and linear_bias is not None
        else none.clone(),
    )


def masked_mean(input: Tensor, mask: Tensor, dim: Sequence[int]) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.masked_mean``: the mean, and the divisor in the arithmetic dtype."""
    dtype = arithmetic_dtype(input.dtype)
    weight, dim = mask.to(dtype), list(dim)
    # where, not a product: NaN and inf under the mask must touch neither the mean nor the gradient.
    total = torch.where(weight == 0, 0.0, weight * input.to(dtype)).sum(dim)
    exact = dtype if mask.dtype.is_floating_point else torch.int64
    divisor = mask.expand(input.shape).sum(dim, dtype=exact).to(dtype)
    divisor = torch.where(divisor == 0, 1.0, divisor)
    return (total / divisor).to(input.dtype), divisor


def masked_mean_backward(share: Tensor, mask: Tensor, dim: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``torch.ops.sparse_ce.masked_mean_backward``, in the shape of ``mask``."""
    for d in sorted(dim):
        share = share.unsqueeze(d)
    weight = mask.to(share.dtype)
    return torch.where(weight == 0, 0.0, weight * share).to(dtype)


def sparse_softmax(values: Tensor, offsets: Tensor, order: Optional[Tensor], log: bool) -> Tensor:
    """``torch.ops.sparse_ce.sparse_softmax``: values (E,) or (E, D)."""
    row = _row_of_entries(offsets, values.shape[0])
    z = _in_order(values.to(arithmetic_dtype(values.dtype)), order)
    like = z.new_zeros(offsets.shape[0] - 1, *z.shape[1:])
    index = row.view(-1, *[1] * (z.dim() - 1)).expand_as(z)
    top = (like - torch.inf).scatter_reduce(0, index, z.detach(), "amax")
    shifted = z - top[row]
    out = shifted - like.index_add(0, row, shifted.exp()).log()[row]
    return _out_of_order(out if log else out.exp(), order).to(values.dtype)


def sparse_softmax_backward(grad: Tensor, output: Tensor, offsets: Tensor, order: Optional[Tensor],
                            log: bool) -> Tensor:
    """``torch.ops.sparse_ce.sparse_softmax_backward``, in the shape of ``output``."""
    row = _row_of_entries(offsets, output.shape[0])
    dtype = arithmetic_dtype(output.dtype)
    g, y = _in_order(grad.to(dtype), order), _in_order(output.to(dtype), order)
    total = y.new_zeros(offsets.shape[0] - 1, *y.shape[1:]).index_add(0, row, g if log else g * y)[row]
    return _out_of_order(g - y.exp() * total if log else y * (g - total), order).to(output.dtype)


def _row_of_entries(offsets: Tensor, count: int) -> Tensor:
    return torch.searchsorted(offsets.long(), torch.arange(count, device=offsets.device), right=True) - 1


def _in_order(entries: Tensor, order: Optional[Tensor]) -> Tensor:
    return entries if order is None else entries[order]


def _out_of_order(entries: Tensor, order: Optional[Tensor]) -> Tensor:
    if order is None:
        return entries
    return entries[torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))]
