"""Runs: the folders of a sweep as data; what was chosen in each, and what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

RESULTS, OVERRIDES = "results.json", Path(".hydra", "overrides.yaml")


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Args:
        name: its folder, seen from that of the sweep.
        choices: the overrides it was started with, by their key.
        results: what `results.json` holds; None where there is none, because the run has failed.
    """

    name: str
    choices: dict[str, str]
    results: dict[str, Any] | None = field(default=None)

    @property
    def has_failed(self) -> bool:
        """Whether the run has not come to its end."""
        return self.results is None

    def number(self, name: str) -> float | None:
        """A number of the results: "target" or "actual"."""
        return None if self.results is None else self.results.get(name)

    def metric(self, kind: str, name: str | None) -> float | None:
        """A metric of the "dense" or "sparse" model."""
        return None if self.results is None or name is None else self.results.get(kind, {}).get(name)


def runs_in(folder: Path) -> list[Run]:
    """The runs below a folder: wherever Hydra has noted overrides, or a run has left its results."""
    found = {path.parent.parent for path in folder.glob(f"**/{OVERRIDES}")}
    found |= {path.parent for path in folder.glob(f"**/{RESULTS}")}
    return [_read(folder, place) for place in sorted(found, key=lambda place: _natural(str(place)))]


def _read(folder: Path, place: Path) -> Run:
    results, overrides = place / RESULTS, place / OVERRIDES
    listed = OmegaConf.to_container(OmegaConf.load(overrides)) if overrides.is_file() else []
    return Run(
        str(place.relative_to(folder)),
        choices_in([str(entry) for entry in listed]) if isinstance(listed, list) else {},
        _read_json(results),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """What a file holds; None where it is not there, or was cut short when its run died."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def choices_in(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides as Hydra writes them, by their key.

    Example:
        >>> choices_in(["criterion=taylor", "+model.width=64", "~logger"])
        {'criterion': 'taylor', 'model.width': '64', '~logger': ''}
    """
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    return {key: value for key, _, value in pairs}


def varied(runs: Sequence[Run]) -> list[str]:
    """The keys that do not have one and the same value in all runs, in the order in which they are first given."""
    keys = dict.fromkeys(key for run in runs for key in run.choices)
    return [key for key in keys if len({run.choices.get(key) for run in runs}) > 1]


def _natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts run 10 behind run 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
