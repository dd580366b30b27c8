"""Texts that users read are in the terms of the field: its words are found, and those that it does not use are not."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FORMER_NAMES = {"moved.py", "renamed.py", "renamed_keys.py", "deprecated.py"}
"""Modules that name what was renamed, on purpose."""

SEARCHED = (
    "structured pruning",
    "magnitude pruning",
    "global pruning",
    "one-shot pruning",
    "sparsity level",
    "N:M sparsity",
    "sparse training",
    "density",
    "fraction of the run",
    "resume",
)
AVOIDED = (
    r"\bgo(es)? on with\b",
    r"\b(is|are|were) gone\b",
    r"\btravels?\b",
    r"\bpart of the run\b",
    r"\bnobody knows\b",
    r"\b(is|are) refused\b",
    r"\b(said|told|asked)\b",
    r"\bmend(s|ed|ing)?\b",
    r"\bslip of the pen\b",
    r"(?<!\bthere )\bis no (?!longer)",
    r"\bcount on through\b",
    r"\b(share|floor)=",
    r"\bleftovers?\b",
    r"\bcontenders?\b",
    r"\bBlockPart\b|\bEndToEnd\b",
)


@cache
def texts() -> list[tuple[str, str]]:
    """Pages, comments of configurations, and docstrings and messages of the package, each with its place."""
    found = [(page.name, page.read_text("utf-8")) for page in PAGES]
    for file in [*sorted((ROOT / "conf").rglob("*.yaml")), *sorted((ROOT / "recipes").glob("*.yaml"))]:
        found.append((str(file.relative_to(ROOT)), file.read_text("utf-8")))
    for file in sorted((ROOT / "sparse_lightning").rglob("*.py")):
        if file.name not in FORMER_NAMES:
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append((f"{file.relative_to(ROOT)}:{node.lineno}", node.value))
    return found


def uses(word: str, found: list[tuple[str, str]]) -> list[str]:
    """The places of the texts that a regular expression matches, and the match."""
    pattern = re.compile(word, re.IGNORECASE)
    return [f"{place}: {match[0]!r}" for place, text in found if (match := pattern.search(" ".join(text.split())))]


@pytest.mark.parametrize("term", SEARCHED)
def test_a_term_of_the_field_is_found_in_the_documentation(term):
    pages = [page.name for page in PAGES if term.lower() in " ".join(page.read_text("utf-8").split()).lower()]
    assert set(pages) - {"index.md", "CONTRIBUTING.md"}, f"only the glossary mentions {term!r}, or no page does"


@pytest.mark.parametrize("word", AVOIDED)
def test_no_text_uses_a_word_that_the_field_does_not(word):
    assert uses(word, texts()) == []


def test_a_word_in_any_text_is_found():
    places = [place for place, _ in texts()]
    assert {"README.md", "conf/config.yaml", "recipes/sweep.yaml"} <= set(places)
    assert any(place.startswith("sparse_lightning/app/trust.py:") for place in places)
    assert uses(r"\bis refused\b", [("here", "'os.system' is\n refused: os")]) == ["here: 'is refused'"]
