"""The masks that a Sparsifier starts with: those that were passed, or those of the blocks that are zero."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.names import nearest

FROM_WEIGHTS = "from weights"
"""The value of `masks` that takes up the zeros of a pruned model."""

FirstMasks = Mapping[str, Tensor] | str | None
"""Masks by name as `Sparsifier.masks` returns them, `"from weights"`, or None for a dense start."""


def check_first_masks(given: object) -> None:
    """Raise a PatternError unless the value is a mapping of masks, `"from weights"` or None."""
    if not (given is None or isinstance(given, Mapping) or (isinstance(given, str) and given == FROM_WEIGHTS)):
        raise PatternError(
            f"masks={given!r} are not masks: pass a mapping from names to boolean tensors, as Sparsifier.masks "
            f"returns, or {FROM_WEIGHTS!r} for the zeros of a pruned model"
        )


def first_masks(given: Mapping[str, Tensor] | str, scopes: Iterable[MaskedScope]) -> dict[str, Tensor]:
    """Return the masks that were passed, or those of all blocks that are zero; all ranks must call it.

    Raises:
        PatternError: if names or shapes do not fit the scopes.
    """
    blocks = {name: block for scope in scopes for name, block in scope.blocks.items()}
    if isinstance(given, str):
        return {name: block.norms() == 0 for name, block in blocks.items()}
    for name in given:
        if name not in blocks:
            raise PatternError(f"masks has {name!r}, which no pattern finds in the model{nearest(name, blocks)}")
    for name, block in blocks.items():
        mask = given.get(name)
        if mask is None:
            raise PatternError(f"masks has no mask for {name}: pass one for each name in Sparsifier.masks")
        if not isinstance(mask, Tensor):
            raise PatternError(f"masks has a {type(mask).__name__} for {name}: pass a boolean tensor, True = pruned")
        if mask.dtype != torch.bool or tuple(mask.shape) != tuple(block.grid_shape):
            raise PatternError(
                f"masks has a tensor of {mask.dtype} and shape {tuple(mask.shape)} for {name}, whose grid of blocks "
                f"has the shape {tuple(block.grid_shape)}: pass a boolean tensor of that shape, True = pruned"
            )
    return dict(given)


def warn_of_zeros(scopes: Sequence[MaskedScope]) -> None:
    """Warn where a model has pruned blocks and no masks hold them at zero; all ranks must call it.

    Zeros of an initialization are not warned about: a single zero block, such as the padding row of an embedding, a
    parameter that is zero as a whole, and one with many zeros outside of zero blocks, such as an identity.
    """
    found = {}
    for scope in scopes:
        for name, block in scope.blocks.items():
            zeros = _zero_blocks(block)
            if 1 < zeros < block.numblk():
                found[name] = f"{zeros} of {block.numblk()} blocks of {name}"
    if found:
        some = ", ".join(list(found.values())[:3]) + (f" and those of {len(found) - 3} more" if len(found) > 3 else "")
        warnings.warn(
            f"{some} are zero, and training will change them, since no mask holds them: pass masks={FROM_WEIGHTS!r} to "
            "keep the zeros of a pruned model, or load the state of the Sparsifier that pruned it",
            stacklevel=3,
        )


def _zero_blocks(block: SparseBlock) -> int:
    """Return the number of zero blocks; 0 if more than one weight in a hundred is zero outside of them."""
    zeros = block.numel() - int(block.nnz(eps=0.0))
    if block.numel_per_block() == 1:
        return zeros  # without a grid, which would be as large as the weights
    zero = block.norms() == 0
    inside = int(block.block_sizes()[zero.cpu()].sum())
    return int(zero.sum()) if zeros - inside <= (block.numel() - inside) / 100 else 0
