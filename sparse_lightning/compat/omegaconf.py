"""Private names of OmegaConf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import Container

_RESOLVERS = ("_resolve_node_interpolation", "_evaluate_custom_resolver")
"""The methods of `Container` by which it resolves `${name}` and `${resolver:…}`; texts call them once for each."""


@contextmanager
def resolving(measure: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the text of every value that an interpolation refers to, while the context lasts.

    Args:
        measure: what it raises ends the resolution. OmegaConf raises an error of its own from it, or ignores it.
    """
    before = {name: getattr(Container, name) for name in _RESOLVERS}

    def measured(resolve: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            measure("")  # before it is resolved: it may refer to others
            found = resolve(*args, **kwargs)
            measure(str(found))
            return found

        return call

    for name, resolve in before.items():
        setattr(Container, name, measured(resolve))
    try:
        yield
    finally:
        for name, resolve in before.items():
            setattr(Container, name, resolve)
