"""Variants: every criterion, budget and method of this package, each in place of the default."""

from __future__ import annotations

from typing import Any

from ours import Ours
from peer import Peer

import sparse_lightning as sl


def variant(name: str, criterion: sl.Criterion | None = None, constant: bool = False, **parts: Any) -> type[Peer]:
    """A library of that name: ours, with other parts."""
    body = {"name": name, "criterion": criterion, "constant": constant, "parts": parts}
    return type(name, (Ours,), body)


CRITERIA = [
    variant("AverageTaylor (default)"),
    *(
        variant(type(criterion).__name__, criterion)
        for criterion in (
            sl.Magnitude(),
            sl.Random(),
            sl.Taylor(),
            sl.ElementwiseTaylor(),
            sl.AdamFisher(),
            sl.Movement(),
            sl.Wanda(),
            sl.Gradient(),
            sl.Fisher(),
            sl.Sensitivity(),
        )
    ),
    variant("EMA(Taylor)", sl.EMA(sl.Taylor())),
]
"""Scores, all with the default method and budget."""

METHODS = [
    variant("Soft", method=sl.Soft()),
    variant("Proximal", method=sl.Proximal()),
    variant("PruneOnce at the first step", constant=True, method=sl.PruneOnce()),
    variant("static random mask", sl.Random(), constant=True, method=sl.PruneOnce()),
    variant("SET", constant=True, method=sl.SET()),
    variant("RigL", constant=True, method=sl.RigL()),
]
BUDGETS = [
    variant("budget ERK", budget=sl.ERK()),
    variant("budget Global", budget=sl.Global()),
    variant("budget LAMP", budget=sl.LAMP()),
]
