"""What two processes cost: updates and the hold of the stack of `engine.py`, in shards (FSDP2), beside one process.

The update of one process runs on the same weights, while the other process waits. Results are checked first: the masks
of the shards are those of the whole. Ratios are medians of interleaved rounds in this one run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine import BLOCK, SPARSITY, Run
from torch.distributed.fsdp import fully_shard

from sparse_lightning import Blocks, Constant, Sparsifier

RANKS, ROUNDS, WARMUP, MESSAGES = 2, 30, 3, 3


class Sharded(Run):
    """The same model, each MLP in shards of two processes."""

    def __init__(self) -> None:
        super().__init__(sparse=False)
        for mlp in self.model:
            fully_shard(mlp)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.sparsifier = Sparsifier([Blocks("*.weight", (BLOCK, BLOCK))], Constant(SPARSITY, end=0), update_every=1)
        self.sparsifier.attach(self.model, self.optimizer)


def in_turn(actions, rounds: int) -> dict[str, list[float]]:  # type: ignore[no-untyped-def]
    """The times of actions that take turns, each as often first as the others."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for i in range(WARMUP + rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(timed(actions[name]))
    return times


def timed(action) -> float:  # type: ignore[no-untyped-def]
    """Seconds from when all processes begin until all are done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def work(rank: int, folder: str) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    sharded, whole = Sharded(), Run()
    for run in (sharded, whole):
        for _ in range(2):
            run.step()
        run.update()
    check(sharded, whole)
    updates = {"shards": sharded.update, "one": lambda: alone(rank, whole), "bare": messages}
    steps = {"dense": sharded.dense_step, "sparse": sharded.step}
    # A percent of a step is to be told from the noise: many rounds.
    times = in_turn(updates, ROUNDS) | in_turn(steps, 4 * ROUNDS)
    if rank == 0:
        update, step = ratio(times["shards"], times["one"]), ratio(times["sparse"], times["dense"])
        print(f"{sharded.weights() / 1e6:.0f} MB of weights on {RANKS} processes with a thread each")
        print(f"an update in shards {update:6.3f} × that of one process  (at most 1.5)")
        print(f"bare messages       {ratio(times['bare'], times['one']):6.3f} × that of one process, of the above")
        print(f"with the callback   {step:6.3f} × the dense step      (at most 1.02)")
    dist.destroy_process_group()


def messages() -> None:
    """As many collectives as an update has, with hardly anything in them: what the machine asks for them."""
    for _ in range(MESSAGES):
        dist.all_reduce(torch.zeros(1))


def alone(rank: int, run: Run) -> None:
    """An update of the whole model on rank 0, as if there were no other."""
    if rank == 0:
        with mock.patch("sparse_lightning.distributed.has_others", return_value=False):
            run.update()


def ratio(times: list[float], base: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(a / b for a, b in zip(times[WARMUP:], base[WARMUP:], strict=True))


def check(sharded: Run, whole: Run) -> None:
    """The same blocks are pruned."""
    assert sharded.sparsifier is not None
    assert whole.sparsifier is not None
    for name, mask in sharded.sparsifier.masks.items():
        assert torch.equal(mask, whole.sparsifier.masks[name]), f"{name} has another mask in shards"


def main() -> None:
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder,), RANKS)


if __name__ == "__main__":
    main()
