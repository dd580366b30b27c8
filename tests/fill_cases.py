"""Blocks of many tensors for `block_fill`: any dtype, strides, direction, edge and shard, and what they must become."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from strategies import block_shapes, shapes, storage_of, tensors, walks

from sparse_lightning import BlockSpec, Layout, View
from sparse_lightning.layout.permutation import inverse

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
ODD = [math.inf, -math.inf, math.nan, -0.0, -1.0, 3.0]


def odd_values(tensor: torch.Tensor) -> torch.Tensor:
    """Write values that a product with zero would not make zero."""
    return tensor.copy_(torch.tensor(ODD).repeat(tensor.numel())[: tensor.numel()].view(tensor.shape).to(tensor.dtype))


@st.composite
def filled(draw):
    """A tensor, its blocks, how many there are, and the grid of their masks in the order of a coupling."""
    shape, dtype = draw(shapes(max_dims=3, max_numel=128)), draw(st.sampled_from(DTYPES))
    tensor = odd_values(draw(tensors(shape=shape, dtype=dtype)))
    layout = draw(walks(Layout.of(tensor), kinds=["permute", "slice", "step", "flip", "split", "insert"]))
    view = View(tensor, layout.shape, layout.stride, layout.offset)
    spec = BlockSpec(view, draw(block_shapes(view.shape, divide=False)), edge="partial")
    box = tuple(sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in tensor.shape)
    is_whole = draw(st.booleans())
    local = tensor if is_whole else tensor[tuple(slice(lo, hi) for lo, hi in box)].clone()
    part = spec.part() if is_whole else spec.part_of_box(local, tuple((lo, hi) for lo, hi in box))
    # As in a coupling: the mask is a grid whose dimensions stand in another order.
    order = draw(st.permutations(range(spec.grid_ndim)))
    shape = [spec.grid_shape[d] for d in order]
    return local, part, spec.numblk(), shape, inverse(order)


def combine(cases) -> tuple[list, list, torch.Tensor, list]:
    """Return the tensors, the windows, one flat mask for all, and what the reference makes of each tensor."""
    tensors_, windows, wanted, start = [], [], [], 0
    mask = torch.rand(sum(n for _, _, n, _, _ in cases)) < torch.rand(())
    for i, (tensor, part, n, shape, order) in enumerate(cases):
        windows += part.fill_windows(i, Layout(shape, None, start).permute(order))
        grid = mask[start : start + n].view(shape).permute(order)
        before = tensor.clone()
        part.fill_(grid)
        wanted.append(bits(tensor).clone())
        tensor.copy_(before)
        tensors_.append(tensor)
        start += n
    return tensors_, windows, mask, wanted


def on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a copy with the same strides on another device; on the same device the tensor itself."""
    if device == "cpu":
        return tensor
    storage = storage_of(tensor).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
