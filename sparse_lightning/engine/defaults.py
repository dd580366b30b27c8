"""What a Sparsifier chooses when a model is attached: the criterion and the rhythm that were not passed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparse_lightning.criteria import AverageTaylor, Magnitude, Wanda
from sparse_lightning.engine.configuration import Configuration, ResolvedConfiguration
from sparse_lightning.engine.observation import Observation
from sparse_lightning.flow import Criterion
from sparse_lightning.flow.input_norms import Layer
from sparse_lightning.patterns import Attachment
from sparse_lightning.schedules import Constant, OneShot, Schedule, Steps
from sparse_lightning.schedules.schedule import UNBOUNDED

UPDATES = 30
"""About as many updates are made over a schedule by default."""

HANDFUL = 5
"""With fewer updates than this, a schedule is hardly gradual."""

UPDATE_EVERY_OF_0_1_0 = 100


def resolved(
    configuration: Configuration, schedule: Schedule, found: Sequence[Attachment], model: nn.Module
) -> ResolvedConfiguration:
    """Return a configuration for one model: with a criterion and a rhythm, and its schedule in optimizer steps."""
    chosen = {
        "schedule": schedule,
        "criterion": configuration.criterion or default_criterion(found, model),
        "update_every": configuration.update_every or default_update_every(schedule),
    }
    return ResolvedConfiguration(**{**vars(configuration), **chosen})


def default_criterion(found: Sequence[Attachment], model: nn.Module) -> Criterion:
    """Return the criterion that is used where none is passed, by the first rule that applies.

    1. All patterns are N:M: `Wanda` if every weight belongs to a layer whose inputs can be seen, else `Magnitude`.
    2. A parameter is frozen: `Magnitude`, which needs no gradients.
    3. Otherwise `AverageTaylor`.
    """
    params = [param for attachment in found for param in attachment.scope.unique_params()]
    if all(attachment.final is not None for attachment in found):
        return Wanda() if {id(param) for param in params} <= _with_inputs(model) else Magnitude()
    return AverageTaylor() if all(param.requires_grad for param in params) else Magnitude()


def _with_inputs(model: nn.Module) -> set[int]:
    """Return the ids of the parameters whose inputs `InputNorms` can observe."""
    # nn.MultiheadAttention reads the weight of such a layer without calling it.
    layers = [m for m in model.modules() if isinstance(m, Layer) and not isinstance(m, NonDynamicallyQuantizableLinear)]
    return {id(param) for layer in layers for param in layer.parameters(recurse=False)}


def default_update_every(schedule: Schedule) -> int:
    """Return the steps between two updates, so that some 30 are made over the schedule.

    Args:
        schedule: in optimizer steps.

    Example:
        >>> from sparse_lightning.schedules import Cubic
        >>> default_update_every(Cubic(0.9).resolve(2001)), default_update_every(Cubic(0.9).resolve(10))
        (40, 1)
    """
    begin, end = schedule.span
    return UPDATE_EVERY_OF_0_1_0 if end >= UNBOUNDED else max(1, (end - begin) // UPDATES)


def resumed(configuration: Configuration, state: Mapping[str, Any]) -> Configuration:
    """Return a configuration with the defaults that a saved state was made with; those of 0.1.0 are not in its state.

    Args:
        configuration: as it was passed to the `Sparsifier`.
        state: from `Engine.state_dict`, or empty.
    """
    if not state:
        return configuration
    known: dict[str, type[Criterion]] = {kind.__name__: kind for kind in (AverageTaylor, Magnitude, Wanda)}
    kind = known.get(state.get("criterion", "Magnitude"))
    every = None if "criterion" in state else UPDATE_EVERY_OF_0_1_0
    return replace(
        configuration,
        criterion=configuration.criterion or (kind() if kind else None),
        update_every=configuration.update_every or every,
    )


def warn_of_rhythm(configuration: ResolvedConfiguration, total_steps: int | None) -> None:
    """Warn if a schedule has few updates, or if nothing is trained after the update that prunes the last blocks.

    Runs of fewer than 30 steps, which try things out, do not warn.
    """
    for problem in _problems(configuration.schedule, configuration.update_every, total_steps):
        warnings.warn(problem, stacklevel=2)


def _problems(schedule: Schedule, every: int, total_steps: int | None) -> Iterable[str]:
    begin, end = schedule.span
    name, updates = type(schedule).__name__, 1 - (begin - end) // every
    is_gradual = not isinstance(schedule, Constant | OneShot | Steps)
    is_long = (end - begin if total_steps is None else total_steps) >= UPDATES
    if is_gradual and updates < HANDFUL and is_long:
        yield (
            f"{name} has {updates} updates from step {begin} to {end}, one every {every} steps, and prunes much at "
            f"each: {_more_updates(schedule)}"
        )
    before = begin + (end - 1 - begin) // every * every
    is_late = total_steps is not None and UPDATES <= total_steps <= end + 1
    if is_late and schedule(end) > (schedule(before) if before >= begin else 0.0):
        yield (
            f"{name} makes its last update at step {end}, and the run ends after {total_steps} steps: what is kept is "
            "not trained after it. End the schedule earlier, such as end=0.7, or train for more steps"
        )


def _more_updates(schedule: Schedule) -> str:
    """Return how a schedule gets more updates: by its rhythm, or if it has few steps by a later end."""
    begin, end = schedule.span
    if end - begin >= UPDATES:
        return f"pass update_every={default_update_every(schedule)}, or None for about {UPDATES} updates"
    return (
        "end it later, such as end=0.7; integers are optimizer steps, so that end=1 is step 1, not the end of the run"
    )


def in_force(configuration: ResolvedConfiguration, observation: Observation | None) -> str:
    """Return a line with the method, criterion and rhythm that are in force.

    Args:
        configuration: of the engine.
        observation: the steps that are observed; None where the criterion runs at updates only.
    """
    method, criterion = type(configuration.method).__name__, type(configuration.criterion).__name__
    observed = "" if observation is None else f"{observation}, "
    begin, end = configuration.schedule.span
    until = " on" if end >= UNBOUNDED else f" to {end}"
    every = f"masks updated every {_steps(configuration.update_every)} from step {begin}{until}"
    return f"{method} by {criterion}: {observed}{every}"


def _steps(n: int) -> str:
    return "step" if n == 1 else f"{n} steps"
