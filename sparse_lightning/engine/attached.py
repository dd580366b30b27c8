"""Attached engines: masks that are chosen for a model outside of its Sparsifiers are taken up by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor

from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns import Attachment, NamedScope
from sparse_lightning.patterns.claims import shared_weights


class Holder(Protocol):
    """What holds masks of a model: an engine."""

    scopes: list[MaskedScope]

    @property
    def is_shrunk(self) -> bool:
        """Whether units are removed from the model now."""

    def shrinking_parameters(self) -> list[Tensor]:
        """Return the parameters that may get smaller."""

    def take_up(self, masks: Mapping[str, Tensor], sparsity: float) -> None:
        """Prune the blocks of masks, by name, and hold them from now on."""


_ATTACHED: WeakSet[Any] = WeakSet()


def note_attached(holder: Holder) -> None:
    """Let a holder take up masks until it is closed."""
    _ATTACHED.add(holder)


def holders() -> list[Holder]:
    """Return what holds masks of any model now."""
    return list(_ATTACHED)


def note_closed(holder: Holder) -> None:
    """Do not pass masks to a holder any more."""
    _ATTACHED.discard(holder)


class TakenUp:
    """The masks of some scopes in the Sparsifiers that are attached to their parameters.

    Args:
        found: the scopes that are about to be pruned.

    Raises:
        PatternError: if a Sparsifier is attached to some of their weights in other blocks.
    """

    def __init__(self, found: Sequence[Attachment]) -> None:
        self._found = list(found)
        for holder in holders():
            self._check_whole(holder)
        self._held = {id(holder): (holder, self._same_scopes(holder)) for holder in holders()}

    def _check_whole(self, holder: Holder) -> None:
        """Raise an error if parameters are smaller than those of the whole model, which masks are made for."""
        mine = {id(param) for each in self._found for param in each.scope.unique_params()}
        smaller = [scope.name for scope in holder.scopes if any(id(param) in mine for param in scope.parameters())]
        if smaller and holder.is_shrunk:
            raise PatternError(
                f"units of {smaller[0]} are removed while a Sparsifier with shrink is attached to the model: call its "
                "detach() first, which puts them back"
            )

    def _same_scopes(self, holder: Holder) -> dict[str, MaskedScope]:
        """Return those scopes of a holder that have the blocks of a scope here, by the name here."""
        own = {_blocks_of(scope): scope for scope in holder.scopes}
        same = {each.name: own[_blocks_of(each)] for each in self._found if _blocks_of(each) in own}
        others = [each for each in self._found if each.name not in same]
        shared = shared_weights(others, holder.scopes)
        if shared is not None:
            name, other, shape = shared
            raise PatternError(
                f"{name} shares weights of a parameter of shape {shape} with {other} of an attached Sparsifier, which "
                "has other blocks there and could not hold the new masks: pass the patterns of the Sparsifier, or call "
                "its detach() first"
            )
        return same

    def pruned(self, attachment: Attachment) -> dict[str, Tensor]:
        """Return the masks that a scope already has, by name; empty if no Sparsifier holds it."""
        names = attachment.scope.named_blocks(attachment.name)
        for _, same in self._held.values():
            if attachment.name in same:
                return dict(zip(names, same[attachment.name].masks.values(), strict=True))
        return {}

    def take_up(self, masks: Mapping[str, Tensor], sparsity: float) -> None:
        """Pass new masks to the Sparsifiers that hold their scopes.

        Args:
            masks: for each block of some of the scopes, by name.
            sparsity: the level that they were chosen at.
        """
        scopes = {each.name: each for each in self._found}
        for holder, same in self._held.values():
            named: dict[str, Tensor] = {}
            for name, scope in same.items():
                blocks = scopes[name].scope.named_blocks(name)
                if blocks.keys() <= masks.keys():
                    named |= dict(zip(scope.blocks, [masks[block] for block in blocks], strict=True))
            if named:
                holder.take_up(named, sparsity)


def _blocks_of(found: NamedScope) -> tuple[Any, ...]:
    """Return what the blocks of a scope are: their parameters, views and shapes."""
    specs = [spec for block in found.scope.blocks() for spec in block.blocks()]
    return tuple((id(spec.param), spec.view.layout, tuple(spec.shape)) for spec in specs)
