"""A function that torch.compile does not trace. The decorator loads `torch._dynamo`, which takes seconds."""

from __future__ import annotations

import inspect

import torch

_REASON = (
    "Layout and View consist of integers, which a traced graph does not have: use views outside of a function that "
    "torch.compile(fullgraph=True) or a strict torch.export traces, or compile it without fullgraph"
)
_KNOWS_REASONS = "reason" in inspect.signature(torch.compiler.disable).parameters  # not in torch 2.6


@torch.compiler.disable(**({"reason": _REASON} if _KNOWS_REASONS else {}))  # type: ignore[no-untyped-call, untyped-decorator]
def layouts_are_not_traced() -> None:
    """Break the graph that torch.compile traces; with `fullgraph=True` it raises an error with the reason."""
