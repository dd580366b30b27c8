"""Launch: check what the command line asks for, all of it before any of it runs, then let Hydra run it.

Names and targets are looked at first. Torch and Lightning are imported when they are right, so that a slip of the pen
is answered at once.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from sparse_lightning.configuration import catalog
from sparse_lightning.configuration.check import check
from sparse_lightning.configuration.compose import Composed, compose, expanded, parsed, search_path
from sparse_lightning.configuration.first import is_first
from sparse_lightning.configuration.folders import fresh, last_run
from sparse_lightning.configuration.hydra_part import check_hydra
from sparse_lightning.configuration.job import job
from sparse_lightning.configuration.quiet import be_quiet
from sparse_lightning.errors import ConfigError, UntrustedError

if TYPE_CHECKING:
    from sparse_lightning.configuration.processes import Crew


def launch(arguments: list[str]) -> None:
    """Run the command line."""
    options = get_args_parser().parse_intermixed_args(arguments)  # flags may stand behind overrides
    if options.config_path or options.config_name or options.experimental_rerun:
        raise ConfigError("the primary config stays: use --config-dir FOLDER, and recipes in FOLDER/recipe")
    plan = checked(list(options.overrides), options.config_dir, options.multirun)
    if options.cfg or options.info or options.hydra_help or options.shell_completion:
        flags = [argument for argument in arguments if argument not in options.overrides]
        return _let_hydra([*flags, *options.overrides], job(plan.trusted))
    from sparse_lightning.configuration.processes import together

    extra = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    mode = ["--multirun"] if plan.is_sweep else []
    with together(plan.folder):
        _let_hydra([*mode, *extra, *options.overrides, *plan.overrides()], job(plan.trusted))
    if plan.is_sweep and is_first():
        from sparse_lightning.report import sweep

        print(sweep(plan.folder))


class Plan(Namespace):
    """What is to be run: `trusted` prefixes, the `folder`, whether it `is_sweep`, and the `rank` of this process."""

    trusted: tuple[str, ...]
    folder: Path
    is_sweep: bool
    rank: int

    def overrides(self) -> list[str]:
        """What Hydra is told: the folder; and where there are several processes, that the first writes its files."""
        path = str(self.folder).replace("\\", "\\\\").replace("'", "\\'")
        folder = f"hydra.{'sweep' if self.is_sweep else 'run'}.dir='{path}'"
        quiet = ["hydra.output_subdir=null", "hydra.hydra_logging.root.level=ERROR", f"hydra.job.name=run_{self.rank}"]
        return [folder, *quiet] if self.rank else [folder]


def checked(typed: Sequence[str], config_dir: str | None = None, multirun: bool = False) -> Plan:
    """Compose and check every run that overrides ask for.

    Args:
        typed: the overrides of the command line.
        config_dir: a folder with options and recipes of one's own.
        multirun: whether several values are a sweep.
    """
    trusted, given = trusted_by(typed), [*typed, *search_path(config_dir)]
    runs = expanded(typed)
    first = compose(runs[0], config_dir)
    check_hydra(first.hydra, given, trusted)
    is_sweep = multirun or first.is_sweep
    if is_sweep:
        params = first.hydra.sweeper.get("params") or {}
        runs = expanded([*(f"{key}={value}" for key, value in params.items()), *typed])
    elif len(runs) > 1:
        raise ConfigError(f"{' '.join(typed)}: several values are a sweep: add -m, or write a list in brackets")
    crews = []
    for overrides in runs:
        composed = compose(overrides, config_dir)
        check_hydra(composed.hydra, given, trusted)
        config = composed.plain(".")
        if tuple(config["trusted_targets"] or ()) != trusted:
            raise UntrustedError("trusted_targets is refused in a recipe: give it on the command line")
        check(config, trusted)
        crews.append(_crew(config, trusted))
    if is_sweep:
        check_crews(crews, first.hydra)
    folder = crews[0].agree(lambda: _folder(first, is_sweep, typed))
    return Plan(trusted=trusted, is_sweep=is_sweep, folder=folder, rank=crews[0].rank)


def _crew(config: dict[str, Any], trusted: tuple[str, ...]) -> Crew:
    """The processes that a configuration asks for; its small parts are made once, to check them."""
    from sparse_lightning.configuration.parts import Parts
    from sparse_lightning.configuration.processes import Crew

    be_quiet()
    return Crew.of(Parts(config, trusted).check_small())


def check_crews(crews: Sequence[Crew], hydra_part: DictConfig) -> None:
    """Refuse sweeps that several processes cannot go through side by side, run after run.

    Args:
        crews: the processes of each run.
        hydra_part: Hydra's own part of the configuration.
    """
    sizes = sorted({crew.size for crew in crews})
    if len(sizes) > 1:
        raise ConfigError(f"trainer: a sweep over {sizes} processes: let all runs of it have the same number")
    for part in ("launcher", "sweeper"):
        if sizes[0] > 1 and "core_plugins.basic" not in str(hydra_part[part].get("_target_")):
            raise ConfigError(f"hydra/{part}: {sizes[0]} processes can only be swept with hydra/{part}=basic")


def trusted_by(typed: Sequence[str]) -> tuple[str, ...]:
    """The prefixes that the user has typed.

    Example:
        >>> trusted_by(["seed=1", "trusted_targets=[my_pkg, our.models]"])
        ('my_pkg', 'our.models')
    """
    given: Any = [o.value() for o in parsed(typed) if o.key_or_group == "trusted_targets"]
    prefixes = given[-1] if given else []
    if not isinstance(prefixes, list) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise ConfigError(f"trusted_targets: {prefixes!r} is not a list of prefixes, such as [my_pkg]")
    return tuple(prefixes)


def _folder(composed: Composed, is_sweep: bool, typed: Sequence[str]) -> Path:
    """Where it goes: a new folder, or with `ckpt_path=last` that of the newest run."""
    folder = composed.folder("sweep.dir" if is_sweep else "run.dir")
    if composed.config.ckpt_path != "last":
        return fresh(folder)
    if is_sweep:
        raise ConfigError("ckpt_path: a sweep is no run to go on with: leave ckpt_path or -m out")
    last = last_run(folder.parent)
    if (last / "results.json").is_file() and not any(line.startswith("trainer.max_") for line in typed):
        raise ConfigError(f"ckpt_path: the newest run, {last}, has ended: raise trainer.max_epochs to train on")
    return last


def _let_hydra(arguments: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Run Hydra as if the program had been called with other arguments."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(catalog.CONF.resolve()), config_name="config")(task)()
    finally:
        sys.argv = before
