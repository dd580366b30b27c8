"""A Lightning Trainer in two processes with FSDP2: a program, run as `python many_trainers.py FOLDER`.

A plain Trainer in one process is the reference. Then two processes train the same model in shards, are saved, and
resumed: from a whole checkpoint, and from one in shards.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import ModelParallelStrategy
from resumable import Loader
from small_nets import Net
from torch.distributed.fsdp import FSDPModule, fully_shard

from sparse_lightning import Blocks, Global, Linear, RigL, SparsityCallback, Wanda

STEPS, SAVED = 8, 4
"""How long a run is, and after which step it is saved: between two updates, in the middle of an epoch."""


class Sharded(Net):
    """The small net, in shards where there is a mesh, with a part of each batch for each process."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.norm = torch.nn.Identity()

    def configure_model(self):
        """Called again when a Trainer resumes."""
        if self.device_mesh is not None and not isinstance(self.up, FSDPModule):
            for layer in (self.up, self.down, self):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        """Gradients that are zero but for rounding have no effect."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    def train_dataloader(self):
        """Goes on in the middle of an epoch."""
        return PartOfEach()


class PartOfEach(Loader):
    """The batches of a run of one process; where there are several, each gets every n-th sample."""

    def __iter__(self):
        parts, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for x, y in super().__iter__():
            yield x[rank::parts], y[rank::parts]


class Masks(L.Callback):
    """Notes the masks after each step, and saves once."""

    def __init__(self, sparsifier, file):
        self.sparsifier, self.file, self.seen = sparsifier, file, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """After the step."""
        self.seen[trainer.global_step] = {name: mask.clone() for name, mask in self.sparsifier.masks.items()}
        if self.file and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.file)


def train(strategy="auto", devices=1, save=None, resume=None):
    """A run: its masks by step, and the whole weights at the end."""
    parts = Wanda(), RigL(0.5), Global()
    ours = SparsityCallback([Blocks("*.weight", (4, 4))], Linear(0.7, end=6), *parts, update_every=2)
    masks, net = Masks(ours.sparsifier, save), Sharded()
    off = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_steps": STEPS, "logger": False, "limit_val_batches": 0, **off}
    trainer = L.Trainer(callbacks=[ours, masks], strategy=strategy, devices=devices, **options)
    trainer.fit(net, ckpt_path=resume)
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in net.named_parameters()}
    return masks.seen, {name: weight.detach() for name, weight in weights.items()}


def check_same(label, found, wanted):
    """The masks at all steps that were made, and the weights at the end."""
    for step, masks in found[0].items():
        for name, mask in masks.items():
            assert torch.equal(mask, wanted[0][step][name]), f"{label}: {name} has another mask at step {step}"
    for name, weight in found[1].items():
        assert torch.allclose(weight, wanted[1][name], rtol=1e-3, atol=1e-5), f"{label}: {name} has other weights"


def work(rank, port, folder, wanted):
    """What torchrun would start."""
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {**places, **ranks, "TORCHELASTIC_RUN_ID": "test"}
    for form in ("whole", "sharded"):
        options = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
        options["save_distributed_checkpoint"] = form == "sharded"
        saved = f"{folder}/{form}.ckpt"
        check_same(form, train(ModelParallelStrategy(**options), 2, save=saved), wanted)
        resumed = train(ModelParallelStrategy(**options), 2, resume=saved)
        assert list(resumed[0]) == list(range(SAVED + 1, STEPS + 1)), "the run was not resumed where it was saved"
        check_same(f"resumed from a {form} checkpoint", resumed, wanted)
    dist.destroy_process_group()


def main(folder):
    """The reference, then two processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # As in pyproject.toml, where they are explained.
    for text in (".*does not have many workers.*", ".*LeafSpec.*", "The number of training batches .* is smaller.*"):
        warnings.filterwarnings("ignore", text)
    wanted = train()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, (port, folder, wanted), 2, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
