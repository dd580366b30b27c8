"""Saved weights: those of a checkpoint, in one file or in shards, in a whole model on the CPU."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from sparse_lightning.errors import CheckpointError

WEIGHTS = "state_dict"
"""Where Lightning puts the weights in a checkpoint."""


def load_weights(model: L.LightningModule, path: Path | str) -> None:
    """Load the weights of a checkpoint that is trusted, without a Trainer.

    Args:
        model: as it was created. Where its parameters have no memory yet, `configure_model` gives it to them, as in a
            Trainer on one device.
        path: the file, or the folder of shards.

    Raises:
        CheckpointError: where a folder of shards has other weights than the model.
    """
    if is_overridden("configure_model", model) and any(param.is_meta for param in model.parameters()):
        model.configure_model()
    if Path(path).is_dir():
        state = _from_shards(model, path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)[WEIGHTS]
    model.load_state_dict(state)


def _from_shards(model: L.LightningModule, path: Path | str) -> dict[str, torch.Tensor]:
    """Read shards into the tensors of the model itself: there is memory for it once."""
    # Here, because it is slow to load and only needed for shards.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, own = FileSystemReader(path), {WEIGHTS: model.state_dict()}
    prefix, saved = f"{WEIGHTS}.", reader.read_metadata().state_dict_metadata
    odd = sorted(set(own[WEIGHTS]) ^ {name.removeprefix(prefix) for name in saved if name.startswith(prefix)})
    if odd:
        raise CheckpointError(f"ckpt_path: {odd[0]} is in {path} or in {type(model).__name__} only: use the same model")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads them all
        load(own, storage_reader=reader)
    return own[WEIGHTS]
