"""Callbacks for the Lightning Trainer."""

from sparse_lightning.callbacks.checkpoint import SparseModelCheckpoint
from sparse_lightning.callbacks.sparsity import SparsityCallback

__all__ = ["SparseModelCheckpoint", "SparsityCallback"]
