"""Proximal steps of the group-L2 penalty on blocks, in place.

The step takes a block v to the x that minimises `½ Σ h (x − v)² + t ‖x‖`. Without a conditioner h = 1 and the
block shrinks as one; with one, the elements shrink by different factors that hang together by `r = ‖x‖`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_lightning.errors import SparsityError

if TYPE_CHECKING:
    from sparse_lightning.sparse_block import SparseBlock, Thresholds, Values

NEWTON_STEPS = 16
"""Twelve suffice in fp64 for conditioners that differ by a factor of 1e16 within a block."""


def shrink(block: SparseBlock, thresholds: Thresholds, values: Values) -> Tensor:
    """Scale each block of norm n by `max(0, 1 − t/n)`; gives the mask of those that became zero."""
    norms = block.norms(values)
    t = thresholds_on(block, thresholds, norms)
    mask = norms <= t
    block.apply_mask(mask, values)
    block.apply_multiplier(torch.where(norms > t, 1 - t / norms, 1.0), values)
    return mask


def shrink_conditioned(block: SparseBlock, thresholds: Thresholds, values: Values, conditioners: Values) -> Tensor:
    """The proximal step in the metric of a diagonal; gives the mask of blocks that became zero.

    Blocks are taken a chunk of the grid at a time and solved there, so memory stays bounded and the
    weights are read and written once.
    """
    device = block.parameters()[0].device
    mask = torch.zeros(block.grid_shape, dtype=torch.bool, device=device)
    for rectangle in block.rectangles():
        parts, metric = block.blocks_in(rectangle, values), block.blocks_in(rectangle, conditioners)
        v, h = _joined(list(parts.values())), _joined(list(metric.values()))
        t = thresholds_on(block, thresholds, v)
        x, zero = solve(v, h, (t[rectangle] if t.ndim else t).unsqueeze(-1))
        pieces = torch.split(x, [p.shape[-1] for p in parts.values()], -1)
        block.set_blocks_in(rectangle, dict(zip(parts, pieces, strict=True)), values)
        mask[rectangle] = zero
    block.apply_mask(mask, values)
    return mask


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([p if p.element_size() >= 4 else p.float() for p in parts], -1)


def thresholds_on(block: SparseBlock, thresholds: Thresholds, like: Tensor) -> Tensor:
    """Thresholds as a tensor on the device and in the dtype of another: a single one, or one for each block."""
    t = torch.as_tensor(thresholds, dtype=like.dtype, device=like.device)
    if not isinstance(thresholds, Tensor) and not thresholds >= 0:
        raise SparsityError(f"a threshold of {thresholds}: a proximal step needs one that is not negative")
    return t.expand(block.grid_shape) if t.ndim else t


def solve(v: Tensor, h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The minimiser of `½ Σ h (x − v)² + t ‖x‖` over the last dimension, and where it is zero.

    Where `‖h v‖ > t` it is `x = v · h r / (h r + t)`, and r = ‖x‖ solves `φ(r) = Σ (h v)² / (h r + t)² = 1`.
    Newton's method runs on `φ(r)^(−½) − 1`, which is concave and almost straight: from a start below the
    root it climbs to it without overshooting. The number of steps is fixed, so nothing waits for the device.

    Args:
        v: `(…, elements)`.
        h: `(…, elements)`, not negative.
        t: `(…, 1)` or one value.

    Example:
        >>> v = torch.tensor([3.0, 4.0])
        >>> solve(v, torch.ones(2), torch.tensor([1.0]))[0]
        tensor([2.4000, 3.2000])
    """
    a = h * v
    size = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    zero = (size <= t).squeeze(-1)
    r = ((size - t) / h.amax(-1, keepdim=True)).clamp(min=0)
    for _ in range(NEWTON_STEPS):
        shift = h * r + t
        square = torch.where(shift > 0, a / shift, 0).square()
        phi = square.sum(-1, keepdim=True)
        slope = torch.where(shift > 0, square * h / shift, 0).sum(-1, keepdim=True)
        r = r + torch.where(slope > 0, (phi.pow(1.5) - phi) / slope, 0)
    shift = h * r + t
    return v * torch.where(shift > 0, h * r / shift, 1), zero
