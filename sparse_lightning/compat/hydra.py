"""Private names of Hydra."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal import utils
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins

CORE_PLUGINS = "hydra._internal.core_plugins"
"""The package of the launchers and sweepers that come with Hydra; configurations name them by `_target_`."""


def argument_parser() -> ArgumentParser:
    """Return the parser of Hydra's own command line: flags such as `--multirun`, then overrides."""
    return get_args_parser()


@contextmanager
def raising_errors() -> Iterator[None]:
    """Let `hydra.main` raise the errors of a program, while the context lasts; otherwise it prints them and exits."""
    before = utils.is_under_debugger
    utils.is_under_debugger = lambda: True
    try:
        yield
    finally:
        utils.is_under_debugger = before


@contextmanager
def reading_files(measure: Callable[[Path], None]) -> Iterator[None]:
    """Call a function with every YAML file before Hydra reads it, while the context lasts.

    Args:
        measure: called once for each file of a configuration; what it raises ends the composition.
    """
    Plugins.instance()  # registers the sources
    types = SourcesRegistry.instance().types
    before: Any = types["file"]

    class MeasuredFiles(before):  # type: ignore[misc]
        def load_config(self, config_path: str) -> Any:
            file = Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")
            if file.exists():
                measure(file.resolve())
            return super().load_config(config_path)

    types["file"] = MeasuredFiles
    try:
        yield
    finally:
        types["file"] = before
