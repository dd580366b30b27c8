"""Progress of what takes long: a bar on the terminal with the stage that runs, their number, and the time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Thread

from torch import nn
from tqdm import tqdm

from sparse_lightning.blocks.shards import is_rank_zero

INTERVAL = 1.0
"""Seconds between two drawings, and before the first: what is short shows no bar."""

_FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}"


@contextmanager
def stages(title: str, total: int, model: nn.Module | None = None, shown: bool = True) -> Iterator[None]:
    """Show a bar on the terminal while the block runs; `stage` says what runs, and advances it.

    Inside of another such block there is no second bar: its stages are some of those of the outer one. There is none
    where stderr is not a terminal, on ranks other than 0, or if the Trainer of a LightningModule shows none.

    Args:
        title: what runs.
        total: the number of stages, those of inner blocks included.
        model: whose Trainer may have disabled its progress bar.
        shown: False for no bar.

    Example:
        >>> with stages("export", total=2):
        ...     stage("tracing")
        ...     stage("writing")
    """
    if _CURRENT.get() is not None or not (shown and _is_watched() and not _is_disabled(model)):
        yield
        return
    bar = _Bar(title, total)
    token = _CURRENT.set(bar)
    bar.thread.start()
    try:
        yield
    finally:
        _CURRENT.reset(token)
        bar.ended.set()
        bar.thread.join()


def stage(name: str) -> None:
    """Say what runs now; without a bar, nothing happens."""
    bar = _CURRENT.get()
    if bar is not None:
        bar.name, bar.begun = name, bar.begun + 1


class _Bar:
    """A bar that is drawn by a thread of its own: calls of torch take long and report nothing."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.name, self.begun = title, total, "", 0
        self.ended, self.thread = Event(), Thread(target=self._draw, daemon=True)
        # Taken now: while torch traces a model, stderr is another one.
        self._file, self._start = sys.stderr, time.time()

    def _draw(self) -> None:
        drawn: tqdm | None = None
        while not self.ended.wait(INTERVAL):
            if drawn is None:
                drawn = tqdm(desc=self.title, total=self.total, file=self._file, leave=False, bar_format=_FORMAT)
                drawn.start_t = self._start
            drawn.n = max(0, self.begun - 1)
            drawn.set_description_str(f"{self.title}: {self.name}")
        if drawn is not None:
            drawn.close()


_CURRENT: ContextVar[_Bar | None] = ContextVar("_CURRENT", default=None)


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and is_rank_zero()


def _is_disabled(model: nn.Module | None) -> bool:
    """Whether the Trainer that a LightningModule belongs to shows no progress bar."""
    try:
        trainer = getattr(model, "trainer", None)
        return getattr(trainer, "progress_bar_callback", ...) is None
    except RuntimeError:  # a LightningModule without a Trainer, or with Fabric, has none
        return False
