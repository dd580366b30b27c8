"""Question 2: how good is the model? Accuracy at the same sparsity, steps and seeds."""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure
from page import Plot, Table
from peer import Peer
from plan import Plan
from tasks import Task

SPARSITIES = {"1×1": (0.9, 0.95, 0.98), "4×4": (0.8, 0.9, 0.95), "8×8": (0.8, 0.9, 0.95), "units": (0.5, 0.75, 0.9)}
SHORT = {"1×1": (0.95,), "4×4": (0.95,), "2:4": (0.5,), "units": (0.75,)}
FULL = {**SPARSITIES, "2:4": (0.5,)}
ENCODER = {"32×32": (0.75,), "2:4": (0.5,)}


def answer(
    kinds: list[type[Peer]], task: Task, plans: dict[str, tuple[float, ...]], steps: int, seeds: int
) -> tuple[list[Table], list[Plot]]:
    """A table and, of several sparsities, a plot for each pattern."""
    dense = [task.accuracy(Peer, Plan("1×1", 0.0, steps), seed) for seed in range(seeds)]
    tables, plots = [], []
    for pattern, sparsities in plans.items():
        found = {
            kind.name: {s: values(task, kind, Plan(pattern, s, steps), seeds) for s in sparsities}
            for kind in kinds
            if kind.can(pattern) and kind is not Peer
        }
        rows = [["dense", "0", *summary(dense)]]
        rows += [[name, f"{s:.0%}", *summary(of)] for name, by in found.items() for s, of in by.items()]
        title = f"{pattern}, {task.name}: {steps} steps, {seeds} seeds"
        tables.append(Table(title, ["library", "sparsity", "accuracy, %", "spread"], rows))
        print(tables[-1].markdown(), flush=True)
        if len(sparsities) > 1:
            file = f"quality_{pattern.replace('×', 'x')}"
            plots.append(Plot(file, title, drawn(found, dense, title)))
    return tables, plots


def values(task: Task, kind: type[Peer], plan: Plan, seeds: int) -> list[float]:
    """The accuracy of each seed."""
    return [task.accuracy(kind, plan, seed) for seed in range(seeds)]


def summary(found: list[float]) -> list[str]:
    """The mean, and the highest minus the lowest."""
    return [f"{statistics.mean(found):.1f}", f"{max(found) - min(found):.1f}"]


def drawn(found: dict[str, dict[float, list[float]]], dense: list[float], title: str) -> Figure:
    """Accuracy over sparsity, with the range of the seeds."""
    figure = Figure(figsize=(6.4, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="sparsity", ylabel="accuracy, %")
    axes.title.set_size(8)
    for name, by in found.items():
        means = [statistics.mean(of) for of in by.values()]
        low = [mean - min(of) for mean, of in zip(means, by.values(), strict=True)]
        high = [max(of) - mean for mean, of in zip(means, by.values(), strict=True)]
        axes.errorbar(list(by), means, [low, high], marker="o", capsize=3, label=name)
    axes.axhline(statistics.mean(dense), color="grey", linestyle="--", label="dense")
    axes.legend(fontsize=7)
    return figure
