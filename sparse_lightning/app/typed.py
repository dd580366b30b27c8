"""Typed: the overrides of the command line, which are the user's word. Some settings never come from a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from sparse_lightning.app.overrides import parsed
from sparse_lightning.errors import ConfigError, UntrustedError

TYPED_ONLY = ("ckpt_path", "trust_checkpoint")
"""Settings of a configuration that only the command line may change; so it is with `folder` and `trusted_targets`."""


@dataclass(frozen=True)
class Typed:
    """What the user has typed.

    Args:
        overrides: of the command line, not those that a recipe sweeps over.

    Example:
        >>> typed = Typed(("model.path=/shared/llama", "seed=1,2"))
        >>> typed.has("data.tokenizer", "/shared/llama"), typed.has("data.path", "/etc/passwd")
        (True, False)
    """

    overrides: tuple[str, ...] = ()

    def has(self, place: str, value: str) -> bool:
        """Whether the user has typed the key of a place, or, anywhere, the very text that is its value."""
        return place in self._values or any(value in texts for texts in self._values.values())

    def sets(self, key: str) -> bool:
        """Whether the user has typed a key."""
        return key in self._values

    @property
    def trusted(self) -> tuple[str, ...]:
        """The prefixes of dotted names that the user trusts.

        Example:
            >>> Typed(("seed=1", "trusted_targets=[my_pkg, our.models]")).trusted
            ('my_pkg', 'our.models')
        """
        given: Any = [o.value() for o in parsed(self.overrides) if o.key_or_group == "trusted_targets"]
        prefixes = given[-1] if given else []
        if not isinstance(prefixes, list) or not all(isinstance(prefix, str) for prefix in prefixes):
            raise ConfigError(f"trusted_targets: {prefixes!r} is not a list of prefixes, such as [my_pkg]")
        return tuple(prefixes)

    @cached_property
    def _values(self) -> dict[str, list[str]]:
        return {override.key_or_group: list(_texts(_value(override))) for override in parsed(self.overrides)}


def check_typed(config: Mapping[str, Any], raw: Mapping[str, Any], typed: Typed) -> None:
    """Raise `UntrustedError` where a recipe sets what only the command line may set.

    Args:
        config: plain.
        raw: the same with its interpolations, as it was composed.
        typed: the overrides of the command line.
    """
    if tuple(config["trusted_targets"] or ()) != typed.trusted:
        raise UntrustedError("trusted_targets is not allowed in a recipe: pass it on the command line")
    changed = [key for key in TYPED_ONLY if config.get(key)]
    changed += ["folder"] if raw.get("folder") != "${hydra:runtime.output_dir}" else []
    for key in changed:
        if not typed.sets(key):
            raise UntrustedError(
                f"{key}: {raw.get(key)!r} is not allowed in a recipe: remove it, and pass {key}=… on the command line "
                "if you need it"
            )


def _value(override: Override) -> Any:
    """Return the value of an override, or the list of those that it sweeps over."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_discrete_sweep() else None
    return override.value()


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, except for those that a recipe can change: they have interpolations."""
    if isinstance(value, QuotedString):
        value = value.text
    if isinstance(value, str) and "${" not in value:
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
