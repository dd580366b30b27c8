"""Window: the elements of a tensor's storage that a layout reaches, as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_lightning.layout import Layout


def window(tensor: Tensor, layout: Layout) -> Tensor:
    """The layout as a live view of the tensor's storage; a copy only where a stride is negative.

    Plain tensors take `as_strided`. Tensor subclasses (DTensor among them) and values that are being traced
    have none, or none that can be trusted: they take ordinary view operations, see `movements`.
    """
    if type(tensor) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
        upright, flipped = layout.positive()
        live = tensor.as_strided(upright.shape, upright.stride, upright.offset)
        return live.flip(flipped) if flipped else live
    for movement in layout.movements(Layout.of(tensor)):
        tensor = movement.of_tensor(tensor)
    return tensor
