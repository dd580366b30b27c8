"""Paged state: one buffer of fixed-size pages for each field, and which pages each block owns.

Attaching a block takes free pages and fills them; detaching gives them back. Neither touches the pages of
others. When no page is free the buffer doubles; pages keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError

PAGE = 256
"""Entries of a page."""


@dataclass(frozen=True)
class State:
    """A field of state: what a fresh entry holds, and the shape of an entry.

    Args:
        fill: what every number of a new entry is.
        inner: `(D0, D1)`; several statistics of a block can be one entry.
    """

    fill: float = 0.0
    inner: tuple[int, ...] = (1, 1)


class PageTable:
    """Which pages belong to whom; shared by all fields, so that an entry has one place in each of them."""

    def __init__(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.entries: dict[str, int] = {}
        self._free: list[int] = []
        self.capacity = 0

    def take(self, owner: str, entries: int) -> list[int]:
        """Pages for this many entries, lowest numbers first."""
        if owner in self.pages:
            raise FlowError(f"{owner!r} has state already: detach it first")
        needed = -(-entries // PAGE)
        while len(self._free) < needed:
            grown = max(1, self.capacity)
            self._free += range(self.capacity, self.capacity + grown)
            self.capacity += grown
        self.pages[owner], self._free = self._free[:needed], self._free[needed:]
        self.entries[owner] = entries
        return self.pages[owner]

    def release(self, owner: str) -> None:
        """Give the pages of an owner back."""
        self._free = sorted(self._free + self.pages.pop(owner))
        del self.entries[owner]

    def places(self, owner: str) -> Tensor:
        """Where the entries of an owner stand in a buffer: `(entries,)`."""
        pages = torch.tensor(self.pages[owner], dtype=torch.int64)
        return (pages.unsqueeze(-1) * PAGE + torch.arange(PAGE)).flatten()[: self.entries[owner]]


class PagedField:
    """The buffer of one field, `(pages · PAGE, D0, D1)`."""

    def __init__(self, state: State, device: torch.device) -> None:
        self.state = state
        self.buffer = torch.empty(0, *state.inner, device=device)

    def reserve(self, table: PageTable, pages: Sequence[int]) -> None:
        """Grow to the table's capacity, and fill pages that were just taken."""
        missing = table.capacity * PAGE - self.buffer.shape[0]
        if missing > 0:
            fresh = self.buffer.new_full((missing, *self.state.inner), self.state.fill)
            self.buffer = torch.cat([self.buffer, fresh])
        for page in pages:
            self.buffer[page * PAGE : (page + 1) * PAGE].fill_(self.state.fill)

    def load(self, places: Tensor) -> Tensor:
        """The entries at these places, `(S, D0, D1)`: a copy that later saves do not change."""
        return self.buffer[places]

    def save(self, places: Tensor, values: Tensor) -> None:
        """Write entries in place."""
        self.buffer[places] = values.to(self.buffer.dtype)
