"""Compaction: pruned units are removed, and a smaller model is left."""

from sparse_lightning.compaction.compact import Compacted, compact, compacted
from sparse_lightning.compaction.program import compact_program

__all__ = ["Compacted", "compact", "compact_program", "compacted"]
