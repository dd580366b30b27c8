"""Shortfall: by how much a run has missed the final target of its schedule, and why."""

from __future__ import annotations

from sparse_lightning.schedules import Schedule


def shortfall(schedule: Schedule, reached: float, step: int, total_steps: int | None, is_owed: bool) -> str | None:
    """Return the text of a warning if the last target is below that of the end of the schedule; None if it is not.

    Args:
        schedule: in optimizer steps.
        reached: the target of the last update.
        step: the number of optimizer steps made.
        total_steps: the planned length of the run; None if unknown.
        is_owed: whether the last update was postponed.

    Example:
        >>> from sparse_lightning import Linear
        >>> print(shortfall(Linear(0.75, end=90), reached=0.5, step=60, total_steps=60, is_owed=False))
        the run ended at a target sparsity of 0.5, 0.25 below the 0.75 of the schedule: Linear ends at step 90, ...
    """
    end = schedule.span[1]
    final = schedule(end)
    if reached >= final - 1e-9:
        return None
    planned = step if total_steps is None else total_steps
    if step >= end or is_owed:
        why = "its last update was postponed, since scores could not be computed: gradients were missing or not finite"
    elif end > planned:
        why = f"{type(schedule).__name__} ends at step {end}, beyond the run of {planned} steps. Use a smaller end"
    else:
        why = (
            f"it made {step} optimizer steps of the {planned} that were planned, and {type(schedule).__name__} ends at "
            f"step {end}. It stopped early, or gradient accumulation changed the number of steps: use a smaller end"
        )
    missing = f"{final - reached:.4g} below the {final:.4g} of the schedule"
    return f"the run ended at a target sparsity of {reached:.4g}, {missing}: {why}, or resume the run"
