"""write_sweep_page: the page of a sweep, which compares its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparse_lightning.report.page.charts import COLOURS, STEP, Chart, Line, draw
from sparse_lightning.report.page.document import document, listing, note, section
from sparse_lightning.report.page.markup import Markup, element
from sparse_lightning.report.page.run_files import PAGE, SWEEP, command_of
from sparse_lightning.report.page.tables import number_cell, table
from sparse_lightning.report.results_table import higher_is_better, number_text
from sparse_lightning.report.runs import SweepRun
from sparse_lightning.report.sweep_figure import lines_of


def write_sweep_page(folder: Path, runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None) -> Path:
    """Write `report.html`: the metric over sparsity, the curves of the runs, and a table that links to their pages.

    Args:
        folder: of the sweep.
        runs: all runs, in the order of the table.
        choices: the keys whose values differ between runs.
        metric: the metric to compare.
    """
    path = folder / PAGE
    path.write_text(sweep_page(folder, runs, choices, metric), "utf-8", errors="replace")
    return path


def sweep_page(folder: Path, runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None) -> str:
    """Return the page of a sweep."""
    failed = sum(run.has_failed for run in runs)
    best = best_run(runs, metric)
    subtitle = f"{len(runs)} runs" + (f", {failed} failed" if failed else "")
    if best is not None:
        subtitle += f"; the best {metric} is {number_text(best.metric('sparse', metric))}, of run {best.name}"
    sections = [
        section("Runs", _table(folder, runs, choices, metric, best), _failures(failed)),
        section("Comparison", *_charts(runs, choices, metric)),
        section("Command", *listing(command_of(folder / SWEEP))),
    ]
    return document(f"Sweep {folder.resolve().name}", f"{subtitle}.", sections)


def best_run(runs: Sequence[SweepRun], metric: str | None) -> SweepRun | None:
    """Return the run with the best metric; None if no run has one."""
    known = {run.name: value for run in runs if (value := run.metric("sparse", metric)) is not None}
    if not known or metric is None:
        return None
    name = (max if higher_is_better(metric) else min)(known, key=lambda name: known[name])
    return next(run for run in runs if run.name == name)


def _failures(failed: int) -> Markup:
    return note(f"{failed} runs failed: see the log in their folder.") if failed else Markup()


def _table(
    folder: Path, runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None, best: SweepRun | None
) -> Markup:
    numbers = ["target", "actual", f"{metric or 'metric'} dense", f"{metric or 'metric'} sparse"]
    rows = []
    for run in runs:
        marks = [element("strong", " best")] if run is best else []
        name = element("span", _link(folder, run), *marks)
        rows.append([name, *(run.choices.get(key, "-") for key in choices), *_cells(run, metric)])
    return table("Runs of the sweep", ["run", *choices, *numbers], rows, numbers)


def _link(folder: Path, run: SweepRun) -> str:
    """Return the name of a run, with a link to its page if it has one."""
    has_page = (folder / run.name / PAGE).is_file()
    return element("a", run.name, href=f"{run.name}/{PAGE}") if has_page else run.name


def _cells(run: SweepRun, metric: str | None) -> list[str]:
    if run.has_failed:
        return ["failed", "", "", ""]
    return [
        number_cell(run.number("target"), f"{run.name}/target"),
        number_cell(run.number("actual"), f"{run.name}/actual"),
        number_cell(run.metric("dense", metric), f"{run.name}/dense.{metric}"),
        number_cell(run.metric("sparse", metric), f"{run.name}/sparse.{metric}"),
    ]


def _charts(runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None) -> list[Markup]:
    lines = [
        Line(label, [x for x, _ in points], [y for _, y in points], i, "points")
        for i, (label, points) in enumerate(lines_of(runs, choices, metric).items())
    ]
    dense = [value for run in runs if (value := run.metric("dense", metric)) is not None]
    level = ("dense", sum(dense) / len(dense)) if dense else None
    over_sparsity = Chart(f"{metric}", "actual sparsity", lines, x_is_fraction=True, level=level)
    shown = [run for run in runs if not run.has_failed][:COLOURS]
    losses = [_loss(run, choices, i) for i, run in enumerate(shown)]
    figures = [draw(over_sparsity), draw(Chart("training loss", STEP, losses))]
    left_out = sum(not run.has_failed for run in runs) - len(shown)
    notes = [note(f"Losses of the first {COLOURS} runs of the table.")] if left_out and figures[1] else []
    return [element("div", *figures, class_="charts"), *notes] if any(figures) else []


def _loss(run: SweepRun, choices: Sequence[str], colour: int) -> Line:
    history = (run.results or {}).get("history") or {}
    values = ", ".join(run.choices.get(key, "default") for key in choices)
    label = f"{run.name}: {values}" if values else run.name
    return Line(label, history.get("loss_steps", []), history.get("loss", []), colour)
