"""Paths in a configuration: what is written stays below the run's folder, what a recipe reads below the current one.

Symbolic links are resolved first. Paths that the user has typed may be read anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from sparse_lightning.app.allowlist import FILES, FOLDERS, INPUTS, UPLOADS, listed_name
from sparse_lightning.app.trust import Target, locate
from sparse_lightning.app.typed import Typed
from sparse_lightning.errors import UntrustedError

ANY = ("dirpath", "save_dir", "default_root_dir", "log_dir")
"""Arguments that are folders to write to, whatever takes them: also in packages that the user trusts."""

_PRINTING_PROFILERS = ("simple", "advanced")


def check_written(config: dict[str, Any]) -> None:
    """Raise `UntrustedError` where a file would be written outside of the run's folder, or leave the machine.

    Args:
        config: plain, with its folder; all targets are checked already.
    """
    run = config["folder"]
    for place, node in _objects(config):
        name = listed_name(locate(Target(place, node["_target_"])))
        _check_keywords(node, place, name)
        _check_profiler(node, place, name)
        folders = [key for key in (*ANY, *_arguments(FOLDERS, name)) if isinstance(node.get(key), str)]
        for key in folders:
            if not _is_below(node[key], run):
                raise UntrustedError(
                    f"{place}.{key}: {node[key]!r} is not allowed: it is outside of the run's folder. Write "
                    "${folder}/…, or choose the run's folder by hydra.run.dir on the command line"
                )
        base = next((node[key] for key in folders), run)
        for key in _arguments(FILES, name):
            if isinstance(node.get(key), str) and not _is_inside(node[key], base, run):
                raise UntrustedError(
                    f"{place}.{key}: {node[key]!r} is not allowed: it is outside of the run's folder. Write a name "
                    "without .. and without a leading /"
                )
        for key in _arguments(UPLOADS, name):
            if node.get(key) is not None:
                raise UntrustedError(
                    f"{place}.{key}: {node[key]!r} is not allowed: it would upload the model. Remove it"
                )


def check_read(config: dict[str, Any], typed: Typed) -> None:
    """Raise `UntrustedError` where a recipe, not the user, names a file to read outside of the current folder."""
    for place, node in _objects(config):
        name = listed_name(locate(Target(place, node["_target_"])))
        for key in _arguments(INPUTS, name):
            value = node.get(key)
            if not isinstance(value, str) or typed.has(f"{place}.{key}", value):
                continue
            if not _is_below(value, ".") and not _is_below(value, config["folder"]):
                raise UntrustedError(
                    f"{place}.{key}: {value!r} is not allowed in a recipe: it is outside of the current folder. Pass "
                    f"{place}.{key}=… on the command line"
                )


def _check_keywords(node: dict[str, Any], place: str, name: str | None) -> None:
    """Raise `UntrustedError` for an object with paths whose arguments are not all written by name."""
    hidden = [key for key in ("_args_", "_partial_") if node.get(key)]
    if hidden and any(name in table for table in (FOLDERS, FILES, INPUTS, UPLOADS)):
        raise UntrustedError(
            f"{place}.{hidden[0]}: {node[hidden[0]]!r} is not allowed: {name} takes paths, which are checked by name. "
            "Write all arguments by name"
        )


def _check_profiler(node: dict[str, Any], place: str, name: str | None) -> None:
    """Raise `UntrustedError` for a profiler of the Trainer that writes files where it chooses."""
    profiler = node.get("profiler")
    if name == "lightning.Trainer" and isinstance(profiler, str) and profiler not in _PRINTING_PROFILERS:
        raise UntrustedError(
            f"{place}.profiler: {profiler!r} is not allowed: it writes files outside of the run's folder. Use "
            f"{' or '.join(_PRINTING_PROFILERS)}, which print"
        )


def _objects(node: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping with a `_target_`, at any depth, and its place."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield place, node
        for key, value in node.items():
            yield from _objects(value, f"{place}.{key}" if place else str(key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _objects(value, f"{place}[{i}]")


def _arguments(table: dict[str, str], name: str | None) -> list[str]:
    return table.get(name or "", "").split()


def _is_plain(path: str) -> bool:
    """Whether a path means itself: libraries expand variables, and open addresses such as s3://…."""
    return not any(sign in path for sign in ("$", "::", "://", "\0"))


def _is_below(path: str, folder: str) -> bool:
    inside, root = os.path.realpath(os.path.expanduser(path)), os.path.realpath(folder)
    return _is_plain(path) and Path(inside).is_relative_to(root)


def _is_inside(name: str, base: str, run: str) -> bool:
    """Whether a file of a folder, by its name, is below the run's folder."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or name.startswith("~") or "\\" in name:
        return False
    return _is_plain(name) and _is_below(os.path.join(base, name), run)
