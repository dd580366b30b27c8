"""MaskedScope: a scope at run time. Its blocks by name, their masks, and the memory of the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from sparse_lightning.blocks.live_scope import LiveScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.union import zero_grid
from sparse_lightning.budgets import Budget, ScoredScope
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.flow import Sources
from sparse_lightning.methods import Method, UpdateContext
from sparse_lightning.patterns import Attachment


class MaskedScope:
    """A scope that a pattern has attached, with its masks.

    Args:
        attachment: what the pattern returned.
        left: what is left of its blocks, if units of the model are removed; None if all are there.

    Attributes:
        name: unique in the model.
        pattern: the label of the pattern, for logs.
        scope: the blocks that compete.
        final: the final sparsity that the pattern fixes; None where the budget decides.
        blocks: the blocks by name.
        masks: for each block, by the same name, a boolean grid; True = pruned. Views of the masks of the engine.
        live: the scope on the weights that are left; the same scope if all are.
        live_blocks: its blocks, by the same names.
        live_masks: the masks of these.
        memory: what the method remembers from one update to the next.
    """

    is_scored = True
    """Whether scores of its blocks are computed before the method chooses."""

    def __init__(self, attachment: Attachment, left: LiveScope | None = None) -> None:
        self.name, self.pattern = attachment.name, attachment.pattern
        self.scope, self.final, self.left = attachment.scope, attachment.final, left
        self.live = self.scope if left is None else left.scope
        self.blocks: dict[str, SparseBlock] = self.scope.named_blocks(self.name)
        self.live_blocks = self.live.named_blocks(self.name)
        self._parameters = self.live.unique_params()
        self.device = self._parameters[0].device
        self.masks: dict[str, Tensor] = {}
        self.live_masks: dict[str, Tensor] = {}
        self.memory: Tensor | None = None

    def check_has_values(self) -> None:
        """Raise an error if a parameter is on the meta device."""
        check_has_values(self.name, self._parameters)

    def zero_grids(self) -> list[tuple[SparseBlock, Tensor]]:
        """Return for each block the grid of those that are zero or removed, counted from the weights."""
        grids = [(block, zero_grid(self.live_blocks[name])) for name, block in self.blocks.items()]
        if self.left is None:
            return grids
        return [(block, _widened(block, zero, kept)) for (block, zero), kept in zip(grids, self.left.kept, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the blocks belong to, each once."""
        return self._parameters

    def ranked(self, scores: Mapping[str, Tensor], size_exponent: float, budget: Budget) -> Tensor:
        """Return the scores as the budget compares them, gathered by scope.

        Args:
            scores: gathered by scope, by name of the scope.
            size_exponent: of the criterion.
            budget: ranks the scores.
        """
        return budget.rank(ScoredScope(self.name, self.scope, scores[self.name], self.final, size_exponent))

    def unscored(self) -> ScoredScope:
        """Return the scope for a budget that needs no scores; they are all zero and take no memory."""
        shape = (*self.scope.grid_shape, self.scope.numblk_per_scope())
        device = torch.device("cpu") if self.device.type == "meta" else self.device  # counts are read from it
        return ScoredScope(self.name, self.scope, torch.zeros((), device=device).expand(shape), self.final)

    def scored_later(self, sources: Sources) -> list[Tensor]:
        """Return the tensors that scores are computed from only when blocks are chosen."""
        return []

    @classmethod
    def choose(
        cls, scopes: Sequence[Self], method: Method, context: UpdateContext, tensors: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """Return the new mask of scopes that lie alike, gathered as in the context.

        Args:
            scopes: one, or several that lie alike.
            method: decides.
            context: of all of them.
            tensors: what `scored_later` returned for each.
        """
        return method.choose(context)

    def named(self, gathered: Tensor) -> dict[str, Tensor]:
        """Return values that are gathered by scope as the grid of each block, by name."""
        grids = self.scope.scatter(gathered)
        return {name: grids[block] for name, block in self.blocks.items()}

    def not_zero(self, masks: Mapping[str, Tensor]) -> list[str]:
        """Return the names of those masks that prune a block whose weights are not zero."""
        fitting = {n: b for n, b in self.blocks.items() if n in masks and masks[n].shape == b.grid_shape}
        return [n for n, b in fitting.items() if (masks[n].to(self.device) & (b.norms() != 0)).any()]


def _widened(block: SparseBlock, zero: Tensor, kept: Tensor) -> Tensor:
    """Return the grid of all blocks, of which those that are not left are True."""
    whole = torch.ones(block.numblk(), dtype=torch.bool, device=zero.device)
    whole[kept.to(zero.device)] = zero.reshape(-1)
    return whole.view(block.grid_shape)


def check_has_values(name: str, params: Iterable[Tensor]) -> None:
    """Raise an error if a parameter of a scope is on the meta device, where tensors have a shape only."""
    if any(param.is_meta for param in params):
        raise SparseLightningError(
            f"{name} is on the meta device, so that its weights have no values to score or to count: call to_empty() "
            "on the model and load its weights, before the optimizer is made"
        )
