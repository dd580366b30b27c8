"""nm_select in plain torch operations: the definition, and the fallback for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_lightning.kernels.block_score.reference import accumulation_dtype
from sparse_lightning.kernels.chunks import chunks

GONE, UNKNOWN = -2.0, -1.0
"""What stays pruned, and NaN, rank below all scores, which are not negative."""


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None, pruned: Tensor | None = None) -> Tensor:
    """Keep n of every m neighbours; `other` and `pruned` have the shape of the weight.

    Sorts in chunks, to need little memory.
    """
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    groups = _groups(weight, m)
    others, before = (None if t is None else _groups(t, m) for t in (other, pruned))
    # In addition to the scores, a chunk needs their sorted values and 64-bit indices.
    for piece in chunks(groups.shape[:-1], weight.device, each=8 * m):
        ranked = scores(groups[piece], None if others is None else others[piece])
        ranked.masked_fill_(ranked.isnan(), UNKNOWN)
        if before is not None:
            ranked.masked_fill_(before[piece], GONE)
        worst = ranked.sort(dim=-1, descending=True, stable=True).indices[..., n:]
        chosen = torch.zeros(ranked.shape, dtype=torch.bool, device=weight.device).scatter_(-1, worst, True)
        if before is not None:
            chosen |= before[piece]
        groups[piece].masked_fill_(chosen, 0)
        _groups(mask, m)[piece] = chosen
    return mask


def scores(weight: Tensor, other: Tensor | None) -> Tensor:
    """Return `|w|` or `|w·other|`, in fp32 for narrower weights; a new tensor."""
    dtype = accumulation_dtype(weight.dtype)
    wide = weight.to(dtype)
    return wide.abs() if other is None else wide.mul(other.to(dtype)).abs_()


def _groups(t: Tensor, m: int) -> Tensor:
    """Return `(…, groups·m)` as `(…, groups, m)`."""
    return t.view(*t.shape[:-1], t.shape[-1] // m, m)
