"""All that processes communicate, and what it should be."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_lightning import BlockSpec


class Messages(TorchDispatchMode):
    """Records the tensors of all collectives, whoever calls them.

    The recorded tensor is what the collective leaves in place: the sums over all processes of an all-reduce.
    """

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sent.append([leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)])
        return func(*args, **(kwargs or {}))

    def of(self, dtype):
        """The tensors of one type, one for each message."""
        assert all(len(tensors) == 1 for tensors in self.sent), "a message of several tensors"
        return [tensor for [tensor] in self.sent if tensor.dtype == dtype]


def specs_of(job):
    """Return the blocks of each parameter; those that are coupled separately."""
    return [spec for scope in job.sparsifier.scopes.values() for block in scope.blocks() for spec in block.blocks()]


def check_update(job, messages, reductions):
    """One update of a criterion and a growth that read `reductions` sums: bits, checksums, flags and grids alone."""
    masks = job.sparsifier.masks
    [bits] = messages.of(torch.uint8)
    blocks = sum(mask.numel() for mask in masks.values())
    assert bits.nbytes == -(-blocks // 8), f"{bits.nbytes} bytes for the masks of {blocks} blocks"
    *flags, checksums = messages.of(torch.int64)
    assert checksums.numel() == 2 * len(masks) + 1, "the largest and the smallest of each, and a flag"
    assert [flag.numel() for flag in flags] == [1], "whether all have gradients is communicated once"
    grids = messages.of(torch.float32)
    assert len(messages.sent) == 2 + len(flags) + len(grids), "something of another type was sent"
    sent = sum(spec.numblk() * ways(spec.param) for spec in specs_of(job))
    assert sum(grid.numel() for grid in grids) == reductions * sent, "more or less than a number for each block"


def check_groups(job, messages):
    """An update of N:M groups that no border cuts: a bit for each weight, to bring the choices together and to all."""
    bits = messages.of(torch.uint8)
    weights = sum(mask.numel() for mask in job.sparsifier.masks.values())
    assert [message.nbytes for message in bits] == [weights // 8] * 2
    assert not messages.of(torch.float32), "scores of single weights were sent"


def check_counts(job):
    """Weights above a magnitude are counted over all shards, and copies once."""
    for spec in specs_of(job):
        magnitudes = spec.view.like(spec.param.full_tensor().detach()).read().abs()
        middle = float(magnitudes.median())
        assert spec.nnz(middle) == int((magnitudes > middle).sum()) < spec.numel(), spec


def ways(param):
    """Over how many dimensions of its mesh a parameter is sharded: so many times its grid is sent."""
    return sum(not placement.is_replicate() for placement in param.placements)


def check_growth(job, message, gradients):
    """A message of RigL's growth has the sums of squared gradients of each block, and nothing else."""
    specs = [(spec, gradients[spec.param]) for spec in specs_of(job)]
    blocks = [BlockSpec(spec.view.like(gradient), spec.shape, edge=spec.edge) for spec, gradient in specs]
    wanted = torch.cat([block.norms().square().flatten() for block in blocks])
    assert message.shape == wanted.shape, f"{message.numel()} numbers were sent for {wanted.numel()} blocks"
    assert torch.allclose(message, wanted, rtol=1e-4, atol=1e-8), "no sums over blocks"
    assert message.nbytes <= 8 * sum(spec.numblk() for spec, _ in specs)
    weights = sum(spec.param.numel() for spec, _ in specs)
    assert 20 * message.numel() < weights, "with so many blocks, sums over them don't show that no weights are sent"


def check_observation(job, messages, reductions):
    """An observation of a criterion with state that reads `reductions` sums: grids alone."""
    grids = messages.of(torch.float32)
    assert len(messages.sent) == len(grids), "something of another type was sent"
    sent = sum(spec.numblk() * ways(spec.param) for spec in specs_of(job))
    assert sum(grid.numel() for grid in grids) == reductions * sent, "more or less than a number for each block"


def check_silence(messages):
    """An optimizer step."""
    assert not messages.sent, f"{len(messages.sent)} messages in an optimizer step on rank {dist.get_rank()}"
