"""Folders of runs, and the newest checkpoint in them."""

from __future__ import annotations

from pathlib import Path

from sparse_lightning.errors import ConfigError

LAST_WRITTEN = "meta.pt"
"""The file that Lightning writes last into the folder of a sharded checkpoint."""


def fresh(folder: Path) -> Path:
    """Return a folder of this name, or with a number appended, that does not exist."""
    choices = (folder if i == 1 else folder.with_name(f"{folder.name}_{i}") for i in range(1, 1000))
    try:
        return next(choice for choice in choices if not choice.exists())
    except OSError as error:  # a name that is too long for a file, for one
        raise no_folder(folder, error) from error


def no_folder(folder: Path, error: OSError) -> ConfigError:
    """Return the error of a folder that cannot be made."""
    return ConfigError(f"{folder}: the run's folder cannot be made: {error.strerror}. Choose another one by folder=…")


def last_run(runs: Path) -> Path:
    """Return the folder, among those of one recipe, with the newest checkpoint."""
    found = [path for path in runs.glob("*/**/checkpoints/*.ckpt") if is_checkpoint(path)]
    if not found:
        raise ConfigError(f"ckpt_path: there is no checkpoint in {runs} to resume from: remove ckpt_path")
    newest = max(found, key=_time)
    return runs / newest.relative_to(runs).parts[0]


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder; None if there is none."""
    return max(filter(is_checkpoint, folder.glob("*.ckpt")), key=_time, default=None)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint: a file, or a folder of shards that is complete."""
    return path.is_file() or (path / LAST_WRITTEN).is_file()


def has_shards(folder: Path) -> bool:
    """Whether a run has written sharded checkpoints."""
    return any(folder.glob(f"**/checkpoints/*.ckpt/{LAST_WRITTEN}"))


def _time(path: Path) -> int:
    """Return when a checkpoint was written; the time of a folder is not that of its files."""
    return (path if path.is_file() else path / LAST_WRITTEN).stat().st_mtime_ns
