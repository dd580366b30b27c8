"""Hydra's own settings: a recipe must not run code by them, or write outside of its folder.

Hydra builds objects from `hydra.callbacks`, `hydra.launcher`, `hydra.sweeper` and the logging settings before the job
starts, so they are checked first. Overrides of the command line are trusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse_lightning.app.allowlist import is_within
from sparse_lightning.app.growth import limited_growth
from sparse_lightning.app.trust import Target, home_of, locate, targets
from sparse_lightning.compat.hydra import CORE_PLUGINS
from sparse_lightning.errors import ConfigError, UntrustedError

_CHOSEN = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")
"""Settings from which objects are built. Plugins may run commands that these name, so a recipe adds nothing to them."""
_TYPED_ONLY = ("hydra", "trusted_targets", "trust_checkpoint", "ckpt_path", "folder")
_HANDLERS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler")
_FORMATTERS = ("logging.Formatter", "colorlog.ColoredFormatter")
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_FOLDERS = ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "job.name")


def check_hydra(
    part: DictConfig, typed: Sequence[str], trusted: Iterable[str] = (), chosen: DictConfig | None = None
) -> None:
    """Raise `UntrustedError` where Hydra's settings would run code that the user does not trust.

    Args:
        part: the node `hydra`, before Hydra uses it.
        typed: the overrides of the command line.
        trusted: prefixes of dotted names that the user trusts.
        chosen: the same node as the user alone chooses it, without a recipe. What is equal to it is trusted.
    """
    with limited_growth():
        plain = _plain(part)
    _check_kinds(plain)
    typed_keys = [line.partition("=")[0].lstrip("+~") for line in typed]
    changed = {kind: plain.get(kind) for kind in _CHOSEN if chosen is None or _is_changed(part, chosen, kind)}
    for kind in changed:
        _check_choice(part, chosen, kind, typed_keys)
    for target in _targets(changed):
        _check_target(target, (CORE_PLUGINS, *trusted))
    for place in ("job_logging", "hydra_logging"):
        _check_logging(changed.get(place), f"hydra.{place}")
    for key in plain.get("sweeper", {}).get("params") or {}:
        if str(key).lstrip("+~").startswith(_TYPED_ONLY):
            raise UntrustedError(
                f"hydra.sweeper.params: {key!r} is not allowed in a recipe: pass it on the command line"
            )
    for key in ("searchpath", "job.env_set", "job.env_copy"):
        if _at(plain, key) and not any(t.startswith(f"hydra.{key}") for t in typed_keys):
            raise UntrustedError(f"hydra.{key} is not allowed in a recipe: pass it on the command line")
    for key in _FOLDERS:
        if f"hydra.{key}" not in typed_keys:
            _check_folder(str(_at(plain, key) or ""), key)


def _is_changed(part: DictConfig, chosen: DictConfig, kind: str) -> bool:
    return bool(_written(part, kind) != _written(chosen, kind))


def _written(settings: DictConfig | None, kind: str) -> Any:
    """Return a setting as it is written; what a recipe sweeps over is checked by itself."""
    node: Any = None if settings is None else OmegaConf.to_container(settings).get(kind)  # type: ignore[union-attr]
    return {key: value for key, value in node.items() if key != "params"} if isinstance(node, dict) else node


def _check_choice(part: DictConfig, chosen: DictConfig | None, kind: str, typed_keys: Sequence[str]) -> None:
    """Raise `UntrustedError` where a recipe adds to a plugin that the user has chosen."""
    if f"hydra/{kind}" not in typed_keys:
        return
    now, before = _written(part, kind), _written(chosen, kind) or {}
    key = next((key for key in now if key not in before or now[key] != before[key]), "")
    raise UntrustedError(
        f"hydra.{kind}.{key}: {now.get(key)!r} is not allowed in a recipe, since hydra/{kind} is chosen on the command "
        "line: pass it there, too"
    )


def _check_kinds(plain: dict[str, Any]) -> None:
    """Raise `ConfigError` for settings of a kind on which Hydra fails."""
    verbose = plain.get("verbose")
    names = verbose if isinstance(verbose, list) else [verbose]
    if not isinstance(verbose, bool) and not all(isinstance(name, str) for name in names):
        raise ConfigError(f"hydra.verbose: {verbose!r} is not true, false, or names of loggers: correct or remove it")
    for kind in ("launcher", "sweeper"):
        if not isinstance(plain.get(kind), dict) or "_target_" not in plain[kind]:
            raise ConfigError(f"hydra.{kind}: {plain.get(kind)!r} is not a {kind}: use hydra/{kind}=basic")


def _check_target(target: Target, allowed: tuple[str, ...]) -> None:
    """Raise `UntrustedError` unless a name, and the object that it stands for, are in an allowed package."""
    reason = (
        "it is not a plugin of Hydra's own, and not in trusted_targets. If you trust it, choose it on the command "
        "line, and if it stands in a file of your own, add it to trusted_targets there"
    )
    if not isinstance(target.path, str) or not is_within(target.path, allowed):
        raise target.not_allowed(reason)
    home = home_of(locate(target))
    if home is None or not is_within(home, allowed):
        raise target.not_allowed(f"it is {home}: {reason}")


def _targets(plain: dict[str, Any]) -> Iterator[Target]:
    """Yield the targets of the settings that Hydra builds objects from; interpolations elsewhere are Hydra's own."""
    for key, value in plain.items():
        if key in ("callbacks", "launcher", "sweeper"):
            yield from targets(value, f"hydra.{key}")


def _check_logging(node: Any, place: str) -> None:
    if isinstance(node, list):
        for value in node:
            _check_logging(value, place)
    if isinstance(node, str) and ("ext://" in node or "cfg://" in node) and node not in _STREAMS:
        raise UntrustedError(f"{place}: {node!r} is not allowed: logging would import it")
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("()", "class") and value not in (*_HANDLERS, *_FORMATTERS):
            raise UntrustedError(f"{place}.{key}: {value!r} is not allowed: logging would call it")
        if key == "filename" and not _is_inside(str(value)):
            raise UntrustedError(f"{place}.{key}: {value!r} is not allowed: it is outside of the run's folder")
        _check_logging(value, f"{place}.{key}")


def _is_inside(filename: str) -> bool:
    """Whether a file is in the run's folder, which is not known yet: the name must start with its interpolation."""
    root = "${hydra.runtime.output_dir}/"
    return filename.startswith(root) and ".." not in PurePath(filename).parts


def _check_folder(value: str, key: str) -> None:
    path = PurePath(value)
    if not value.isprintable():  # a launcher writes names into a script
        raise UntrustedError(
            f"hydra.{key}: {value!r} is not allowed in a recipe: it has control characters. Remove them"
        )
    is_outside = path.is_absolute() or ".." in path.parts or value.startswith("~") or not _is_here(value)
    if is_outside or (key == "job.name" and "/" in value):
        raise UntrustedError(
            f"hydra.{key}: {value!r} is not allowed in a recipe: it is outside of the current folder. "
            "Pass it on the command line"
        )


def _is_here(value: str) -> bool:
    """Whether a path is below the current folder, with symbolic links resolved."""
    return Path(os.path.realpath(value)).is_relative_to(os.path.realpath("."))


def _at(plain: dict[str, Any], place: str) -> Any:
    node: Any = plain
    for part in place.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _plain(node: Any) -> Any:
    """Return plain values: those of interpolations, or their text where they cannot be resolved yet."""
    if isinstance(node, DictConfig):
        return {key: _plain(_value(node, key)) for key in node}
    if isinstance(node, ListConfig):
        return [_plain(_value(node, i)) for i in range(len(node))]
    return node


def _value(node: DictConfig | ListConfig, key: Any) -> Any:
    try:
        return node[key]
    except OmegaConfBaseException:
        text: Any = OmegaConf.to_container(node)
        return text[key]
