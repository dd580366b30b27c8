"""Training in several processes, with gloo on CPUs: a program that checks one section of laws.

Run as `python many_processes.py SECTION FOLDER`. The reference, one process on the same data, is trained first; then
processes are forked, so that imports are paid once. Of the four, a layout uses as many as it needs: each layout has a
process group of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from sparse_lightning import (
    SET,
    Blocks,
    Global,
    Gradual,
    Heads,
    Linear,
    Magnitude,
    Movement,
    Neurons,
    Proximal,
    Random,
    RigL,
    Soft,
    SparseLightningError,
    Sparsifier,
    Taylor,
    Uniform,
    Wanda,
)
from sparse_lightning.distributed import local_part

RANKS, STEPS, SAVED, SHORT = 4, 7, 4, 5
"""How many processes there are, how long a run is, after which step it is saved, between two updates, and how long a
run is that has an update at every step but the last."""

# Their scores don't tie: weights and data are random, and blocks differ by far more than the order of a sum does.
CRITERIA = [Magnitude, Taylor, Movement, Wanda, Random]
METHODS = [Gradual, partial(RigL, share=0.5), partial(SET, share=0.5), partial(Soft, updates=2), Proximal]
BUDGETS = [Uniform, Global]


class Attention(nn.Module):
    """Four heads of size 6, with a fused QKV."""

    num_heads = 4

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        """(batch, positions, 24)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """42 neurons: an odd number of rows for each of two processes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 42), nn.Linear(42, 24)

    def forward(self, x):
        """(batch, positions, 24)."""
        return self.down(gelu(self.up(x)))


class Net(nn.Module):
    """Attention, an MLP, and layers of 100, 5 and 4 rows: shards of 3 and 4 cut their blocks, and some are empty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.mlp = Attention(), Mlp()
        self.wide, self.mid, self.tail = nn.Linear(24, 100), nn.Linear(100, 5), nn.Linear(5, 4)

    def forward(self, x):
        """(batch, positions, 24) → (batch, positions, 4)."""
        x = x + self.attn(x)
        x = x + self.mlp(x)
        return self.tail(self.mid(gelu(self.wide(x))))


PATTERNS = [
    Heads("attn"),
    Neurons("mlp.up", "mlp.down"),
    Blocks("wide.weight", (32, 8), edge="partial"),
    Blocks(["mid.weight", "tail.weight"], (2, 4), edge="partial"),
]


def alone(net):
    """One process: what is called, and which part of the data it gets."""
    return net, 0, 1


def ddp(net):
    """A copy on each process."""
    return DistributedDataParallel(net), dist.get_rank(), dist.get_world_size()


def shard(net, mesh):
    """FSDP2, with the mesh it is on."""
    fully_shard(net.mlp, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, mesh.get_local_rank(), mesh.size()


def fsdp(net):
    """Every parameter in shards."""
    return shard(net, init_device_mesh("cpu", (dist.get_world_size(),)))


def split(net, mesh):
    """The MLP tensor parallel: `up` by rows, `down` by columns."""
    parallelize_module(net, mesh, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})


def tp(net):
    """All processes see the same data."""
    split(net, init_device_mesh("cpu", (dist.get_world_size(),)))
    return net, 0, 1


def fsdp_tp(net):
    """Both, 2 × 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    split(net, mesh["tensor"])
    return shard(net, mesh["data"])


LAYOUTS = {
    "DDP on 2": (2, ddp),
    "FSDP2 on 2": (2, fsdp),
    "tensor parallel on 2": (2, tp),
    "FSDP2 on 3": (3, fsdp),
    "DDP on 4": (4, ddp),
    "FSDP2 on 4": (4, fsdp),
    "FSDP2 × tensor parallel on 2 × 2": (4, fsdp_tp),
}


def cases_of(number):
    """Each criterion and each method once; the pairs of one number are those of no other, up to five."""
    return [((i, (i + number) % 5, (i + number) % 2)) for i in range(5)]


class Job:
    """A model in a layout, at work: the masks and the hold are looked at after each step.

    A case is a criterion, a method and a budget, by number.
    """

    def __init__(self, case, layout=alone, every=2):
        criterion, method, budget = case
        self.label = f"{CRITERIA[criterion].__name__}, {METHODS[method]()}, {BUDGETS[budget].__name__}"
        self.net = Net()
        self.call, self.part, self.parts = layout(self.net)
        # Gradients that are zero but for rounding, such as those of the bias of keys, stay without effect.
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, eps=1e-3, foreach=False)
        parts = CRITERIA[criterion](), METHODS[method](), BUDGETS[budget]()
        self.sparsifier = Sparsifier(PATTERNS, Linear(0.6, end=3 * every), *parts, update_every=every)
        self.sparsifier.attach(self.net, self.optimizer)
        self.masks = []

    def backward(self, step):
        """Gradients of this process's part of the batch."""
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 3, 24, generator=generator)[self.part :: self.parts]
        self.optimizer.zero_grad()
        (self.call(x) - x[..., :4].sin()).square().mean().backward()

    def step(self, step):
        """One step."""
        self.backward(step)
        self.sparsifier.before_step()
        self.optimizer.step()
        self.masks.append({name: mask.clone() for name, mask in self.sparsifier.masks.items()})

    def run(self, start=0, stop=STEPS):
        """Several, each followed by a look at the weights; gives the job."""
        for step in range(start, stop):
            self.step(step)
            self.check_hold(step)
        return self

    def check_hold(self, step):
        """Every pruned block is exactly +0.0 in the shard of this process, read as it is."""
        for a in self.sparsifier._work.attached:
            for name, block in a.blocks.items():
                for spec, pruned in block.get_masks(a.masks[name]).items():
                    marked = torch.zeros(spec.param.shape)
                    spec.view.like(marked).data[pruned] = 1
                    local, box = local_part(spec.param)
                    values = local[marked[tuple(slice(*bounds) for bounds in box)] == 1]
                    assert not values.any(), f"{self.label}, step {step}: {name} is not zero where it is pruned"
                    assert not values.signbit().any(), f"{self.label}, step {step}: {name} holds a -0.0"

    def weights(self):
        """Whole weights, by name."""
        return {name: whole(param.detach()) for name, param in self.net.named_parameters()}

    def state(self):
        """What a checkpoint holds: whole, on every process."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.net, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer, "sparsifier": self.sparsifier.state_dict()}

    def load(self, state):
        """Take up a checkpoint of any layout."""
        options = StateDictOptions(full_state_dict=True)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.net, self.optimizer, **parts, options=options)
        self.sparsifier.load_state_dict(state["sparsifier"])
        return self


def whole(tensor):
    """A tensor gathered from its shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_same(job, wanted, start=0):
    """The masks of a reference after every step from `start` on, and its weights, gathered, at the end."""
    for step, (one, other) in enumerate(zip(wanted.masks[start:], job.masks, strict=True), start):
        for name, mask in one.items():
            found = int((mask != other[name]).sum())
            assert not found, f"{job.label}, step {step}: {found} of {mask.numel()} blocks of {name} are others"
    found = job.weights()
    for name, weight in wanted.weights().items():
        close = torch.allclose(found[name], weight, rtol=1e-3, atol=1e-5)
        assert close, f"{job.label}: {name} is off by {(found[name] - weight).abs().max():.2g}"
        assert torch.equal(found[name] == 0, weight == 0), f"{job.label}: {name} is zero elsewhere"


@contextmanager
def group(rank, ranks, folder, name):
    """A process group of the first few processes, that ends by itself where one of them is gone."""
    meet = f"file://{folder}/meet {name}".replace(" ", "_")
    dist.init_process_group("gloo", meet, timedelta(seconds=60), ranks, rank)
    torch.manual_seed(100 + rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def layouts(rank, folder, wanted):
    """All layouts, each with five cases: the masks of one process at every update, the hold, and no trace."""
    for number, (name, (ranks, layout)) in enumerate(LAYOUTS.items()):
        if rank >= ranks:
            continue
        begin = time.perf_counter()
        with group(rank, ranks, folder, name):
            for case in cases_of(number):
                job = Job(case, layout, every=1)
                torch.manual_seed(rank)
                job.label = f"{name}, rank {rank}: {job.label}"
                job.run(0, SHORT)
                check_same(job, wanted[case])
            check_no_trace(job)
        if rank == 0:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


def check_no_trace(job):
    """The gathered state has the names and shapes of the plain model."""
    plain = {name: tensor.shape for name, tensor in Net().state_dict().items()}
    assert {name: tensor.shape for name, tensor in job.state()["model"].items()} == plain
    assert {type(module).__name__.removeprefix("FSDP") for module in job.net.modules()} == {
        type(module).__name__ for module in Net().modules()
    }


RESUMED = [(2, 1, 1), (3, 3, 0), (0, 4, 0)]
"""Cases with all that a checkpoint can hold: state and growth, norms of inputs and multipliers, strengths."""


def resumed(rank, folder, wanted):
    """From FSDP2 on 2 to 4, to DDP, to tensor parallel and to one process: as if nothing had been."""
    for case in RESUMED:
        tag = "".join(map(str, case))
        file = f"{folder}/saved {tag}"
        if rank < 2:
            with group(rank, 2, folder, f"save {tag}"):
                state = Job(case, fsdp).run(0, SAVED).state()
                if rank == 0:
                    torch.save(state, file)
        for ranks, layout in ((4, fsdp), (2, ddp), (2, tp)):
            if rank < ranks:
                with group(rank, ranks, folder, f"resume {tag} {layout.__name__}"):
                    check_resumed(case, file, layout, wanted)
        if rank == 0:
            check_resumed(case, file, alone, wanted)


def check_resumed(case, file, layout, wanted):
    """Loaded, and run to the end."""
    job = Job(case, layout).load(torch.load(file, weights_only=True)).run(SAVED)
    job.label = f"resumed by {layout.__name__}: {job.label}"
    check_same(job, wanted[case], SAVED)


def agreement(rank, folder, wanted):
    """What travels at an update is small; and a rank with another mask is found by all at the next one."""
    with group(rank, RANKS, folder, "wire"):
        job = Job((2, 1, 1), fsdp).run(0, 4)
        check_wire(job)
        spoilt = dict(job.sparsifier.masks)
        if rank == 2:
            name = "wide.weight"
            [attached] = [a for a in job.sparsifier._work.attached if a.name == name]
            attached.set_masks({name: ~spoilt[name]})
        job.step(5)
        with pytest.raises(SparseLightningError, match=r"^rank 2 holds another mask of wide\.weight than rank 0"):
            job.step(6)
    with group(rank, RANKS, folder, "postponed"):
        check_postponed(rank)


def check_wire(job):
    """One update, with all collectives counted: grids and checksums, and nothing of a parameter's size."""
    sent = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather")}
    job.backward(4)
    with mock.patch.multiple(dist, **{name: counted(call, sent) for name, call in originals.items()}):
        job.sparsifier.update()
    job.optimizer.step()
    coupled = [block for a in job.sparsifier._work.attached for block in a.scope.blocks()]
    members = [(block.numblk(), spec) for block in coupled for spec in block.blocks()]
    blocks, reductions = sum(n for n, _ in members), 2
    assert 4 * blocks * reductions < sum(sent), f"{sum(sent)} bytes can't be all that travelled for {blocks} blocks"
    assert sum(sent) <= 8 * blocks * reductions, f"{sum(sent)} bytes for {blocks} blocks, reduced for score and growth"
    assert max(sent) <= 8 * blocks, f"{max(sent)} bytes travelled at once, for {blocks} blocks"
    largest = max(spec.param.nbytes for _, spec in members)
    assert max(sent) < largest / 4, f"{max(sent)} bytes travelled at once, the largest parameter has {largest}"


def counted(call, sent):
    """A collective that notes the bytes of its tensor."""

    def counting(tensor, *args, **kwargs):
        one = tensor[0] if isinstance(tensor, list) else tensor
        sent.append(one.nbytes)
        return call(tensor, *args, **kwargs)

    return counting


def check_postponed(rank):
    """A rank whose scores are no numbers makes all of them wait, not only itself."""
    job = Job((0, 0, 0), ddp)
    if rank == 1:
        with torch.no_grad():
            job.net.wide.weight[0, 0] = torch.nan
    for step in range(2):
        job.backward(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.sparsifier.update()
        assert any("not finite at step 0" in str(warning.message) for warning in caught), f"rank {rank} did not wait"
    assert job.sparsifier.last_update is None


def killed(rank, folder, wanted):
    """A run in which rank 1 is killed after a checkpoint was saved."""
    with group(rank, 2, folder, "killed"):
        job = Job(RESUMED[0], fsdp).run(0, SAVED)
        state = job.state()
        if rank == 0:
            torch.save(state, f"{folder}/last")
        dist.barrier()
        job.step(SAVED)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            job.run(SAVED + 1)
        except RuntimeError as error:
            print("rank 0 ends:", str(error).splitlines()[0], flush=True)
            time.sleep(600)  # the parent has to end it


def after_the_kill(rank, folder, wanted):
    """The job again, from its last checkpoint."""
    with group(rank, 2, folder, "again"):
        check_resumed(RESUMED[0], f"{folder}/last", fsdp, wanted)


def start(section, ranks, folder, wanted):
    """Run a section in forked processes; an error in one of them ends all."""
    mp.start_processes(section, (folder, wanted), ranks, start_method="fork")


def main(section, folder):
    """Train the references, then check a section."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # A linear layer on three dimensions gives a view; the model changes none in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if section == "layouts":
        wanted = {case: Job(case, every=1).run(0, SHORT) for i in range(len(LAYOUTS)) for case in cases_of(i)}
    else:
        wanted = {case: Job(case).run() for case in RESUMED}
    if section != "killed":
        start({"layouts": layouts, "resumed": resumed, "agreement": agreement}[section], RANKS, folder, wanted)
        return
    begin = time.perf_counter()
    try:
        start(killed, 2, folder, wanted)
    except mp.ProcessExitedException as error:
        print(f"after {time.perf_counter() - begin:.0f} s:", error, flush=True)
    start(after_the_kill, 2, folder, wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
