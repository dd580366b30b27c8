"""Folders: where runs are, and which checkpoint of them is the last."""

from __future__ import annotations

from pathlib import Path

from sparse_lightning.errors import ConfigError


def fresh(folder: Path) -> Path:
    """A folder of this name, or with a number behind it, where nothing is yet."""
    choices = (folder if i == 1 else folder.with_name(f"{folder.name}_{i}") for i in range(1, 1000))
    return next(choice for choice in choices if not choice.exists())


def last_run(runs: Path) -> Path:
    """The folder, among those of one recipe, in which the newest checkpoint lies."""
    found = list(runs.glob("*/**/checkpoints/*.ckpt"))
    if not found:
        raise ConfigError(f"ckpt_path: there is no checkpoint in {runs}: nothing to go on with. Leave ckpt_path out")
    newest = max(found, key=lambda file: file.stat().st_mtime_ns)
    return runs / newest.relative_to(runs).parts[0]


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder; None where there is none."""
    return max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns, default=None)
