"""Trace: the operations of a model as a graph, by torch.export."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from sparse_lightning.compat.torch import writes_in_place
from sparse_lightning.errors import CouplingError
from sparse_lightning.graph.inputs import ExampleInputs, Inputs
from sparse_lightning.graph.skeleton import skeleton


@dataclass(frozen=True)
class TracedModel:
    """A model as torch.export sees it.

    Args:
        model: a skeleton of the user's model; its parameters are those of the user's model, or on the meta device.
        inputs: the example inputs, on the device of the parameters.
        program: the exported program, without operations in place.
    """

    model: nn.Module
    inputs: ExampleInputs
    program: ExportedProgram


def trace(model: nn.Module, inputs: Inputs = None) -> TracedModel:
    """Trace a model in eval mode; the model is not changed.

    Raises:
        CouplingError: if there are no inputs, or torch.export cannot trace the model.
    """
    given = ExampleInputs.of(model, inputs)
    bare = skeleton(model)
    first = next(iter(bare.parameters()), None)
    placed = given.without_cache(bare).on(torch.device("cpu") if first is None else first.device)
    with _evaluating(model):
        used, program = exported(type(model).__name__, bare, placed)
    return TracedModel(bare, used, program)


def exported(name: str, model: nn.Module, inputs: ExampleInputs) -> tuple[ExampleInputs, ExportedProgram]:
    """Export with as many dynamic dimensions as the model allows: batch and sequence, batch, or none.

    A batch of one example is traced as a batch of two, as torch.export takes a size of 1 as fixed.
    """
    for used, depth in ((inputs.repeated(), 2), (inputs.repeated(), 1), (inputs, 0)):
        try:
            shapes = used.dynamic_shapes(model, depth) if depth else None
            with _quiet(), torch.enable_grad(), _without_fast_path():
                program = torch.export.export(model, used.args, used.kwargs, dynamic_shapes=shapes, strict=False)
                in_place = any(_writes(node) for node in program.graph.nodes)
                return used, program.run_decompositions({}) if in_place else program
        except Exception as error:  # torch.export raises errors of many kinds, those of the model's code included
            reason = error
    advice = _advice(reason, inputs.cast_advice(model))
    raise CouplingError(f"torch.export cannot trace {name}: {_first_lines(reason)}. {advice}") from reason


def _advice(error: Exception, cast: str) -> str:
    """Return what to do; errors of the model's own code, such as inputs that do not fit, are of Python's types."""
    named = "name the layers by the patterns Heads, Neurons and Filters, or Custom, which need no trace"
    if any(word in f"{type(error).__name__} {error}".lower() for word in _OF_DATA):
        return f"Control flow that depends on data cannot be traced: {named}"
    if cast:
        return cast
    return f"Check that the model runs on the example inputs in eval mode; if it does, {named}"


_OF_DATA = ("data-dependent", "datadependent", "could not guard", "could not extract specialized")
"""What torch writes of a value that is known only when the model runs."""


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(".")


def _writes(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and writes_in_place(node.target)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode for a while: functions that it holds may call its modules, not those of the skeleton."""
    training = [module for module in model.modules() if module.training]
    # A model of Hugging Face inside of another one returns a cache, which is not a tensor.
    caching = [config for config in map(_config_of, model.modules()) if getattr(config, "use_cache", False) is True]
    for module in training:
        module.training = False
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for config in caching:
            config.use_cache = True


def _config_of(module: nn.Module) -> Any:
    return vars(module).get("config")


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Trace attention as plain operations, not as the fused one that inference without gradients may use."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch.export logs, warns and prints: it is advice on its own internals."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
