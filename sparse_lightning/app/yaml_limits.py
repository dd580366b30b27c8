"""YAML limits: files of a configuration are measured before they are expanded, so that a small one cannot grow huge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sparse_lightning.errors import ConfigError

MAX_FILES, MAX_BYTES, MAX_NODES, MAX_COPIES = 200, 500_000, 10_000, 1_000
"""Of all files of a configuration together: their number, bytes, keys and values; copies of one file in others."""
MAX_DEPTH, MAX_KEY, MAX_DIGITS = 50, 200, 1_000
"""Of each file: nesting; characters of a key, and of a value without quotes that starts like a number."""
MAX_INTERPOLATED, MAX_NESTED = 20_000, 5
"""Characters of all values with interpolations; interpolations inside of one another, which take long to parse."""

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
        self._files, self._bytes, self._nodes, self._copies, self._interpolated = 0, 0, 0, 1, 0

    def add(self, file: Path) -> None:
        """Measure one more file.

        Raises:
            ConfigError: where the files become too large or too deep, or a file includes itself.
        """
        if not file.is_file():  # a pipe or a device has no end
            raise ConfigError(f"{file} is not allowed: it is not a regular file. Use a YAML file")
        self._files += 1
        self._bytes += file.stat().st_size
        if self._files > MAX_FILES:
            raise _refused(file, f"the configuration has more than {MAX_FILES} files")
        if self._bytes > MAX_BYTES:
            raise _refused(file, f"the configuration has {self._bytes:,} bytes, more than {MAX_BYTES:,}")
        text = file.read_bytes()
        try:
            self._count(text, file)
            content = yaml.load(text, _LOADER)
        except yaml.YAMLError:
            return  # Hydra reports it, with its line
        except ConfigError:
            raise
        except ValueError as error:  # a date that does not exist, for one
            raise ConfigError(f"{file} cannot be read: {error}. Put the value in quotes") from error
        if isinstance(content, dict):
            self._add_content(content, file)

    def _add_content(self, content: dict[Any, Any], file: Path) -> None:
        for key in _keys(content):
            if len(str(key)) > MAX_KEY:
                raise _refused(file, f"the key {str(key)[:20]}… has {len(str(key)):,} characters")
        if "hydra" in content and not isinstance(content["hydra"], dict):
            raise ConfigError(f"{file} is not allowed: hydra: {content['hydra']!r} is not a mapping. Remove it")
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
                self._add_value(event, file)
            if len(opened) > MAX_DEPTH:
                raise _refused(file, f"it is nested more than {MAX_DEPTH} levels deep")
            if self._nodes > MAX_NODES:
                raise _refused(file, f"the configuration has more than {MAX_NODES:,} keys and values, with its aliases")

    def _add_value(self, event: yaml.NodeEvent, file: Path) -> None:
        """Check one key or value."""
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise ConfigError(f"{file} is not allowed: it has the tag {tag[:80]!r}. Write values without tags")
        text = str(getattr(event, "value", ""))
        if len(text) > MAX_DIGITS and text[0] in "+-.0123456789" and not event.style:
            raise _refused(file, f"the number {text[:20]}… has {len(text):,} digits")
        if "${" in text:
            self._interpolated += len(text)
            if self._interpolated > MAX_INTERPOLATED or _depth(text) > MAX_NESTED:
                raise _refused(
                    file,
                    f"its interpolations grow: they have more than {MAX_INTERPOLATED:,} characters, or {MAX_NESTED} "
                    "inside of one another",
                )


def _keys(node: Any) -> Iterator[Any]:
    """Yield all keys of a file, at any depth."""
    if isinstance(node, dict):
        yield from node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _keys(value)


def _depth(text: str) -> int:
    """Return how deep interpolations in a text are nested.

    Example:
        >>> _depth("${a}/${b.${c}}")
        2
    """
    deepest = depth = 0
    for i, sign in enumerate(text):
        depth += text.startswith("${", i) - (sign == "}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _included(content: dict[Any, Any]) -> int:
    """Return how many files the defaults of a file include."""
    defaults = content.get("defaults")
    entries = defaults if isinstance(defaults, list) else []
    return sum(not str(entry).lstrip("{'").startswith(("override ", "_self_")) for entry in entries)


def _refused(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is not allowed: {reason}. Use a shorter file")
