"""Lightning Trainers in two processes; `python many_trainers.py FOLDER [cuda]` runs this by hand.

A plain Trainer in one process is the reference. Then two processes train the same model with DDP, with FSDP2 and with
tensor parallelism, are saved, and resumed: by as many processes, and by one.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from functools import partial
from itertools import pairwise

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import accelerator
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from many_jobs import check_hold
from resumable import Loader
from small_nets import Net
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sparse_lightning import LAMP, Blocks, Linear, RigL, SparsityCallback, Wanda

STEPS, SAVED = 8, 4
"""How long a run is, and after which step it is saved: between two updates, in the middle of an epoch."""


class Shared(Net):
    """The small net, shared as the mesh says where there is one, with a part of each batch for each process."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.norm = torch.nn.Identity()

    def configure_model(self):
        """Called again when a Trainer resumes."""
        if self.device_mesh is None or isinstance(self.up.weight, DTensor):
            return
        if self.device_mesh["tensor_parallel"].size() > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)
        else:
            for layer in (self.up, self.down, self):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        """Gradients that are zero but for rounding have no effect."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    def train_dataloader(self):
        """Resumes in the middle of an epoch."""
        # Loss and gradients are means over samples: those of equal parts have the mean of the whole.
        sampler = self.trainer.strategy.distributed_sampler_kwargs if dist.is_initialized() else {}
        return PartOfEach(sampler.get("rank", 0), sampler.get("num_replicas", 1))


class PartOfEach(Loader):
    """The batches of a run of one process; where several see different data, each gets every n-th sample."""

    def __init__(self, part, parts):
        super().__init__()
        self.part, self.parts = part, parts

    def __iter__(self):
        for x, y in super().__iter__():
            yield x[self.part :: self.parts], y[self.part :: self.parts]


class Masks(L.Callback):
    """Records the masks after each step, checks that they are held, and saves once."""

    def __init__(self, sparsifier, file):
        self.sparsifier, self.file, self.seen = sparsifier, file, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """After the step."""
        check_hold(self.sparsifier, f"{type(trainer.strategy).__name__}, step {trainer.global_step}")
        self.seen[trainer.global_step] = {name: mask.cpu().clone() for name, mask in self.sparsifier.masks.items()}
        if self.file and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.file)


def train(strategy="auto", devices=1, save=None, resume=None, device="cpu"):
    """A run: its masks by step, and the whole weights at the end, on the CPU."""
    parts = Wanda(), RigL(0.5), LAMP()
    ours = SparsityCallback([Blocks("*.weight", (4, 4))], Linear(0.7, end=6), *parts, update_every=2)
    masks, net = Masks(ours.sparsifier, save), Shared()
    off = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": accelerator(device), "max_steps": STEPS, "logger": False, "limit_val_batches": 0, **off}
    trainer = L.Trainer(callbacks=[ours, masks], strategy=strategy, devices=devices, **options)
    trainer.fit(net, ckpt_path=resume)
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in net.named_parameters()}
    return masks.seen, {name: weight.detach().cpu() for name, weight in weights.items()}


def check_same(label, found, wanted):
    """Compare the masks at all steps that were made, and the weights at the end."""
    assert found[0], f"{label}: no step was made"
    for step, masks in found[0].items():
        assert set(masks) == set(wanted[0][step]), f"{label}: other masks"
        for name, mask in masks.items():
            assert torch.equal(mask, wanted[0][step][name]), f"{label}: {name} has another mask at step {step}"
    for name, weight in found[1].items():
        assert torch.allclose(weight, wanted[1][name], rtol=1e-3, atol=1e-5), f"{label}: {name} has other weights"


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def mesh(data, tensor, in_shards=False, device="cpu"):
    """The strategy for FSDP2 and tensor parallelism on so many processes."""
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    return ModelParallelStrategy(**sizes, save_distributed_checkpoint=in_shards, process_group_backend=BACKENDS[device])


def check_resumed(label, found, wanted):
    """As `check_same`, for all steps after the checkpoint."""
    assert list(found[0]) == list(range(SAVED + 1, STEPS + 1)), f"{label}: not resumed where the run was saved"
    check_same(label, found, wanted)


def work(rank, port, folder, wanted, device):
    """What torchrun would start."""
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {**places, **ranks, "TORCHELASTIC_RUN_ID": "test"}
    on_two = partial(train, devices=2, device=device)
    of = partial(mesh, device=device)
    check_same("DDP", on_two(DDPStrategy(process_group_backend=BACKENDS[device]), save=f"{folder}/ddp"), wanted)
    check_same("tensor parallel", on_two(of(1, 2), save=f"{folder}/tensor"), wanted)
    for form in ("whole", "shards"):
        check_same(f"FSDP2, {form}", on_two(of(2, 1, form == "shards"), save=f"{folder}/{form}"), wanted)
        check_resumed(f"FSDP2 from {form}", on_two(of(2, 1), resume=f"{folder}/{form}"), wanted)
    check_resumed("tensor parallel from whole", on_two(of(1, 2), resume=f"{folder}/whole"), wanted)
    dist.destroy_process_group()


def train_alone(rank, file, device):
    """The reference, in a process of its own: CUDA cannot be used before a fork and after it."""
    torch.save(train(device=device), file)


def check_trainers(folder, device="cpu"):
    """The reference, then two processes, then one again."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # As in pyproject.toml, where they are explained.
    for text in (".*does not have many workers.*", ".*LeafSpec.*", "The number of training batches .* is smaller.*"):
        warnings.filterwarnings("ignore", text)
    mp.start_processes(train_alone, (f"{folder}/alone", device), 1, start_method="fork")
    wanted = torch.load(f"{folder}/alone", weights_only=True)
    later = [torch.cat([mask.flatten() for mask in wanted[0][step].values()]) for step in range(SAVED, STEPS + 1)]
    assert any((old & ~new).any() for old, new in pairwise(later)), "blocks have to grow in what is resumed"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, (port, folder, wanted, device), 2, start_method="fork")
    for saved in ("ddp", "tensor", "whole"):
        check_resumed(f"one process from {saved}", train(resume=f"{folder}/{saved}", device=device), wanted)
    resumed = train(mesh(1, 1, device=device), resume=f"{folder}/shards", device=device)
    check_resumed("one process from shards", resumed, wanted)
    dist.destroy_process_group()


if __name__ == "__main__":
    check_trainers(*sys.argv[1:])
