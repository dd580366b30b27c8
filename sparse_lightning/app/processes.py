"""Processes: the rank of this process in a run, the folder that all ranks share, and how they end.

Lightning starts the other processes of a machine itself, by the same command line; or torchrun or SLURM have started
all of them. Rank 0 chooses the folder, writes, prints and handles Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sparse_lightning.app.rank_zero import PATIENCE
from sparse_lightning.compat.lightning import started_processes
from sparse_lightning.errors import ConfigError

FOLDER = "SPARSE_LIGHTNING_FOLDER"
"""The environment variable that passes the folder to processes that Lightning starts."""

_stores: list[TCPStore] = []
"""Serve the other processes; they must live as long as this process."""

_started: list[list[subprocess.Popen[bytes]]] = []
"""The processes that Lightning has started for this one, by trainer."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them.

    Args:
        size: the number of processes.
        rank: the rank of this process.
        address: host and port of the store on rank 0; None where Lightning starts all other processes.
    """

    size: int
    rank: int
    address: tuple[str, int] | None

    @staticmethod
    def of(trainer: L.Trainer) -> Processes:
        """Return the processes of a trainer.

        Raises:
            ConfigError: where torchrun has started another number of them.
        """
        wanted = trainer.num_devices * trainer.num_nodes
        environment: Any = getattr(trainer.strategy, "cluster_environment", None)
        started = int(os.environ["WORLD_SIZE"]) if TorchElasticEnvironment.detect() else wanted
        if started != wanted:
            raise ConfigError(
                f"trainer: torchrun has started {started} processes, but num_nodes={trainer.num_nodes} and "
                f"devices={trainer.num_devices} are {wanted}: choose trainer=ddp or trainer=fsdp2, and set "
                "trainer.num_nodes and trainer.devices as for torchrun"
            )
        is_shared = wanted > 1 and (environment.creates_processes_externally or trainer.num_nodes > 1)
        address = (environment.main_address, environment.main_port) if is_shared else None
        return Processes(wanted, trainer.global_rank, address)

    def agree(self, choose: Callable[[], Path]) -> Path:
        """Return the folder that rank 0 chooses, on all ranks.

        Args:
            choose: called on rank 0 only. A `ConfigError` that it raises is raised on all ranks.
        """
        if self.rank > 0 and FOLDER in os.environ:
            return Path(os.environ[FOLDER])
        if self.address is None:
            return choose()
        store = _store(self.address, self.rank)
        if self.rank > 0:
            return _received(store)
        return _published(store, choose)


def _store(address: tuple[str, int], rank: int) -> TCPStore:
    """Return the key-value store that torch.distributed will use too; torchrun has created it already."""
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(minutes=30)
    store = TCPStore(*address, None, hosts, patience, wait_for_workers=False, multi_tenant=True)
    _stores.append(store)
    return store


def _key() -> str:
    # torchrun may restart all processes.
    return f"sparse_lightning/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/folder"


def _published(store: TCPStore, choose: Callable[[], Path]) -> Path:
    try:
        folder = choose()
    except ConfigError as error:
        store.set(_key(), f"!{error}")
        raise
    store.set(_key(), f"={folder}")
    return folder


def _received(store: TCPStore) -> Path:
    answer = store.get(_key()).decode()
    if answer.startswith("!"):
        raise ConfigError(answer[1:])
    return Path(answer[1:])


@contextmanager
def together(folder: Path) -> Iterator[None]:
    """Pass the folder to processes that Lightning starts inside, and end them with this one."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder)
    try:
        yield
        end_others(PATIENCE)
    finally:
        del os.environ[FOLDER]
        os.environ.update({} if before is None else {FOLDER: before})
        end_others(0.0)


def watch(trainer: L.Trainer) -> None:
    """Remember the processes that a trainer has started: later trainers of the same program use them too."""
    started = started_processes(trainer)
    if started:
        _started.append(started)


def end_others(patience: float) -> None:
    """Wait for the processes that were started; kill those that do not end in time."""
    while _started:
        listed = _started.pop()
        processes = list(listed)
        # Lightning kills this process when one of its list ends with an error, even while this one ends as well.
        listed.clear()
        for process in processes:
            _end(process, patience)


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
