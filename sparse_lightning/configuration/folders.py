"""Folders: where runs are, and which checkpoint of them is the last."""

from __future__ import annotations

from pathlib import Path

from sparse_lightning.errors import ConfigError

LAST_WRITTEN = "meta.pt"
"""What Lightning writes last into the folder of a checkpoint in shards."""


def fresh(folder: Path) -> Path:
    """A folder of this name, or with a number behind it, where nothing is yet."""
    choices = (folder if i == 1 else folder.with_name(f"{folder.name}_{i}") for i in range(1, 1000))
    return next(choice for choice in choices if not choice.exists())


def last_run(runs: Path) -> Path:
    """The folder, among those of one recipe, in which the newest checkpoint lies."""
    found = [path for path in runs.glob("*/**/checkpoints/*.ckpt") if is_checkpoint(path)]
    if not found:
        raise ConfigError(f"ckpt_path: there is no checkpoint in {runs}: nothing to go on with. Leave ckpt_path out")
    newest = max(found, key=_time)
    return runs / newest.relative_to(runs).parts[0]


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder; None where there is none."""
    return max(filter(is_checkpoint, folder.glob("*.ckpt")), key=_time, default=None)


def is_checkpoint(path: Path) -> bool:
    """Whether a checkpoint lies there: a file, or a folder of shards that was written to its end."""
    return path.is_file() or (path / LAST_WRITTEN).is_file()


def _time(path: Path) -> int:
    """When a checkpoint was written; a folder does not tell when the files in it were."""
    return (path if path.is_file() else path / LAST_WRITTEN).stat().st_mtime_ns
