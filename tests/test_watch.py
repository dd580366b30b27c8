"""Watch: whether tensors lie in memory as they did, in Python and in C++."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparse_lightning.kernels.watch import TorchWatch, native, watch

needs_native = pytest.mark.skipif(not native.can_watch([torch.zeros(1)]), reason="needs a C++ compiler on x86 Linux")
each_watch = pytest.mark.parametrize(
    "kind", [TorchWatch, pytest.param(native.NativeWatch, marks=needs_native)], ids=["torch", "native"]
)

CHANGES = {
    "shape": lambda t: t.data.reshape(3, 4),
    "transposed": lambda t: t.data.t(),
    "half of the rows": lambda t: t.data[:2],
    "dtype": lambda t: t.data.double(),
    "dtype of one size": lambda t: t.data.half(),
}


def weights():
    return [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]


@each_watch
def test_tensors_that_stay_are_known_and_those_that_move_are_followed(kind):
    tensors = weights()
    watched = kind(tensors)
    known = watched.pointers
    assert known == [t.data_ptr() for t in tensors]
    assert watched.look()
    assert watched.pointers is known, "the same list, so that nothing is compared"
    tensors[1].data = torch.randn(4, 3)
    assert watched.look()
    assert watched.pointers == [t.data_ptr() for t in tensors]
    assert watched.pointers != known


@each_watch
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_lies_differently_is_noticed(kind, change):
    tensors = weights()
    watched = kind(tensors)
    tensors[2].data = CHANGES[change](tensors[2])
    assert not watched.look(), change


@each_watch
def test_a_tensor_that_lies_differently_at_the_same_address_is_noticed(kind):
    square = nn.Parameter(torch.randn(4, 4))
    watched = kind([square])
    address = square.data_ptr()
    square.data = square.data.t()
    assert square.data_ptr() == address
    assert not watched.look()


@needs_native
def test_tensors_that_were_swapped_are_not_read():
    tensors = weights()
    watched = native.NativeWatch(tensors)
    torch.utils.swap_tensors(tensors[0], nn.Parameter(torch.randn(4, 3)))
    gc.collect()
    assert not watched.look()


@each_watch
def test_autograd_notices_what_was_written(kind):
    with torch.inference_mode():
        untracked = torch.randn(2)
    tensors = [*weights(), untracked]
    before = [t._version for t in tensors[:3]]
    kind(tensors).notify()
    assert [t._version for t in tensors[:3]] == [v + 1 for v in before]


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.booleans()), min_size=1, max_size=4))
def test_any_shapes_are_noted(shapes):
    tensors = [torch.zeros(shape).transpose(0, -1) if flip and shape else torch.zeros(shape) for shape, flip in shapes]
    watched = watch(tensors)
    assert watched.look()
    assert watched.look()
    for tensor, pointer in zip(tensors, watched.pointers, strict=True):
        assert pointer == tensor.data_ptr()
