"""A mask loop by hand: what one writes without any library."""

from __future__ import annotations

import torch
from peer import Peer
from torch import Tensor


class MaskLoop(Peer):
    """Norms of blocks, the k-th smallest value, and a product with the mask after each step."""

    name = "mask loop by hand"
    patterns = ("1×1", "4×4", "8×8", "32×32", "2:4")
    convolutions = ("1×1", "4×4", "8×8")

    def start(self) -> None:
        """Keep everything at first."""
        self.masks = [torch.ones_like(module.weight) for module in self.modules()]

    def update(self, target: float) -> None:
        """Choose new masks."""
        with torch.no_grad():
            self.masks = [self._mask(module.weight, target) for module in self.modules()]
            self._apply()

    def _mask(self, weight: Tensor, target: float) -> Tensor:
        rows, columns = self.plan.block
        tiles = weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns, -1)
        if self.plan.pattern == "2:4":
            order = tiles.abs().argsort(3)
            kept = torch.ones_like(tiles).scatter_(3, order[:, :, :, : round(4 * target)], 0.0)
            return kept.reshape(weight.shape)
        norms = tiles.square().sum((1, 3))
        pruned = round(target * norms.numel())
        limit = norms.flatten().kthvalue(pruned).values if pruned else norms.min() - 1
        kept = (norms > limit).to(weight.dtype)
        return kept.repeat_interleave(rows, 0).repeat_interleave(columns, 1).reshape(weight.shape)

    def after_step(self, step: int) -> None:
        """Hold the masks."""
        with torch.no_grad():
            self._apply()

    def _apply(self) -> None:
        for module, mask in zip(self.modules(), self.masks, strict=True):
            module.weight.mul_(mask)

    def state(self) -> dict[str, object]:
        """With the masks."""
        return {**super().state(), "masks": self.masks}
