"""The built-in schedules. A step is an int, or a float that is a fraction of the run; see `Schedule`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, cast

from typing_extensions import TypeAliasType

from sparse_lightning.errors import SparsityError
from sparse_lightning.schedules.schedule import (
    UNBOUNDED,
    Ramp,
    Schedule,
    When,
    check_increasing,
    check_sparsity,
    check_step,
    interpolate,
    is_number,
    known_step,
    set_begin,
    to_step,
)

Milestones = TypeAliasType("Milestones", Mapping[When, float] | Sequence[tuple[When, float]])
"""Steps and their sparsity levels; a named type for OmegaConf, as `Globs`."""


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant target sparsity from `begin` on; 0 before.

    Args:
        final: the target sparsity.
        begin: the first step with updates.
        end: the last step with updates. If it is a fraction of the run and total_steps is unknown, updates never end.

    Example:
        >>> schedule = Constant(0.5, begin=10, end=20)
        >>> [schedule(step) for step in (9, 10, 20, 21)]
        [0.0, 0.5, 0.5, 0.5]
    """

    final: float
    begin: When = 0
    end: When = 0.75

    def __call__(self, step: int) -> float:
        """Return the target sparsity at a step."""
        return self.final if step >= self.span[0] else 0.0

    def resolve(self, total_steps: int | None) -> Schedule:
        """Return the schedule in optimizer steps; its end needs no total_steps."""
        is_unknown = total_steps is None and isinstance(self.end, float)
        return Schedule.resolve(replace(self, end=UNBOUNDED) if is_unknown else self, total_steps)


@dataclass(frozen=True)
class OneShot(Schedule):
    """One-shot pruning in a single update: 0 before the step `at`, then `final`.

    Args:
        final: the target sparsity.
        at: the only step with an update.

    Example:
        >>> schedule = OneShot(0.5, at=10)
        >>> [schedule(step) for step in (9, 10, 11)], schedule.span
        ([0.0, 0.5, 0.5], (10, 10))
    """

    steps: ClassVar[tuple[str, ...]] = ("at",)

    final: float
    at: When = 0.5

    def __call__(self, step: int) -> float:
        """Return the target sparsity at a step."""
        return self.final if step >= self.span[0] else 0.0


@dataclass(frozen=True)
class Linear(Ramp):
    """Increases by the same amount at each step: `rise(p) = p`.

    Args:
        final: the target sparsity at `end` and after.
        begin: the first step with updates; the default is 0.1, or step 0 if `end` is an optimizer step.
        end: the last step with updates.
        initial: the target sparsity at `begin` and before.

    Example:
        >>> schedule = Linear(0.8, begin=10, end=20)
        >>> [schedule(step) for step in (9, 10, 15, 20, 21)]
        [0.0, 0.0, 0.4, 0.8, 0.8]
    """

    def rise(self, p: float) -> float:
        """Return p."""
        return p


@dataclass(frozen=True)
class Cubic(Ramp):
    """Increases fast at first, while many weights are redundant: `rise(p) = 1 − (1 − p)³` (Zhu and Gupta, 2017).

    Args:
        final: the target sparsity at `end` and after.
        begin: the first step with updates; the default is 0.1, or step 0 if `end` is an optimizer step.
        end: the last step with updates.
        initial: the target sparsity at `begin` and before.

    Example:
        >>> schedule = Cubic(0.8, begin=10, end=20)
        >>> [schedule(step) for step in (9, 10, 15, 20, 21)]
        [0.0, 0.0, 0.7000000000000001, 0.8, 0.8]
    """

    def rise(self, p: float) -> float:
        """Return 1 − (1 − p)³."""
        return 1 - (1 - p) ** 3


@dataclass(frozen=True)
class Cosine(Ramp):
    """Increases slowly at both ends: `rise(p) = (1 − cos(π p)) / 2`.

    Args:
        final: the target sparsity at `end` and after.
        begin: the first step with updates; the default is 0.1, or step 0 if `end` is an optimizer step.
        end: the last step with updates.
        initial: the target sparsity at `begin` and before.

    Example:
        >>> schedule = Cosine(0.8, begin=10, end=20)
        >>> [round(schedule(step), 3) for step in (10, 11, 15, 19, 20)]
        [0.0, 0.02, 0.4, 0.78, 0.8]
    """

    def rise(self, p: float) -> float:
        """Return (1 − cos(π p)) / 2."""
        return (1 - math.cos(math.pi * p)) / 2


@dataclass(frozen=True)
class Exponential(Ramp):
    """Closes the same fraction of the remaining gap at each step: `rise(p) = (1 − e^(−rate · p)) / (1 − e^(−rate))`.

    Args:
        final: the target sparsity at `end` and after.
        begin: the first step with updates; the default is 0.1, or step 0 if `end` is an optimizer step.
        end: the last step with updates.
        initial: the target sparsity at `begin` and before.
        rate: how steep the increase is at first; close to 0 it is `Linear`.

    Example:
        >>> schedule = Exponential(0.8, begin=10, end=20, rate=5.0)
        >>> [round(schedule(step), 3) for step in (10, 11, 15, 19, 20)]
        [0.0, 0.317, 0.739, 0.796, 0.8]
    """

    rate: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.rate) or not 0 < self.rate < math.inf:
            raise SparsityError(f"rate={self.rate!r} of Exponential is not a positive number: pass one, such as 5.0")

    def rise(self, p: float) -> float:
        """Return the normalized exponential."""
        return math.expm1(-self.rate * p) / math.expm1(-self.rate)


@dataclass(frozen=True)
class Steps(Schedule):
    """Piecewise constant: the sparsity of the last milestone that was reached; 0 before the first.

    Masks are updated at each milestone, and every `every` steps from the first to the last.

    Args:
        milestones: a mapping from step to sparsity, or pairs of step and sparsity, in ascending order of steps. If
            two fractions of a short run become the same step, the later one holds.

    Example:
        >>> schedule = Steps({10: 0.5, 20: 0.8})
        >>> [schedule(step) for step in (9, 10, 19, 20)]
        [0.0, 0.5, 0.5, 0.8]
    """

    steps: ClassVar[tuple[str, ...]] = ()
    levels: ClassVar[tuple[str, ...]] = ()

    milestones: Milestones

    def __post_init__(self) -> None:
        given = self.milestones.items() if isinstance(self.milestones, Mapping) else self.milestones
        object.__setattr__(self, "milestones", tuple(_milestone(pair) for pair in given))
        if not self._pairs:
            raise SparsityError("Steps has no milestones: pass at least one, such as {100: 0.5}")
        for at, sparsity in self._pairs:
            check_step(self, "milestone", at)
            check_sparsity(self, f"sparsity at {at}", sparsity)
        check_increasing(self, "milestone", [at for at, _ in self._pairs])

    @property
    def _pairs(self) -> tuple[tuple[When, float], ...]:
        return cast(tuple[tuple[When, float], ...], self.milestones)

    @property
    def final(self) -> float:
        """The highest target sparsity."""
        return max(sparsity for _, sparsity in self._pairs)

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last milestone."""
        steps = [known_step(self, "milestone", at) for at, _ in self._pairs]
        return steps[0], steps[-1]

    def __call__(self, step: int) -> float:
        """Return the target sparsity at a step."""
        reached = [sparsity for at, sparsity in self._pairs if known_step(self, "milestone", at) <= step]
        return reached[-1] if reached else 0.0

    def is_update(self, step: int, every: int = 1) -> bool:
        """Whether masks are updated at a step: at milestones, and every `every` steps from the first to the last."""
        return super().is_update(step, every) or any(step == at for at, _ in self._pairs)

    def resolve(self, total_steps: int | None) -> Schedule:
        """Return the schedule in optimizer steps; see `Schedule.resolve`."""
        found = [(to_step(self, "milestone", at, total_steps), sparsity) for at, sparsity in self._pairs]
        check_increasing(self, "milestone", [at for at, _ in groupby(at for at, _ in found)])
        return Steps(dict(found))


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Oscillates between two levels: `low + (high − low) · (1 − cos(2π k / period)) / 2`, k steps after `begin`.

    The target is `low` up to `begin`. From the last maximum before `end` on, it stays at `high`.

    Args:
        low: the lowest target sparsity.
        high: the highest and the final target sparsity.
        period: the steps from one minimum to the next.
        begin: the first step with updates; the default is 0.1, or step 0 if `end` is an optimizer step.
        end: the last step with updates.

    Example:
        >>> schedule = Cyclic(0.2, 0.6, period=10, begin=0, end=20)
        >>> [round(schedule(step), 3) for step in (0, 1, 5, 9, 10, 14, 15, 20, 21)]
        [0.2, 0.238, 0.6, 0.238, 0.2, 0.562, 0.6, 0.6, 0.6]
    """

    levels: ClassVar[tuple[str, ...]] = ("low", "high")

    low: float
    high: float
    period: When
    begin: When | None = None
    end: When = 0.9

    def __post_init__(self) -> None:
        set_begin(self, self.begin, self.end)
        super().__post_init__()
        check_step(self, "period", self.period)
        if not self.period:
            raise SparsityError(f"period={self.period} of Cyclic is too short: it must be at least one step")

    @property
    def final(self) -> float:
        """The highest target sparsity."""
        return self.high

    def __call__(self, step: int) -> float:
        """Return the target sparsity at a step."""
        (begin, end), period = self.span, known_step(self, "period", self.period)
        waves = (2 * (end - begin) + period) // (2 * period)
        last_maximum = begin + (waves - 0.5) * period if waves else end
        if step >= last_maximum:
            return self.high
        phase = max(step - begin, 0) % period / period
        return interpolate(self.low, self.high, (1 - math.cos(2 * math.pi * phase)) / 2)

    def resolve(self, total_steps: int | None) -> Schedule:
        """Return the schedule in optimizer steps; see `Schedule.resolve`."""
        period = max(1, to_step(self, "period", self.period, total_steps))
        return Schedule.resolve(replace(self, period=period), total_steps)


def _milestone(pair: Any) -> tuple[When, float]:
    try:
        at, sparsity = pair
    except (TypeError, ValueError):
        raise SparsityError(f"milestone {pair!r} of Steps is not a pair: pass a step and a sparsity") from None
    return at, sparsity
