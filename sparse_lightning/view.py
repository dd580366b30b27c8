"""View: a strided window on a parameter. Writes go through to the parameter; nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_lightning.chart import lies_inside, restride
from sparse_lightning.chunk import chunks
from sparse_lightning.errors import LayoutError
from sparse_lightning.layout import Layout, check_division, grid_shape, resolve_block_shape
from sparse_lightning.part import BlockPart, check_writable


class View:
    """A layout bound to a Parameter or Tensor, that can stand where the parameter stands.

    The view follows its parameter: to another device or dtype, through `load_state_dict`, with a deepcopy
    of its model, and to other strides where strides can express the same elements; where they can't, using
    the view raises `LayoutError`. It holds the parameter and nothing else of the model: where a module takes
    another Parameter object in its place (`load_state_dict(assign=True)`), the view stays with the old one.

    Args:
        param: the parameter or tensor whose elements are viewed.
        shape: the shape of the view.
        stride: one stride for each dimension; any integers.
        offset: where coordinate 0 lies, counted in elements from the start of the storage; None is where
            the parameter itself begins.

    Example:
        >>> qkv = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
        >>> keys = View(qkv, (2, 4), (4, 1), offset=8)
        >>> keys.data = torch.zeros(2, 4)
        >>> qkv[:, 0].tolist()
        [0.0, 4.0, 0.0, 0.0, 16.0, 20.0]
    """

    def __init__(self, param: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int | None = None) -> None:
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
                + (", or let a negative stride begin at the end it counts from" if low < self._base.offset else "")
            )

    @staticmethod
    def from_existing(x: View | Tensor) -> View:
        """A View as it is; a Parameter or Tensor as the identity view of itself."""
        return x if isinstance(x, View) else View(x, x.shape, x.stride())

    @property
    def layout(self) -> Layout:
        """The layout on the parameter's storage as it is now."""
        now = Layout.of(self.param)
        if now == self._base:
            return self._layout
        if now.shape != self._base.shape:
            raise LayoutError(
                f"the parameter of a view changed its shape from {self._base.shape} to {now.shape}: make the view anew"
            )
        return restride(self._layout, self._base, now)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the view."""
        return self._layout.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the view on the parameter's storage as it is now."""
        return self.layout.stride

    @property
    def offset(self) -> int:
        """Where coordinate 0 lies, counted from the start of the parameter's storage as it is now."""
        return self.layout.offset

    @property
    def ndim(self) -> int:
        """How many dimensions the view has."""
        return self._layout.ndim

    def numel(self) -> int:
        """How many elements the view has."""
        return self._layout.numel

    @property
    def cosize(self) -> int:
        """The highest reachable element, counted from the offset, plus one."""
        return self.layout.cosize

    @property
    def data(self) -> Tensor:
        """The elements, live: writing to this tensor writes to the parameter, and autograd notices.

        With negative strides this is a copy in the order of the view, since torch has none; set `data`
        to write through such a view. The block operations never need that copy.
        """
        return self.layout.on(self.param.detach())

    @data.setter
    def data(self, values: Tensor) -> None:
        copy_(self, values)

    @staticmethod
    def block_view_of(t: Tensor, block_shape: Sequence[int], reorder: bool = True, merge: bool = False) -> Tensor:
        """A tensor seen as a grid of blocks.

        Args:
            t: a tensor whose shape the blocks divide.
            block_shape: −1 spans a dimension, missing trailing entries are 1.
            reorder: `(B0, B1, …, b0, b1, …)`; without it `(B0, b0, B1, b1, …)`. Neither copies.
            merge: `(B0, B1, …, b0·b1·…)`. This copies unless the elements of a block lie on one stride, as
                those of a block within a single row do.
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
        """A grid spread over the elements of its blocks.

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

    def whole_part(self, block: tuple[int, ...]) -> BlockPart:
        """All blocks of the view, those at the edge smaller where the block shape does not divide."""
        return BlockPart.whole(self.param, self.layout, block)

    def _blocks(self, block_shape: Sequence[int]) -> tuple[int, ...]:
        block = resolve_block_shape(self.shape, block_shape)
        check_division(self.shape, block)
        return block

    def linear_offset(self, idx: Tensor) -> Tensor:
        """Indices into the view, `(…, ndim)`, as offsets in the storage, the view's own included, `(…)`."""
        if idx.shape[-1:] != (self.ndim,):
            raise LayoutError(f"indices of shape {tuple(idx.shape)} into a view of {self.ndim} dimensions {self.shape}")
        layout = self.layout
        stride = torch.tensor(layout.stride, dtype=torch.int64, device=idx.device)
        return (idx.to(torch.int64) * stride).sum(-1) + layout.offset

    def to_param_rc(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into the view, `(…, ndim)`, as rows and columns of a two-dimensional parameter."""
        base = Layout.of(self.param)
        if base.ndim != 2:
            raise LayoutError(f"rows and columns need a parameter of two dimensions, not of shape {base.shape}")
        rest = self.linear_offset(idx) - base.offset
        place = [torch.zeros_like(rest), torch.zeros_like(rest)]
        for d in sorted((d for d in (0, 1) if base.shape[d] > 1 and base.stride[d]), key=lambda d: -base.stride[d]):
            place[d] = rest // base.stride[d]
            rest = rest % base.stride[d]
        return place[0], place[1]

    def like(self, t: Tensor) -> View:
        """The same view of another tensor of the parameter's shape, such as its gradient or optimizer state.

        Raises:
            LayoutError: where the strides of `t` can't express the view.
        """
        now = Layout.of(self.param)
        if tuple(t.shape) != now.shape:
            raise LayoutError(f"a tensor of shape {tuple(t.shape)} is not like the parameter of shape {now.shape}")
        layout = restride(self.layout, now, Layout.of(t))
        return View(t, layout.shape, layout.stride, layout.offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.param is other.param and self.layout == other.layout

    def __hash__(self) -> int:
        return hash((id(self.param), self.shape))

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"View({tuple(layout.shape)}, stride={layout.stride}, offset={layout.offset}, "
            f"of {type(self.param).__name__} {tuple(self.param.shape)} {self.param.dtype})"
        )


def from_blocks(blocks: Tensor, block_shape: Sequence[int]) -> Tensor:
    """The tensor whose merged block view is `(B0, B1, …, b0·b1·…)`: `block_view_of` undone, by a copy."""
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
    """A view with the shape and strides asked for, negative ones included, on a buffer of just its size.

    Example:
        >>> backwards = empty_strided((3,), (-2,))
        >>> backwards.offset, backwards.param.numel()
        (4, 5)
    """
    layout = Layout(shape, stride)
    buffer = torch.empty(layout.storage_size, dtype=dtype, device=device)
    return View(buffer, layout.shape, layout.stride, layout.offset - layout.span[0])


def copy_(dst: View | Tensor, src: View | Tensor) -> None:
    """Copy between any two layouts of the same shape, in place.

    One pass, straight from the one to the other. A dimension that the two count in opposite directions
    passes through a buffer of the size of a cache, piece by piece. Only where source and destination
    share elements is the source first copied as a whole.
    """
    to, source = View.from_existing(dst), View.from_existing(src)
    if to.shape != source.shape:
        raise LayoutError(f"can't copy shape {source.shape} to shape {to.shape}: the shapes must be the same")
    target, given = to.layout, source.layout
    check_writable(target)
    values = source.param.detach()
    if _share_storage(to.param, values):
        if to.param.dtype == values.dtype and target == given:
            return
        if to.param.dtype != values.dtype or target.overlaps(given):
            values = given.on(values).clone()
            given = Layout.of(values)
    upright, flipped = target.positive()
    from_upright, opposed = given.flip(flipped).positive()
    _copy_opposed(upright.on(to.param.detach()), from_upright.on(values), opposed)


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
