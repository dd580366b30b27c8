"""nm_select: N:M sparsity in one pass over the weights: score, select and mask.

A group is m consecutive weights along the last dimension. The n with the highest scores are kept, the others become
+0.0; among equal scores the lower index is kept, and NaN ranks lowest. What is passed as `pruned` is never kept.

The score is `|w|`, or `|w·other|` if `other` is passed: a gradient, or the norms of the inputs of a layer. It is
computed in fp32 for narrower weights, and stored only for a small chunk of the weights at a time. Triton is optional,
so its kernel is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_lightning.errors import LayoutError, SparsityError
from sparse_lightning.kernels.availability import takes_triton
from sparse_lightning.kernels.nm_select import native, reference


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None, pruned: Tensor | None = None) -> Tensor:
    """Keep n of every m consecutive weights along the last dimension, in place; return the mask, True = pruned.

    Args:
        weight: `(…, groups·m)`, any strides.
        n: the number of weights kept in each group, from 0 to m.
        m: the size of a group; it divides the last dimension.
        other: a factor of the scores; broadcasts against `weight`.
        pruned: boolean, in the shape of `weight`: True for weights that stay pruned, whatever they are.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, -4.0, 3.0, 2.0]])
        >>> nm_select(weight, 2, 4)
        tensor([[ True, False, False,  True]])
        >>> weight
        tensor([[ 0., -4.,  3.,  0.]])
    """
    _check_pruned(weight, pruned)
    return _select(*_checked(weight, n, m, other), n, m, pruned)


def nm_select_many(
    weights: Sequence[Tensor],
    kept: Sequence[int],
    m: int,
    others: Sequence[Tensor] | None = None,
    pruned: Sequence[Tensor] | None = None,
) -> Tensor:
    """Run `nm_select` on several weights of one shape; return their masks, `(weights, *shape)`.

    On a CPU, weights with the same strides take one call, whatever their number.

    Args:
        weights: `(…, groups·m)` each, any strides.
        kept: for each weight the number of weights kept in each group, from 0 to m.
        m: the size of a group; it divides the last dimension.
        others: for each weight a factor of its scores; None for magnitudes alone.
        pruned: for each weight what stays pruned of it; None for nothing.

    Example:
        >>> import torch
        >>> nm_select_many([torch.tensor([1.0, -4.0]), torch.tensor([3.0, 2.0])], [1, 2], 2)
        tensor([[ True, False],
                [False, False]])
    """
    factors = [None] * len(weights) if others is None else others
    checked = [_checked(*each) for each in zip(weights, kept, [m] * len(weights), factors, strict=True)]
    found, wide = [weight for weight, _ in checked], [other for _, other in checked if other is not None]
    before = [None] * len(weights) if pruned is None else list(pruned)
    for weight, mask in zip(weights, before, strict=True):
        _check_pruned(weight, mask)
    if native.takes(found, m, wide or None, pruned):
        return native.nm_select_many(found, kept, m, wide or None, pruned)
    each = zip(checked, kept, before, strict=True)
    return torch.stack([_select(*own, n, m, mask) for own, n, mask in each])


def _select(weight: Tensor, other: Tensor | None, n: int, m: int, pruned: Tensor | None) -> Tensor:
    """Run the kernel for these tensors."""
    if takes_triton(weight):
        from sparse_lightning.kernels.nm_select import triton

        return triton.nm_select(weight, n, m, other, pruned)
    others, before = (None if tensor is None else [tensor] for tensor in (other, pruned))
    select = native.nm_select if native.takes([weight], m, others, before) else reference.nm_select
    return select(weight, n, m, other, pruned)


def _check_pruned(weight: Tensor, pruned: Tensor | None) -> None:
    if pruned is not None and (pruned.shape != weight.shape or pruned.dtype != torch.bool):
        raise LayoutError(
            f"`pruned` is {pruned.dtype} of shape {tuple(pruned.shape)}: pass a boolean mask of the shape of the "
            f"weight, {tuple(weight.shape)}"
        )


def _checked(weight: Tensor, n: int, m: int, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the arguments detached, `other` in the shape of the weight."""
    shape = tuple(weight.shape)
    if not weight.is_floating_point():
        raise LayoutError(f"{n}:{m} selection needs floating-point weights, not {weight.dtype}: convert them")
    if not shape or m < 1 or shape[-1] % m:
        raise LayoutError(f"groups of {m} do not divide the last dimension of a weight of shape {shape}: change m")
    if not 0 <= n <= m:
        raise SparsityError(f"n={n} is out of range: groups of m={m} weights can keep from 0 to {m}")
    if other is None:
        return weight.detach(), None
    try:
        return weight.detach(), other.detach().to(weight.device).expand(shape)
    except RuntimeError:
        raise LayoutError(f"`other` of shape {tuple(other.shape)} does not broadcast to the weight's {shape}") from None
