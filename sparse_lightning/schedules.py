"""The schedules that ship; see `Schedule` for what they have in common, and for how steps are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, cast

from sparse_lightning.errors import SparsityError
from sparse_lightning.join import Join as Join
from sparse_lightning.schedule import Ramp as Ramp
from sparse_lightning.schedule import Schedule as Schedule
from sparse_lightning.schedule import When as When
from sparse_lightning.schedule import between, check_rising, check_sparsity, check_step, is_number, resolved, whole


@dataclass(frozen=True)
class Constant(Schedule):
    """One target from `begin` on: `final`; 0 before.

    Args:
        final: the target.
        begin: the first step with updates.
        end: the last step with updates.

    Example:
        >>> schedule = Constant(0.5, begin=10, end=20)
        >>> [schedule(step) for step in (9, 10, 20, 21)]
        [0.0, 0.5, 0.5, 0.5]
    """

    final: float
    begin: When = 0
    end: When = 1.0

    def __call__(self, step: int) -> float:
        """The target sparsity at a step."""
        return self.final if step >= self.span[0] else 0.0


@dataclass(frozen=True)
class OneShot(Schedule):
    """All at once, in one update: 0 before the step `at`, then `final`.

    Args:
        final: the target.
        at: the only step with an update.

    Example:
        >>> schedule = OneShot(0.5, at=10)
        >>> [schedule(step) for step in (9, 10, 11)], schedule.span
        ([0.0, 0.5, 0.5], (10, 10))
    """

    steps: ClassVar[tuple[str, ...]] = ("at",)

    final: float
    at: When = 0

    def __call__(self, step: int) -> float:
        """The target sparsity at a step."""
        return self.final if step >= self.span[0] else 0.0


@dataclass(frozen=True)
class Linear(Ramp):
    """Rises by the same amount at each step: `rise(p) = p`.

    Args:
        final: the target at `end` and after.
        begin: the first step with updates.
        end: the last step with updates.
        initial: the target at `begin` and before.

    Example:
        >>> schedule = Linear(0.8, begin=10, end=20)
        >>> [schedule(step) for step in (9, 10, 15, 20, 21)]
        [0.0, 0.0, 0.4, 0.8, 0.8]
    """

    def rise(self, p: float) -> float:
        """As far as the way."""
        return p


@dataclass(frozen=True)
class Cubic(Ramp):
    """Rises fast at first, while much is redundant: `rise(p) = 1 − (1 − p)³` (Zhu and Gupta, 2017).

    Args:
        final: the target at `end` and after.
        begin: the first step with updates.
        end: the last step with updates.
        initial: the target at `begin` and before.

    Example:
        >>> schedule = Cubic(0.8, begin=10, end=20)
        >>> [schedule(step) for step in (9, 10, 15, 20, 21)]
        [0.0, 0.0, 0.7000000000000001, 0.8, 0.8]
    """

    def rise(self, p: float) -> float:
        """Fast, then slow."""
        return 1 - (1 - p) ** 3


@dataclass(frozen=True)
class Cosine(Ramp):
    """Rises slowly at both ends: `rise(p) = (1 − cos(π p)) / 2`.

    Args:
        final: the target at `end` and after.
        begin: the first step with updates.
        end: the last step with updates.
        initial: the target at `begin` and before.

    Example:
        >>> schedule = Cosine(0.8, begin=10, end=20)
        >>> [round(schedule(step), 3) for step in (10, 11, 15, 19, 20)]
        [0.0, 0.02, 0.4, 0.78, 0.8]
    """

    def rise(self, p: float) -> float:
        """Half a wave."""
        return (1 - math.cos(math.pi * p)) / 2


@dataclass(frozen=True)
class Exponential(Ramp):
    """Comes closer by the same share at each step: `rise(p) = (1 − e^(−rate · p)) / (1 − e^(−rate))`.

    Args:
        final: the target at `end` and after.
        begin: the first step with updates.
        end: the last step with updates.
        initial: the target at `begin` and before.
        rate: how steep it begins; close to 0 it is `Linear`.

    Example:
        >>> schedule = Exponential(0.8, begin=10, end=20, rate=5.0)
        >>> [round(schedule(step), 3) for step in (10, 11, 15, 19, 20)]
        [0.0, 0.317, 0.739, 0.796, 0.8]
    """

    rate: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.rate) or not 0 < self.rate < math.inf:
            raise SparsityError(f"rate={self.rate!r} of Exponential: give a number above 0, such as 5.0")

    def rise(self, p: float) -> float:
        """The normalised exponential."""
        return math.expm1(-self.rate * p) / math.expm1(-self.rate)


@dataclass(frozen=True)
class Steps(Schedule):
    """Jumps: the sparsity of the last milestone that was reached; 0 before the first.

    Each milestone is an update, beside those at each `every` steps from the first to the last.

    Args:
        milestones: a mapping from step to sparsity, or pairs of the two, in the order of their steps. Where two parts
            of a short run fall on one step, the later holds.

    Example:
        >>> schedule = Steps({10: 0.5, 20: 0.8})
        >>> [schedule(step) for step in (9, 10, 19, 20)]
        [0.0, 0.5, 0.5, 0.8]
    """

    steps: ClassVar[tuple[str, ...]] = ()
    levels: ClassVar[tuple[str, ...]] = ()

    milestones: Mapping[When, float] | Sequence[tuple[When, float]]

    def __post_init__(self) -> None:
        given = self.milestones.items() if isinstance(self.milestones, Mapping) else self.milestones
        object.__setattr__(self, "milestones", tuple(_milestone(pair) for pair in given))
        if not self._pairs:
            raise SparsityError("Steps without a milestone: give at least one, such as {100: 0.5}")
        for at, sparsity in self._pairs:
            check_step(self, "milestone", at)
            check_sparsity(self, f"sparsity at {at}", sparsity)
        check_rising(self, "milestone", [at for at, _ in self._pairs])

    @property
    def _pairs(self) -> tuple[tuple[When, float], ...]:
        return cast(tuple[tuple[When, float], ...], self.milestones)

    @property
    def final(self) -> float:
        """The highest target that it reaches."""
        return max(sparsity for _, sparsity in self._pairs)

    @property
    def span(self) -> tuple[int, int]:
        """The first milestone and the last."""
        steps = [whole(self, "milestone", at) for at, _ in self._pairs]
        return steps[0], steps[-1]

    def __call__(self, step: int) -> float:
        """The target sparsity at a step."""
        reached = [sparsity for at, sparsity in self._pairs if whole(self, "milestone", at) <= step]
        return reached[-1] if reached else 0.0

    def is_update(self, step: int, every: int = 1) -> bool:
        """Whether masks are updated at a step: at milestones, and each `every` steps between first and last."""
        return super().is_update(step, every) or any(step == at for at, _ in self._pairs)

    def resolve(self, total_steps: int | None) -> Schedule:
        """The schedule in whole steps; see `Schedule.resolve`."""
        found = [(resolved(self, "milestone", at, total_steps), sparsity) for at, sparsity in self._pairs]
        check_rising(self, "milestone", [at for at, _ in groupby(at for at, _ in found)])
        return Steps(dict(found))


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Goes up and down in waves: `low + (high − low) · (1 − cos(2π k / period)) / 2`, k steps after `begin`.

    It is `low` at `begin` and before. After the last top that comes before `end` it stays at `high`.

    Args:
        low: the lowest target.
        high: the highest target, and the last.
        period: how many steps there are from one `low` to the next.
        begin: the first step with updates.
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
    begin: When = 0
    end: When = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step(self, "period", self.period)
        if not self.period:
            raise SparsityError(f"period={self.period} of Cyclic: a wave takes at least one step")

    @property
    def final(self) -> float:
        """The highest target that it reaches."""
        return self.high

    def __call__(self, step: int) -> float:
        """The target sparsity at a step."""
        (begin, end), period = self.span, whole(self, "period", self.period)
        waves = (2 * (end - begin) + period) // (2 * period)
        last_top = begin + (waves - 0.5) * period if waves else end
        if step >= last_top:
            return self.high
        part = max(step - begin, 0) % period / period
        return between(self.low, self.high, (1 - math.cos(2 * math.pi * part)) / 2)

    def resolve(self, total_steps: int | None) -> Schedule:
        """The schedule in whole steps; see `Schedule.resolve`."""
        period = max(1, resolved(self, "period", self.period, total_steps))
        return Schedule.resolve(replace(self, period=period), total_steps)


def _milestone(pair: Any) -> tuple[When, float]:
    try:
        at, sparsity = pair
    except (TypeError, ValueError):
        raise SparsityError(f"milestone {pair!r} of Steps: give a pair of a step and a sparsity") from None
    return at, sparsity
