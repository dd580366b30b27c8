"""nm_select for CPUs: whole numbers, compared with their shifted selves.

The bits of `|x|`, read as an integer, are in the order of `|x|`. In a piece of the weights, each key is compared with
the one d places further on, for d from 1 to m − 1, in one stretch through all groups; what crosses into another
group is dropped by a pattern of bytes. The comparisons that a weight loses add up to its rank. All of this runs on
vectors, and a piece stays in the cache from the first comparison to the masking.

It is numpy that compares, because it writes its booleans in vectors and torch doesn't. One thread does the work: the
steps are so short that several would wait for the interpreter more than they gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_lightning.chunk import chunks
from sparse_lightning.kernels.block_score.reference import accumulation_dtype
from sparse_lightning.kernels.nm_select.reference import scores

INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""The integers that hold the bits of the floats."""

SHARE = 4
"""A piece has this share of a chunk: with its scratch it stays in the cache, and is small beside the weights."""

Piece = tuple[slice, ...]
Integers = NDArray[np.signedinteger[Any]]
Bytes = NDArray[np.int8]


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None) -> Tensor:
    """Keep n of every m neighbours; `other` has the shape of the weight."""
    mask = torch.empty(weight.shape, dtype=torch.bool)
    shape = (*weight.shape[:-1], weight.shape[-1] // m)
    pieces = [(*p[:-1], _elements(p[-1], m)) for p in chunks(shape, weight.device, each=m * SHARE)]
    groups = max((mask[p].numel() // m for p in pieces), default=0)
    Selection(weight, other, mask, n, m, Patterns.of(m, groups)).select(pieces)
    # numpy writes behind autograd's back.
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)
    return mask


def _elements(groups: slice, m: int) -> slice:
    """A slice of groups as a slice of their elements."""
    return groups if groups == slice(None) else slice(groups.start * m, groups.stop * m)


@dataclass(frozen=True)
class Patterns:
    """What is the same in every piece: `positions` in the group, and what lies in the same group d further on."""

    positions: Bytes
    same_group: list[Bytes]

    @classmethod
    def of(cls, m: int, groups: int) -> Patterns:
        """The patterns of some groups of m."""
        positions = np.tile(np.arange(m, dtype=np.int8), groups)
        return cls(positions, [(positions < m - d).view(np.int8) for d in range(m)])


@dataclass(frozen=True)
class Selection:
    """One call: the weights, what they are multiplied with, the mask that is written, and n of m."""

    weight: Tensor
    other: Tensor | None
    mask: Tensor
    n: int
    m: int
    patterns: Patterns

    def select(self, pieces: Iterable[Piece]) -> None:
        """Judge and zero the given pieces of the weights. Scratch is made once, to stay in the cache."""
        size = len(self.patterns.positions)
        dtype = self.weight.dtype if self.other is None else accumulation_dtype(self.weight.dtype)
        keys: Integers = np.empty(size, f"i{dtype.itemsize}")
        rank, loses = np.empty(size, np.int8), np.empty(size, np.int8)
        for piece in pieces:
            bits: Integers = self.weight[piece].view(INTEGERS[self.weight.dtype]).numpy()
            k = bits.size
            self._write_keys(piece, bits, keys[:k].reshape(bits.shape))
            self._write_ranks(keys[:k], rank[:k], loses[:k])
            pruned = self.mask.numpy()[piece]
            np.greater_equal(rank[:k].reshape(bits.shape), self.n, out=pruned)
            keep = np.subtract(pruned.view(np.int8), np.int8(1), out=loses[:k].reshape(bits.shape))
            # True → 0, False → −1: all bits set in any width. The keys have served, and their memory is at hand.
            wide = keys.view(bits.dtype)[:k].reshape(bits.shape)
            np.copyto(wide, keep)
            np.bitwise_and(bits, wide, out=bits)

    def _write_keys(self, piece: Piece, bits: Integers, keys: Integers) -> None:
        """Integers in the order of the scores, NaN below all and all NaN equal."""
        dtype = self.weight.dtype
        if self.other is not None:
            values = scores(self.weight[piece], self.other[piece])
            dtype = values.dtype
            bits = values.view(INTEGERS[dtype]).numpy()
        np.bitwise_and(bits, np.iinfo(bits.dtype).max, out=keys)
        infinity = torch.tensor(math.inf, dtype=dtype).view(INTEGERS[dtype]).item()
        if keys.max() > infinity:
            keys[keys > infinity] = -1

    def _write_ranks(self, keys: Integers, rank: Bytes, loses: Bytes) -> None:
        """How many of its group are better than each key: all that stand before it, until it wins against them."""
        k = len(keys)
        np.copyto(rank, self.patterns.positions[:k])
        for d in range(1, self.m):
            below = loses[:-d]
            np.less(keys[:-d], keys[d:], out=below.view(np.bool_))
            np.bitwise_and(below, self.patterns.same_group[d][: k - d], out=below)
            np.add(rank[:-d], below, out=rank[:-d])
            np.subtract(rank[d:], below, out=rank[d:])
