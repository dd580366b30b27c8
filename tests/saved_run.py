"""A run whose checkpoint is kept in `tests/data`, so that later versions are known to resume it.

`python tests/saved_run.py` writes the file anew. It was written by version 0.1.0, before modules moved to their
folders; write it again only when the format of checkpoints changes on purpose.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from small_nets import Net

from sparse_lightning import NM, Blocks, Fisher, Global, Linear, RigL, Soft, SparsityCallback

FILE = Path(__file__).parent / "data" / "run_0.1.0.pt"
STEPS, SAVED_AT = 16, 8
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def callbacks() -> list[SparsityCallback]:
    """State of a flow, memory of a method, growth by a second flow, and N:M groups.

    The state of flows advances at updates only, as it did in 0.1.0.
    """
    up, down = Blocks("up.weight", (4, 4)), Blocks("down.weight", (2, 4))
    return [
        SparsityCallback([up], Linear(0.75, end=14), Fisher(), Soft(3), Global(), update_every=2, observe_every=100),
        SparsityCallback([down], Linear(0.5, end=12), Fisher(), RigL(), update_every=3, observe_every=100),
        SparsityCallback([NM("extra.weight")], Linear(0.5, end=10), update_every=3),
    ]


class Longer(Net):
    """With one more layer, for N:M groups."""

    def __init__(self) -> None:
        super().__init__("sgd momentum")
        self.extra = torch.nn.Linear(8, 8)

    def forward(self, x):
        """The prediction."""
        return self.extra(super().forward(x))


def train(steps: int, ckpt_path: Path | None = None) -> tuple[L.Trainer, Longer, list[SparsityCallback]]:
    """Train from the start, or from a checkpoint, up to a step."""
    torch.manual_seed(3)
    ours, model = callbacks(), Longer()
    trainer = L.Trainer(
        max_steps=STEPS, callbacks=[*ours, _Stop(steps)], accelerator="cpu", limit_val_batches=0, **QUIET
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model, ours


class _Stop(L.Callback):
    """Ends a run early, which the schedules do not know of."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """After the step that was asked for."""
        trainer.should_stop = trainer.global_step >= self.step


def masks(ours: list[SparsityCallback]) -> dict[str, torch.Tensor]:
    """The masks of all callbacks, by name of their blocks."""
    return {name: mask for callback in ours for name, mask in callback.sparsifier.masks.items()}


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    trainer, _, _ = train(SAVED_AT)
    trainer.save_checkpoint(FILE)
    checkpoint = torch.load(FILE, weights_only=True)
    _, model, ours = train(STEPS, FILE)
    checkpoint["expected"] = {"weights": model.state_dict(), "masks": masks(ours)}
    torch.save(checkpoint, FILE)
