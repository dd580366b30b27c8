"""The cost of sharding: updates and steps of the model of `engine.py` on two processes (FSDP2) and on one.

By NCCL where there are two GPUs, otherwise by gloo on the CPU.

The update of one process runs on the same weights, while the other process waits. Results are checked first: the masks
of the sharded model are those of the unsharded one. Ratios are medians over interleaved rounds of one run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine import Run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS, ROUNDS, WARMUP, MESSAGES = 2, 30, 3, 3
ON_GPUS = torch.cuda.device_count() >= RANKS


class Sharded(Run):
    """The same model, each MLP sharded over two processes."""

    def __init__(self) -> None:
        super().__init__(sparse=False)
        mesh = init_device_mesh(self.device.type, (RANKS,))
        for mlp in self.model:
            fully_shard(mlp, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.attach()


def in_turn(actions, rounds: int) -> dict[str, list[float]]:  # type: ignore[no-untyped-def]
    """Return the times of interleaved actions, each first in a round as often as the others."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for i in range(WARMUP + rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(timed(actions[name]))
    return times


def timed(action) -> float:  # type: ignore[no-untyped-def]
    """Return the seconds from the start of all processes to the end of all."""
    wait()
    begin = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - begin


def wait() -> None:
    """Wait for all processes, and for what they have started on their devices."""
    if ON_GPUS:
        torch.cuda.synchronize()
    dist.barrier()


def work(rank: int, folder: str) -> None:
    """Run one of the processes."""
    torch.set_num_threads(1)
    Run.device = torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")
    if ON_GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if ON_GPUS else "gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    sharded, whole = Sharded(), Run()
    for run in (sharded, whole):
        for _ in range(2):
            run.step()
        run.update()
    check(sharded, whole)
    updates = {"shards": sharded.update, "one": lambda: alone(rank, whole), "bare": messages}
    steps = {"dense": sharded.dense_step, "sparse": sharded.step}
    # Many rounds, to resolve one percent.
    times = in_turn(updates, ROUNDS) | in_turn(steps, 4 * ROUNDS)
    if rank == 0:
        update, step = ratio(times["shards"], times["one"]), ratio(times["sparse"], times["dense"])
        each = "on a GPU each" if ON_GPUS else "with a thread each"
        print(f"{sharded.weights() / 1e6:.0f} MB of weights on {RANKS} processes {each}")
        print(f"a sharded update    {update:6.3f} × the update of one process  (at most 1.5)")
        print(
            f"collectives alone   {ratio(times['bare'], times['one']):6.3f} × the update of one process, included above"
        )
        print(f"with the callback   {step:6.3f} × the dense step             (at most 1.02)")
    dist.destroy_process_group()


def messages() -> None:
    """Run as many collectives as an update does, with one number each: the latency of this machine."""
    for _ in range(MESSAGES):
        dist.all_reduce(torch.zeros(1, device=Run.device))


def alone(rank: int, run: Run) -> None:
    """Update the unsharded model on rank 0, without communication."""
    if rank == 0:
        with mock.patch("torch.distributed.get_world_size", return_value=1):
            run.update()


def ratio(times: list[float], base: list[float]) -> float:
    """Return the median ratio over the rounds."""
    return statistics.median(a / b for a, b in zip(times[WARMUP:], base[WARMUP:], strict=True))


def check(sharded: Run, whole: Run) -> None:
    """Check that the same blocks are pruned."""
    assert sharded.sparsifier is not None
    assert whole.sparsifier is not None
    for name, mask in sharded.sparsifier.masks.items():
        assert torch.equal(mask, whole.sparsifier.masks[name]), f"{name} has another mask if it is sharded"


def main() -> None:
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder,), RANKS)


if __name__ == "__main__":
    main()
