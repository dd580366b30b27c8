"""All that processes send one another, and what it should be."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_lightning import BlockSpec


class Messages(TorchDispatchMode):
    """Notes the tensors of all collectives, whoever calls them; they are made as ever.

    What is noted is what the collective leaves in place: the sums over all processes of an all-reduce.
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
    """The blocks of each parameter; those that are coupled each for itself."""
    return [spec for a in job.sparsifier._work.attached for block in a.scope.blocks() for spec in block.blocks()]


def check_update(job, messages, reductions):
    """One update of a criterion and a growth that read `reductions` sums: bits, checksums, flags and grids alone."""
    masks = job.sparsifier.masks
    [bits] = messages.of(torch.uint8)
    blocks = sum(mask.numel() for mask in masks.values())
    assert bits.nbytes == -(-blocks // 8), f"{bits.nbytes} bytes for the masks of {blocks} blocks"
    *flags, checksums = messages.of(torch.int64)
    assert checksums.numel() == 2 * len(masks) + 1, "the largest and the smallest of each, and a flag"
    assert [flag.numel() for flag in flags] == [1], "whether all have gradients is asked once"
    grids = messages.of(torch.float32)
    assert len(messages.sent) == 2 + len(flags) + len(grids), "something of another type travelled"
    travelling = sum(spec.numblk() * ways(spec.param) for spec in specs_of(job))
    assert sum(grid.numel() for grid in grids) == reductions * travelling, "more or less than a number for each block"


def check_groups(job, messages):
    """An update of N:M groups that no border cuts: a bit for each weight, to bring the choices together and to all."""
    bits = messages.of(torch.uint8)
    weights = sum(mask.numel() for mask in job.sparsifier.masks.values())
    assert [message.nbytes for message in bits] == [weights // 8] * 2
    assert not messages.of(torch.float32), "scores of single weights travelled"


def ways(param):
    """Over how many dimensions of its mesh a parameter is sharded: so many times its grid travels."""
    return sum(not placement.is_replicate() for placement in param.placements)


def check_growth(job, message, gradients):
    """A message of RigL's growth has the sums of squared gradients of each block, and nothing else."""
    specs = [(spec, gradients[spec.param]) for spec in specs_of(job)]
    blocks = [BlockSpec(spec.view.like(gradient), spec.shape, edge=spec.edge) for spec, gradient in specs]
    wanted = torch.cat([block.norms().square().flatten() for block in blocks])
    assert message.shape == wanted.shape, f"{message.numel()} numbers travelled for {wanted.numel()} blocks"
    assert torch.allclose(message, wanted, rtol=1e-4, atol=1e-8), "no sums over blocks"
    assert message.nbytes <= 8 * sum(spec.numblk() for spec, _ in specs)
    weights = sum(spec.param.numel() for spec, _ in specs)
    assert 20 * message.numel() < weights, "with so many blocks, sums over them don't show that no weights travel"


def check_silence(messages):
    """A step without an update."""
    assert not messages.sent, f"{len(messages.sent)} messages at a step without an update on rank {dist.get_rank()}"
