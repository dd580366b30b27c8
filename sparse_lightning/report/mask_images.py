"""Mask images: grids with any number of dimensions as images, one pixel per block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sparse_lightning.drawing.block_map import Image

MAX_PIXELS = 256
"""The pixels that an image has along a side at most; pixels of larger grids are means over several blocks."""

Item = TypeVar("Item")


def mask_image(mask: Tensor, max_pixels: int = MAX_PIXELS) -> Image:
    """Return a mask as `(rows, columns)` floats: 1 where a block is kept, 0 where it is pruned.

    Args:
        mask: a boolean grid, True = pruned.
        max_pixels: the pixels along a side, at most; of larger grids, a pixel is the mean over several blocks.

    The first dimension of the grid is vertical, and all others are horizontal. A grid with a single row or column is
    wrapped into rows of equal length, as text is, since a line of one pixel is hard to see. The last row is padded
    with NaN.

    Example:
        >>> mask_image(torch.tensor([[True, False], [False, False]])).tolist()
        [[0.0, 1.0], [1.0, 1.0]]
        >>> mask_image(torch.zeros(48, 1, dtype=torch.bool)).shape
        (3, 16)
    """
    kept = (~mask.detach().cpu()).float()
    flat = kept.reshape(kept.shape[0], math.prod(kept.shape[1:])) if kept.ndim > 1 else kept.reshape(1, -1)
    if is_wrapped(mask):
        width = wrap_width(mask.numel())
        padded = torch.full((-(-mask.numel() // width) * width,), math.nan)
        padded[: mask.numel()] = flat.flatten()
        flat = padded.view(-1, width)
    return _downsampled(flat, max_pixels).numpy()


def is_wrapped(mask: Tensor) -> bool:
    """Whether the image of a mask has a single row or column of blocks wrapped into several rows."""
    rows = mask.shape[0] if mask.ndim > 1 else 1
    return mask.numel() > 16 and (rows == 1 or rows == mask.numel())


def wrap_width(blocks: int) -> int:
    """Return the number of blocks per row of a wrapped image: a power of two, with fewer rows than columns."""
    return 1 << max(4, math.ceil(math.log2(blocks) / 2 + 0.5))


def _downsampled(image: Tensor, max_pixels: int) -> Tensor:
    """Return an image with at most `max_pixels` along a side."""
    factors = [-(-n // max_pixels) for n in image.shape]
    if max(factors, default=1) <= 1:
        return image
    sizes = [-(-n // f) for n, f in zip(image.shape, factors, strict=True)]
    return torch.nn.functional.interpolate(image[None, None], size=sizes, mode="area")[0, 0]


def upsampled(image: Image, min_pixels: int = 128) -> Image:
    """Repeat pixels until the longer side has at least `min_pixels`."""
    factor = max(1, -(-min_pixels // max(1, *image.shape)))
    return image.repeat(factor, 0).repeat(factor, 1)


def evenly_spaced(items: Sequence[Item], max_items: int) -> list[Item]:
    """Return at most `max_items` of the items, evenly spaced from the first to the last.

    Example:
        >>> evenly_spaced("abcdefg", 3)
        ['a', 'd', 'g']
    """
    if len(items) <= max_items:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, max_items).round().astype(int)]
