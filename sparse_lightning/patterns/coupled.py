"""Parts of several parameters, laid on one another unit by unit: the views that coupled patterns share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparse_lightning.block import BlockCoupling, BlockSpec
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.layer import Layer
from sparse_lightning.patterns.pattern import Attachment, Pattern
from sparse_lightning.scope import ScopeSpec
from sparse_lightning.view import View


@dataclass(frozen=True)
class Piece:
    """What belongs to each unit (a neuron, a head, a filter) in one parameter: a layout `(units, …)`."""

    name: str
    parameter: Tensor
    layout: Layout


def row_pieces(layer: Layer, units: int, parts: int = 1) -> list[Piece]:
    """The outputs of a layer and their biases; `parts` runs of all units may lie one after the other."""
    pieces = [Piece(layer.name, layer.weight, by_unit(layer.rows(), units, parts))]
    if layer.bias is not None and layer.bias_name is not None:
        pieces.append(Piece(layer.bias_name, layer.bias, by_unit(Layout.of(layer.bias), units, parts)))
    return pieces


def column_piece(layer: Layer, units: int) -> Piece:
    """The inputs of a layer, the same number of neighbours for each unit."""
    return Piece(layer.name, layer.weight, by_unit(layer.columns(), units))


def reads(layer: Layer, units: int, made_by: Layer) -> bool:
    """Whether a layer has an input for each unit; several, where it is linear and a convolution was flattened."""
    inputs = layer.columns().shape[0]
    flattened = layer.weight.ndim == 2 < made_by.weight.ndim
    return inputs == units or (flattened and inputs > 0 and inputs % units == 0)


def by_unit(layout: Layout, units: int, parts: int = 1) -> Layout:
    """The first dimension, `parts` × units × what is left, with the units in front."""
    apart = layout.split(0, (parts, units, -1))
    return apart.permute((1, 0, *range(2, apart.ndim)))


def couple(pattern: Pattern, name: str, pieces: Sequence[Piece]) -> Attachment:
    """One scope of all units, in which a unit is pruned in all pieces or in none."""
    slim = [_without_ones(piece.layout) for piece in pieces]
    ndim = max(2, *(layout.ndim for layout in slim))
    specs = []
    for piece, layout in zip(pieces, slim, strict=True):
        wide = layout.reshape((*layout.shape, *(1,) * (ndim - layout.ndim)))
        view = View(piece.parameter, wide.shape, wide.stride, wide.offset)
        specs.append(BlockSpec(view, (1, *(-1,) * (ndim - 1)), name=piece.name))
    block = specs[0] if len(specs) == 1 else BlockCoupling(specs, name=name)
    return Attachment(name, pattern.label, ScopeSpec(block, name=name))


def _without_ones(layout: Layout) -> Layout:
    """Units first, and of the other dimensions only those longer than 1: fewer dimensions mean simpler kernels."""
    kept = [0, *(d for d in range(1, layout.ndim) if layout.shape[d] > 1)]
    return Layout([layout.shape[d] for d in kept], [layout.stride[d] for d in kept], layout.offset)
