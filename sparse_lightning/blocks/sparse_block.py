"""SparseBlock, what every grid of blocks can do, and BlockSpec, the grid of blocks of one view.

A SparseBlock consists of BlockSpecs, and a BlockSpec is the SparseBlock that consists of itself: the two are defined
together. `spec.BlockCoupling` is the SparseBlock that consists of several.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from sparse_lightning.blocks.reductions import MAX, MIN, Reduction, norm
from sparse_lightning.blocks.shards import Part, complete
from sparse_lightning.blocks.thresholds import NEWTON_STEPS, Newton, Thresholds, scaled, solve, thresholds_like
from sparse_lightning.blocks.tiled_view import TiledView
from sparse_lightning.blocks.view import View, from_blocks
from sparse_lightning.errors import CouplingError, LayoutError
from sparse_lightning.kernels import block_score
from sparse_lightning.kernels.block_score.reference import accumulation_dtype
from sparse_lightning.kernels.chunks import chunks
from sparse_lightning.layout.permutation import inverse, permuted
from sparse_lightning.renamed import renamed_keyword

Values = Tensor | Mapping["BlockSpec", Tensor] | None
"""What blocks are read from or written to: None for the weights; a tensor of the shape of the parameter or of the view
(of the parameter, if both are the same); for a coupling a mapping from each spec to such a tensor."""


class SparseBlock(ABC):
    """A grid of blocks: the base class of `BlockSpec` and `BlockCoupling`.

    A grid is a tensor of shape `grid_shape`, with one value for each block. A mask is a boolean grid that is
    True where a block is pruned.
    """

    name: str | None
    grid_shape: tuple[int, ...]

    @abstractmethod
    def blocks(self) -> list[BlockSpec]:
        """Return the BlockSpecs of this block."""

    @abstractmethod
    def order_of(self, spec: BlockSpec) -> tuple[int, ...]:
        """Return the permutation from the grid of a spec to this grid."""

    def readers(self) -> list[BlockSpec]:
        """Return the specs that read what the others compute: a unit contributes nothing while they are zero."""
        return []

    @property
    def ndim(self) -> int:
        """The number of dimensions of the view; in a coupling, all views have as many."""
        return self.blocks()[0].view.ndim

    @property
    def grid_ndim(self) -> int:
        """The number of dimensions of the grid."""
        return len(self.grid_shape)

    def numblk(self) -> int:
        """Return the number of blocks."""
        return math.prod(self.grid_shape)

    def numel(self) -> int:
        """Return the number of weights in all blocks."""
        return sum(spec.view.numel() for spec in self.blocks())

    def numel_per_block(self) -> int:
        """Return the number of weights of the first block; others have fewer only at a partial edge."""
        return sum(math.prod(map(min, spec.shape, spec.view.shape)) for spec in self.blocks())

    def block_sizes(self) -> Tensor:
        """Return the number of weights of each block: a grid of integers."""
        sizes = torch.zeros(self.grid_shape, dtype=torch.int64)
        for spec in self.blocks():
            sizes += self._to_grid(spec, spec.sizes())
        return sizes

    def parameters(self) -> list[View]:
        """Return the view of each spec."""
        return [spec.view for spec in self.blocks()]

    def unique_params(self) -> list[Tensor]:
        """Return the parameters of the views, each once."""
        return list({id(spec.param): spec.param for spec in self.blocks()}.values())

    def nnz(self, eps: float = 1e-8) -> int:
        """Return the number of weights with a magnitude above `eps`, or that are NaN."""
        parts: list[Part] = [(spec.part().count_above(eps).view(1), "sum", spec.param) for spec in self.blocks()]
        return sum([int(count) for count in complete(parts)])

    def nnz_blocks(self, eps: float = 1e-8) -> int:
        """Return the number of blocks with a weight of magnitude above `eps`, or one that is NaN."""
        return int((~(self.norms(p=math.inf) <= eps)).sum())

    def norms(self, values: Values = None, p: float = 2) -> Tensor:
        """Return the p-norm of each block: a grid; fp32 for narrower floats."""
        return self._reduce(values, norm(p))

    def min(self, values: Values = None) -> Tensor:
        """Return the minimum of each block: a grid."""
        return self._reduce(values, MIN)

    def max(self, values: Values = None) -> Tensor:
        """Return the maximum of each block: a grid."""
        return self._reduce(values, MAX)

    def _reduce(self, values: Values, reduction: Reduction) -> Tensor:
        total = None
        for spec in self.blocks():
            run = block_score.choose(spec.param.device, elements=0)
            part = self._to_grid(spec, spec.fold(reduction.stage, run, self._values_of(spec, values))[0])
            total = part if total is None else reduction.combine(total, part)
        assert total is not None, "a block has at least one spec"
        return reduction.finish(total)

    @renamed_keyword("fn", "reduce_fn", lambda self, values, fn: self.reduce_chunks(values, lambda b: fn(b, dim=-1)))
    def reduce(self, values: Values, reduce_fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a function of the merged block view, `(*grid_shape, elements of a block)`: a grid.

        The merged block view is copied unless a single stride expresses the elements of a block; `reduce_chunks` needs
        less memory. If blocks at the edge are smaller, the function is called once for the blocks of each size.

        Args:
            values: what to reduce; None for the weights.
            reduce_fn: a function of one tensor; its result has the shape of the grid.

        Example:
            >>> from sparse_lightning import BlockSpec
            >>> BlockSpec(torch.tensor([[1.0, -2.0, 3.0, 4.0]]), (1, 2)).reduce(None, lambda b: b.abs().amax(-1))
            tensor([[2., 4.]])
        """
        return self._reduce_parts(values, reduce_fn, self.equal_parts())

    def reduce_chunks(self, values: Values, reduce_fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `reduce` of a function that treats each block alone: it is called on a chunk of the blocks at a time.

        Memory is bounded: a chunk is copied unless a single stride expresses the elements of a block.
        """
        return self._reduce_parts(values, reduce_fn, self.rectangles())

    def _reduce_parts(
        self, values: Values, reduce_fn: Callable[[Tensor], Tensor], parts: Iterable[tuple[slice, ...]]
    ) -> Tensor:
        grid = None
        for rectangle in parts:
            blocks = joined(list(self.blocks_in(rectangle, values).values()))
            part = reduce_fn(blocks)
            shape = getattr(part, "shape", None)
            if shape != blocks.shape[:-1]:
                found = part if shape is None else f"a tensor of shape {tuple(shape)}"
                raise LayoutError(
                    f"reduce_fn returned {found} for blocks of shape {tuple(blocks.shape)}: its result must have the "
                    f"shape of the grid, {tuple(blocks.shape[:-1])}, such as that of `lambda b: b.sum(-1)`"
                )
            if grid is None:
                grid = part.new_empty(self.grid_shape)
            grid[rectangle] = part
        return torch.empty(self.grid_shape) if grid is None else grid

    def blocks_in(self, rectangle: tuple[slice, ...], values: Values = None) -> dict[BlockSpec, Tensor]:
        """Return the blocks of a rectangle of the grid, for each spec `(n0, n1, …, elements of a block)`."""
        found = {}
        for spec in self.blocks():
            view, lengths = spec.window_of(self._in_order_of(spec, rectangle), self._values_of(spec, values))
            blocks = View.block_view_of(view.read(), lengths, merge=True)
            found[spec] = blocks.permute(*self.order_of(spec), self.grid_ndim)
        return found

    def set_blocks_in(self, rectangle: tuple[slice, ...], blocks: Mapping[BlockSpec, Tensor], values: Values) -> None:
        """Write blocks of the form that `blocks_in` returns."""
        for spec in self.blocks():
            view, lengths = spec.window_of(self._in_order_of(spec, rectangle), self._values_of(spec, values))
            own = blocks[spec].permute(*inverse(self.order_of(spec)), self.grid_ndim)
            view.data = from_blocks(own, lengths)

    def equal_parts(self) -> Iterator[tuple[slice, ...]]:
        """Yield rectangles of the grid with blocks of one size for each spec: one, or more if there are edges."""
        cuts = []
        for d, n in enumerate(self.grid_shape):
            odd = any(spec.has_edge(self.order_of(spec)[d]) for spec in self.blocks())
            cuts.append([slice(0, n - 1), slice(n - 1, n)] if odd and n > 1 else [slice(0, n)])
        yield from (part for part in product(*cuts) if self.numblk())

    def rectangles(self) -> Iterator[tuple[slice, ...]]:
        """Yield `equal_parts` cut into rectangles with a bounded number of weights."""
        device = self.blocks()[0].param.device
        for part in self.equal_parts():
            bounds = [range(n)[s] for n, s in zip(self.grid_shape, part, strict=True)]
            for piece in chunks([len(r) for r in bounds], device, each=self.numel_per_block()):
                ranges = [r[s] for r, s in zip(bounds, piece, strict=True)]
                yield tuple(slice(r.start, r.stop) for r in ranges)

    @abstractmethod
    def block_view(self, values: Values = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """Return the blocks as a tensor; see `View.block_view_of` for the three forms and for when they copy."""

    @renamed_keyword("grid", "block_values", lambda self, grid: self.expand_to_block_view(grid))
    def expand_block_tensor(self, block_values: Tensor) -> Tensor:
        """Return a tensor of one value per block in the shape of the grid, dimensions of size 1 included.

        Example:
            >>> from sparse_lightning import BlockSpec
            >>> BlockSpec(torch.ones(4, 6), (1, -1)).expand_block_tensor(torch.arange(4)).shape
            torch.Size([4, 1])
        """
        if block_values.numel() != self.numblk():
            raise LayoutError(
                f"{block_values.numel()} values for the {self.numblk()} blocks of {self}: pass one value for each block"
            )
        return block_values.reshape(self.grid_shape)

    def apply_mask(self, mask: Tensor, *, values: Values = None) -> None:
        """Fill the blocks with zero where the mask is True, in place: exactly +0.0, whatever was there."""
        for spec in self.blocks():
            spec.part(self._values_of(spec, values)).fill_(self.grid_of(spec, mask))

    def apply_multiplier(self, multiplier: Tensor, *, values: Values = None) -> None:
        """Multiply each block by its grid value, in place."""
        for spec in self.blocks():
            spec.part(self._values_of(spec, values)).scale_(self.grid_of(spec, multiplier))

    @renamed_keyword("block_mask", "block_masks")
    def get_masks(self, block_masks: Tensor) -> dict[BlockSpec, Tensor]:
        """Return a mask of blocks as masks of weights, in the shape of the view of each spec."""
        return {spec: spec.expand_to_elements(self.grid_of(spec, block_masks)) for spec in self.blocks()}

    def hard_threshold(self, thresholds: Thresholds, *, values: Values = None) -> Tensor:
        """Zero the blocks whose 2-norm is below their threshold, in place; return the mask.

        Norms are taken of what is written: the values if passed, otherwise the weights. A norm of NaN is below every
        threshold.
        """
        mask = ~(self.norms(values) >= thresholds)
        self.apply_mask(mask, values=values)
        return mask

    def soft_threshold(
        self,
        thresholds: Thresholds,
        *,
        values: Values = None,
        conditioners: Values = None,
        max_iter: int = NEWTON_STEPS,
        atol: float = 0.0,
        eps: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor:
        """Apply the proximal step of the penalty `t · ‖block‖` in place; return the mask of blocks that became zero.

        A block of norm n is scaled by `max(0, 1 − t/n)`. With conditioners, a positive diagonal h such as that of
        Adam, it becomes the x that minimizes `½ Σ h (x − v)² + t ‖x‖`, found by a fixed number of steps, so that
        nothing waits for the device.

        Args:
            thresholds: t, one for all blocks or a grid.
            values: what to change instead of the weights.
            conditioners: h; None for 1.
            max_iter: the number of steps with conditioners.
            atol: with conditioners, a block whose norm moves by at most this in a step is not moved further.
            eps: added to the conditioners.
            scale: a factor of the thresholds, such as the learning rate.
        """
        newton, thresholds = Newton(max_iter, atol, eps), scaled(thresholds, scale)
        if conditioners is not None:
            return self._soft_threshold_conditioned(thresholds, values, conditioners, newton)
        norms = self.norms(values)
        t = thresholds_like(norms, thresholds, self.grid_shape)
        mask = norms <= t
        self.apply_mask(mask, values=values)
        self.apply_multiplier(torch.where(norms > t, 1 - t / norms, 1.0), values=values)
        return mask

    def _soft_threshold_conditioned(
        self, thresholds: Thresholds, values: Values, conditioners: Values, newton: Newton
    ) -> Tensor:
        """Solve for the blocks of one rectangle of the grid at a time: memory is bounded, weights are read once."""
        mask = torch.zeros(self.grid_shape, dtype=torch.bool, device=self.blocks()[0].param.device)
        for rectangle in self.rectangles():
            parts, metric = self.blocks_in(rectangle, values), self.blocks_in(rectangle, conditioners)
            _check_floats([*parts.values(), *metric.values()])
            v, h = _wide(list(parts.values())), _wide(list(metric.values()))
            t = thresholds_like(v, thresholds, self.grid_shape)
            x, zero = solve(v, h, (t[rectangle] if t.ndim else t).unsqueeze(-1), newton)
            solved = torch.split(x, [part.shape[-1] for part in parts.values()], -1)
            self.set_blocks_in(rectangle, dict(zip(parts, solved, strict=True)), values)
            mask[rectangle] = zero
        self.apply_mask(mask, values=values)
        return mask

    def _values_of(self, spec: BlockSpec, values: Values) -> Tensor | None:
        if values is None or isinstance(values, Tensor):
            return values
        if spec not in values:
            raise CouplingError(f"no values for {spec}: pass a tensor for every spec")
        return values[spec]

    def _to_grid(self, spec: BlockSpec, grid: Tensor) -> Tensor:
        return grid.permute(self.order_of(spec))

    def grid_of(self, spec: BlockSpec, grid: Tensor) -> Tensor:
        """Return a grid of this block as the grid of one of its specs."""
        if tuple(grid.shape) != self.grid_shape:
            raise LayoutError(f"values of shape {tuple(grid.shape)} do not fit the grid {self.grid_shape} of {self}")
        order = self.order_of(spec)
        return grid if order == tuple(range(grid.ndim)) else grid.permute(inverse(order))

    def _in_order_of(self, spec: BlockSpec, rectangle: tuple[slice, ...]) -> list[slice]:
        return list(permuted(rectangle, inverse(self.order_of(spec))))


class BlockSpec(TiledView, SparseBlock):
    """Tiles one view into a grid of blocks.

    Args:
        view: a View, or a Parameter as the identity view of itself.
        shape: the block shape; −1 spans its dimension, missing trailing entries are 1.
        name: the name in errors and tables.
        edge: "error" raises an error if the blocks do not divide the view; "partial" allows the last block of a
            dimension to be smaller.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 6))
        >>> tiles = BlockSpec(weight, (2, 3), name="fc.weight")
        >>> tiles.grid_shape, tiles.numel_per_block()
        ((2, 2), 6)
        >>> tiles.apply_mask(torch.tensor([[True, False], [False, False]]))
        >>> weight[0].tolist()
        [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """

    def blocks(self) -> list[BlockSpec]:
        """Return this spec."""
        return [self]

    def order_of(self, spec: BlockSpec) -> tuple[int, ...]:
        """Return the identity."""
        return tuple(range(self.grid_ndim))

    def block_view(self, values: Values = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """Return the blocks as a live tensor; see `View.block_view_of` for the three forms and for when they copy.

        A view with negative strides is copied, with a `CopyWarning`, see `View.data`. Smaller blocks at the edge have
        no such tensor; `reduce` and the other operations support them.
        """
        view = self.view_of(self._values_of(self, values))
        view.warn_of_copy(stacklevel=3)
        return View.block_view_of(view.read(), self.shape, reorder, merge)

    def expand_to_block_view(self, grid: Tensor) -> Tensor:
        """Return a grid expanded over the elements of its blocks, `(B0, B1, …, b0, b1, …)` as `block_view`; no copy."""
        thin = self.grid_of(self, grid)[(..., *(None,) * self.grid_ndim)]
        return thin.expand(*self.grid_shape, *self.shape)

    def broadcast_block_to_element(self, grid: Tensor, fake: bool = False) -> Tensor:
        """Return a grid broadcast to the weights, in the view's shape; `fake` only inserts dimensions of size 1."""
        self.grid_of(self, grid)
        return View.broadcast_block_to_element(grid, self.shape, fake=True) if fake else self.expand_to_elements(grid)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockSpec):
            return NotImplemented
        return self.view == other.view and (self.shape, self.edge) == (other.shape, other.edge)

    def __hash__(self) -> int:
        return hash((self.view, self.shape))

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"BlockSpec({name}view={self.view.shape}, block={self.shape}, grid={self.grid_shape})"


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the last dimension; a single one is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def _check_floats(parts: Sequence[Tensor]) -> None:
    for part in parts:
        if not part.is_floating_point():
            raise LayoutError(f"a proximal step on values of dtype {part.dtype}: pass floating-point values")


def _wide(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate in the dtype that sums of the parts accumulate in."""
    return torch.cat([part.to(accumulation_dtype(part.dtype)) for part in parts], -1)
