"""Configurations of Hugging Face models: they get the sizes of a compacted model, where one size fits all layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sparse_lightning.compaction.head_attributes import HEAD_SIZES, KEY_HEADS, QUERY_HEADS
from sparse_lightning.compaction.zero_units import KeptUnits
from sparse_lightning.errors import PretrainedConfigWarning

HIDDEN = ("intermediate_size", "hidden_dim", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim")
"""The entries of configurations that are numbers of neurons."""

_BY_KIND = {
    "(heads)": (*QUERY_HEADS, *KEY_HEADS),
    "(q heads of each group)": QUERY_HEADS,
    "(head dimensions)": HEAD_SIZES,
    "(units)": HIDDEN,
}
"""The entries that are proportional to the number of units of a family, by the end of its name."""


def adapt_config(small: nn.Module, units: Mapping[str, KeptUnits]) -> bool:
    """Give the configuration of a compacted model its sizes, so that `from_pretrained` loads what it saves.

    A configuration has one size for all layers. It stays as it is if layers have different ones, or if the class builds
    a model of other shapes from it.

    Args:
        small: the compacted model, with its own configuration.
        units: what is left of each family.

    Returns:
        Whether the configuration describes the model now; False for models that are not of Hugging Face.
    """
    config = getattr(small, "config", None)
    if not hasattr(small, "save_pretrained") or not hasattr(config, "to_dict"):
        return False
    wanted = copy.deepcopy(config)
    for name, size in _sizes(config, units).items():
        setattr(wanted, name, size)
    if not _describes(wanted, small):
        return False
    for name in _sizes(config, units):
        setattr(config, name, getattr(wanted, name))
    return True


def warn_of_config(small: nn.Module) -> None:
    """Warn if a compacted model of Hugging Face has a configuration from which its class builds other shapes."""
    config = getattr(small, "config", None)
    if hasattr(small, "save_pretrained") and hasattr(config, "to_dict") and not _describes(config, small):
        warnings.warn(
            f"the config of {type(small).__name__} cannot hold the sizes of the compacted model: save it with "
            "sparse_lightning.export.Compact, since from_pretrained does not load what save_pretrained writes",
            PretrainedConfigWarning,
            stacklevel=3,
        )


def _sizes(config: Any, units: Mapping[str, KeptUnits]) -> dict[str, int]:
    """Return the new entries, for kinds of units of which every layer keeps the same fraction."""
    found: dict[str, int] = {}
    for kind, names in _BY_KIND.items():
        fractions = {(len(left.kept), left.total) for name, left in units.items() if _kind(name) == kind}
        if len(fractions) == 1:
            [(kept, total)] = fractions
            for name in names:
                unset = total if name == "n_inner" and hasattr(config, name) else None  # four times the width
                value = found.get(name, vars(config).get(name)) or unset
                if type(value) is int and value % total == 0:
                    found[name] = value // total * kept
    if any(name in found for name in QUERY_HEADS):  # it is computed from the number of heads otherwise
        found |= {name: found.get(name, size) for name, size in _head_size(config).items()}
    return found


def _head_size(config: Any) -> dict[str, int]:
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if type(heads) is not int or type(width) is not int or not hasattr(config, "head_dim"):
        return {}
    return {"head_dim": config.head_dim or width // heads}


def _kind(family: str) -> str:
    return family[family.rfind("(") :].split(" #")[0]


def _describes(config: Any, model: nn.Module) -> bool:
    """Whether the class of a model builds the shapes of its parameters from a configuration."""
    try:
        with torch.device("meta"):
            built = type(model)(config)
    except (ValueError, RuntimeError, TypeError, AssertionError, ZeroDivisionError):  # sizes that do not divide
        return False
    return _shapes(built.named_parameters()) == _shapes(model.named_parameters())


def _shapes(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named}
