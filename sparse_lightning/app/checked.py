"""CheckedRuns: all runs that a command line requests, each composed once and checked once, without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from sparse_lightning.app.check import check
from sparse_lightning.app.compose import Composed, compose, expanded, search_path
from sparse_lightning.app.ended import LIMITS, EndedRun
from sparse_lightning.app.folders import fresh, last_run, resumed_folder
from sparse_lightning.app.hydra_settings import check_hydra
from sparse_lightning.app.paths import check_read
from sparse_lightning.app.resources import check_resources
from sparse_lightning.app.sweeps import check_intervals, spelled_out
from sparse_lightning.app.typed import Typed, check_typed
from sparse_lightning.errors import ConfigError


@dataclass(frozen=True)
class CheckedRuns:
    """The runs of a command line, composed and checked.

    Args:
        main: the configuration whose Hydra settings name the folder, the launcher and the sweeper.
        runs: one configuration for each run.
        is_sweep: whether Hydra is to run them as a sweep.
        typed: the overrides of the command line.
    """

    main: Composed
    runs: tuple[Composed, ...]
    is_sweep: bool
    typed: Typed

    @property
    def trusted(self) -> tuple[str, ...]:
        """The prefixes of dotted names that the user trusts."""
        return self.typed.trusted

    def choose_folder(self) -> Path:
        """Return the folder of all files: a new one, or with `ckpt_path=last` that of the newest run."""
        is_given = self.typed.sets("folder")
        folder = self.main.given_folder if is_given else self.main.folder("sweep.dir" if self.is_sweep else "run.dir")
        if self.main.config.ckpt_path != "last":
            return fresh(folder)
        if self.is_sweep:
            raise ConfigError("ckpt_path: a sweep cannot be resumed: remove ckpt_path or -m")
        last = resumed_folder(folder) if is_given else last_run(folder.parent)
        self._check_resumed(last)
        return last

    def _check_resumed(self, folder: Path) -> None:
        """Raise `ConfigError` for a run that has ended, unless it is exported as it is, or trained longer.

        The limit of a recipe does not mean that a run which was given a lower one is to be trained longer: type it.
        """
        run, config = EndedRun.of(folder), self.main.plain(folder.absolute())
        is_typed = any(self.typed.sets(f"trainer.{name}") for name in LIMITS)
        if run is not None and not (run.goes_on(config) and (is_typed or not run.is_complete)):
            run.check_export(config)

    def folder_of(self, number: int, folder: Path) -> Path:
        """Return the folder of a run, absolute as Hydra names it, inside of the folder of all runs."""
        inside = self.runs[number].folder("sweep.subdir") if self.is_sweep else Path()
        return (folder / inside).absolute()


def check_runs(typed: Sequence[str], config_dir: str | None = None, multirun: bool = False) -> CheckedRuns:
    """Compose and check every run that overrides request.

    Args:
        typed: the overrides of the command line.
        config_dir: a folder with your own options and recipes.
        multirun: whether several values are a sweep.
    """
    typed = spelled_out(typed, config_dir)
    user, own = Typed(tuple(typed)), _from_folder(typed, config_dir)
    given = [line for line in [*typed, *search_path(config_dir)] if line not in own]
    lines, chosen = expanded(typed), _chosen([line for line in typed if line not in own])
    main = compose(lines[0], config_dir)
    check_hydra(main.hydra, given, user.trusted, chosen)
    is_sweep = multirun or main.is_sweep
    if len(lines) > 1 and not is_sweep:
        raise ConfigError(f"{' '.join(typed)}: several values request a sweep: add -m, or write a list in brackets")
    swept = _params(main) if is_sweep else []
    if swept:
        lines = expanded([*swept, *typed])
    check_intervals([*swept, *typed], str(main.hydra.sweeper.get("_target_")))
    # Without values that the recipe itself sweeps over, the first run is the configuration that is composed already.
    runs = [main if i == 0 and not swept else compose(line, config_dir, i) for i, line in enumerate(lines)]
    for run in runs:
        if run is not main:
            check_hydra(run.hydra, given, user.trusted, chosen)
        _check_run(run, user)
    return CheckedRuns(main, tuple(runs), is_sweep, user)


def _chosen(typed: Sequence[str]) -> DictConfig | None:
    """Return Hydra's settings as the user alone chooses them, without a recipe; None where no plugin is chosen."""
    lines = [line for line in typed if line.lstrip("+~").startswith(("hydra/", "hydra."))]
    if not any(line.lstrip("+").startswith("hydra/") for line in lines):
        return None
    return compose(lines).hydra


def _from_folder(typed: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the choices of Hydra's plugins by a file of the user's folder: its targets are checked as in a recipe.

    The folder may be someone else's, so that choosing it by name does not mean that its content is trusted.
    """
    pairs = [(line, *line.lstrip("+").partition("=")[::2]) for line in typed]
    chosen = [(line, Path(key, f"{name}.yaml")) for line, key, name in pairs if key.startswith("hydra/")]
    own = [line for line, file in chosen if config_dir is not None and Path(config_dir, file).is_file()]
    return [line for line in own if not _is_known(line)]


def _is_known(line: str) -> bool:
    """Whether Hydra or a plugin has the option that a line chooses."""
    try:
        compose([line])
    except ConfigError:
        return False
    return True


def _params(main: Composed) -> list[str]:
    return [f"{key}={value}" for key, value in (main.hydra.sweeper.get("params") or {}).items()]


def _check_run(run: Composed, typed: Typed) -> None:
    # The folder is chosen later, below the current one unless the user names another: this one stands for it.
    config = run.plain(Path("outputs", "run"))
    check_typed(config, run.raw, typed)
    if typed.sets("folder"):
        _ = run.given_folder
    check(config, typed.trusted)
    check_read(config, typed)
    check_resources(config, typed)
