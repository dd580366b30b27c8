"""family_block: the units of a family as blocks, which can be drawn without the model."""

from __future__ import annotations

import torch

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.compat.plain_names import plain_name
from sparse_lightning.graph.families import Family
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.coupled import Piece, couple
from sparse_lightning.patterns.families import Coupled


def family_block(family: Family) -> SparseBlock:
    """Return one block for each unit, on parameters of the same names and shapes on the meta device.

    Example:
        >>> from torch import nn
        >>> from sparse_lightning import couplings
        >>> [family] = couplings(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), (torch.randn(2, 4),))
        >>> [(spec.name, tuple(spec.param.shape)) for spec in family_block(family).blocks()]
        [('0.weight', (8, 4)), ('0.bias', (8,)), ('1.weight', (3, 8))]
    """
    parameters = {part.name: torch.empty(part.shape, device="meta") for part in family.slices}
    pieces = [
        Piece(plain_name(part.name), parameters[part.name], part.layout(Layout(part.shape)), part.reads)
        for part in family.slices
    ]
    [block] = couple(Coupled(), family.name, pieces).scope.blocks()
    return block
