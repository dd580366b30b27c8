"""Results: a file of JSON lines, one for each measurement, to which a run adds and from which pages are made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Case = dict[str, Any]
"""What was measured: names and numbers that tell one measurement from another."""


@dataclass(frozen=True)
class Measurement:
    """A single measurement that is due: one library, task, pattern, sparsity and seed.

    Args:
        question: that it helps to answer.
        case: what tells it from others.
        measure: runs it, and returns named values.
    """

    question: str
    case: Case
    measure: Callable[[], dict[str, Any]]

    @property
    def key(self) -> str:
        """Return a text that is equal for equal cases."""
        return key_of(self.question, self.case)


@dataclass(frozen=True)
class Record:
    """A finished measurement.

    Args:
        question: that it helps to answer.
        case: what was measured.
        values: what was found; or the error of a library that cannot do it.
        facts: the commit, the date and the number of threads.
    """

    question: str
    case: Case
    values: dict[str, Any]
    facts: dict[str, Any]


def key_of(question: str, case: Case) -> str:
    """Return a text that is equal for equal cases."""
    return json.dumps([question, case], sort_keys=True, ensure_ascii=False)


class Results:
    """The measurements of a file, the last one of each case.

    Each is appended when it is finished: a run that is cut loses one, and the next run measures what is missing.

    Args:
        file: of JSON lines; made by the first measurement.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.records: dict[str, Record] = {}
        self.runs: list[dict[str, Any]] = []
        for line in file.read_text("utf-8").splitlines() if file.exists() else ():
            self._take(json.loads(line))

    def _take(self, found: dict[str, Any]) -> None:
        if "run" in found:
            self.runs.append(found["run"])
        else:
            self.records[key_of(found["question"], found["case"])] = Record(**found)

    def start(self, run: dict[str, Any]) -> None:
        """Add what all measurements of a run depend on, unless the last run had the same."""
        if not self.runs or self.runs[-1] != run:
            self._append({"run": run})

    def add(self, measurement: Measurement, facts: dict[str, Any]) -> Record:
        """Measure, and append what was found; what a library cannot do is a finding, too."""
        try:
            values = measurement.measure()
        except (AssertionError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            values = {"error": repr(error)[:300]}
        found = {"question": measurement.question, "case": measurement.case, "values": values, "facts": facts}
        self._append(found)
        return self.records[measurement.key]

    def _append(self, found: dict[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(found, ensure_ascii=False) + "\n")
        self._take(found)

    def missing(self, due: Iterable[Measurement]) -> Iterator[Measurement]:
        """Yield the measurements that the file does not have, and those that failed."""
        return (one for one in due if one.key not in self.records or "error" in self.records[one.key].values)

    def of(self, question: str) -> list[Record]:
        """Return the finished measurements of a question, without those that failed."""
        return [r for r in self.records.values() if r.question == question and "error" not in r.values]

    def failed(self, question: str) -> list[Record]:
        """Return the measurements of a question that raised an error."""
        return [r for r in self.records.values() if r.question == question and "error" in r.values]


def facts(threads: int) -> dict[str, Any]:
    """Return what a measurement depends on besides its case."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "threads": threads}


def machine() -> str:
    """Return the processor and the number of its cores."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {os.cpu_count()} cores"
