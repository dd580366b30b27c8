"""nm_select: scores, choice and masking of N:M groups in one pass over the weights.

A group is m neighbours along the last dimension. The n with the highest scores stay, the others become +0.0; of
equal scores the lower index stays, and NaN ranks below all. The score is `|w|`, or `|w·other|` where `other` is
given: a gradient, or the norms of a layer's inputs. It is taken in fp32 where the weights are narrower, and never
stored for more than a small piece of the weights.
"""

from __future__ import annotations

from torch import Tensor

from sparse_lightning.errors import LayoutError, SparsityError
from sparse_lightning.kernels import block_score
from sparse_lightning.kernels.availability import takes_triton
from sparse_lightning.kernels.nm_select import compiled, cpu, reference


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None) -> Tensor:
    """Keep n of every m neighbours along the last dimension of a weight, in place; gives the mask, True = pruned.

    Args:
        weight: `(…, groups·m)`, any strides.
        n: how many of a group stay, from 0 to m.
        m: the size of a group; it divides the last dimension.
        other: what the weights are multiplied with before they are judged; broadcasts against `weight`.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, -4.0, 3.0, 2.0]])
        >>> nm_select(weight, 2, 4)
        tensor([[ True, False, False,  True]])
        >>> weight
        tensor([[ 0., -4.,  3.,  0.]])
    """
    weight, other = _checked(weight, n, m, other)
    if takes_triton(weight):
        from sparse_lightning.kernels.nm_select import triton

        return triton.nm_select(weight, n, m, other)
    if weight.device.type != "cpu" or weight.dtype not in cpu.INTEGERS:
        return reference.nm_select(weight, n, m, other)
    if _pays(weight) and compiled.takes(weight, m, other):
        return compiled.nm_select(weight, n, m, other)
    return cpu.nm_select(weight, n, m, other)


def _pays(weight: Tensor) -> bool:
    """Whether compiling is possible, and repaid by a weight of this size."""
    return weight.numel() >= block_score.PAYS and block_score.compiled.has_compiler()


def _checked(weight: Tensor, n: int, m: int, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The arguments without their gradients, `other` in the shape of the weight."""
    shape = tuple(weight.shape)
    if not weight.is_floating_point():
        raise LayoutError(f"{n}:{m} on weights of dtype {weight.dtype}: they must be floats")
    if not shape or m < 1 or shape[-1] % m:
        raise LayoutError(f"groups of {m} along the last dimension of a weight of shape {shape}: they don't divide it")
    if not 0 <= n <= m:
        raise SparsityError(f"{n} of {m} weights to keep: it must lie between 0 and {m}")
    if other is None:
        return weight.detach(), None
    try:
        return weight.detach(), other.detach().to(weight.device).expand(shape)
    except RuntimeError:
        raise LayoutError(f"`other` of shape {tuple(other.shape)} does not broadcast to the weight's {shape}") from None
