"""Defines the mode in which the bits of a row do not depend on the other rows of its batch."""

from contextlib import contextmanager
from typing import Iterator

from .._core import batch_invariance as mode
from .registration import has_kernel, ops


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Makes the bits of each row's outputs, and of the gradient for its input, independent of the other rows.

    In this context, or if the environment variable ``SPARSE_CE_BATCH_INVARIANT`` is 1 when the package is imported,
    the outputs of a row do not depend on the number, order and content of other rows, on padding, on ignored rows or on
    ``chunk_rows``, with and without gradients. This applies to functions of logits and of a head. Policy-gradient
    training needs it to compare log-probabilities of a micro-batch with those of the whole batch
    (docs/log-probabilities.md). The context applies to the whole process.

    - Matrix products of a head have a fixed number of rows (64 on a CPU, 256 on a GPU); the last one is padded.
    - The kernels of a GPU do not share a row between blocks according to the number of rows. Rows of logits must begin
      at multiples of 16 bytes there, as they do if the number of classes is a multiple of 8.
    - The gradients of weight and bias are sums over rows, and are not part of this. Neither are means and sums.
    - Results on other devices, with other versions of PyTorch, or with another number of shards may differ.

    Examples:
        >>> hidden, head = torch.randn(100, 8), torch.nn.Linear(8, 1000)
        >>> tokens = torch.randint(1000, (100,))
        >>> with torch.no_grad(), sparse_ce.batch_invariant():
        ...     of_all = sparse_ce.linear_selected_log_probs(hidden, head.weight, tokens).log_probs
        ...     of_some = sparse_ce.linear_selected_log_probs(hidden[:7], head.weight, tokens[:7]).log_probs
        >>> torch.equal(of_all[:7], of_some)
        True
    """
    mode.count_context(1)
    _plan()
    try:
        yield
    finally:
        mode.count_context(-1)
        _plan()


def _plan() -> None:
    """Passes the mode to the kernels of a GPU."""
    if has_kernel("plan_by_classes", "CompositeExplicitAutograd"):
        ops.plan_by_classes(mode.is_batch_invariant())


_plan()
