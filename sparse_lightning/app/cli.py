"""The entry point: `sparse-lightning recipe=… key=value …`. Help prints at once; torch is imported for runs only."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import FrameType

from sparse_lightning import __version__
from sparse_lightning.app.guide import group_guide, guide
from sparse_lightning.errors import SparseLightningError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    The code is 0, 1 where a file cannot be written, 2 for an invalid configuration, 130 after Ctrl-C, and 143 after
    SIGTERM.
    """
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
        # Local rank 0 handles Ctrl-C, and stops the other ranks between two steps.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log file shows what a run has printed so far
    try:
        code = answer(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head` closes the pipe early, and Python would print an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _exit(number: int, frame: FrameType | None) -> None:
    """Exit at once, without a traceback: outside of training there is nothing to save."""
    loaded = sys.modules.get("sparse_lightning.app.processes")
    if loaded is not None:
        loaded.end_others(0.0)
    os.write(2, b"\nStopped.\n")
    os._exit(128 + number)


def answer(arguments: list[str]) -> int:
    """Run the command line with its arguments; return the exit code."""
    if "--help" in arguments or "-h" in arguments:
        groups = [argument for argument in arguments if not argument.startswith("-") and "=" not in argument]
        print(group_guide(groups[0]) if groups else guide())
        return 0
    if "--version" in arguments:
        print(f"sparse-lightning {__version__}")
        return 0
    # Hydra takes a second to import, which help does not need.
    from sparse_lightning.app.job import print_error, print_failure
    from sparse_lightning.app.launch import launch
    from sparse_lightning.app.show_couplings import show_couplings

    try:
        if "--couplings" in arguments:
            print(show_couplings([argument for argument in arguments if argument != "--couplings"]))
            return 0
        launch(arguments)
    except SparseLightningError as error:
        return print_error(error)
    except OSError as error:
        return print_failure(error)
    return 0
