"""Job: what Hydra calls for each run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sparse_lightning.configuration.compose import Composed
from sparse_lightning.configuration.quiet import be_quiet
from sparse_lightning.errors import SparseLightningError

BAD_CONFIG, INTERRUPTED = 2, 130
"""Exit codes."""


def job(trusted: tuple[str, ...]) -> Callable[[DictConfig], float | None]:
    """A function that runs a composed configuration, prints the table, and returns the metric."""

    def run_job(config: DictConfig) -> float | None:
        from sparse_lightning.run import Interrupted, run

        be_quiet()
        part = HydraConfig.get()
        composed = Composed(config, part)  # type: ignore[arg-type]
        try:
            outcome = run(composed.plain(part.runtime.output_dir), trusted)
        except SparseLightningError as error:
            raise SystemExit(refused(error)) from error
        except Interrupted:
            print(f"\nStopped. To go on: sparse-lightning recipe={config.name} ckpt_path=last", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        print(f"\n{outcome.table}\n\nAll files are in {os.path.relpath(outcome.folder)}")
        return outcome.metric

    return run_job


def refused(error: SparseLightningError) -> int:
    """Say what is wrong, in one message; the exit code. `HYDRA_FULL_ERROR=1` shows where it was raised."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    print(f"sparse-lightning: {error}", file=sys.stderr)
    return BAD_CONFIG
