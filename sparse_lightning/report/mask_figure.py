"""The figure of all masks, with one image for each grid of blocks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from sparse_lightning.blocks.table import times
from sparse_lightning.report.figures import BLUE, new_figure
from sparse_lightning.report.mask_images import evenly_spaced, is_wrapped, mask_image

MAX_MASKS, MASKS_PER_ROW = 24, 4
"""The maximum number of masks in the figure, and in a row of it."""

PALE = "#e9edf2"
COLORMAP = LinearSegmentedColormap.from_list("kept", [PALE, BLUE])


def draw_masks(masks: Mapping[str, Tensor]) -> Figure:
    """Draw each mask, with kept blocks dark and pruned blocks pale.

    Of more than 24 masks, 24 are drawn, evenly spaced from the first to the last, and the title says so.

    Args:
        masks: masks by name, True = pruned.
    """
    chosen = evenly_spaced(list(masks.items()), MAX_MASKS)
    across = min(MASKS_PER_ROW, max(1, len(chosen)))
    down = max(1, math.ceil(len(chosen) / across))
    figure = new_figure(max(4.6, 2.3 * across), 0.6 + 2.3 * down)
    for number, (name, mask) in enumerate(chosen, 1):
        _draw_mask(figure.add_subplot(down, across, number), name, mask)
    figure.suptitle(_title(masks, len(chosen)), x=0.01, ha="left", fontsize=9)
    handles = [Patch(facecolor=BLUE, label="kept"), Patch(facecolor=PALE, edgecolor="0.7", label="pruned")]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return figure


def _title(masks: Mapping[str, Tensor], drawn: int) -> str:
    pruned, blocks = (sum(int(n) for n in counts) for counts in zip(*map(_counts, masks.values()), strict=True))
    first = f"{pruned} of {blocks} blocks pruned, {pruned / max(1, blocks):.1%}"
    omitted = len(masks) - drawn
    return f"{first}; {omitted} of {len(masks)} masks are not drawn" if omitted else first


def _counts(mask: Tensor) -> tuple[int, int]:
    return int(mask.sum()), mask.numel()


def _draw_mask(axes: Axes, name: str, mask: Tensor) -> None:
    image = mask_image(mask)
    axes.set_xticks([])
    axes.set_yticks([])
    pruned, blocks = _counts(mask)
    lines = textwrap.wrap(name, 30, break_on_hyphens=False)
    short = [lines[0], f"…{lines[-1][-29:]}"] if len(lines) > 2 else lines
    wrap = f", in rows of {image.shape[1]}" if is_wrapped(mask) else ""
    caption = f"{times(mask.shape)} blocks{wrap}\n{pruned / max(1, blocks):.1%} pruned"
    axes.set_title("\n".join([*short, caption]), fontsize=7, loc="left", parse_math=False)
    if image.size:
        is_thin = max(image.shape) / min(image.shape) > 16
        axes.imshow(image, cmap=COLORMAP, vmin=0, vmax=1, aspect="auto" if is_thin else "equal")
        axes.set_anchor("NW")
    for spine in axes.spines.values():
        spine.set(color="0.7", linewidth=0.6)
