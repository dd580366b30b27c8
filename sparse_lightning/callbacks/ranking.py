"""Callbacks that rank states by a metric: before pruning ends, the best state is a denser one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint


def ranking_advice(callbacks: Iterable[L.Callback]) -> Iterator[str]:
    """Yield a warning for each callback that compares states of different sparsity.

    Not for metrics of sparsity, nor for callbacks that choose among sparse states, as SparseModelCheckpoint does.
    """
    for callback in callbacks:
        monitor = str(getattr(callback, "monitor", None) or "sparsity")
        if monitor.startswith("sparsity"):
            continue
        if isinstance(callback, ModelCheckpoint) and callback.save_top_k and not _chooses(callback):
            yield (
                f"{type(callback).__name__}(monitor={monitor!r}) ranks states before and after pruning by one metric: "
                "its best checkpoint may be a dense one. Use sparse_lightning.SparseModelCheckpoint, which ranks only "
                "states at the final sparsity"
            )
        if isinstance(callback, EarlyStopping):
            yield (
                f"{type(callback).__name__}(monitor={monitor!r}) may stop the run while pruning makes the metric "
                "worse, before the final sparsity is reached. Remove it, or set a patience longer than the schedule"
            )


def _chooses(callback: ModelCheckpoint) -> bool:
    return type(callback).check_monitor_top_k is not ModelCheckpoint.check_monitor_top_k
