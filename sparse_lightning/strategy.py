"""Sharded: Lightning's strategy for FSDP2 and tensor parallelism, with sizes that follow from the number of devices."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy

from sparse_lightning.errors import SparseLightningError


class Sharded(ModelParallelStrategy):
    """A `ModelParallelStrategy` that shards over all processes which tensor parallelism leaves.

    Args:
        tensor_parallel_size: how many devices share each layer; 1 is FSDP2 alone.
        save_distributed_checkpoint: whether each process writes its part, into a folder; or the first one all of it.
        process_group_backend: "nccl" or "gloo"; None takes what fits the accelerator.

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
            raise SparseLightningError(f"tensor_parallel_size={tensor_parallel_size}: it must be at least 1")
        super().__init__("auto", tensor_parallel_size, save_distributed_checkpoint, process_group_backend)
        self.tensor_parallel_size = tensor_parallel_size

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
        """Called by Lightning when there are processes."""
        # What Lightning takes for "auto" is the number of nodes.
        self._data_parallel_size, self._tensor_parallel_size = self.sizes
        super().setup_environment()
