"""Objects that Hydra has wrapped: without `_convert_`, `instantiate` passes lists and mappings as OmegaConf's own.

OmegaConf turns dataclass instances in them, such as patterns and schedules, into configs that remember their class.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

T = TypeVar("T")


def unwrapped(value: T) -> T:
    """Return a list or mapping of OmegaConf as a plain one, with its dataclass instances; other values as they are.

    Example:
        >>> from omegaconf import OmegaConf
        >>> from sparse_lightning.schedules import Constant
        >>> unwrapped(OmegaConf.create([Constant(0.5)]))
        [Constant(final=0.5, begin=0, end=0.75)]
    """
    loaded: Any = sys.modules.get("omegaconf")  # without it, no value is wrapped
    if loaded is None or not loaded.OmegaConf.is_config(value):
        return value
    plain: T = loaded.OmegaConf.to_object(value)
    return plain
