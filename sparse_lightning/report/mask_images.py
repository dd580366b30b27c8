"""Mask images: grids of any number of dimensions as pictures, one pixel for each block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sparse_lightning.panel import Image

LIMIT = 256
"""How many pixels an image has along a side; those of a larger grid are means of several blocks."""

Item = TypeVar("Item")


def mask_image(mask: Tensor) -> Image:
    """A mask as `(rows, columns)` floats: 1 where a block is kept, 0 where it is pruned.

    The first dimension of the grid goes down and all others across. A grid of a single row or column is folded into
    rows of equal length, as text is, since nobody can see a line one pixel wide. What is missing in the last row is
    NaN.

    Example:
        >>> mask_image(torch.tensor([[True, False], [False, False]])).tolist()
        [[0.0, 1.0], [1.0, 1.0]]
        >>> mask_image(torch.zeros(48, 1, dtype=torch.bool)).shape
        (3, 16)
    """
    kept = (~mask.detach().cpu()).float()
    flat = kept.reshape(kept.shape[0], math.prod(kept.shape[1:])) if kept.ndim > 1 else kept.reshape(1, -1)
    if is_folded(mask):
        width = fold_width(mask.numel())
        padded = torch.full((-(-mask.numel() // width) * width,), math.nan)
        padded[: mask.numel()] = flat.flatten()
        flat = padded.view(-1, width)
    return _shrunk(flat).numpy()


def is_folded(mask: Tensor) -> bool:
    """Whether the image of a mask has the blocks of one line in several rows."""
    rows = mask.shape[0] if mask.ndim > 1 else 1
    return mask.numel() > 16 and (rows == 1 or rows == mask.numel())


def fold_width(blocks: int) -> int:
    """How many blocks of a folded line stand in a row: a power of two, so that there are fewer rows than columns."""
    return 1 << max(4, math.ceil(math.log2(blocks) / 2 + 0.5))


def _shrunk(image: Tensor) -> Tensor:
    """An image of at most LIMIT pixels along a side."""
    factors = [-(-n // LIMIT) for n in image.shape]
    if max(factors, default=1) <= 1:
        return image
    sizes = [-(-n // f) for n, f in zip(image.shape, factors, strict=True)]
    return torch.nn.functional.interpolate(image[None, None], size=sizes, mode="area")[0, 0]


def enlarged(image: Image, least: int = 128) -> Image:
    """An image whose pixels are repeated until its longer side has so many."""
    factor = max(1, -(-least // max(1, *image.shape)))
    return image.repeat(factor, 0).repeat(factor, 1)


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of the items, the first and the last among them, in even distances.

    Example:
        >>> evenly("abcdefg", 3)
        ['a', 'd', 'g']
    """
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]
