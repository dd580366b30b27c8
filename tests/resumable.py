"""A run that can be killed: it dies by SIGKILL before a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from small_nets import BATCHES, LAYERS, Net
from torch import nn

from sparse_lightning import (
    EMA,
    NM,
    SET,
    Blocks,
    Constant,
    Cubic,
    Fisher,
    Global,
    Linear,
    Magnitude,
    Movement,
    Neurons,
    Proximal,
    Random,
    RigL,
    Shrink,
    Soft,
    SparsityCallback,
    Taylor,
    Wanda,
)

STEPS, SAVE_EVERY = 24, 3
TILES = [Blocks(LAYERS, (4, 4))]
RISING = Cubic(final=0.75, begin=2, end=0.8)

CASES = {
    "movement": (
        "adamw",
        [{"patterns": TILES, "schedule": RISING, "criterion": Movement(), "budget": Global(), "update_every": 2}],
    ),
    "rigl": (
        "adamw",
        [{"patterns": TILES, "schedule": Constant(0.5), "criterion": Taylor(), "method": RigL(), "update_every": 3}],
    ),
    "set": (
        "sgd momentum",
        [
            {
                "patterns": TILES,
                "schedule": Constant(0.5),
                "criterion": EMA(Fisher(), 0.8),
                "method": SET(),
                "update_every": 2,
            }
        ],
    ),
    "soft": (
        "twist",
        [{"patterns": TILES, "schedule": Linear(0.75), "criterion": Random(), "method": Soft(4), "update_every": 2}],
    ),
    "proximal": ("adagrad", [{"patterns": TILES, "schedule": RISING, "method": Proximal(), "update_every": 4}]),
    "wanda": (
        "adamw fused",
        [{"patterns": [NM("up.weight")], "schedule": RISING, "criterion": Wanda(), "update_every": 5}],
    ),
    "shrink": (
        "adamw",
        [
            {
                "patterns": [Neurons("down", "extra")],
                "schedule": RISING,
                "update_every": 2,
                "shrink": Shrink((torch.zeros(2, 16),), at_least=0.2),
            }
        ],
    ),
    "two callbacks": (
        "adamw",
        [
            {"patterns": [Blocks("extra.weight", (4, 4))], "schedule": RISING, "update_every": 2},
            {"patterns": [Neurons("up", "down")], "schedule": RISING, "criterion": Magnitude(1), "update_every": 3},
        ],
    ),
}


class Loader:
    """Batches made from their number; resumes in the middle of an epoch."""

    def __init__(self):
        self.done = 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for i in range(self.done, BATCHES):
            self.done = i + 1
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(i))
            yield x, torch.sin(x[:, :8] * 2) + x[:, 8:]
        self.done = 0

    def state_dict(self):
        """Return the position."""
        return {"done": self.done}

    def load_state_dict(self, state):
        """Resume there."""
        self.done = state["done"]


class Longer(Net):
    """With one more layer, for a second callback."""

    def __init__(self, optimizer: str):
        super().__init__(optimizer)
        self.extra = nn.Linear(8, 8)

    def forward(self, x):
        """The prediction."""
        return self.extra(super().forward(x))

    def train_dataloader(self):
        """Data that can be resumed."""
        return Loader()


class Dies(L.Callback):
    """Kills the process before a step."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Without any clean-up."""
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(case: str, folder: Path, die_at: int = -1, ckpt_path: str | None = None):
    """Train a case to its end; return the trainer, the model and the callbacks."""
    L.seed_everything(1, verbose=False)
    optimizer, settings = CASES[case]
    ours = [SparsityCallback(**setting) for setting in settings]
    saving = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    trainer = L.Trainer(
        max_steps=STEPS,
        callbacks=[*ours, saving, Dies(die_at)],
        accelerator="cpu",
        logger=CSVLogger(folder, name="logs", flush_logs_every_n_steps=1),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    net = Longer(optimizer)
    trainer.fit(net, ckpt_path=ckpt_path)
    return trainer, net, ours


def train_until(case: str, folder: Path, die_at: int):
    """Train a case in a process that is killed before a step."""
    torch.set_num_threads(1)
    train(case, folder, die_at)
