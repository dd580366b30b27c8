"""Plan: what is pruned, how much of it, and when; the same for every library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sparse_lightning import Cubic

BEGIN, END, UPDATES = 0.1, 0.7, 30
"""The cubic ramp of our defaults, as fractions of a run, and its number of updates."""


@dataclass(frozen=True)
class Plan:
    """A run.

    Args:
        pattern: "1×1", "4×4" and so on, "2:4", or "units": neurons of hidden layers with all that reads them.
        sparsity: the final one.
        steps: optimizer steps of the run.
        rhythm: "cubic"; "once"; "between": once, and a later update would follow, for which a criterion observes
            each step; or "always": an update at each step, to time it.
        first: the step of the update that is made once.
    """

    pattern: str
    sparsity: float
    steps: int
    rhythm: str = "cubic"
    first: int = 0

    @property
    def block(self) -> tuple[int, int]:
        """The shape of a block; that of a group for 2:4."""
        return (1, 4) if self.pattern == "2:4" else tuple(map(int, self.pattern.split("×")))  # type: ignore[return-value]

    @property
    def every(self) -> int:
        """Steps between two updates."""
        return max(1, round((END - BEGIN) * self.steps / UPDATES))

    def target(self, step: int) -> float | None:
        """The sparsity of the update that is due at a step; None for none."""
        if self.rhythm != "cubic":
            return self.sparsity if self.rhythm == "always" or step == self.first else None
        return self._ramp.get(step)

    @cached_property
    def _ramp(self) -> dict[int, float]:
        """The sparsity of each update of a ramp: computed once, so that no step is charged with it."""
        ramp = Cubic(self.sparsity, BEGIN, END).resolve(self.steps)
        return {step: ramp(step) for step in range(self.steps) if ramp.is_update(step, self.every)}
