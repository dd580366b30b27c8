"""PreparedRuns: the objects of all runs that cost little, built before the first run trains, and their folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from sparse_lightning.app.checked import CheckedRuns
from sparse_lightning.app.compose import Composed
from sparse_lightning.app.processes import Processes
from sparse_lightning.app.quiet import be_quiet
from sparse_lightning.app.run import PreparedRun
from sparse_lightning.errors import ConfigError


class PreparedRuns:
    """The runs of a command line, ready to train.

    Args:
        folder: the folder of all files.
        rank: the rank of this process.
        is_sweep: whether Hydra is to run them as a sweep.
    """

    def __init__(self, folder: Path, rank: int, is_sweep: bool) -> None:
        self.folder, self.rank, self.is_sweep = folder, rank, is_sweep
        self._waiting: defaultdict[str, list[PreparedRun]] = defaultdict(list)

    def add(self, composed: Composed, run: PreparedRun) -> None:
        """Keep a run until Hydra calls for it."""
        self._waiting[composed.key].append(run)

    def take(self, composed: Composed) -> PreparedRun | None:
        """Return the run of a configuration, once; None where another sweeper has chosen its values."""
        waiting = self._waiting[composed.key]
        return waiting.pop(0) if waiting else None

    def overrides(self) -> list[str]:
        """Return overrides for Hydra: the folder, and that ranks other than 0, and exports, write none of its files."""
        path = str(self.folder).replace("\\", "\\\\").replace("'", "\\'")
        folder = f"hydra.{'sweep' if self.is_sweep else 'run'}.dir='{path}'"
        quiet = ["hydra.hydra_logging.root.level=ERROR", f"hydra.job.name=run_{self.rank}"] if self.rank else []
        silent = ["hydra.output_subdir=null"] if self.rank or self._keeps_record() else []
        return [folder, *quiet, *silent]

    def _keeps_record(self) -> bool:
        """Whether the run is only exported, so that Hydra's files stay those of its training."""
        return any(run.exports_only for runs in self._waiting.values() for run in runs)


def prepare_runs(checked: CheckedRuns) -> PreparedRuns:
    """Build what is cheap in every run, and agree on a folder with the other processes.

    Raises:
        ConfigError: where a value is invalid in any run.
    """
    be_quiet()
    runs = [PreparedRun(composed.plain("."), checked.trusted) for composed in checked.runs]
    processes = [Processes.of(run.trainer) for run in runs]
    if checked.is_sweep:
        check_processes(processes, checked.main.hydra)
    folder = processes[0].agree(checked.choose_folder)
    prepared = PreparedRuns(folder, processes[0].rank, checked.is_sweep)
    for i, (composed, run) in enumerate(zip(checked.runs, runs, strict=True)):
        prepared.add(composed, run.moved_to(composed.plain(checked.folder_of(i, folder))))
    return prepared


def check_processes(processes: Sequence[Processes], settings: DictConfig) -> None:
    """Raise `ConfigError` for a sweep that several processes cannot run in step.

    Args:
        processes: those of each run.
        settings: Hydra's own configuration.
    """
    sizes = sorted({found.size for found in processes})
    if len(sizes) > 1:
        raise ConfigError(f"trainer: the runs of this sweep need {sizes} processes: use the same number in all runs")
    for part in ("launcher", "sweeper"):
        if sizes[0] > 1 and "core_plugins.basic" not in str(settings[part].get("_target_")):
            raise ConfigError(f"hydra/{part}: a sweep with {sizes[0]} processes needs hydra/{part}=basic")
