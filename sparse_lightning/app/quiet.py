"""Quiet: hide log lines and warnings of Lightning that appear in every run."""

from __future__ import annotations

import logging
import warnings

_LOGGED = (
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
    # Lightning uses a deprecated class of torch's pytrees.
    ".*LeafSpec.*",
    # Advice to add workers; the data of the recipes is in memory.
    ".*does not have many workers.*",
    # Small data has few batches.
    ".*is smaller than the logging interval.*",
    # A run resumes in its own folder.
    ".*Checkpoint directory .* exists and is not empty.*",
)


def be_quiet() -> None:
    """Hide what appears in every run; errors, other warnings and tables stay."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_news)
    for message in _WARNED:
        warnings.filterwarnings("ignore", message)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LOGGED)
