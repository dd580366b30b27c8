"""Observation: the steps at which a criterion that keeps state sees the gradients, between two updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_lightning.engine.configuration import ResolvedConfiguration
from sparse_lightning.engine.near_updates import NearUpdates
from sparse_lightning.errors import FlowError
from sparse_lightning.flow import Criterion


class Observation:
    """Which steps are observed: until the last update, at a rhythm that is passed, or as many as are needed.

    Args:
        configuration: has the rhythm of updates, and that of observations if one was passed.
        keeping: the criteria with state.

    Example:
        >>> from sparse_lightning import AverageTaylor, Cubic, Movement, Sparsifier
        >>> from sparse_lightning.engine.configuration import ResolvedConfiguration
        >>> plain = Sparsifier([], Cubic(0.9, begin=100, end=200), AverageTaylor(), update_every=50).configuration
        >>> observation = Observation(ResolvedConfiguration(**vars(plain)), [AverageTaylor()])
        >>> [step for step in range(300) if observation.includes(step)][:10]  # and 150 is an update
        [91, 92, 93, 94, 95, 96, 97, 98, 99, 141]
        >>> str(observation)
        'observed in the 10 steps up to each update'
        >>> str(Observation(ResolvedConfiguration(**vars(plain)), [Movement()]))
        'observed every step'
    """

    def __init__(self, configuration: ResolvedConfiguration, keeping: Sequence[Criterion]) -> None:
        self._end, self._update_every = configuration.schedule.span[1], configuration.update_every
        self._every = configuration.observe_every or 1
        windows = [criterion.observed_steps for criterion in keeping if criterion.observed_steps is not None]
        is_enough = configuration.observe_every is None and len(windows) == len(keeping)
        self._window = max(map(_checked, windows)) if is_enough else None
        self._near = NearUpdates(configuration, (self._window or 1) - 1)

    def includes(self, step: int) -> bool:
        """Whether a step is observed; updates themselves always are."""
        if step % self._every or step >= self._end:
            return False
        return self._window is None or self._near.includes(step + 1)

    def starts_anew(self, step: int, last: int) -> bool:
        """Whether state of earlier steps is forgotten before a step: some were passed over since the last observed one.

        Args:
            step: the one that is observed, or has an update.
            last: the last step before it that was.
        """
        return self._window is not None and step > last + 1

    def __str__(self) -> str:
        if self._window is not None and self._window < self._update_every:
            return f"observed in the {self._window} steps up to each update"
        return "observed every step" if self._every == 1 else f"observed every {self._every} steps"


def _checked(steps: Any) -> int:
    """Return the `observed_steps` of a criterion; raise an error if it is not a number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise FlowError(f"observed_steps={steps!r} of a criterion is not a number of steps: set 1 or more, or None")
    return steps
