"""tile_linear in plain torch operations: the definition, for any device and any tile, and the gradient of the inputs.

Sums are made in fp32 for narrower dtypes, and rounded once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_lightning.kernels.block_score.reference import accumulation_dtype


def tile_linear(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Multiply each kept tile by its columns of the inputs, and add the products of a row of tiles."""
    wide = accumulation_dtype(inputs.dtype)
    products = torch.bmm(cut(inputs, tiles.shape[1]).to(wide)[columns], tiles.to(wide))
    outputs = joined(products, tile_rows(pointers, len(tiles)), len(pointers) - 1, (*inputs.shape[:-1], out_features))
    return (outputs if bias is None else outputs + bias.to(wide)).to(inputs.dtype).contiguous()


def grad_inputs(grad: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, in_features: int) -> Tensor:
    """Return the gradient of the inputs from that of the outputs: the product with the transposed tiles."""
    wide = accumulation_dtype(grad.dtype)
    rows = cut(grad, tiles.shape[2]).to(wide)[tile_rows(pointers, len(tiles))]
    products = torch.bmm(rows, tiles.to(wide).transpose(1, 2))
    count = -(-in_features // tiles.shape[1])
    return joined(products, columns, count, (*grad.shape[:-1], in_features)).to(grad.dtype)


def cut(inputs: Tensor, width: int) -> Tensor:
    """Cut the last dimension into pieces, the last one filled with zeros: `(…, n·width)` → `(n, rows, width)`.

    Example:
        >>> cut(torch.arange(5).view(1, 5), 3).tolist()
        [[[0, 1, 2]], [[3, 4, 0]]]
    """
    rows, features = math.prod(inputs.shape[:-1]), inputs.shape[-1]
    count = -(-features // width)
    padded = F.pad(inputs.reshape(rows, features), (0, count * width - features))
    return padded.view(rows, count, width).transpose(0, 1)


def joined(products: Tensor, places: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """Add the products that belong to one place, `(kept, rows, width)`, and put the places side by side."""
    sums = products.new_zeros(count, *products.shape[1:]).index_add_(0, places, products)
    rows, width = products.shape[1:]
    return sums.transpose(0, 1).reshape(rows, count * width)[:, : shape[-1]].reshape(shape)


def tile_rows(pointers: Tensor, kept: int) -> Tensor:
    """Return the row of tiles in which each kept tile lies.

    Example:
        >>> tile_rows(torch.tensor([0, 2, 2, 3]), 3).tolist()
        [0, 0, 2]
    """
    rows = torch.arange(len(pointers) - 1, dtype=pointers.dtype, device=pointers.device)
    return rows.repeat_interleave(pointers.diff(), output_size=kept)
