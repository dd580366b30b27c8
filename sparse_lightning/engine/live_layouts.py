"""LiveLayouts: the masks of those blocks that are left in a model from which units were removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.layout import Layout


class LiveLayouts:
    """Where the blocks that are left have their masks: in a flat tensor of these, and in that of all blocks.

    Args:
        scopes: some of whose blocks may be removed.
        layouts: where the grid of each block, by name, is in the flat tensor of all blocks; one after the other.
        device: of the masks.

    Attributes:
        layouts: where the grid of the blocks that are left is in the flat tensor of these.
    """

    def __init__(self, scopes: Sequence[MaskedScope], layouts: Mapping[str, Layout], device: torch.device) -> None:
        self.layouts, self._index = dict(layouts), None
        left = {n: own for s in scopes if s.left is not None for n, own in zip(s.blocks, s.left.kept, strict=True)}
        if left:
            grids = {name: block.grid_shape for scope in scopes for name, block in scope.live_blocks.items()}
            start, places = 0, []
            for name, whole in layouts.items():
                self.layouts[name] = Layout(grids[name], None, start)
                start += self.layouts[name].numel
                places.append(whole.offset + left.get(name, torch.arange(whole.numel)))
            self._index = torch.cat(places).to(device)

    def of(self, flat: Tensor) -> Tensor:
        """Return the values of the blocks that are left, flat; the same tensor if all are."""
        return flat if self._index is None else flat[self._index]


def grids_in(flat: Tensor, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
    """Return the grids in a flat tensor, by name; layouts are one after the other."""
    parts = torch.split(flat, [layout.numel for layout in layouts.values()])
    return {name: part.view(layouts[name].shape) for name, part in zip(layouts, parts, strict=True)}
