"""SparsityCallback: a Sparsifier in a Lightning Trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.budgets import Budget
from sparse_lightning.callbacks.averages import averages, copies, keeper_of_averages
from sparse_lightning.callbacks.gradients import needs_masked_gradients
from sparse_lightning.callbacks.ranking import ranking_advice
from sparse_lightning.callbacks.strategy import wrap_again
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compat.lightning import make_loaders_again, state_key
from sparse_lightning.compensation import Compensation
from sparse_lightning.engine.configuration import Update
from sparse_lightning.engine.first_masks import FirstMasks
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import CheckpointError, PatternError
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import Method
from sparse_lightning.patterns import Patterns, as_list
from sparse_lightning.patterns.claims import check_apart
from sparse_lightning.schedules.schedule import Schedule


class SparsityCallback(L.Callback):
    """Trains a model to structured sparsity: structured pruning and sparse training in a Lightning Trainer.

    Blocks are scored and pruned on a schedule, and stay exactly zero after every optimizer step. The model itself is
    not changed: its classes, parameter names, buffers and checkpoints are those of the dense model.

    Args:
        patterns: which parameters are divided into which blocks: a pattern, a list or a mapping of patterns, and of
            blocks and scopes on parameters of the model.
        schedule: the target sparsity at each optimizer step; its floats are fractions of the run. A number is the
            sparsity of a `Constant`.
        criterion: scores the blocks, an object or its name, such as "taylor". The default is `AverageTaylor()`;
            `Magnitude()` if a parameter is frozen; for N:M patterns alone `Wanda()`, or `Magnitude()` if a weight is
            not that of a linear or convolutional layer.
        method: what happens at an update; the default is `Gradual()`.
        budget: splits the target over the scopes; the default is `Uniform()`.
        update_every: the optimizer steps between two updates; None makes about 30 over the schedule.
        seed: of random scores, the same on all ranks.
        lowering: how scores are computed; None chooses the fastest, see `Scorer`.
        observe_every: the optimizer steps between two runs of a criterion that keeps state, such as a moving average:
            it observes gradients at this rhythm, and masks change at updates only. None observes gradients every step
            for a sum over the steps, as `Movement` is, the last steps up to each update for a moving average, which
            starts anew after steps that are passed over, and updates only if the criterion reads none.
        masks: what is pruned from the start: masks by name, as `Sparsifier.masks` has them, or "from weights" for
            the blocks that are zero in a pruned model. None starts dense. A state that is loaded comes first.
        compensation: changes the kept weights at each update that prunes, such as `Refit()`; None for no change.
        shrink: `Shrink()` removes pruned units from the model while it trains; None leaves them where they are, zero.

    Example:
        >>> from sparse_lightning.patterns import Blocks
        >>> from sparse_lightning.schedules import Cubic
        >>> callback = SparsityCallback([Blocks("*.mlp.*.weight", shape=(32, 32))], Cubic(final=0.9))
        >>> trainer = L.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        patterns: Patterns,
        schedule: Schedule | float,
        criterion: Criterion | str | None = None,
        method: Method | str | None = None,
        budget: Budget | str | None = None,
        update_every: int | None = None,
        seed: int = 0,
        lowering: str | None = None,
        observe_every: int | None = None,
        masks: FirstMasks = None,
        compensation: Compensation | None = None,
        shrink: Shrink | None = None,
    ) -> None:
        parts = schedule, criterion, method, budget
        rhythm = update_every, seed, lowering, observe_every
        self.sparsifier = Sparsifier(patterns, *parts, *rhythm, masks, compensation, shrink)
        self._was_loaded = False
        self._logged: Update | None = None
        self._finished_at: int | None = None
        self._has_advised = False
        self._resizes = 0

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Raise: this is the first call of a `transformers.Trainer`, never one of Lightning's."""
        raise PatternError(
            "SparsityCallback is a callback of Lightning, and a transformers.Trainer has called it: pass it "
            "sparse_lightning.callbacks.HuggingFaceCallback, which takes the same arguments"
        )

    @property
    def state_key(self) -> str:
        """The key of the state in checkpoints: unique to the patterns, since a trainer can have several callbacks."""
        return state_key(self, patterns=[str(pattern) for pattern in as_list(self.sparsifier.configuration.patterns)])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise `PatternError` for strategies that flatten parameters."""
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            raise PatternError(
                f"{type(trainer.strategy).__name__} flattens parameters, which hides the blocks in them: use "
                "ModelParallelStrategy (FSDP2) or DDPStrategy"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach to the model: now its parameters and optimizers are final."""
        if trainer.limit_train_batches == 0 or trainer.max_steps == 0:
            return  # no training
        if trainer.global_step == 0 and not self._was_loaded:
            self.sparsifier.rewind()
        self._was_loaded = False
        self._prepare_shrink(trainer, pl_module)
        steps = trainer.estimated_stepping_batches  # inf or −1 if it is unknown
        self.sparsifier.attach(pl_module, trainer.optimizers, int(steps) if 0 <= steps < math.inf else None)
        self._check_others(trainer)
        self._advise(trainer)
        make_loaders_again(trainer)
        rank_zero_info(self.summary())

    def _prepare_shrink(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise a PatternError if copies of the model would stay whole; note whether DDP can wrap the model again."""
        self.sparsifier.wraps_again = isinstance(trainer.strategy, DDPStrategy)
        self._resizes = 0
        keeper = keeper_of_averages(trainer, pl_module) if self._shrinks else None
        if keeper is not None:
            raise PatternError(
                f"shrink cannot be used with averages of the weights or other copies of the model, and {keeper} keeps "
                "one: they are of the whole model. Remove them, or shrink"
            )

    @property
    def _shrinks(self) -> bool:
        return self.sparsifier.configuration.shrink is not None

    def _follow_sizes(self, trainer: L.Trainer) -> None:
        """Wrap the model again for DDP, if parameters have got another size since the last call."""
        if self.sparsifier.is_attached and self.sparsifier.resizes != self._resizes:
            self._resizes = self.sparsifier.resizes
            wrap_again(trainer.strategy)

    def summary(self) -> str:
        """Return what is logged when training starts: what is in force, and a table of what is attached."""
        return self.sparsifier.summary()

    def _check_others(self, trainer: L.Trainer) -> None:
        for other in self._ours(trainer):
            if other is not self:
                check_apart(self.sparsifier.attachments, other.sparsifier.attachments)

    def _advise(self, trainer: L.Trainer) -> None:
        """Warn once of callbacks that compare dense with sparse states, if the target changes in this run."""
        if not self._has_advised and self.sparsifier.target < self.sparsifier.final_target:
            self._has_advised = True
            for text in ranking_advice(trainer.callbacks):  # type: ignore[attr-defined]
                rank_zero_warn(text)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Update the masks, and mask the gradients: they are unscaled and not yet clipped."""
        self.sparsifier.update(optimizer)
        others = [c for c in trainer.callbacks if not isinstance(c, SparsityCallback)]  # type: ignore[attr-defined]
        if needs_masked_gradients(trainer, pl_module, optimizer, others):
            self.sparsifier.mask_gradients(optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Make the last update if the run ends here, before checkpoints are saved; log the last update."""
        self._follow_sizes(trainer)
        if ends_here(trainer):
            self._finish(trainer)
        update = self.sparsifier.last_update
        if update is None or update == self._logged:
            return
        self._logged = update
        group = self._group(trainer)
        shown = {f"{group}/target": update.target, f"{group}/actual": self.sparsifier.sparsity()}
        patterns = {f"{group}/{name}": sparsity for name, sparsity in self.sparsifier.sparsities().items()}
        others = {**patterns, f"{group}/churn": update.churn}
        pl_module.log_dict(shown, prog_bar=True, logger=False)
        pl_module.log_dict(others, logger=False)
        # `log` writes to the loggers every n-th batch only, and an update may be at another.
        for logger in trainer.loggers:
            logger.log_metrics({**shown, **others}, step=update.step)

    def _group(self, trainer: L.Trainer) -> str:
        """Return the prefix of logged names: "sparsity", "sparsity_2" for the second callback of a trainer."""
        number = 1 + self._ours(trainer).index(self)
        return "sparsity" if number == 1 else f"sparsity_{number}"

    @staticmethod
    def _ours(trainer: L.Trainer) -> list[SparsityCallback]:
        return [c for c in trainer.callbacks if isinstance(c, SparsityCallback)]  # type: ignore[attr-defined]

    def _hold(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Zero the pruned blocks of the model and of its averages, since other callbacks may swap them at any time."""
        if not self.sparsifier.is_attached:
            return  # validating or saving outside of a fit: no optimizer step has changed the weights
        self.sparsifier.hold()
        self._hold_copies(trainer, pl_module)

    def _hold_copies(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # While units are removed, a copy that is not an average is a smaller model of its own.
        for copy in (averages if self._shrinks else copies)(trainer, pl_module):
            self.sparsifier.mask_copy(copy)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Zero the pruned blocks of loaded weights; join a run that started without this callback at its step."""
        if trainer.global_step > 0 and self.sparsifier.step == 0 and pl_module.automatic_optimization:
            self.sparsifier.seek(trainer.global_step)
        self._logged, self._finished_at = self.sparsifier.last_update, None
        self._hold(trainer, pl_module)
        self._follow_sizes(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Zero the pruned blocks: SWA may have copied its average to the weights."""
        self._hold(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Zero the pruned blocks: an average may have been updated."""
        self._hold(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Zero the pruned blocks: an average may have been swapped in."""
        self._hold(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Zero the pruned blocks: EMA swaps its average in."""
        self._hold(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the last update if it is due; zero the pruned blocks: an average may become the weights.

        Units that `shrink` has removed are put back: what follows sees the whole model.
        """
        self._finish(trainer)
        self._hold(trainer, pl_module)
        if self.sparsifier.is_attached:
            self.sparsifier.put_back()

    def _finish(self, trainer: L.Trainer) -> None:
        is_open = self.sparsifier.is_attached and self._finished_at != self.sparsifier.step
        if is_open and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._finished_at = self.sparsifier.step
            self.sparsifier.finish()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Zero the pruned blocks: an average may be saved.

        Weights that are zero there are not written to: a backward pass may follow, which raises an error if they were.
        """
        if not self.sparsifier.is_attached:
            return
        if any(map(holds_weights, self.sparsifier.attachments)):
            self.sparsifier.hold()
        if self._shrinks:
            self.sparsifier.zero_removed()
            _save_again(pl_module, checkpoint["state_dict"])
        self._hold_copies(trainer, pl_module)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise a `CheckpointError` if a run is resumed from a checkpoint with masks for other patterns only."""
        if trainer.state.fn == "fit":
            self.check_saved(trainer, checkpoint)

    def check_saved(self, trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> None:
        """Raise a `CheckpointError` if a checkpoint has masks for other patterns only."""
        kind = self.state_key.partition("{")[0]
        saved = {key for key in checkpoint.get("callbacks", {}) if key.startswith(f"{kind}{{")}
        ours = {callback.state_key for callback in self._ours(trainer)}
        if self.state_key not in saved and saved - ours:
            raise CheckpointError(
                f"the checkpoint has masks of {', '.join(sorted(saved - ours))}, but this callback is "
                f"{self.state_key}: resume with the same patterns; or load the weights only, and pass "
                "masks='from weights' to keep their zeros"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and all other state that is needed to resume."""
        return self.sparsifier.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`: now, or in `on_fit_start`; the order depends on the strategy."""
        self._was_loaded = True
        self.sparsifier.load_state_dict(state_dict)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Zero the pruned blocks, for checkpoints that other callbacks save now, and detach from the model."""
        self._hold(trainer, pl_module)
        self.sparsifier.abandon()  # without communication: other ranks may not have raised

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Detach from the model."""
        self.sparsifier.detach()


def _save_again(pl_module: L.LightningModule, saved: dict[str, Any]) -> None:
    """Replace weights that were saved before pruned ones were zeroed: what has become smaller is saved as a copy."""
    for key, value in pl_module.state_dict().items():
        if key in saved and isinstance(value, Tensor) and saved[key].shape == value.shape:
            saved[key] = value


def holds_weights(scope: MaskedScope) -> bool:
    """Whether a pruned block of a scope is not zero; True where other processes hold parts of the blocks."""
    if any(map(is_sharded, scope.parameters())):
        return True
    pairs = [(block.norms(p=math.inf), scope.live_masks[name]) for name, block in scope.live_blocks.items()]
    return any(bool((norms.ne(0) & mask.to(norms.device)).any()) for norms, mask in pairs)


def ends_here(trainer: L.Trainer) -> bool:
    """Whether the batch that has ended is the last one of the run, as far as its length is known."""
    is_last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
    return trainer.global_step >= trainer.max_steps != -1 or (is_last_epoch and trainer.is_last_batch)
