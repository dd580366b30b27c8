"""The order in which blocks compete: descending scores, NaN last, ties broken by the lower index."""

from __future__ import annotations

from sparse_lightning.kernels.rank_select import rank_select
from sparse_lightning.kernels.rank_select.reference import descending_order

__all__ = ["descending_order", "rank_select"]
