"""The metrics as functions."""

from sparse_lightning.metrics.functional.churn import mask_churn
from sparse_lightning.metrics.functional.overlap import mask_overlap
from sparse_lightning.metrics.functional.sparsity import block_sparsity

__all__ = ["block_sparsity", "mask_churn", "mask_overlap"]
