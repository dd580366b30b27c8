"""View: a strided view of a parameter. Writes go to the parameter; nothing is copied."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_lightning.blocks.local_blocks import LocalBlocks, check_writable
from sparse_lightning.errors import CopyWarning, LayoutError
from sparse_lightning.kernels.chunks import chunks
from sparse_lightning.layout import Layout, check_division, grid_shape, resolve_block_shape
from sparse_lightning.layout.coordinates import lies_inside, restride
from sparse_lightning.layout.locate import unravel


class View:
    """A layout bound to a Parameter or Tensor.

    The view follows its parameter: to another device or dtype, through `load_state_dict`, with a deepcopy of its
    model, and to other strides if they can express the same elements; if not, using the view raises `LayoutError`.
    It references only the parameter: if a module replaces its Parameter object (`load_state_dict(assign=True)`), the
    view keeps the old one.

    Args:
        param: the parameter or tensor whose elements are viewed.
        shape: the shape of the view.
        stride: one stride for each dimension; any integers.
        offset: the position of coordinate 0, in elements from the start of the storage; None for the offset of the
            parameter.

    Example:
        >>> qkv = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
        >>> keys = View(qkv, (2, 4), (4, 1), offset=8)
        >>> keys.data = torch.zeros(2, 4)
        >>> qkv[:, 0].tolist()
        [0.0, 4.0, 0.0, 0.0, 16.0, 20.0]
    """

    def __init__(self, param: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int | None = None) -> None:
        if param.is_quantized:
            raise LayoutError(
                f"a quantised tensor of shape {tuple(param.shape)} and dtype {param.dtype} has no View: its elements "
                "are not the numbers that they stand for. Prune the weights before they are quantised"
            )
        _check_strided(param)
        self.param = param
        self._base = Layout.of(param)
        self._layout = Layout(shape, stride, self._base.offset if offset is None else offset)
        if not lies_inside(self._layout, self._base):
            low, high = self._layout.span
            raise LayoutError(
                f"a view of shape {self.shape}, stride {self._layout.stride} and offset {self._layout.offset} "
                f"reaches from element {low} to {high} of the storage, outside of its parameter of shape "
                f"{self._base.shape}, stride {self._base.stride} and offset {self._base.offset}: "
                "make the shape, the strides or the offset smaller"
                + (", or start a negative stride at the end of its range" if low < self._base.offset else "")
            )

    @classmethod
    def from_existing(cls, x: View | Tensor) -> View:
        """Return a View unchanged, and a Parameter or Tensor as the identity view of itself, of this class."""
        if isinstance(x, View):
            return x
        _check_strided(x)
        return cls(x, x.shape, x.stride())

    @property
    def layout(self) -> Layout:
        """The layout on the current storage of the parameter."""
        now = Layout.of(self.param)
        if now == self._base:
            return self._layout
        if now.shape != self._base.shape:
            raise LayoutError(
                f"the parameter of a view changed its shape from {self._base.shape} to {now.shape}: create a new view"
            )
        return restride(self._layout, self._base, now)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the view."""
        return self._layout.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the view on the current storage of the parameter."""
        return self.layout.stride

    @property
    def offset(self) -> int:
        """The position of coordinate 0 in the current storage of the parameter."""
        return self.layout.offset

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._layout.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return self._layout.numel

    @property
    def cosize(self) -> int:
        """The highest offset relative to the offset of the view, plus one."""
        return self.layout.cosize

    @property
    def data(self) -> Tensor:
        """The elements, live: writing to this tensor writes to the parameter, and autograd tracks it.

        With negative strides this is a copy in the order of the view, as torch does not support them, and a
        `CopyWarning` says so: `read` returns the same without a warning, and setting `data` writes through. Block
        operations never need that copy.

        Setting it broadcasts as `Tensor.copy_` does; a number fills the view.
        """
        self.warn_of_copy(stacklevel=3)
        return self.read()

    @data.setter
    def data(self, values: Tensor | float) -> None:
        copy_(self, values)

    def read(self) -> Tensor:
        """Return the elements in the order of the view: live, or a copy if a stride is negative."""
        return self.layout.on(self.param.detach())

    def warn_of_copy(self, stacklevel: int) -> None:
        """Warn that a tensor of the elements is a copy, if a stride is negative."""
        layout = self.layout
        if layout.positive()[1]:
            warnings.warn(
                f"the data of a view of shape {layout.shape} is a copy, because of its negative strides "
                f"{layout.stride}: a write to it is lost. Set `data` to write, or call `read()` for a copy",
                CopyWarning,
                stacklevel,
            )

    @staticmethod
    def block_view_of(t: Tensor, block_shape: Sequence[int], reorder: bool = True, merge: bool = False) -> Tensor:
        """Return a tensor as a grid of blocks.

        Args:
            t: a tensor whose shape is divisible by the block shape.
            block_shape: −1 spans a dimension, missing trailing entries are 1.
            reorder: `(B0, B1, …, b0, b1, …)`; without it `(B0, b0, B1, b1, …)`. Neither copies.
            merge: `(B0, B1, …, b0·b1·…)`. This copies unless a single stride expresses the elements of a block, as
                for a block within a single row.
        """
        block = resolve_block_shape(t.shape, block_shape)
        check_division(t.shape, block)
        interleaved = t.view([x for pair in zip(grid_shape(t.shape, block), block, strict=True) for x in pair])
        if not (reorder or merge):
            return interleaved
        blocks = interleaved.permute(*range(0, 2 * t.ndim, 2), *range(1, 2 * t.ndim, 2))
        return blocks.flatten(t.ndim) if merge else blocks

    @staticmethod
    def broadcast_block_to_element(grid: Tensor, block_shape: Sequence[int], fake: bool = False) -> Tensor:
        """Return a grid broadcast to the elements of its blocks.

        Args:
            grid: `(B0, B1, …)`.
            block_shape: `(b0, b1, …)`, one positive entry for each dimension of the grid.
            fake: only insert the dimensions of size 1, `(B0, 1, B1, 1, …)`, which broadcast against
                `block_view_of(t, block_shape, reorder=False)`. Without it the result is a new tensor of
                shape `(B0·b0, B1·b1, …)`.
        """
        if len(block_shape) != grid.ndim or any(b < 1 for b in block_shape):
            raise LayoutError(
                f"a grid of shape {tuple(grid.shape)} needs a block shape of {grid.ndim} positive entries, "
                f"not {tuple(block_shape)}"
            )
        thin = grid.view([x for n in grid.shape for x in (n, 1)])
        if fake:
            return thin
        wide = thin.expand([x for n, b in zip(grid.shape, block_shape, strict=True) for x in (n, b)])
        return wide.reshape([n * b for n, b in zip(grid.shape, block_shape, strict=True)])

    def apply_multiplier(self, multiplier: Tensor, block_shape: Sequence[int]) -> None:
        """Multiply each block by its grid value, in place."""
        self.whole_part(self._blocks(block_shape)).scale_(multiplier)

    def apply_mask(self, mask: Tensor, block_shape: Sequence[int]) -> None:
        """Fill the blocks with zero where the mask is True, in place."""
        self.whole_part(self._blocks(block_shape)).fill_(mask)

    def whole_part(self, block: tuple[int, ...]) -> LocalBlocks:
        """Return all blocks of the view; those at the edge are smaller if the block shape does not divide."""
        return LocalBlocks.whole(self.param, self.layout, block)

    def _blocks(self, block_shape: Sequence[int]) -> tuple[int, ...]:
        block = resolve_block_shape(self.shape, block_shape)
        check_division(self.shape, block)
        return block

    def linear_offset(self, idx: Tensor) -> Tensor:
        """Return indices into the view, `(…, ndim)`, as offsets in the storage, that of the view included, `(…)`."""
        if idx.shape[-1:] != (self.ndim,):
            raise LayoutError(
                f"indices of shape {tuple(idx.shape)} do not fit a view of shape {self.shape}: "
                f"the last size must be {self.ndim}"
            )
        layout = self.layout
        stride = torch.tensor(layout.stride, dtype=torch.int64, device=idx.device)
        return (idx.to(torch.int64) * stride).sum(-1) + layout.offset

    def to_param_rc(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices into the view, `(…, ndim)`, as rows and columns of a two-dimensional parameter."""
        base = Layout.of(self.param)
        if base.ndim != 2:
            raise LayoutError(f"rows and columns need a parameter of two dimensions, not of shape {base.shape}")
        [row, column], _ = unravel(base, self.linear_offset(idx))
        return row, column

    def like(self, t: Tensor) -> View:
        """Return the same view of another tensor of the parameter's shape, such as its gradient or optimizer state.

        Raises:
            LayoutError: if the strides of `t` can't express the view.
        """
        now = Layout.of(self.param)
        if tuple(t.shape) != now.shape:
            raise LayoutError(
                f"a tensor of shape {tuple(t.shape)} does not have the shape {now.shape} of the parameter"
            )
        layout = restride(self.layout, now, Layout.of(t))
        return View(t, layout.shape, layout.stride, layout.offset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View):
            return NotImplemented
        return self.param is other.param and self.layout == other.layout

    def __hash__(self) -> int:
        return hash((id(self.param), self.shape))

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"View({tuple(layout.shape)}, stride={layout.stride}, offset={layout.offset}, "
            f"of {type(self.param).__name__} {tuple(self.param.shape)} {self.param.dtype})"
        )


def from_blocks(blocks: Tensor, block_shape: Sequence[int]) -> Tensor:
    """Return a copy of the tensor whose merged block view is `(B0, B1, …, b0·b1·…)`: the inverse of `block_view_of`."""
    ndim = len(block_shape)
    apart = blocks.reshape(*blocks.shape[:ndim], *block_shape)
    mixed = apart.permute([x for d in range(ndim) for x in (d, d + ndim)])
    return mixed.reshape([n * b for n, b in zip(blocks.shape[:ndim], block_shape, strict=True)])


def empty_strided(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> View:
    """Return a view with any strides, negative ones included, on a new buffer of the smallest size.

    Example:
        >>> backwards = empty_strided((3,), (-2,))
        >>> backwards.offset, backwards.param.numel()
        (4, 5)
    """
    layout = Layout(shape, stride)
    buffer = torch.empty(layout.storage_size, dtype=dtype, device=device)
    return View(buffer, layout.shape, layout.stride, layout.offset - layout.span[0])


def copy_(dst: View | Tensor, src: View | Tensor | float) -> None:
    """Copy between any two layouts, in place; the source broadcasts as in `Tensor.copy_`, and a number fills.

    One pass, without a temporary. Dimensions that the two traverse in opposite directions are copied in chunks through
    a cache-sized buffer. The source is copied as a whole first only if source and destination share elements.
    """
    to = View.from_existing(dst)
    target = to.layout
    check_writable(target)
    upright, flipped = target.positive()
    if not isinstance(src, View | Tensor):
        upright.on(to.param.detach()).fill_(src)
        return
    source = View.from_existing(src)
    given, values = _broadcast(source.layout, to.shape), source.param.detach()
    if _share_storage(to.param, values):
        if to.param.dtype == values.dtype and target == given:
            return
        if to.param.dtype != values.dtype or target.overlaps(given):
            values = source.layout.on(values).clone()
            given = _broadcast(Layout.of(values), to.shape)
    from_upright, opposed = given.flip(flipped).positive()
    _copy_opposed(upright.on(to.param.detach()), from_upright.on(values), opposed)


def _check_strided(param: Tensor) -> None:
    if param.layout != torch.strided:
        raise LayoutError(
            f"a tensor of shape {tuple(param.shape)} and layout {param.layout} has no View: it stores no zeros, and "
            "has no strides. Convert it by to_dense()"
        )


def _broadcast(layout: Layout, shape: tuple[int, ...]) -> Layout:
    try:
        return layout.expand(shape)
    except LayoutError:
        raise LayoutError(
            f"can't copy shape {layout.shape} to shape {shape}: the shapes must be the same, or broadcast"
        ) from None


def _copy_opposed(dst: Tensor, src: Tensor, opposed: tuple[int, ...]) -> None:
    if not opposed:
        dst.copy_(src)
        return
    for piece in chunks(dst.shape, dst.device):
        mirrored = list(piece)
        for d in opposed:
            low, high, _ = piece[d].indices(dst.shape[d])
            mirrored[d] = slice(dst.shape[d] - high, dst.shape[d] - low)
        dst[piece].copy_(src[tuple(mirrored)].flip(opposed))


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
