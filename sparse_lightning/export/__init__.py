"""Exporters: what to do with a trained model. Each is called with a folder, the model and its Sparsifier."""

from __future__ import annotations

from sparse_lightning.export.blocks import Blocks
from sparse_lightning.export.exporter import Exporter
from sparse_lightning.export.weights import Weights

__all__ = ["Blocks", "Exporter", "Weights"]
