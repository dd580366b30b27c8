"""Poison: memory that nobody wrote is full of NaN, so that a kernel that forgets an output fails its test."""

from __future__ import annotations

import functools

import pytest
import torch

MAKERS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
    # What torch.compile writes calls this one, by the name that it had when the code was loaded.
    (torch._C._dynamo.guards, "_empty_strided_cpu"),
]


def poisoned(t: torch.Tensor) -> torch.Tensor:
    """The tensor, filled with NaN, with True, or with a large number that no kernel would compute."""
    if t.is_floating_point() or t.is_complex():
        return t.fill_(float("nan"))
    return t.fill_(True) if t.dtype == torch.bool else t.fill_(torch.iinfo(t.dtype).max - 1)


def poison_memory(patch: pytest.MonkeyPatch) -> None:
    """Fill what the makers make from now on, until the patch is undone."""
    # torch notes, once, which functions a device context is for: that must not be these.
    with torch.device("cpu"):
        torch.zeros(())
    for owner, name in MAKERS:
        patch.setattr(owner, name, _poisoning(getattr(owner, name)))


@pytest.fixture
def poison(monkeypatch):
    """Fills what the makers make during one test."""
    poison_memory(monkeypatch)


def _poisoning(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        t = make(*args, **kwargs)
        with torch.no_grad():
            return poisoned(t)

    return made
