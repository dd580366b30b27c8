"""TileTable: which layers of a model were tiled, which stay dense and why, with the times that decided it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparse_lightning.blocks.table import aligned, times

HEADINGS = ("layer", "weight", "tile", "kept", "dense", "tiles", "result")


@dataclass(frozen=True)
class TiledLayer:
    """What was decided for one linear layer.

    Args:
        name: of the module.
        shape: of its weight.
        tile: the shape of tiles that was tried; None if none was.
        kept: the fraction of tiles that are not zero; None if none was tried.
        dense_seconds: the time of the dense layer on the recorded inputs; None if it was not measured.
        tiles_seconds: the time of the tiled layer on the same inputs.
        reason: why the layer stays dense; empty if it was tiled.
    """

    name: str
    shape: tuple[int, ...]
    tile: tuple[int, int] | None = None
    kept: float | None = None
    dense_seconds: float | None = None
    tiles_seconds: float | None = None
    reason: str = ""

    @property
    def speedup(self) -> float | None:
        """The time of the dense layer relative to that of the tiled one, where both were measured."""
        if self.dense_seconds is None or self.tiles_seconds is None:
            return None
        return self.dense_seconds / self.tiles_seconds


@dataclass(frozen=True)
class TileTable:
    """The decisions for all linear layers of a model; `str` is the table.

    Example:
        >>> tiled = TiledLayer("up", (1024, 1024), (32, 32), 0.25, 80e-6, 20e-6)
        >>> print(TileTable((tiled, TiledLayer("down", (10, 1024), reason="few tiles are zero"))))
        layer  weight     tile   kept    dense    tiles  result
        -----  ---------  -----  ----  -------  -------  -------------------------
        up     1024×1024  32×32  25 %  80.0 µs  20.0 µs  tiles, 4.00×
        down   10×1024                                   dense: few tiles are zero
    """

    layers: tuple[TiledLayer, ...]

    def __iter__(self) -> Iterator[TiledLayer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        return aligned(HEADINGS, [_row(layer) for layer in self.layers], numbers=HEADINGS[3:6])


def _row(layer: TiledLayer) -> tuple[str, ...]:
    tile, kept = "" if layer.tile is None else times(layer.tile), "" if layer.kept is None else f"{layer.kept:.0%}"
    measured = [_microseconds(layer.dense_seconds), _microseconds(layer.tiles_seconds)]
    result = f"dense: {layer.reason}" if layer.reason else f"tiles, {layer.speedup or 1:.2f}×"
    return layer.name, times(layer.shape), tile, kept.replace("%", " %"), *measured, result


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f} µs"
