"""compact_program: the traced program of a model without its zero units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from sparse_lightning.compaction.same_outputs import difference, outputs, tensors_in
from sparse_lightning.compaction.zero_units import KeptUnits, find_zero_units, warn_if_none
from sparse_lightning.compat.torch import uncompiled
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.graph import couplings
from sparse_lightning.graph.couplings import STAGES as OF_COUPLINGS
from sparse_lightning.graph.inputs import ExampleInputs, Inputs
from sparse_lightning.graph.trace import exported
from sparse_lightning.progress import stage, stages

STAGES = OF_COUPLINGS + 3
"""Of the progress bar."""


@dataclass(frozen=True)
class SmallProgram:
    """The program of a compacted model.

    Args:
        program: takes the arguments of the model; its outputs are tensors in tuples, lists and dicts.
        inputs: that it was traced with.
        units: what is left of each family of which units were removed.
    """

    program: ExportedProgram
    inputs: ExampleInputs
    units: dict[str, KeptUnits]


def compact_program(model: nn.Module, inputs: Inputs = None) -> SmallProgram:
    """Return the traced program of a pruned model without the units that are zero.

    It needs neither this package nor the classes of the model. Batch and sequence are dynamic where the model allows
    it. Its outputs on the inputs are those of the model: this is checked.

    Args:
        model: a trained and pruned model; it is not modified.
        inputs: a tuple of positional or a dict of keyword arguments; None takes those of the model.

    Raises:
        CouplingError: if there are no inputs, or torch.export cannot trace the model.
        SparseLightningError: if the outputs differ.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> with torch.no_grad():
        ...     for weights in (model[0].weight[:5], model[0].bias[:5], model[2].weight[:, :5]):
        ...         _ = weights.zero_()
        >>> small = compact_program(model, (torch.randn(2, 4),))
        >>> {name: tuple(tensor.shape) for name, tensor in small.program.state_dict.items()}
        {'0.weight': (3, 4), '0.bias': (3,), '2.weight': (3, 3), '2.bias': (3,)}
    """
    whole = uncompiled(model)
    with stages("compact", STAGES, whole):
        traced = couplings(whole, inputs)
        stage("removing zero units")
        found = find_zero_units(traced)
        warn_if_none(found, type(whole).__name__)
        placed = traced.analysis.traced.inputs
        small = _reshaped(found.removal().module())
        stage("comparing outputs")
        made = _checked(whole, small, placed)
        stage("tracing the smaller model")
        plain = small if _is_plain(made) else _PlainOutputs(small)
        used, program = exported(type(whole).__name__, plain, placed)
        return SmallProgram(program, used, found.units)


def _checked(whole: nn.Module, small: nn.Module, inputs: ExampleInputs) -> Any:
    """Return the outputs of the smaller program on the inputs.

    Raises:
        SparseLightningError: if they are not those of the model.
    """
    with torch.no_grad():
        made = small(*inputs.args, **inputs.kwargs)
    gap = difference(outputs(whole, inputs), tensors_in(made))
    if gap is not None:
        raise SparseLightningError(
            f"{type(whole).__name__} cannot be compacted: {gap}. This is a fault of a rule in sparse_lightning.graph: "
            "export `Weights` instead, and report it"
        )
    return made


def _reshaped(module: fx.GraphModule) -> fx.GraphModule:
    """Replace views by reshapes: strides may differ where units are absent."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    module.recompile()
    return module


def _is_plain(made: Any) -> bool:
    """Whether outputs are tensors in tuples, lists and dicts, which any process can load."""
    if type(made) in (tuple, list):
        return all(_is_plain(item) for item in made)
    if type(made) is dict:
        return all(_is_plain(item) for item in made.values())
    return made is None or isinstance(made, (Tensor, int, float, bool, str))


class _PlainOutputs(nn.Module):
    """Returns outputs of classes of Hugging Face as dicts and tuples."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self.model(*args, **kwargs))


def _plain(made: Any) -> Any:
    if isinstance(made, Mapping):
        return {key: _plain(item) for key, item in made.items()}
    return tuple(_plain(item) for item in made) if isinstance(made, (tuple, list)) else made
