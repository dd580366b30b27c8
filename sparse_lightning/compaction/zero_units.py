"""Zero units: those whose slices of all parameters are zero."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparse_lightning.errors import NothingToRemoveWarning, SparseLightningError
from sparse_lightning.graph import Couplings, Family, Refusal, Removal
from sparse_lightning.graph.couplings import Preference
from sparse_lightning.graph.rules.contractions import CHOSEN_BY_NUMBER
from sparse_lightning.layout import Layout


@dataclass(frozen=True)
class KeptUnits:
    """The units of a family that are left.

    Args:
        total: how many units the family has.
        kept: their numbers, increasing.
    """

    total: int
    kept: list[int]

    def removed(self) -> list[int]:
        """Return the numbers of the units that are not left."""
        kept = set(self.kept)
        return [unit for unit in range(self.total) if unit not in kept]


@dataclass(frozen=True)
class ZeroUnits:
    """What can be removed from a model.

    Args:
        couplings: of the model, for the preference that removes more.
        tensors: parameters, buffers and tensor attributes by the names of the traced model.
        units: what is left of each family of which units are removed.
    """

    couplings: Couplings
    tensors: dict[str, Tensor]
    units: dict[str, KeptUnits]

    def removal(self) -> Removal:
        """Return the removal of all zero units."""
        return self.couplings.removal({name: left.removed() for name, left in self.units.items()})

    def removes(self) -> int:
        """Return how many elements of parameters are removed."""
        removal = self.removal()
        small = [torch.Size(len(kept) for kept in removal.kept(name)).numel() for name in self.tensors]
        return sum(tensor.numel() for tensor in self.tensors.values()) - sum(small)


def find_zero_units(found: Couplings) -> ZeroUnits:
    """Return the units whose slices are all zero; of nested units those that remove more.

    Of a family of zero units one is left: layers without any unit do not run.

    Raises:
        SparseLightningError: if parameters are sharded or on the meta device.
    """
    tensors = _tensors(found)
    by_preference: list[Preference] = ["outer", "inner"]
    every = [_zero_units(found.preferring(prefer), tensors) for prefer in by_preference]
    return max(every, key=ZeroUnits.removes)


def warn_of_routed(found: ZeroUnits, name: str) -> bool:
    """Warn of experts that are zero and cannot be removed, and return whether there are any.

    A zero row of a router is a logit of zero: it takes its share of a softmax, and tokens may choose it.
    """
    some = [f"{zero} of {each.units} in {each.name.removesuffix(' (units)')}" for each, zero in _routed(found) if zero]
    if some:
        nothing = "" if found.units else f"{name} has nothing to remove: "
        warnings.warn(
            f"{nothing}zero experts or classes, {', '.join(some)}, stay as they are, since a softmax still gives them "
            "a share, or tokens choose them by their number: outputs would change without them. To make experts "
            "smaller, prune their neurons by Neurons or Coupled",
            UserWarning if found.units else NothingToRemoveWarning,
            stacklevel=3,
        )
    return bool(some)


def _routed(found: ZeroUnits) -> Iterator[tuple[Refusal, int]]:
    """Yield what a softmax or a choice by number pins in the first dimension of parameters, with how many are zero."""
    for each in found.couplings.refusals:
        tensors = [found.tensors[parameter].detach() for parameter in each.parameters]
        is_routed = "softmax" in each.reason.operation or each.reason.why == CHOSEN_BY_NUMBER
        if is_routed and all(tensor.ndim and len(tensor) == each.units for tensor in tensors):
            zero = [~tensor.ne(0).reshape(each.units, -1).any(1).cpu() for tensor in tensors]
            yield each, int(torch.stack(zero).all(0).sum())


def warn_if_none(found: ZeroUnits, name: str) -> None:
    """Warn if there is nothing to remove."""
    if not warn_of_routed(found, name) and not found.units:
        families = len(found.couplings)
        warnings.warn(
            f"{name} has nothing to remove: no unit of its {families} families is zero in all of its weights. Masks of "
            "single weights or tiles form no family: use sparse_lightning.tiled for them, or prune whole units by the "
            "patterns Coupled, Heads, Neurons or Filters",
            NothingToRemoveWarning,
            stacklevel=3,
        )


def _zero_units(found: Couplings, tensors: dict[str, Tensor]) -> ZeroUnits:
    units = {}
    for family in found:
        kept = torch.nonzero(~_is_zero(family, tensors)).flatten().tolist() or [0]
        if len(kept) < family.units:
            units[family.name] = KeptUnits(family.units, kept)
    return ZeroUnits(found, tensors, units)


def _is_zero(family: Family, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return for each unit whether all of its slices are zero."""
    zero = torch.ones(family.units, dtype=torch.bool)
    for piece in family.slices:
        tensor = tensors[piece.name].detach()
        slices = piece.layout(Layout.of(tensor)).on(tensor)
        zero &= ~slices.ne(0).reshape(family.units, -1).any(1).cpu()
    return zero


def _tensors(found: Couplings) -> dict[str, Tensor]:
    """Return the tensors of the traced model, which it shares with the user's."""
    model = found.analysis.traced.model
    named = {name: tensor_of(model, name) for name in found.analysis.tensors}
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise SparseLightningError(
                f"{name} is sharded or on the meta device, and its zeros cannot be counted: export `Weights` instead, "
                "load them into the plain model, and compact that"
            )
    return tensors


def tensor_of(model: nn.Module, name: str) -> Tensor | None:
    """Return a tensor by its path; None for a constant that only the trace has."""
    path, _, last = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), last, None)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None
