"""The pages that a run and a sweep write: `report.html`, in one file, with nothing to load."""

from __future__ import annotations

from sparse_lightning.report.page.run_page import write_page
from sparse_lightning.report.page.sweep_page import write_sweep_page

__all__ = ["write_page", "write_sweep_page"]
