"""Growth: what the interpolations of a configuration are resolved to is counted, so that a short file stays small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparse_lightning.compat.omegaconf import resolving
from sparse_lightning.errors import ConfigError

MAX_RESOLVED, MAX_SIZE = 1_000, 500_000
"""How often interpolations are resolved, and characters of all values that they refer to."""


class Growth:
    """Counts interpolations while they are resolved; beyond a limit, none is resolved any more.

    Attributes:
        resolved: how many were resolved, those of interpolations that refer to interpolations included.
        size: the characters of what they refer to.
    """

    def __init__(self) -> None:
        self.resolved = self.size = 0

    @property
    def is_too_large(self) -> bool:
        """Whether a limit is exceeded."""
        return self.resolved > MAX_RESOLVED or self.size > MAX_SIZE

    def add(self, text: str) -> None:
        """Count one more text that an interpolation refers to."""
        self.resolved += not text
        self.size += len(text)
        if self.is_too_large:
            raise self.error()

    def error(self) -> ConfigError:
        """Return the error of a configuration that grows too large."""
        return ConfigError(
            f"config: its interpolations grow: they are resolved more than {MAX_RESOLVED:,} times, or refer to more "
            f"than {MAX_SIZE:,} characters. Use fewer of them"
        )


@contextmanager
def limited_growth() -> Iterator[Growth]:
    """Raise `ConfigError` where the interpolations that are resolved inside grow too large.

    Example:
        >>> from omegaconf import OmegaConf
        >>> doubled = {f"x{i}": f"${{x{i - 1}}}${{x{i - 1}}}" for i in range(1, 40)}
        >>> with limited_growth():
        ...     OmegaConf.to_container(OmegaConf.create({"x0": "ab", **doubled}), resolve=True)
        Traceback (most recent call last):
        sparse_lightning.errors.ConfigError: config: its interpolations grow: ... Use fewer of them
    """
    growth = Growth()
    try:
        with resolving(growth.add):
            yield growth
    finally:
        if growth.is_too_large:  # whatever OmegaConf makes of what is raised while it resolves
            raise growth.error() from None
