"""NearUpdates: which steps have an update soon, so that what it needs is observed only then."""

from __future__ import annotations

from sparse_lightning.engine.configuration import ResolvedConfiguration


class NearUpdates:
    """Asks a schedule for updates within some steps.

    Args:
        configuration: has the schedule and the rhythm of its updates.
        steps: how many are looked at, the first one included.

    Example:
        >>> from sparse_lightning import Cubic, Magnitude, Sparsifier
        >>> plain = Sparsifier([], Cubic(0.9, begin=100, end=200), Magnitude(), update_every=50).configuration
        >>> near = NearUpdates(ResolvedConfiguration(**vars(plain)), steps=3)
        >>> [step for step in range(300) if near.includes(step)]
        [98, 99, 100, 148, 149, 150, 198, 199, 200]
    """

    def __init__(self, configuration: ResolvedConfiguration, steps: int) -> None:
        self._schedule, self._every, self._steps = configuration.schedule, configuration.update_every, steps
        self._clear = range(0)

    def includes(self, step: int) -> bool:
        """Whether a step, or one of the next ones, has an update.

        `_clear` are the steps that are known to have none, so that a run asks the schedule for each step once or twice.
        """
        if not self._clear.start <= step <= self._clear.stop:  # after an update, or a run that is resumed
            self._clear = range(step, step)
        at, end = self._clear.stop, step + self._steps
        while at < end and not self._schedule.is_update(at, self._every):
            at += 1
        self._clear = range(self._clear.start, at)
        return at < end
