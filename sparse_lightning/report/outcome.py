"""Outcome: the masks and the sparsity of each parameter at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.table import times
from sparse_lightning.blocks.union import count_by_parameter, zero_grid
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.patterns import NamedScope


@dataclass(frozen=True)
class Row:
    """The sparsity of one parameter.

    Args:
        parameter: its name.
        shape: its shape.
        block: its block shape; with the shape of the view if that differs from the parameter.
        weights: the number of weights in blocks.
        masked: the number of weights that the mask prunes.
        zero: the number of weights in blocks that are entirely zero, counted from the weights; where units cross in a
            parameter, those of all its units.
    """

    parameter: str
    shape: tuple[int, ...]
    block: str
    weights: int
    masked: int
    zero: int

    @property
    def target(self) -> float:
        """The sparsity of the mask."""
        return self.masked / self.weights if self.weights else 0.0

    @property
    def actual(self) -> float:
        """The sparsity counted from the weights."""
        return self.zero / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class ScopeRow:
    """What is left of one scope.

    Args:
        name: unique in the model.
        pattern: the label of its pattern.
        blocks: the number of its blocks: neurons, heads, tiles.
        kept: the number of blocks that the masks keep.
    """

    name: str
    pattern: str
    blocks: int
    kept: int


@dataclass(frozen=True)
class Outcome:
    """The final state of a run.

    Args:
        rows: the parameters that are divided into blocks.
        masks: the mask of each grid of blocks by name, on the CPU; True = pruned.
        target: the target sparsity of the schedule.
        actual: the sparsity counted from the weights.
        step: the number of optimizer steps.
        scopes: the scopes of the model.
        counted: how many weights are zero, and how many are in blocks, each of them once; None for the sums of rows.
    """

    rows: tuple[Row, ...]
    masks: dict[str, Tensor]
    target: float
    actual: float
    step: int
    scopes: tuple[ScopeRow, ...] = ()
    counted: tuple[int, int] | None = None

    @property
    def zero(self) -> int:
        """The number of weights that are zero, each counted once."""
        return sum(row.zero for row in self.rows) if self.counted is None else self.counted[0]

    @property
    def weights(self) -> int:
        """The number of weights in blocks, each counted once."""
        return sum(row.weights for row in self.rows) if self.counted is None else self.counted[1]

    @staticmethod
    def of(sparsifiers: Sparsifier | Sequence[Sparsifier]) -> Outcome:
        """Return the state of one attached Sparsifier, or of several on one model."""
        listed = [sparsifiers] if isinstance(sparsifiers, Sparsifier) else list(sparsifiers)
        if not listed:
            raise SparseLightningError("a report needs a Sparsifier: add a SparsityCallback to the Trainer")
        blocks = [block for s in listed for attachment in s.attachments for block in attachment.scope.blocks()]
        counts = count_by_parameter(blocks)
        rows = [row for s in listed for attachment in s.attachments for row in _rows(attachment, s.masks, counts)]
        target = weighted_mean(listed, [s.target for s in listed])
        actual = weighted_mean(listed, [s.sparsity() for s in listed])
        scopes = tuple(_scope_row(attachment, s.masks) for s in listed for attachment in s.attachments)
        counted = sum(zero for zero, _ in counts.values()), sum(total for _, total in counts.values())
        return Outcome(tuple(rows), _masks(listed), target, actual, listed[0].step, scopes, counted)


def weighted_mean(sparsifiers: Sequence[Sparsifier], values: Sequence[float]) -> float:
    """Return the mean of one value per Sparsifier, weighted by its number of weights in blocks."""
    if len(values) == 1:
        return values[0]
    sizes = [sum(scope.numel() for scope in sparsifier.scopes.values()) for sparsifier in sparsifiers]
    return sum(v * n for v, n in zip(values, sizes, strict=True)) / max(1, sum(sizes))


def _masks(sparsifiers: Iterable[Sparsifier]) -> dict[str, Tensor]:
    """Return all masks by name; a name that is already taken gets the number of the Sparsifier."""
    found: dict[str, Tensor] = {}
    for number, sparsifier in enumerate(sparsifiers, 1):
        for name, mask in sparsifier.masks.items():
            found[name if name not in found else f"{name} ({number})"] = mask.detach().cpu().clone()
    return found


def _scope_row(attachment: NamedScope, masks: Mapping[str, Tensor]) -> ScopeRow:
    grids = [masks[name] for name in attachment.scope.named_blocks(attachment.name)]
    blocks, pruned = sum(grid.numel() for grid in grids), sum(int(grid.sum()) for grid in grids)
    return ScopeRow(attachment.name, attachment.pattern, blocks, blocks - pruned)


def _rows(attachment: NamedScope, masks: Mapping[str, Tensor], counts: Mapping[int, tuple[int, int]]) -> list[Row]:
    blocks = attachment.scope.named_blocks(attachment.name)
    return [row for name, block in blocks.items() for row in _block_rows(name, block, masks[name], counts)]


def _block_rows(name: str, block: SparseBlock, mask: Tensor, counts: Mapping[int, tuple[int, int]]) -> list[Row]:
    """Return a row for each parameter; a coupled block counts as zero if it is zero in all of them."""
    zero = zero_grid(block)
    found: list[Row] = []
    for spec in block.blocks():
        sizes = spec.sizes()
        masked, zeros = (int(sizes[block.grid_of(spec, grid).cpu()].sum()) for grid in (mask, zero))
        crossed, weights = counts[id(spec.param)]
        if weights == spec.view.numel():
            zeros = crossed  # units of others may cross this view
        seen = "" if spec.view.shape == tuple(spec.param.shape) else f" of {times(spec.view.shape)}"
        label, shape = spec.name or block.name or name, tuple(spec.param.shape)
        found.append(Row(label, shape, times(spec.shape) + seen, spec.view.numel(), masked, zeros))
    return found
