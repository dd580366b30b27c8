"""Footprint: parameters, bytes and time of a model, dense beside sparse."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.compaction import Compacted, compacted
from sparse_lightning.compaction.compact import STAGES as OF_COMPACTION
from sparse_lightning.errors import CouplingError, NothingToRemoveWarning, SparseLightningError
from sparse_lightning.export.state import tensors_of
from sparse_lightning.graph.inputs import ExampleInputs
from sparse_lightning.progress import stage, stages
from sparse_lightning.report.outcome import Outcome

ROUNDS, LONG = 51, 0.5
"""Interleaved rounds of timing, and the seconds after which no more than two are made."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Args:
        parameters: elements of parameters and buffers that are stored.
        bytes: of the file.
        seconds: of one forward pass on the example inputs; None if it has to be made dense for that, or does not run.
    """

    parameters: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class FamilyRow:
    """What is left of a family of units: those that can only be removed together with their slices elsewhere.

    Args:
        name: the module that has all slices, and what the units are.
        units: how many there were.
        left: how many are not zero, or have to stay.
    """

    name: str
    units: int
    left: int


@dataclass(frozen=True)
class Footprint:
    """The costs of the dense model, and of what can be exported of the sparse one.

    Args:
        dense: the model with all zeros.
        sparse: the compacted model, or the model of which only the kept blocks are stored.
        form: "compact" or "blocks": the option of `export` that writes it.
        families: of the model, where whole units of it are zero.
    """

    dense: Cost
    sparse: Cost
    form: str
    families: tuple[FamilyRow, ...] = ()

    def rows(self) -> list[list[str]]:
        """Return the lines of the results table: a name, dense, sparse."""
        pair = (self.dense, self.sparse)
        return [
            ["parameters", *(f"{cost.parameters:,}" for cost in pair)],
            ["bytes if exported", *(f"{cost.bytes:,}" for cost in pair)],
            ["ms per forward", *(number_or_dash(cost.seconds) for cost in pair)],
            ["to export", "export=weights", f"export={self.form}"],
        ]

    def numbers(self) -> dict[str, Any]:
        """Return what `results.json` has of it."""
        costs = {"dense": self.dense, "sparse": self.sparse}
        found: dict[str, Any] = {
            kind: {
                "parameters": cost.parameters,
                "bytes": cost.bytes,
                "ms": None if cost.seconds is None else cost.seconds * 1000,
            }
            for kind, cost in costs.items()
        }
        return {**found, "export": self.form}


def number_or_dash(seconds: float | None) -> str:
    """Return seconds in milliseconds; a dash for None."""
    return "-" if seconds is None else f"{seconds * 1000:.3f}"


def footprint(model: nn.Module, outcome: Outcome) -> Footprint | None:
    """Measure a pruned model on its example inputs; None if it has none, or is sharded.

    Args:
        model: the pruned model; it is not modified.
        outcome: of its run.
    """
    try:
        inputs = ExampleInputs.of(model, None).without_cache(model)
    except CouplingError:
        return None
    if any(is_sharded(parameter) for parameter in model.parameters()):
        return None
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    removes = _has_zero_slices(model, outcome)
    with stages("measure", 1 + OF_COMPACTION * removes, model):
        small = _compacted(model) if removes else None
        stage("timing forward passes")
        times = _measured([model] if small is None else [model, small.model], inputs.on(device))
    dense = Cost(*_stored(model), times[0])
    if small is None:
        return Footprint(dense, _blocks(dense, model, outcome), "blocks")
    left = {name: len(found.kept) for name, found in small.units.items()}
    families = tuple(FamilyRow(name, units, left.get(name, units)) for name, units in small.families.items())
    return Footprint(dense, Cost(*_stored(small.model), times[1]), "compact", families)


def _has_zero_slices(model: nn.Module, outcome: Outcome) -> bool:
    """Whether a pruned parameter is zero in a whole slice: without one there is no unit to remove."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for row in outcome.rows:
        kept = named[row.parameter].detach() != 0 if row.parameter in named else torch.ones(1, dtype=torch.bool)
        for dim in range(kept.ndim):
            if not kept.transpose(0, dim).flatten(1).any(1).all() if kept.ndim > 1 else not kept.all():
                return True
    return False


def _compacted(model: nn.Module) -> Compacted | None:
    """Return the compacted model with its families; None, with the reason in the log, if it cannot be compacted.

    The results of a run are written whatever the code of its model raises here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingToRemoveWarning)
        try:
            return compacted(model)
        except (SparseLightningError, NothingToRemoveWarning) as error:
            _log.info("the time of the compacted model is not measured: %s", error)
            return None
        except Exception as error:
            _log.warning("the compacted model is left out of the results: %s: %s", type(error).__name__, error)
            return None


def _stored(model: nn.Module) -> tuple[int, int]:
    """Return the elements and bytes of the tensors of a model, tied ones once."""
    tensors = {id(tensor): tensor for tensor in tensors_of(model).values()}.values()
    return sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)


def _blocks(dense: Cost, model: nn.Module, outcome: Outcome) -> Cost:
    """Return what the kept blocks and a bit for each block need."""
    named = dict(model.named_parameters(remove_duplicate=False))
    sizes = [named[row.parameter].element_size() for row in outcome.rows if row.parameter in named]
    bits = sum(-(-mask.numel() // 8) for mask in outcome.masks.values())
    saved = outcome.zero * min(sizes, default=0)
    return Cost(dense.parameters - outcome.zero, dense.bytes - saved + bits, None)


def _measured(models: Sequence[nn.Module], inputs: ExampleInputs) -> Sequence[float | None]:
    """Return what `_seconds` does; None for each model, with the reason in the log, if one of them cannot be called."""
    try:
        return _seconds(models, inputs)
    except Exception as error:  # the model's own code raises errors of many kinds
        name, kind = type(models[0]).__name__, type(error).__name__
        _log.warning("%s is not timed, as it does not run on its example inputs: %s: %s", name, kind, error)
        return [None] * len(models)


def _seconds(models: Sequence[nn.Module], inputs: ExampleInputs) -> list[float]:
    """Return the median seconds of a forward pass of each model, in interleaved rounds."""
    taken: list[list[float]] = [[] for _ in models]
    begin = time.perf_counter()
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_evaluating(model))
        for round_ in range(ROUNDS + 1):
            if round_ > 2 and time.perf_counter() - begin > LONG:
                break
            for model, own in zip(models, taken, strict=True):
                own.append(_forward_seconds(model, inputs))
    return [statistics.median(own[1:]) for own in taken]


def _forward_seconds(model: nn.Module, inputs: ExampleInputs) -> float:
    start = time.perf_counter()
    model(*inputs.args, **inputs.kwargs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode, without gradients and with its own random numbers; its modes are restored."""
    modes = {module: module.training for module in model.modules()}
    devices = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
