"""Module paths of version 0.1.0: importing one of them returns the module that took its place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

PACKAGE = __name__.rpartition(".")[0]

MOVED = {
    "attached": "engine.masked_scope",
    "block": "blocks.spec",
    "builder": "blocks.builder",
    "chart": "layout.coordinates",
    "chunk": "kernels.chunks",
    "cli": "app.cli",
    "configuration": "app",
    "configuration.danger": "app.allowlist",
    "configuration.first": "app.rank_zero",
    "configuration.hydra_part": "app.hydra_settings",
    "configuration.leftovers": "app.stale_overrides",
    "configuration.parts": "app.factory",
    "distributed": "blocks.shards",
    "flow.end_to_end": "flow.ragged_blocks",
    "groups": "engine.nm_groups",
    "input_norms": "flow.input_norms",
    "join": "schedules.join",
    "kernels.block_score.stage": "kernels.stage",
    "masks": "engine.masks",
    "metrics_file": "report.metrics_file",
    "movements": "layout.view_ops",
    "names": "patterns.names",
    "nearest": "errors",
    "optimizer_state": "flow.optimizer_state",
    "panel": "drawing.block_map",
    "part": "blocks.local_blocks",
    "patch": "layout.regions",
    "patterns.overview": "patterns.summary_table",
    "prox": "blocks.thresholds",
    "reach": "layout.overlap",
    "reduction": "blocks.reductions",
    "run": "app.run",
    "schedule": "schedules.schedule",
    "scope": "blocks.scope",
    "scoring": "engine.scoring",
    "settings": "engine.configuration",
    "sparse_block": "blocks.sparse_block",
    "sparsifier": "engine.sparsifier",
    "strategy": "callbacks.strategy",
    "table": "blocks.table",
    "view": "blocks.view",
    "work": "engine.engine",
}
"""Old name → new name, both below the package; a submodule that is not listed follows its package."""


def new_name(name: str) -> str | None:
    """The full name of the module that took the place of an old one; None where nothing has moved.

    Example:
        >>> new_name("sparse_lightning.scope"), new_name("sparse_lightning.configuration.trust")
        ('sparse_lightning.blocks.scope', 'sparse_lightning.app.trust')
    """
    old = name.removeprefix(f"{PACKAGE}.")
    parent, _, last = old.rpartition(".")
    found = MOVED.get(old) or (f"{MOVED[parent]}.{last}" if parent in MOVED else None)
    return None if found is None or old == name else f"{PACKAGE}.{found}"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if new_name(fullname) is None else spec_from_loader(fullname, _Alias())


class _Alias(Loader):
    """Puts the module under its new name in the place of the one that is being imported."""

    def exec_module(self, module: ModuleType) -> None:
        name = new_name(module.__name__)
        assert name is not None, "the finder has found it"
        sys.modules[module.__name__] = import_module(name)


def install() -> None:
    """Let old module paths be imported; calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # Before files: a folder that an upgrade left behind would be an empty package, and submodules second copies.
        sys.meta_path.insert(0, _Finder())
