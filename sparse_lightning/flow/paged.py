"""Paged state: one buffer of fixed-size pages per field, and a table of the pages that each block owns.

Attaching a block allocates free pages and fills them; detaching frees them. Neither changes the pages of other blocks.
If no page is free, the buffer doubles; pages keep their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError

PAGE = 256
"""The number of entries in a page."""


DTYPES = (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The dtypes that a field of state can have."""


@dataclass(frozen=True)
class State:
    """A field of state: one entry per block, kept between runs and in checkpoints, in its own dtype.

    `Load` returns a value of this dtype; what follows is promoted as in torch, so that a running sum in fp64 is added
    in fp64, and a count in integers stays exact. `Save` converts a value of another dtype: floats are rounded to the
    nearest number of the field, halves to the even one; integers saturate at the ends of their range, and NaN becomes
    the fill value.

    Args:
        fill: the initial value of an entry.
        inner: the shape `(D0, D1)` of an entry; one entry can hold several statistics of a block.
        dtype: fp32, fp64 or an integer dtype.

    Example:
        >>> State(fill=1, dtype=torch.int32).convert(torch.tensor([2.5, -3.7, 1e10, float("nan")]))
        tensor([         2,         -4, 2147483647,          1], dtype=torch.int32)
    """

    fill: float = 0.0
    inner: tuple[int, ...] = (1, 1)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise FlowError(f"dtype={self.dtype} of a State is not supported: pass {names}")
        if self._is_integer() and not (math.isfinite(self.fill) and self.fill == int(self.fill) and self._holds_fill()):
            raise FlowError(f"fill={self.fill} of a State is not a number of its dtype {self.dtype}: pass another fill")

    def _is_integer(self) -> bool:
        return not self.dtype.is_floating_point

    def _holds_fill(self) -> bool:
        limits = torch.iinfo(self.dtype)
        return limits.min <= self.fill <= limits.max

    def full(self, entries: int, device: torch.device) -> Tensor:
        """Return new entries with the fill value: `(entries, D0, D1)`."""
        fill = int(self.fill) if self._is_integer() else self.fill
        return torch.full((entries, *self.inner), fill, dtype=self.dtype, device=device)

    def empty(self, entries: int, device: torch.device) -> Tensor:
        """Return room for entries: `(entries, D0, D1)`."""
        return torch.empty((entries, *self.inner), dtype=self.dtype, device=device)

    def convert(self, values: Tensor) -> Tensor:
        """Return values in the dtype of the field, the same on every device."""
        if values.dtype == self.dtype or not self._is_integer():
            return values.to(self.dtype)
        limits = torch.iinfo(self.dtype)
        rounded = values.round() if values.is_floating_point() else values
        low, high, missing = rounded <= limits.min, rounded >= limits.max, rounded.isnan()
        # Devices differ in what they make of a float that is out of range: these are set below.
        whole = rounded.masked_fill(low | high | missing, 0).to(self.dtype)
        for place, value in ((low, limits.min), (high, limits.max), (missing, int(self.fill))):
            whole = whole.masked_fill(place, value)
        return whole


def shortened(entries: Tensor) -> Tensor:
    """Return the first entry alone where all entries have its bits, as in state that is at its fill value.

    Example:
        >>> shortened(torch.ones(3, 1, 1)).shape, shortened(torch.tensor([0.0, -0.0]).view(2, 1, 1)).shape
        (torch.Size([1, 1, 1]), torch.Size([2, 1, 1]))
    """
    bits = entries.view(_SAME_SIZE[entries.dtype.itemsize])
    return entries[:1].clone() if len(entries) and bool((bits == bits[:1]).all()) else entries


_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


RUN = 256
"""Entries of a range from which on copying ranges is faster than an index of each entry."""


@dataclass(frozen=True)
class EntryIndex:
    """Where entries are in a field: as a few long ranges if they are, else as an index of each.

    Example:
        >>> EntryIndex.of(torch.arange(512, 1024)).found
        ((512, 1024),)
        >>> EntryIndex.of(torch.tensor([2, 0])).found
        tensor([2, 0])
    """

    found: Tensor | tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, index: Tensor) -> EntryIndex:
        """Return the places of entries with these indices, in this order."""
        breaks = (index.diff() != 1).nonzero().flatten().add(1)
        if (len(breaks) + 1) * RUN > len(index):
            return cls(index)
        starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(index)]
        first = index[torch.tensor(starts, device=index.device)].tolist()
        return cls(tuple((at, at + end - start) for at, start, end in zip(first, starts, ends, strict=True)))

    def part(self, part: slice) -> EntryIndex:
        """Return the places of some of the entries, from `part.start` up to `part.stop`.

        Example:
            >>> EntryIndex(((512, 1024), (0, 256))).part(slice(500, 600)).found
            ((1012, 1024), (0, 88))
        """
        if isinstance(self.found, Tensor):
            return EntryIndex(self.found[part])
        parts, begin = [], 0
        for start, end in self.found:
            low, high = max(part.start - begin, 0), min(part.stop - begin, end - start)
            parts += [(start + low, start + high)] if low < high else []
            begin += end - start
        return EntryIndex(tuple(parts))

    def read(self, buffer: Tensor) -> Tensor:
        """Return a copy of the entries of a buffer."""
        if isinstance(self.found, Tensor):
            return buffer[self.found]
        return torch.cat([buffer[start:end] for start, end in self.found])

    def write(self, buffer: Tensor, values: Tensor) -> None:
        """Write entries of a buffer."""
        if isinstance(self.found, Tensor):
            buffer[self.found] = values
            return
        sizes = [end - start for start, end in self.found]
        for (start, end), part in zip(self.found, torch.split(values, sizes), strict=True):
            buffer[start:end] = part


class PageTable:
    """The pages of each owner. All fields use one table, so that an entry has the same index in each of them."""

    def __init__(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.entries: dict[str, int] = {}
        self._free: list[int] = []
        self.capacity = 0

    def allocate(self, owner: str, entries: int) -> list[int]:
        """Allocate pages for this many entries, lowest numbers first."""
        needed = -(-entries // PAGE)
        while len(self._free) < needed:
            grown = max(1, self.capacity)
            self._free += range(self.capacity, self.capacity + grown)
            self.capacity += grown
        self.pages[owner], self._free = self._free[:needed], self._free[needed:]
        self.entries[owner] = entries
        return self.pages[owner]

    def free(self, owner: str) -> None:
        """Free the pages of an owner."""
        self._free = sorted(self._free + self.pages.pop(owner))
        del self.entries[owner]

    def places(self, owner: str) -> EntryIndex:
        """Return where the entries of an owner are in a buffer."""
        return EntryIndex.of(self.indices(owner))

    def indices(self, owner: str) -> Tensor:
        """Return the indices of the entries of an owner in a buffer: `(entries,)`."""
        pages = torch.tensor(self.pages[owner], dtype=torch.int64)
        return (pages.unsqueeze(-1) * PAGE + torch.arange(PAGE)).flatten()[: self.entries[owner]]


class PagedField:
    """The buffer of one field, `(pages · PAGE, D0, D1)`."""

    def __init__(self, state: State, device: torch.device) -> None:
        self.state = state
        self.buffer = state.full(0, device)

    def reserve(self, table: PageTable, pages: Sequence[int]) -> None:
        """Grow to the capacity of the table, and fill pages that were just allocated."""
        missing = table.capacity * PAGE - self.buffer.shape[0]
        if missing > 0:
            self.buffer = torch.cat([self.buffer, self.state.full(missing, self.buffer.device)])
        for page in pages:
            self.buffer[page * PAGE : (page + 1) * PAGE] = self.state.full(PAGE, self.buffer.device)

    def load(self, places: EntryIndex) -> Tensor:
        """Return the entries at these places, `(S, D0, D1)`: a copy that later saves do not change."""
        return places.read(self.buffer)

    def save(self, places: EntryIndex, values: Tensor, is_right: Tensor | None = None) -> None:
        """Write the entries at these places, converted to the dtype of the field.

        Args:
            places: of the entries.
            values: `(S, D0, D1)`.
            is_right: one boolean on the device of the field: entries stay as they are if it is False.
        """
        values = self.state.convert(values)
        places.write(self.buffer, values if is_right is None else torch.where(is_right, values, self.load(places)))
