"""MaskedStack: scopes of parameters that lie alike, decided together; MaskBuffer: the masks of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.scope_stack import ScopeStack, stacks
from sparse_lightning.budgets import Budget
from sparse_lightning.engine.live_layouts import LiveLayouts, grids_in
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.nm_groups import declares
from sparse_lightning.errors import SparsityError
from sparse_lightning.layout import Layout
from sparse_lightning.methods import Method, UpdateContext

DECIDED = 1 << 17
"""The most blocks of several scopes that a method decides on in one call: few sorts, each in little memory."""

SELECTED = 1 << 21
"""The same of scopes that are scored when they are chosen: their weights stay where they are, and are not sorted."""


class MaskedStack:
    """Scopes on which a method decides in one call: one scope, or several that lie alike.

    Values of a stack of several have a first dimension that counts the scopes; those of a single scope do not, so that
    methods see it as it is.

    Args:
        scopes: one, or several that lie alike.
    """

    def __init__(self, scopes: Sequence[MaskedScope]) -> None:
        self.scopes = list(scopes)
        self._stack = ScopeStack([scope.scope for scope in scopes])
        self._grids = [(len(scopes), *block.grid_shape) for block in scopes[0].blocks.values()]
        self.sizes = [torch.Size(grid).numel() for grid in self._grids]

    @property
    def scope(self) -> SparseScope:
        """The blocks that compete: a scope, or all scopes of the stack as a grid."""
        return self._stack if self._is_several else self.scopes[0].scope

    @property
    def _is_several(self) -> bool:
        return len(self.scopes) > 1

    def names(self) -> list[str]:
        """Return the names of all blocks in the order of their masks."""
        columns = zip(*(scope.blocks for scope in self.scopes), strict=True)
        return [name for column in columns for name in column]

    def gathered(self, flat: Tensor) -> Tensor:
        """Return flat masks gathered by scope."""
        pieces = torch.split(flat, self.sizes)
        grids = [piece.view(grid) for piece, grid in zip(pieces, self._grids, strict=True)]
        return self._own(self._stack.gather_stacked(grids))

    def flat(self, gathered: Tensor) -> Tensor:
        """Return values gathered by scope as flat ones."""
        wide = gathered if self._is_several else gathered.unsqueeze(0)
        grids = [grid.reshape(-1) for grid in self._stack.scatter_stacked(wide)]
        return grids[0] if len(grids) == 1 else torch.cat(grids)

    def stacked(self, values: Sequence[Tensor]) -> Tensor:
        """Return one tensor for each scope as one for the stack."""
        return torch.stack(list(values)) if self._is_several else values[0]

    def apart(self, value: Tensor) -> list[Tensor]:
        """Return a tensor for the stack as one for each scope."""
        return list(value.unbind()) if self._is_several else [value]

    def _own(self, wide: Tensor) -> Tensor:
        return wide if self._is_several else wide.squeeze(0)

    def ranked(self, scores: Mapping[str, Tensor], size_exponent: float, budget: Budget, mask: Tensor) -> Tensor | None:
        """Return the scores as the budget compares them, −inf for pruned blocks; None if there are none yet.

        Args:
            scores: gathered by scope, by name of the scope. They may be overwritten.
            size_exponent: of the criterion.
            budget: ranks the scores.
            mask: gathered by scope.
        """
        if not self.scopes[0].is_scored:
            return None
        ranked = self.stacked([scope.ranked(scores, size_exponent, budget) for scope in self.scopes])
        is_own = self._is_several or ranked is scores[self.scopes[0].name]
        return ranked.masked_fill_(mask, -torch.inf) if is_own else ranked.masked_fill(mask, -torch.inf)

    def growth(self, scores: Mapping[str, Tensor]) -> Tensor | None:
        """Return the scores by which blocks may grow; None for methods that grow none."""
        return self.stacked([scores[scope.name] for scope in self.scopes]) if scores else None

    def choose(self, method: Method, context: UpdateContext, later: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """Return the new mask, gathered by scope; `later` has the tensors that each scope is scored by now."""
        return type(self.scopes[0]).choose(self.scopes, method, context, [later[scope.name] for scope in self.scopes])

    def unscored(self) -> Tensor:
        """Return scores for a context whose method reads none: all zero, and without memory."""
        shape = (*self.scope.grid_shape, self.scope.numblk_per_scope())
        return torch.zeros((), device=self.scopes[0].device).expand(shape)

    def checked(self, memory: Tensor | None, method: Method) -> Tensor | None:
        """Return what a method remembers; raise an error if it can't be divided among the scopes of the stack."""
        if memory is not None and self._is_several and tuple(memory.shape[:1]) != (len(self.scopes),):
            raise SparsityError(
                f"{type(method).__name__}.remember returned a tensor of shape {tuple(memory.shape)} for a grid of "
                f"scopes of shape {self.scope.grid_shape}: its first dimension must be that of the grid, or the class "
                "must not declare decides_scopes_apart"
            )
        return memory

    @property
    def memory(self) -> Tensor | None:
        """What the method remembers from the previous update."""
        kept = [scope.memory for scope in self.scopes if scope.memory is not None]
        return self.stacked(kept) if kept else None

    @memory.setter
    def memory(self, memory: Tensor | None) -> None:
        for i, scope in enumerate(self.scopes):
            scope.memory = None if memory is None else self.apart(memory)[i]


class MaskBuffer:
    """The masks of all stacks, one after the other in one flat tensor. An update replaces the tensor, never its values.

    Args:
        stacks: whose masks it holds.
        device: where the masks are.

    Attributes:
        flat: all masks.
        is_pruned: whether a block is pruned.
        live: the masks of the blocks that are left in the model; the same tensor if all are.
        is_held: whether one of these is pruned.
    """

    def __init__(self, stacks: Sequence[MaskedStack], device: torch.device) -> None:
        self.stacks, self._device = list(stacks), device
        self._sizes = [sum(stack.sizes) for stack in stacks]
        shapes = {name: block.grid_shape for stack in stacks for s in stack.scopes for name, block in s.blocks.items()}
        self._layouts: dict[str, Layout] = {}
        start = 0
        for name in [name for stack in stacks for name in stack.names()]:
            self._layouts[name] = Layout(shapes[name], None, start)
            start += self._layouts[name].numel
        self._live = LiveLayouts([scope for stack in stacks for scope in stack.scopes], self._layouts, device)
        self._set(torch.zeros(start, dtype=torch.bool, device=device), is_pruned=False)

    def replace(self, flat: Tensor) -> None:
        """Set all masks."""
        # Known on the host from here on, so that no step synchronises with a device to find that nothing is pruned.
        self._set(flat, is_pruned=bool(flat.count_nonzero()))

    def _set(self, flat: Tensor, is_pruned: bool) -> None:
        self.flat, self.is_pruned, self.live = flat, is_pruned, self._live.of(flat)
        self.is_held = is_pruned and (self.live is flat or bool(self.live.count_nonzero()))
        views, live = self.views(flat), self.live_views(self.live)
        for stack in self.stacks:
            for scope in stack.scopes:
                scope.masks = {name: views[name] for name in scope.blocks}
                scope.live_masks = {name: live[name] for name in scope.blocks}

    def live_layout(self, name: str) -> Layout:
        """Return where the grid of the blocks that are left is in a flat tensor of all that are left."""
        return self._live.layouts[name]

    def live_of(self, flat: Tensor) -> Tensor:
        """Return the values of the blocks that are left, flat; the same tensor if all are."""
        return self._live.of(flat)

    def live_views(self, live: Tensor) -> dict[str, Tensor]:
        """Return the grid of the blocks that are left in a flat tensor of these, by name."""
        return grids_in(live, self._live.layouts)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the grid of each block in a flat tensor, by name."""
        return grids_in(flat, self._layouts)

    def gathered(self, flat: Tensor) -> list[Tensor]:
        """Return flat masks for each stack, gathered by scope."""
        parts = torch.split(flat, self._sizes)
        return [stack.gathered(part) for stack, part in zip(self.stacks, parts, strict=True)]

    def joined(self, gathered: Sequence[Tensor]) -> Tensor:
        """Return masks gathered by scope, one for each stack, as a flat tensor."""
        return torch.cat([stack.flat(mask) for stack, mask in zip(self.stacks, gathered, strict=True)])

    def from_names(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return masks by name as a flat tensor."""
        return torch.cat([masks[name].to(self._device).reshape(-1) for name in self._layouts])


def masked_stacks(scopes: Sequence[MaskedScope], together: bool) -> list[MaskedStack]:
    """Return all scopes in stacks, those that lie alike together if a method may decide on them in one call."""
    if not together:
        return [MaskedStack([scope]) for scope in scopes]
    alike = stacks((scope.scope for scope in scopes if not scope.is_scored), SELECTED, SELECTED)
    alike += stacks((scope.scope for scope in scopes if scope.is_scored), DECIDED)
    owner = {id(scope.scope): scope for scope in scopes}
    return [MaskedStack([owner[id(scope)] for scope in stack.scopes]) for stack in alike]


def decides_apart(method: Method) -> bool:
    """Whether a method may decide on alike scopes of several parameters in one call."""
    return declares(method, "decides_scopes_apart", "choose", "remember", "change", "kept")
