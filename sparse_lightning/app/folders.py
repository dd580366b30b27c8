"""Folders of runs, and the newest checkpoint in them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from pickle import UnpicklingError
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
    """Return what `newest_checkpoint` does, and print which newer files are passed over."""
    found, passed = _furthest(folder)
    if passed and is_rank_zero():
        instead = f"for {found}" if found else "to start again"
        print(f"ckpt_path: {_names(passed)} truncated, and passed over {instead}", file=sys.stderr)
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the whole checkpoint of the highest step in the folder of one run; None for none.

    Copies of a folder may have lost the times of its files. Of equal steps, the state that the run has ended with is
    the newest one, and then the file that was written last. Where the step of one cannot be read, times decide.
    """
    return _furthest(folder)[0]


def _furthest(folder: Path) -> tuple[Path | None, list[Path]]:
    """Return the whole checkpoint of the highest step, and files written after it that are not whole."""
    paths = sorted(filter(is_checkpoint, folder.glob("*.ckpt")), key=_time, reverse=True)
    whole = [path for path in paths if is_whole(path)]
    found, steps = next(iter(whole), None), [step for path in whole if (step := _step(path)) is not None]
    if whole and len(steps) == len(whole):  # the first one of equals
        found = whole[max(range(len(whole)), key=lambda i: (steps[i], is_end(whole[i])))]
    passed = paths if found is None else paths[: paths.index(found)]
    return found, [path for path in passed if path not in whole]


def _step(path: Path) -> int | None:
    """Return the step of a whole checkpoint: that of its name, or the one in it; −1 without one, None if unreadable."""
    if found := re.match(r"step=(\d+)", path.resolve().name):
        return int(found[1])
    import torch  # the command line looks for folders before it needs torch

    try:
        saved = torch.load(_main_file(path), map_location="meta", mmap=True, weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError):
        return None
    return int(saved.get("global_step", -1)) if isinstance(saved, dict) else -1


def is_end(path: Path) -> bool:
    """Whether a checkpoint was written at the end of a run: until then, Lightning makes `last.ckpt` a link."""
    return path.name == "last.ckpt" and not path.is_symlink()


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
    try:
        with ZipFile(_main_file(path)) as archive:
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
    return _main_file(path).stat().st_mtime_ns


def _main_file(path: Path) -> Path:
    """Return the file of a checkpoint, or the one of a folder of shards that is not a shard."""
    return path / LAST_WRITTEN if path.is_dir() else path
