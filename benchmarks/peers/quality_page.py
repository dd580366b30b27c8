"""The pages of question 2: accuracy by library and sparsity, and of each part of this package."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from page import Page, Plot, Table
from results import Record

OURS = "sparse_lightning, defaults"
UNITS = {
    "ResNet on Fashion-MNIST": "filters",
    "MiniLM on sections of Debian": "heads and neurons",
}
"""What the units of a task are; neurons in all others."""

TEXT = """# How good the model is

Accuracy on test data in percent at the same sparsity, steps, batches and seeds, as the mean over seeds; the spread
is the highest minus the lowest. All libraries follow our default ramp: cubic, from 10 to 70 % of the run, in about
30 updates. For 2:4 ours is linear, and nvidia-modelopt, which has no ramp, prunes once at 40 %. A library that
cannot prune a pattern is left out of its table. Runs are short, so that many fit: differences count, not levels. The
character GPT takes 1,000 steps, because 200 compare nothing: with 75 % of 8×8 blocks pruned, Random is as good as the
dense model then (37.7 and 37.5 %, three seeds), Magnitude has 37.4 and our defaults have 36.1 %."""

PARTS_TEXT = """# How good each criterion, method and budget is

Each row changes one part of our defaults. Tasks, schedules and the spread are those of [quality](quality.md). RigL,
SET and masks that are chosen at the first step train at the final sparsity from the first step on."""


@dataclass(frozen=True)
class Found:
    """The accuracies of one library at one sparsity, one for each seed."""

    values: list[float]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.values)

    @property
    def spread(self) -> float:
        """The highest minus the lowest."""
        return max(self.values) - min(self.values)

    def cells(self) -> list[str]:
        """Mean, spread and number of seeds, as cells of a table."""
        return [f"{self.mean:.1f}", f"{self.spread:.1f}" if len(self.values) > 1 else "–", str(len(self.values))]


Key = tuple[str, str, float, str]
"""Task, pattern, sparsity and library."""


def grouped(records: Iterable[Record]) -> dict[Key, Found]:
    """The accuracies of all seeds together."""
    values: dict[Key, list[float]] = {}
    for record in records:
        case = record.case
        key = (case["task"], case["pattern"], case["sparsity"], case["library"])
        values.setdefault(key, []).append(record.values["accuracy"])
    return {key: Found(found) for key, found in values.items()}


def title_of(task: str, pattern: str) -> str:
    """What is pruned in a task."""
    return f"{UNITS.get(task, 'neurons') if pattern == 'units' else pattern}, {task}"


def quality_page(records: list[Record], facts: list[str]) -> Page:
    """Tables and plots by task and pattern."""
    found = grouped(records)
    tables, plots = [], []
    for task, pattern in dict.fromkeys((t, p) for t, p, s, _ in found if s):
        dense = found.get((task, "1×1", 0.0, "dense"))
        here = {(s, lib): f for (t, p, s, lib), f in found.items() if (t, p) == (task, pattern) and s}
        rows = [["dense", "0 %", *dense.cells()]] if dense else []
        rows += [[lib, f"{s:.0%}".replace("%", " %"), *f.cells()] for (s, lib), f in sorted(here.items(), key=order)]
        steps = next(r.case["steps"] for r in records if r.case["task"] == task)
        title = title_of(task, pattern)
        tables.append(Table(f"{title}, {steps} steps", ["library", "sparsity", "accuracy", "spread", "seeds"], rows))
        if len({s for s, _ in here}) > 1:
            plots.append(drawn(title, here, dense))
    return Page("quality", TEXT, facts, tables, plots)


def order(item: tuple[tuple[float, str], Found]) -> tuple[float, float]:
    """By sparsity, then the best first."""
    (sparsity, _), found = item
    return sparsity, -found.mean


def drawn(title: str, here: dict[tuple[float, str], Found], dense: Found | None) -> Plot:
    """Accuracy over sparsity, with the lowest and the highest seed."""
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for (sparsity, library), found in here.items():
        point = (100 * sparsity, found.mean, min(found.values), max(found.values))
        lines.setdefault(library, []).append(point)
    seeds = {len(found.values) for found in here.values()}
    shown = f"{title} ({'–'.join(map(str, sorted({min(seeds), max(seeds)})))} seeds)".replace("(1 seeds)", "(1 seed)")
    file = "quality_" + "_".join(title.replace("×", "x").replace(",", "").lower().split())
    return Plot(file, shown, "sparsity, %", "accuracy, %", lines, None if dense is None else (dense.mean, "dense"))


def with_common_seeds(records: list[Record]) -> list[Record]:
    """Leave out what was measured with seeds that not all libraries have yet, at a task, pattern and sparsity."""
    seeds: dict[tuple[str, str, float], dict[str, set[int]]] = {}
    for record in records:
        case = record.case
        by_library = seeds.setdefault((case["task"], case["pattern"], case["sparsity"]), {})
        by_library.setdefault(case["library"], set()).add(case["seed"])
    common = {place: set.intersection(*by_library.values()) for place, by_library in seeds.items()}
    return [r for r in records if r.case["seed"] in common[r.case["task"], r.case["pattern"], r.case["sparsity"]]]


def verdicts(records: list[Record]) -> Table:
    """Our defaults beside the best of the other libraries at equal seeds, for each task, pattern and sparsity."""
    found = grouped(with_common_seeds(records))
    rows = []
    for task, pattern, sparsity in dict.fromkeys((t, p, s) for t, p, s, _ in found if s):
        here = {lib: f for (t, p, s, lib), f in found.items() if (t, p, s) == (task, pattern, sparsity)}
        others = {lib: f for lib, f in here.items() if "sparse_lightning" not in lib}
        if OURS not in here or not others:
            continue
        ours, best = here[OURS], max(others, key=lambda lib: others[lib].mean)
        dense = found.get((task, "1×1", 0.0, "dense"))
        rows.append([
            title_of(task, pattern),
            f"{sparsity:.0%}".replace("%", " %"),
            f"{dense.mean:.1f}" if dense else "–",
            f"{ours.mean:.1f}",
            f"{others[best].mean:.1f} ({best})",
            verdict(ours, others[best]),
            str(len(ours.values)),
        ])  # fmt: skip
    headings = ["pattern, task", "sparsity", "dense", "our defaults", "best other library", "difference", "seeds"]
    return Table("Accuracy: our defaults beside the best other library", headings, rows)


def verdict(ours: Found, other: Found) -> str:
    """The difference, and whether it is larger than the spread."""
    difference, spread = ours.mean - other.mean, max(ours.spread, other.spread)
    if min(len(ours.values), len(other.values)) < 2:
        return f"{difference:+.1f}, one seed only"
    if abs(difference) <= spread:
        return f"{difference:+.1f}, within the spread of {spread:.1f}"
    return f"{difference:+.1f}, {'**ahead**' if difference > 0 else '**behind**'}"


def parts_page(records: list[Record], facts: list[str]) -> Page:
    """A table for each task."""
    found = grouped(records)
    tables = []
    for task, pattern, sparsity in dict.fromkeys((t, p, s) for t, p, s, _ in found):
        here = {lib: f for (t, p, s, lib), f in found.items() if (t, p, s) == (task, pattern, sparsity)}
        rows = [[lib, *f.cells()] for lib, f in sorted(here.items(), key=lambda item: -item[1].mean)]
        title = f"{title_of(task, pattern)} at {sparsity:.0%}".replace("%", " %")
        tables.append(Table(title, ["part", "accuracy", "spread", "seeds"], rows))
    return Page("parts", PARTS_TEXT, facts, tables, [])
