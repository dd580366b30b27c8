"""A small model in a real `transformers.Trainer`, which can be killed before a step."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import torch
from small_nets import Net
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from sparse_lightning import NM, Blocks, Cubic, Global, Movement, Neurons, Wanda
from sparse_lightning.callbacks import HuggingFaceCallback

STEPS = 12
SETTINGS = {
    "movement": {
        "patterns": [Blocks(["net.up.weight", "net.down.weight"], (4, 4))],
        "criterion": Movement(),
        "budget": Global(),
    },
    "neurons": {"patterns": [Neurons("net.up", "net.down")]},
    "wanda": {"patterns": [NM("net.up.weight")], "criterion": Wanda()},
}


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do; dropout needs the state of random numbers."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, y):
        """The squared error."""
        return {"loss": nn.functional.mse_loss(nn.functional.dropout(self.net(x), 0.1, self.training), y)}


class Rows(Dataset):
    """Regression data, made from the number of a row."""

    def __init__(self, length: int = 96):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": torch.sin(x[:8] * 2) + x[8:]}


class KilledAt(TrainerCallback):
    """Kills the process before a step, without any clean-up."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        """SIGKILL cannot be handled."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments(folder: Path, **changes):
    """Return quiet arguments for a short run on a CPU."""
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    short = {"max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 0.01, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **{**quiet, **short, "logging_steps": 4, **changes})


def callback(case: str = "neurons", **changes) -> HuggingFaceCallback:
    """Return the callback of a case; half of the blocks are pruned after ten steps."""
    usual = {"schedule": Cubic(final=0.5, begin=2, end=10), "update_every": 2}
    return HuggingFaceCallback(**{**SETTINGS[case], **usual, **changes})


def trainer(folder: Path, *callbacks, model=None, **changes) -> Trainer:
    """Return a trainer of a new model, the same in every process."""
    set_seed(3)
    return Trainer(
        model=model or WithLoss(),
        args=arguments(folder, **changes),
        train_dataset=Rows(),
        eval_dataset=Rows(16),
        callbacks=list(callbacks),
    )


def train(case: str, folder: Path, die_at: int = -1, resume: bool = False):
    """Train a case to its end, with accumulation and clipping; return the trainer and the callback."""
    ours = callback(case)
    run = trainer(
        folder, ours, KilledAt(die_at), save_strategy="steps", save_steps=3, gradient_accumulation_steps=2,
        max_grad_norm=0.1,
    )  # fmt: skip
    run.train(resume_from_checkpoint=resume)
    return run, ours


def train_until(case: str, folder: Path, die_at: int) -> None:
    """Train a case in a process that is killed before a step."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    train(case, folder, die_at)


def without_dropout() -> WithLoss:
    """Return a model that stays in evaluation mode, so that processes need not draw the same random numbers."""
    set_seed(3)
    model = WithLoss().eval()
    model.train = lambda mode=True: model
    return model


def train_on_rank(rank: int, folder: Path, port: int) -> None:
    """Train in one of two processes, as torchrun would start it, and save what rank 0 has."""
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {**places, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    ours, half = callback("movement"), {"per_device_train_batch_size": 4, "ddp_backend": "gloo"}
    run = trainer(folder / "run", ours, model=without_dropout(), save_strategy="steps", save_steps=6, **half)
    run.train()
    masks = {name: mask.clone() for name, mask in ours.sparsifier.masks.items()}
    torch.save({"masks": masks, "weights": run.model.state_dict()}, folder / f"rank{rank}.pt")
    torch.distributed.barrier()
    # Without destructors: those of DDP and gloo may wait for the threads of a process that has ended.
    os._exit(0)
