"""Cases of the Triton kernels against their references: in the interpreter, or on a GPU. See `triton_harness`.

Not collected by itself: `test_triton_kernels.py` runs it in processes of its own.
"""

from __future__ import annotations

import math

import pytest
import torch
from poison import poison  # noqa: F401
from triton_harness import case_device, is_interpreted

from sparse_lightning.kernels.block_apply import reference as apply_reference
from sparse_lightning.kernels.nm_select import reference as select_reference

pytestmark = [
    pytest.mark.usefixtures("poison"),
    # The interpreter computes with numpy, which warns of inf · 0.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Windows as (n0, l0, n1, l1, …) with the gap after each pair: unaligned rows, columns of a larger matrix, nothing
# that is a power of two, more dimensions than a kernel has axes.
WINDOWS = [
    ([(1, 1)], 0),
    ([(3, 63)], 0),
    ([(500, 1)], 0),
    ([(63, 4)], 0),
    ([(63, 4), (31, 4)], 0),
    ([(63, 1), (1, 500)], 3),
    ([(1, 63), (500, 1)], 3),
    ([(1, 5), (1, 300)], 2),
    ([(7, 9), (3, 21)], 1),
    ([(2, 32), (5, 32)], 0),
    ([(3, 2), (2, 3), (5, 1)], 2),
    ([(2, 1), (1, 3), (2, 2), (3, 1), (2, 5)], 1),
]


def make_window(pairs, gap, dtype, step=1):
    """A window on a larger storage, its odd values, and the storage."""
    strides, near = [], step
    for n, length in reversed(pairs):
        strides = [length * near, near, *strides]
        near = near * n * length + gap
    # As long again as a tile, so that what is written outside of the window is seen.
    storage = torch.randn(2 * near + 4096, device=case_device()).to(dtype)
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=dtype, device=case_device())
    storage[::5] = odd.repeat(len(storage))[: len(storage[::5])]
    return storage, [x for pair in pairs for x in pair], strides


def same(a, b):
    """Equal bit for bit."""
    integers = {2: torch.int16, 4: torch.int32, 1: torch.uint8}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


def numbers_and_nans(a, b):
    """Equal, NaN to NaN: the bits of a NaN are free."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("pairs", "gap"), WINDOWS, ids=str)
def test_fill(pairs, gap, dtype, step):
    from sparse_lightning.kernels.block_apply import triton

    storage, shape, strides = make_window(pairs, gap, dtype, step)
    wanted = storage.clone()
    mask = torch.rand([n for n, _ in pairs], device=storage.device) < 0.5
    apply_reference.fill_(wanted.as_strided(shape, strides, 2), mask)
    triton.fill_(storage.as_strided(shape, strides, 2), mask)
    assert same(storage, wanted)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("pairs", "gap"), WINDOWS, ids=str)
def test_scale(pairs, gap, dtype, step):
    from sparse_lightning.kernels.block_apply import triton

    storage, shape, strides = make_window(pairs, gap, dtype, step)
    wanted = storage.clone()
    # The interpreter cuts off what does not fit bf16, where GPUs and torch round: these products fit.
    exact = torch.tensor([0.0, 1.0, 0.5, -4.0], device=storage.device)
    multiplier = exact[torch.randint(4, [n for n, _ in pairs], device=storage.device)]
    apply_reference.scale_(wanted.as_strided(shape, strides, 2), multiplier)
    triton.scale_(storage.as_strided(shape, strides, 2), multiplier)
    assert numbers_and_nans(storage, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid_dtype", DTYPES, ids=str)
def test_scale_rounds_once(dtype, grid_dtype):
    from sparse_lightning.kernels.block_apply import triton

    if is_interpreted() and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not round to bf16")
    window = torch.randn(63, 5, device=case_device()).to(dtype)
    wanted, multiplier = window.clone(), torch.randn(63, device=case_device()).to(grid_dtype)
    apply_reference.scale_(wanted, multiplier.float())
    triton.scale_(window, multiplier)
    assert same(window, wanted)


def test_a_block_with_multiplier_one_keeps_its_bits():
    from sparse_lightning.kernels.block_apply import triton

    signalling = torch.tensor([0x7F800001, 0x7FC12345, -1, 5], dtype=torch.int32, device=case_device())
    window = signalling.repeat(6).view(torch.float32).view(6, 4)
    triton.scale_(window, torch.ones(6, device=case_device()))
    assert torch.equal(window.view(torch.int32), signalling.repeat(6).view(6, 4))


def test_grids_may_have_any_strides():
    from sparse_lightning.kernels.block_apply import triton

    window = torch.randn(7, 3, 9, 2, device=case_device())
    wanted, mask = window.clone(), (torch.rand(9, 21, device=case_device()) < 0.5).t()[::3]
    apply_reference.fill_(wanted, mask.contiguous())
    triton.fill_(window, mask)
    assert torch.equal(window, wanted)


def test_blocks_need_not_count_on_through_one_another():
    from sparse_lightning.kernels.block_apply import triton

    storage = torch.randn(4000, device=case_device())
    wanted = storage.clone()
    shape, strides = (3, 5, 4, 3, 2, 6), (1000, 150, 31, 10, 1, 2)
    mask = torch.rand(3, 4, 2, device=case_device()) < 0.5
    apply_reference.fill_(wanted.as_strided(shape, strides), mask)
    triton.fill_(storage.as_strided(shape, strides), mask)
    assert torch.equal(storage, wanted)


def far_apart(shape, strides):
    """A window whose elements lie further apart than 32 bits can count; memory is touched only where it is used.

    Where the strides themselves fit into 32 bits, it is their products with an index that don't.
    """
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    storage = torch.UntypedStorage(2 * size, device=case_device())
    window = torch.tensor([], dtype=torch.float16, device=case_device()).set_(storage, 0, shape, strides)
    return window.copy_(torch.arange(1, window.numel() + 1, device=case_device()).view(shape))


def test_block_apply_reaches_beyond_32_bits():
    from sparse_lightning.kernels.block_apply import triton

    window = far_apart((3, 1, 3, 4), (2**30 + 48, 2**30 + 48, 4, 1))
    wanted, mask = window.clone(), torch.eye(3, dtype=torch.bool, device=case_device())
    apply_reference.fill_(wanted, mask)
    triton.fill_(window, mask)
    assert torch.equal(window, wanted)
    triton.scale_(window, torch.where(mask, 1.0, 2.0))
    assert torch.equal(window, wanted * 2)


SELECTIONS = [
    ((1,), 1),
    ((3,), 3),
    ((63,), 9),
    ((3, 63), 7),
    ((500, 4), 4),
    ((5, 500), 5),
    ((63, 32), 8),
    ((2, 48), 16),
]


def make_weight(shape, dtype, strided):
    """Weights with ties, NaN and inf; as they come, transposed, or as some columns of a larger matrix."""
    weight = torch.randn(shape, device=case_device()).mul(2).round().div(2).to(dtype)
    weight.view(-1)[::7], weight.view(-1)[3::11] = math.nan, -math.inf
    if strided == "transposed":
        return weight.t().contiguous().t() if weight.ndim == 2 else weight
    if strided == "sliced":
        return torch.stack([weight, weight.neg(), weight], -1)[..., 1]
    return weight


@pytest.mark.parametrize("strided", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "m"), SELECTIONS, ids=str)
@pytest.mark.parametrize("other", ["none", "gradient", "norms"])
def test_select(shape, m, dtype, strided, other):
    from sparse_lightning.kernels.nm_select import triton

    weight = make_weight(shape, dtype, strided)
    factor = None
    if other != "none":
        factor = torch.randn(shape if other == "gradient" else shape[-1:], device=case_device()).to(dtype).expand(shape)
    for n in sorted({0, 1, m // 2, m}) if factor is None else [m // 2]:
        ours, theirs = weight.clone(), weight.clone()
        mask, wanted = triton.nm_select(ours, n, m, factor), select_reference.nm_select(theirs, n, m, factor)
        assert torch.equal(mask, wanted), f"{n}:{m}"
        assert same(ours, theirs), f"{n}:{m}"


def test_select_takes_more_dimensions_than_a_kernel_has_axes():
    from sparse_lightning.kernels.nm_select import triton

    weight = torch.randn(2, 4, 2, 6, 2, 2, 2, 16, device=case_device())[:, ::2, :, ::3, :, :, :, ::2]
    wanted = weight.clone()
    assert torch.equal(triton.nm_select(weight, 3, 8), select_reference.nm_select(wanted, 3, 8))
    assert torch.equal(weight, wanted)


def test_select_reaches_beyond_32_bits():
    from sparse_lightning.kernels.nm_select import triton

    weight = far_apart((2, 8), (2**31 + 48, 1))
    wanted = weight.clone()
    assert torch.equal(triton.nm_select(weight, 2, 4), select_reference.nm_select(wanted, 2, 4))
    assert torch.equal(weight, wanted)


@pytest.mark.parametrize("name", ["fill", "scale", "select"])
def test_writes_are_seen_by_autograd(name):
    from sparse_lightning.kernels.block_apply import triton as apply
    from sparse_lightning.kernels.nm_select import triton as select

    weight = torch.randn(4, 8, device=case_device())
    before, ones = weight._version, torch.ones(4, device=case_device())
    {
        "fill": lambda: apply.fill_(weight, ones.bool()),
        "scale": lambda: apply.scale_(weight, ones),
        "select": lambda: select.nm_select(weight, 2, 4),
    }[name]()
    assert weight._version > before
