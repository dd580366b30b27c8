"""Job: what Hydra calls for each run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sparse_lightning.configuration.compose import Composed
from sparse_lightning.configuration.first import is_first, let_the_first_speak
from sparse_lightning.configuration.quiet import be_quiet
from sparse_lightning.errors import SparseLightningError

BAD_CONFIG, INTERRUPTED = 2, 130
"""Exit codes."""


def job(trusted: tuple[str, ...]) -> Callable[[DictConfig], float | None]:
    """A function that runs a composed configuration, prints the table, and returns the metric."""

    def run_job(config: DictConfig) -> float | None:
        from sparse_lightning.callbacks.interruption import Interrupted
        from sparse_lightning.run import run

        be_quiet()
        part = HydraConfig.get()
        composed = Composed(config, part)  # type: ignore[arg-type]
        try:
            outcome = run(composed.plain(part.runtime.output_dir), trusted)
        except SparseLightningError as error:
            raise SystemExit(refused(error)) from error
        except Interrupted:
            raise SystemExit(_stopped(list(part.overrides.task))) from None
        if is_first():
            print(f"\n{outcome.table}\n\nAll files are in {os.path.relpath(outcome.folder)}")
        return outcome.metric

    return run_job


def _stopped(typed: list[str]) -> int:
    """Say how to go on; the exit code. Of several processes the first speaks, and the others have done as told."""
    if not is_first():
        return 0
    again = shlex.join([*(line for line in typed if not line.startswith("ckpt_path=")), "ckpt_path=last"])
    print(f"\nStopped. To go on: sparse-lightning {again}", file=sys.stderr)
    return INTERRUPTED


def refused(error: SparseLightningError) -> int:
    """Say what is wrong, in one message, once for all processes; the exit code.

    `HYDRA_FULL_ERROR=1` shows where it was raised.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if is_first():
        print(f"sparse-lightning: {error}", file=sys.stderr)
    else:
        let_the_first_speak()
    return BAD_CONFIG
