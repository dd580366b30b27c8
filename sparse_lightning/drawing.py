"""draw: a picture of which elements form which block and scope, and of what is pruned.

Elements stand where they lie in their parameter; `panel` finds out which block each belongs to. Here that becomes
colours, lines and text on a page. matplotlib is imported here and by the pictures of runs.
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

from sparse_lightning.errors import CouplingError, LayoutError
from sparse_lightning.panel import NOWHERE, Image, Panel, panels_of
from sparse_lightning.scope import SparseScope
from sparse_lightning.sparse_block import SparseBlock
from sparse_lightning.table import times

Mask: TypeAlias = Tensor | Mapping[SparseBlock, Tensor] | None
"""What is pruned: a boolean grid; for several blocks a mapping from each to its grid; None for nothing."""

LINE, CHARACTERS_PER_INCH = 0.12, 19
"""Of a caption: the height of a line in inches, and how many characters fit into one of width."""

PANELS_PER_ROW = 4

TICKS = [1, 1.28, 1.6, 2, 2.56, 3.2, 4, 6.4, 8, 10]
"""Powers of two among the distances between ticks, since blocks have such sizes."""

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
PALETTE = np.array([to_rgb(colour) for colour in COLOURS])


def draw(scope_or_block: SparseScope | SparseBlock, mask: Mask = None) -> Figure:
    """Draw blocks and scopes on the parameters that they are made of, one panel for each parameter.

    A parameter is seen in two dimensions, its first by all others; a vector is one row. Elements of one scope
    have one colour, in all panels; where a block is drawn and not a scope, those of one block have. Scopes
    with a common border never look the same, as far as eight colours go. White lines part blocks, black ones
    scopes; pruned blocks are pale and hatched; elements that belong to no block are white. Of a parameter
    with more than 256 elements along a side, the first that matter are drawn, and the caption says which.

    The figure stands alone, without pyplot: nothing has to be closed. No weight is read or written.

    Args:
        scope_or_block: a BlockSpec, BlockCoupling, ScopeSpec or ScopeCoupling.
        mask: the grid of blocks, True = pruned; for a coupling of scopes a mapping from each block to its
            grid. What `select` and `hard_threshold` give is taken in all its forms.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> weights = BlockSpec(torch.randn(8, 16), (1, 1), name="fc.weight")
        >>> two_of_four = ScopeSpec(weights, (1, 4), name="2:4")
        >>> figure = draw(two_of_four, two_of_four.select(weights.norms(), nnz=2))
        >>> figure.get_suptitle().splitlines()[0]
        '2:4: 32 scopes of 4 blocks; 64 of 128 blocks pruned'
    """
    panels = panels_of(scope_or_block)
    pruned = _pruned_numbers(scope_or_block, mask)
    per_colour = _blocks_per_colour(scope_or_block)
    colours = colours_of([panel.numbers // per_colour for panel in panels])
    page = _Page(panels)
    figure = Figure(figsize=page.size, dpi=150)
    FigureCanvasAgg(figure)
    width, height = page.size
    title = _title(scope_or_block, mask, pruned)
    figure.suptitle(title, x=0.12 / width, y=1 - 0.1 / height, ha="left", va="top", fontsize=9, parse_math=False)
    for panel, place, caption in zip(panels, page.places, page.captions, strict=True):
        axes = figure.add_axes(place)
        _paint_panel(axes, panel, per_colour, pruned, colours, page.cell)
        _label(axes, panel, caption)
    return figure


def _blocks_per_colour(target: SparseScope | SparseBlock) -> int:
    return max(target.numblk_per_scope(), 1) if isinstance(target, SparseScope) else 1


def _pruned_numbers(target: SparseScope | SparseBlock, mask: Mask) -> Image:
    """Whether the block of each number is pruned."""
    if mask is None:
        return np.zeros(target.numblk(), dtype=bool)
    masks = _mapping(target, mask)
    for block, grid in masks.items():
        if grid.dtype != torch.bool or tuple(grid.shape) != block.grid_shape:
            raise LayoutError(
                f"a mask of {grid.dtype} and shape {tuple(grid.shape)} for {block}: give a boolean grid of shape "
                f"{block.grid_shape}, True where a block is pruned"
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
                f"one mask for {target}: give a mapping from each of its {len(blocks)} blocks to a grid"
            )
        return {blocks[0]: mask}
    missing = [block for block in blocks if block not in mask]
    if missing:
        raise CouplingError(f"no mask for {missing[0]} among those given: give a grid for every block")
    return {block: mask[block] for block in blocks}


def colours_of(images: Sequence[Image]) -> Image:
    """For each number in some images an index into the palette, such that those with a common border differ.

    Numbers are taken in turn, each with the colour after the last one's, or the next that no neighbour has.
    Where neighbours have taken all of them, two may look the same.

    Example:
        >>> colours_of([np.array([[0, 0, 1, 1, 2]])]).tolist()
        [0, 1, 2]
    """
    neighbours = _neighbours(images)
    count = max((int(image.max()) for image in images if image.size), default=NOWHERE) + 1
    colours = np.zeros(count, dtype=np.int64)
    present: list[int] = np.unique(np.concatenate([image.ravel() for image in images])).tolist()
    for turn, number in enumerate(n for n in present if n != NOWHERE):
        taken = {int(colours[other]) for other in neighbours.get(number, ()) if other < number}
        choices = [(turn + i) % len(PALETTE) for i in range(len(PALETTE))]
        colours[number] = next((c for c in choices if c not in taken), choices[0])
    return colours


def _neighbours(images: Sequence[Image]) -> dict[int, list[int]]:
    """For each number the others that it has a border with."""
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


def _caption(panel: Panel, width: float) -> list[str]:
    """What stands above a panel, in lines that fit into so many inches."""
    (row, column), (rows, columns) = panel.origin, panel.numbers.shape
    shown = f": only rows {row}–{row + rows - 1} and columns {column}–{column + columns - 1} are drawn"
    first = f"parameter {times(panel.shape)}" + (shown if panel.is_cropped else "")
    characters = int(width * CHARACTERS_PER_INCH)
    return list(
        chain.from_iterable(textwrap.wrap(line, characters, subsequent_indent="   ") for line in (first, *panel.lines))
    )


class _Page:
    """Where panels stand on a figure: sizes in inches from the top left, places as matplotlib has them.

    All panels have the same scale. A panel has room for its caption, and a vector is high enough to be seen.
    """

    def __init__(self, panels: Sequence[Panel]) -> None:
        rows, columns = (max([1, *(panel.numbers.shape[d] for panel in panels)]) for d in (0, 1))
        across = min(len(panels), PANELS_PER_ROW)
        self.cell = max(0.022, min(0.2, 4 / rows, max(3.2, 7.2 / across) / columns))
        self.captions = [_caption(panel, self._room(panel)) for panel in panels]
        self.size = (4.6, 0.4)
        corners = [c for i in range(0, len(panels), PANELS_PER_ROW) for c in self._add_row(panels, i)]
        self.places = [self._place(panel, *corner) for panel, corner in zip(panels, corners, strict=True)]

    def _extent(self, panel: Panel) -> tuple[float, float]:
        rows, columns = panel.numbers.shape
        return max(columns * self.cell, 0.25), max(rows * self.cell, 0.25)

    def _room(self, panel: Panel) -> float:
        return max(self._extent(panel)[0], 2.9)

    def _add_row(self, panels: Sequence[Panel], first: int) -> list[tuple[float, float]]:
        """Make the page longer by a row of panels, and give the corner of each."""
        row = slice(first, first + PANELS_PER_ROW)
        top = self.size[1] + 0.15 + LINE * max(len(caption) for caption in self.captions[row])
        left = list(accumulate((self._room(panel) + 0.6 for panel in panels[row]), initial=0.6))
        bottom = top + max(self._extent(panel)[1] for panel in panels[row]) + 0.45
        self.size = (max(self.size[0], left[-1] - 0.3), bottom)
        return [(x, top) for x in left[:-1]]

    def _place(self, panel: Panel, x: float, y: float) -> tuple[float, float, float, float]:
        (w, h), (width, height) = self.size, self._extent(panel)
        return x / w, 1 - (y + height) / h, width / w, height / h


def _paint_panel(axes: Axes, panel: Panel, per_colour: int, pruned: Image, colours: Image, cell: float) -> None:
    if not panel.numbers.size:
        return
    (row, column), (rows, columns) = panel.origin, panel.numbers.shape
    scopes, dead = panel.numbers // per_colour, _look_up(pruned, panel.numbers, False)
    extent = (column - 0.5, column + columns - 0.5, row + rows - 0.5, row - 0.5)
    axes.imshow(_pixels(scopes, dead, colours), extent=extent, aspect="auto", interpolation="nearest")
    thin = min(0.7, 5 * cell)
    _add_lines(axes, _hatching(dead), (column, row), color="0.35", linewidth=0.6 * thin)
    _add_lines(axes, _borders(panel.numbers), (column, row), color="white", linewidth=thin)
    _add_lines(axes, _borders(scopes), (column, row), color="black", linewidth=thin)


def _label(axes: Axes, panel: Panel, caption: Sequence[str]) -> None:
    ndim = len(panel.shape)
    axes.set_title("\n".join(caption), loc="left", fontsize=6.5, pad=4, linespacing=1.3, parse_math=False)
    axes.set_xlabel(f"dimensions 1–{ndim - 1}, flat" if ndim > 2 else f"dimension {max(ndim - 1, 0)}", fontsize=6)
    axes.set_ylabel("dimension 0" if ndim > 1 else "", fontsize=6)
    axes.tick_params(labelsize=6, length=2)
    for axis, n in ((axes.yaxis, panel.numbers.shape[0]), (axes.xaxis, panel.numbers.shape[1])):
        axis.set_major_locator(MaxNLocator(min(max(n, 1), 8), integer=True, min_n_ticks=1, steps=TICKS))
    if ndim < 2:
        axes.set_yticks([])


def _look_up(values: Image, numbers: Image, otherwise: Any) -> Image:
    """The values of numbers, and another one where there is none."""
    found: Image = np.full(numbers.shape, otherwise)
    found[numbers >= 0] = values[numbers[numbers >= 0]]
    return found


def _pixels(scopes: Image, dead: Image, colours: Image) -> Image:
    """Colours of elements, `(rows, columns, 3)`."""
    pixels = PALETTE[_look_up(colours, scopes, 0)]
    pixels[dead] = 0.25 * pixels[dead] + 0.75
    pixels[scopes < 0] = 1.0
    return pixels


def _hatching(dead: Image) -> Image:
    """A diagonal through each pruned element, `(segments, 2, 2)` as x and y."""
    y, x = np.nonzero(dead)
    ends: Image = np.array([[-0.5, 0.5], [0.5, -0.5]])
    return np.stack([x, y], 1)[:, None, :] + ends


def _borders(numbers: Image) -> Image:
    """The lines between different numbers, `(segments, 2, 2)` as x and y, each as long as it can be."""
    upright, lying = _runs(numbers), _runs(numbers.T)[..., ::-1]
    return np.concatenate([upright, lying])


def _runs(numbers: Image) -> Image:
    """The borders between columns, as segments from top to bottom."""
    edges = np.pad((numbers[:, 1:] != numbers[:, :-1]).T, ((0, 0), (1, 1))).astype(np.int8)
    steps = np.diff(edges, axis=1)
    (x, top), (_, bottom) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    return np.stack([np.stack([x + 0.5, top - 0.5], 1), np.stack([x + 0.5, bottom - 0.5], 1)], 1)


def _add_lines(axes: Axes, segments: Image, shift: Iterable[int], **look: Any) -> None:
    axes.add_collection(LineCollection(list(segments + np.array(list(shift))), capstyle="butt", **look), autolim=False)
