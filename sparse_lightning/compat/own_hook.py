"""OwnHook: a hook that belongs to one module, and not to its copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class OwnHook:
    """A hook of a module whose copy does nothing.

    A model is copied and pickled with its hooks. A copy that called them as well would keep the state of this run
    alive, and a file with it could not be loaded without this package: both get a function of Python's own.

    Args:
        call: what the hook does; it returns nothing.

    Example:
        >>> import copy
        >>> from torch import nn
        >>> hook = OwnHook(lambda module, inputs, named: print("observed"))
        >>> hook(nn.ReLU(), (), {})
        observed
        >>> copy.deepcopy(hook)(nn.ReLU(), (), {})
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Do what the hook does."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # it takes any arguments and returns None
