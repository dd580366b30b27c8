"""Least squares on Gram matrices: kept weights that give the outputs of all weights, as closely as possible.

Rows of weights are `(rows, inputs)`, in fp64. A row v that replaces a row w has the squared output error
`(v − w) G (v − w)ᵀ`, where G is the Gram matrix of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_lightning.errors import SparseLightningError

SWEEP = 128
"""Columns of a sweep that are updated one by one, before all later columns are updated at once."""

POLISH = 32
"""Iterations of conjugate gradients after a sweep."""


def damped(gram: Tensor, damp: float) -> Tensor:
    """Return a Gram matrix in fp64 with `damp` times the mean of its diagonal added to the diagonal."""
    wide = gram.double()
    return wide + damp * wide.diagonal().mean() * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)


def factored(gram: Tensor, owner: str) -> Tensor:
    """Return the lower Cholesky factor of a Gram matrix.

    Raises:
        SparseLightningError: names the layer if the matrix is singular in fp32, in which it was summed.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram)
    pivots, largest = factor.diagonal().square(), gram.diagonal().max()
    if int(info) or bool((pivots <= torch.finfo(torch.float32).eps * largest).any()) or not bool(largest.isfinite()):
        raise SparseLightningError(
            f"the Gram matrix of the {len(gram)} kept inputs of {owner} cannot be factored: some inputs are always "
            "zero, depend on each other, or are not finite. Pass more batches, or damping such as Refit(damp=0.01)"
        )
    return factor


def refit_alike(rows: Tensor, pruned: Tensor, gram: Tensor, owner: str) -> Tensor:
    """Return rows that are pruned alike, with their kept weights refitted by one solve.

    Args:
        rows: all weights.
        pruned: which columns are pruned, `(inputs,)`.
        gram: of the inputs, damped.
        owner: the name of the layer.
    """
    kept = ~pruned
    fitted = rows.masked_fill(pruned, 0.0)
    if pruned.any() and kept.any():
        lost = rows[:, pruned] @ gram[pruned][:, kept]
        fitted[:, kept] += torch.cholesky_solve(lost.T, factored(gram[kept][:, kept], owner)).T
    return fitted


def refit_groups(rows: Tensor, pruned: Tensor, gram: Tensor, owner: str) -> Tensor:
    """Return rows with their kept weights refitted, by one solve for all rows that are pruned alike.

    Args:
        rows: all weights.
        pruned: which weights are pruned, in the same shape.
        gram: of the inputs, damped.
        owner: the name of the layer.
    """
    patterns, group = torch.unique(pruned, dim=0, return_inverse=True)
    fitted = rows.clone()
    for i, pattern in enumerate(patterns):
        members = group == i
        if pattern.any():
            fitted[members] = refit_alike(rows[members], pattern, gram, owner)
    return fitted


def refit_rows(rows: Tensor, pruned: Tensor, gram: Tensor, owner: str) -> Tensor:
    """Return rows with their kept weights refitted, where each row has a mask of its own, as with N:M sparsity.

    A solve for each row would cost `rows · inputs³`. This makes one factorization: pruned weights are taken out column
    by column, and later columns take over what they did, as in SparseGPT. Conjugate gradients on all rows at once then
    approach the least-squares solution.

    Args:
        rows: all weights.
        pruned: which weights are pruned, in the same shape.
        gram: of the inputs, damped.
        owner: the name of the layer.
    """
    return polished(rows, swept(rows, pruned, gram, owner), pruned, gram)


def swept(rows: Tensor, pruned: Tensor, gram: Tensor, owner: str) -> Tensor:
    """Return rows without their pruned weights, compensated by later columns only."""
    inverse = torch.cholesky_inverse(factored(gram, owner))
    upper = torch.linalg.cholesky(inverse, upper=True)
    fitted = rows.clone()
    for start in range(0, rows.shape[1], SWEEP):
        stop = min(start + SWEEP, rows.shape[1])
        errors = torch.zeros_like(fitted[:, start:stop])
        for j in range(start, stop):
            error = torch.where(pruned[:, j], fitted[:, j] / upper[j, j], 0.0)
            fitted[:, j:stop] -= error[:, None] * upper[j, j:stop]
            errors[:, j - start] = error
        fitted[:, stop:] -= errors @ upper[start:stop, stop:]
    return fitted.masked_fill(pruned, 0.0)


def polished(rows: Tensor, fitted: Tensor, pruned: Tensor, gram: Tensor) -> Tensor:
    """Return fitted rows after some iterations of conjugate gradients: the output error of no row grows."""
    scale = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny)
    fitted = fitted.clone()
    residual = ((rows - fitted) @ gram).masked_fill(pruned, 0.0)
    direction = residual / scale
    power = (residual * direction).sum(1, keepdim=True)
    for _ in range(POLISH):
        ahead = (direction @ gram).masked_fill(pruned, 0.0)
        curvature = (direction * ahead).sum(1, keepdim=True)
        step = torch.where(curvature > 0, power / curvature, 0.0)
        fitted += step * direction
        residual -= step * ahead
        scaled = residual / scale
        new = (residual * scaled).sum(1, keepdim=True)
        direction = scaled + torch.where(power > 0, new / power, 0.0) * direction
        power = new
    return fitted
