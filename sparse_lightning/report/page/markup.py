"""Markup: HTML that is built from elements, so that all text in it is escaped."""

from __future__ import annotations

from html import escape
from typing import Any

VOID = ("img", "meta", "br")
"""Elements without content."""


class Markup(str):
    """Text that is HTML already, and is not escaped again."""


def element(tag: str, *children: str, **attributes: Any) -> Markup:
    """Return an element; children and values of attributes are escaped, unless they are `Markup`.

    Underscores in names of attributes are hyphens, and one at the end is dropped. None and False omit an attribute,
    and True writes its name alone.

    Example:
        >>> element("p", "a < b", element("b", "!"), class_="note", aria_hidden=True)
        '<p class="note" aria-hidden>a &lt; b<b>!</b></p>'
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    opening = "".join(
        f" {name}" if value is True else f' {name}="{escape(str(value))}"'
        for name, value in given.items()
        if value is not None and value is not False
    )
    if tag in VOID:
        return Markup(f"<{tag}{opening}>")
    return Markup(f"<{tag}{opening}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Markup:
    """Return children one after the other, escaped unless they are `Markup`."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))
