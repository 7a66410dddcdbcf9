"""Computes ranking metrics of extreme multi-label classification from the classes predicted for each row.

The metrics compare predicted classes with a sparse target. Neither a score matrix (N, V) nor a dense target is
materialized. :func:`sparse_ce.linear_topk_logits` computes those of a linear head.

The functions have these arguments in common:

- ``indices`` (..., K): the predicted classes of each row, best first, in any integer dtype. Negative ones are padding.
  If a class is repeated in a row, it counts once, at its first place. Classes whose scores tie have the places that
  ``indices`` gives them.
- ``target``: the true classes, in any format of :func:`sparse_ce.cross_entropy`, or a SciPy sparse matrix. Its rows
  correspond to those of ``indices``. A class is positive in a row if its weights in that row have a sum greater than 0,
  or if one of its log-probabilities is greater than -inf. Padding and ignored rows are the same as in the losses.
- ``k``: the number of predictions that count, from 1 to K, or a sequence of such numbers. For a number, the result is a
  0-d tensor; for a sequence, a dictionary of such tensors by number. They are on the device of ``indices``.

An active row without positive classes counts as 0 in a mean. To ignore such rows, build the target with
``ignore_empty=True``. A row of a padded top-k with no index but -100 is ignored. If no row is active, the result is 0.

To evaluate in batches, concatenate the indices (8 * K bytes per row), and the targets with :meth:`SparseTarget.cat`.

Examples:
    >>> indices = torch.tensor([[4, 2, 7], [1, 0, 3]])
    >>> target = SparseTarget.from_topk(torch.tensor([[2, 4], [3, -100]]), None)
    >>> sparse_ce.metrics.precision_at_k(indices, target, (1, 3))
    {1: tensor(0.5000), 3: tensor(0.5000)}
"""

import math
from typing import Any, Dict, NamedTuple, Optional, Protocol, Sequence, Tuple, Union, overload

import torch
from torch import Tensor

from ._core.arguments import ANY_CLASS, IGNORE_INDEX, arithmetic_dtype
from ._core.errors import described, fail
from ._core.listing import listing
from ._core.options import is_integer, is_number
from ._core.tensor_checks import check_device, check_local
from ._core.tracing import VALIDATES, readable
from .targets.convert import Target, as_target, check_parts
from .targets.entries import Numbers, as_index, as_tensor, as_values, holds_integers, is_array
from .targets.positives import SortedEntries, positives_of, sorted_entries
from .targets.sparse_target import SparseTarget

__all__ = ["label_propensities", "ndcg_at_k", "precision_at_k", "propensity_scored_precision_at_k"]
__dir__ = listing(globals())

_FULL = "pass its full_tensor()"
_TENSORS = (Tensor, SparseTarget, tuple, list)  # of a device that the caller has chosen


class SupportsCSR(Protocol):
    """Describes SciPy's sparse matrices and arrays."""

    def tocsr(self) -> Any: ...


AnyTarget = Union[Target, SupportsCSR]


class _Ranking(NamedTuple):
    """Stores the first predictions of each row, and the target they are compared with."""

    ids: Tensor  # (N, k) int64
    hits: Tensor  # (N, k) bool
    active: Tensor  # (N,) bool
    entries: SortedEntries

    def counts(self) -> Tensor:
        """Returns the number of positive classes of each row, (N,)."""
        zeros = torch.zeros(self.active.shape, dtype=torch.int64, device=self.active.device)
        return zeros.index_add(0, self.entries.rows, self.entries.positive.long())


@overload
def precision_at_k(indices: Numbers, target: AnyTarget, k: int) -> Tensor: ...


@overload
def precision_at_k(indices: Numbers, target: AnyTarget, k: Sequence[int]) -> Dict[int, Tensor]: ...


@torch.no_grad()
def precision_at_k(indices: Numbers, target: Any, k: Union[int, Sequence[int]]) -> Union[Tensor, Dict[int, Tensor]]:
    """Computes the precision of the first ``k`` predictions, P@k.

    It is the mean over active rows of the number of positive classes among the first ``k``, divided by ``k``. The
    divisor is ``k`` also in rows that have fewer positive classes.

    Args:
        indices, target, k: see ``sparse_ce.metrics``.

    Returns:
        The precision in [0, 1], (), float32, or a dictionary of precisions by ``k``.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value, or (CPU) a class is out of range.
        RuntimeError: if devices do not match.

    Examples:
        >>> hidden, head = torch.eye(2), torch.tensor([[0.0, 3.0], [2.0, 1.0], [1.0, 2.0]])
        >>> indices = sparse_ce.linear_topk_logits(hidden, head, 2).indices
        >>> indices
        tensor([[1, 2],
                [0, 2]])
        >>> target = torch.sparse_coo_tensor([[0, 0, 1], [1, 2, 2]], torch.ones(3), (2, 3))
        >>> sparse_ce.metrics.precision_at_k(indices, target, 2)
        tensor(0.7500)
    """
    ranks, ranking = _ranking(indices, target, k, None)
    hits = ranking.hits.sum(0).cumsum(0)
    divisor = ranking.active.sum().clamp(min=1) * torch.arange(1, len(hits) + 1, device=hits.device)
    return _at(hits / divisor, k, ranks)


@overload
def ndcg_at_k(indices: Numbers, target: AnyTarget, k: int) -> Tensor: ...


@overload
def ndcg_at_k(indices: Numbers, target: AnyTarget, k: Sequence[int]) -> Dict[int, Tensor]: ...


@torch.no_grad()
def ndcg_at_k(indices: Numbers, target: Any, k: Union[int, Sequence[int]]) -> Union[Tensor, Dict[int, Tensor]]:
    """Computes the normalized discounted cumulative gain of the first ``k`` predictions, nDCG@k, with binary relevance.

    The gain of a positive class at place i = 1, ..., k is 1 / log2(i + 1). The sum of a row is divided by the largest
    possible sum, that of a ranking that begins with min(k, number of positive classes) positive classes. The result is
    the mean over active rows. A row without positive classes counts as 0, as in ``sklearn.metrics.ndcg_score``.
    Weights do not change the gain.

    Args:
        indices, target, k: see ``sparse_ce.metrics``.

    Returns:
        The mean in [0, 1], (), float32, or a dictionary of means by ``k``.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`precision_at_k`.

    Examples:
        >>> indices = torch.tensor([[4, 2, 7], [1, 0, 3]])
        >>> target = SparseTarget.from_topk(torch.tensor([[2, 4], [3, -100]]), None)
        >>> sparse_ce.metrics.ndcg_at_k(indices, target, [1, 3])
        {1: tensor(0.5000), 3: tensor(0.7500)}
    """
    ranks, ranking = _ranking(indices, target, k, None)
    places = torch.arange(1, ranking.ids.shape[1] + 1, device=ranking.ids.device)
    discounts = 1 / (places + 1.0).log2()
    gains = (ranking.hits * discounts).cumsum(1)
    # A row without positive classes has no gain, so any ideal makes it 0.
    ideal = discounts.cumsum(0)[torch.minimum(ranking.counts().clamp(min=1)[:, None], places) - 1]
    return _at((gains / ideal).sum(0) / ranking.active.sum().clamp(min=1), k, ranks)


@overload
def propensity_scored_precision_at_k(indices: Numbers, target: AnyTarget, propensity: Numbers, k: int) -> Tensor: ...


@overload
def propensity_scored_precision_at_k(indices: Numbers, target: AnyTarget, propensity: Numbers,
                                     k: Sequence[int]) -> Dict[int, Tensor]: ...


@torch.no_grad()
def propensity_scored_precision_at_k(indices: Numbers, target: Any, propensity: Numbers,
                                     k: Union[int, Sequence[int]]) -> Union[Tensor, Dict[int, Tensor]]:
    """Computes the propensity-scored precision of the first ``k`` predictions, PSP@k.

    A positive class c has the weight 1 / ``propensity[c]``, so rare classes count more. The result is the ratio of two
    totals over all active rows:

    - the weights of the positive classes among the first ``k`` predictions of each row
    - the ``k`` largest weights of the positive classes of each row, the best that a prediction can reach

    The Extreme Classification Repository reports this ratio, and pyxclib computes it. It is not the mean of the ratios
    of the rows. It is 0 if there are no positive classes.

    Args:
        indices, target, k: see ``sparse_ce.metrics``.
        propensity: the propensity of each class (V,), positive, such as :func:`label_propensities` of the training
            set. The values are not checked on CUDA.

    Returns:
        The ratio in [0, 1], (), float32 (float64 if ``propensity`` is float64), or a dictionary of ratios by ``k``.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`precision_at_k`.

    Examples:
        >>> indices = torch.tensor([[0, 2], [1, 0]])
        >>> target = SparseTarget.from_topk(torch.tensor([[0, 1], [1, -100]]), None)
        >>> propensity = torch.tensor([0.5, 0.25, 0.25])
        >>> sparse_ce.metrics.propensity_scored_precision_at_k(indices, target, propensity, (1, 2))
        {1: tensor(0.7500), 2: tensor(0.6000)}
    """
    numbers, device = _of_classes(propensity, "propensity"), _as_ids(indices).device
    numbers = numbers if isinstance(propensity, _TENSORS) else numbers.to(device)
    check_device("propensity", numbers, device, "indices")
    if readable(numbers, wait=VALIDATES) and not bool((numbers > 0).all()):
        fail("propensity must be positive for each class, got a tensor with other values")
    ranks, ranking = _ranking(indices, target, k, len(numbers))
    weights = 1 / numbers
    found = torch.where(ranking.hits, weights[ranking.ids.clamp(0, len(weights) - 1)], 0.0)
    total, best = (t.sum(0).cumsum(0) for t in (found, _best(ranking, weights)))
    return _at(torch.where(best > 0, total / best, 0.0), k, ranks)


def label_propensities(counts: Union[Numbers, AnyTarget], num_rows: Optional[int] = None, a: float = 0.55,
                       b: float = 1.5) -> Tensor:
    """Computes the propensity of each class from its frequency in the training set (Jain, Prabhu and Varma, 2016).

    The propensity is the estimated probability that a relevant class is labeled:

        1 / (1 + C exp(-a log(count + b))), C = (log(num_rows) - 1) (b + 1)^a

    Args:
        counts: number of training rows in which each class is positive (V,), not negative. It may also be the sparse
            target of the training set with its number of classes, such as a SciPy matrix (N, V), which is counted.
        num_rows: number of training rows, at least 3, because C must be positive. For a target, it may be None.
        a, b: parameters of the model, positive numbers. The Extreme Classification Repository uses 0.5 and 0.4 for
            data sets from Wikipedia, 0.6 and 2.6 for those from Amazon, and the defaults for all others.

    Returns:
        The propensities in (0, 1), (V,), float32 (float64 if ``counts`` are float64).

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value. ``counts`` are not checked on CUDA.

    Examples:
        >>> positives = torch.tensor([0, 2, 2, 2, 1])  # the class of each positive entry of the training set
        >>> sparse_ce.metrics.label_propensities(torch.bincount(positives, minlength=4), num_rows=100)
        tensor([0.2171, 0.2171, 0.2771, 0.1732])
    """
    if isinstance(counts, SparseTarget) or hasattr(counts, "tocsr") or (
            isinstance(counts, Tensor) and counts.layout != torch.strided):
        counts, active = positives_of(as_target(counts, torch.Size((0,))))
        num_rows = active if num_rows is None else num_rows
    numbers = _of_classes(counts, "counts")
    if readable(numbers, wait=VALIDATES) and not bool((numbers >= 0).all()):
        fail("counts must not be negative or NaN for any class, got a tensor with such values")
    if num_rows is None or not is_integer(num_rows) or num_rows < 3:
        fail(f"num_rows must be an integer of at least 3, got {described(num_rows)}",
             ValueError if is_integer(num_rows) else TypeError)
    for name, value in (("a", a), ("b", b)):
        if not is_number(value) or not 0 < value < math.inf:
            fail(f"{name} must be a positive number, got {described(value)}",
                 ValueError if is_number(value) else TypeError)
    c = (math.log(num_rows) - 1) * (b + 1) ** a
    return torch.reciprocal(1 + c * torch.exp(-a * torch.log(numbers + b)))


# ---------------------------------------------------------------------------------------------------------- arguments

def _ranks(k: object, most: int) -> Tuple[int, ...]:
    """Checks ``k`` and returns its numbers."""
    several = tuple(k) if isinstance(k, Sequence) and not isinstance(k, str) else (k,)
    if not several or not all(is_integer(n) and 0 < n <= most for n in several):
        fail(f"k must be an integer in [1, {most}] (the last dimension of indices), or a sequence of such integers, "
             f"got {described(k)}")
    return tuple(int(n) for n in several)


def _at(of_ranks: Tensor, k: object, ranks: Tuple[int, ...]) -> Union[Tensor, Dict[int, Tensor]]:
    """Returns the elements of ``of_ranks``, for 1, 2 and so on, in the structure of ``k``."""
    return {n: of_ranks[n - 1] for n in ranks} if isinstance(k, Sequence) else of_ranks[ranks[0] - 1]


def _of_classes(numbers: Numbers, name: str) -> Tensor:
    """Returns numbers of the classes, (V,), in the arithmetic dtype."""
    t = as_values(numbers, name)
    check_local(name, t, _FULL)
    if t.dim() != 1 or len(t) == 0:
        fail(f"{name} must be (V,), one element for each class, got {list(t.shape)}; pass "
             f"numpy.asarray({name}).ravel() for a sum of a SciPy matrix")
    return t.to(arithmetic_dtype(t.dtype))


def _as_ids(indices: Any) -> Tensor:
    if isinstance(indices, tuple) and len(indices) == 2 and isinstance(indices[0], Tensor):
        fail("indices must be a tensor, got a tuple; pass linear_topk_logits(...).indices", TypeError)
    ids = as_tensor(indices, "indices")
    if not holds_integers(ids):
        fail(f"indices must be of an integer dtype, got {ids.dtype}; pass the indices of "
             "linear_topk_logits or torch.topk", TypeError)
    check_local("indices", ids, _FULL)
    if ids.layout != torch.strided:
        fail(f"indices must be strided, got layout {ids.layout}")
    if ids.dim() < 2 or ids.shape[-1] == 0:
        fail(f"indices must be (..., K), K classes for each row, got {list(ids.shape)}")
    return as_index(ids, "indices").long()


def _checked_target(target: Any, leading: torch.Size, device: torch.device) -> SparseTarget:
    """Converts a target for rows of the ``leading`` shape, and returns it with one leading dimension."""
    if not isinstance(target, _TENSORS) and is_array(target):
        target = as_tensor(target, "target").to(device)  # An array is moved.
    if isinstance(target, Tensor) and not target.is_nested and target.layout == torch.strided:
        if target.dim() == len(leading) + 1 and target.shape[:-1] == leading:
            fail(f"target must be labels of shape {list(leading)} or sparse, got a dense {target.dtype} tensor of "
                 f"shape {list(target.shape)}; pass SparseTarget.from_topk(target, None) if it holds classes, "
                 "SparseTarget.from_dense(target) if it is multi-hot", TypeError)
    out = as_target(target, torch.Size((*leading, ANY_CLASS)), device)
    if not isinstance(out.indices, Tensor):  # A Trainer's evaluation passes NumPy arrays to compute_metrics.
        out = out._map(torch.as_tensor)
    if out.shape != leading:
        fail(f"target must have the leading shape of indices, {list(leading)}, got {list(out.shape)}")
    check_parts("target", out, device, "indices")
    return out.flatten()


def _ranking(indices: Any, target: Any, k: object, num_classes: Optional[int]) -> Tuple[Tuple[int, ...], _Ranking]:
    """Returns the numbers of ``k``, and the first predictions of each row with the target."""
    ids = _as_ids(indices)
    leading, ranks = ids.shape[:-1], _ranks(k, ids.shape[-1])
    flat = _checked_target(target, leading, ids.device)
    if num_classes is not None and flat.num_classes is not None and flat.num_classes != num_classes:
        fail(f"propensity must have {flat.num_classes} elements, one for each class of target, got {num_classes}")
    vocab = num_classes or flat.num_classes or ANY_CLASS
    if readable(ids, wait=VALIDATES) and ids.numel() and int(ids.max()) >= vocab:
        fail(f"indices must be less than {vocab}, the number of classes, got {int(ids.max())}")
    ids = ids.reshape(math.prod(leading), ids.shape[-1])[:, :max(ranks)]
    active = flat.ne(IGNORE_INDEX)
    entries = sorted_entries(flat, active, vocab)
    return ranks, _Ranking(ids, _hits(ids, entries), active, entries)


# -------------------------------------------------------------------------------------------------------- computation

def _hits(ids: Tensor, entries: SortedEntries) -> Tensor:
    """Returns a mask of the predictions that are positive, without repetitions."""
    if len(entries.keys) == 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    keys = torch.arange(len(ids), device=ids.device)[:, None] * ANY_CLASS + ids
    at = torch.searchsorted(entries.keys, keys).clamp(max=len(entries.keys) - 1)
    found = (entries.keys[at] == keys) & entries.positive[at]
    in_order, order = ids.sort(dim=1, stable=True)
    repeated = torch.zeros_like(found)
    repeated[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
    repeated = torch.zeros_like(found).scatter(1, order, repeated)
    return found & (0 <= ids) & (ids < ANY_CLASS) & ~repeated  # Other ids would have the keys of other rows.


def _best(ranking: _Ranking, weights: Tensor) -> Tensor:
    """Returns the largest weights of the positive classes of each row, (N, k), in descending order."""
    (num_rows, k), entries = ranking.ids.shape, ranking.entries
    of_entries = torch.where(entries.positive, weights[entries.columns], 0.0)
    of_entries, order = of_entries.sort(descending=True)
    rows, by_row = entries.rows[order].sort(stable=True)
    begins = torch.searchsorted(rows, torch.arange(num_rows, device=rows.device))
    place = torch.arange(len(rows), device=rows.device) - begins[rows]
    at = torch.where(place < k, rows * k + place, num_rows * k)  # The last element is for entries behind the k-th.
    best = weights.new_zeros(num_rows * k + 1).scatter(0, at, of_entries[by_row])
    return best[:-1].reshape(num_rows, k)
