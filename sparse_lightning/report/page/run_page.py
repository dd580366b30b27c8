"""write_page: the page of a run, made of the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_lightning.blocks.table import times
from sparse_lightning.report.page.charts import STEP, Chart, Line, draw
from sparse_lightning.report.page.document import document, listing, note, section
from sparse_lightning.report.page.markup import Markup, element
from sparse_lightning.report.page.mask_grids import draw_grids
from sparse_lightning.report.page.run_files import PAGE, RunFiles
from sparse_lightning.report.page.tables import anything, bar_cell, count_cell, number_cell, table
from sparse_lightning.report.results_table import number_text, shown_metrics

KNOWN = (
    "metric",
    "dense",
    "sparse",
    "target",
    "actual",
    "step",
    "zero",
    "weights",
    "parameters",
    "scopes",
    "families",
    "footprint",
    "history",
)
"""Keys of results.json that have a place on the page; all others are shown as tables."""

Results = dict[str, Any]


def write_page(folder: Path | str) -> Path:
    """Write `report.html`, which needs no other file and no network, from the files that a run has written.

    It shows the results, the curves, the masks, what is left of each scope, family and parameter, everything else in
    `results.json`, such as exports, the files with their sizes, the configuration, and the command.

    Args:
        folder: of the run, with `results.json` and `masks.safetensors`.

    Returns:
        The path of the page.
    """
    files = RunFiles.of(Path(folder))
    path = files.folder / PAGE
    path.write_text(run_page(files), "utf-8", errors="replace")
    return path


def run_page(files: RunFiles) -> str:
    """Return the page of a run."""
    found = files.results
    sections = [
        section("Results", _figures(found), _metrics(found)),
        section("Curves", *curves(found)),
        section("Masks", *_masks(files)),
        section("Scopes", _scopes(found)),
        section("Families", *_families(found)),
        section("Parameters", _parameters(found)),
        section("Sizes and times", _footprint(found)),
        *(section(_title(key), anything(_title(key), value)) for key, value in found.items() if key not in KNOWN),
        section("Files", _sizes(files)),
        section("Configuration", *listing(files.configuration, "config.yaml")),
        section("Command", *listing(files.command)),
    ]
    return document(files.name, _subtitle(found), sections)


def _subtitle(found: Results) -> str:
    text = f"{found['actual']:.1%} of the weights in blocks are pruned after {found['step']:,} steps"
    metric = found.get("metric")
    sparse, dense = (found.get(kind, {}).get(metric) for kind in ("sparse", "dense"))
    if sparse is None:
        return f"{text}."
    beside = "" if dense is None else f", {number_text(dense)} dense"
    return f"{text}; {metric} {number_text(sparse)}{beside}."


def _figures(found: Results) -> Markup:
    """Return the numbers to see first."""
    metric = found.get("metric")
    # Rows of units that cross share weights. The results of earlier versions have rows only.
    weights, zero = (found.get(name, sum(row[name] for row in found["parameters"])) for name in ("weights", "zero"))
    shown = [("target sparsity", number_text(found["target"]), "target")]
    shown += [("actual sparsity", number_text(found["actual"]), "actual")]
    for kind in ("sparse", "dense"):
        if metric and found.get(kind, {}).get(metric) is not None:
            shown.append((f"{metric}, {kind}", number_text(found[kind][metric]), f"{kind}.{metric}"))
    shown += [("weights kept", f"{weights - zero:,} of {weights:,}", ""), ("steps", f"{found['step']:,}", "step")]
    cards = [element("div", element("dt", k), element("dd", v, data_key=key or None)) for k, v, key in shown]
    return element("dl", *cards, class_="figures")


def _metrics(found: Results) -> Markup:
    kinds = [kind for kind in ("dense", "sparse") if found.get(kind)]
    names = shown_metrics({kind: found[kind] for kind in kinds})
    rows = [[name, *(number_cell(found[kind].get(name), f"{kind}.{name}") for kind in kinds)] for name in names]
    return table("Metrics", ["metric", *kinds], rows, numbers=kinds) if rows else Markup()


def curves(found: Results) -> list[Markup]:
    """Return charts of sparsity, of the training loss, and of each metric that was validated more than once."""
    history = found.get("history") or {}
    steps = history.get("steps", [])
    sparsity = [
        Line("actual", steps, history.get("actual", []), 0, "steps"),
        Line("target", steps, history.get("target", []), 1, "dashed"),
    ]
    loss = Line("training loss", history.get("loss_steps", []), history.get("loss", []), 2)
    charts = [Chart("sparsity", STEP, sparsity, is_fraction=True), Chart("training loss", STEP, [loss])]
    for name, recorded in (history.get("metrics") or {}).items():
        dense = found.get("dense", {}).get(name)
        line = Line(name, recorded["steps"], recorded["values"], 3, "points" if len(recorded["steps"]) < 40 else "line")
        charts.append(Chart(name, STEP, [line], level=None if dense is None else ("dense, at the end", dense)))
    return [element("div", *map(draw, charts), class_="charts")] if any(map(draw, charts)) else []


def _masks(files: RunFiles) -> list[Markup]:
    key = element("span", class_="key", aria_hidden="true")
    text = "kept; blank: pruned. Point at a block to read it, choose a mask to enlarge it."
    known = [row["name"] for row in files.results.get("scopes", [])]  # a file of tensors is sorted by name
    order = {name: i for i, name in enumerate(known)}
    names = sorted(files.masks, key=lambda name: order.get(name, len(order)))
    figures = draw_grids({name: files.masks[name] for name in names})
    return [element("p", key, text, class_="note"), *figures] if figures else []


def _scopes(found: Results) -> Markup:
    rows = [
        [row["name"], row["pattern"], f"{row['blocks']:,}", f"{row['kept']:,}", bar_cell(row["kept"] / row["blocks"])]
        for row in found.get("scopes", [])
        if row["blocks"]
    ]
    headings = ["scope", "pattern", "blocks", "kept", "what is left"]
    return table("Scopes: what is left of each", headings, rows, numbers=headings[2:]) if rows else Markup()


def _families(found: Results) -> list[Markup]:
    rows = [
        [
            row["name"],
            count_cell(row["units"], f"families.{i}.units"),
            count_cell(row["left"], f"families.{i}.left"),
            bar_cell(row["left"] / row["units"]),
        ]
        for i, row in enumerate(found.get("families", []))
        if row["units"]
    ]
    if not rows:
        return []
    text = "Units of the traced model that can be removed with all that reads them; export=compact drops zero ones."
    headings = ["family", "units", "left", "what is left"]
    return [note(text), table("Families: what is left of each", headings, rows, numbers=headings[1:])]


def _footprint(found: Results) -> Markup:
    costs = found.get("footprint")
    if not isinstance(costs, dict) or not {"dense", "sparse", "export"} <= set(costs):
        return Markup()
    names = {"parameters": "parameters", "bytes": "bytes if exported", "ms": "ms per forward"}
    rows = [
        [title, *(_cost_cell(costs[kind].get(key), f"footprint.{kind}.{key}") for kind in ("dense", "sparse"))]
        for key, title in names.items()
    ]
    headings = ["", "dense", f"sparse, export={costs['export']}"]
    return table("Sizes and times, dense and sparse", headings, rows, numbers=headings[1:])


def _cost_cell(value: Any, key: str) -> Markup:
    return count_cell(value, key) if isinstance(value, int) else number_cell(value, key)


def _parameters(found: Results) -> Markup:
    rows = [
        [
            row["parameter"],
            times(row["shape"]),
            row["block"],
            number_cell(row["target"], f"parameters.{i}.target"),
            number_cell(row["actual"], f"parameters.{i}.actual"),
            bar_cell(1 - row["actual"]),
        ]
        for i, row in enumerate(found["parameters"])
    ]
    headings = ["parameter", "shape", "block", "target", "actual", "what is left"]
    return table("Parameters: sparsity of each", headings, rows, numbers=headings[3:])


def _sizes(files: RunFiles) -> Markup:
    rows = [[name, f"{size:,}"] for name, size in files.sizes()]
    return table("Files of the run", ["file", "bytes"], rows, numbers=["bytes"]) if rows else Markup()


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()
