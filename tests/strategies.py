"""Random layouts, tensors and views for the laws."""

from __future__ import annotations

import itertools
import math
import warnings

import torch
from hypothesis import strategies as st

from sparse_lightning import CopyWarning, Layout, LayoutError, View


def offsets(layout: Layout) -> list[int]:
    """All offsets of a layout in row-major order of its coordinates: index arithmetic in the plainest way."""
    return [
        layout.offset + sum(x * s for x, s in zip(coord, layout.stride, strict=True))
        for coord in itertools.product(*map(range, layout.shape))
    ]


ANY_STRIDE = st.integers(-12, 12)


@st.composite
def layouts(draw, max_dims=5, max_size=4, strides=ANY_STRIDE, min_size=1):
    """Any integer strides: non-unit, zero, negative."""
    shape = draw(st.lists(st.integers(min_size, max_size), max_size=max_dims))
    stride = draw(st.lists(strides, min_size=len(shape), max_size=len(shape)))
    return Layout(shape, stride, draw(st.integers(0, 9)))


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def shapes(draw, min_dims=1, max_dims=4, max_numel=512):
    shape = draw(st.lists(SIZES, min_size=min_dims, max_size=max_dims))
    while math.prod(shape) > max_numel:
        shape[shape.index(max(shape))] = 1
    return tuple(shape)


@st.composite
def tensors(draw, shape=None, dtype=torch.float32):
    """Distinct integers; contiguous, transposed, channels_last, sliced, or at an offset in a larger storage."""
    shape = draw(shapes()) if shape is None else shape
    order = draw(st.permutations(range(len(shape))))
    padded = [n + draw(st.sampled_from([0, 0, 1, 3])) for n in shape]
    front = draw(st.sampled_from([0, 0, 5]))
    inverse = [order.index(d) for d in range(len(shape))]
    storage = torch.arange(1, front + math.prod(padded) + 1).to(dtype)
    dense = storage[front:].view([padded[d] for d in order]).permute(inverse)
    return dense[tuple(slice(p - n, p) for p, n in zip(padded, shape, strict=True))]


@st.composite
def walks(draw, base: Layout, max_steps=5, signed=True, kinds=None):
    """A layout that view operations reach from a base."""
    layout = base
    kinds = kinds or ["permute", "slice", "step", "flip", "split", "merge", "insert"]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=max_steps)):
        if not layout.ndim:
            break
        d = draw(st.integers(0, layout.ndim - 1))
        try:
            if kind == "permute":
                layout = layout.permute(draw(st.permutations(range(layout.ndim))))
            elif kind == "slice":
                low = draw(st.integers(0, layout.shape[d] - 1))
                layout = layout.slice(d, low, draw(st.integers(low + 1, layout.shape[d])))
            elif kind == "step":
                layout = layout.slice(d, None, None, draw(st.integers(1, 3)))
            elif kind == "flip" and signed:
                layout = layout.flip([d])
            elif kind == "split":
                n = layout.shape[d]
                layout = layout.split(d, (draw(st.sampled_from([x for x in range(1, n + 1) if n % x == 0])), -1))
            elif kind == "merge" and d:
                layout = layout.merge((d - 1, d))
            elif kind == "insert" and layout.ndim < 5:
                layout = layout.reshape((*layout.shape[:d], 1, *layout.shape[d:]))
        except LayoutError:
            continue
    return layout


@st.composite
def views(draw, signed=True, dtype=torch.float32, as_parameter=True):
    """A view of a parameter, by view operations or by whatever strides stay inside of it."""
    tensor = draw(tensors(dtype=dtype))
    param = torch.nn.Parameter(tensor) if as_parameter and dtype.is_floating_point else tensor
    layout = draw(walks(Layout.of(param), signed=signed))
    return View(param, layout.shape, layout.stride, layout.offset)


@st.composite
def block_shapes(draw, shape, divide=True):
    """A block shape for a shape, each entry a divisor unless edges are wanted."""
    sizes = [[x for x in range(1, n + 1) if n % x == 0 or not divide] for n in shape]
    return tuple(draw(st.sampled_from(choices)) for choices in sizes)


def data_of(has_data) -> torch.Tensor:
    """The data of a view or a spec, which warns if and only if a negative stride makes it a copy."""
    view = has_data if isinstance(has_data, View) else has_data.view
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = has_data.data
    is_copy = any(s < 0 and n > 1 for s, n in zip(view.stride, view.shape, strict=True)) and view.numel() > 0
    assert [warning.category for warning in caught] == [CopyWarning] * is_copy
    return data


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, flat."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)
