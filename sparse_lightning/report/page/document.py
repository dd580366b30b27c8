"""The document: a page in one file, which loads nothing and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from sparse_lightning.report.page.markup import Markup, element, joined


def document(title: str, subtitle: str, sections: Iterable[Markup]) -> str:
    """Return a page of sections.

    The content security policy lets the page load nothing, and run the script of this package only: text that was
    not escaped could not run either.

    Args:
        title: of the page.
        subtitle: the line below it.
        sections: from `section`; empty ones are left out.
    """
    shown = [found for found in sections if found]
    style, script = _asset("style.css"), _asset("script.js")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_digest(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    top = element("header", element("h1", title), element("p", subtitle, class_="subtitle"))
    body = element("body", top, element("main", *shown), element("script", Markup(script)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def section(name: str, *children: str) -> Markup:
    """Return a section with a heading; an empty one without children."""
    if not any(children):
        return Markup()
    place = "".join(sign if sign.isalnum() else "-" for sign in name.lower())
    heading = element("h2", name, id=f"{place}-heading")
    return element("section", heading, joined(*children), id=place, aria_labelledby=f"{place}-heading")


def note(text: str) -> Markup:
    """Return a paragraph of small text."""
    return element("p", text, class_="note")


def listing(text: str, name: str = "") -> list[Markup]:
    """Return a text as it is, with a button that copies it; a named one is folded."""
    if not text:
        return []
    code = element("pre", element("code", text), tabindex=0)
    whole = element("div", element("button", "Copy", type="button", class_="copy"), code, class_="listing")
    return [element("details", element("summary", name), whole)] if name else [whole]


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
