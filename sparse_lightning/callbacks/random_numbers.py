"""RandomNumbers: the states of random generators are in checkpoints."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch

_CUDA: Any = torch.cuda  # some of whose functions have no types


class RandomNumbers(L.Callback):
    """Continue with the random numbers that a run would have drawn without a stop, such as those of dropout.

    All processes continue with those of rank 0, as they start with those of one seed.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of torch, numpy and Python: tensors and plain values only."""
        name, keys, *rest = np.random.get_state(legacy=True)
        version, numbers, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if _CUDA.is_initialized() else None,
            "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
            "python": [version, list(numbers), gauss],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts."""
        self._loaded = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the states that were loaded."""
        state, self._loaded = self._loaded, {}
        if not state:
            return
        torch.set_rng_state(state["torch"].cpu())
        if state["cuda"] is not None and _CUDA.is_initialized():
            torch.cuda.set_rng_state(state["cuda"].cpu())
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
