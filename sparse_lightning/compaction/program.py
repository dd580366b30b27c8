"""compact_program: the traced program of a model without its zero units."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from sparse_lightning.compaction.fixed_sizes import warn_of_fixed_sizes
from sparse_lightning.compaction.same_outputs import difference, outputs_of_whole, tensors_in
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
        names: of its outputs, where they are in a dict; none otherwise.
    """

    program: ExportedProgram
    inputs: ExampleInputs
    units: dict[str, KeptUnits]
    names: tuple[str, ...] = ()


def compact_program(model: nn.Module, inputs: Inputs = None) -> SmallProgram:
    """Return the traced program of a pruned model without the units that are zero.

    It needs neither this package nor the classes of the model. Batch and sequence are dynamic where the model allows
    it; a `FixedSizeWarning` names those that are not. Its outputs on the inputs are those of the model: this is
    checked.

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
    given = ExampleInputs.of(whole, inputs)
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
        added = {key: item for key, item in placed.kwargs.items() if key not in given.kwargs}
        called = ExampleInputs(placed.args, {key: placed.kwargs[key] for key in given.kwargs})
        plain = small if _is_plain(made) and not added else _PlainProgram(small, added)
        used, program = exported(type(whole).__name__, plain, called)
    warn_of_fixed_sizes(program, type(whole).__name__)
    return SmallProgram(program, used, found.units, tuple(_names(made)) if isinstance(made, Mapping) else ())


def _checked(whole: nn.Module, small: nn.Module, inputs: ExampleInputs) -> Any:
    """Return the outputs of the smaller program on the inputs.

    Raises:
        SparseLightningError: if they are not those of the model.
    """
    expected = outputs_of_whole(whole, inputs)
    with torch.no_grad():
        made = small(*inputs.args, **inputs.kwargs)
    gap = difference(expected, tensors_in(made))
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


def _names(made: Any, name: str = "") -> Iterator[str]:
    """Yield a name for each tensor of outputs: the keys and numbers that lead to it, as `hidden_states_0`."""
    if isinstance(made, Tensor):
        yield name
    elif isinstance(made, (Mapping, tuple, list)):
        for key, item in made.items() if isinstance(made, Mapping) else enumerate(made):
            yield from _names(item, f"{name}_{key}" if name else str(key))


class _PlainProgram(nn.Module):
    """Returns outputs of classes of Hugging Face as dicts and tuples, with the parameters of the model's `forward`.

    Args:
        model: the program.
        added: keyword arguments that it was traced with and its callers need not pass, as `use_cache`.
    """

    def __init__(self, model: nn.Module, added: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model

        def forward(*args: Any, **kwargs: Any) -> Any:
            return _plain(self.model(*args, **kwargs, **added))

        # torch.export names inputs by it.
        named = inspect.signature(model.forward)
        left = [parameter for key, parameter in named.parameters.items() if key not in added]
        vars(forward)["__signature__"] = named.replace(parameters=left)
        self.forward = forward


def _plain(made: Any) -> Any:
    if isinstance(made, Mapping):
        return {key: _plain(item) for key, item in made.items()}
    return tuple(_plain(item) for item in made) if isinstance(made, (tuple, list)) else made
