"""Missing files, folders and optional packages: errors that name what to do."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sparse_lightning.errors import SparseLightningError


class MissingError(SparseLightningError):
    """A file, a folder or an optional package that does not exist."""


def existing(path: str | Path, argument: str, what: str) -> Path:
    """Return a path that exists.

    Args:
        path: a file or a folder; `~` is the home folder.
        argument: the argument that it was passed as, for the error.
        what: what to pass instead, for the error.

    Example:
        >>> existing("/no/such/folder", "data.path", "a text file")
        Traceback (most recent call last):
        sparse_lightning.data.missing.MissingError: data.path=/no/such/folder does not exist: set it to a text file
    """
    found = Path(path).expanduser()
    if not found.exists():
        raise MissingError(f"{argument}={path} does not exist: set it to {what}")
    return found


def optional(package: str, install: str) -> Any:
    """Import a module of an optional package.

    Args:
        package: the module to import.
        install: the argument of `pip install`, for the error.

    Example:
        >>> optional("no_such_package", "sparse-lightning[hf]")
        Traceback (most recent call last):
        sparse_lightning.data.missing.MissingError: no_such_package is not installed: pip install 'sparse-lightning[hf]'
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # the package exists, and lacks a dependency itself
        raise MissingError(f"{package.partition('.')[0]} is not installed: pip install '{install}'") from error
