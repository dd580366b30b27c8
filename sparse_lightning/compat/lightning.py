"""Private names of Lightning, and public ones of private classes."""

from __future__ import annotations

from subprocess import Popen
from typing import Any

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy


def set_mesh_sizes(strategy: ModelParallelStrategy, data_parallel: int, tensor_parallel: int) -> None:
    """Set the sizes of the device mesh, before the processes are set up.

    The constructor takes them too, but before the number of processes is known.
    """
    strategy._data_parallel_size, strategy._tensor_parallel_size = data_parallel, tensor_parallel


def prepared_batch(trainer: L.Trainer, batch: Any) -> Any:
    """Return a batch as `training_step` gets it: converted, on the device, and through the hooks of both."""
    model = trainer.lightning_module
    batch = model._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def started_processes(trainer: L.Trainer) -> list[Popen[bytes]]:
    """Return Lightning's own list of the processes that it has started for a trainer."""
    started: list[Popen[bytes]] = getattr(trainer.strategy.launcher, "procs", [])
    return started


def state_key(callback: L.Callback, **data: object) -> str:
    """Return the key of a callback's state in checkpoints: its class and data that tells instances apart."""
    return callback._generate_state_key(**data)


def make_loaders_again(trainer: L.Trainer) -> None:
    """Let loaders with a state be made again when training starts, if a run is resumed.

    To count the steps of a run, Lightning makes its loaders before it has read their states from the checkpoint, and
    does not give these to them any more: an epoch would begin anew in its middle.
    """
    loop = trainer.fit_loop
    made = loop._combined_loader
    if trainer.ckpt_path is not None and made is not None and made._state_dicts():
        made.reset()
        loop._combined_loader = None


def accumulates(trainer: L.Trainer) -> bool:
    """Whether the last batch made no optimizer step, so that gradients wait for the next one."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validates_next(trainer: L.Trainer) -> bool:
    """Whether a validation follows the batch that ends."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None, "the batch was fetched"
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
