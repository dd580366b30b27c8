"""LiveScope: what is left of a scope in a model from which units were removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparse_lightning.blocks.rebuilt import rebuilt
from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.errors import CouplingError
from sparse_lightning.layout import Layout
from sparse_lightning.layout.cutting import Indices, cut_layout, product_of


@dataclass(frozen=True)
class LiveScope:
    """The blocks of a scope that are left.

    Args:
        scope: on the smaller parameters.
        kept: for each of its blocks, in their order, the numbers that the blocks that are left have in the whole grid.
    """

    scope: SparseScope
    kept: tuple[Tensor, ...]


class Rest(NamedTuple):
    """What is left of a parameter.

    Attributes:
        param: the parameter, which is smaller than the tensor that stands in for it.
        kept: for each dimension of the whole parameter the indices that are left; None for all of them.
        layout: of the smaller parameter.
    """

    param: Tensor
    kept: Sequence[Indices | None]
    layout: Layout


class CutSpec(NamedTuple):
    """What is left of a spec.

    Attributes:
        param: the smaller parameter.
        layout: of the view on it.
        shape: of a block.
        kept: for each dimension of the grid of blocks the indices that are left.
    """

    param: Tensor
    layout: Layout
    shape: tuple[int, ...]
    kept: tuple[Indices, ...]


def stand_in(scope: SparseScope, of: Callable[[Tensor], Tensor | None]) -> SparseScope:
    """Return a scope on other tensors of the shapes and strides of its parameters.

    On the meta device they have no weights, but the grids, counts and sizes of a scope whose parameters get smaller.

    Args:
        scope: on parameters.
        of: returns the tensor that stands in for a parameter; None for the parameter itself.
    """

    def respec(spec: BlockSpec) -> BlockSpec:
        other, layout = of(spec.param), spec.view.layout
        if other is None:
            return spec
        offset = layout.offset - Layout.of(spec.param).offset + Layout.of(other).offset
        return BlockSpec(View(other, layout.shape, layout.stride, offset), spec.shape, spec.name, spec.edge)

    return rebuilt(scope, respec)


def live_scope(scope: SparseScope, rest: Callable[[Tensor], Rest | None]) -> LiveScope:
    """Return what is left of a scope.

    Args:
        scope: on the tensors that stand in for whole parameters.
        rest: returns what is left of the parameter behind such a tensor; None for a parameter that stays whole.

    Raises:
        CouplingError: if blocks are cut through, or removed in one parameter and not in another.
    """
    cuts: dict[int, CutSpec] = {}  # by the id of the spec
    for spec in [spec for block in scope.blocks() for spec in block.blocks()]:
        left = rest(spec.param)
        if left is not None:
            cuts[id(spec)] = cut_spec(spec, left)

    def respec(spec: BlockSpec) -> BlockSpec:
        if id(spec) not in cuts:
            return spec
        param, layout, shape, _ = cuts[id(spec)]
        return BlockSpec(View(param, layout.shape, layout.stride, layout.offset), shape, spec.name)

    kept = tuple(_kept(block, cuts) for block in scope.blocks())
    return LiveScope(rebuilt(scope, respec), kept)


def _kept(block: SparseBlock, cuts: Mapping[int, CutSpec]) -> Tensor:
    """Return the numbers in its grid of the blocks that are left, the same in all parameters."""
    grids = [_numbers(spec, cuts.get(id(spec)), block.order_of(spec)) for spec in block.blocks()]
    if not all(np.array_equal(grids[0], grid) for grid in grids[1:]):
        raise CouplingError(f"blocks of {block.name or block} are removed in one parameter and not in another")
    return torch.from_numpy(grids[0])


def _numbers(spec: BlockSpec, cut: CutSpec | None, order: Sequence[int]) -> Indices:
    """Return the numbers of the blocks of a spec that are left, in the grid of the block that it belongs to."""
    if cut is None:
        return np.arange(spec.numblk())
    return product_of([cut.kept[dim] for dim in order], [spec.grid_shape[dim] for dim in order])


def cut_spec(spec: BlockSpec, left: Rest) -> CutSpec:
    """Return what is left of a spec; raise a CouplingError if blocks are cut through, or no strides express it."""
    name, whole = spec.name or "a parameter", spec.view.layout
    found = cut_layout(whole, Layout.of(spec.param), left.kept, left.layout)
    if found is None:
        raise CouplingError(f"no strides express what is left of {name} without removed units")
    shape, kept = [], []
    for n, b, own in zip(whole.shape, spec.shape, found.kept, strict=True):
        blocks = _blocks(n, b, own)
        if b < n and len(own) < n and len(blocks) * b != len(own):
            raise CouplingError(f"removed units cut through the blocks of {name}")
        shape.append(min(b, len(own)))
        kept.append(blocks)
    return CutSpec(left.param, found.layout, tuple(shape), tuple(kept))


def _blocks(size: int, block: int, kept: Indices) -> Indices:
    """Return the numbers of the blocks of a dimension that have one of these indices."""
    if block == 1:
        return kept
    return np.unique(kept // block) if block < size else np.zeros(min(1, len(kept)), np.int64)
