"""The pages of questions 1, 3 and 4: costs, the speed of exported models, and growth."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from cost import PATTERNS
from growth import exponent
from page import Page, Plot, Table
from results import Record

TEXT = """# What training costs

A stack of linear layers, trained with AdamW on random inputs. All times are relative to a dense step of the same
run, interleaved. **Step** is a step while masks are held; **observed** is one at which the criterion of our defaults
also observes the gradients, as at the nine steps before an update, but not for 2:4; **update** is what an update adds
to a step, in dense steps; **run** is a step of a whole run of 1,000 with 30 updates, on average; **peak** is the
peak memory of a process over that of a dense one; **checkpoint** is the size of all that is needed to resume over that
of a dense run, after the last update, and in brackets before it where that differs. Sparsity is 75 %, and 50 % for 2:4
and units. Units are removed while the model trains by ours with `shrink` and by Torch-Pruning: their step is that of
the smallest model. Ours without it calls `compact` after the last update, at 70 % of a run, and trains the smaller
model from there on: its step is in brackets, and the call is part of **run**. The update of those that make models
smaller, and of Lightning and nvidia-modelopt, is the first one. Checkpoints with `shrink` are those of the whole model,
which load into it.

Runs of ours, of the loop by hand and of Torch-Pruning in 10 and 100 tensors of up to 10 M weights are timed as a whole:
all libraries of a table make each of the 1,000 steps in turn, beside the dense model. Other columns are of one library
and the dense model in a process, where the dense step itself takes up to half more in one than in another: compare
libraries by **run**. All other runs are added up from the other columns: those of Torch-Pruning and of `shrink` as if
all steps were the last ones, and those of our defaults in 2:4 without the inputs of layers that they observe before
updates.

Torch-Pruning makes new parameters when it removes units. The moments of the optimizer are cut by hand as the weights
are, so that it trains on as ours does; a row beside it drops them, which is cheaper, and another training."""

GROWTH_TEXT = """# How the cost grows

The time of a hold, which runs at every step, and of an update by `Magnitude`, at 75 % sparsity, beside a copy of
all weights in the same run: the memory speed of the machine. A hold writes zeros only, so it can be faster than a
copy. The last row is the exponent of a power law through the rows: 1 is linear."""

SPEED_TEXT = """# How fast the result is

Models that are pruned by units, then made smaller: ours by `compact`, Torch-Pruning's as it leaves them. Time of a
forward pass over that of the dense model, interleaved in one process, for one input and for 64, beside the accuracy
that is left."""


def cost_page(records: list[Record], memory: list[Record], facts: list[str]) -> Page:
    """A table for each size and pattern."""
    peaks = {key_of(record, record.case["library"]): record.values["bytes"] for record in memory}
    tables = []
    cases = dict.fromkeys(tuple(key_of(r, "")[:3]) for r in records)
    for pattern, weights, tensors in sorted(cases, key=lambda case: (case[1], case[2], PATTERNS.index(case[0]))):
        here = [r for r in records if tuple(key_of(r, "")[:3]) == (pattern, weights, tensors)]
        headings = ["library", "step", "observed", "update", "run", "peak, MB", "checkpoint"]
        title = f"{pattern}, {weights / 1e6:g} M weights in {tensors} tensors"
        tables.append(Table(title, headings, [cost_row(record, peaks) for record in sorted(here, key=order)]))
    return Page("cost", TEXT, facts, tables, [])


def with_runs(records: list[Record], runs: list[Record]) -> list[Record]:
    """The records of costs, with the cost of a run where it was timed as a whole."""
    timed = {key_of(run, library): ratio for run in runs for library, ratio in run.values.items()}
    return [
        replace(record, values={**record.values, "run": timed[key]}) if key in timed else record
        for record in records
        for key in [key_of(record, record.case["library"])]
    ]


def key_of(record: Record, library: str) -> tuple[str, int, int, str]:
    """Pattern, weights, tensors and library."""
    return record.case["pattern"], record.case["weights"], record.case["tensors"], library


def order(record: Record) -> tuple[bool, str]:
    """Ours first."""
    return "sparse_light" not in record.case["library"], record.case["library"]


def cost_row(record: Record, peaks: dict[tuple[str, int, int, str], int]) -> list[str]:
    """The figures of one library."""
    values, name = record.values, record.case["library"]
    own, dense = peaks.get(key_of(record, name)), peaks.get(key_of(record, "dense"))
    saved = f"{values['checkpoint held']:.3f}"
    ramp = values.get("checkpoint between")
    if ramp is not None and abs(ramp - values["checkpoint held"]) > 5e-4:
        saved += f" ({ramp:.3f})"
    return [
        name,
        f"{values['step held']:.2f}" + (f" ({values['step small']:.2f})" if "step small" in values else ""),
        f"{values['step between']:.2f}" if "step between" in values and record.case["pattern"] != "2:4" else "–",
        f"{values['update']:.2f}",
        f"{whole_run(values):.2f}",
        "–" if own is None or dense is None else f"{(own - dense) / 1e6:.0f}",
        saved,
    ]


FORGETTING = "Torch-Pruning, moments dropped"

OBSERVED, UPDATES, STEPS, AFTER = 9, 30, 1000, 300
"""Of a run: steps that are observed before each update, updates, all steps, and those after the last update."""


def whole_run(values: dict[str, float]) -> float:
    """The cost of a step of a whole run, on average: as it was timed, or added up."""
    if "run" in values:
        return values["run"]
    held = values["step held"]
    observed = OBSERVED * (values.get("step between", held) - held)
    removed = AFTER * (values["step small"] - held) + values["removal"] if "step small" in values else 0.0
    return held + (UPDATES * (observed + values["update"]) + removed) / STEPS


def dearer(records: list[Record]) -> Table:
    """Where ours costs more than the cheapest other library: by 3 % of a step, or an update by a tenth of one.

    Steps and updates are those of `Magnitude`, the job that the others do; whole runs those of our defaults, too. Steps
    are compared where no whole runs were timed in turn. Of ours without `shrink` and with it, the cheaper one counts.
    What forgets moments of the optimizer does another job.
    """
    figures: list[tuple[str, str, Callable[[dict[str, float]], float], float]] = [
        ("Magnitude", "step", lambda values: values.get("step small", values["step held"]), 0.03),
        ("Magnitude", "update", lambda values: values["update"], 0.1),
        ("Magnitude", "whole run", whole_run, 0.03),
        ("defaults", "whole run", whole_run, 0.03),
    ]
    rows = []
    for case in sorted({key_of(r, "")[:3] for r in records}, key=lambda c: (c[1], c[2], PATTERNS.index(c[0]))):
        here = {r.case["library"]: r.values for r in records if key_of(r, "")[:3] == case}
        others = {name: values for name, values in here.items() if "sparse_light" not in name and name != FORGETTING}
        for criterion, title, figure, margin in figures if others else ():
            if title == "step" and any("run" in values for values in others.values()):
                continue
            costs = {name: figure(values) for name, values in others.items()}
            best = min(costs, key=lambda name: costs[name])
            ours = {name: figure(here[full]) for name, full in _names(criterion) if full in here}
            own = min(ours, key=lambda name: ours[name], default=None)
            if own is not None and ours[own] > costs[best] + margin:
                where = f"{case[0]}, {case[1] / 1e6:g} M weights in {case[2]} tensors"
                rows.append([where, title, f"{ours[own]:.2f} ({own})", f"{costs[best]:.2f} ({best})"])
    headings = ["pattern, model", "what", "ours, dense steps", "cheapest other library"]
    return Table("Where ours costs more", headings, rows)


def _names(criterion: str) -> list[tuple[str, str]]:
    """What ours with a criterion is called, without `shrink` and with it."""
    return [(name, f"sparse_lightning, {name}") for name in (criterion, f"{criterion}, shrink")]


def growth_page(records: list[Record], facts: list[str]) -> Page:
    """A table and a plot for each number that grows."""
    tables, plots = [], []
    for grows in dict.fromkeys(record.case["grows"] for record in records):
        here = {count(r): r.values for r in records if r.case["grows"] == grows}
        rows = [[f"{n:,}", *growth_cells(values)] for n, values in sorted(here.items())]
        fitted = [f"{exponent(list(here), [v[name] for v in here.values()]):.2f}" for name in ("hold", "update")]
        headings = [grows, "hold, ms", "update, ms", "hold / copy", "update / copy"]
        tables.append(Table(f"Growth with {grows}", headings, [*rows, ["exponent", *fitted, "", ""]]))
        lines = {n: [(float(x), v[n], v[n], v[n]) for x, v in here.items()] for n in ("hold", "update", "copy")}
        plots.append(Plot(f"growth_{grows}", f"Growth with {grows}", grows, "time, ms", lines, logarithmic=True))
    return Page("growth", GROWTH_TEXT, facts, tables, plots)


def growth_cells(values: dict[str, float]) -> list[str]:
    """Milliseconds, and times relative to a copy."""
    hold, update, copy = (values[name] for name in ("hold", "update", "copy"))
    return [f"{hold:.3f}", f"{update:.2f}", f"{hold / copy:.2f}", f"{update / copy:.1f}"]


def count(record: Record) -> int:
    """The number that grows in the series of a record."""
    case = record.case
    return {"weights": case["weights"], "tensors": case["tensors"], "blocks": case["weights"] // case["side"] ** 2}[
        case["grows"]
    ]


def speed_page(records: list[Record], facts: list[str]) -> Page:
    """A table and a plot for each task."""
    tables, plots = [], []
    for task in dict.fromkeys(record.case["task"] for record in records):
        here: dict[tuple[float, str], list[dict[str, float]]] = {}
        for record in (r for r in records if r.case["task"] == task):
            here.setdefault((record.case["sparsity"], record.case["library"]), []).append(record.values)
        dense = statistics.mean(v["dense accuracy"] for found in here.values() for v in found)
        rows = [["dense", "0 %", f"{dense:.1f}", "1.00", "1.00", "1.00", "–"]]
        rows += [
            [library, f"{sparsity:.0%}".replace("%", " %"), *speed_cells(found)]
            for (sparsity, library), found in sorted(here.items())
        ]
        headings = ["library", "units removed", "accuracy", "time, 1 input", "time, 64 inputs", "parameters", "seeds"]
        tables.append(Table(task, headings, rows))
        lines: dict[str, list[tuple[float, float, float, float]]] = {}
        for (_, library), found in here.items():
            accuracies = [v["accuracy"] for v in found]
            time = statistics.median(v["time, many"] for v in found)
            point = (time, statistics.mean(accuracies), min(accuracies), max(accuracies))
            lines.setdefault(library, []).append(point)
        file = "speed_" + task.lower().split()[0]
        seeds = max(len(found) for found in here.values())
        title = f"{task} ({seeds} {'seed' if seeds == 1 else 'seeds'})"
        plots.append(Plot(file, title, "time of 64 inputs / dense", "accuracy, %", lines, (dense, "dense")))
    return Page("speed", SPEED_TEXT, facts, tables, plots)


def speed_cells(found: list[dict[str, float]]) -> list[str]:
    """Means of accuracy, medians of times."""
    times = [statistics.median(v[name] for v in found) for name in ("time, one", "time, many", "parameters")]
    return [f"{statistics.mean(v['accuracy'] for v in found):.1f}", *(f"{t:.2f}" for t in times), str(len(found))]
