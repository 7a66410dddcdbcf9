"""Cuts the matrix products of a head into blocks of rows, so that the bits of a row do not depend on other rows."""

from typing import Iterator, Optional, Tuple

from torch import Tensor


class RowBlocks:
    """Yields the operands of products with a fixed number of rows.

    A library of matrix products chooses how it sums by the sizes of a product, thus also by its number of rows. Each
    block has the same number. The last one is padded with zeros, in memory of its own.
    """

    def __init__(self, input: Tensor) -> None:
        self.rows = 64 if input.is_cpu else 256
        self.input = input.new_zeros(self.rows, input.shape[1])  # of the current block

    def of_logits(self, input: Tensor, logits: Tensor) -> Iterator[Tuple[Tensor, Tensor]]:
        """Yields the input of each block, and memory for its logits."""
        for rows, count in self._blocks(input.shape[0]):
            self.input[:count] = input[rows]
            self.input[count:] = 0
            whole = count == self.rows
            part = logits[rows] if whole else logits.new_empty(self.rows, logits.shape[1])
            yield self.input, part
            if not whole:
                logits[rows] = part[:count]

    def of_gradient(self, grad_logits: Tensor, grad_input: Tensor,
                    low: Optional[Tensor]) -> Iterator[Tuple[Tensor, Tensor, Optional[Tensor]]]:
        """Yields the gradient of the logits of each block, memory for that of its input, and the low bits of that."""
        for rows, count in self._blocks(grad_input.shape[0]):
            if count == self.rows:
                yield grad_logits[rows], grad_input[rows], None if low is None else low[rows]
                continue
            dz, dx, of_low = self._padded(grad_logits[rows]), self._padded(grad_input[rows]), None
            if low is not None:
                of_low = self._padded(low[rows])
            yield dz, dx, of_low
            grad_input[rows] = dx[:count]
            if low is not None and of_low is not None:
                low[rows] = of_low[:count]

    def _padded(self, t: Tensor) -> Tensor:
        padded = t.new_zeros(self.rows, t.shape[1])
        padded[:t.shape[0]] = t
        return padded

    def _blocks(self, rows: int) -> Iterator[Tuple[slice, int]]:
        for begin in range(0, rows, self.rows):
            end = min(rows, begin + self.rows)
            yield slice(begin, end), end - begin
