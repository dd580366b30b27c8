"""draw: a figure of which elements form which block and scope, and which blocks are pruned.

`block_map` computes the block of each element; this module turns it into colours, lines and text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.table import times
from sparse_lightning.drawing.block_map import NO_BLOCK, BlockMap, Image, block_maps_of
from sparse_lightning.drawing.family_block import family_block
from sparse_lightning.errors import CouplingError, LayoutError
from sparse_lightning.graph.families import Family

Mask: TypeAlias = Tensor | Mapping[SparseBlock, Tensor] | None
"""A boolean grid, True = pruned; a mapping from each block to its grid; None draws blocks without a mask."""

LINE, CHARACTERS_PER_INCH = 0.12, 19
"""The height of a caption's line in inches, and the number of characters per inch."""

MAPS_PER_ROW = 4

TICKS = [1, 1.28, 1.6, 2, 2.56, 3.2, 4, 6.4, 8, 10]
"""Tick steps that include powers of two, since block sizes mostly are."""

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
PALETTE = np.array([to_rgb(colour) for colour in COLOURS])


def draw(scope_or_block: SparseScope | SparseBlock | Family, mask: Mask = None) -> Figure:
    """Draw blocks and scopes on their parameters, with one block map for each parameter.

    A parameter is drawn in two dimensions, its first by all others; a vector is one row. All elements of a scope have
    the same colour, in all maps; if a block is drawn, all elements of a block. Adjacent scopes have different colours
    as far as eight colours allow. White lines separate blocks, black lines separate scopes; pruned blocks are pale and
    hatched; elements outside all blocks are white. A parameter with more than 256 elements along a side is cropped to
    the start of its blocks, and the caption gives the range.

    The figure does not belong to pyplot and need not be closed. No weight is read or written.

    Args:
        scope_or_block: a BlockSpec, BlockCoupling, ScopeSpec or ScopeCoupling; or a family of `couplings`, in which
            each unit is a block.
        mask: the grid of blocks, True = pruned; for a coupling of scopes, a mapping from each block to its grid; for a
            family one boolean for each unit. All forms that `select` and `hard_threshold` return are accepted.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> weights = BlockSpec(torch.randn(8, 16), (1, 1), name="fc.weight")
        >>> two_of_four = ScopeSpec(weights, (1, 4), name="2:4")
        >>> figure = draw(two_of_four, two_of_four.select(weights.norms(), nnz=2))
        >>> figure.get_suptitle().splitlines()[0]
        '2:4: 32 scopes of 4 blocks; 64 of 128 blocks pruned'
    """
    if isinstance(scope_or_block, Family):
        units = family_block(scope_or_block)
        return draw(units, _as_grid(units, mask))
    maps = block_maps_of(scope_or_block)
    pruned = _pruned_numbers(scope_or_block, mask)
    per_colour = _blocks_per_colour(scope_or_block)
    colours = colours_of([block_map.numbers // per_colour for block_map in maps])
    page = _Page(maps)
    figure = Figure(figsize=page.size, dpi=150)
    FigureCanvasAgg(figure)
    width, height = page.size
    title = _title(scope_or_block, mask, pruned)
    figure.suptitle(title, x=0.12 / width, y=1 - 0.1 / height, ha="left", va="top", fontsize=9, parse_math=False)
    for block_map, position, caption in zip(maps, page.positions, page.captions, strict=True):
        axes = figure.add_axes(position)
        _paint(axes, block_map, per_colour, pruned, colours, page.cell)
        _label(axes, block_map, caption)
    return figure


def _as_grid(units: SparseBlock, mask: Mask) -> Mask:
    """Return a mask with one boolean for each unit as a grid; any other as it is."""
    if isinstance(mask, Tensor) and tuple(mask.shape) == (units.numblk(),):
        return mask.view(units.grid_shape)
    return mask


def _blocks_per_colour(target: SparseScope | SparseBlock) -> int:
    return max(target.numblk_per_scope(), 1) if isinstance(target, SparseScope) else 1


def _pruned_numbers(target: SparseScope | SparseBlock, mask: Mask) -> Image:
    """Return whether the block of each number is pruned."""
    if mask is None:
        return np.zeros(target.numblk(), dtype=bool)
    masks = _mapping(target, mask)
    for block, grid in masks.items():
        if grid.dtype != torch.bool or tuple(grid.shape) != block.grid_shape:
            raise LayoutError(
                f"a mask of {grid.dtype} and shape {tuple(grid.shape)} does not fit {block}: pass a boolean grid of "
                f"shape {block.grid_shape}, True where a block is pruned"
            )
    gathered = masks[target] if isinstance(target, SparseBlock) else target.gather(masks)
    return np.asarray(gathered.detach().cpu().flatten())


def _mapping(
    target: SparseScope | SparseBlock, mask: Tensor | Mapping[SparseBlock, Tensor]
) -> dict[SparseBlock, Tensor]:
    blocks = [target] if isinstance(target, SparseBlock) else target.blocks()
    if isinstance(mask, Tensor):
        if isinstance(target, SparseScope) and tuple(mask.shape) == (*target.grid_shape, target.numblk_per_scope()):
            return target.scatter(mask)
        if len(blocks) > 1:
            raise CouplingError(
                f"one mask is not enough for {target}: pass a mapping from each of its {len(blocks)} blocks to a grid"
            )
        return {blocks[0]: mask}
    missing = [block for block in blocks if block not in mask]
    if missing:
        raise CouplingError(f"there is no mask for {missing[0]}: pass a grid for every block")
    return {block: mask[block] for block in blocks}


def colours_of(images: Sequence[Image]) -> Image:
    """Return an index into the palette for each number in some images, different for adjacent numbers.

    Colours are assigned greedily in cyclic order, skipping those of adjacent numbers. If all are taken, two adjacent
    numbers get the same colour.

    Example:
        >>> colours_of([np.array([[0, 0, 1, 1, 2]])]).tolist()
        [0, 1, 2]
    """
    neighbours = _neighbours(images)
    count = max((int(image.max()) for image in images if image.size), default=NO_BLOCK) + 1
    colours = np.zeros(count, dtype=np.int64)
    present: list[int] = np.unique(np.concatenate([image.ravel() for image in images])).tolist()
    for turn, number in enumerate(n for n in present if n != NO_BLOCK):
        taken = {int(colours[other]) for other in neighbours.get(number, ()) if other < number}
        choices = [(turn + i) % len(PALETTE) for i in range(len(PALETTE))]
        colours[number] = next((c for c in choices if c not in taken), choices[0])
    return colours


def _neighbours(images: Sequence[Image]) -> dict[int, list[int]]:
    """Return the adjacent numbers of each number."""
    pairs = [np.stack([a.ravel(), b.ravel()], 1) for x in images for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]))]
    both = np.concatenate([*pairs, *(p[:, ::-1] for p in pairs)])
    found: dict[int, list[int]] = {}
    for a, b in np.unique(both[(both[:, 0] != both[:, 1]) & (both >= 0).all(1)], axis=0).tolist():
        found.setdefault(a, []).append(b)
    return found


def _title(target: SparseScope | SparseBlock, mask: Mask, pruned: Image) -> str:
    unit = "block"
    if isinstance(target, SparseScope):
        unit = "scope"
        what = f"{_count(target.numscp(), 'scope')} of {_count(target.numblk_per_scope(), 'block')}"
    else:
        what = f"{_count(target.numblk(), 'block')} of {_count(target.numel_per_block(), 'weight')}"
    ending = "" if mask is None else f"; {int(pruned.sum())} of {_count(pruned.size, 'block')} pruned"
    legend = f"one colour: one {unit}" + ("" if mask is None else "; pale and hatched: pruned")
    return f"{target.name or unit}: {what}{ending}\n{legend}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _caption(block_map: BlockMap, width: float) -> list[str]:
    """Return the caption of a map, in lines that fit a width in inches."""
    (row, column), (rows, columns) = block_map.origin, block_map.numbers.shape
    shown = f": only rows {row}–{row + rows - 1} and columns {column}–{column + columns - 1} are drawn"
    first = f"parameter {times(block_map.shape)}" + (shown if block_map.is_cropped else "")
    characters = int(width * CHARACTERS_PER_INCH)
    wrapped = (textwrap.wrap(line, characters, subsequent_indent="   ") for line in (first, *block_map.lines))
    return list(chain.from_iterable(wrapped))


class _Page:
    """The positions of maps on a figure: sizes in inches from the top left, positions in matplotlib's units.

    All maps have the same scale. There is room for captions, and a vector is high enough to be visible.
    """

    def __init__(self, maps: Sequence[BlockMap]) -> None:
        rows, columns = (max([1, *(block_map.numbers.shape[d] for block_map in maps)]) for d in (0, 1))
        across = min(len(maps), MAPS_PER_ROW)
        self.cell = max(0.022, min(0.2, 4 / rows, max(3.2, 7.2 / across) / columns))
        self.captions = [_caption(block_map, self._room(block_map)) for block_map in maps]
        self.size = (4.6, 0.4)
        corners = [c for i in range(0, len(maps), MAPS_PER_ROW) for c in self._add_row(maps, i)]
        self.positions = [self._position(block_map, *corner) for block_map, corner in zip(maps, corners, strict=True)]

    def _extent(self, block_map: BlockMap) -> tuple[float, float]:
        rows, columns = block_map.numbers.shape
        return max(columns * self.cell, 0.25), max(rows * self.cell, 0.25)

    def _room(self, block_map: BlockMap) -> float:
        return max(self._extent(block_map)[0], 2.9)

    def _add_row(self, maps: Sequence[BlockMap], first: int) -> list[tuple[float, float]]:
        """Extend the page by a row of maps, and return the top left corner of each."""
        row = slice(first, first + MAPS_PER_ROW)
        top = self.size[1] + 0.15 + LINE * max(len(caption) for caption in self.captions[row])
        left = list(accumulate((self._room(block_map) + 0.6 for block_map in maps[row]), initial=0.6))
        bottom = top + max(self._extent(block_map)[1] for block_map in maps[row]) + 0.45
        self.size = (max(self.size[0], left[-1] - 0.3), bottom)
        return [(x, top) for x in left[:-1]]

    def _position(self, block_map: BlockMap, x: float, y: float) -> tuple[float, float, float, float]:
        (w, h), (width, height) = self.size, self._extent(block_map)
        return x / w, 1 - (y + height) / h, width / w, height / h


def _paint(axes: Axes, block_map: BlockMap, per_colour: int, pruned: Image, colours: Image, cell: float) -> None:
    if not block_map.numbers.size:
        return
    (row, column), (rows, columns) = block_map.origin, block_map.numbers.shape
    scopes, is_pruned = block_map.numbers // per_colour, _look_up(pruned, block_map.numbers, False)
    extent = (column - 0.5, column + columns - 0.5, row + rows - 0.5, row - 0.5)
    axes.imshow(_pixels(scopes, is_pruned, colours), extent=extent, aspect="auto", interpolation="nearest")
    thin = min(0.7, 5 * cell)
    _add_lines(axes, _hatching(is_pruned), (column, row), color="0.35", linewidth=0.6 * thin)
    _add_lines(axes, _borders(block_map.numbers), (column, row), color="white", linewidth=thin)
    _add_lines(axes, _borders(scopes), (column, row), color="black", linewidth=thin)


def _label(axes: Axes, block_map: BlockMap, caption: Sequence[str]) -> None:
    ndim = len(block_map.shape)
    axes.set_title("\n".join(caption), loc="left", fontsize=6.5, pad=4, linespacing=1.3, parse_math=False)
    axes.set_xlabel(f"dimensions 1–{ndim - 1}, flat" if ndim > 2 else f"dimension {max(ndim - 1, 0)}", fontsize=6)
    axes.set_ylabel("dimension 0" if ndim > 1 else "", fontsize=6)
    axes.tick_params(labelsize=6, length=2)
    for axis, n in ((axes.yaxis, block_map.numbers.shape[0]), (axes.xaxis, block_map.numbers.shape[1])):
        axis.set_major_locator(MaxNLocator(min(max(n, 1), 8), integer=True, min_n_ticks=1, steps=TICKS))
    if ndim < 2:
        axes.set_yticks([])


def _look_up(values: Image, numbers: Image, otherwise: Any) -> Image:
    """Return the value of each number; `otherwise` for negative numbers."""
    found: Image = np.full(numbers.shape, otherwise)
    found[numbers >= 0] = values[numbers[numbers >= 0]]
    return found


def _pixels(scopes: Image, is_pruned: Image, colours: Image) -> Image:
    """Return the colours of elements, `(rows, columns, 3)`."""
    pixels = PALETTE[_look_up(colours, scopes, 0)]
    pixels[is_pruned] = 0.25 * pixels[is_pruned] + 0.75
    pixels[scopes < 0] = 1.0
    return pixels


def _hatching(is_pruned: Image) -> Image:
    """Return a diagonal through each pruned element, `(segments, 2, 2)` as x and y."""
    y, x = np.nonzero(is_pruned)
    ends: Image = np.array([[-0.5, 0.5], [0.5, -0.5]])
    return np.stack([x, y], 1)[:, None, :] + ends


def _borders(numbers: Image) -> Image:
    """Return the lines between different numbers, `(segments, 2, 2)` as x and y, each as long as possible."""
    vertical, horizontal = _runs(numbers), _runs(numbers.T)[..., ::-1]
    return np.concatenate([vertical, horizontal])


def _runs(numbers: Image) -> Image:
    """Return the borders between columns, as segments from top to bottom."""
    edges = np.pad((numbers[:, 1:] != numbers[:, :-1]).T, ((0, 0), (1, 1))).astype(np.int8)
    steps = np.diff(edges, axis=1)
    (x, top), (_, bottom) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    return np.stack([np.stack([x + 0.5, top - 0.5], 1), np.stack([x + 0.5, bottom - 0.5], 1)], 1)


def _add_lines(axes: Axes, segments: Image, shift: Iterable[int], **look: Any) -> None:
    axes.add_collection(LineCollection(list(segments + np.array(list(shift))), capstyle="butt", **look), autolim=False)
