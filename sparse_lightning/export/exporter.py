"""Exporter: what every exporter is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import nn

from sparse_lightning.sparsifier import Sparsifier


class Exporter(Protocol):
    """Writes a trained model to a folder.

    Where there are several processes all of them call it, since weights may be in shards, and the first one writes.
    """

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the model.

        Args:
            folder: where to; it is made if it is not there.
            model: the trained model; it is only read.
            sparsifier: what trained it, attached or not.

        Returns:
            The file that was written.
        """
