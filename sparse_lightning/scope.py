"""Scopes: the sets of blocks that compete with each other; a budget holds in each."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.block import BlockSpec, check_orders, permuted
from sparse_lightning.errors import CouplingError, LayoutError, ScoreWarning, SparsityError
from sparse_lightning.layout import check_division, grid_shape, resolve_block_shape
from sparse_lightning.sparse_block import SparseBlock, Thresholds, Values, inverse, joined
from sparse_lightning.view import View, from_blocks

Scores = Tensor | Mapping[SparseBlock, Tensor]
"""Scores of blocks: a tensor `(*grid_shape, blocks per scope)`; for one block its grid; for several a mapping from
each block to its grid."""


class SparseScope(ABC):
    """A grid of scopes: the common face of `ScopeSpec` and `ScopeCoupling`.

    Values of blocks come in two forms: in the grid of their block, or gathered by scope, as a tensor
    `(*grid_shape, blocks per scope)` in which the blocks of a scope stand in the order of their index.
    """

    name: str | None
    grid_shape: tuple[int, ...]

    @abstractmethod
    def members(self) -> list[ScopeSpec]:
        """The ScopeSpecs that make up this one."""

    @abstractmethod
    def order_of(self, member: ScopeSpec) -> tuple[int, ...]:
        """How the scope grid of a member is permuted to become this one."""

    @property
    def grid_ndim(self) -> int:
        """How many dimensions the grid of scopes has."""
        return len(self.grid_shape)

    def blocks(self) -> list[SparseBlock]:
        """The blocks that compete, one entry for each member."""
        return [member.block for member in self.members()]

    def parameters(self) -> list[Tensor]:
        """The parameters that the blocks belong to, each once."""
        return list({id(p): p for block in self.blocks() for p in block.parameters()}.values())

    def numscp(self) -> int:
        """How many scopes there are."""
        return math.prod(self.grid_shape)

    def numblk_per_scope(self) -> int:
        """How many blocks each scope has."""
        return sum(math.prod(member.shape) for member in self.members())

    def numblk(self) -> int:
        """How many blocks there are, in all scopes."""
        return sum(block.numblk() for block in self.blocks())

    def numel(self) -> int:
        """How many weights there are, in all scopes."""
        return sum(block.numel() for block in self.blocks())

    def numel_per_scope(self) -> int:
        """How many weights the first scope has; others have fewer only at a partial edge."""
        total = 0
        for member in self.members():
            corner = tuple(slice(n) for n in member.shape)
            total += sum(spec.numel_in(corner, member.block.order_of(spec)) for spec in member.block.blocks())
        return total

    def sparsity_to_nnz(self, s: float) -> int:
        """The blocks kept in each scope of n blocks for a sparsity s: `n − floor(s·n + 1e-9)`."""
        if not 0 <= s <= 1:
            raise SparsityError(f"a sparsity of {s} for {self}: it must lie between 0 (dense) and 1 (all pruned)")
        n = self.numblk_per_scope()
        return n - math.floor(s * n + 1e-9)

    def block_norms(self, values: Values = None) -> Tensor:
        """The 2-norm of each block, gathered by scope: `(*grid_shape, blocks per scope)`."""
        return self.gather({block: block.norms(self._values_of(block, values)) for block in self.blocks()})

    def gather(self, grids: Mapping[SparseBlock, Tensor]) -> Tensor:
        """Grids of blocks → values gathered by scope, `(*grid_shape, blocks per scope)`."""
        parts = []
        for member in self.members():
            if member.block not in grids:
                raise CouplingError(f"no scores for {member.block} among those given: give a grid for every block")
            parts.append(member.gather_grid(grids[member.block]).permute(*self.order_of(member), self.grid_ndim))
        return joined(parts)

    def scatter(self, values: Tensor) -> dict[SparseBlock, Tensor]:
        """Values gathered by scope → grids of blocks."""
        grids = {}
        parts = torch.split(values, [math.prod(member.shape) for member in self.members()], -1)
        for member, part in zip(self.members(), parts, strict=True):
            own = part.permute(*inverse(self.order_of(member)), self.grid_ndim)
            grids[member.block] = member.scatter_grid(own)
        return grids

    def select(self, scores: Scores, nnz: int | Tensor) -> Scores:
        """The mask (True = pruned) that keeps exactly `nnz` blocks in each scope, those with the highest scores.

        Of equal scores the lower index is kept. NaN ranks lowest of all.

        Args:
            scores: in any form of `Scores`; the mask comes in the same form.
            nnz: blocks kept in each scope; a tensor of `grid_shape` gives each scope its own.

        Example:
            >>> pairs = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)), (1, 4))
            >>> pairs.select(torch.tensor([[0.1, 0.4, 0.4, 0.3]]), 2)
            tensor([[ True, False, False,  True]])
        """
        mask = self._select(self._gathered(scores), nnz)
        if not isinstance(scores, Tensor):
            return self.scatter(mask)
        return mask if scores.shape == mask.shape else self.scatter(mask)[self.blocks()[0]]

    def _select(self, gathered: Tensor, nnz: int | Tensor) -> Tensor:
        self._report_nan(gathered)
        keep = self._counts(nnz, gathered.device)
        order = _falling_order(gathered)
        places = torch.arange(gathered.shape[-1], dtype=torch.int32, device=gathered.device)
        return torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, places >= keep.unsqueeze(-1))

    def kth_largest(self, scores_or_values: Scores | Values, nnz: int | Tensor) -> Tensor:
        """The score of the last block kept in each scope when `nnz` are: a tensor of `grid_shape`.

        Kept blocks score at least this much. Where none is kept it is inf; a NaN that is kept counts as −inf.

        Args:
            scores_or_values: scores in any form of `Scores`, or values whose 2-norms are the scores. What
                has the shape of a grid is taken for scores.
            nnz: blocks kept in each scope; a tensor of `grid_shape` gives each scope its own.
        """
        scores = self._gathered_or_norms(scores_or_values)
        keep = self._counts(nnz, scores.device)
        ranked = scores.gather(-1, _falling_order(scores)).nan_to_num(-math.inf, math.inf, -math.inf)
        if not ranked.shape[-1]:
            return torch.full(self.grid_shape, math.inf, dtype=scores.dtype, device=scores.device)
        last = ranked.gather(-1, (keep - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(keep > 0, last, math.inf)

    def get_masks(
        self, nnz: int | Tensor, values: Values = None, block_scores: Scores | None = None
    ) -> dict[BlockSpec, Tensor]:
        """The masks of weights that keep `nnz` blocks in each scope, for each BlockSpec in its view's shape.

        Blocks are judged by `block_scores`, or by the 2-norms of the values, or of the weights.
        """
        scores = self.block_norms(values) if block_scores is None else self._gathered(block_scores)
        masks: dict[BlockSpec, Tensor] = {}
        for block, mask in self.scatter(self._select(scores, nnz)).items():
            masks |= block.get_masks(mask)
        return masks

    def hard_threshold(
        self, thresholds: Thresholds | None = None, nnz: int | Tensor | None = None, values: Values = None
    ) -> dict[SparseBlock, Tensor]:
        """Prune in place, by thresholds on the 2-norm or to a number of blocks; gives the mask of each block.

        What is judged is what is written: the values, or the weights without them.

        Args:
            thresholds: blocks with a norm below are pruned; one value, or a tensor of `grid_shape`.
            nnz: blocks kept in each scope; give this or thresholds.
            values: what to judge and prune in place of the weights.
        """
        norms = self.block_norms(values)
        if nnz is not None and thresholds is None:
            masks = self.scatter(self._select(norms, nnz))
        elif thresholds is not None and nnz is None:
            masks = self.scatter(~(norms >= self._per_scope(thresholds, norms).unsqueeze(-1)))
        else:
            raise SparsityError(f"hard_threshold of {self} takes either thresholds or nnz: give one of the two")
        for block, mask in masks.items():
            block.apply_mask(mask, self._values_of(block, values))
        return masks

    def soft_threshold(
        self, thresholds: Thresholds, values: Values = None, conditioners: Values = None
    ) -> dict[SparseBlock, Tensor]:
        """The proximal step with one threshold for each scope, in place; see `SparseBlock.soft_threshold`."""
        grids: dict[SparseBlock, Thresholds] = dict.fromkeys(self.blocks(), thresholds)
        if isinstance(thresholds, Tensor):
            wide = self._per_scope(thresholds, thresholds).unsqueeze(-1)
            grids |= self.scatter(wide.expand(*self.grid_shape, self.numblk_per_scope()))
        return {
            block: block.soft_threshold(t, self._values_of(block, values), self._values_of(block, conditioners))
            for block, t in grids.items()
        }

    def _values_of(self, block: SparseBlock, values: Values) -> Values:
        if isinstance(values, Tensor) and len(self.members()) > 1:
            raise CouplingError(f"one tensor of values for {self}: give a mapping from each BlockSpec to a tensor")
        return values

    def _gathered(self, scores: Scores) -> Tensor:
        if isinstance(scores, Mapping):
            return self.gather(scores)
        if tuple(scores.shape) == (*self.grid_shape, self.numblk_per_scope()):
            return scores
        if len(self.members()) == 1 and tuple(scores.shape) == self.blocks()[0].grid_shape:
            return self.gather({self.blocks()[0]: scores})
        raise LayoutError(
            f"scores of shape {tuple(scores.shape)} for {self}: give them gathered by scope, "
            f"{(*self.grid_shape, self.numblk_per_scope())}, or as grids of {[b.grid_shape for b in self.blocks()]}"
        )

    def _gathered_or_norms(self, scores_or_values: Scores | Values) -> Tensor:
        if isinstance(scores_or_values, Tensor):
            forms = [(*self.grid_shape, self.numblk_per_scope()), *(b.grid_shape for b in self.blocks())]
            if tuple(scores_or_values.shape) in forms:
                return self._gathered(scores_or_values)
        elif scores_or_values is not None:
            given: dict[Any, Tensor] = dict(scores_or_values.items())
            if all(block in given and tuple(given[block].shape) == block.grid_shape for block in self.blocks()):
                return self.gather(given)
            return self.block_norms(given)
        return self.block_norms(scores_or_values)

    def _counts(self, nnz: int | Tensor, device: torch.device) -> Tensor:
        keep, n = torch.as_tensor(nnz, device=device), self.numblk_per_scope()
        if keep.is_floating_point() or keep.dtype == torch.bool:
            raise SparsityError(f"nnz of dtype {keep.dtype} for {self}: it counts blocks, so it must be an integer")
        if keep.numel() and not (int(keep.min()) >= 0 and int(keep.max()) <= n):
            raise SparsityError(f"{nnz} blocks to keep in each scope of {self}: it must lie between 0 and {n}")
        return keep.expand(self.grid_shape)

    def _per_scope(self, thresholds: Thresholds, like: Tensor) -> Tensor:
        return torch.as_tensor(thresholds, dtype=like.dtype, device=like.device).expand(self.grid_shape)

    def _report_nan(self, gathered: Tensor) -> None:
        wrong = gathered.isnan()
        if wrong.any():
            names = [str(block.name or block) for block, where in self.scatter(wrong).items() if where.any()]
            warnings.warn(
                f"{int(wrong.sum())} scores of {', '.join(names)} are NaN: those blocks rank lowest", ScoreWarning, 4
            )


class ScopeSpec(SparseScope):
    """Cuts the grid of a block into scopes.

    Args:
        block: a BlockSpec or a BlockCoupling.
        shape: the scope, counted in blocks; −1 or a missing entry spans its dimension.
        name: what errors and tables call it.

    Example:
        >>> weights = BlockSpec(torch.nn.Parameter(torch.randn(8, 16)), (1, 1))
        >>> two_of_four = ScopeSpec(weights, (1, 4))
        >>> two_of_four.grid_shape, two_of_four.numblk_per_scope(), two_of_four.sparsity_to_nnz(0.5)
        ((8, 4), 4, 2)
    """

    def __init__(self, block: SparseBlock, shape: Sequence[int] = (), name: str | None = None) -> None:
        self.block = block
        self.name = name
        wanted = (*shape, *(-1,) * (block.grid_ndim - len(shape)))
        try:
            self.shape = resolve_block_shape(block.grid_shape, wanted)
            check_division(block.grid_shape, self.shape)
        except LayoutError as error:
            raise LayoutError(
                f"scope {tuple(shape)} on the grid {block.grid_shape} of {block}: {error}. Change the scope, which "
                "counts blocks, or the block shape"
            ) from None
        self.grid_shape = grid_shape(block.grid_shape, self.shape)

    def members(self) -> list[ScopeSpec]:
        """This spec."""
        return [self]

    def order_of(self, member: ScopeSpec) -> tuple[int, ...]:
        """The grid as it is."""
        return tuple(range(self.grid_ndim))

    def gather_grid(self, grid: Tensor) -> Tensor:
        """A grid of blocks → its values gathered by scope, `(*grid_shape, blocks per scope)`."""
        if tuple(grid.shape) != self.block.grid_shape:
            raise LayoutError(
                f"scores of shape {tuple(grid.shape)} for the grid {self.block.grid_shape} of {self.block}"
            )
        return View.block_view_of(grid, self.shape, merge=True)

    def scatter_grid(self, gathered: Tensor) -> Tensor:
        """Values gathered by scope → a grid of blocks."""
        return from_blocks(gathered, self.shape)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"ScopeSpec({name}{self.block}, scope={self.shape}, grid={self.grid_shape})"


class ScopeCoupling(SparseScope):
    """Lets the blocks of several scopes compete under one budget.

    Args:
        scopes: ScopeSpecs on different blocks.
        orders: for each scope how its grid is permuted so that all grids agree; None leaves them as they are.
        name: what errors and tables call it.

    Example:
        >>> first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        >>> parts = [ScopeSpec(BlockSpec(layer.weight, (2, 2))) for layer in (first, second)]
        >>> ScopeCoupling(parts).numblk_per_scope()
        24
    """

    def __init__(
        self,
        scopes: Sequence[ScopeSpec],
        orders: Sequence[Sequence[int] | None] | None = None,
        name: str | None = None,
    ) -> None:
        self.scopes = list(scopes)
        self.name = name
        label = f"coupling {name!r} of scopes" if name else "a coupling of scopes"
        if not self.scopes:
            raise CouplingError(f"{label} of none: give at least one")
        self.orders = check_orders(label, [scope.grid_shape for scope in self.scopes], orders)
        blocks = [scope.block for scope in self.scopes]
        if len(set(blocks)) != len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise CouplingError(f"{twice} stands in {label} twice: it can't compete with itself")
        self.grid_shape = permuted(self.scopes[0].grid_shape, self.orders[0])

    def members(self) -> list[ScopeSpec]:
        """The scopes that are coupled."""
        return list(self.scopes)

    def order_of(self, member: ScopeSpec) -> tuple[int, ...]:
        """How the grid of a member is permuted to become this grid."""
        return self.orders[self.scopes.index(member)]

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"ScopeCoupling({name}{self.scopes}, grid={self.grid_shape})"


def _falling_order(scores: Tensor) -> Tensor:
    """Indices from the highest score to the lowest along the last dimension; of equals the lower index first.

    torch sorts NaN behind all numbers when it sorts upwards, and the negative of NaN is NaN.
    """
    if scores.is_floating_point():
        return torch.sort(-scores, dim=-1, stable=True).indices
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices
