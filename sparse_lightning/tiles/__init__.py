"""Tiled models: linear layers that skip the tiles of their weights that are zero."""

from __future__ import annotations

from sparse_lightning.tiles.convert import tiled
from sparse_lightning.tiles.linear import TileLinear
from sparse_lightning.tiles.table import TiledLayer, TileTable

__all__ = ["TileLinear", "TileTable", "TiledLayer", "tiled"]
