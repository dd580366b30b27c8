"""Join: schedules in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar

from sparse_lightning.compat.wrapped import unwrapped
from sparse_lightning.errors import SparsityError
from sparse_lightning.schedules.schedule import Schedule, When, check_increasing, check_step, known_step, to_step


@dataclass(frozen=True)
class Join(Schedule):
    """Schedules in sequence: from `boundaries[i]` on, the target is `schedules[i + 1](step − boundaries[i])`.

    Each schedule counts steps from its boundary, and fractions of the run are fractions of its segment. Until its
    first update, the target of the previous schedule holds. Masks are updated where the active schedule updates them.

    Args:
        schedules: one or more.
        boundaries: the first step of the second schedule, of the third, and so on.

    Example:
        >>> from sparse_lightning.schedules import Linear
        >>> schedule = Join([Linear(0.5, 0, 1.0), Linear(0.8, 0, 1.0, initial=0.5)], boundaries=[0.5]).resolve(22)
        >>> schedule.boundaries, schedule.span
        ((10,), (0, 21))
        >>> [round(schedule(step), 3) for step in (0, 9, 10, 11, 21)]
        [0.0, 0.5, 0.5, 0.527, 0.8]
    """

    steps: ClassVar[tuple[str, ...]] = ()
    levels: ClassVar[tuple[str, ...]] = ()

    schedules: Sequence[Schedule]
    boundaries: Sequence[When] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(unwrapped(self.schedules)))
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        n, cuts = len(self.schedules), len(self.boundaries)
        if n != cuts + 1:
            raise SparsityError(f"Join has {n} schedules and {cuts} boundaries: pass one boundary fewer than schedules")
        for part in self.schedules:
            if not isinstance(part, Schedule):
                raise SparsityError(f"{part!r} in a Join is not a schedule: pass schedules, such as Linear(0.5)")
        for at in self.boundaries:
            check_step(self, "boundary", at)
        check_increasing(self, "boundary", self.boundaries)

    @property
    def final(self) -> float:
        """The highest target sparsity."""
        return max(part.final for part in self.schedules)

    @property
    def span(self) -> tuple[int, int]:
        """The first step with updates of the first schedule, and the last one of the last schedule."""
        return self.schedules[0].span[0], self._starts[-1] + self.schedules[-1].span[1]

    def __call__(self, step: int) -> float:
        """Return the target sparsity at a step."""
        part, start = self._at(step)
        return part(step - start)

    def is_update(self, step: int, every: int = 1) -> bool:
        """Whether the active schedule updates masks at a step."""
        part, start = self._at(step)
        return part.is_update(step - start, every)

    def resolve(self, total_steps: int | None) -> Schedule:
        """Return the schedule in optimizer steps; a schedule whose segment has no steps in a short run is dropped."""
        starts = [0, *(to_step(self, "boundary", at, total_steps) for at in self.boundaries)]
        check_increasing(self, "boundary", [at for at, _ in groupby(starts)])
        parts = dict(zip(starts, self.schedules, strict=True))
        *inner, last = parts.values()
        found = [_fitted(part, end - start) for part, (start, end) in zip(inner, pairwise(parts), strict=True)]
        rest = None if total_steps is None else max(1, total_steps - starts[-1])
        return Join([*found, last.resolve(rest)], list(parts)[1:])

    @property
    def _starts(self) -> list[int]:
        return [0, *(known_step(self, "boundary", at) for at in self.boundaries)]

    def _at(self, step: int) -> tuple[Schedule, int]:
        """Return the active schedule at a step, and the first step of its segment."""
        begun = [(part, at) for part, at in zip(self.schedules, self._starts, strict=True) if at + part.span[0] <= step]
        return begun[-1] if begun else (self.schedules[0], 0)


def _fitted(part: Schedule, length: int) -> Schedule:
    found = part.resolve(length)
    if found.span[1] >= length:
        raise SparsityError(
            f"{part} in a Join has its last update at step {found.span[1]}, but its segment has {length} steps from "
            "its boundary on: end it earlier, or move the next boundary"
        )
    return found
