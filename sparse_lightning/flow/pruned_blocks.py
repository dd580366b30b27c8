"""PrunedBlocks: which blocks a stage passes over, because they are pruned and nothing is folded there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.compat.torch import version
from sparse_lightning.flow.ragged_blocks import RaggedBlocks

WORTH = 1 << 18
"""The weights of a parameter from which on its pruned blocks are passed over, one by one."""

LINE = 64
"""Bytes that are read from memory together: smaller blocks are never passed over."""


class PrunedBlocks:
    """The pruned blocks of alike specs, stacked; made once for masks that stay the same.

    Args:
        blocks: the blocks that are scored.
    """

    def __init__(self, blocks: RaggedBlocks) -> None:
        self._blocks = blocks
        self._made: dict[BlockSpec, tuple[list[Tensor], list[int], Tensor]] = {}

    def of(self, specs: Sequence[BlockSpec], masks: Mapping[str, Tensor]) -> Tensor | None:
        """Return `(specs, *grid of blocks)`; None if reading the blocks takes no longer than passing over them.

        Args:
            specs: of parameters that lie alike.
            masks: by name of their block, True where all weights are zero.
        """
        first = specs[0]
        if first.numel_per_block() * first.param.element_size() < LINE or first.param.numel() < WORTH:
            return None
        owners = [self._blocks.owners[id(spec)] for spec in specs]
        used = [masks[owner] for owner in owners]
        if not self._is_made(first, used):
            pairs = zip(specs, owners, used, strict=True)
            grids = [self._blocks.blocks[owner].grid_of(spec, mask) for spec, owner, mask in pairs]
            self._made[first] = used, [version(mask) for mask in used], torch.stack(grids)
        return self._made[first][2]

    def _is_made(self, first: BlockSpec, masks: Sequence[Tensor]) -> bool:
        """Whether a stack was made of these masks, and none was changed in place since."""
        made, versions, _ = self._made.get(first, ((), (), None))
        is_same = len(made) == len(masks) and all(a is b for a, b in zip(made, masks, strict=True))
        # Tensors of inference mode do not tell whether they were changed.
        return is_same and not any(m.is_inference() for m in masks) and versions == [version(m) for m in masks]
