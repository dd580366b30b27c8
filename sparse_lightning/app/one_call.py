"""OneCall: a callback whose only update is a call of `prune`, layer by layer, on training batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import lightning as L
from lightning.pytorch.utilities.seed import isolate_rng

from sparse_lightning.budgets import Uniform
from sparse_lightning.callbacks.sparsity import SparsityCallback, ends_here
from sparse_lightning.callbacks.strategy import Sharded
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compat.lightning import prepared_batch
from sparse_lightning.compensation import Compensation
from sparse_lightning.criteria import Magnitude
from sparse_lightning.engine.calibration import training_arguments, without_logging
from sparse_lightning.engine.first_masks import FirstMasks
from sparse_lightning.engine.prune import check_prune, prune
from sparse_lightning.errors import ConfigError
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import PruneOnce
from sparse_lightning.patterns import Patterns
from sparse_lightning.schedules import OneShot


class OneCall(SparsityCallback):
    """Trains a model dense, prunes it by one call of `prune`, and holds the masks while the run lasts.

    Args:
        patterns: which parameters are divided into which blocks.
        schedule: the step of the call, and its sparsity.
        batches: how many training batches the model runs on, in each process.
        criterion: scores the blocks; None for the default of `prune`.
        compensation: changes the kept weights; None leaves them as they are.
        seed: of random scores, and of the order of the batches.
        masks: what is pruned from the start, and stays so.
        shrink: removes pruned units from the model while it trains; None leaves them where they are, zero.
    """

    def __init__(
        self,
        patterns: Patterns,
        schedule: OneShot,
        batches: int,
        criterion: Criterion | None = None,
        compensation: Compensation | None = None,
        seed: int = 0,
        masks: FirstMasks = None,
        shrink: Shrink | None = None,
    ) -> None:
        # Its own criterion is never used, and this one observes nothing while the model is trained.
        super().__init__(patterns, schedule, Magnitude(), PruneOnce(), seed=seed, masks=masks, shrink=shrink)
        self._batches, self._seed, self._sparsity, self._at = batches, seed, schedule.final, schedule.at
        self._parts = criterion, compensation

    @property
    def state_key(self) -> str:
        """The key of the state in checkpoints, which are those of a `SparsityCallback`."""
        return super().state_key.replace(type(self).__qualname__, SparsityCallback.__qualname__, 1)

    def summary(self) -> str:
        """Return what is logged when training starts."""
        parts = " and ".join(type(part).__name__ for part in self._parts if part is not None)
        where = f"before step {self._at}" if isinstance(self._at, int) else f"after {self._at:.0%} of the run"
        table = self.sparsifier.summary().partition("\n")[2]
        return f"prune{parts and f' by {parts}'}, on {self._batches} training batches: {where}\n{table}"

    def check(self, model: L.LightningModule, trainer: L.Trainer) -> None:
        """Raise an error if `prune` could not prune a model, before it is trained."""
        if isinstance(trainer.strategy, Sharded) and trainer.strategy.sizes[1] > 1:
            raise ConfigError(
                "trainer.strategy: tensor parallelism shards the inputs of layers, and prune needs whole ones: use "
                "trainer=fsdp2, or calibration_batches=null compensation=none to prune in the course of training"
            )
        training_arguments(model, None)
        check_prune(model, self.sparsifier.configuration.patterns, *self._parts)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Prune before the step at which the schedule has its update."""
        self._prune_if_due(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Prune if the update is after the last step; log it."""
        if ends_here(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._prune_if_due(trainer, pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _prune_if_due(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        if not self.sparsifier.is_due:
            return
        self.sparsifier.put_back()
        self._follow_sizes(trainer)
        batches = training_batches(trainer, self._batches, self._seed)

        def step(model: Any, batch: Any) -> Any:
            return trainer.strategy.training_step(*training_arguments(model, batch))

        with without_logging(model):
            patterns, progress = self.sparsifier.configuration.patterns, trainer.progress_bar_callback is not None
            prune(model, patterns, self._sparsity, batches, *self._parts, step, self._seed, progress)


def training_batches(trainer: L.Trainer, count: int, seed: int) -> list[Any]:
    """Return training batches of this process, as `training_step` gets them; other processes get others.

    They come from a loader of their own and leave all random number generators as they are, so that training continues
    with the batches that it would have had.
    """
    source = trainer.datamodule or trainer.lightning_module  # type: ignore[attr-defined]
    with isolate_rng():
        L.seed_everything(seed, workers=True, verbose=False)
        loader = source.train_dataloader()
        if isinstance(loader, list | tuple | Mapping):
            raise ConfigError(
                f"calibration_batches: {type(source).__name__} has several training loaders, and prune needs one: set "
                "calibration_batches=null to prune by the batches of the training itself"
            )
        rank, size = trainer.global_rank, trainer.world_size
        return [prepared_batch(trainer, batch) for batch in islice(loader, rank, rank + count * size, size)]


def check_options(made: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that would do nothing in a run that is pruned by one call.

    Args:
        made: the objects of a SparsityCallback by group.
        settings: the keys of the configuration.
    """
    schedule, method, budget = (made[name] for name in ("schedule", "method", "budget"))
    otherwise = "or calibration_batches=null to prune in the course of training"
    if not isinstance(schedule, OneShot):
        raise ConfigError(
            f"schedule: {type(schedule).__name__} has more than one update, and calibration_batches prunes by one "
            f"call: choose schedule=one_shot, {otherwise}"
        )
    if type(method) is not PruneOnce:
        raise ConfigError(
            f"method: {type(method).__name__} would do nothing, since calibration_batches prunes by one call: choose "
            f"method=one_shot, {otherwise}"
        )
    if budget != Uniform():
        raise ConfigError(
            "budget: only budget=uniform without other values is used, since calibration_batches prunes one scope "
            f"after the other, each to schedule.final: choose it, {otherwise}"
        )
    for name in ("update_every", "observe_every"):
        if settings[name] is not None:
            raise ConfigError(
                f"{name}: {settings[name]} would do nothing, since calibration_batches prunes by one call: leave it "
                f"null, {otherwise}"
            )
