"""YAML limits: files of a configuration are measured before they are expanded, so that a small one cannot grow huge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sparse_lightning.app.growth import check_growth
from sparse_lightning.errors import ConfigError

MAX_BYTES, MAX_NODES, MAX_DEPTH, MAX_COPIES = 500_000, 10_000, 50, 1_000
"""Of all files of a configuration together: bytes, keys and values; of each: nesting; copies of one file in others."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlLimits:
    """Measures the files of one configuration.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "bomb.yaml")
        ...     _ = file.write_text("a: &a [*a, *a]")
        ...     YamlLimits().add(file)
        Traceback (most recent call last):
        sparse_lightning.errors.ConfigError: ...bomb.yaml is not allowed: the alias *a includes itself...
    """

    def __init__(self) -> None:
        self._bytes, self._nodes, self._copies = 0, 0, 1

    def add(self, file: Path) -> None:
        """Measure one more file.

        Raises:
            ConfigError: where the files become too large or too deep, or a file includes itself.
        """
        self._bytes += file.stat().st_size
        if self._bytes > MAX_BYTES:
            raise _refused(file, f"the configuration has {self._bytes:,} bytes, more than {MAX_BYTES:,}")
        text = file.read_bytes()
        try:
            self._count(text, file)
        except yaml.YAMLError:
            return  # Hydra reports it, with its line
        content = _content(text)
        check_growth(content)  # Hydra resolves some of its own settings while it composes
        self._copies *= max(1, _included(content))
        if self._copies > MAX_COPIES:
            raise _refused(file, f"the defaults of its files include one another more than {MAX_COPIES:,} times")

    def _count(self, text: bytes, file: Path) -> None:
        """Count keys and values, those of aliases as often as they are used."""
        sizes: dict[str, int] = {}
        opened: list[tuple[str | None, int]] = []
        for event in yaml.parse(text, _LOADER):
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, before = opened.pop()
                if anchor is not None:
                    sizes[anchor] = self._nodes - before
                continue
            if isinstance(event, yaml.AliasEvent):
                if any(anchor == event.anchor for anchor, _ in opened):
                    raise _refused(file, f"the alias *{event.anchor} includes itself")
                self._nodes += sizes.get(event.anchor, 0)
            elif isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, self._nodes))
            if isinstance(event, yaml.NodeEvent):
                self._nodes += 1
            if len(opened) > MAX_DEPTH:
                raise _refused(file, f"it is nested more than {MAX_DEPTH} levels deep")
            if self._nodes > MAX_NODES:
                raise _refused(file, f"the configuration has more than {MAX_NODES:,} keys and values, with its aliases")


def _content(text: bytes) -> dict[str, Any]:
    """Return the keys and values of a file; none where it cannot be parsed, which Hydra reports."""
    try:
        content = yaml.load(text, _LOADER)
    except (yaml.YAMLError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _included(content: dict[str, Any]) -> int:
    """Return how many files the defaults of a file include."""
    defaults = content.get("defaults")
    entries = defaults if isinstance(defaults, list) else []
    return sum(not str(entry).lstrip("{'").startswith(("override ", "_self_")) for entry in entries)


def _refused(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is not allowed: {reason}. Use a shorter file")
