"""Cutting a weight into tiles: which are zero, those that are kept, and the shape of tiles that leaves least."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_lightning.errors import LayoutError

OUTPUTS, INPUTS = (64, 32, 16), (64, 32, 16, 8)
"""The shapes of tiles that are tried: outputs fill vector registers, and inputs repay what a tile costs by itself."""

ON_GPU = 16
"""The fewest inputs of a tile on a GPU: what tensor cores multiply at once."""


def tile_shape(tile: object) -> tuple[int, int]:
    """Return the outputs × inputs of a tile; one number is that of a square.

    Example:
        >>> tile_shape(32), tile_shape((16, 64))
        ((32, 32), (16, 64))
    """
    pair = (tile, tile) if isinstance(tile, int) else tuple(tile) if isinstance(tile, list | tuple) else ()
    if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
        raise LayoutError(
            f"tile={tile!r} is not the shape of a tile: pass outputs × inputs as two whole numbers above 0, as "
            "(32, 32), or one number for a square"
        )
    return pair[0], pair[1]


def zero_tiles(weight: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return the mask of the tiles that are zero, True = all zero; tiles at the edge may be smaller.

    Example:
        >>> zero_tiles(torch.eye(4)[:3], (2, 2)).tolist()
        [[False, True], [True, False]]
    """
    return _grid_of(weight.detach() != 0, tile).logical_not()


def cut(weight: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kept tiles `(kept, tile_in, tile_out)`, the pointers and the columns; see `kernels.tile_linear`.

    Example:
        >>> tiles, pointers, columns = cut(torch.eye(4)[:3], (2, 2))
        >>> tiles.tolist(), pointers.tolist(), columns.tolist()
        ([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]], [0, 1, 2], [0, 1])
    """
    kept = zero_tiles(weight, tile).logical_not()
    padded = _padded(weight.detach(), tile)
    tiles = padded.view(kept.shape[0], tile[0], kept.shape[1], tile[1]).permute(0, 2, 3, 1)[kept]
    pointers = F.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return tiles.contiguous(), pointers, kept.nonzero()[:, 1].to(torch.int32).contiguous()


def joined(tiles: Tensor, pointers: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the weight of this shape from its tiles: the inverse of `cut`."""
    _, tile_in, tile_out = tiles.shape
    grid = len(pointers) - 1, -(-shape[1] // tile_in)
    whole = tiles.new_zeros(*grid, tile_in, tile_out)
    rows = torch.arange(grid[0], device=tiles.device).repeat_interleave(pointers.diff())
    whole[rows, columns.long()] = tiles
    return whole.permute(0, 3, 1, 2).reshape(grid[0] * tile_out, grid[1] * tile_in)[: shape[0], : shape[1]].contiguous()


def best_tile(weight: Tensor) -> tuple[int, int]:
    """Return the shape of tiles, outputs × inputs, with the least to compute.

    Small tiles leave out more zeros, and cost more for each weight that they keep.

    Example:
        >>> best_tile(torch.eye(4).repeat_interleave(32, 0).repeat_interleave(32, 1))
        (32, 32)
    """
    fine = min(OUTPUTS), min(INPUTS)
    is_set = _grid_of(weight.detach() != 0, fine)
    shapes = [s for s in product(OUTPUTS, INPUTS) if s[1] >= ON_GPU or not weight.is_cuda]
    return min(shapes, key=lambda shape: _cost(is_set, shape, (shape[0] // fine[0], shape[1] // fine[1])))


def _cost(is_set: Tensor, shape: tuple[int, int], ratio: tuple[int, int]) -> float:
    weights = int(_grid_of(is_set, ratio).sum()) * shape[0] * shape[1]
    # Of two vectors of outputs, each is added to as many rows as of one, for nearly the same loads.
    return weights * (1 + 2 / shape[1]) * (1.3 if shape[0] == min(OUTPUTS) else 1)


def _grid_of(is_set: Tensor, tile: tuple[int, int]) -> Tensor:
    """Whether anything is set in each tile of a boolean matrix."""
    padded = _padded(is_set, tile)
    return padded.view(padded.shape[0] // tile[0], tile[0], -1, tile[1]).any(3).any(1)


def _padded(matrix: Tensor, tile: tuple[int, int]) -> Tensor:
    rows, columns = matrix.shape
    return F.pad(matrix, (0, -columns % tile[1], 0, -rows % tile[0]))
