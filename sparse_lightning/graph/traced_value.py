"""TracedValue: what the analysis knows about one tensor of the traced model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from sparse_lightning.graph.atoms import Ids


class Sign(IntEnum):
    """What is known about all elements of a value, also where weights of removed units are zero."""

    ANY = 0
    NONNEGATIVE = 1
    POSITIVE = 2


@dataclass(frozen=True)
class TracedValue:
    """A tensor of the traced model.

    Args:
        dims: for each dimension the atoms of its coordinates; None for a dynamic size, which is never removed.
        zero: for each dimension whether the value is exactly zero at a coordinate whose unit has zero weights.
        sign: what is known about all elements: division by a value that may be zero is not exact.
        constant: whether it is computed from parameters, buffers and constants alone.
        fixed: whether it is computed from buffers and constants alone, which pruning does not change.
        inner: for each dynamic dimension the atoms that repeat in it, such as heads in batch × heads; empty for
            none.
    """

    dims: tuple[Ids | None, ...]
    zero: tuple[bool, ...]
    sign: Sign = Sign.ANY
    constant: bool = False
    fixed: bool = False
    inner: tuple[Ids | None, ...] = ()

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.dims)

    def is_wide(self, dim: int) -> bool:
        """Whether a dimension has more than one coordinate: one that has not is broadcast."""
        ids = self.dims[dim]
        return ids is None or len(ids) != 1

    def permuted(self, order: list[int]) -> TracedValue:
        """Return the value with its dimensions in another order."""
        dims, zero = tuple(self.dims[d] for d in order), tuple(self.zero[d] for d in order)
        return replace(self, dims=dims, zero=zero, inner=tuple(self.inner[d] for d in order if self.inner))

    def nonzero(self) -> TracedValue:
        """Return the same dimensions for a value of which nothing is known."""
        return TracedValue(self.dims, (False,) * self.ndim)
