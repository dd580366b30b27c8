"""Exporters write a trained model to a file. Each is called with a folder, the model and its Sparsifier."""

from __future__ import annotations

from sparse_lightning.export.blocks import KeptBlocks
from sparse_lightning.export.compact import Compact
from sparse_lightning.export.exporter import Exporter
from sparse_lightning.export.onnx import ONNX
from sparse_lightning.export.semi_structured import SemiStructured
from sparse_lightning.export.tiled import Tiled
from sparse_lightning.export.weights import Weights
from sparse_lightning.renamed import renamed_names

__all__ = ["ONNX", "Compact", "Exporter", "KeptBlocks", "SemiStructured", "Tiled", "Weights"]

__getattr__ = renamed_names(__name__, Blocks="KeptBlocks")
