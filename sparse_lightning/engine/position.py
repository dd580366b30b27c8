"""Position: how far a run is in its schedule, and which updates and observations are due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparse_lightning.engine.configuration import NEVER, Update
from sparse_lightning.engine.observation import Observation
from sparse_lightning.engine.shortfall import shortfall
from sparse_lightning.schedules import Schedule

AHEAD = 64
"""Steps whose updates a schedule computes at once: one by one it would find its code out of the caches."""


class Position:
    """The position of a run in its schedule.

    Args:
        schedule: in optimizer steps.
        update_every: the optimizer steps between two updates.
        total_steps: the planned length of the run; None if unknown.

    Attributes:
        end: the last step of the schedule with an update.
        step: the number of optimizer steps made.
        last_update: the record of the last update.
        is_owed: whether an update was due and could not be made.

    Example:
        >>> from sparse_lightning import Linear
        >>> position = Position(Linear(0.5, end=4), update_every=2, total_steps=8)
        >>> position.step = 2
        >>> position.target, position.is_due(), position.is_past_end
        (0.25, True, False)
        >>> position.record(churn=0.25)
        >>> position.last_update, position.is_due()
        (Update(step=2, target=0.25, churn=0.25), False)
    """

    def __init__(self, schedule: Schedule, update_every: int, total_steps: int | None) -> None:
        self.schedule, self._update_every, self._total_steps = schedule, update_every, total_steps
        self.end = schedule.span[1]
        self.step, self.last_update = 0, NEVER
        self._clear = range(0)
        self._observed = NEVER.step
        self.is_owed = self._joined_late = False

    @property
    def target(self) -> float:
        """The target sparsity at this step."""
        return self.schedule(self.step)

    @property
    def final_target(self) -> float:
        """The target sparsity at the end of the schedule."""
        return self.schedule(self.end)

    @property
    def is_past_end(self) -> bool:
        """Whether the last step of the schedule is made."""
        return self.step > self.end

    @property
    def starts_at_final(self) -> bool:
        """Whether no update was made, and the first has the final sparsity in a run that is pruned from its start."""
        is_constant = self.schedule(self.schedule.span[0]) == self.schedule.final
        return self.last_update == NEVER and is_constant and not self._joined_late

    def is_due(self) -> bool:
        """Whether this step has an update that is not made yet."""
        if self.last_update.step == self.step:
            return False  # the step after this update was skipped, as a GradScaler does: it is not repeated
        return self.is_owed or (self.step not in self._clear and self._has_update())

    def _has_update(self) -> bool:
        """Whether the schedule has an update at this step. `_clear` are steps that are known to have none."""
        ahead = range(self.step, self.step + AHEAD)
        found = next((i for i in ahead if self.schedule.is_update(i, self._update_every)), ahead.stop)
        self._clear = range(self.step, found)
        return found == self.step

    def is_observed(self, observation: Observation | None) -> bool:
        """Whether the criterion observes this step: until the last update, and not twice where a step is repeated."""
        is_new = self.step not in (self.last_update.step, self._observed)
        return observation is not None and is_new and observation.includes(self.step)

    def start_observation(self, observation: Observation | None) -> bool:
        """Note that this step is observed, or has an update; return whether state of earlier steps is too old."""
        is_anew = observation is not None and observation.starts_anew(self.step, self._observed)
        self._observed = self.step
        return is_anew

    def is_followed(self) -> bool:
        """Whether the next step has an update, too; the last one may have no forward pass before it."""
        return self._has_update_in([self.step + 1])

    def record(self, churn: float, target: float | None = None) -> None:
        """Note an update at this step.

        Args:
            churn: the fraction of all blocks that were pruned or grown.
            target: the sparsity of it, if it is not that of the schedule.
        """
        self.last_update = Update(self.step, self.target if target is None else target, churn)

    def seek(self, step: int) -> None:
        """Move to a step of the schedule; updates that are skipped become one."""
        self._joined_late = True
        self.is_owed = self.is_owed or self._has_update_in(range(self.step, step))
        self.step = step

    def _has_update_in(self, steps: Iterable[int]) -> bool:
        return any(self.schedule.is_update(i, self._update_every) for i in steps)

    def shortfall(self) -> str | None:
        """Return by how much the final target is missed, and why; None if it is reached."""
        return shortfall(self.schedule, self.last_update.target, self.step, self._total_steps, self.is_owed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: numbers only."""
        last = dict(vars(self.last_update))
        return {"step": self.step, "owed": self.is_owed, "observed": self._observed, "last_update": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, for a run that may have another length."""
        self.step, self.is_owed = int(state["step"]), bool(state["owed"])
        self.last_update = Update(**{name: state["last_update"][name] for name in vars(NEVER)})
        # A checkpoint of 0.1.0 has no step that was observed.
        self._observed = max(int(state.get("observed", NEVER.step)), self.last_update.step)
        # Another length means another schedule, whose last update may be in the past.
        self.is_owed = self.is_owed or self._has_update_in(range(self.last_update.step + 1, self.step))
        is_missing = self.is_past_end and self.last_update.target < self.schedule.final - 1e-9
        self.is_owed = self.is_owed or is_missing
