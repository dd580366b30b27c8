"""Rank 0 of a run: the process that writes and prints. It is known without importing torch."""

from __future__ import annotations

import os
import time

from lightning_utilities.core.rank_zero import rank_zero_only

PATIENCE = 20.0
"""How many seconds processes wait for each other at the end."""

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""The environment variables from which Lightning, when it is imported, reads the rank of a process."""


def is_rank_zero() -> bool:
    """Whether this process is rank 0, as far as it is known yet."""
    given = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    known = getattr(rank_zero_only, "rank", None)
    return int(given if known is None else known) == 0


def await_rank_zero() -> None:
    """Wait, before another rank exits with an error: a launcher that sees it ends all processes."""
    time.sleep(PATIENCE)
