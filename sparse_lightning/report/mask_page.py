"""The page of masks: a panel for each grid of blocks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from sparse_lightning.report.mask_images import evenly, is_folded, mask_image
from sparse_lightning.report.page import BLUE, blank
from sparse_lightning.table import times

MOST, ACROSS = 24, 4
"""How many panels the page has at most, and how many stand beside each other."""

PALE = "#e9edf2"
COLOURS = LinearSegmentedColormap.from_list("kept", [PALE, BLUE])


def draw_masks(masks: Mapping[str, Tensor]) -> Figure:
    """A panel for each mask, its blocks dark where they are kept and pale where they are pruned.

    Of more than 24 masks, 24 are drawn, from the first to the last in even distances, and the page says so.

    Args:
        masks: by name, True = pruned.
    """
    chosen = evenly(list(masks.items()), MOST)
    across = min(ACROSS, max(1, len(chosen)))
    down = max(1, math.ceil(len(chosen) / across))
    figure = blank(max(4.6, 2.3 * across), 0.6 + 2.3 * down)
    for number, (name, mask) in enumerate(chosen, 1):
        _draw_mask(figure.add_subplot(down, across, number), name, mask)
    figure.suptitle(_title(masks, len(chosen)), x=0.01, ha="left", fontsize=9)
    handles = [Patch(facecolor=BLUE, label="kept"), Patch(facecolor=PALE, edgecolor="0.7", label="pruned")]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return figure


def _title(masks: Mapping[str, Tensor], drawn: int) -> str:
    pruned, blocks = (sum(int(n) for n in counts) for counts in zip(*map(_counts, masks.values()), strict=True))
    first = f"{pruned} of {blocks} blocks pruned, {pruned / max(1, blocks):.1%}"
    left_out = len(masks) - drawn
    return f"{first}; {left_out} of {len(masks)} masks are not drawn" if left_out else first


def _counts(mask: Tensor) -> tuple[int, int]:
    return int(mask.sum()), mask.numel()


def _draw_mask(axes: Axes, name: str, mask: Tensor) -> None:
    image = mask_image(mask)
    axes.set_xticks([])
    axes.set_yticks([])
    pruned, blocks = _counts(mask)
    lines = textwrap.wrap(name, 30, break_on_hyphens=False)
    short = [lines[0], f"…{lines[-1][-29:]}"] if len(lines) > 2 else lines
    fold = f", in rows of {image.shape[1]}" if is_folded(mask) else ""
    caption = f"{times(mask.shape)} blocks{fold}\n{pruned / max(1, blocks):.1%} pruned"
    axes.set_title("\n".join([*short, caption]), fontsize=7, loc="left", parse_math=False)
    if image.size:
        is_thin = max(image.shape) / min(image.shape) > 16
        axes.imshow(image, cmap=COLOURS, vmin=0, vmax=1, aspect="auto" if is_thin else "equal")
        axes.set_anchor("NW")
    for spine in axes.spines.values():
        spine.set(color="0.7", linewidth=0.6)
