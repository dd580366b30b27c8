"""Outcome: what a run has made of the weights, counted while the Sparsifier is attached, and kept after that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparse_lightning.errors import SparseLightningError
from sparse_lightning.patterns import Attachment
from sparse_lightning.sparse_block import SparseBlock
from sparse_lightning.sparsifier import Sparsifier
from sparse_lightning.table import times


@dataclass(frozen=True)
class Row:
    """One parameter.

    Args:
        parameter: its name.
        shape: its shape.
        block: its block; with the shape of the view, where that is not the parameter itself.
        weights: how many weights lie in blocks.
        masked: how many of them the mask prunes.
        zero: how many of them lie in blocks that are wholly zero, counted from the weights.
    """

    parameter: str
    shape: tuple[int, ...]
    block: str
    weights: int
    masked: int
    zero: int

    @property
    def target(self) -> float:
        """The sparsity that the mask asks for."""
        return self.masked / self.weights if self.weights else 0.0

    @property
    def actual(self) -> float:
        """The sparsity that is counted from the weights."""
        return self.zero / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Outcome:
    """What a run has made.

    Args:
        rows: the parameters that were cut into blocks.
        masks: the mask of each grid of blocks by name, on the CPU; True = pruned.
        target: what the schedule asks for.
        actual: what is counted from the weights.
        step: the optimizer steps that were made.
    """

    rows: tuple[Row, ...]
    masks: dict[str, Tensor]
    target: float
    actual: float
    step: int

    @staticmethod
    def of(sparsifiers: Sparsifier | Sequence[Sparsifier]) -> Outcome:
        """What one Sparsifier, or several on one model, have made. They must be attached."""
        listed = [sparsifiers] if isinstance(sparsifiers, Sparsifier) else list(sparsifiers)
        if not listed:
            raise SparseLightningError("a report on no Sparsifier: add a SparsityCallback to the Trainer")
        rows = [row for s in listed for attachment in s.attachments for row in _rows(attachment, s.masks)]
        target = weighted_mean(listed, [s.target for s in listed])
        actual = weighted_mean(listed, [s.sparsity() for s in listed])
        return Outcome(tuple(rows), _masks(listed), target, actual, listed[0].step)


def weighted_mean(sparsifiers: Sequence[Sparsifier], values: Sequence[float]) -> float:
    """The mean of values, each with as much weight as its Sparsifier has weights in blocks."""
    if len(values) == 1:
        return values[0]
    sizes = [sum(scope.numel() for scope in sparsifier.scopes.values()) for sparsifier in sparsifiers]
    return sum(v * n for v, n in zip(values, sizes, strict=True)) / max(1, sum(sizes))


def _masks(sparsifiers: Iterable[Sparsifier]) -> dict[str, Tensor]:
    """All masks by name; where several have the same name, the later ones get a number."""
    found: dict[str, Tensor] = {}
    for number, sparsifier in enumerate(sparsifiers, 1):
        for name, mask in sparsifier.masks.items():
            found[name if name not in found else f"{name} ({number})"] = mask.detach().cpu().clone()
    return found


def _rows(attachment: Attachment, masks: Mapping[str, Tensor]) -> list[Row]:
    blocks = attachment.scope.blocks()
    names = [attachment.name] if len(blocks) == 1 else [f"{attachment.name}/{i}" for i in range(len(blocks))]
    return [row for name, block in zip(names, blocks, strict=True) for row in _block_rows(name, block, masks[name])]


def _block_rows(name: str, block: SparseBlock, mask: Tensor) -> list[Row]:
    """A row for each parameter; a coupled block counts as zero where it is zero in all of them."""
    zero = block.norms(p=float("inf")) == 0
    found: list[Row] = []
    for spec in block.blocks():
        sizes = spec.sizes()
        masked, zeros = (int(sizes[block.grid_of(spec, grid).cpu()].sum()) for grid in (mask, zero))
        seen = "" if spec.view.shape == tuple(spec.param.shape) else f" of {times(spec.view.shape)}"
        label, shape = spec.name or block.name or name, tuple(spec.param.shape)
        found.append(Row(label, shape, times(spec.shape) + seen, spec.view.numel(), masked, zeros))
    return found
