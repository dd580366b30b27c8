"""torchmetrics metrics of sparsity and masks; `functional` has them as functions."""

from sparse_lightning.metrics.churn import MaskChurn
from sparse_lightning.metrics.functional import block_sparsity, mask_churn, mask_overlap
from sparse_lightning.metrics.overlap import MaskOverlap
from sparse_lightning.metrics.sparsity import BlockSparsity

__all__ = ["BlockSparsity", "MaskChurn", "MaskOverlap", "block_sparsity", "mask_churn", "mask_overlap"]
