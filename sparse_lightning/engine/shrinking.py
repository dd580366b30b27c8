"""Shrinking: removes pruned units from the model of an engine, and lays its scopes out on what is left.

Data flow: masks are grids of the whole model, and so is everything that is decided by them. Behind each mask stands a
scope on the parameters that are left, a `LiveScope`: weights are read and zeroed there. What is removed is zero in
every state dict, so that a checkpoint does not depend on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.blocks.live_scope import LiveScope, Rest, live_scope, stand_in
from sparse_lightning.compaction.kept_indices import KeptIndices
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compaction.shrunk_model import ShrunkModel
from sparse_lightning.compaction.zero_units import KeptUnits
from sparse_lightning.engine.shrinkable import check_model, check_optimizers
from sparse_lightning.engine.unit_scopes import UnitScope, unit_scopes
from sparse_lightning.errors import (
    CheckpointError,
    CouplingError,
    LayoutError,
    PatternError,
    SparsityError,
)
from sparse_lightning.graph import Couplings, couplings
from sparse_lightning.graph.couplings import Preference
from sparse_lightning.patterns import Attachment

Laid = tuple[Attachment, LiveScope | None]
"""A scope of the whole model, and what is left of it; None if it is on parameters that are whole."""


class Shrinking:
    """The units of a model that can be removed, and those that are.

    Args:
        shrink: when they are removed.
        found: what the patterns attach.
        model: whose units are all there.
        optimizers: of its parameters.

    Raises:
        PatternError: if no scope has units that can be removed.
        SparseLightningError: if the model does not run without some of its units.

    Attributes:
        units: the scopes of units that can be removed, by name.
        model: the model.
        count: how often units were removed or put back.
    """

    def __init__(
        self, shrink: Shrink, found: Sequence[Attachment], model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        self._shrink, self._found, self.model, self.count = shrink, list(found), model, 0
        self._couplings, self.units = _units(shrink, found, model)
        names = _names(self._couplings)
        params = {id(p): p for each in found for p in each.scope.unique_params() if id(p) in names}
        self._stand_ins = {key: _stand_in(param) for key, param in params.items()}
        self._behind = {id(other): (params[key], names[key]) for key, other in self._stand_ins.items()}
        self._whole = [replace(each, scope=stand_in(each.scope, self._of)) for each in found]
        self._shrunk = ShrunkModel(model, self._couplings, self._families(), optimizers)
        if not self._can_lose(self._families()):
            self.units = {name: unit for name, unit in self.units.items() if self._can_lose([unit.family])}
            self._shrunk = ShrunkModel(model, self._couplings, self._families(), optimizers)
        if not self.units:
            raise PatternError(
                f"no pattern has units that can be removed from {type(model).__name__} while it trains: "
                f"{self._why_none(found, names)}. Use Coupled, Neurons, Heads or Filters for units that `couplings` "
                "lists, or no shrink"
            )
        check_model(model, self._shrunk.tensors())
        check_optimizers(optimizers, self._shrunk.tensors().values())
        self._leave_out_failing(optimizers)
        self._is_away = True
        self._removed = {name: np.zeros(len(unit.units), np.bool_) for name, unit in self.units.items()}
        self._numel = self._shrunk.numel({})

    def _why_none(self, found: Sequence[Attachment], names: Mapping[int, str]) -> str:
        """Return what keeps the units of patterns in the model."""
        units = [each for each in found if each.has_units]
        mine = {names.get(id(p)) for each in units for p in each.scope.unique_params()}
        reasons = [refused.reason for refused in self._couplings.refusals if mine & set(refused.parameters)]
        if not units or not reasons:
            return "their blocks are not whole units of the traced model, and stay where they are"
        return "; ".join(list(dict.fromkeys(map(str, reasons)))[:3])

    def _of(self, param: Tensor) -> Tensor | None:
        return self._stand_ins.get(id(param))

    def _families(self) -> list[str]:
        return [unit.family for unit in self.units.values()]

    def _can_lose(self, families: Sequence[str]) -> bool:
        """Whether all scopes can be laid out on what is left without one unit of each family."""
        sizes = {name: self._couplings[name].units for name in families}
        left = self._shrunk.kept_with({name: KeptUnits(n, list(range(n - 1))) for name, n in sizes.items()})
        try:
            for each in self._whole:
                live_scope(each.scope, lambda tensor: self._rest(tensor, left))
        except (CouplingError, LayoutError):
            return False
        return True

    def _leave_out_failing(self, optimizers: Sequence[Optimizer]) -> None:
        """Try the model without some units of each family; those that fail alone stay in it, with a warning."""
        if self._shrunk.first_change() is None:
            return
        alone = {n: ShrunkModel(self.model, self._couplings, [u.family], []) for n, u in self.units.items()}
        changes = {name: model.first_change() for name, model in alone.items()}
        failing = {name: change.text for name, change in changes.items() if change is not None}
        if 0 < len(failing) < len(self.units):
            self.units = {name: unit for name, unit in self.units.items() if name not in failing}
            self._shrunk = ShrunkModel(self.model, self._couplings, self._families(), optimizers)
        self._shrunk.check()
        names = [*list(failing)[:3], *(["others"] if len(failing) > 3 else [])]
        warnings.warn(
            f"pruned units of {', '.join(names)} stay in the model while it trains, zero, and only those of others are "
            f"removed: {next(iter(failing.values()))}. Change its code, or remove them when it is trained, by "
            'sparse_lightning.export.Compact(route="graph")',
            stacklevel=2,
        )

    def _rest(self, tensor: Tensor, left: Mapping[str, KeptIndices]) -> Rest | None:
        """Return what is left of the parameter behind a tensor of a whole scope."""
        found = self._behind.get(id(tensor))
        if found is None:
            return None
        param, name = found
        kept = left.get(name) or KeptIndices.whole(tensor)
        return Rest(param, kept.kept, kept.layout)

    @property
    def is_shrunk(self) -> bool:
        """Whether units are removed now."""
        return self._is_away and any(removed.any() for removed in self._removed.values())

    def parameters(self) -> list[Tensor]:
        """Return the parameters that may get smaller."""
        return [tensor for tensor in self._shrunk.tensors().values() if isinstance(tensor, nn.Parameter)]

    def laid(self) -> list[Laid]:
        """Return all scopes, with what is left of each."""
        if not self.is_shrunk:
            return [(each, None) for each in self._found]
        return [self._lay(own, whole) for own, whole in zip(self._found, self._whole, strict=True)]

    def _lay(self, own: Attachment, whole: Attachment) -> Laid:
        if not any(id(param) in self._behind for param in whole.scope.unique_params()):
            return own, None
        return whole, live_scope(whole.scope, lambda tensor: self._rest(tensor, self._shrunk.kept))

    def pays(self, masks: Mapping[str, Tensor], is_last: bool) -> bool:
        """Whether the units that masks prune, and that are still there, are enough to remove them.

        Args:
            masks: by name of their block, of the whole model.
            is_last: whether no further update will prune.
        """
        now, left = self._numel, self._shrunk.numel(self._counts(self._pruned(masks)))
        return left < now and (is_last or left <= now * (1 - self._shrink.at_least))

    def _counts(self, removed: Mapping[str, Any]) -> dict[str, int]:
        return {self.units[name].family: int(gone.sum()) for name, gone in removed.items()}

    def remove(self, masks: Mapping[str, Tensor]) -> None:
        """Remove the units that masks prune, which are zero; of a family without others, one is left."""
        self._set(self._pruned(masks))

    def put_back(self) -> None:
        """Put all units back, with weights of zero; `state_dict` still says what was removed."""
        self._shrunk.keep({})
        self._is_away = False
        self.count += 1

    def zero_removed(self) -> None:
        """Forget what was loaded into removed units."""
        self._shrunk.zero_removed()

    def _set(self, removed: dict[str, Any]) -> None:
        self._shrunk.keep(self._left(removed))
        self._removed, self._is_away = removed, True
        self._numel = self._shrunk.numel(self._counts(removed))
        self.count += 1

    def _pruned(self, masks: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return which units of each scope are to be removed: those that are pruned, but some for a better size.

        A layer needs one: of all units the first stays.
        """
        found = {}
        for name in self.units:
            pruned = masks[name].reshape(-1).cpu().numpy()
            found[name] = self._rounded(name, np.arange(len(pruned)) > 0 if pruned.all() else pruned)
        return found

    def _rounded(self, name: str, pruned: Any) -> Any:
        """Return the pruned units but a few that are still there; see `Shrink.spare`."""
        waiting = np.flatnonzero(pruned & ~self._removed[name])
        widths = self._shrunk.widths(self.units[name].family)
        spare = max((self._shrink.spare(int((~pruned).sum()), width) for width in widths), default=0)
        if not 0 < spare <= len(waiting):
            return pruned
        rounded = pruned.copy()
        rounded[waiting[:spare]] = False
        return rounded

    def _left(self, removed: Mapping[str, Any]) -> dict[str, KeptUnits]:
        """Return what is left of each family of which units are removed."""
        found = {}
        for name, gone in removed.items():
            unit = self.units[name]
            if gone.any():
                found[unit.family] = KeptUnits(len(gone), np.sort(unit.units[~gone]).tolist())
        return found

    def check_stay_pruned(self, masks: Mapping[str, Tensor]) -> None:
        """Raise an error if new masks keep a unit that is removed."""
        for name, removed in self._removed.items():
            if (removed & ~masks[name].reshape(-1).cpu().numpy()).any():
                raise SparsityError(
                    f"the method keeps units of {name} that it had pruned, and that are removed: use a method that "
                    "lets no block grow, such as Gradual, or no shrink"
                )

    def state_dict(self) -> dict[str, Tensor]:
        """Return which blocks are removed, a grid by name of their scope."""
        grids = {each.name: each.scope.blocks()[0].grid_shape for each in self._whole if each.name in self.units}
        removed = {name: torch.from_numpy(gone) for name, gone in self._removed.items() if gone.any()}
        return {name: gone.view(grids[name]) for name, gone in removed.items()}

    def load(self, removed: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        """Remove the units that a state says.

        Args:
            removed: what `state_dict` returned.
            masks: of the same state; they prune what is removed.
        """
        for name, gone in removed.items():
            if name not in self.units or (gone.reshape(-1) & ~masks[name].reshape(-1)).any():
                raise CheckpointError(
                    f"the checkpoint has removed units of {name}, which cannot be removed here or are not pruned: "
                    "resume with the model and the patterns that it was saved with"
                )
        none = {name: np.zeros_like(gone) for name, gone in self._removed.items()}
        self._set(none | {name: gone.reshape(-1).cpu().numpy() for name, gone in removed.items()})


def _units(shrink: Shrink, found: Sequence[Attachment], model: nn.Module) -> tuple[Couplings, dict[str, UnitScope]]:
    """Return the families of a model, and the scopes that are some of them; of nested units those that are attached."""
    traced = {id(each.traced): each.traced for each in found if each.traced is not None}
    base = next(iter(traced.values())) if len(traced) == 1 else couplings(model, shrink.inputs)
    preferences: list[Preference] = ["outer", "inner"]
    every = [base] if len(traced) == 1 else [base.preferring(prefer) for prefer in preferences]
    units = [unit_scopes(found, each, _names(each)) for each in every]
    best = max(range(len(every)), key=lambda i: len(units[i]))
    return every[best], units[best]


def _names(found: Couplings) -> dict[int, str]:
    """Return the names of parameters in the trace, by their id."""
    parameters = dict(found.analysis.traced.model.named_parameters())
    return {id(parameters[name]): name for name in found.analysis.parameters}


def _stand_in(param: Tensor) -> Tensor:
    return torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
