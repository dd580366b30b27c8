"""Couplings of slices of several parameters, unit by unit: what Neurons, Heads and Filters are built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparse_lightning.blocks.scope import ScopeSpec
from sparse_lightning.blocks.spec import BlockCoupling, BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.layer import Layer
from sparse_lightning.patterns.pattern import Attachment, Pattern


@dataclass(frozen=True)
class Piece:
    """The slice of one parameter that belongs to each unit (a neuron, a head, a filter): a layout `(units, …)`.

    Args:
        name: of the parameter.
        parameter: the parameter.
        layout: of the slices.
        reads: whether it reads the unit: the unit contributes nothing while the readers are zero.
    """

    name: str
    parameter: Tensor
    layout: Layout
    reads: bool = False


def row_pieces(layer: Layer, units: int, parts: int = 1) -> list[Piece]:
    """Return the rows of each unit and their biases.

    Args:
        layer: the layer that computes the units.
        units: the number of units.
        parts: how often all units are repeated along the rows, as in a fused gate and up projection.
    """
    pieces = [Piece(layer.name, layer.weight, by_unit(layer.rows(), units, parts))]
    if layer.bias is not None and layer.bias_name is not None:
        pieces.append(Piece(layer.bias_name, layer.bias, by_unit(Layout.of(layer.bias), units, parts)))
    return pieces


def column_piece(layer: Layer, units: int) -> Piece:
    """Return the columns of each unit: consecutive inputs, the same number for each unit."""
    return Piece(layer.name, layer.weight, by_unit(layer.columns(), units), reads=True)


def reads(layer: Layer, units: int, made_by: Layer) -> bool:
    """Whether a layer has one input per unit, or several per unit after a flattened convolution."""
    inputs = layer.columns().shape[0]
    flattened = layer.weight.ndim == 2 < made_by.weight.ndim
    return inputs == units or (flattened and inputs > 0 and inputs % units == 0)


def by_unit(layout: Layout, units: int, parts: int = 1) -> Layout:
    """Split the first dimension into `(parts, units, rest)`, and move the units to the front."""
    apart = layout.split(0, (parts, units, -1))
    return apart.permute((1, 0, *range(2, apart.ndim)))


def couple(pattern: Pattern, name: str, pieces: Sequence[Piece], dims: int = 1) -> Attachment:
    """Return one scope of all units, in which a unit is pruned in all pieces or in none.

    Args:
        pattern: makes the scope.
        name: of the scope.
        pieces: the slices of each unit.
        dims: the leading dimensions of the pieces that count units; with two, each row of units is a scope of its own.
    """
    slim = [_without_ones(piece.layout, dims) for piece in pieces]
    ndim = max(dims + 1, *(layout.ndim for layout in slim))
    specs = []
    for piece, layout in zip(pieces, slim, strict=True):
        wide = layout.reshape((*layout.shape, *(1,) * (ndim - layout.ndim)))
        view = View(piece.parameter, wide.shape, wide.stride, wide.offset)
        specs.append(BlockSpec(view, (*(1,) * dims, *(-1,) * (ndim - dims)), name=piece.name))
    readers = [spec for piece, spec in zip(pieces, specs, strict=True) if piece.reads]
    block = specs[0] if len(specs) == 1 else BlockCoupling(specs, name=name, readers=readers)
    return Attachment(name, pattern.label, ScopeSpec(block, (1,) * (dims - 1), name=name), has_units=dims == 1)


def _without_ones(layout: Layout, dims: int) -> Layout:
    """Drop dimensions of size 1 except those of the units: fewer dimensions mean simpler kernels."""
    kept = [*range(dims), *(d for d in range(dims, layout.ndim) if layout.shape[d] > 1)]
    return Layout([layout.shape[d] for d in kept], [layout.stride[d] for d in kept], layout.offset)
