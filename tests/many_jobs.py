"""A job: the model of `many_layouts` trained to sparsity in one of its layouts, and checked after each step."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from many_layouts import PATTERNS, Net, alone
from small_nets import named_blocks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from sparse_lightning import (
    ERK,
    LAMP,
    SET,
    Constant,
    Global,
    Gradual,
    Linear,
    Magnitude,
    Movement,
    Proximal,
    Random,
    RigL,
    Soft,
    Sparsifier,
    Taylor,
    Uniform,
    Wanda,
)
from sparse_lightning.blocks.shards import local_part


class Plan(NamedTuple):
    """How long a run is, when it prunes how much, how its optimizer works, and on which kind of device."""

    steps: int
    schedule: Linear | Constant
    every: int = 1
    fused: bool = False
    device: str = "cpu"


QUICK = Plan(4, Linear(0.6, end=2, initial=0.3), fused=True)
"""An update before every step but the last."""

UNFUSED = QUICK._replace(fused=False)
"""The same with an optimizer that takes one parameter after the other, which takes longer with DTensors."""

LONG = Plan(7, Linear(0.6, end=6), every=2)
"""Steps between the updates, of which the first prunes nothing."""

CONSTANT = Plan(4, Constant(0.6, end=9), fused=True)
"""The final sparsity from the first step on: methods that grow begin with a random mask."""

# Their scores don't tie: weights and data are random, and blocks differ by far more than the order of a sum does.
CRITERIA = [Magnitude, Taylor, Movement, Wanda, Random]
METHODS = [
    Gradual,
    partial(RigL, drop_fraction=0.5),
    partial(SET, drop_fraction=0.5),
    partial(Soft, updates=2),
    Proximal,
]
BUDGETS = [Uniform, Global, ERK, LAMP]
EVERYTHING = [set(range(len(kind))) for kind in (CRITERIA, METHODS, BUDGETS)]
"""The numbers of a case that every layout has."""


def cases_of(number):
    """Return each criterion, each method and each budget; five numbers have all pairs of a criterion and a method."""
    return [(i, (i + number) % 5, (2 * i + number) % 5 % 4) for i in range(5)]


def optimizer_of(net, fused):
    """Return AdamW with a group of parameters for each mesh: a fused step takes DTensors of one mesh."""
    groups = {}
    for param in net.parameters():
        groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    # Gradients that are zero but for rounding, such as those of the bias of keys, stay without effect.
    how = {"fused": True} if fused else {"foreach": False}
    return torch.optim.AdamW([{"params": params} for params in groups.values()], lr=0.01, eps=1e-3, **how)


class Job:
    """A training run in a layout: the masks and the hold are checked after each step.

    A case is a criterion, a method and a budget, by number.
    """

    def __init__(self, case, layout=alone, plan=QUICK, patterns=PATTERNS):
        criterion, method, budget = case
        self.label = f"{CRITERIA[criterion].__name__}, {METHODS[method]()}, {BUDGETS[budget].__name__}"
        self.net, self.plan = Net().to(plan.device), plan
        self.call, self.part, self.parts = layout(self.net)
        self.optimizer = optimizer_of(self.net, plan.fused)
        parts = CRITERIA[criterion](), METHODS[method](), BUDGETS[budget]()
        self.sparsifier = Sparsifier(patterns, plan.schedule, *parts, update_every=plan.every)
        self.sparsifier.attach(self.net, self.optimizer)
        # A loop that clips masks gradients too. Where they are not masked, only the hold keeps pruned blocks at zero.
        self.clips = criterion % 2 == 0
        self.masks = []

    def backward(self, step):
        """Gradients of this process's part of the batch."""
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 3, 24, generator=generator)[self.part :: self.parts].to(self.plan.device)
        self.optimizer.zero_grad()
        (self.call(x) - x[..., :4].sin()).square().mean().backward()

    def step(self, step):
        """One step."""
        self.backward(step)
        self.sparsifier.update()
        if self.clips:
            self.sparsifier.mask_gradients()
        self.optimizer.step()
        self.masks.append({name: mask.cpu().clone() for name, mask in self.sparsifier.masks.items()})

    def run(self, start=0, stop=None):
        """Make several steps, each followed by a check of the weights; return the job."""
        for step in range(start, self.plan.steps if stop is None else stop):
            self.step(step)
            check_hold(self.sparsifier, f"{self.label}, step {step}")
        return self

    def weights(self):
        """Return whole weights by name, on the CPU."""
        return {name: whole(param.detach()).cpu() for name, param in self.net.named_parameters()}

    def state(self):
        """Return the content of a checkpoint: whole, on every process."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.net, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer, "sparsifier": self.sparsifier.state_dict()}

    def load(self, state):
        """Load a checkpoint of any layout; return the job."""
        options = StateDictOptions(full_state_dict=True)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.net, self.optimizer, **parts, options=options)
        self.sparsifier.load_state_dict(state["sparsifier"])
        return self


def check_hold(sparsifier, label):
    """Every pruned block is exactly +0.0 in the shard of this process, read as it is."""
    blocks, masks = named_blocks(sparsifier.scopes), sparsifier.masks
    assert set(masks) == set(blocks), f"{label}: every grid of blocks has a mask"
    for name, block in blocks.items():
        for spec, pruned in block.get_masks(masks[name]).items():
            marked = torch.zeros(spec.param.shape, device=spec.param.device)
            spec.view.like(marked).data[pruned] = 1
            local, box = local_part(spec.param)
            values = local[marked[tuple(slice(*bounds) for bounds in box)] == 1]
            assert not values.any(), f"{label}: {name} is not zero where it is pruned"
            assert not values.signbit().any(), f"{label}: {name} holds a -0.0"


def whole(tensor):
    """Return a tensor gathered from its shards."""
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


class Reference(NamedTuple):
    """What is compared of a job that has run in another process."""

    masks: list
    final: dict

    def weights(self):
        """Return whole weights by name."""
        return self.final


@contextmanager
def group(rank, ranks, folder, name, device="cpu"):
    """A process group of the first few processes, which times out if one of them has ended."""
    meet = f"file://{folder}/meet {name}".replace(" ", "_")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[device], meet, timedelta(seconds=60), ranks, rank)
    torch.manual_seed(100 + rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_no_trace(job):
    """The gathered state has the names and shapes of the plain model."""
    plain = {name: tensor.shape for name, tensor in Net().state_dict().items()}
    assert {name: tensor.shape for name, tensor in job.state()["model"].items()} == plain
    assert {type(module).__name__.removeprefix("FSDP") for module in job.net.modules()} == {
        type(module).__name__ for module in Net().modules()
    }


def check_lively(job):
    """Each update but the first changes the masks, and where blocks may grow some do: else equal runs prove nothing."""
    updates = job.masks[: job.plan.schedule.end + 1 : job.plan.every]
    masks = [torch.cat([mask.flatten() for mask in masks.values()]) for masks in updates]
    for before, after in pairwise(masks):
        assert not torch.equal(before, after), f"{job.label}: an update without a change"
    if job.sparsifier.configuration.method.growth:
        assert any((before & ~after).any() for before, after in pairwise(masks)), f"{job.label}: nothing grew"


def check_cuts(job):
    """Where parameters are in shards, a border lies inside of a block, and one inside of a group of N:M."""
    params = dict(job.net.named_parameters())
    if any(isinstance(param, DTensor) for param in params.values()):
        sizes = [{"wide.weight": (32, 8)}, {"thin.fours.weight": (1, 4), "thin.sixes.weight": (1, 6)}]
        cut = [any(is_cut(local_part(params[name])[1], size) for name, size in some.items()) for some in sizes]
        anywhere = torch.tensor(cut, dtype=torch.int64, device=job.plan.device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        assert anywhere.all(), f"{job.label}: no border of a shard lies inside of a block, or of a group"


def is_cut(box, size):
    """Whether a box begins inside of a block."""
    return any(low % n for (low, _), n in zip(box, size, strict=True))
