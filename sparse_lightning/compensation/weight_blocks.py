"""Which weights of a layer belong to which blocks, and which layers read what is pruned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.compensation.gram import GramMatrices
from sparse_lightning.compensation.reading_layer import ReadingLayer, is_transposed
from sparse_lightning.compensation.refit import Compensation
from sparse_lightning.errors import PatternError


def spread(block: SparseBlock, values: Tensor, layer: ReadingLayer, fill: int = 0) -> Tensor:
    """Return one value per block for each weight of a layer, `(outputs, inputs)`.

    Args:
        block: the blocks, on any parameters.
        values: in the shape of their grid.
        layer: some of the blocks may be on its weight.
        fill: the value of weights in no block.
    """
    wide = torch.full(layer.weight.shape, fill, dtype=values.dtype, device=values.device)
    for spec in block.blocks():
        if spec.param is layer.weight:
            spec.view.like(wide).data = spec.expand_to_elements(block.grid_of(spec, values))
    return layer.matrix(wide)


def read_weights(blocks: Iterable[SparseBlock], model: nn.Module, names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
    """Return names and weights of the layers whose outputs lose some of their weights, and not all, with a block.

    Those are the readers of coupled units, and weights with tiles or N:M groups. A neuron's own row is pruned as a
    whole: there is nothing left to refit.

    Args:
        blocks: that are pruned.
        model: where the weights are.
        names: of parameters, by their id.
    """
    owners = {id(param): module for module in model.modules() for param in module.parameters(recurse=False)}
    found: dict[int, Tensor] = {}
    for spec in [spec for block in blocks for spec in (block.readers() or block.blocks())]:
        if spec.param.ndim > 1 and not _spans_outputs(spec, is_transposed(owners.get(id(spec.param)))):
            found[id(spec.param)] = spec.param
    return [(names[key], param) for key, param in found.items()]


def check_read(compensation: Compensation | None, weights: Iterable[tuple[str, Tensor]], model: nn.Module) -> None:
    """Raise a PatternError if a compensation has no layer to change, or one whose weight other layers share."""
    if compensation is None:
        return
    read = list(weights)
    for name, weight in read:
        owners = [at for at, module in model.named_modules() if any(p is weight for p in module.parameters(False))]
        if len(owners) > 1:
            raise PatternError(
                f"{name} is shared by {' and '.join(owners)}, and {compensation!r} would change it for the inputs of "
                "one of them: exclude it from the patterns, untie it, or use no compensation"
            )
    if not read:
        raise PatternError(
            f"{compensation!r} has no layer to change: no pattern prunes some of the inputs of a layer. Use patterns "
            "that name the readers of what is pruned, such as Neurons, Heads or Blocks, or no compensation"
        )


def _spans_outputs(spec: BlockSpec, transposed: bool) -> bool:
    """Whether the first block of a spec has all weights of its outputs."""
    first = torch.zeros(spec.grid_shape, dtype=torch.bool)
    first.view(-1)[:1] = True
    mask = torch.zeros(spec.param.shape, dtype=torch.bool)
    spec.view.like(mask).data = spec.expand_to_elements(first)
    rows = mask.T if transposed else mask.flatten(1)
    return bool((rows.all(1) == rows.any(1)).all())


@torch.no_grad()
def compensate(
    compensation: Compensation, blocks: Mapping[str, SparseBlock], masks: Mapping[str, Tensor], grams: GramMatrices
) -> None:
    """Change the kept weights and biases of all observed layers, before blocks are pruned.

    Each process changes the rows that it holds.

    Args:
        compensation: computes the weights.
        blocks: by name.
        masks: the new masks, by the same names; True = pruned.
        grams: of the inputs; blocks that are about to be pruned have contributed to them.
    """
    for layer in grams.layers:
        own = layer.outputs()
        parts = [spread(block, masks[name], layer)[own] for name, block in blocks.items() if _is_on(block, layer)]
        pruned = torch.stack(parts).any(0)
        is_changed = pruned.any(1)
        if layer.bias is not None:
            pruned = torch.cat([pruned, pruned.new_zeros(len(pruned), 1)], 1)
        gram = grams[layer.weight]  # on all ranks, whatever their rows are
        if is_changed.any():
            layer.set_rows(is_changed, compensation.fit(layer.rows(), pruned, gram, layer.name))


def _is_on(block: SparseBlock, layer: ReadingLayer) -> bool:
    return any(spec.param is layer.weight for spec in block.blocks())
