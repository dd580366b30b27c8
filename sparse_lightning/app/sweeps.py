"""Sweeps: what `glob(…)` and `interval(…)` of a command line stand for, so that every value is checked beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override

from sparse_lightning.app import catalog
from sparse_lightning.app.overrides import parsed
from sparse_lightning.compat.hydra import CORE_PLUGINS
from sparse_lightning.errors import ConfigError

_LOG_FILE = "hydra.job_logging.handlers.file.filename"


def spelled_out(overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return overrides without globs, and with a log of the option colorlog in the run's folder, as all files are.

    Args:
        overrides: of the command line.
        config_dir: a folder with your own options and recipes.

    Example:
        >>> spelled_out(["criterion=glob([magnitude, t*])", "seed=1"])
        ['criterion=magnitude,taylor', 'seed=1']
    """
    found = [_without_glob(override, config_dir) for override in parsed(overrides)]
    typed = {line.partition("=")[0].lstrip("+"): line.partition("=")[2] for line in found}
    if typed.get("hydra/job_logging") == "colorlog" and _LOG_FILE not in typed:
        found.append(f"{_LOG_FILE}='${{hydra.runtime.output_dir}}/${{hydra.job.name}}.log'")
    return found


def values_to_check(override: Override) -> list[str]:
    """Return an override for each value of a sweep; of an interval, its ends.

    Example:
        >>> values_to_check(*parsed(["schedule.final=interval(0.5, 0.9)"]))
        ['schedule.final=0.5', 'schedule.final=0.9']
    """
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}", f"{key}={value.end}"]
    if override.is_sweep_override():
        return [f"{key}={text}" for text in override.sweep_string_iterator()]
    return [str(override.input_line)]


def check_intervals(overrides: Sequence[str], sweeper: str) -> None:
    """Raise `ConfigError` for an interval where the sweeper, by the name of its class, takes lists of values only."""
    for override in parsed(overrides):
        if isinstance(override.value(), IntervalSweep) and sweeper.startswith(CORE_PLUGINS):
            raise ConfigError(
                f"{override.input_line}: the basic sweeper draws no values from an interval. List the values, or add "
                "hydra/sweeper=optuna, which pip install 'sparse-lightning[sweeps]' installs"
            )


def options(group: str, config_dir: str | None = None) -> list[str]:
    """Return the options of a group, those of your own folder included."""
    own = [] if config_dir is None else sorted(file.stem for file in Path(config_dir, group).glob("*.yaml"))
    return [*catalog.options(group), *(name for name in own if name not in catalog.options(group))]


def _without_glob(override: Override, config_dir: str | None) -> str:
    value: Any = override.value()  # the hint of Hydra's has no Glob
    key = override.key_or_group
    if not isinstance(value, Glob):
        return str(override.input_line)
    known = options(key, config_dir)
    matched = value.filter(known)
    if not matched:
        raise ConfigError(f"{override.input_line}: no option of {key} matches: choose of {', '.join(known)}")
    return f"{override.get_key_element()}={','.join(matched)}"
