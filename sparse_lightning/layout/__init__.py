"""Layouts: shapes, strides and offsets as functions from coordinates to elements. Integers only; no torch."""

from sparse_lightning.layout.algebra import check_division, grid_shape, resolve_block_shape, row_major
from sparse_lightning.layout.coalesce import coalesce
from sparse_lightning.layout.layout import Layout

__all__ = ["Layout", "check_division", "coalesce", "grid_shape", "resolve_block_shape", "row_major"]
