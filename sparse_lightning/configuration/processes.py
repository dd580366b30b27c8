"""Processes: which of the processes of a run this is, how all of them come to one folder, and how they end.

Lightning starts the other processes of a machine itself, by the same command line; or torchrun or SLURM have started
all of them. The first process decides where files go, and is the one that writes, prints and listens to Ctrl-C.
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

from sparse_lightning.configuration.first import PATIENCE
from sparse_lightning.errors import ConfigError

FOLDER = "SPARSE_LIGHTNING_FOLDER"
"""The environment variable by which the processes that Lightning starts are told the folder."""

_stores: list[TCPStore] = []
"""What answers the other processes; it has to live as long as this process."""

_started: list[list[subprocess.Popen[bytes]]] = []
"""The processes that Lightning has started for this one."""


@dataclass(frozen=True)
class Crew:
    """The processes of a run, seen from one of them.

    Args:
        size: how many there are.
        rank: which one this is.
        address: where the first one answers; None where nobody asks, because Lightning starts all the others.
    """

    size: int
    rank: int
    address: tuple[str, int] | None

    @staticmethod
    def of(trainer: L.Trainer) -> Crew:
        """The processes that a trainer works with.

        Raises:
            ConfigError: where other processes have been started than it asks for.
        """
        wanted = trainer.num_devices * trainer.num_nodes
        environment: Any = getattr(trainer.strategy, "cluster_environment", None)
        started = int(os.environ["WORLD_SIZE"]) if TorchElasticEnvironment.detect() else wanted
        if started != wanted:
            raise ConfigError(
                f"trainer: torchrun has started {started} processes, but num_nodes={trainer.num_nodes} and "
                f"devices={trainer.num_devices} ask for {wanted}: choose trainer=ddp or trainer=fsdp2, and give "
                "trainer.num_nodes and trainer.devices as torchrun has them"
            )
        asks = wanted > 1 and (environment.creates_processes_externally or trainer.num_nodes > 1)
        address = (environment.main_address, environment.main_port) if asks else None
        return Crew(wanted, trainer.global_rank, address)

    def agree(self, decide: Callable[[], Path]) -> Path:
        """The folder that the first process decides on, in all processes.

        Args:
            decide: called in the first process only. What it refuses is refused in all.
        """
        if self.rank > 0 and FOLDER in os.environ:
            return Path(os.environ[FOLDER])
        if self.address is None:
            return decide()
        store = _store(self.address, self.rank)
        if self.rank > 0:
            return _heard(store)
        return _told(store, decide)


def _store(address: tuple[str, int], rank: int) -> TCPStore:
    """The key-value store by which the processes will find each other too; with torchrun it is there already."""
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(minutes=30)
    store = TCPStore(*address, None, hosts, patience, wait_for_workers=False, multi_tenant=True)
    _stores.append(store)
    return store


def _key() -> str:
    # torchrun may start all processes once more.
    return f"sparse_lightning/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/folder"


def _told(store: TCPStore, decide: Callable[[], Path]) -> Path:
    try:
        folder = decide()
    except ConfigError as error:
        store.set(_key(), f"!{error}")
        raise
    store.set(_key(), f"={folder}")
    return folder


def _heard(store: TCPStore) -> Path:
    answer = store.get(_key()).decode()
    if answer.startswith("!"):
        raise ConfigError(answer[1:])
    return Path(answer[1:])


@contextmanager
def together(folder: Path) -> Iterator[None]:
    """Processes that Lightning starts inside get to know the folder, and end with this one."""
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
    """Remember the processes that a trainer has started: others of the same program work with them too."""
    started = getattr(trainer.strategy.launcher, "procs", [])
    if started:
        _started.append(started)


def end_others(patience: float) -> None:
    """Wait for the processes that were started; those that do not end by themselves are ended."""
    while _started:
        listed = _started.pop()
        processes = list(listed)
        # Lightning kills this process when one of its list has ended with an error, also when this one ends as well.
        listed.clear()
        for process in processes:
            _end(process, patience)


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
