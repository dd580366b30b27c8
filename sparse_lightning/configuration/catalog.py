"""What can be chosen: the groups, their options and the recipes, each with the line that says what it is for.

All of it is read from the files, without Hydra: `--help` is to come at once.
"""

from __future__ import annotations

import re
from pathlib import Path

CONF = Path(__file__).parent.parent / "conf"
"""Where the groups are: a folder of the package, also where it is a link to the top of the repository."""

_DEFAULT = re.compile(r"^  - (?P<group>\w+): (?P<option>\w+)(?:\s+# (?P<purpose>.+))?$", re.MULTILINE)


def groups() -> dict[str, str]:
    """The groups in the order of the primary config, each with what it decides; the recipe is none of them."""
    return {found["group"]: found["purpose"] or "" for found in _defaults() if found["group"] != "recipe"}


def default(group: str) -> str:
    """The option that is taken where nothing is said."""
    return next(found["option"] for found in _defaults() if found["group"] == group)


def options(group: str) -> dict[str, str]:
    """The options of a group, or the recipes, each with its purpose."""
    return {file.stem: purpose(file.read_text("utf-8")) for file in sorted((CONF / group).glob("*.yaml"))}


def purpose(text: str) -> str:
    r"""The first comment of a YAML file that is not an instruction to Hydra.

    Example:
        >>> purpose("# @package _global_\n# Blocks on digits.\nseed: 0")
        'Blocks on digits.'
    """
    comments = (line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#"))
    return next((line for line in comments if line and not line.startswith("@")), "")


def _defaults() -> list[re.Match[str]]:
    return list(_DEFAULT.finditer((CONF / "config.yaml").read_text("utf-8")))
