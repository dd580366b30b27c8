"""What a run leaves: the masks, pictures, a closing table and its numbers; and the same for a sweep of runs."""

from __future__ import annotations

from sparse_lightning.report.callback import Report
from sparse_lightning.report.files import leave, write
from sparse_lightning.report.history import History
from sparse_lightning.report.outcome import Outcome, Row
from sparse_lightning.report.sweeps import sweep

__all__ = ["History", "Outcome", "Report", "Row", "leave", "sweep", "write"]
