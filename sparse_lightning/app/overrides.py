"""Overrides of the command line that Hydra accepts by its grammar and then fails on: checked before it composes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from sparse_lightning.app import catalog
from sparse_lightning.app.yaml_limits import MAX_KEY
from sparse_lightning.errors import ConfigError

_SCHEMES = ("file://", "pkg://")


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar, and check keys, options and the search path.

    Example:
        >>> parsed(["criterion=null"])
        Traceback (most recent call last):
        sparse_lightning.errors.ConfigError: criterion: None is not an option: choose criterion=auto, or another
    """
    parser = OverridesParser.create()
    return [_parsed(parser, line) for line in overrides]


def _parsed(parser: OverridesParser, line: str) -> Override:
    try:
        [override] = parser.parse_overrides([line])
    except HydraException as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{shortened(first, 200)}. An override is key=value, such as schedule.final=0.9") from error
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"{shortened(line)}: {error}. Use a smaller number") from error
    _check(override)
    return override


def _check(override: Override) -> None:
    key = override.key_or_group
    if len(key) > MAX_KEY:
        raise ConfigError(f"{shortened(key)}: a key has at most {MAX_KEY} characters, and this one {len(key):,}")
    if key in {*catalog.groups(), "recipe", "hydra"} and not override.is_delete():
        _check_option(override, key)
    if key == "hydra.searchpath":
        _check_search_path(override.value())


def _check_option(override: Override, key: str) -> None:
    """Raise `ConfigError` unless the value of a group is the name of an option, or a sweep over names."""
    if override.is_sweep_override():
        return
    value = override.value()
    if not isinstance(value, str | list):
        advice = f"choose {key}={catalog.default(key)}, or another" if key != "hydra" else "set its keys, or remove it"
        raise ConfigError(f"{key}: {value!r} is not an option: {advice}")


def _check_search_path(value: Any) -> None:
    for entry in value if isinstance(value, list) else [value]:
        text = str(entry)
        if not isinstance(value, list) or ("://" in text and not text.startswith(_SCHEMES)):
            raise ConfigError(
                f"hydra.searchpath: {entry!r} is not supported: pass a list of folders, such as [file:///home/me/conf]"
            )


def shortened(text: str, size: int = 60) -> str:
    """Return the start and the end of a long text.

    Example:
        >>> shortened("a" * 100 + "z", 9)
        'aaaa…aaaz'
    """
    half = (size - 1) // 2
    return text if len(text) <= size else f"{text[:half]}…{text[-half:]}"
