"""Processes that start with Lightning and this package imported: forks of a server that imports them once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "lightning",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "sparse_lightning.app.run",
    ]
)


def on_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call a function with its rank and arguments in several processes; an error in one is raised here."""
    torch.multiprocessing.start_processes(work, arguments, ranks, start_method="forkserver")


def start(program: Callable[..., None], *arguments: Any, file: Path) -> Any:
    """Call a function in a process of its own, in a session of its own; return the process.

    Args:
        program: a function of a module; it may start processes.
        *arguments: its arguments.
        file: where its output is written.
    """
    process = FORKED.Process(target=_print_to, args=(file, program, arguments))
    process.start()
    return process


def printed_by(program: Callable[..., None], *arguments: Any, file: Path, seconds: float = 240) -> str:
    """Call a function in a process of its own and return what it printed.

    A function that raises, or does not return in time, fails the test with all that it printed.

    Args:
        program: a function of a module; it may start processes.
        *arguments: its arguments.
        file: where its output is written.
        seconds: the time after which it is ended with all its processes.
    """
    process = start(program, *arguments, file=file)
    process.join(seconds)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        pytest.fail(f"{program.__name__} did not return in {seconds} s:\n{file.read_text()}")
    printed = file.read_text()
    assert process.exitcode == 0, printed
    return printed


def _print_to(file: Path, program: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # its processes can be ended with it
    with file.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    torch.set_num_threads(1)
    program(*arguments)
