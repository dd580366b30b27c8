"""Proximal steps of the group-L2 penalty: tensor arithmetic on the elements of blocks.

The step maps a block v to the x that minimizes `½ Σ h (x − v)² + t ‖x‖`. Without a conditioner h = 1 and all elements
shrink by one factor; with one, they shrink by different factors that depend on `r = ‖x‖`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.errors import SparsityError

Thresholds = Tensor | float

NEWTON_STEPS = 16
"""Twelve are enough in fp64 for conditioners that differ by a factor of 1e16 within a block."""


@dataclass(frozen=True)
class Newton:
    """How a proximal step with conditioners is iterated.

    Args:
        max_iter: the number of steps.
        atol: a block whose norm moves by at most this in a step is not moved further; 0 makes all steps.
        eps: added to the conditioners, as Adam adds it to the root of its second moments.
    """

    max_iter: int = NEWTON_STEPS
    atol: float = 0.0
    eps: float = 0.0

    def __post_init__(self) -> None:
        if self.max_iter < 1:
            raise SparsityError(f"max_iter={self.max_iter} for a proximal step: pass at least 1")
        for name in ("atol", "eps"):
            if not getattr(self, name) >= 0:
                raise SparsityError(f"{name}={getattr(self, name)} for a proximal step: it must not be negative")


def scaled(thresholds: Thresholds, scale: float) -> Thresholds:
    """Return thresholds times a factor that is not negative."""
    if not scale >= 0:
        raise SparsityError(f"scale={scale} for a proximal step: it must not be negative")
    return thresholds if scale == 1 else thresholds * scale


def thresholds_like(like: Tensor, thresholds: Thresholds, grid_shape: tuple[int, ...]) -> Tensor:
    """Return thresholds on the device and in the dtype of `like`: a scalar, or a grid with one for each block."""
    t = torch.as_tensor(thresholds, dtype=like.dtype, device=like.device)
    if not isinstance(thresholds, Tensor) and not thresholds >= 0:
        raise SparsityError(f"the threshold {thresholds} is out of range: a proximal step takes 0 or more")
    return t.expand(grid_shape) if t.ndim else t


def solve(v: Tensor, h: Tensor, t: Tensor, newton: Newton = Newton()) -> tuple[Tensor, Tensor]:  # noqa: B008
    """Return the minimizer of `½ Σ h (x − v)² + t ‖x‖` over the last dimension, and where it is zero.

    If `‖h v‖ > t`, it is `x = v · h r / (h r + t)`, and r = ‖x‖ solves `φ(r) = Σ (h v)² / (h r + t)² = 1`.
    Newton's method runs on `φ(r)^(−½) − 1`, which is concave and almost linear: from a start below the root it
    converges without overshooting. The number of steps is fixed, so nothing waits for the device: a block that has
    converged within `atol` stays, and only a CPU stops early.

    Args:
        v: `(…, elements)`.
        h: `(…, elements)`, not negative.
        t: `(…, 1)` or a scalar.
        newton: the number of steps and when a block stays.

    Example:
        >>> v = torch.tensor([3.0, 4.0])
        >>> solve(v, torch.ones(2), torch.tensor([1.0]))[0]
        tensor([2.4000, 3.2000])
    """
    h = h + newton.eps if newton.eps else h
    a = h * v
    size = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    zero = (size <= t).squeeze(-1)
    r = ((size - t) / h.amax(-1, keepdim=True)).clamp(min=0)
    moves = torch.ones_like(r, dtype=torch.bool)
    for _ in range(newton.max_iter):
        shift = h * r + t
        square = torch.where(shift > 0, a / shift, 0).square()
        phi = square.sum(-1, keepdim=True)
        slope = torch.where(shift > 0, square * h / shift, 0).sum(-1, keepdim=True)
        step = torch.where(moves & (slope > 0), (phi.pow(1.5) - phi) / slope, 0)
        r = r + step
        if newton.atol:
            moves = step.abs() > newton.atol
            if moves.device.type == "cpu" and not moves.any():
                break
    shift = h * r + t
    return v * torch.where(shift > 0, h * r / shift, 1), zero
