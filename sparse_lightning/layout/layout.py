"""Layout: a function from coordinates to element offsets, and its way from and to tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from sparse_lightning.errors import LayoutError
from sparse_lightning.layout.algebra import LayoutAlgebra
from sparse_lightning.layout.view_ops import ViewOp, view_ops

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Layout(LayoutAlgebra):
    """A shape with one stride for each dimension and an offset: coordinate → element of a storage.

    Strides may be any integers: non-unit, zero, negative. Without strides the layout is row-major.
    Two layouts are equal when they are the same function; the stride of a dimension of size 1 is kept
    as passed, but ignored in comparisons.

    Example:
        >>> columns = Layout((2, 3)).permute((1, 0))
        >>> columns
        Layout((3, 2), stride=(1, 3), offset=0)
        >>> columns((2, 1))
        5
    """

    def movements(self, base: LayoutAlgebra) -> tuple[ViewOp, ...]:
        """Return this layout as view operations on `base`; see `sparse_lightning.layout.view_ops`."""
        return view_ops(self, base)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of a tensor in its storage; equal layouts share one object.

        torch.compile leaves its graph here, and with `fullgraph=True` raises an error.

        Raises:
            LayoutError: for a dynamic dimension of torch.export.
        """
        import torch  # here, so that layouts can be used without loading torch

        if torch.compiler.is_compiling():
            _check_integers(tensor)
        return _interned(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of this layout in the storage of a tensor: a view, a copy only if a stride is negative.

        Plain tensors take `as_strided`. Tensor subclasses, such as DTensor, and traced values do not support it, or
        not reliably: they take ordinary view operations, see `movements`.
        """
        import torch  # here, so that layouts can be used without loading torch

        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
            upright, flipped = self.positive()
            live = tensor.as_strided(upright.shape, upright.stride, upright.offset)
            return live.flip(flipped) if flipped else live
        for op in self.movements(Layout.of(tensor)):
            tensor = op.of_tensor(tensor)
        return tensor


def _check_integers(tensor: torch.Tensor) -> None:
    """Raise an error if a traced tensor has no integers for its sizes and strides."""
    import torch

    if torch.compiler.is_dynamo_compiling():
        from sparse_lightning.compat.untraced import layouts_are_not_traced

        layouts_are_not_traced()
    elif not all(type(n) is int for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset())):
        raise LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} with a dynamic dimension has no Layout, which consists of "
            "integers: export it without dynamic_shapes, or use views of parameters only, whose shapes are fixed"
        )


@lru_cache(maxsize=4096)
def _interned(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Layout:
    return Layout(shape, stride, offset)
