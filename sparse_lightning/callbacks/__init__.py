"""Callbacks for the Lightning Trainer, and for that of Hugging Face; the latter is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparse_lightning.callbacks.checkpoint import SparseModelCheckpoint
from sparse_lightning.callbacks.sparsity import SparsityCallback

if TYPE_CHECKING:
    from sparse_lightning.callbacks.huggingface import HuggingFaceCallback as HuggingFaceCallback

# Without HuggingFaceCallback, which `import *` would import.
__all__ = ["SparseModelCheckpoint", "SparsityCallback"]


def __getattr__(name: str) -> Any:
    if name != "HuggingFaceCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"{__name__}.huggingface").HuggingFaceCallback
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed, which HuggingFaceCallback needs: pip install 'sparse-lightning[hf]'",
            name=error.name,
        ) from error
