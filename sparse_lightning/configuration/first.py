"""The first of the processes of a run: the one that writes and prints. Nothing large is imported to know it."""

from __future__ import annotations

import os
import time

from lightning_utilities.core.rank_zero import rank_zero_only

PATIENCE = 20.0
"""How many seconds processes wait for one another at the end."""

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""The environment variables in which Lightning, when it is imported, looks for the number of a process."""


def is_first() -> bool:
    """Whether this process is the one that writes and prints, as far as that is known yet."""
    told = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    known = getattr(rank_zero_only, "rank", None)
    return int(told if known is None else known) == 0


def let_the_first_speak() -> None:
    """Called by another process before it ends with an error, since whoever sees that ends all of them."""
    time.sleep(PATIENCE)
