"""What every schedule is: optimizer step → target sparsity, and which steps are updates.

A step is numbered by how many optimizer steps were made before it: a run of T steps sees 0 … T − 1. Wherever a
schedule takes a step, an int is one, and a float is a part of the run: 0.0 is step 0, and 1.0 is step T − 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from sparse_lightning.errors import SparsityError

When = int | float
"""A step: an int counts optimizer steps, a float between 0 and 1 is a part of the run."""


@dataclass(frozen=True)
class Schedule(ABC):
    """Answers two questions: the target sparsity at a step, and whether masks are updated there.

    `steps` names the fields that are steps, from the first with updates to the last; they are checked, and `span`
    and `resolve` are made of them. `levels` names those that are sparsities, the lower first; they are checked.
    """

    steps: ClassVar[tuple[str, ...]] = ("begin", "end")
    levels: ClassVar[tuple[str, ...]] = ("final",)

    if TYPE_CHECKING:  # most schedules have it as a field, which a property here would stand in the way of

        @property
        def final(self) -> float:
            """The highest target that it reaches."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The target sparsity at a step."""

    def __post_init__(self) -> None:
        for name in self.steps:
            check_step(self, name, getattr(self, name))
        for name in self.levels:
            check_sparsity(self, name, getattr(self, name))
        _check_begin(self, {name: getattr(self, name) for name in self.steps})
        _check_levels(self, {name: getattr(self, name) for name in self.levels})

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step with updates."""
        first, last = (whole(self, name, getattr(self, name)) for name in (self.steps[0], self.steps[-1]))
        return first, last

    def is_update(self, step: int, every: int = 1) -> bool:
        """Whether masks are updated at a step: each `every` steps from the first of the span, and at its last."""
        _check_every(every)
        begin, end = self.span
        return begin <= step <= end and ((step - begin) % every == 0 or step == end)

    def resolve(self, total_steps: int | None) -> Schedule:
        """The schedule in whole steps: a part f of the run becomes `round(f · (total_steps − 1))`.

        Args:
            total_steps: the optimizer steps of the run; None where that is not known.
        """
        found = {name: resolved(self, name, getattr(self, name), total_steps) for name in self.steps}
        try:
            return replace(self, **found)
        except SparsityError as error:
            raise SparsityError(f"{self} in a run of {total_steps} steps: {error}") from None


@dataclass(frozen=True)
class Ramp(Schedule):
    """Rises from `initial` at `begin` to `final` at `end`: `initial + (final − initial) · rise(p)`.

    p is the part of the way from `begin` to `end`. Before, the target is `initial`, after, `final`.

    Args:
        final: the target at `end` and after.
        begin: the first step with updates.
        end: the last step with updates.
        initial: the target at `begin` and before.
    """

    levels: ClassVar[tuple[str, ...]] = ("initial", "final")

    final: float
    begin: When = 0
    end: When = 1.0
    initial: float = 0.0

    @abstractmethod
    def rise(self, p: float) -> float:
        """How much of the rise is done at a part p of the way: from 0 to 1; what lies outside is cut off."""

    def __call__(self, step: int) -> float:
        """The target sparsity at a step."""
        begin, end = self.span
        if step >= end:
            return self.final
        return between(self.initial, self.final, self.rise((step - begin) / (end - begin)) if step > begin else 0.0)


def between(low: float, high: float, way: float) -> float:
    """A part of the way from low to high, both reached exactly; what lies outside is cut off."""
    return min(max(low * (1 - way) + high * way, low), high)


def whole(schedule: Schedule, name: str, at: When) -> int:
    """A step that must be whole by now."""
    if isinstance(at, float):
        raise SparsityError(
            f"{name}={at} of {type(schedule).__name__} is a part of the run, of which the length is not known here: "
            "call resolve(total_steps) first, and use the schedule that it gives"
        )
    return at


def resolved(schedule: Schedule, name: str, at: When, total_steps: int | None) -> int:
    """A step, or a part of the run, as a whole step."""
    if not isinstance(at, float):
        return at
    if total_steps is None:
        raise SparsityError(
            f"{name}={at} of {type(schedule).__name__} is a part of the run, and nobody knows how long this run is: "
            f"give whole steps, such as {name}=1000"
        )
    if total_steps < 1:
        raise SparsityError(f"{schedule} in a run of {total_steps} steps: a run has at least one")
    return round(at * (total_steps - 1))


def check_sparsity(schedule: Schedule, name: str, value: float) -> None:
    """Refuse what is no sparsity."""
    if not is_number(value) or not 0 <= value <= 1:
        raise SparsityError(
            f"{name}={value!r} of {type(schedule).__name__}: a sparsity must lie between 0 (dense) and 1 (all pruned)"
        )


def check_step(schedule: Schedule, name: str, at: When) -> None:
    """Refuse what is neither a step nor a part of the run."""
    if not is_number(at) or not (0 <= at <= 1 if isinstance(at, float) else at >= 0):
        raise SparsityError(
            f"{name}={at!r} of {type(schedule).__name__}: give an int from 0 on for an optimizer step, "
            "or a float between 0.0 and 1.0 for a part of the run"
        )


def check_rising(schedule: Schedule, name: str, steps: Sequence[When]) -> None:
    """Refuse steps that do not rise. A step and a part of the run can be compared once both are whole."""
    for low, high in pairwise(steps):
        if isinstance(low, float) is isinstance(high, float) and low >= high:
            raise SparsityError(
                f"{name} {low} of {type(schedule).__name__} stands before {high}: give each once, the earlier first"
            )


def is_number(value: object) -> bool:
    """Whether a value is an int or a float; a bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_begin(schedule: Schedule, steps: Mapping[str, When]) -> None:
    for (first, low), (last, high) in pairwise(steps.items()):
        if isinstance(low, float) is isinstance(high, float) and low > high:
            raise SparsityError(
                f"{type(schedule).__name__} from {first}={low} to {last}={high} ends before it begins: "
                f"lower {first} or raise {last}"
            )


def _check_levels(schedule: Schedule, levels: Mapping[str, float]) -> None:
    for (lower, low), (higher, high) in pairwise(levels.items()):
        if low > high:
            raise SparsityError(
                f"{lower}={low} of {type(schedule).__name__} is above {higher}={high}: exchange them; "
                "for targets that fall there are Steps, Cyclic and Join"
            )


def _check_every(every: int) -> None:
    if every < 1:
        raise SparsityError(f"an update every {every} steps: it must be every 1 step or more")
