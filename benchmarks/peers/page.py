"""Pages of results: Markdown tables and plots, with the machine, the versions and the commands."""

from __future__ import annotations

from dataclasses import dataclass


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
