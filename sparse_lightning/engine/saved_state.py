"""What a saved state must have before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_lightning.errors import CheckpointError
from sparse_lightning.methods import Method

REQUIRED = ("masks", "memory", "step", "owed", "last_update", "scorer", "growth")
"""The entries that the states of all versions have."""


def check_state(state: Mapping[str, Any], method: Method) -> None:
    """Raise a CheckpointError unless a state is one of a Sparsifier, with a memory that its method can read.

    What one method remembers of a block, such as the fraction that `Soft` has left of it, means something else to
    another: `Proximal` would subtract it. States of 0.1.0 do not say which method has saved them.

    Args:
        state: to be loaded.
        method: what would read it.
    """
    missing = [key for key in REQUIRED if key not in state]
    if missing:
        raise CheckpointError(
            f"the state of the Sparsifier has no {', '.join(missing)}, but {_few(list(state))}: pass what "
            "Sparsifier.state_dict() returned, not a whole checkpoint or the state of the model"
        )
    name = type(method).__name__
    saved = state.get("method", name)
    remembers = type(method).remember is not Method.remember
    if state["memory"] and saved != name and remembers:
        raise CheckpointError(
            f"the checkpoint was saved with the method {saved}, and {name} cannot read what that remembers of the "
            f"blocks: resume with {saved}; or load its model only, and start a new run with masks='from weights'"
        )


def _few(keys: list[Any]) -> str:
    shown = ", ".join(str(key) for key in keys[:3]) or "nothing"
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
