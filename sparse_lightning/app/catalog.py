"""Catalog: the groups, their options and the recipes, each with its purpose.

They are read from the YAML files, without Hydra, so that `--help` prints at once.
"""

from __future__ import annotations

import re
from pathlib import Path

CONF = Path(__file__).parent.parent / "conf"
"""The folder of the groups: a folder of the package, or a link to the top of the repository."""

_DEFAULT = re.compile(r"^  - (?P<group>\w+): (?P<option>\w+)(?:\s+# (?P<purpose>.+))?$", re.MULTILINE)


def groups() -> dict[str, str]:
    """Return the groups in the order of the primary config, each with its purpose; without the recipe."""
    return {found["group"]: found["purpose"] or "" for found in _defaults() if found["group"] != "recipe"}


def default(group: str) -> str:
    """Return the default option of a group."""
    return next(found["option"] for found in _defaults() if found["group"] == group)


def options(group: str) -> dict[str, str]:
    """Return the options of a group, or the recipes, each with its purpose."""
    return {file.stem: purpose(file.read_text("utf-8")) for file in sorted((CONF / group).glob("*.yaml"))}


def purpose(text: str) -> str:
    r"""Return the first comment of a YAML file that is not a directive of Hydra.

    Example:
        >>> purpose("# @package _global_\n# Blocks on digits.\nseed: 0")
        'Blocks on digits.'
    """
    comments = (line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#"))
    return next((line for line in comments if line and not line.startswith("@")), "")


def _defaults() -> list[re.Match[str]]:
    return list(_DEFAULT.finditer((CONF / "config.yaml").read_text("utf-8")))
