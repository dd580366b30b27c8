"""Measure this package beside the libraries that users would pick instead; add to docs/results/measurements.jsonl.

    make bench-peers                                                all that is not measured yet: hours
    make bench-peers PEERS_ARGS="--questions cost --minutes 2"      one question, for two minutes
    make bench-peers PEERS_ARGS="--questions cost --again"          measured again, as times of another machine
    make bench-pages                                                the pages of docs/results from that file: seconds

Each measurement is appended when it is finished, and a run measures what the file does not have: it can be cut at any
time, and resumed. Every model is checked before it is reported: its sparsity is counted from the weights. Times are
ratios of interleaved rounds in one process; accuracies are means over seeds, and the spread is the highest minus the
lowest.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import catalog
import cost
import growth
import quality
import speed
import tasks
import torch
from peer import Peer
from results import Measurement, Results, facts, machine

QUESTIONS = ("memory", "cost", "runs", "growth", "speed", "quality")
"""Memory first: it is that of forks, which must not be made after threads were started."""
FILE = Path("docs/results/measurements.jsonl")


def main() -> None:
    """Measure what is missing, in the order of the plan."""
    chosen = arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(chosen.threads)
    kinds, missing = catalog.peers()
    results, end = Results(chosen.results), time.monotonic() + 60 * chosen.minutes
    results.start(environment(kinds, missing))
    due = [one for question in QUESTIONS if question in chosen.questions for one in plan(question, kinds, chosen)]
    due = [one for one in due if chosen.only in one.key]
    waiting = due if chosen.again else list(results.missing(due))
    print(f"{len(due)} measurements, {len(waiting)} to make", flush=True)
    for measurement in waiting:
        if time.monotonic() > end:
            print("the minutes are over: the same command measures the rest")
            return
        record = results.add(measurement, facts(chosen.threads))
        print(measurement.question, *record.case.values(), record.values, flush=True)


def plan(question: str, kinds: list[type[Peer]], chosen: argparse.Namespace) -> Iterator[Measurement]:
    """All measurements of a question, those that tell most first."""
    if question == "memory":
        yield from cost.memory(kinds)
    elif question == "cost":
        yield from cost.measurements(kinds)
    elif question == "runs":
        yield from cost.runs(kinds)
    elif question == "growth":
        yield from growth.measurements()
    else:
        trained = [kind for kind in kinds if not kind.costs_only]
        makes = speed.measurements if question == "speed" else quality.measurements
        yield from makes(trained, known_tasks(chosen), chosen.seeds)


def known_tasks(chosen: argparse.Namespace) -> list[tasks.Task]:
    """The tasks whose data are there."""
    found = [tasks.fashion_mlp(chosen.fashion), tasks.fashion_resnet(chosen.fashion)]
    if chosen.encoder is None or chosen.texts is None:
        print("MiniLM: not measured, pass --encoder and --texts")
    else:
        found.append(tasks.encoder(chosen.encoder, chosen.texts))
    return [*found, tasks.characters()]


def environment(kinds: list[type[Peer]], missing: dict[str, str]) -> dict[str, object]:
    """What all measurements of a run depend on."""
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "versions": catalog.versions(kinds),
        "absent": {**catalog.LEFT_OUT, **missing},
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=QUESTIONS)
    parser.add_argument("--only", default="", help="a text in what a measurement is of, such as a task or a library")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no measurement after them")
    parser.add_argument("--again", action="store_true", help="measure also what was measured; the last one counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--fashion", help="the folder of Fashion-MNIST; default: that of Debian's package")
    parser.add_argument("--encoder", help="the folder of a Hugging Face encoder")
    parser.add_argument("--texts", help="a file with a label, a tab and a text in each line")
    parser.add_argument("--results", type=Path, default=FILE, help="the file to add to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
