"""The entry point: `sparse-lightning recipe=… key=value …`. Help prints at once; torch is imported for runs only."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from sparse_lightning import __version__
from sparse_lightning.app.guide import group_guide, guide
from sparse_lightning.errors import SparseLightningError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: with 0, 2 for an invalid configuration, 130 after Ctrl-C."""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
        # Local rank 0 handles Ctrl-C, and stops the other ranks between two steps.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = answer(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head` closes the pipe early, and Python would print an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


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
    from sparse_lightning.app.job import print_error
    from sparse_lightning.app.launch import launch

    try:
        launch(arguments)
    except SparseLightningError as error:
        return print_error(error)
    return 0
