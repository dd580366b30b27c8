"""What is not on this machine: files, folders and optional packages, each with what to do about it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sparse_lightning.errors import SparseLightningError


class MissingError(SparseLightningError):
    """A file, a folder or an optional package that is not there."""


def existing(path: str | Path, argument: str, what: str) -> Path:
    """A path that is there.

    Args:
        path: a file or a folder; `~` is the home folder.
        argument: what it was given as, for the error.
        what: what should lie there, for the error.

    Example:
        >>> existing("/no/such/folder", "data.path", "a text file")
        Traceback (most recent call last):
        sparse_lightning.data.missing.MissingError: data.path=/no/such/folder is not there: give a text file
    """
    found = Path(path).expanduser()
    if not found.exists():
        raise MissingError(f"{argument}={path} is not there: give {what}")
    return found


def optional(package: str, install: str) -> Any:
    """A module of a package that not every installation has.

    Args:
        package: the module to import.
        install: what to give to `pip install`, for the error.

    Example:
        >>> optional("no_such_package", "sparse-lightning[hf]")
        Traceback (most recent call last):
        sparse_lightning.data.missing.MissingError: no_such_package is not installed: pip install 'sparse-lightning[hf]'
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # the package is there, and lacks something itself
        raise MissingError(f"{package.partition('.')[0]} is not installed: pip install '{install}'") from error
