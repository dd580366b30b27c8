"""The report of a run: masks, figures, a table, numbers and a page; and the comparison of the runs of a sweep."""

from __future__ import annotations

from sparse_lightning.report.callback import Report
from sparse_lightning.report.deprecated import leave, write
from sparse_lightning.report.files import REPORT_FILES, add_export, write_report
from sparse_lightning.report.history import History
from sparse_lightning.report.outcome import Outcome, Row
from sparse_lightning.report.page import write_page
from sparse_lightning.report.sweeps import sweep

__all__ = [
    "REPORT_FILES",
    "History",
    "Outcome",
    "Report",
    "Row",
    "add_export",
    "leave",
    "sweep",
    "write",
    "write_page",
    "write_report",
]
