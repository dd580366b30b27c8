"""ShrunkModel: units are removed from a model in place, while it trains, and put back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.compaction.kept_indices import KeptIndices, change
from sparse_lightning.compaction.optimizers import is_of_weights
from sparse_lightning.compaction.same_outputs import Change, SizeSearch, change_of, outputs, parameter_shapes
from sparse_lightning.compaction.size_attributes import Sizes
from sparse_lightning.compaction.size_changes import SizeChanges, set_sizes
from sparse_lightning.compaction.trial import TOLERANCES, subsets, trial_copy
from sparse_lightning.compaction.whole_state import Place, WholeState
from sparse_lightning.compaction.zero_units import KeptUnits, tensor_of
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.graph import Couplings, Family, Removal
from sparse_lightning.graph.inputs import ExampleInputs

_INSTEAD = (
    "Train it without shrink, and remove its units when it is trained: "
    'sparse_lightning.export.Compact(route="graph"); or exclude this family from the patterns'
)


class ShrunkModel:
    """A model without some of its units.

    Modules and parameters stay the objects that they are: parameters get smaller data, and their gradients and the
    state of optimizers are cut alike. State dicts of the model and its optimizers stay whole: removed weights and
    their state are zero there, and removed entries of buffers what they were. What is loaded into removed units is
    there until `zero_removed`, and part of them if they are put back before.

    Args:
        model: all of whose units are there.
        found: its families.
        families: the names of those that units may be removed from.
        optimizers: of its parameters.

    Attributes:
        kept: what is left of each tensor that has slices of these families, by its name in the trace.

    Example:
        >>> from sparse_lightning.graph import couplings
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> shrunk = ShrunkModel(model, couplings(model, (torch.randn(2, 4),)), ["0 (units)"], [])
        >>> shrunk.keep({"0 (units)": KeptUnits(8, [1, 2, 5])})
        >>> model[0], model.state_dict()["2.weight"].shape
        (Linear(in_features=4, out_features=3, bias=True), torch.Size([3, 8]))
        >>> shrunk.keep({})
        >>> model[0]
        Linear(in_features=4, out_features=8, bias=True)
    """

    def __init__(
        self, model: nn.Module, found: Couplings, families: Iterable[str], optimizers: Iterable[Optimizer]
    ) -> None:
        self._model, self._found, self._optimizers = model, found, list(optimizers)
        self._families = [name for name in families if found[name].units > 1]
        every = self._removal({name: _all_but_last(found[name].units) for name in self._families})
        held = {name: tensor_of(model, name) for name in every.names()}
        tensors = {name: tensor for name, tensor in held.items() if tensor is not None}
        self._whole = {name: KeptIndices.whole(tensor) for name, tensor in tensors.items()}
        self._whole = {n: whole for n, whole in self._whole.items() if not self._left(every, n).is_whole}
        self.kept = dict(self._whole)
        self._widths = {name: _widths(found[name]) for name in self._families}
        names = {id(tensors[name]): name for name in self._whole}
        self._changes = SizeChanges(model, found, names, {name: left.shape for name, left in self._whole.items()})
        self._sizes: dict[str, Sizes] = {}
        self._rest: dict[str, Tensor] = {}
        self._loaded: dict[Place, Tensor] = {}
        self._state: WholeState | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have slices of the families, as they are now, by name."""
        held = {name: tensor_of(self._model, name) for name in self._whole}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def widths(self, family: str) -> list[int]:
        """Return how many indices of each slice a unit of a family has."""
        return [width for _, _, width in self._widths.get(family, [])]

    def numel(self, removed: Mapping[str, int]) -> int:
        """Return the number of elements of parameters without some units.

        Args:
            removed: how many units are removed, by the name of their family.
        """
        sizes = {name: list(whole.shape) for name, whole in self._whole.items()}
        for family, count in removed.items():
            for name, dim, width in self._widths.get(family, []):
                sizes[name][dim] -= count * width
        return sum(map(math.prod, sizes.values()))

    def kept_with(self, units: Mapping[str, KeptUnits]) -> dict[str, KeptIndices]:
        """Return what `keep` would leave of each tensor."""
        return self._kept_by(self._removal(units))

    def _kept_by(self, removal: Removal) -> dict[str, KeptIndices]:
        return {name: self._left(removal, name) for name in self._whole}

    def keep(self, units: Mapping[str, KeptUnits]) -> None:
        """Remove all units but these; those of families that are not passed are all there.

        Weights of units that are removed must be zero; those of units that come back are zero, or were loaded.
        """
        removal = self._removal(units)
        after, tensors = self._kept_by(removal), self.tensors()
        for name, tensor in tensors.items():
            if not after[name].is_same(self.kept[name]):
                self._move(name, tensor, after[name])
        self.kept = after
        self._set_sizes(removal, units)
        if self._state is not None:
            self._state.close()
        is_whole = all(left.is_whole for left in after.values())
        self._state = None if is_whole else self._whole_state(tensors)

    def _whole_state(self, tensors: Mapping[str, Tensor]) -> WholeState:
        return WholeState(self._model, self._optimizers, tensors, self.kept, self._widen, self._take)

    def _removal(self, units: Mapping[str, KeptUnits]) -> Removal:
        return self._found.removal({name: left.removed() for name, left in units.items()})

    def _left(self, removal: Removal, name: str) -> KeptIndices:
        whole = self._whole[name]
        return KeptIndices.of(whole.shape, removal.kept(name), whole.order)

    def _move(self, name: str, tensor: Tensor, after: KeptIndices) -> None:
        before = self.kept[name]
        if not isinstance(tensor, nn.Parameter):
            self._rest[name] = before.widened(tensor.detach(), self._rest.get(name))
            put(tensor, after.cut(self._rest[name]).clone())
            return
        changed = change(before, after)
        for optimizer in [optimizer for optimizer in self._optimizers if tensor in optimizer.state]:
            state = optimizer.state[tensor]
            for key, value in state.items():
                if is_of_weights(optimizer, key, value, before.small_shape):
                    state[key] = changed(value, self._loaded.get(Place(name, id(optimizer), key)))
        gradient, tensor.grad = tensor.grad, None
        put(tensor, changed(tensor.detach(), self._loaded.get(Place(name))))
        if gradient is not None:
            tensor.grad = changed(gradient.to_dense() if gradient.is_sparse else gradient, None)

    def _widen(self, name: str, tensor: Tensor) -> Tensor:
        return self.kept[name].widened(tensor, self._rest.get(name, self._loaded.get(Place(name))))

    def _take(self, place: Place, whole: Tensor) -> Tensor:
        if place == Place(place.name) and place.name in self._rest:
            self._rest[place.name] = whole.to(self._rest[place.name], copy=True)
        else:
            self._loaded[place] = whole.detach().to(self.tensors()[place.name].device, copy=True)
        return self.kept[place.name].cut(whole)

    def zero_removed(self) -> None:
        """Forget what was loaded into removed units: their weights and the state of these are zero."""
        self._loaded.clear()

    def _set_sizes(self, removal: Removal, units: Mapping[str, KeptUnits]) -> dict[str, Sizes]:
        """Set the size attributes of modules; return the new ones."""
        for name, sizes in self._sizes.items():
            set_sizes(self._model.get_submodule(name), sizes)
        changed = self._changes.attributes(removal, units)
        modules = {name: self._model.get_submodule(name) for name in changed}
        self._sizes = {name: {key: getattr(modules[name], key) for key in own} for name, own in changed.items()}
        for name, sizes in changed.items():
            set_sizes(modules[name], sizes)
        return changed

    def check(self) -> None:
        """Run a copy of the model without some units of its families on its example inputs.

        Raises:
            SparseLightningError: if it fails or gives other outputs, as where its code has sizes written into it.
        """
        change = self.first_change()
        if change is not None:
            name = type(self._model).__name__
            text = f"{name} cannot get smaller while it trains: {change.text}. {_INSTEAD}"
            raise SparseLightningError(text) from change.cause

    def first_change(self) -> Change | None:
        """Return what changes without some units; None if nothing does. See `check`."""
        model, inputs = trial_copy(self._model, self._found.analysis.traced.inputs)
        copied = ShrunkModel(model, self._found, self._families, [])
        trials = subsets({name: self._found[name].units for name in self._families})
        changes = (copied._change_without(units, inputs) for units in trials)
        return next((change for change in changes if change is not None), None)

    def _change_without(self, units: Mapping[str, KeptUnits], inputs: ExampleInputs) -> Change | None:
        """Compare the model in which all but these units are zero with the one without the others."""
        left, tensors = self.kept_with(units), self.tensors()
        whole = {name: tensor.data for name, tensor in tensors.items()}
        small = {name: left[name].cut(data) for name, data in whole.items()}
        shapes = parameter_shapes(self._model)
        for name, tensor in tensors.items():
            rest = None if isinstance(tensor, nn.Parameter) else whole[name]
            tensor.data = left[name].widened(small[name], rest)
        expected = outputs(self._model, inputs)
        for name, tensor in tensors.items():
            tensor.data = small[name]
        search = SizeSearch(shapes, self._model, self._set_sizes(self._removal(units), units), units)
        change = change_of(expected, inputs, search, TOLERANCES)
        for name, tensor in tensors.items():
            tensor.data = whole[name]
        self._set_sizes(self._removal({}), {})
        return change


def put(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data, of another shape, in place.

    A graph that is still referenced, as by a loss, holds the node that accumulates the gradient of the old shape.
    Torch makes a new one only where the dtype changes, so it changes for a moment. Autocast may hold a narrower copy.
    """
    torch.clear_autocast_cache()
    other = torch.float32 if tensor.dtype != torch.float32 else torch.float64
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data


def _widths(family: Family) -> list[tuple[str, int, int]]:
    """Return in which dimension of which tensors a unit has its slices, and how many indices there."""
    return [(piece.name, piece.dim, piece.indices.numel // family.units) for piece in family.slices]


def _all_but_last(units: int) -> KeptUnits:
    return KeptUnits(units, list(range(units - 1)))
