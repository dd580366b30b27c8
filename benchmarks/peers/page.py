"""Pages of results: Markdown tables and plots, with the machine, the versions and the command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """A table with a title."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


@dataclass(frozen=True)
class Plot:
    """A plot with the name of its file, without suffix."""

    file: str
    title: str
    figure: Figure


def write(file: Path, intro: str, tables: Iterable[Table], plots: Iterable[Plot], facts: list[str]) -> None:
    """Write a page and its plots."""
    file.parent.mkdir(parents=True, exist_ok=True)
    images = []
    for plot in plots:
        plot.figure.savefig(file.with_name(f"{plot.file}.png"))
        images.append(f"![{plot.title}]({plot.file}.png)\n")
    parts = [intro.strip(), "", *(f"- {fact}" for fact in facts), "", *(table.markdown() for table in tables), *images]
    file.write_text("\n".join(parts).rstrip() + "\n", "utf-8")


def facts(versions: dict[str, str], minutes: float) -> list[str]:
    """What a result depends on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return [
        f"Measured on {datetime.now(timezone.utc):%Y-%m-%d} in {minutes:.1f} minutes, commit {commit.stdout.strip()}.",
        f"Machine: {processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use; "
        f"Python {platform.python_version()}.",
        f"Versions: {', '.join(f'{name} {found}' for name, found in versions.items())}.",
        f"Command: `make bench-peers PEERS_ARGS={shlex.quote(shlex.join(sys.argv[1:]))}`",
    ]


def processor() -> str:
    """The name of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
