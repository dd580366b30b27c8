"""SparsityCallback: a Sparsifier in a Lightning Trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from sparse_lightning.budgets import Budget
from sparse_lightning.callbacks.averages import averages
from sparse_lightning.callbacks.gradients import gradients_meet
from sparse_lightning.errors import PatternError
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import Method
from sparse_lightning.patterns import Pattern
from sparse_lightning.patterns.claims import check_apart
from sparse_lightning.schedule import Schedule
from sparse_lightning.settings import Update
from sparse_lightning.sparsifier import Sparsifier


class SparsityCallback(L.Callback):
    """Trains the model of a Trainer to structured sparsity.

    Blocks are scored and pruned on a schedule, and stay exactly zero after every optimizer step. The model itself is
    not changed: its classes, parameter names, buffers and checkpoints are those of the plain model.

    Args:
        patterns: which parameters are cut into which blocks.
        schedule: the target sparsity at each optimizer step; floats are parts of the run.
        criterion: scores the blocks; the default is the magnitude.
        method: what happens at an update; the default prunes gradually.
        budget: splits the target over the layers; the default gives each the same.
        update_every: the optimizer steps between two updates.
        seed: of random scores, the same on all ranks.
        lowering: how scores are computed; None chooses what is fastest.

    Example:
        >>> from sparse_lightning.patterns import Blocks
        >>> from sparse_lightning.schedules import Cubic
        >>> callback = SparsityCallback([Blocks("*.mlp.*.weight", shape=(32, 32))], Cubic(final=0.9, end=0.7))
        >>> trainer = L.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        schedule: Schedule,
        criterion: Criterion | None = None,
        method: Method | None = None,
        budget: Budget | None = None,
        update_every: int = 100,
        seed: int = 0,
        lowering: str | None = None,
    ) -> None:
        self.sparsifier = Sparsifier(patterns, schedule, criterion, method, budget, update_every, seed, lowering)
        self._was_loaded = False
        self._logged: Update | None = None

    @property
    def state_key(self) -> str:
        """Another one for each set of patterns, so that several callbacks can work on one model."""
        return self._generate_state_key(patterns=[str(pattern) for pattern in self.sparsifier.settings.patterns])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse strategies that hide the layout of parameters."""
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            raise PatternError(
                f"{type(trainer.strategy).__name__} flattens parameters, which hides the blocks in them: use "
                "ModelParallelStrategy (FSDP2) or DDPStrategy"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attach: parameters and optimizers are final, and a checkpoint's state is loaded or will be."""
        if trainer.limit_train_batches == 0 or trainer.max_steps == 0:
            return  # nothing is trained
        if trainer.global_step == 0 and not self._was_loaded:
            self.sparsifier.rewind()
        self._was_loaded = False
        steps = trainer.estimated_stepping_batches  # inf, or −1, where nobody knows
        self.sparsifier.attach(pl_module, trainer.optimizers, int(steps) if 0 <= steps < math.inf else None)
        self._check_others(trainer)
        rank_zero_info(self.sparsifier.summary())

    def _check_others(self, trainer: L.Trainer) -> None:
        for other in self._ours(trainer):
            if other is not self:
                check_apart(self.sparsifier.attachments, other.sparsifier.attachments)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Gradients are unscaled and not yet clipped: dead weights must not count when they are."""
        self.sparsifier.update(optimizer)
        others = [c for c in trainer.callbacks if not isinstance(c, SparsityCallback)]  # type: ignore[attr-defined]
        if gradients_meet(trainer, pl_module, optimizer, others):
            self.sparsifier.mask_gradients(optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log an update."""
        update = self.sparsifier.last_update
        if update is None or update == self._logged:
            return
        self._logged = update
        group = self._group(trainer)
        shown = {f"{group}/target": update.target, f"{group}/actual": self.sparsifier.sparsity()}
        patterns = {f"{group}/{name}": share for name, share in self.sparsifier.sparsities().items()}
        others = {**patterns, f"{group}/churn": update.churn}
        pl_module.log_dict(shown, prog_bar=True, logger=False)
        pl_module.log_dict(others, logger=False)
        # `log` reaches the loggers at every n-th batch only, and an update may fall between.
        for logger in trainer.loggers:
            logger.log_metrics({**shown, **others}, step=update.step)

    def _group(self, trainer: L.Trainer) -> str:
        """Where this callback logs: "sparsity", and "sparsity_2" for the second of a trainer."""
        number = 1 + self._ours(trainer).index(self)
        return "sparsity" if number == 1 else f"sparsity_{number}"

    @staticmethod
    def _ours(trainer: L.Trainer) -> list[SparsityCallback]:
        return [c for c in trainer.callbacks if isinstance(c, SparsityCallback)]  # type: ignore[attr-defined]

    def _hold(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hold the model and the averages of it: whichever is swapped in, in whatever order callbacks run."""
        if not self.sparsifier.is_attached:
            return  # validation or saving outside of a fit: no step has changed the weights
        self.sparsifier.hold()
        for average in averages(trainer, pl_module):
            self.sparsifier.mask_copy(average)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Weights may have been loaded, and the run may have begun without this callback."""
        if trainer.global_step > 0 and self.sparsifier.step == 0 and pl_module.automatic_optimization:
            self.sparsifier.seek(trainer.global_step)
        self._logged = self.sparsifier.last_update
        self._hold(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """SWA may take its average for the weights."""
        self._hold(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An average may be updated."""
        self._hold(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An average may be swapped in."""
        self._hold(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """EMA swaps its average in."""
        self._hold(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Averages become the weights."""
        self._hold(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """What is saved may be an average."""
        self._hold(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The masks and all that a resume needs."""
        return self.sparsifier.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Taken up when attached; with some strategies that is before."""
        self._was_loaded = True
        self.sparsifier.load_state_dict(state_dict)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the model. What others save after this has its pruned blocks at zero already."""
        self._hold(trainer, pl_module)
        self.sparsifier.abandon()  # other ranks may not have had the exception

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the model."""
        self.sparsifier.detach()
