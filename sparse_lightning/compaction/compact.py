"""compact: a copy of a model without its zero units."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.compaction.optimizers import check_state, rebind
from sparse_lightning.compaction.pretrained_config import adapt_config, warn_of_config
from sparse_lightning.compaction.same_outputs import SizeSearch, check_same, outputs_of_whole, parameter_shapes, runs_on
from sparse_lightning.compaction.size_attributes import Sizes
from sparse_lightning.compaction.size_changes import SizeChanges, set_sizes
from sparse_lightning.compaction.zero_units import KeptUnits, ZeroUnits, find_zero_units, warn_if_none
from sparse_lightning.compat.torch import uncompiled
from sparse_lightning.graph import Removal, couplings
from sparse_lightning.graph.couplings import STAGES as OF_COUPLINGS
from sparse_lightning.graph.inputs import Inputs
from sparse_lightning.progress import stage, stages

STAGES = OF_COUPLINGS + 2
"""Of the progress bar."""

_INSTEAD = 'Export its program instead, in which sizes are rewritten: sparse_lightning.export.Compact(route="graph")'


def compact(
    model: nn.Module, inputs: Inputs = None, optimizers: Optimizer | Iterable[Optimizer] | None = None
) -> nn.Module:
    """Return a copy of a pruned model without the units that are zero: the same classes, with smaller layers.

    A unit, such as a head, a neuron or a channel, is removed if all of its slices of parameters are zero in the
    weights, whatever the masks are. The copy is plain PyTorch, and its outputs on the inputs are those of the model:
    this is checked before it is returned. Of a layer whose units are all zero, one is left.

    Args:
        model: a trained and pruned model; it is not modified.
        inputs: a tuple of positional or a dict of keyword arguments; None takes `example_input_array`, then
            `dummy_inputs` of the model.
        optimizers: of the model, to keep training the copy: their parameters are replaced by those of the copy, and
            their state is cut alike, in place. Detach a Sparsifier from them first.

    Raises:
        CouplingError: if there are no inputs, or torch.export cannot trace the model.
        SparseLightningError: if the model's own code has sizes written into it, or the state of an optimizer does not
            have the shapes of its parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> with torch.no_grad():
        ...     for weights in (model[0].weight[:5], model[0].bias[:5], model[2].weight[:, :5]):
        ...         _ = weights.zero_()
        >>> small, x = compact(model, (torch.randn(2, 4),)), torch.randn(6, 4)
        >>> small
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): ReLU()
          (2): Linear(in_features=3, out_features=3, bias=True)
        )
        >>> torch.allclose(small(x), model(x), atol=1e-6)
        True
    """
    made = compacted(model, inputs)
    given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    check_state(given, made.replaced, made.cut)
    rebind(given, made.replaced, made.cut)
    if made.units:
        warn_of_config(made.model)
    return made.model


@dataclass(frozen=True)
class Compacted:
    """A compacted model, and what was changed.

    Args:
        model: the smaller copy.
        units: what is left of each family of which units were removed.
        families: how many units each family of the model had, by name.
        attributes: the new values of size attributes, by the name of their module.
        shapes: of the tensors that were cut, before that, by each of their names.
        unregistered: the names of tensors that were cut and are not in the state dict.
        names: the names of cut tensors in the trace, by the id of the tensor of the original model.
        replaced: the parameters of the copy by the id of those of the original model.
        removal: cuts tensors that have the shapes of parameters.
    """

    model: nn.Module
    units: dict[str, KeptUnits]
    families: dict[str, int]
    attributes: dict[str, Sizes]
    shapes: dict[str, tuple[int, ...]]
    unregistered: list[str]
    names: dict[int, str]
    replaced: dict[int, nn.Parameter]
    removal: Removal

    def cut(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Cut a tensor of the shape of a parameter as that parameter was cut."""
        name = self.names.get(id(parameter))
        return tensor.clone() if name is None else self.removal.cut(name, tensor)


def compacted(model: nn.Module, inputs: Inputs = None) -> Compacted:
    """Return a compacted model with what was changed; see `compact`."""
    whole = uncompiled(model)
    with stages("compact", STAGES, whole):
        traced = couplings(whole, inputs)
        stage("removing zero units")
        found = find_zero_units(traced)
        warn_if_none(found, type(whole).__name__)
        made = _Builder(whole, found).build()
        stage("comparing outputs")
        inputs_used = traced.analysis.traced.inputs
        search = SizeSearch(parameter_shapes(whole), made.model, made.attributes, found.units)
        varied = inputs_used.varied()
        is_other = varied is not inputs_used and runs_on(whole, varied)
        for given in (inputs_used, varied) if is_other else (inputs_used,):
            check_same(outputs_of_whole(whole, given), given, search, "cannot be compacted as a module", _INSTEAD)
    adapt_config(made.model, found.units)
    return made


class _Builder:
    """Copies a model with smaller tensors in the place of those that are cut."""

    def __init__(self, model: nn.Module, found: ZeroUnits) -> None:
        self._model, self._found, self._removal = model, found, found.removal()
        self._names = {id(tensor): name for name, tensor in found.tensors.items()}
        self._small: dict[int, Tensor] = {}
        for name, tensor in found.tensors.items():
            small = self._removal.cut(name, tensor.detach())
            if small.shape != tensor.shape:
                self._small[id(tensor)] = like(tensor, small)

    def build(self) -> Compacted:
        # What is in the memo of deepcopy is not copied: the large tensors never are.
        memo: dict[int, Any] = dict(self._small)
        small = copy.deepcopy(self._model, memo)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._found.tensors.items()}
        changes = SizeChanges(self._model, self._found.couplings, self._names, shapes)
        attributes = changes.attributes(self._removal, self._found.units)
        for name, sizes in attributes.items():
            set_sizes(small.get_submodule(name), sizes)
        pairs = zip(self._model.parameters(), small.parameters(), strict=True)
        replaced = {id(old): new for old, new in pairs}
        for old in self._model.parameters():
            if old.grad is not None:
                replaced[id(old)].grad = self._cut_gradient(old, old.grad)
        return Compacted(
            small,
            self._found.units,
            {family.name: family.units for family in self._found.couplings},
            attributes,
            self._shapes(),
            self._unregistered(),
            self._names,
            replaced,
            self._removal,
        )

    def _cut_gradient(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        name = self._names.get(id(parameter))
        return gradient.clone() if name is None else self._removal.cut(name, gradient).clone()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        named: dict[str, Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        named |= dict(self._model.named_buffers(remove_duplicate=False))
        named |= {name: self._found.tensors[name] for name in self._unregistered()}
        return {name: tuple(tensor.shape) for name, tensor in named.items() if id(tensor) in self._small}

    def _unregistered(self) -> list[str]:
        state = self._model.state_dict(keep_vars=True)
        saved = {id(tensor) for tensor in state.values() if isinstance(tensor, Tensor)}
        return [self._names[key] for key in self._small if key not in saved]


def like(tensor: Tensor, small: Tensor) -> Tensor:
    """Return a smaller tensor as a parameter or buffer with the memory format of the whole one."""
    if tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        small = small.contiguous(memory_format=torch.channels_last)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(small, requires_grad=tensor.requires_grad)
    return small
