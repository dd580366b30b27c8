"""Strategies: Lightning's for FSDP2 with a mesh that fits the number of devices; DDP of parameters that get smaller."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from sparse_lightning.callbacks.saving import partial_path
from sparse_lightning.compat.lightning import set_mesh_sizes
from sparse_lightning.errors import SparseLightningError


class Sharded(ModelParallelStrategy):
    """A `ModelParallelStrategy` whose data-parallel size is the number of processes over `tensor_parallel_size`.

    Args:
        tensor_parallel_size: how many devices share each layer; 1 is FSDP2 alone.
        save_distributed_checkpoint: True: each process writes its shards into a folder; False: rank 0 writes one file.
        process_group_backend: "nccl" or "gloo"; None chooses by accelerator.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(strategy=Sharded(), accelerator="cpu", devices=2, logger=False)
        >>> trainer.strategy.sizes
        (2, 1)
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
    ) -> None:
        if tensor_parallel_size < 1:
            raise SparseLightningError(
                f"tensor_parallel_size={tensor_parallel_size} is too small: it must be at least 1"
            )
        super().__init__("auto", tensor_parallel_size, save_distributed_checkpoint, process_group_backend)
        self.tensor_parallel_size = tensor_parallel_size
        self.save_distributed_checkpoint = save_distributed_checkpoint

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the mesh: data-parallel and tensor-parallel.

        Raises:
            SparseLightningError: where the second does not divide the number of processes.
        """
        processes = self.num_nodes * self.num_processes
        if processes % self.tensor_parallel_size:
            raise SparseLightningError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not divide {processes} processes: change it, "
                "or the number of devices"
            )
        return processes // self.tensor_parallel_size, self.tensor_parallel_size

    def setup_environment(self) -> None:
        """Create the mesh; Lightning calls this when all processes run."""
        # Lightning resolves "auto" to the number of nodes.
        set_mesh_sizes(self, *self.sizes)
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; shards are written to a folder beside its place, which is moved when all are there."""
        if not self.save_distributed_checkpoint:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        path = Path(self.broadcast(str(filepath)))
        part = partial_path(path)
        if self.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
        self.barrier("sparse_lightning.before_shards")
        super().save_checkpoint(checkpoint, part, storage_options)
        self.barrier("sparse_lightning.after_shards")
        if self.is_global_zero:
            shutil.rmtree(path, ignore_errors=True)
            part.replace(path)
        self.barrier("sparse_lightning.moved_shards")


def wrap_again(strategy: Strategy) -> None:
    """Wrap the model of a strategy again, where DDP has buckets for gradients of the sizes that its parameters had."""
    if isinstance(strategy, DDPStrategy):
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()
