"""Masks of a page: one pixel for each block, with the block under the pointer, and a view that can be enlarged."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from io import BytesIO

import numpy as np
from matplotlib.image import imsave
from torch import Tensor

from sparse_lightning.blocks.table import times
from sparse_lightning.drawing.block_map import Image
from sparse_lightning.report.mask_images import evenly_spaced, is_wrapped, mask_image, wrap_width
from sparse_lightning.report.page.document import note
from sparse_lightning.report.page.markup import Markup, element

MAX_MASKS, MAX_SIDE, MAX_PIXELS = 256, 256, 1 << 21
"""Masks on a page, pixels along a side of a mask, and pixels of all masks together, at most."""

SHOWN, THINNEST = 240, 16
"""The size to which small masks are enlarged on the page, and their smallest side, in pixels of the screen."""

BLUE = (59, 130, 196)
"""Kept blocks; pruned blocks are transparent, and have the colour of the page."""


def draw_grids(masks: Mapping[str, Tensor]) -> list[Markup]:
    """Return a figure for each mask, kept blocks blue; of very many masks some, evenly spaced, with a note.

    The size of all images is bounded: of large grids, a pixel is a group of blocks.
    """
    found = [(name, mask) for name, mask in masks.items() if mask.numel()]
    chosen = evenly_spaced(found, MAX_MASKS)
    side = min(MAX_SIDE, math.isqrt(MAX_PIXELS // max(1, len(chosen))))
    figures = [_figure(name, mask, side) for name, mask in chosen]
    omitted = len(found) - len(chosen)
    notes = [note(f"{omitted} of {len(found)} masks are not shown; masks.safetensors has all.")] if omitted else []
    return [element("div", *figures, class_="masks"), *notes] if figures else []


def _figure(name: str, mask: Tensor, side: int) -> Markup:
    image = mask_image(mask, side)
    height, width = image.shape
    rows, columns = _blocks(mask)
    kept, blocks = int((~mask).sum()), mask.numel()
    summary = f"{times(mask.shape)} blocks, {kept:,} of {blocks:,} kept, {1 - kept / blocks:.1%} pruned"
    factor = max(1, min(SHOWN // width, SHOWN // height))
    picture = element(
        "img",
        src=_data(image),
        width=max(THINNEST, width * factor),
        height=max(THINNEST, height * factor),
        alt=f"mask of {name}: {summary}",
        data_shape=times(mask.shape),
        data_grid=f"{rows}×{columns}",
        data_pixels=f"{height}×{width}",
        data_wrapped=is_wrapped(mask),
    )
    button = element("button", picture, type="button", class_="mask", title="Enlarge")
    reading = element("p", class_="reading", aria_hidden="true")
    return element("figure", element("figcaption", name), button, element("p", summary, class_="note"), reading)


def _blocks(mask: Tensor) -> tuple[int, int]:
    """Return how many blocks an image has down and across."""
    if is_wrapped(mask):
        width = wrap_width(mask.numel())
        return -(-mask.numel() // width), width
    return (mask.shape[0], mask.numel() // mask.shape[0]) if mask.ndim > 1 else (1, mask.numel())


def _data(image: Image) -> str:
    """Return an image of values from 0 to 1, or NaN, as a PNG file in a URL."""
    levels = (np.nan_to_num(image) * 15).round() * 17
    pixels = np.empty((*image.shape, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = BLUE, levels
    buffer = BytesIO()
    imsave(buffer, pixels, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
