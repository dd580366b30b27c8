"""A Hugging Face model in two processes that read its shards; `python many_hugging_face.py FOLDER` runs it by hand.

The weights are compared with those of `from_pretrained`. What is read is counted, and so is what the process has
allocated, at the moments when it is largest: when a slice has been read and is not yet copied.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from sparse_lightning import Blocks, Constant, SparsityCallback
from sparse_lightning.models import HuggingFace
from sparse_lightning.models.safetensors_folder import SafetensorsFolder

MIB = 2**20
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 509}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
"""About 100 MiB in fp32, 12 in each layer; 509 rows cannot be halved."""


def llama(**changes):
    """A model with random weights."""
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | HEADS | changes)))


def free_at_once() -> None:
    """Make the C library map every tensor by itself, so that a freed one is not in use any more."""
    threshold = -3  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(threshold, 2**16)


def in_use() -> int:
    """Return the memory that this process has allocated and touched, in bytes, without files that are mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Watched(HuggingFace):
    """Records what is in use after each read, and each read."""

    def __init__(self, path):
        super().__init__(path=str(path))
        self.before, self.peak, self.reads = 0, 0, []

    def configure_model(self):
        """Wrap the reads of this model."""
        plain, self.before = SafetensorsFolder.read, in_use()

        def read(folder, name, box):
            found = plain(folder, name, box)
            self.peak = max(self.peak, in_use() - self.before)
            self.reads.append(found.nbytes)
            return found

        SafetensorsFolder.read = read
        try:
            super().configure_model()
        finally:
            SafetensorsFolder.read = plain


def fit(model, sizes):
    """One step with the model in shards; the learning rate is zero, so that weights stay, and masks are all False."""
    model.optimizer_factory = lambda params: torch.optim.SGD(params, lr=0.0)
    off = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    strategy = ModelParallelStrategy(*sizes, process_group_backend="gloo")
    sparsity = SparsityCallback([Blocks("*.layers.0.mlp.*.weight", (32, 32))], Constant(0.0), update_every=1)
    options = {"accelerator": "cpu", "devices": 2, "max_steps": 1, "limit_val_batches": 0, "log_every_n_steps": 1}
    trainer = L.Trainer(strategy=strategy, callbacks=[sparsity], **options, **off)
    loader = DataLoader(torch.zeros(2, 8, dtype=torch.long), batch_size=1)
    trainer.fit(model, loader, loader)


def check(rank, folder, sizes):
    """The weights, what was read, and what was allocated, for a mesh of data × tensor parallelism."""
    import transformers

    model = Watched(folder)
    assert all(weight.is_meta for weight in model.parameters()), "weights are read before there is a mesh"
    fit(model, sizes)
    weights = dict(model.model.named_parameters())
    assert all(isinstance(weight, DTensor) for weight in weights.values())
    here = sum(weight.to_local().nbytes for weight in weights.values())
    total = sum(weight.numel() * 4 for weight in weights.values())
    layer = sum(p.numel() * 4 for n, p in weights.items() if ".layers.0." in n)
    read = sum(model.reads)
    assert read == here, f"{read} bytes were read for {here} of shards"
    assert max(model.reads) <= max(weight.to_local().nbytes for weight in weights.values())
    assert model.peak > 0.8 * here, f"{model.peak} bytes in use for {here} of shards: the measure sees too little"
    spare = model.peak - here - layer
    assert spare < 2 * MIB, f"{spare / MIB:.1f} MiB beside a shard and a layer; the model has {total / MIB:.0f} MiB"
    if sizes[0] == 2:
        assert here < 0.51 * total, f"a shard has {here} of {total} bytes"
    found = {name: weight.full_tensor().detach() for name, weight in weights.items()}
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in wanted.named_parameters():
        assert torch.equal(found[name], weight.float()), f"{name} is not that of from_pretrained"
    for name, buffer in wanted.named_buffers():
        assert torch.equal(model.model.get_buffer(name), buffer), f"{name} is not that of from_pretrained"
    if rank == 0:
        print(f"{sizes}: read {read / MIB:.0f} of {total / MIB:.0f} MiB, at most {model.peak / MIB:.0f} in use")
    dist.destroy_process_group()


def work(rank, port, folder, sizes):
    """What torchrun would start."""
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {**places, **ranks, "TORCHELASTIC_RUN_ID": "test"}
    torch.set_num_threads(1)
    check(rank, folder, sizes)


def check_shards(folder):
    """FSDP2 and tensor parallelism in two processes, on a model in several files; tied and untied."""
    free_at_once()
    warnings.simplefilter("error")
    # As in pyproject.toml, where they are explained.
    for text in (".*does not have many workers.*", ".*LeafSpec.*", "The number of training batches .* is smaller.*"):
        warnings.filterwarnings("ignore", text)
    for sizes, tied in (((2, 1), False), ((1, 2), True)):
        saved = Path(folder) / f"llama_{tied}"
        llama(tie_word_embeddings=tied).save_pretrained(saved, max_shard_size="30MB")
        assert len(list(saved.glob("*.safetensors"))) > 2
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.start_processes(work, (port, saved, sizes), 2, start_method="fork")


if __name__ == "__main__":
    check_shards(sys.argv[1])
