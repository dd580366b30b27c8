"""RandomNumbers: the states of random generators are in checkpoints."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import distributed

KEY = "sparse_lightning.random_numbers"

_CUDA: Any = torch.cuda  # some of whose functions have no types


class RandomNumbers(L.Callback):
    """Continue with the random numbers that a run would have drawn without a stop, such as those of dropout.

    Each process continues with its own; with another number of processes, all continue with those of rank 0.
    """

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the states of all ranks."""
        own = generator_states()
        states = [own] * trainer.world_size
        if trainer.world_size > 1:
            distributed.all_gather_object(states, own)
        checkpoint[KEY] = states

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states until training starts."""
        self._loaded = checkpoint.get(KEY, [])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the states that were loaded."""
        states, self._loaded = self._loaded, []
        if states:
            set_generator_states(states[trainer.global_rank if len(states) == trainer.world_size else 0])


def generator_states() -> dict[str, Any]:
    """Return the states of the generators of torch, numpy and Python: tensors and plain values only."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _CUDA.is_initialized() else None,
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "python": [version, list(numbers), gauss],
    }


def set_generator_states(states: dict[str, Any]) -> None:
    """Set what `generator_states` returned."""
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None and _CUDA.is_initialized():
        torch.cuda.set_rng_state(states["cuda"].cpu())
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
