"""HuggingFaceCallback: a Sparsifier in a `transformers.Trainer`. Importing it needs the extra `hf`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sparse_lightning.blocks.shards import is_rank_zero
from sparse_lightning.budgets import Budget
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compat.accelerate import BeforeClipping
from sparse_lightning.compensation import Compensation
from sparse_lightning.engine.configuration import Update
from sparse_lightning.engine.first_masks import FirstMasks
from sparse_lightning.engine.optimizer_scopes import innermost
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import CheckpointError, SparseLightningError
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import Method
from sparse_lightning.patterns import Patterns
from sparse_lightning.schedules.schedule import Schedule

STATE_FILE = "sparsity.pt"
"""The file in a checkpoint folder with the masks and the position in the schedule."""


class HuggingFaceCallback(TrainerCallback):
    """Trains a model to structured sparsity in a `transformers.Trainer`, or in a trainer of TRL.

    It does what `SparsityCallback` does in Lightning: masks are updated before gradients are clipped, pruned blocks are
    zero after every optimizer step, checkpoints contain the masks, and a resumed run continues where it was. In a loop
    with Accelerate, call `attach` and `detach`.

    Args:
        patterns: which parameters are divided into which blocks.
        schedule: the target sparsity at each optimizer step; floats are fractions of the run.
        criterion: scores the blocks; the defaults are those of `Sparsifier`.
        method: what happens at an update; the default is `Gradual()`.
        budget: splits the target over the scopes; the default is `Uniform()`.
        update_every: the optimizer steps between two updates; None makes about 30 over the schedule.
        seed: of random scores, the same on all ranks.
        lowering: how scores are computed; None chooses the fastest, see `Scorer`.
        observe_every: the optimizer steps between two runs of a criterion that keeps state, see `Sparsifier`.
        masks: what is pruned from the start, such as the result of `prune`, see `Sparsifier`.
        compensation: changes the kept weights at each update that prunes, such as `Refit()`; None for no change.
        shrink: `Shrink()` removes pruned units from the model while it trains; None leaves them where they are, zero.

    Attributes:
        sparsifier: does the work, and has the masks.

    Example:
        >>> from sparse_lightning import Cubic, Neurons
        >>> neurons = Neurons("*.mlp.up_proj", "*.mlp.down_proj", gate="*.mlp.gate_proj")
        >>> callback = HuggingFaceCallback([neurons], Cubic(final=0.5, end=0.6))
        >>> callback.sparsifier.is_attached  # attached by Trainer(model, args, callbacks=[callback]).train()
        False
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
        self._clipping: BeforeClipping | None = None
        self._logged: Update | None = None
        self._loaded_at: int | None = None
        self._is_finished = False

    def attach(self, model: nn.Module, optimizer: Optimizer, total_steps: int | None = None) -> None:
        """Start to prune a model, or resume: what the Trainer does when training begins, for a loop with Accelerate.

        Args:
            model: as `Accelerator.prepare` returned it.
            optimizer: the same.
            total_steps: the length of the run, for schedules in fractions of it.
        """
        self.sparsifier.attach(model, optimizer, total_steps)
        inner = innermost(optimizer)
        self._clipping = BeforeClipping(inner, lambda: self.sparsifier.before_step(inner))
        self._logged, self._is_finished = self.sparsifier.last_update, False

    def detach(self) -> None:
        """Remove the hooks and leave the model as it is; all ranks must call it."""
        self._release()
        self.sparsifier.detach()

    def _release(self) -> None:
        if self._clipping is not None:
            self._clipping.remove()
            self._clipping = None

    def load(self, checkpoint: str | Path) -> None:
        """Load the masks and the position in the schedule from a checkpoint folder.

        A Trainer that resumes from a folder below its `output_dir`, or from `args.resume_from_checkpoint`, needs no
        call. Call it before `train(resume_from_checkpoint=...)` with another folder.
        """
        state = torch.load(_existing(Path(checkpoint)), map_location="cpu", weights_only=True)
        self._loaded_at = int(state["step"])
        self.sparsifier.load_state_dict(state["sparsifier"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model, or resume: its parameters and optimizer are final now."""
        if args.torch_compile and self.sparsifier.configuration.shrink is not None:
            raise SparseLightningError(
                "shrink cannot be used with torch_compile=True, which would compile the model again for each size that "
                "units are removed to: train without torch_compile, or without shrink"
            )
        self._release()
        self.sparsifier.abandon()  # after a run that ended by an error
        if state.global_step == 0:
            self.sparsifier.rewind()
        elif self._loaded_at is None:
            self.load(_folder(args, state.global_step))
        if state.global_step and self._loaded_at != state.global_step:
            raise CheckpointError(
                f"the masks are those of step {self._loaded_at}, but the run resumes at step {state.global_step}: call "
                "load() of the callback with the folder that the run resumes from"
            )
        self._loaded_at = None
        self.attach(kwargs["model"], kwargs["optimizer"], state.max_steps if state.max_steps > 0 else None)
        rank_zero_info(self.sparsifier.summary())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the masks where gradients are not clipped, and no action before clipping has done it."""
        self.sparsifier.update(kwargs["optimizer"])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the last update if the run ends here: the gradients are still there, and the checkpoint is not saved."""
        if state.global_step + 1 >= state.max_steps:
            self._finish()

    def _finish(self) -> None:
        if self.sparsifier.is_attached and not self._is_finished:
            self._is_finished = True
            self.sparsifier.finish()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add an update to the history of logs."""
        update = self.sparsifier.last_update
        if update is not None and update != self._logged:
            self._logged = update
            state.log_history.append({"epoch": state.epoch, "step": state.global_step, **self._values(update)})

    def _values(self, update: Update) -> dict[str, float]:
        patterns = {f"sparsity/{name}": sparsity for name, sparsity in self.sparsifier.sparsities().items()}
        shown = {"sparsity/target": update.target, "sparsity/actual": self.sparsifier.sparsity()}
        return {**shown, **patterns, "sparsity/churn": update.churn}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the sparsity to what is logged: callbacks that are listed after this one, and the progress bar, show it.

        A reporter of `report_to` comes before all callbacks: list it after this one to see the sparsity there.
        """
        update = self.sparsifier.last_update if self.sparsifier.is_attached else None
        if logs is not None and update is not None and "loss" in logs:
            logs |= self._values(update)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add masks and state to the checkpoint; the file is complete or does not exist."""
        content = {"step": state.global_step, "sparsifier": self.sparsifier.state_dict()}
        if is_rank_zero():
            file = _saved_at(args, state.global_step) / STATE_FILE
            partial = file.with_suffix(".partial")
            torch.save(content, partial)
            os.replace(partial, file)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the last update if it is due, zero the pruned blocks, and detach from the model."""
        self._finish()
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._take_best(Path(state.best_model_checkpoint))
        self.sparsifier.hold()
        self.detach()

    def _take_best(self, checkpoint: Path) -> None:
        """Take the masks of the checkpoint whose weights the Trainer has loaded."""
        final = self.sparsifier.final_target
        self.load(checkpoint)
        self._loaded_at = None
        update = self.sparsifier.last_update
        if (update is None or update.target < final) and is_rank_zero():
            warnings.warn(
                f"{checkpoint.name}, the best checkpoint, was saved before the final sparsity {final:.4g} was reached: "
                "its model is denser. Let the schedule end before the first evaluation, or set "
                "load_best_model_at_end=False",
                stacklevel=2,
            )


def _folder(args: TrainingArguments, step: int) -> Path:
    """Return the folder that a run resumes from, as far as its arguments tell."""
    named = args.resume_from_checkpoint
    return Path(named) if isinstance(named, str) and Path(named).is_dir() else _saved_at(args, step)


def _saved_at(args: TrainingArguments, step: int) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{step}"


def _existing(checkpoint: Path) -> Path:
    file = checkpoint / STATE_FILE
    if not file.exists():
        raise CheckpointError(
            f"{checkpoint} has no {STATE_FILE}: it was saved without a HuggingFaceCallback, or saving was interrupted. "
            "Resume from another checkpoint; for one outside of output_dir, call load() of the callback with its folder"
        )
    return file
