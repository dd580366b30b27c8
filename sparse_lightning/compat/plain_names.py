"""Names of parameters and modules without what torch.compile, PEFT, activation checkpointing, FSDP and Fabric add."""

from __future__ import annotations

import re

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))"
    r"(?:_orig_mod|base_layer|base_model\.model|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module"
    r"|modules_to_save\.[^.]+)"
    r"(?:\.|$)"
)
_ADAPTER = re.compile(r"(?:^|\.)lora_")


def plain_name(name: str) -> str:
    """Remove the prefixes that torch.compile, PEFT, activation checkpointing, FSDP and Fabric add to a name.

    Example:
        >>> plain_name("_orig_mod.layers.0.up.base_layer.weight")
        'layers.0.up.weight'
    """
    shorter = _WRAPPERS.sub("", name).rstrip(".")
    return shorter if shorter == name else plain_name(shorter)


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is one that LoRA adds to a model.

    Example:
        >>> is_of_adapter("layers.0.up.lora_A.default.weight"), is_of_adapter("layers.0.up.base_layer.weight")
        (True, False)
    """
    return _ADAPTER.search(name) is not None
