"""The command line: `sparse-lightning recipe=… key=value …`. Help comes at once; torch is imported for runs only."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from sparse_lightning import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0, 2 for a bad configuration, 130 after Ctrl-C."""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
        # Of the processes on a machine the first listens to Ctrl-C, and tells the others between two steps.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = answer(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head` has seen enough, and Python would complain when it closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def answer(arguments: list[str]) -> int:
    """What the command line does with its arguments; the exit code."""
    if "--help" in arguments or "-h" in arguments:
        from sparse_lightning.configuration.guide import group_guide, guide

        groups = [argument for argument in arguments if not argument.startswith("-") and "=" not in argument]
        print(group_guide(groups[0]) if groups else guide())
        return 0
    if "--version" in arguments:
        print(f"sparse-lightning {__version__}")
        return 0
    from sparse_lightning.configuration.job import refused
    from sparse_lightning.configuration.launch import launch
    from sparse_lightning.errors import SparseLightningError

    try:
        launch(arguments)
    except SparseLightningError as error:
        return refused(error)
    return 0
