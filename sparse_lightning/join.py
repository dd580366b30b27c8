"""Join: schedules one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar

from sparse_lightning.errors import SparsityError
from sparse_lightning.schedule import Schedule, When, check_rising, check_step, resolved, whole


@dataclass(frozen=True)
class Join(Schedule):
    """One schedule after the other: from `boundaries[i]` on it is `schedules[i + 1](step − boundaries[i])`.

    Each counts its steps from where its stretch begins, and parts of the run are parts of that stretch. Until its
    first update the target stays where the one before left it. Updates are those of the schedules.

    Args:
        schedules: one or more.
        boundaries: the first step of the second schedule, of the third, and so on.

    Example:
        >>> from sparse_lightning.schedules import Linear
        >>> schedule = Join([Linear(0.5), Linear(0.8, initial=0.5)], boundaries=[0.5]).resolve(22)
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
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        n, cuts = len(self.schedules), len(self.boundaries)
        if n != cuts + 1:
            raise SparsityError(f"Join of {n} schedules with {cuts} boundaries: give one schedule more than boundaries")
        for part in self.schedules:
            if not isinstance(part, Schedule):
                raise SparsityError(f"Join of {part!r}: give schedules, such as Linear(0.5)")
        for at in self.boundaries:
            check_step(self, "boundary", at)
        check_rising(self, "boundary", self.boundaries)

    @property
    def final(self) -> float:
        """The highest target that it reaches."""
        return max(part.final for part in self.schedules)

    @property
    def span(self) -> tuple[int, int]:
        """The first step with updates of the first schedule, and the last of the last."""
        return self.schedules[0].span[0], self._starts[-1] + self.schedules[-1].span[1]

    def __call__(self, step: int) -> float:
        """The target sparsity at a step."""
        part, start = self._at(step)
        return part(step - start)

    def is_update(self, step: int, every: int = 1) -> bool:
        """Whether masks are updated at a step: whether the schedule says so that is at work there."""
        part, start = self._at(step)
        return part.is_update(step - start, every)

    def resolve(self, total_steps: int | None) -> Schedule:
        """The schedule in whole steps. One that a short run leaves no step for is left out."""
        starts = [0, *(resolved(self, "boundary", at, total_steps) for at in self.boundaries)]
        check_rising(self, "boundary", [at for at, _ in groupby(starts)])
        parts = dict(zip(starts, self.schedules, strict=True))
        *inner, last = parts.values()
        found = [_fitted(part, end - start) for part, (start, end) in zip(inner, pairwise(parts), strict=True)]
        rest = None if total_steps is None else max(1, total_steps - starts[-1])
        return Join([*found, last.resolve(rest)], list(parts)[1:])

    @property
    def _starts(self) -> list[int]:
        return [0, *(whole(self, "boundary", at) for at in self.boundaries)]

    def _at(self, step: int) -> tuple[Schedule, int]:
        """The schedule at work at a step, and where its stretch begins."""
        begun = [(part, at) for part, at in zip(self.schedules, self._starts, strict=True) if at + part.span[0] <= step]
        return begun[-1] if begun else (self.schedules[0], 0)


def _fitted(part: Schedule, length: int) -> Schedule:
    found = part.resolve(length)
    if found.span[1] >= length:
        raise SparsityError(
            f"{part} has its last update at step {found.span[1]} of a stretch of {length} steps in a Join: "
            "end it earlier, or move the next boundary; each schedule counts steps from its own boundary"
        )
    return found
