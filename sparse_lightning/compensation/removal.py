"""The exact output error of removing blocks from a layer and refitting the rest: optimal brain surgeon."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.compensation.gram import GramMatrices
from sparse_lightning.compensation.least_squares import damped, factored
from sparse_lightning.compensation.weight_blocks import spread
from sparse_lightning.errors import FlowError

DAMP = 0.01
"""The usual damping of Gram matrices for removal errors."""

NONE = -1
"""The number of the block of a weight that is in none."""


@torch.no_grad()
def removal_errors(block: SparseBlock, grams: GramMatrices, damp: float) -> Tensor:
    """Return for each block the squared output error of the layers that read it, in the shape of the grid.

    Blocks of several rows are removed one after the other, the one with the least error first, with a downdate of the
    inverse Gram matrix each (ZipLM): the error is that of removing a block and all before it. Blocks of a single row,
    such as the weights of N:M groups, have the error of removing the block alone.

    Args:
        block: the blocks; weights that are not observed by `grams` do not contribute.
        grams: of the inputs.
        damp: of the Gram matrices.
    """
    total = torch.zeros(block.numblk(), dtype=torch.float64, device=block.unique_params()[0].device)
    ids = torch.arange(block.numblk(), device=total.device).view(block.grid_shape)
    layers = [grams.layer_of(param) for param in block.unique_params() if param in grams]
    if not layers:
        raise FlowError(
            f"{block} has no removal errors: no linear layer reads its blocks. Use another criterion than "
            "OBS for it, or a pattern that names the readers, such as Neurons or Heads"
        )
    for layer in layers:
        inverse = torch.cholesky_inverse(factored(damped(grams[layer.weight], damp), layer.name))
        weight, numbers = layer.whole().double(), spread(block, ids, layer, NONE)
        extra = len(inverse) - weight.shape[1]  # the constant, which is never removed
        _add_errors(total, pad(weight, (0, extra)), pad(numbers, (0, extra), value=NONE), inverse)
    return total.view(block.grid_shape)


def _add_errors(total: Tensor, weight: Tensor, numbers: Tensor, inverse: Tensor) -> None:
    """Add the errors of all blocks, by groups of rows that are divided alike."""
    patterns, group = torch.unique(numbers, dim=0, return_inverse=True)
    is_single = len(patterns) == len(weight) > 1
    for i, pattern in enumerate(patterns):
        found, columns = _columns(pattern)
        if len(found):
            rows = weight[group == i]
            errors = alone(rows, inverse, columns) if is_single else one_by_one(rows, inverse, columns)
            total.index_add_(0, found, errors)


def _columns(pattern: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of a row, and the columns of each, `(blocks, columns)`; −1 where a block has fewer."""
    found, which, counts = torch.unique(pattern, return_inverse=True, return_counts=True)
    order = which.argsort(stable=True)
    first = counts.cumsum(0) - counts
    places = torch.arange(int(counts.max()), device=pattern.device)
    index = (first[:, None] + places).clamp(max=len(order) - 1)
    columns = torch.where(places < counts[:, None], order[index], NONE)
    return found[found != NONE], columns[found != NONE]


def alone(rows: Tensor, inverse: Tensor, columns: Tensor) -> Tensor:
    """Return the error of removing each block alone, `(blocks,)`.

    Args:
        rows: weights, `(rows, inputs)`.
        inverse: of the Gram matrix.
        columns: of each block; −1 for none.
    """
    rows, inverse, columns = _with_spare(rows, inverse, columns)
    return _errors(rows, inverse, columns)


def _with_spare(rows: Tensor, inverse: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add inputs with weights of zero, one for each place, that blocks with fewer columns than others read."""
    spare, size = columns.shape[1], len(inverse)
    wide = torch.eye(size + spare, dtype=inverse.dtype, device=inverse.device)
    wide[:size, :size] = inverse
    places = size + torch.arange(spare, device=columns.device).expand_as(columns)
    return pad(rows, (0, spare)), wide, torch.where(columns == NONE, places, columns)


def _errors(rows: Tensor, inverse: Tensor, columns: Tensor) -> Tensor:
    if columns.shape[1] == 1:
        own = columns[:, 0]
        return rows[:, own].square().sum(0) / inverse[own, own].clamp(min=torch.finfo(inverse.dtype).tiny)
    read = rows[:, columns].permute(1, 2, 0)  # (blocks, columns, rows)
    solved: Tensor = torch.linalg.solve(inverse[columns[:, :, None], columns[:, None, :]], read)
    return (read * solved).sum((1, 2))


def one_by_one(rows: Tensor, inverse: Tensor, columns: Tensor) -> Tensor:
    """Return the error of removing each block and all before it, where the one with the least error is removed next.

    Args:
        rows: weights, `(rows, inputs)`.
        inverse: of the Gram matrix.
        columns: of each block; −1 for none.
    """
    rows, inverse, columns = _with_spare(rows, inverse, columns)
    errors, left = rows.new_zeros(len(columns)), torch.arange(len(columns), device=columns.device)
    total = rows.new_zeros(())
    while len(left):
        now = _errors(rows, inverse, columns[left])
        place = int(now.argmin())
        total = total + now[place].clamp(min=0)
        errors[left[place]] = total
        _remove(rows, inverse, columns[left[place]])
        left = torch.cat([left[:place], left[place + 1 :]])
    return errors


def _remove(rows: Tensor, inverse: Tensor, own: Tensor) -> None:
    """Take columns out of the rows and of the inverse Gram matrix, in place."""
    carried = torch.linalg.solve(inverse[own][:, own], inverse[own])
    rows -= rows[:, own] @ carried
    inverse -= inverse[:, own] @ carried
    # Exactly: what is left of rounding must not be divided by.
    inverse[own], inverse[:, own] = 0.0, 0.0
    inverse[own, own] = 1.0
    rows[:, own] = 0.0
