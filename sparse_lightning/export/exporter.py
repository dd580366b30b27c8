"""Exporter: the interface of all exporters."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import nn

from sparse_lightning.engine.sparsifier import Sparsifier


class Exporter(Protocol):
    """Writes a trained model to a folder.

    With several processes, all of them must call it, since weights may be sharded; rank 0 writes the file.
    """

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the model.

        Args:
            folder: the folder of the file; it is created if it does not exist.
            model: the trained model; it is not modified.
            sparsifier: the Sparsifier of the model, attached or not.

        Returns:
            The path of the file.
        """
