"""Shards: check, before training, that the model and the checkpoint fit the trainer's strategy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from sparse_lightning.callbacks import SparsityCallback
from sparse_lightning.callbacks.strategy import Sharded
from sparse_lightning.errors import CheckpointError, ConfigError, SparseLightningError, UntrustedError
from sparse_lightning.models.sharding import Shardable


def check_model(trainer: L.Trainer, model: L.LightningModule) -> None:
    """Raise `ConfigError` where a model cannot be sharded by the trainer's strategy."""
    strategy = trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy):
        return
    name = type(model).__name__
    if not is_overridden("configure_model", model):
        raise ConfigError(
            f"trainer.strategy: {name} has no configure_model to shard itself: add one, or use trainer=ddp"
        )
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
            f"trainer.gradient_clip_val: {trainer.gradient_clip_val} clips by norm, which torch cannot compute with "
            "tensor parallelism: remove it, or add +trainer.gradient_clip_algorithm=value"
        )


def check_checkpoint(trainer: L.Trainer, model: L.LightningModule, path: Path | str | None) -> None:
    """Raise `ConfigError` for a checkpoint that the trainer cannot resume, or that holds more than data.

    Lightning loads checkpoints as data since 2.6. Here torch does so first, with any Lightning; tensors are not read.

    Raises:
        CheckpointError: for a checkpoint of another model.
    """
    if path is None:
        return
    in_shards = Path(path).is_dir()
    if in_shards and not isinstance(trainer.strategy, ModelParallelStrategy):
        raise ConfigError(
            f"ckpt_path: {path} is sharded, so only trainer=fsdp2 can resume from it: use that trainer. To write "
            "checkpoints for any trainer, set trainer.strategy.save_distributed_checkpoint=false"
        )
    try:
        file = Path(path) / "meta.pt" if in_shards else path
        saved = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        extra = found[1] if found else "something else"
        raise ConfigError(
            f"ckpt_path: {path} holds more than tensors and plain values: {extra}. Use another checkpoint"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ConfigError(f"ckpt_path: {path} is not a checkpoint, or is truncated: use another one") from error
    if not in_shards and not is_overridden("on_load_checkpoint", model):
        _check_weights(saved.get("state_dict", {}), model, path)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SparsityCallback):
            callback.check_saved(trainer, saved)


def _check_weights(saved: Mapping[str, Tensor], model: L.LightningModule, path: Path | str) -> None:
    """Raise `CheckpointError` where the weights of a checkpoint are not those of a model."""
    own, name = model.state_dict(), type(model).__name__
    shapes = {key: tuple(weight.shape) for key, weight in own.items() if not isinstance(weight, UninitializedParameter)}
    wrong = [key for key, shape in shapes.items() if key in saved and tuple(saved[key].shape) != shape]
    what = ""
    if wrong:
        more = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        what = f"{wrong[0]} of shape {tuple(saved[wrong[0]].shape)}, and {name} one of {shapes[wrong[0]]}{more}"
    elif model.strict_loading and (isinstance(model, Shardable) or not is_overridden("configure_model", model)):
        unknown, missing = (sorted(set(a) - set(b)) for a, b in ((saved, own), (own, saved)))
        what = f"{unknown[0]}, which {name} does not have" if unknown else ""
        what = what or (f"no {missing[0]}, which {name} has" if missing else "")
    if what:
        raise CheckpointError(f"ckpt_path: {path} has {what}: resume with the model and the sizes of the saved run")


def check_word(path: Path | str | None, is_trusted: bool) -> None:
    """Raise `UntrustedError` for a sharded checkpoint without the user's word: torch unpickles its `.metadata`.

    Args:
        path: the checkpoint; None for none.
        is_trusted: whether the user has typed `trust_checkpoint=true`.
    """
    if path is not None and Path(path).is_dir() and not is_trusted:
        raise UntrustedError(
            f"ckpt_path: {path} is sharded, and its .metadata is a pickle, which can run any code. If you trust where "
            "it comes from, add trust_checkpoint=true to the command line"
        )
