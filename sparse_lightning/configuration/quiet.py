"""Quiet: what Lightning says at every run, and nobody needs to read at the command line."""

from __future__ import annotations

import logging
import warnings

_SAID = (
    "GPU available",
    "TPU available",
    "HPU available",
    "💡 Tip",
    "Loading `train_dataloader`",
    "Running in `fast_dev_run`",
    "`Trainer.fit` stopped",
    "`Trainer(limit_",
)
_WARNED = (
    # Lightning asks torch's trees in a way that torch has deprecated.
    ".*LeafSpec.*",
    # Advice on how to load data faster; the recipes' data is in memory.
    ".*does not have many workers.*",
    # Small data has few batches.
    ".*is smaller than the logging interval.*",
    # A resumed run goes on in its folder, and in the middle of an epoch if need be.
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*resuming from a checkpoint that ended before the epoch ended.*",
)


def be_quiet() -> None:
    """Leave out what is said at every run. Errors, other warnings and the tables stay."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_news)
    for message in _WARNED:
        warnings.filterwarnings("ignore", message)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_SAID)
