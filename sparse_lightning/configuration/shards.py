"""Shards: refuse, before training, a model or a checkpoint that does not go with how a trainer spreads weights."""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from sparse_lightning.errors import ConfigError, SparseLightningError
from sparse_lightning.models.sharding import Shardable
from sparse_lightning.strategy import Sharded


def check_model(trainer: L.Trainer, model: L.LightningModule) -> None:
    """Raise `ConfigError` where a model cannot be spread as the trainer's strategy asks for."""
    strategy = trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy):
        return
    name = type(model).__name__
    if not is_overridden("configure_model", model):
        raise ConfigError(f"trainer.strategy: {name} does not shard itself: give it a configure_model, or take ddp")
    if not isinstance(strategy, Sharded):
        return
    try:
        size = strategy.sizes[1]
        if size > 1 and isinstance(model, Shardable):
            model.tensor_plan(size)
    except SparseLightningError as error:
        raise ConfigError(f"trainer.strategy: {error}") from error
    if size > 1 and trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        raise ConfigError(
            "trainer.gradient_clip_val: torch has no norm of gradients that lie on different meshes, as they do with "
            "tensor parallelism: leave it out, or add +trainer.gradient_clip_algorithm=value"
        )


def check_checkpoint(trainer: L.Trainer, path: Path | str | None) -> None:
    """Raise `ConfigError` for a checkpoint that the trainer cannot go on with, or that is more than data.

    Lightning can be told since 2.6 to take checkpoints for data, and to run nothing that stands in them. Here torch
    looks at them first, whatever Lightning is installed; the tensors are not read.
    """
    if path is None:
        return
    in_shards = Path(path).is_dir()
    if in_shards and not isinstance(trainer.strategy, ModelParallelStrategy):
        raise ConfigError(
            f"ckpt_path: {path} is in shards: go on with trainer=fsdp2. With "
            "trainer.strategy.save_distributed_checkpoint=false that writes checkpoints for any trainer"
        )
    try:
        torch.load(Path(path) / "meta.pt" if in_shards else path, map_location="meta", mmap=True, weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        beside = found[1] if found else "something else"
        raise ConfigError(f"ckpt_path: {path} holds more than tensors and plain values: {beside}") from error
    except (RuntimeError, EOFError) as error:
        raise ConfigError(f"ckpt_path: {path} is no checkpoint, or was cut short") from error
