"""Job: what Hydra calls for each run."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sparse_lightning.app.check import check
from sparse_lightning.app.compose import Composed
from sparse_lightning.app.folders import has_shards
from sparse_lightning.app.overrides import shortened
from sparse_lightning.app.paths import check_read
from sparse_lightning.app.quiet import be_quiet
from sparse_lightning.app.rank_zero import await_rank_zero, is_rank_zero
from sparse_lightning.app.resources import check_resources
from sparse_lightning.app.typed import Typed, check_typed
from sparse_lightning.errors import SparseLightningError

if TYPE_CHECKING:
    from sparse_lightning.app.run import PreparedRun

FAILED, BAD_CONFIG = 1, 2
"""Exit codes; a run that a signal has stopped exits with 128 and its number."""

_OF_FILES = (
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ENAMETOOLONG,
    errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
)  # fmt: skip
"""What a disk or a folder may refuse; other errors of the system are reported with their traceback."""

LONGEST = 2_000
"""Characters of the message of an error: a value in it may be of any length."""


class Job:
    """Train the run of a composed configuration, print its table, and return its metric.

    Args:
        typed: the overrides of the command line.
        take: returns the run that was prepared for a configuration. Without one the run is checked and prepared
            here: so it is where a launcher has sent the job to another process, or a sweeper has chosen the values.
    """

    def __init__(self, typed: Typed, take: Callable[[Composed], PreparedRun | None] = lambda composed: None) -> None:
        self._typed, self._take = typed, take

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (self._typed,)

    def __call__(self, config: DictConfig) -> float | None:
        """Run the configuration; Hydra has set up its own settings and the folder."""
        # Torch is imported when a job runs, not to start the command line.
        from sparse_lightning.callbacks.interruption import Interrupted

        be_quiet()
        composed = Composed(config, HydraConfig.get())  # type: ignore[arg-type]
        try:
            result = self._prepared(composed).train()
        except SparseLightningError as error:
            raise SystemExit(print_error(error)) from error
        except Interrupted as stopped:
            raise SystemExit(_stopped(composed, stopped.exit_code)) from None
        except OSError as error:
            raise SystemExit(print_failure(error)) from None
        if is_rank_zero():
            folder = os.path.relpath(result.folder)
            print(f"\n{result.table}\n\nAll files are in {folder}\nReport: {os.path.join(folder, 'report.html')}")
        return result.metric

    def _prepared(self, composed: Composed) -> PreparedRun:
        # As above: it imports torch.
        from sparse_lightning.app.run import PreparedRun

        folder, found = composed.hydra.runtime.output_dir, self._take(composed)
        if found is None:
            config = composed.plain(folder)
            check_typed(config, composed.raw, self._typed)
            check(config, self._typed.trusted)
            check_read(config, self._typed)
            check_resources(config, self._typed)
            return PreparedRun(config, self._typed.trusted)
        return found if found.config["folder"] == folder else found.moved_to(composed.plain(folder))


def _stopped(composed: Composed, exit_code: int) -> int:
    """Print how to resume, on rank 0; return the exit code."""
    if not is_rank_zero():
        return 0
    typed = [line for line in composed.overrides if not line.startswith(("ckpt_path=", "trust_checkpoint="))]
    word = ["trust_checkpoint=true"] if has_shards(Path(composed.hydra.runtime.output_dir)) else []
    again = shlex.join([*typed, "ckpt_path=last", *word])
    print(f"\nStopped. To resume: sparse-lightning {again}", file=sys.stderr)
    return exit_code


def print_error(error: SparseLightningError) -> int:
    """Print what is wrong, in one message, on rank 0; return the exit code.

    `HYDRA_FULL_ERROR=1` shows the traceback.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if is_rank_zero():
        print(f"sparse-lightning: {shortened(' '.join(str(error).split()), LONGEST)}", file=sys.stderr)
    else:
        await_rank_zero()
    return BAD_CONFIG


def print_failure(error: OSError) -> int:
    """Print, on rank 0, which file cannot be written or read, and why; return the exit code.

    Raises:
        OSError: the error itself if it is not about a file, or `HYDRA_FULL_ERROR=1` requests the traceback.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1" or error.errno not in _OF_FILES:
        raise error
    if is_rank_zero():
        file = error.filename2 or error.filename or "a file of the run"
        advice = "Check permissions and free space, then resume by ckpt_path=last"
        print(f"sparse-lightning: {file}: {error.strerror}. {advice}", file=sys.stderr)
    else:
        await_rank_zero()
    return FAILED
