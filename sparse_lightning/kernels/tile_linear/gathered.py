"""tile_linear by matrix products of torch over gathered inputs: for CPUs without a C++ compiler, and for odd tiles.

The inputs that a row of tiles needs are gathered side by side; its tiles lie one below the other in memory, so they are
one matrix already. Balanced tiles, equally many in each row, take one `bmm`; others take a product for each row.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from sparse_lightning.kernels.tile_linear.reference import cut


def tile_linear(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Return the outputs; see `reference.tile_linear`."""
    _, tile_in, tile_out = tiles.shape
    bounds = pointers.tolist()
    rows, count = math.prod(inputs.shape[:-1]), len(bounds) - 1
    pieces = cut(inputs, tile_in).transpose(0, 1)  # (rows, columns of tiles, tile_in)
    if len({high - low for low, high in pairwise(bounds)}) == 1:
        depth = bounds[1] * tile_in
        gathered = pieces[:, columns].reshape(rows, count, depth).transpose(0, 1)
        products = torch.bmm(gathered, tiles.reshape(count, depth, tile_out)).transpose(0, 1)
    else:
        products = inputs.new_empty(rows, count, tile_out)
        for i, (low, high) in enumerate(pairwise(bounds)):
            gathered = pieces[:, columns[low:high]].reshape(rows, (high - low) * tile_in)
            products[:, i] = gathered @ tiles[low:high].reshape((high - low) * tile_in, tile_out)
    outputs = products.reshape(rows, count * tile_out)[:, :out_features]
    outputs = outputs if bias is None else outputs + bias
    return outputs.contiguous().view(*inputs.shape[:-1], out_features)
