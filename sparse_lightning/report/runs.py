"""SweepRun: the overrides and results of one run of a sweep, read from its folder."""

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
class SweepRun:
    """One run of a sweep.

    Args:
        name: its folder, relative to that of the sweep.
        choices: its overrides by key.
        results: the contents of `results.json`; None if the run has failed.
    """

    name: str
    choices: dict[str, str]
    results: dict[str, Any] | None = field(default=None)

    @property
    def has_failed(self) -> bool:
        """Whether the run has no results."""
        return self.results is None

    def number(self, name: str) -> float | None:
        """Return a number of the results: "target" or "actual"."""
        return None if self.results is None else self.results.get(name)

    def metric(self, kind: str, name: str | None) -> float | None:
        """Return a metric of the "dense" or "sparse" model."""
        return None if self.results is None or name is None else self.results.get(kind, {}).get(name)


def runs_in(folder: Path) -> list[SweepRun]:
    """Return the runs below a folder: all folders with Hydra's overrides or with results."""
    found = {path.parent.parent for path in folder.glob(f"**/{OVERRIDES}")}
    found |= {path.parent for path in folder.glob(f"**/{RESULTS}")}
    return [_read(folder, path) for path in sorted(found, key=lambda path: _natural(str(path)))]


def _read(folder: Path, path: Path) -> SweepRun:
    results, overrides = path / RESULTS, path / OVERRIDES
    listed = OmegaConf.to_container(OmegaConf.load(overrides)) if overrides.is_file() else []
    return SweepRun(
        str(path.relative_to(folder)),
        choices_in([str(entry) for entry in listed]) if isinstance(listed, list) else {},
        _read_json(results),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the contents of a file; None if it does not exist, or is incomplete because the run was killed."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def choices_in(overrides: Sequence[str]) -> dict[str, str]:
    """Return Hydra's overrides by key.

    Example:
        >>> choices_in(["criterion=taylor", "+model.width=64", "~logger"])
        {'criterion': 'taylor', 'model.width': '64', '~logger': ''}
    """
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    return {key: value for key, _, value in pairs}


def varied(runs: Sequence[SweepRun]) -> list[str]:
    """Return the keys whose values differ between runs, in the order of their first occurrence."""
    keys = dict.fromkeys(key for run in runs for key in run.choices)
    return [key for key in keys if len({run.choices.get(key) for run in runs}) > 1]


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that puts run 10 after run 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
