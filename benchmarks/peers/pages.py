"""Make docs/results/ from the file of measurements: pages, tables and plots, in seconds.

    make bench-pages

It measures nothing. Pages say how many seeds a figure has, and on which commits and machine it was measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cost_page import cost_page, dearer, growth_page, speed_page, with_runs
from page import Page, Table
from quality_page import parts_page, quality_page, verdicts
from results import Results

FILE = Path("docs/results/measurements.jsonl")
QUESTIONS = {
    "quality": "How good the model is: accuracy at the same sparsity, steps and seeds",
    "parts": "How good each criterion, method and budget is",
    "cost": "What training costs: the time of a step and of an update, memory, checkpoints",
    "speed": "How fast the result is: accuracy over measured time",
    "growth": "How the cost grows: against weights, tensors and blocks",
}
MLP, RESNET = "MLP on Fashion-MNIST", "ResNet on Fashion-MNIST"
SHOWN = {
    (f"1×1, {MLP}", "95 %"),
    (f"4×4, {MLP}", "95 %"),
    (f"8×8, {MLP}", "95 %"),
    (f"2:4, {MLP}", "50 %"),
    (f"neurons, {MLP}", "75 %"),
    (f"neurons, {MLP}", "90 %"),
    (f"1×1, {RESNET}", "90 %"),
    (f"filters, {RESNET}", "75 %"),
}
"""The rows that the README of the repository shows."""
PLOT = "quality_4x4_mlp_on_fashion-mnist"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

SEEDS = 5
"""Of a complete comparison of accuracies."""

TEXT = """# Measured beside other libraries

Written by `make bench-pages` from [measurements.jsonl](measurements.jsonl), to which `make bench-peers` appends
each measurement when it is finished. Every library runs in the same loop, and the sparsity of each model is counted
before it is reported."""


def main() -> None:
    """Write all pages for which there are measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FILE)
    parser.add_argument("--output", type=Path, help="the folder of the pages; default: that of the measurements")
    parser.add_argument("--readme", type=Path, help="a file in which the text between two comments is replaced")
    chosen = parser.parse_args()
    folder = chosen.output or chosen.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(chosen.results)
    for page in pages(results):
        page.write(folder)
    if chosen.readme is not None:
        chosen.readme.write_text(with_block(chosen.readme.read_text("utf-8"), block(results)), "utf-8")


def block(results: Results) -> str:
    """The table and the plot that the README of the repository shows."""
    whole = verdicts(results.of("quality"))
    rows = [row for row in whole.rows if (row[0], row[1]) in SHOWN]
    plot = f"![Accuracy over sparsity beside other libraries](docs/results/{PLOT}.svg)"
    table = Table(whole.title, whole.headings, rows).markdown().partition("\n\n")[2]
    return f"{BEGIN}\n\n{plot}\n\n{table}\n{END}"


def with_block(text: str, made: str) -> str:
    """Replace what is between the two comments."""
    before, _, rest = text.partition(BEGIN)
    return before + made + rest.partition(END)[2]


def pages(results: Results) -> list[Page]:
    """All pages, the index first."""
    made = []
    for question in QUESTIONS:
        records = results.of(question)
        if not records:
            continue
        facts = facts_of(results, question)
        if question == "cost":
            made.append(cost_page(with_runs(records, results.of("runs")), results.of("memory"), facts))
        else:
            make = {"quality": quality_page, "parts": parts_page, "speed": speed_page, "growth": growth_page}[question]
            made.append(make(records, facts))
    return [index(results, made), *made]


def index(results: Results, made: list[Page]) -> Page:
    """The page that links the others, with the comparison of all accuracies."""
    links = [f"[{QUESTIONS[page.name]}]({page.name}.md)" for page in made]
    absent = [f"Not measured: {text}." for name, text in QUESTIONS.items() if name not in [p.name for p in made]]
    tables: list[Table] = [verdicts(results.of("quality"))] if results.of("quality") else []
    if results.of("cost"):
        tables.append(dearer(with_runs(results.of("cost"), results.of("runs"))))
    return Page("README", TEXT, [*links, *absent], tables, [])


def facts_of(results: Results, question: str) -> list[str]:
    """What the figures of a question depend on."""
    records = [*results.of(question), *(results.of("runs") if question == "cost" else [])]
    dates = sorted({record.facts["date"] for record in records})
    commits = list(dict.fromkeys(record.facts["commit"] for record in records))
    threads = sorted({record.facts["threads"] for record in records})
    run = results.runs[-1]
    seeds = sorted({record.case["seed"] for record in records if "seed" in record.case})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    used = f"{' and '.join(map(str, threads))} {'thread' if threads == [1] else 'threads'} in use"
    asked = {"parts": "quality", "cost": "cost runs"}.get(question, question)
    data = " --encoder FOLDER --texts FILE" if seeds else ""
    found = [
        f"{len(records)} measurements of {when}, commits {', '.join(commits)}.",
        f"Machine: {run['machine']}, {used}; Python {run['python']}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in run['versions'].items())}.",
        f'Command: `make bench-peers PEERS_ARGS="--questions {asked}{data} --threads {threads[0]}"`.',
        f"Not measured: {'; '.join(f'{name} ({why})' for name, why in run['absent'].items())}.",
    ]
    if seeds and len(seeds) < SEEDS:
        found.append(f"**Incomplete**: {len(seeds)} of {SEEDS} seeds at most; see the column `seeds`.")
    return found + failures(results, question)


def failures(results: Results, question: str) -> list[str]:
    """What libraries could not do, each once."""
    found = {}
    for record in results.failed(question):
        what = record.case.get("task", record.case.get("pattern"))
        found[f"{record.case['library']} on {what}"] = record.values["error"]
    return [f"Failed: {name} ({error})." for name, error in found.items()]


if __name__ == "__main__":
    main()
