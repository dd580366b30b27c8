"""Folders of runs, and the newest checkpoint in them."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryFile
from zipfile import BadZipFile, ZipFile

from sparse_lightning.app.rank_zero import is_rank_zero
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


def make_folder(folder: Path) -> None:
    """Make the folder of a run, unless it exists.

    Raises:
        ConfigError: where it cannot be made, or nothing can be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise no_folder(folder, error) from error


def no_folder(folder: Path, error: OSError) -> ConfigError:
    """Return the error of a folder that cannot be made."""
    return ConfigError(f"{folder}: the run's folder cannot be used: {error.strerror}. Choose another one by folder=…")


def last_run(runs: Path) -> Path:
    """Return the folder, among those of one recipe, with the newest checkpoint that is whole.

    Raises:
        ConfigError: where there is none.
    """
    found, passed = _newest(runs, "*/**/checkpoints/*.ckpt")
    if found is None:
        raise _nothing(runs, passed)
    return runs / found.relative_to(runs).parts[0]


def resumed_folder(folder: Path) -> Path:
    """Return the folder of a run that the user has typed, if it has a checkpoint that is whole."""
    found, passed = _newest(folder, "**/checkpoints/*.ckpt")
    if found is None:
        raise _nothing(folder, passed)
    return folder


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder that is whole, and print which are passed over; None for none."""
    found, passed = _newest(folder, "*.ckpt")
    if passed and is_rank_zero():
        instead = f"for {found}" if found else "to start again"
        print(f"ckpt_path: {_names(passed)} truncated, and passed over {instead}", file=sys.stderr)
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder that is whole; None for none."""
    return _newest(folder, "*.ckpt")[0]


def _newest(folder: Path, glob: str) -> tuple[Path | None, list[Path]]:
    """Return the newest whole checkpoint below a folder, and the newer ones that are not whole."""
    passed: list[Path] = []
    for path in sorted(filter(is_checkpoint, folder.glob(glob)), key=_time, reverse=True):
        if is_whole(path):
            return path, passed
        passed.append(path)
    return None, passed


def _nothing(folder: Path, passed: list[Path]) -> ConfigError:
    if passed:
        reason = f"no checkpoint in {folder} is whole: {_names(passed)} truncated"
    else:
        reason = f"there is no checkpoint in {folder} to resume from"
    return ConfigError(f"ckpt_path: {reason}: remove ckpt_path")


def _names(paths: list[Path]) -> str:
    return f"{', '.join(map(str, paths))} {'is' if len(paths) == 1 else 'are'}"


def is_whole(path: Path) -> bool:
    """Whether a checkpoint was written to its end: torch writes zip archives, whose table of contents comes last.

    Example:
        >>> is_whole(Path(__file__))
        False
    """
    file = path / LAST_WRITTEN if path.is_dir() else path
    try:
        with ZipFile(file) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (BadZipFile, OSError):
        return False


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint: a file, or a folder of shards that is complete."""
    return path.is_file() or (path / LAST_WRITTEN).is_file()


def has_shards(folder: Path) -> bool:
    """Whether a run has written sharded checkpoints."""
    return any(folder.glob(f"**/checkpoints/*.ckpt/{LAST_WRITTEN}"))


def _time(path: Path) -> int:
    """Return when a checkpoint was written; the time of a folder is not that of its files."""
    return (path if path.is_file() else path / LAST_WRITTEN).stat().st_mtime_ns
