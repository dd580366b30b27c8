"""Lightning adapters."""

from sparse_lightning.callbacks.sparsity import SparsityCallback

__all__ = ["SparsityCallback"]
