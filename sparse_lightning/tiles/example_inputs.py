"""Example inputs: what a model is called with once, to see the inputs of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sparse_lightning.errors import SparseLightningError

Inputs = tuple[Any, ...] | Mapping[str, Any] | None
"""Positional arguments, keyword arguments, or None: those that the model has itself."""

Arguments = tuple[Any, ...] | dict[str, Any]
"""Positional arguments or keyword arguments."""


def example_inputs(model: nn.Module, inputs: Inputs) -> Arguments:
    """Return what a model is called with, on its device.

    Args:
        model: the model.
        inputs: its arguments; None takes its `example_input_array` (Lightning) or `dummy_inputs` (Hugging Face).
    """
    found = _found(model, inputs)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    moved: Arguments = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, found)
    return moved


def run(model: nn.Module, found: Arguments) -> Any:
    """Call a model once without gradients, in evaluation mode, and return its outputs; its modes are restored."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            return model(**found) if isinstance(found, dict) else model(*found)
    finally:
        for module, training in modes.items():
            module.training = training


def _found(model: nn.Module, inputs: Inputs) -> Arguments:
    given: Any = inputs
    for name in ("example_input_array", "dummy_inputs"):
        given = getattr(model, name, None) if given is None else given
    if isinstance(given, Tensor):
        return (given,)
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (tuple, list)):
        return tuple(given)
    raise SparseLightningError(
        f"{type(model).__name__} was to be called with {type(given).__name__}: pass inputs, a tuple of positional or a "
        "dict of keyword arguments, or give the model an example_input_array"
    )
