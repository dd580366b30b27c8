"""torch.ao.pruning.WeightNormSparsifier: blocks and N:M, as a parametrization."""

from __future__ import annotations

from peer import Peer
from torch import nn
from torch.ao.pruning import WeightNormSparsifier


class TorchAO(Peer):
    """Norms of blocks; a parametrization multiplies by the mask in each forward pass."""

    name = "torch.ao WeightNormSparsifier"
    patterns = ("1×1", "4×4", "8×8", "32×32", "2:4")
    convolutions = ()

    def start(self) -> None:
        """Parametrize the layers."""
        pairs = self.plan.pattern == "2:4"
        self.sparsifier = WeightNormSparsifier(
            sparsity_level=1.0 if pairs else 0.0,
            sparse_block_shape=self.plan.block,
            zeros_per_block=0 if pairs else self.plan.block[0] * self.plan.block[1],
        )
        self.sparsifier.prepare(self.model, [{"tensor_fqn": f"{layer}.weight"} for layer in self.structure.layers])

    def update(self, target: float) -> None:
        """Prune to a sparsity; N:M by whole weights."""
        for group in self.sparsifier.groups:
            if self.plan.pattern == "2:4":
                group["zeros_per_block"] = round(4 * target)
            else:
                group["sparsity_level"] = target
        self.sparsifier.step()

    def finish(self) -> nn.Module:
        """Make the masks permanent."""
        self.sparsifier.squash_mask()
        return self.model

    def state(self) -> dict[str, object]:
        """With the masks, which the parametrization does not save."""
        return {**super().state(), "sparsifier": self.sparsifier.state_dict()}
