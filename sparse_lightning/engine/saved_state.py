"""What a saved state must have before anything of it is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.errors import CheckpointError, InputsWarning
from sparse_lightning.methods import Method

REQUIRED = ("masks", "memory", "step", "owed", "last_update", "scorer", "growth")
"""The entries that the states of all versions have."""


EACH = "*"
"""Stands for all names in a form."""

_MASK = {"shape": (list, tuple), "bits": torch.uint8}
_SCORER = {"runs": int, "entries?": {EACH: int}, "fields": {EACH: {EACH: Tensor}}}
FORM: Mapping[str, Any] = {
    "criterion": str,
    "method": str,
    "step": int,
    "owed": bool,
    "observed": int,
    "grown": {EACH: _MASK},
    "last_update": {"step": int, "target": (int, float), "churn": (int, float)},
    "masks": {EACH: _MASK},
    "removed": {EACH: _MASK},
    "memory": {EACH: Tensor},
    "scorer": _SCORER,
    "growth": (None, _SCORER),
    "input_norms": {EACH: Tensor},
    "gram_matrices": {EACH: Tensor},
    "inputs_ended": bool,
}
"""What each entry is, where a state has it: a type, the dtype of a tensor, a mapping of forms, or alternatives.

States of earlier versions may lack a key with a question mark; a state may have keys beyond these.
"""


def check_form(state: Any) -> None:
    """Raise a CheckpointError if an entry of a state is of another kind than `state_dict` returns.

    Example:
        >>> check_form({"step": "ten"})
        Traceback (most recent call last):
        sparse_lightning.errors.CheckpointError: the state of the Sparsifier has a str as step, not int: it is ...
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a {type(state).__name__} is not the state of a Sparsifier: pass what Sparsifier.state_dict() returned"
        )
    for key, form in FORM.items():
        found = _misfit(state[key], form, key) if key in state else None
        if found is not None:
            raise CheckpointError(
                f"the state of the Sparsifier {found}: it is damaged, or not what Sparsifier.state_dict() returned. "
                "Load another checkpoint"
            )


def _misfit(value: Any, form: Any, place: str) -> str | None:
    """Return how a value differs from its form; None if it does not."""
    if isinstance(form, tuple):
        found = [_misfit(value, each, place) for each in form]
        return None if None in found else found[-1]
    if isinstance(form, Mapping):
        return _misfit_of_mapping(value, form, place)
    if isinstance(form, torch.dtype):
        fits, wanted = isinstance(value, Tensor) and value.dtype == form, f"a tensor of {form}"
    elif form is None:
        fits, wanted = value is None, "None"
    else:
        fits, wanted = isinstance(value, form) and (form is bool or not isinstance(value, bool)), form.__name__
    return None if fits else f"has a {type(value).__name__} as {place}, not {wanted}"


def _misfit_of_mapping(value: Any, form: Mapping[str, Any], place: str) -> str | None:
    if not isinstance(value, Mapping):
        return f"has a {type(value).__name__} as {place}, not a mapping"
    named = {key.removesuffix("?"): inner for key, inner in form.items() if key.removesuffix("?") in {*value, key}}
    forms = dict.fromkeys(value, form[EACH]) if EACH in form else named
    if set(forms) - set(value) or not all(isinstance(key, str) for key in value):
        return f"has {_few(list(value))} in {place}, not {_few(list(forms))}"
    return next((f for key in forms if (f := _misfit(value[key], forms[key], f"{place}.{key}")) is not None), None)


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


def warn_of_inputs(state: Mapping[str, Any]) -> None:
    """Warn if a state has observed inputs of layers, which are of other sizes in the model that it is loaded into."""
    if state.get("input_norms") or state.get("gram_matrices"):
        warnings.warn(
            "the checkpoint was saved with other units removed than are removed now: what it has observed of the "
            "inputs of layers since its last update is forgotten, so the next update may choose other blocks than that "
            "of a run which was not stopped. Resume with the shrink that it was saved with for the same ones",
            InputsWarning,
            stacklevel=2,
        )
