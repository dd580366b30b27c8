"""Stack: linear layers one after the other, for costs; a training step with any library."""

from __future__ import annotations

import io
import math
import os
import resource
from collections.abc import Callable

import torch
from peer import Peer
from plan import Plan
from structure import Structure
from torch import Tensor, nn

import sparse_lightning as sl


class Layers(nn.Module):
    """Square linear layers. Not a Sequential, which would call the modules that some libraries add."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, size)` → the same."""
        for layer in self.layers:
            x = layer(x)
        return x


class Stack:
    """A model of square layers, and a library that prunes all but the last.

    Args:
        kind: the library.
        weights: of all layers, about.
        tensors: the number of layers that are pruned.
        plan: what is pruned and when.
        batch: rows of the input.
    """

    def __init__(self, kind: type[Peer], weights: int, tensors: int, plan: Plan, batch: int) -> None:
        size = max(64, round(math.sqrt(weights / tensors) / 64) * 64)
        torch.manual_seed(0)
        self.model = Layers(size, tensors + 1)
        self.input = torch.randn(batch, size)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        names = [f"layers.{i}" for i in range(tensors)]
        chain: list[sl.Pattern] = [sl.Neurons(f"layers.{i}", f"layers.{i + 1}") for i in range(tensors)]
        structure = Structure(names, dict.fromkeys(names, 1), chain)
        self.peer = kind(self.model, structure, optimizer, plan, self.input)
        self.steps = 0

    def step(self) -> None:
        """Make an optimizer step."""
        self.peer.optimizer.zero_grad()
        self.peer.model(self.input).square().mean().backward()
        self.peer.before_step(self.steps)
        self.peer.optimizer.step()
        self.peer.after_step(self.steps)
        self.steps += 1

    def checkpoint_bytes(self) -> int:
        """The size of what a checkpoint needs."""
        file = io.BytesIO()
        torch.save(self.peer.state(), file)
        return file.tell()


def check(peer: Peer, model: nn.Module) -> float:
    """The sparsity counted from the weights of the finished model; raise if it is not that of the plan."""
    plan = peer.plan
    if plan.pattern == "units":
        rows = peer.structure.units
        weights = {name: model.get_submodule(name).weight.detach() for name in rows}
        kept = sum(int((w.reshape(len(w) // rows[name], -1) != 0).any(1).sum()) for name, w in weights.items())
        units = sum(size // rows[name] for name, size in peer.sizes.items())
        sparsity, step = 1 - kept / units, len(weights) / units
    else:
        tiles = [maxima(model.get_submodule(name).weight.detach(), plan) for name in peer.structure.layers]
        blocks = sum(tile.numel() for tile in tiles)
        sparsity, step = sum(int((tile == 0).sum()) for tile in tiles) / blocks, len(tiles) / blocks
    if abs(sparsity - plan.sparsity) > step + 1e-3:
        raise AssertionError(f"{peer.name}: the sparsity is {sparsity:.4f} instead of {plan.sparsity:.4f}")
    return sparsity


def maxima(weight: Tensor, plan: Plan) -> Tensor:
    """The largest magnitude in each block of a weight; those of a convolution at each position of its kernel."""
    rows, columns = plan.block if plan.pattern != "2:4" else (1, 1)
    tiles = weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns, -1)
    return tiles.abs().amax((1, 3))


def peak_bytes(build: Callable[[], Stack]) -> int:
    """The peak memory of a process that builds a model and makes three steps.

    The process is a fork: call this before anything has started threads.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        stack = build()
        for _ in range(3):
            stack.step()
        os.write(writer, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        text = found.read()
    os.waitpid(child, 0)
    return int(text)
