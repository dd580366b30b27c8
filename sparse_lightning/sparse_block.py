"""SparseBlock: what every grid of blocks can do, whether it tiles one view or couples several."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_lightning import prox
from sparse_lightning.chunk import chunks
from sparse_lightning.errors import CouplingError, LayoutError
from sparse_lightning.kernels import block_score
from sparse_lightning.reduction import MAX, MIN, Reduction, norm
from sparse_lightning.view import View, from_blocks

if TYPE_CHECKING:
    from sparse_lightning.block import BlockSpec

Values = Tensor | Mapping["BlockSpec", Tensor] | None
"""What blocks are read from or written to: None for the weights; a tensor of the parameter's shape or of the
view's (of the parameter's, where the two are the same); for a coupling a mapping from each spec to such a tensor."""

Thresholds = Tensor | float


class SparseBlock(ABC):
    """A grid of blocks: the common face of `BlockSpec` and `BlockCoupling`.

    A grid is a tensor of shape `grid_shape`, with one value for each block. A mask is a boolean grid that is
    True where a block is pruned.
    """

    name: str | None
    grid_shape: tuple[int, ...]

    @abstractmethod
    def blocks(self) -> list[BlockSpec]:
        """The BlockSpecs that make up this one."""

    @abstractmethod
    def order_of(self, spec: BlockSpec) -> tuple[int, ...]:
        """How the grid of a spec is permuted to become this grid."""

    @property
    def grid_ndim(self) -> int:
        """How many dimensions the grid has."""
        return len(self.grid_shape)

    def numblk(self) -> int:
        """How many blocks there are."""
        return math.prod(self.grid_shape)

    def numel(self) -> int:
        """How many weights there are, in all blocks."""
        return sum(spec.view.numel() for spec in self.blocks())

    def numel_per_block(self) -> int:
        """How many weights the first block has; others have fewer only at a partial edge."""
        return sum(math.prod(map(min, spec.shape, spec.view.shape)) for spec in self.blocks())

    def block_sizes(self) -> Tensor:
        """How many weights each block has: a grid of integers."""
        sizes = torch.zeros(self.grid_shape, dtype=torch.int64)
        for spec in self.blocks():
            sizes += self._to_grid(spec, spec.sizes())
        return sizes

    def parameters(self) -> list[Tensor]:
        """The parameters that the blocks belong to, each once."""
        return list({id(spec.param): spec.param for spec in self.blocks()}.values())

    def nnz(self, eps: float = 1e-8) -> int:
        """How many blocks hold a weight of magnitude above `eps`, or one that is not a number."""
        return int((~(self.norms(p=math.inf) <= eps)).sum())

    def zeros(self) -> Tensor:
        """How many weights lie in blocks that are wholly zero: a whole number, on the device of the weights."""
        zero = self.norms(p=math.inf) == 0
        return self.block_sizes().to(zero.device).masked_fill(~zero, 0).sum()

    def norms(self, values: Values = None, p: float = 2) -> Tensor:
        """The p-norm of each block: a grid; fp32 for the narrower floats."""
        return self._reduce(values, norm(p))

    def min(self, values: Values = None) -> Tensor:
        """The least element of each block: a grid."""
        return self._reduce(values, MIN)

    def max(self, values: Values = None) -> Tensor:
        """The greatest element of each block: a grid."""
        return self._reduce(values, MAX)

    def _reduce(self, values: Values, reduction: Reduction) -> Tensor:
        total = None
        for spec in self.blocks():
            run = block_score.choose(spec.param.device, elements=0)
            part = self._to_grid(spec, spec.fold(reduction.stage, run, self._values_of(spec, values))[0])
            total = part if total is None else reduction.combine(total, part)
        assert total is not None, "a block has at least one spec"
        return reduction.finish(total)

    def reduce(self, values: Values, fn: Callable[..., Tensor]) -> Tensor:
        """`fn(blocks, dim=-1)` on the elements of each block, laid end to end: a grid.

        Blocks are brought together a chunk of the grid at a time, as `(…, elements of a block)`; this copies
        the chunk unless the elements of a block lie on one stride.

        Example:
            >>> from sparse_lightning import BlockSpec
            >>> BlockSpec(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), (1, 2)).reduce(None, torch.sum)
            tensor([[3., 7.]])
        """
        grid = None
        for rectangle in self.rectangles():
            part = fn(joined(list(self.blocks_in(rectangle, values).values())), dim=-1)
            if grid is None:
                grid = part.new_empty(self.grid_shape)
            grid[rectangle] = part
        return torch.empty(self.grid_shape) if grid is None else grid

    def blocks_in(self, rectangle: tuple[slice, ...], values: Values = None) -> dict[BlockSpec, Tensor]:
        """The blocks of a rectangle of the grid, for each spec `(n0, n1, …, elements of a block)`."""
        found = {}
        for spec in self.blocks():
            view, lengths = spec.window_of(self._in_order_of(spec, rectangle), self._values_of(spec, values))
            blocks = View.block_view_of(view.data, lengths, merge=True)
            found[spec] = blocks.permute(*self.order_of(spec), self.grid_ndim)
        return found

    def set_blocks_in(self, rectangle: tuple[slice, ...], blocks: Mapping[BlockSpec, Tensor], values: Values) -> None:
        """Write back what `blocks_in` gave."""
        for spec in self.blocks():
            view, lengths = spec.window_of(self._in_order_of(spec, rectangle), self._values_of(spec, values))
            own = blocks[spec].permute(*inverse(self.order_of(spec)), self.grid_ndim)
            view.data = from_blocks(own, lengths)

    def rectangles(self) -> Iterator[tuple[slice, ...]]:
        """Parts of the grid in which all blocks of a spec have one size, of a bounded number of weights."""
        cuts = []
        for d, n in enumerate(self.grid_shape):
            odd = any(spec.has_edge(self.order_of(spec)[d]) for spec in self.blocks())
            cuts.append([(0, n - 1), (n - 1, n)] if odd and n > 1 else [(0, n)])
        device = self.parameters()[0].device
        for bounds in product(*cuts):
            for piece in chunks([hi - lo for lo, hi in bounds], device, each=self.numel_per_block()):
                ranges = [range(lo, hi)[s] for (lo, hi), s in zip(bounds, piece, strict=True)]
                yield tuple(slice(r.start, r.stop) for r in ranges)

    @abstractmethod
    def block_view(self, values: Values = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """The blocks as a tensor; see `View.block_view_of` for the three forms and for when they copy."""

    def apply_mask(self, mask: Tensor, values: Values = None) -> None:
        """Fill the blocks with zero where the mask is True, in place: exactly +0.0, whatever was there."""
        for spec in self.blocks():
            spec.part(self._values_of(spec, values)).fill_(self.grid_of(spec, mask))

    def apply_multiplier(self, multiplier: Tensor, values: Values = None) -> None:
        """Multiply each block by its grid value, in place."""
        for spec in self.blocks():
            spec.part(self._values_of(spec, values)).scale_(self.grid_of(spec, multiplier))

    def get_masks(self, block_mask: Tensor) -> dict[BlockSpec, Tensor]:
        """A mask of blocks as masks of weights, of the shape of each spec's view."""
        return {spec: spec.expand_to_elements(self.grid_of(spec, block_mask)) for spec in self.blocks()}

    def hard_threshold(self, thresholds: Thresholds, values: Values = None) -> Tensor:
        """Zero the blocks whose 2-norm is below their threshold, in place; gives the mask.

        What is judged is what is written: the values, or the weights without them. A norm that is not a
        number is below every threshold.
        """
        mask = ~(self.norms(values) >= thresholds)
        self.apply_mask(mask, values)
        return mask

    def soft_threshold(self, thresholds: Thresholds, values: Values = None, conditioners: Values = None) -> Tensor:
        """The proximal step of the penalty `t · ‖block‖`, in place; gives the mask of blocks that became zero.

        A block of norm n is scaled by `max(0, 1 − t/n)`. With conditioners, a positive diagonal h such as
        Adam keeps, it becomes the x that minimises `½ Σ h (x − v)² + t ‖x‖`, found by a fixed number of
        steps on the grid, so that the device is never waited for.
        """
        if conditioners is None:
            return prox.shrink(self, thresholds, values)
        return prox.shrink_conditioned(self, thresholds, values, conditioners)

    def _values_of(self, spec: BlockSpec, values: Values) -> Tensor | None:
        if values is None or isinstance(values, Tensor):
            return values
        if spec not in values:
            raise CouplingError(f"no values for {spec} among those given: give a tensor for every spec")
        return values[spec]

    def _to_grid(self, spec: BlockSpec, grid: Tensor) -> Tensor:
        return grid.permute(self.order_of(spec))

    def grid_of(self, spec: BlockSpec, grid: Tensor) -> Tensor:
        """A grid of this block as the grid of one of its specs."""
        if tuple(grid.shape) != self.grid_shape:
            raise LayoutError(f"values of shape {tuple(grid.shape)} for the grid {self.grid_shape} of {self}")
        return grid.permute(inverse(self.order_of(spec)))

    def _in_order_of(self, spec: BlockSpec, rectangle: tuple[slice, ...]) -> list[slice]:
        return [rectangle[d] for d in inverse(self.order_of(spec))]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors laid end to end along the last dimension; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another."""
    return [order.index(d) for d in range(len(order))]
