"""History: a callback that records sparsity, training loss and metrics over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from torch import Tensor

from sparse_lightning.errors import SparsityError
from sparse_lightning.report.metric_record import MetricRecord
from sparse_lightning.report.outcome import weighted_mean
from sparse_lightning.report.results_table import shown_metrics
from sparse_lightning.report.trainer_objects import attached_sparsifiers, logged_metrics


class History(L.Callback):
    """Records the sparsity at the start, at each update and at the end, the training loss, and validation metrics.

    The record is saved in checkpoints, and a resumed run continues it. Whenever there are more than `points` losses,
    every second one is dropped, and from then on half as many are recorded. So it is with the values of each metric.

    Args:
        points: the maximum number of losses, and of values of each metric, to keep.

    Attributes:
        steps: the number of optimizer steps at the start, at each update, and at the end.
        target: the target sparsity of the schedule at `steps`.
        actual: the sparsity counted from the weights at `steps`.
        loss_steps: the number of optimizer steps at each recorded loss.
        loss: the training loss at `loss_steps`.
        metrics: for each metric, the number of optimizer steps at the end of a validation, and the value.
    """

    steps: list[int]
    target: list[float]
    actual: list[float]
    loss_steps: list[int]
    loss: list[float]
    metrics: dict[str, MetricRecord]

    def __init__(self, points: int = 500) -> None:
        if points < 2:
            raise SparsityError(f"points={points} of History is too small: it must be at least 2")
        self.points = points
        self._was_loaded = False
        self.clear()

    def clear(self) -> None:
        """Delete the record."""
        self.steps, self.target, self.actual, self.loss_steps, self.loss = [], [], [], [], []
        self.metrics = {}
        self._every, self._seen = 1, -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start a new record, unless a run is resumed."""
        if trainer.global_step == 0 and not self._was_loaded:
            self.clear()
        self._was_loaded = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the sparsity at the start."""
        if not self.steps:
            self._record_sparsity(trainer, self._step(trainer), [s.target for s in attached_sparsifiers(trainer)])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record an update if there was one, and the loss if it is due."""
        step = self._step(trainer)
        if (not self.loss_steps or step > self.loss_steps[-1]) and step % self._every == 0:
            self._record_loss(step, loss_in(outputs, trainer.callback_metrics))
        updates = [s.last_update for s in attached_sparsifiers(trainer)]
        made = max((update.step for update in updates if update is not None), default=-1)
        if made > self._seen:
            self._seen = made
            self._record_sparsity(trainer, made, [0.0 if update is None else update.target for update in updates])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the metrics."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        for name in shown_metrics({"sparse": logged_metrics(trainer)}):
            record = self.metrics.setdefault(name, MetricRecord())
            record.add(self._step(trainer), float(trainer.callback_metrics[name]), self.points)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the sparsity at the end."""
        self._record_sparsity(trainer, self._step(trainer), [s.target for s in attached_sparsifiers(trainer)])

    def _step(self, trainer: L.Trainer) -> int:
        return next((s.step for s in attached_sparsifiers(trainer)), trainer.global_step)

    def _record_sparsity(self, trainer: L.Trainer, step: int, targets: Sequence[float]) -> None:
        sparsifiers = attached_sparsifiers(trainer)
        if not sparsifiers:
            return
        # The last entry may be from the start of the run, or from the end of the run that is resumed.
        if self.steps and self.steps[-1] == step:
            del self.steps[-1], self.target[-1], self.actual[-1]
        self.steps.append(step)
        self.target.append(weighted_mean(sparsifiers, targets))
        self.actual.append(weighted_mean(sparsifiers, [s.sparsity() for s in sparsifiers]))

    def _record_loss(self, step: int, loss: float | None) -> None:
        if loss is None:
            return
        self.loss_steps.append(step)
        self.loss.append(loss)
        if len(self.loss) > self.points:
            self._every *= 2
            kept = [(s, x) for s, x in zip(self.loss_steps, self.loss, strict=True) if s % self._every == 0]
            self.loss_steps, self.loss = [s for s, _ in kept], [x for _, x in kept]

    def state_dict(self) -> dict[str, Any]:
        """Return the record as lists of numbers."""
        recorded = {name: list(getattr(self, name)) for name in _RECORDED}
        metrics = {name: record.as_lists() for name, record in self.metrics.items()}
        return {**recorded, "metrics": metrics, "every": self._every, "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a saved record."""
        for name in _RECORDED:
            setattr(self, name, list(state_dict[name]))
        metrics = state_dict.get("metrics", {})  # a checkpoint of version 0.1.0 has none
        self.metrics = {name: MetricRecord(list(x["steps"]), list(x["values"])) for name, x in metrics.items()}
        self._every, self._seen = int(state_dict["every"]), int(state_dict["seen"])
        self._was_loaded = True


_RECORDED = ("steps", "target", "actual", "loss_steps", "loss")


def loss_in(outputs: Any, metrics: Mapping[str, Tensor]) -> float | None:
    """Return the loss of a training step: its output, or with manual optimization the logged loss.

    Example:
        >>> import torch
        >>> loss_in({"loss": torch.tensor(0.5)}, {}), loss_in(None, {"train_loss": torch.tensor(0.25)})
        (0.5, 0.25)
    """
    returned = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    for value in (returned, metrics.get("train_loss"), metrics.get("loss")):
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
    return None
