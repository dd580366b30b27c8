"""RunFiles: what the folder of a run holds for its page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

PAGE = "report.html"
HYDRA, SWEEP = Path(".hydra", "hydra.yaml"), "multirun.yaml"
"""Where Hydra writes its own settings, of a run and of a sweep."""


@dataclass(frozen=True)
class RunFiles:
    """The files of a run, read.

    Args:
        folder: of the run.
        results: `results.json`.
        masks: `masks.safetensors`.
        configuration: the text of `config.yaml`; empty if there is none.
        command: the command line that made the run; empty if it is unknown.
    """

    folder: Path
    results: dict[str, Any]
    masks: dict[str, Tensor]
    configuration: str
    command: str

    @staticmethod
    def of(folder: Path) -> RunFiles:
        """Read the folder of a run that has ended."""
        config = folder / "config.yaml"
        return RunFiles(
            folder,
            json.loads((folder / "results.json").read_text("utf-8")),
            load_file(folder / "masks.safetensors"),
            config.read_text("utf-8") if config.is_file() else "",
            command_of(folder / HYDRA),
        )

    @property
    def name(self) -> str:
        """The name of the run in its configuration, or that of its folder."""
        found = yaml.safe_load(self.configuration) if self.configuration else None
        given = found.get("name") if isinstance(found, Mapping) else None
        return str(given or self.folder.resolve().name)

    def sizes(self) -> list[tuple[str, int]]:
        """Return the files of the run with their sizes in bytes, hidden ones and the page itself left out."""
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        names = [(path.relative_to(self.folder), path.stat().st_size) for path in files]
        return [(str(n), size) for n, size in names if n.name != PAGE and not any(p.startswith(".") for p in n.parts)]


def command_of(settings: Path) -> str:
    """Return the command line that Hydra has recorded in its settings; empty if there is no such file."""
    if not settings.is_file():
        return ""
    recorded = (yaml.safe_load(settings.read_text("utf-8")) or {}).get("hydra") or {}
    sources = (recorded.get("runtime") or {}).get("config_sources") or []
    own = [source["path"] for source in sources if source.get("provider") == "command-line"]
    flags = ["-m"] if settings.name == SWEEP else []
    overrides = (recorded.get("overrides") or {}).get("task") or []
    return shlex.join(["sparse-lightning", *flags, *(x for path in own for x in ("--config-dir", path)), *overrides])
