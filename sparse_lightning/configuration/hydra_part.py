"""Hydra's own part of a configuration: what a recipe sets there must not run code or reach out of its folder.

Hydra makes objects of `hydra.callbacks`, `hydra.launcher`, `hydra.sweeper` and of the logging settings before the
job begins, so this is looked at first. What the user has typed on the command line is the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from sparse_lightning.configuration.danger import danger_of, is_within
from sparse_lightning.configuration.trust import Target, targets
from sparse_lightning.errors import UntrustedError

_PLUGINS = ("hydra._internal.core_plugins", "hydra_plugins")
_HANDLERS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler")
_FORMATTERS = ("logging.Formatter", "colorlog.ColoredFormatter")
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_FOLDERS = ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "job.name")


def check_hydra(part: DictConfig, typed: Sequence[str], trusted: Iterable[str] = ()) -> None:
    """Raise `UntrustedError` where Hydra's part would run code that nobody has trusted.

    Args:
        part: the node `hydra`, before it is used.
        typed: the overrides that the user has given on the command line.
        trusted: prefixes of dotted names that the user trusts.
    """
    plain = _plain(part)
    typed_keys = [line.partition("=")[0].lstrip("+~") for line in typed]
    _check_targets(plain, tuple(trusted))
    for place in ("job_logging", "hydra_logging"):
        _check_logging(plain.get(place), f"hydra.{place}")
    for key in plain.get("sweeper", {}).get("params") or {}:
        if str(key).lstrip("+~").startswith(("hydra", "trusted_targets")):
            raise UntrustedError(f"hydra.sweeper.params: {key!r} is refused: give it on the command line")
    for key in ("searchpath", "job.env_set", "job.env_copy"):
        if _at(plain, key) and not any(t.startswith(f"hydra.{key}") for t in typed_keys):
            raise UntrustedError(f"hydra.{key} is refused in a recipe: give it on the command line")
    for key in _FOLDERS:
        if f"hydra.{key}" not in typed_keys:
            _check_folder(str(_at(plain, key) or ""), key)


def _check_targets(plain: dict[str, Any], trusted: tuple[str, ...]) -> None:
    for target in _without_help(plain):
        if not isinstance(target.path, str) or not is_within(target.path, (*_PLUGINS, *trusted)):
            reason = danger_of(str(target.path)) or "it is no plugin of Hydra, and you have not trusted it"
            raise target.refused(reason)


def _without_help(plain: dict[str, Any]) -> Iterator[Target]:
    """Targets of the parts that Hydra makes objects of; interpolations elsewhere are Hydra's own."""
    for key, value in plain.items():
        if key in ("callbacks", "launcher", "sweeper"):
            yield from targets(value, f"hydra.{key}")


def _check_logging(node: Any, place: str) -> None:
    if isinstance(node, list):
        for value in node:
            _check_logging(value, place)
    if isinstance(node, str) and ("ext://" in node or "cfg://" in node) and node not in _STREAMS:
        raise UntrustedError(f"{place}: {node!r} is refused: logging would import it")
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("()", "class") and value not in (*_HANDLERS, *_FORMATTERS):
            raise UntrustedError(f"{place}.{key}: {value!r} is refused: logging would call it")
        if key == "filename" and not _is_inside(str(value)):
            raise UntrustedError(f"{place}.{key}: {value!r} is refused: it lies outside of the run's folder")
        _check_logging(value, f"{place}.{key}")


def _is_inside(filename: str) -> bool:
    """The folder of the run is not known yet: the name has to begin with what stands for it."""
    root = "${hydra.runtime.output_dir}/"
    return filename.startswith(root) and ".." not in PurePath(filename).parts


def _check_folder(value: str, key: str) -> None:
    path = PurePath(value)
    if path.is_absolute() or ".." in path.parts or value.startswith("~") or (key == "job.name" and "/" in value):
        raise UntrustedError(
            f"hydra.{key}: {value!r} is refused in a recipe: it leaves the folder you are in. "
            "Give it on the command line"
        )


def _at(plain: dict[str, Any], place: str) -> Any:
    node: Any = plain
    for part in place.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _plain(node: Any) -> Any:
    """Plain values; what an interpolation stands for, or its text where that is not known yet."""
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
        return {key: _plain(_value(node, key)) for key in node}
    if isinstance(node, ListConfig) and not node._is_none() and not node._is_missing():
        return [_plain(_value(node, i)) for i in range(len(node))]
    return None if isinstance(node, DictConfig | ListConfig) else node


def _value(node: DictConfig | ListConfig, key: Any) -> Any:
    raw = node._get_node(key)
    try:
        return node[key]
    except OmegaConfBaseException:
        return raw._value()  # type: ignore[union-attr]
