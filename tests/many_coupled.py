"""`Coupled()` under Trainers in two processes: the families, masks and weights of one process."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy
from many_trainers import Masks, check_same, mesh

from sparse_lightning import Coupled, Global, Linear, Shrink, SparsityCallback, couplings
from sparse_lightning.models import GPT, DigitsConv, DigitsViT

# Gradients that are zero but for rounding have no effect.
ADAM = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)

MODELS: dict[str, Callable[[], L.LightningModule]] = {
    "vit": lambda: DigitsViT(ADAM, width=16, depth=2),
    "conv": lambda: DigitsConv(ADAM, width=8, hidden=12, depth=2),
    "gpt": lambda: GPT(ADAM, width=16, depth=1, heads=4, context=16),
}
"""Small models of the recipes, by name."""


class Batches:
    """Six batches of a model; where several processes train, each gets every n-th sample.

    Batch norm takes statistics over the samples of a process: each process gets all samples of the conv net.
    """

    def __init__(self, name: str, part: int = 0, parts: int = 1) -> None:
        self.name = name
        self.part, self.parts = (0, 1) if name == "conv" else (part, parts)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for seed in range(len(self)):
            generator = torch.Generator().manual_seed(seed)
            if self.name == "gpt":
                yield self._own(torch.randint(0, 200, (8, 12), generator=generator))
            else:
                images = torch.randn(8, 1, 8, 8, generator=generator)
                yield self._own(images), self._own(torch.randint(0, 10, (8,), generator=generator))

    def _own(self, samples: torch.Tensor) -> torch.Tensor:
        return samples[self.part :: self.parts]


class Smaller(Masks):
    """Records masks after each step; checks that the model gets smaller, and that all ranks have the same weights."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the step."""
        self.seen[trainer.global_step] = {name: mask.clone() for name, mask in self.sparsifier.masks.items()}
        self.sizes = [*getattr(self, "sizes", []), sum(p.numel() for p in pl_module.parameters())]
        total = torch.stack([p.detach().double().sum() for p in pl_module.parameters()])
        others = [torch.empty_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(others, total)
        assert all(torch.equal(total, other) for other in others), "gradients are not averaged over ranks any more"

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Whole again, as the order of callbacks wants it."""
        whole = sum(p.numel() for p in pl_module.parameters())
        assert self.sizes[-1] < whole, "nothing was removed"


def train(name: str, rank: int = 0, strategy: Any = "auto", devices: int = 1, shrink: Shrink | None = None) -> Any:
    """A run with units of all families: its masks by step, and the whole weights at the end."""
    torch.manual_seed(0)
    model = MODELS[name]()
    ours = SparsityCallback([Coupled()], Linear(0.6, end=5), budget=Global(), update_every=2, shrink=shrink)
    masks = Masks(ours.sparsifier, None) if shrink is None else Smaller(ours.sparsifier, None)
    off = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"accelerator": "cpu", "limit_val_batches": 0, "use_distributed_sampler": False, **off}
    trainer = L.Trainer(max_steps=6, callbacks=[ours, masks], strategy=strategy, devices=devices, **options)
    before = str(couplings(model))
    trainer.fit(model, Batches(name, rank, devices), Batches(name))
    if isinstance(strategy, DDPStrategy):
        assert str(couplings(model)) == before, "Lightning has left a forward in the model that belongs to its wrapper"
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return masks.seen, {n: weight.detach().contiguous() for n, weight in weights.items()}


def work(rank: int, port: int, wanted: dict[str, Any]) -> None:
    """What torchrun would start."""
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {**places, **ranks, "TORCHELASTIC_RUN_ID": "test"}
    for name, alone in wanted.items():
        check_same(f"{name}, DDP", train(name, rank, DDPStrategy(process_group_backend="gloo"), 2), alone)
        check_same(f"{name}, FSDP2", train(name, rank, mesh(2, 1), 2), alone)
        ddp = DDPStrategy(process_group_backend="gloo")
        check_same(f"{name}, DDP, shrink", train(name, rank, ddp, 2, Shrink(at_least=0.0)), alone)
    dist.destroy_process_group()


def check_coupled(names: Sequence[str]) -> None:
    """One process, then two with DDP and FSDP2."""
    warnings.simplefilter("error")
    # As in pyproject.toml, where they are explained.
    for text in (".*does not have many workers.*", ".*LeafSpec.*", "The number of training batches .* is smaller.*"):
        warnings.filterwarnings("ignore", text)
    wanted = {name: train(name) for name in names}
    for name, (seen, _) in wanted.items():
        pruned = torch.cat([mask.flatten() for mask in seen[6].values()])
        assert pruned.any(), f"{name}: nothing is pruned"
        assert not pruned.all(), f"{name}: nothing is kept"
    mp.start_processes(work, (_free_port(), wanted), 2, start_method="fork")
    print(f"the same masks: {', '.join(names)}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
