"""Small models and their data for tests that train: real modules, real optimizers, a real Trainer."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparse_lightning import SparseBlock, SparseScope, Sparsifier

BATCHES, BATCH = 8, 16
LAYERS = ["up.weight", "down.weight"]
"""The weights of `Net` that tests divide into blocks."""


def batches(n: int = BATCHES) -> DataLoader:
    """Return n batches of regression data, the same in every process."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n * BATCH, 16, generator=generator)
    y = torch.sin(x[:, :8] * 2) + x[:, 8:]
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


class Twist(torch.optim.Optimizer):
    """An unknown optimizer: it moves zeros too, and keeps state under unusual names."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["turns"] = state.get("turns", 0) + 1
                    spin = state.setdefault("spin", torch.zeros_like(p))
                    spin.mul_(0.5).add_(p.grad).add_(0.01)
                    p.add_(spin, alpha=-group["lr"])
        return loss


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True, amsgrad=True),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "twist": lambda params: Twist(params),
}


class Net(L.LightningModule):
    """Two linear layers with a norm between, trained to regress."""

    def __init__(self, optimizer: str = "adamw", hidden: int = 32):
        super().__init__()
        self.optimizer = optimizer
        self.up, self.norm, self.down = nn.Linear(16, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 8)

    def forward(self, x):
        """The prediction."""
        return self.down(torch.relu(self.norm(self.up(x))))

    def training_step(self, batch, batch_idx):
        """The squared error."""
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """The squared error."""
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self):
        """By name."""
        return OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self):
        """The data."""
        return batches()

    def val_dataloader(self):
        """The data again."""
        return batches(2)


def named_blocks(scopes: dict[str, SparseScope]) -> dict[str, SparseBlock]:
    """Return the blocks of scopes by the names of their masks: `scope`, or `scope/i` where a scope has several."""
    found = {}
    for name, scope in scopes.items():
        members = scope.blocks()
        names = [name] if len(members) == 1 else [f"{name}/{i}" for i in range(len(members))]
        found |= dict(zip(names, members, strict=True))
    return found


def broken_blocks(scopes: dict[str, SparseScope], masks: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of grids with a weight in a pruned block that is not exactly +0.0."""
    blocks = named_blocks(scopes)
    assert set(masks) == set(blocks), "every grid of blocks has a mask"
    broken = []
    for name, mask in masks.items():
        for spec, pruned in blocks[name].get_masks(mask).items():
            values = spec.view.data.detach()[pruned]
            if not (torch.equal(values, torch.zeros_like(values)) and not values.signbit().any()):
                broken.append(name)
    return broken


class Spy(L.Callback):
    """Reads the weights wherever user code can: each reading must find every pruned block at zero."""

    def __init__(self, sparsifier: Sparsifier):
        self.sparsifier = sparsifier
        self.readings: dict[str, int] = {}
        self.pruned = self.grown = 0
        self._last: dict[str, torch.Tensor] = {}
        self._handle = None

    def look(self, where: str) -> None:
        """One reading."""
        if self.sparsifier.is_attached:
            found = broken_blocks(self.sparsifier.scopes, self.sparsifier.masks)
            assert not found, f"{where}: {found} are not zero where they are pruned"
            self.readings[where] = self.readings.get(where, 0) + 1
            masks = self.sparsifier.masks
            self.pruned = sum(int(mask.sum()) for mask in masks.values())
            self.grown += sum(int((last & ~masks[name]).sum()) for name, last in self._last.items())
            self._last = {name: mask.clone() for name, mask in masks.items()}

    def on_train_start(self, trainer, pl_module):
        """Read the weights in every forward pass."""
        self.look("train start")
        self._handle = pl_module.register_forward_pre_hook(lambda *_: self.look("forward"))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """After the step."""
        self.look("batch end")

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        """Before validation reads the weights."""
        self.look("validation")

    def on_train_end(self, trainer, pl_module):
        """Remove the hook."""
        self._handle.remove()
