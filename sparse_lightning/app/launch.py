"""Launch: check what the command line requests, all of it before any of it trains, then let Hydra run it.

The way of a configuration, each step once for each run::

    overrides ── compose.compose ──▶ Composed ── check.check ──▶ CheckedRuns         names, targets, arguments, values
    CheckedRuns ── PreparedRun ──▶ callback, exporter, trainer ── Processes ──▶ the folder ──▶ logger
    PreparedRuns ── hydra.main ──▶ Job ── PreparedRun.train ──▶ model, data          patterns, shards, checkpoint

Torch and Lightning are imported in the second line, so that a typo is reported at once. The second line builds the
objects of all runs of a sweep, so that an invalid value in the last run stops the first. The third line, which Hydra
calls for each run, finds the prepared run by its composed configuration and uses the objects that were built.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig

from sparse_lightning.app import catalog
from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.ended import kept_record
from sparse_lightning.app.folders import make_folder
from sparse_lightning.app.job import Job
from sparse_lightning.app.rank_zero import is_rank_zero
from sparse_lightning.app.renamed_keys import accept_old_keys
from sparse_lightning.compat.hydra import argument_parser, raising_errors
from sparse_lightning.errors import ConfigError


def launch(arguments: list[str]) -> None:
    """Run the command line."""
    options = argument_parser().parse_intermixed_args(arguments)  # flags may follow overrides
    if options.config_path or options.config_name or options.experimental_rerun:
        raise ConfigError("the primary config is fixed: use --config-dir FOLDER, and recipes in FOLDER/recipe")
    # Python hides these warnings by default.
    warnings.filterwarnings("default", ".* is deprecated: use ", DeprecationWarning)
    checked = check_runs(accept_old_keys(options.overrides), options.config_dir, options.multirun)
    overrides = checked.typed.overrides
    if options.cfg or options.info or options.hydra_help or options.shell_completion:
        flags = [argument for argument in arguments if argument not in options.overrides]
        return _run_hydra([*flags, *overrides], Job(checked.typed))
    # From here on torch is needed.
    from sparse_lightning.app.prepare import prepare_runs
    from sparse_lightning.app.processes import together
    from sparse_lightning.report import sweep

    prepared = prepare_runs(checked)
    extra = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    mode = ["--multirun"] if checked.is_sweep else []
    if is_rank_zero():
        make_folder(prepared.folder)
    with together(prepared.folder), kept_record(prepared.folder):
        job = Job(checked.typed, prepared.take)
        _run_hydra([*mode, *extra, *overrides, *prepared.overrides()], job)
    if checked.is_sweep and is_rank_zero():
        print(f"{sweep(prepared.folder)}\n\nReport: {os.path.relpath(prepared.folder / 'report.html')}")


def _run_hydra(arguments: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Run Hydra as if the program had been started with other arguments."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        with raising_errors():
            hydra.main(version_base="1.3", config_path=str(catalog.CONF.resolve()), config_name="config")(task)()
    finally:
        sys.argv = before
