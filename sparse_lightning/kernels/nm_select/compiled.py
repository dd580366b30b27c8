"""nm_select through `torch.compile`: the choice of `cpu`, by all threads and in two loops over a piece of the weights.

The first loop writes the keys of a piece: `|x|`, and −1 for NaN, which is below all. The second compares each key with
those up to m − 1 places before and after it, and writes the mask and the weights. The keys that it reads are apart
from the weights that it writes, so that none is lost before all have seen it.

A piece is cut into rows of whole groups that are all alike: a few patterns, as long as one row, say which neighbours
are of the same group, and all loads are vectors. n is read from memory, so that one compile serves every n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sparse_lightning.kernels.nm_select import cpu

GROUPS = 16
"""Groups of a row: their elements fill vectors of any width, and their patterns stay in the nearest cache."""

PIECE = 1 << 19
"""Elements of a piece: its keys stay in the cache, and are few beside the weights; fewer would cost more calls."""

LARGEST = 8
"""The largest group to compile for: in larger ones comparing is all the work, and `cpu` adds up ranks in bytes."""

OPTIONS: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"), 1 << 16
)
"""Only the keys are stored between the loops: a rank is used twice, and stays in its register."""

Select = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def takes(weight: Tensor, m: int, other: Tensor | None) -> bool:
    """Whether it can run on these arguments, and here: what is compiled can not be watched by a dispatch mode.

    The weight is one stretch of fp32, as the bits of a NaN in a narrower float would not survive its registers.
    """
    plain = weight.dtype == torch.float32 and weight.is_contiguous() and 1 < m <= LARGEST
    return plain and _in_lines(other) and _get_current_dispatch_mode() is None


def _in_lines(other: Tensor | None) -> bool:
    """Whether all dimensions but the last can be one without a copy."""
    try:
        return other is None or other.view(-1, other.shape[-1]).ndim == 2
    except RuntimeError:
        return False


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None) -> Tensor:
    """Keep n of every m neighbours of a weight that it `takes`; `other` has the shape of the weight."""
    mask = torch.empty(weight.shape, dtype=torch.bool)
    if weight.numel():
        length = weight.shape[-1]
        # Compiled code is tied to the modes it was compiled in: there is one, whatever the caller's are.
        with torch.inference_mode(False), torch.no_grad():
            lines, pruned = (torch.from_numpy(t.numpy()).view(-1, length) for t in (weight, mask))
            _select(lines, pruned, n, m, None if other is None else other.view(-1, length))
    # It is another tensor on the same memory that was written.
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)
    return mask


def _select(weight: Tensor, mask: Tensor, n: int, m: int, other: Tensor | None) -> None:
    """Judge and zero all pieces of lines. What is left of a piece behind its last whole row is few, and `cpu` does it.

    Keys have a row before and a row behind them, for the neighbours of the first and the last: nothing is written
    there, and no pattern lets it count.
    """
    width = GROUPS * m
    kept, patterns = torch.tensor(n, dtype=weight.dtype), _patterns(m)
    select = _by_magnitude(m) if other is None else _by_key(m)
    keys = torch.empty(PIECE // width + 2, width, dtype=weight.dtype)
    for piece in _pieces(weight.shape[0], weight.shape[1], m):
        values, pruned = weight[piece].view(-1), mask[piece].view(-1)
        factors = None if other is None else other[piece].to(weight.dtype)
        rows = len(values) // width
        # A single row would be compiled for once more.
        whole = rows * width if rows > 1 else 0
        if factors is not None:
            scores = keys.view(-1)[width:][: len(values)]
            torch.mul(weight[piece], factors, out=scores.view(factors.shape))
        if whole:
            as_rows = values[:whole].view(-1, width), pruned[:whole].view(torch.uint8).view(-1, width)
            select(*as_rows, keys[: rows + 2], patterns, kept)
        if whole < len(values):
            rest = None if factors is None else factors.reshape(-1)[whole:]
            pruned[whole:] = cpu.nm_select(values[whole:], n, m, rest)


def _pieces(lines: int, length: int, m: int) -> Iterator[tuple[slice, slice]]:
    """Pieces of lines, each one stretch of memory: several whole lines, or a part of one.

    Example:
        >>> list(_pieces(3, 1 << 18, 4))
        [(slice(0, 2, None), slice(0, 262144, None)), (slice(2, 4, None), slice(0, 262144, None))]
    """
    most = PIECE // m * m
    down, along = max(1, most // length), min(length, most)
    for top in range(0, lines, down):
        for left in range(0, length, along):
            yield slice(top, top + down), slice(left, left + along)


@lru_cache(maxsize=LARGEST)
def _patterns(m: int) -> Tensor:
    """Row m − 1 + d: 1 where the element d places further on is of the same group, else 0."""
    position, shift = torch.arange(GROUPS * m) % m, torch.arange(1 - m, m)[:, None]
    return ((position + shift >= 0) & (position + shift < m)).float()


@lru_cache(maxsize=LARGEST)
def _by_magnitude(m: int) -> Select:
    """Judges weights by their magnitude."""

    def by_magnitude(weight: Tensor, mask: Tensor, keys: Tensor, patterns: Tensor, kept: Tensor) -> None:
        _write_keys(weight, keys)
        _choose(m, weight, mask, keys, patterns, kept)

    return _compiled(by_magnitude, m)


@lru_cache(maxsize=LARGEST)
def _by_key(m: int) -> Select:
    """Judges weights by the magnitude of what is written where their keys will be."""

    def by_key(weight: Tensor, mask: Tensor, keys: Tensor, patterns: Tensor, kept: Tensor) -> None:
        _write_keys(keys[1:-1], keys)
        _choose(m, weight, mask, keys, patterns, kept)

    return _compiled(by_key, m)


def _compiled(select: Select, m: int) -> Select:
    """The function, compiled. What is compiled is kept, looked up and counted by code object: each m has its own."""
    code = select.__code__.replace(co_name=f"{select.__name__}_{m}")
    own = FunctionType(code, select.__globals__, code.co_name, None, select.__closure__)
    compiled: Select = torch.compile(own, dynamic=True, fullgraph=True, options=OPTIONS)
    return compiled


def _write_keys(scores: Tensor, keys: Tensor) -> None:
    size = scores.abs()
    # The comparison is false for NaN, and stays in vectors where isnan doesn't.
    keys[1:-1].copy_(torch.where(size >= 0, size, -1.0))


def _choose(m: int, weight: Tensor, mask: Tensor, keys: Tensor, patterns: Tensor, kept: Tensor) -> None:
    """Write the mask (as bytes, which stay in vectors where bools don't) and the weights, from ranks by the keys."""
    width = GROUPS * m

    def shifted(d: int) -> Tensor:
        return keys.as_strided(weight.shape, (width, 1), width + d)

    key, rank = shifted(0), torch.zeros((), dtype=keys.dtype)
    for d in range(1, m):
        rank = rank + torch.where(shifted(-d) >= key, patterns[m - 1 - d], 0.0)
        rank = rank + torch.where(shifted(d) > key, patterns[m - 1 + d], 0.0)
    pruned = rank >= kept
    mask.copy_(torch.where(pruned, 1.0, 0.0).to(torch.uint8))
    weight.copy_(torch.where(pruned, 0.0, weight))
