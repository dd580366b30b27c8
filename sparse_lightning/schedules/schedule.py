"""Schedule: the base class of sparsity schedules, from optimizer step to target sparsity level.

Steps count from 0: a run of T steps has the steps 0 … T − 1. Wherever a schedule takes a step, an int is an optimizer
step, and a float is a fraction of the run: 0.0 is step 0, and 1.0 is step T − 1.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from sparse_lightning.errors import SparsityError

When = int | float
"""A step: an int is an optimizer step, a float between 0 and 1 is a fraction of the run."""

UNBOUNDED = sys.maxsize
"""The last step with updates of a schedule that needs no end, where total_steps is unknown."""


@dataclass(frozen=True)
class Schedule(ABC):
    """The target sparsity (1 − density) at each optimizer step, and the steps at which masks are updated.

    Subclasses are frozen dataclasses. `steps` lists the fields that are steps, from the first update to the last:
    they are validated, and `span` and `resolve` use them. `levels` lists the fields that are sparsity levels, in
    ascending order: they are validated.
    """

    steps: ClassVar[tuple[str, ...]] = ("begin", "end")
    levels: ClassVar[tuple[str, ...]] = ("final",)

    if TYPE_CHECKING:  # a property at run time would shadow the field that most subclasses have

        @property
        def final(self) -> float:
            """The highest target sparsity."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the target sparsity at a step."""

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
        first, last = (known_step(self, name, getattr(self, name)) for name in (self.steps[0], self.steps[-1]))
        return first, last

    def is_update(self, step: int, every: int = 1) -> bool:
        """Whether masks are updated at a step: every `every` steps from the start of the span, and at its end.

        It is called for steps ahead, and must return the same for a step at any time.
        """
        _check_every(every)
        begin, end = self.span
        return begin <= step <= end and ((step - begin) % every == 0 or step == end)

    def resolve(self, total_steps: int | None) -> Schedule:
        """Return the schedule in optimizer steps: a fraction f of the run becomes `round(f · (total_steps − 1))`.

        Args:
            total_steps: the optimizer steps of the run; None if unknown.

        Raises:
            SparsityError: if `total_steps` is needed and None, or the run is too short for the schedule.
        """
        # The end first: in an error for an unknown total_steps, it is the value to change.
        found = {name: to_step(self, name, getattr(self, name), total_steps) for name in reversed(self.steps)}
        try:
            return replace(self, **found)
        except SparsityError as error:
            raise SparsityError(f"{self} in a run of {total_steps} steps: {error}") from None


@dataclass(frozen=True)
class Ramp(Schedule):
    """Increases from `initial` at `begin` to `final` at `end`: `initial + (final − initial) · rise(p)`.

    p is the progress from `begin` (0) to `end` (1). The target is `initial` before `begin` and `final` after `end`.

    Args:
        final: the target sparsity at `end` and after.
        begin: the first step with updates; the default is 0.1, or step 0 if `end` is an optimizer step.
        end: the last step with updates.
        initial: the target sparsity at `begin` and before.
    """

    levels: ClassVar[tuple[str, ...]] = ("initial", "final")

    final: float
    begin: When | None = None
    end: When = 0.7
    initial: float = 0.0

    def __post_init__(self) -> None:
        set_begin(self, self.begin, self.end)
        super().__post_init__()

    @abstractmethod
    def rise(self, p: float) -> float:
        """Return the fraction of the increase that is complete at progress p; values outside [0, 1] are clamped."""

    def __call__(self, step: int) -> float:
        """Return the target sparsity at a step."""
        begin, end = self.span
        if step >= end:
            return self.final
        return interpolate(self.initial, self.final, self.rise((step - begin) / (end - begin)) if step > begin else 0.0)


def set_begin(schedule: Schedule, begin: When | None, end: When) -> None:
    """Set `begin` where it was not passed: to 0.1, or to step 0 if `end` is an optimizer step or not after 0.1.

    A schedule in optimizer steps then needs no total_steps.
    """
    if begin is None:
        object.__setattr__(schedule, "begin", 0.1 if isinstance(end, float) and end > 0.1 else 0)


def interpolate(low: float, high: float, fraction: float) -> float:
    """Return the value at a fraction of the way from low to high: exact at both ends, clamped outside."""
    return min(max(low * (1 - fraction) + high * fraction, low), high)


def known_step(schedule: Schedule, name: str, at: When) -> int:
    """Return a step that must already be an optimizer step; raise a SparsityError for a fraction of the run."""
    if isinstance(at, float):
        raise SparsityError(
            f"{name}={at} of {type(schedule).__name__} is a fraction of the run, but total_steps is unknown here: call "
            "resolve(total_steps) first, and use the schedule that it returns"
        )
    return at


def to_step(schedule: Schedule, name: str, at: When, total_steps: int | None) -> int:
    """Return an optimizer step, or a fraction of the run converted to one."""
    if not isinstance(at, float):
        return at
    if total_steps is None:
        raise SparsityError(
            f"{name}={at} of {type(schedule).__name__} is a fraction of the run, but total_steps is unknown: pass it, "
            f"set max_steps of the Trainer, or use optimizer steps, such as {name}=1000"
        )
    if total_steps < 1:
        raise SparsityError(f"{schedule} cannot be resolved with total_steps={total_steps}: it must be at least 1")
    return round(at * (total_steps - 1))


def check_sparsity(schedule: Schedule, name: str, value: float) -> None:
    """Raise a SparsityError unless a value is a sparsity level."""
    if not is_number(value) or not 0 <= value <= 1:
        raise SparsityError(
            f"{name}={value!r} of {type(schedule).__name__}: a sparsity must lie between 0 (dense) and 1 (all pruned)"
        )


def check_step(schedule: Schedule, name: str, at: When) -> None:
    """Raise a SparsityError unless a value is an optimizer step or a fraction of the run."""
    if not is_number(at) or not (0 <= at <= 1 if isinstance(at, float) else at >= 0):
        raise SparsityError(
            f"{name}={at!r} of {type(schedule).__name__} is not a step: pass an int ≥ 0 for an optimizer step, or a "
            "float between 0.0 and 1.0 for a fraction of the run"
        )


def check_increasing(schedule: Schedule, name: str, steps: Sequence[When]) -> None:
    """Raise a SparsityError unless steps increase; a step and a fraction are comparable only after `resolve`."""
    for low, high in pairwise(steps):
        if isinstance(low, float) is isinstance(high, float) and low >= high:
            raise SparsityError(
                f"{name} {low} of {type(schedule).__name__} comes before {high}: pass steps once, in ascending order"
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
                f"{lower}={low} of {type(schedule).__name__} is above {higher}={high}: swap them, or use Steps, Cyclic "
                "or Join for a sparsity that decreases"
            )


def _check_every(every: int) -> None:
    if every < 1:
        raise SparsityError(f"every={every} is not a number of steps between updates: it must be at least 1")
