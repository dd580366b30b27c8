"""Cases of the Triton kernels against their references: in the interpreter, or on a GPU. See `triton_harness`.

Not collected by itself: `test_triton_kernels.py` runs it in processes of its own.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from fill_cases import bits, combine, filled, on_device
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from pairwise import in_turn
from poison import poison  # noqa: F401
from triton_harness import case_device, is_interpreted

from sparse_lightning import Blocks, BlockSpec, Constant, Layout, Sparsifier
from sparse_lightning.kernels.block_apply import reference as apply_reference
from sparse_lightning.kernels.nm_select import reference as select_reference
from sparse_lightning.kernels.tile_linear import reference as tile_reference
from sparse_lightning.tiles.cutting import cut

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


@in_turn(window=WINDOWS, dtype=DTYPES, step=[1, 2])
def test_fill(window, dtype, step):
    from sparse_lightning.kernels.block_apply import triton

    pairs, gap = window
    storage, shape, strides = make_window(pairs, gap, dtype, step)
    wanted = storage.clone()
    mask = torch.rand([n for n, _ in pairs], device=storage.device) < 0.5
    apply_reference.fill_(wanted.as_strided(shape, strides, 2), mask)
    triton.fill_(storage.as_strided(shape, strides, 2), mask)
    assert same(storage, wanted)


@in_turn(window=WINDOWS, dtype=DTYPES, step=[1, 2])
def test_scale(window, dtype, step):
    from sparse_lightning.kernels.block_apply import triton

    pairs, gap = window
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
    ((3, 128), 64),
    ((2, 130), 65),
    ((3, 1024), 512),
    ((2, 300), 300),
    ((4096,), 4096),
]
"""The last ones are too large for a kernel; in all but contiguous strides, their rows cannot be merged."""


def make_weight(shape, dtype, strided):
    """Weights with ties, NaN and inf; as they come, transposed, or as some columns of a larger matrix."""
    weight = torch.randn(shape, device=case_device()).mul(2).round().div(2).to(dtype)
    weight.view(-1)[::7], weight.view(-1)[3::11] = math.nan, -math.inf
    if strided == "transposed":
        return weight.t().contiguous().t() if weight.ndim == 2 else weight
    if strided == "sliced":
        return torch.stack([weight, weight.neg(), weight], -1)[..., 1]
    return weight


@in_turn(
    groups=SELECTIONS,
    dtype=DTYPES,
    strided=["contiguous", "transposed", "sliced"],
    other=["none", "gradient", "norms"],
)
def test_select(groups, dtype, strided, other):
    from sparse_lightning.kernels.nm_select import triton

    shape, m = groups
    weight = make_weight(shape, dtype, strided)
    factor = None
    if other != "none":
        factor = torch.randn(shape if other == "gradient" else shape[-1:], device=case_device()).to(dtype).expand(shape)
    for n in sorted({0, 1, m // 2, m}) if factor is None else [m // 2]:
        ours, theirs = weight.clone(), weight.clone()
        pruned = torch.rand(shape, device=case_device()) < 0.3 if n == m // 2 else None
        mask, wanted = (f.nm_select(w, n, m, factor, pruned) for f, w in ((triton, ours), (select_reference, theirs)))
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


class CountedLaunches:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@settings(max_examples=examples(25) if is_interpreted() else 200, deadline=None)
@given(st.lists(filled(), min_size=1, max_size=4).map(combine))
def test_fill_of_many_tensors(case):
    from sparse_lightning.kernels.block_fill import triton

    tensors, windows, mask, wanted = case
    ours = [on_device(tensor, case_device()) for tensor in tensors]
    table = triton.TritonFill(windows, [tensor.element_size() for tensor in ours], torch.device(case_device()))
    table.fill([tensor.data_ptr() for tensor in ours], mask.to(case_device()))
    assert all(torch.equal(bits(tensor).cpu(), after) for tensor, after in zip(ours, wanted, strict=True))


@in_turn(place=WINDOWS, dtype=[*DTYPES, torch.float64, torch.int8])
def test_fill_by_a_table(place, dtype):
    from sparse_lightning.kernels.block_fill import triton
    from sparse_lightning.kernels.block_fill.windows import window

    pairs, gap = place
    storage, shape, strides = make_window(pairs, gap, torch.float32)
    storage = storage.nan_to_num(1, 2, 3).mul(9).to(dtype)
    wanted, counts = storage.clone(), [n for n, _ in pairs]
    here = window(0, Layout(shape, strides, 2), Layout(counts), range(len(counts)))
    for share in (0.0, 0.5, 1.0):
        mask = torch.rand(counts, device=case_device()) < share
        apply_reference.fill_(wanted.as_strided(shape, strides, 2), mask)
        table = triton.TritonFill([here], [storage.element_size()], storage.device)
        table.fill([storage.data_ptr()], mask.flatten())
        assert torch.equal(storage.view(torch.uint8), wanted.view(torch.uint8))


MANY = [20, pytest.param(50, marks=pytest.mark.exhaustive if is_interpreted() else ())]
"""Parameters of a step: in the interpreter, which is slow, first as few as any two of their properties need to meet."""


def many_parameters(count):
    """Parameters of mixed dtypes and strides, blocks of mixed shapes, and a shard of some of them."""
    torch.manual_seed(0)
    for i in range(count):
        weight = torch.rand(16, 8 * (i % 4 + 1), device=case_device()).add(1).to(DTYPES[i % 3])
        weight = [weight, weight.t().contiguous().t(), torch.stack([weight, weight], -1)[..., 0]][i % 3]
        spec = BlockSpec(weight, [(4, 4), (1, 1), (3, 5), (1, -1)][i % 4], edge="partial")
        if i % 5:
            yield weight, spec, spec.part()
        else:
            box = ((3, 14), (0, weight.shape[1] - 3))
            local = weight[3:14, : weight.shape[1] - 3].clone()
            yield local, spec, spec.part_of_box(local, box)


@pytest.mark.parametrize("count", MANY)
def test_all_parameters_of_a_step_take_one_launch(count, monkeypatch):
    from sparse_lightning.kernels.block_fill import triton

    tensors, specs, parts = zip(*many_parameters(count), strict=True)
    windows, start = [], 0
    for i, (spec, part) in enumerate(zip(specs, parts, strict=True)):
        windows += part.fill_windows(i, Layout(spec.grid_shape, None, start))
        start += spec.numblk()
    mask = torch.rand(start, device=case_device()) < 0.7
    before = [tensor.clone() for tensor in tensors]
    for spec, part, grid in zip(specs, parts, torch.split(mask, [s.numblk() for s in specs]), strict=True):
        part.fill_(grid.view(spec.grid_shape))
    wanted = [tensor.clone() for tensor in tensors]
    counted = CountedLaunches(triton._fill)
    monkeypatch.setattr(triton, "_fill", counted)
    table = triton.TritonFill(windows, [t.element_size() for t in tensors], torch.device(case_device()))
    for step in range(3):
        for tensor, full in zip(tensors, before, strict=True):
            tensor.copy_(full)
        table.fill([t.data_ptr() for t in tensors], mask)
        assert counted.launches == step + 1
        assert all(same(tensor, after) for tensor, after in zip(tensors, wanted, strict=True))


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.exhaustive if is_interpreted() else ())])
def test_the_engine_launches_once_for_each_step(count, monkeypatch):
    from sparse_lightning.kernels import block_fill
    from sparse_lightning.kernels.block_fill import triton

    if is_interpreted():
        on_cpu = partial(triton.TritonFill, device=torch.device("cpu"))
        monkeypatch.setattr(block_fill.native, "is_available", lambda: True)
        monkeypatch.setattr(block_fill.native, "NativeFill", on_cpu)
    counted = CountedLaunches(triton._fill)
    monkeypatch.setattr(triton, "_fill", counted)
    net = torch.nn.ModuleList([torch.nn.Linear(8 * (i % 3 + 1), 16) for i in range(count)]).to(case_device())
    net[::2].to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsifier = Sparsifier([Blocks("*.weight", (4, 4))], Constant(0.5, end=0), update_every=1)
    sparsifier.attach(net, optimizer)
    for step in range(3):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        sparsifier.update(optimizer)
        counted.launches = 0
        optimizer.step()
        assert counted.launches == 1, f"step {step}"
    assert sparsifier.sparsity() == 0.5


TILES = [
    ((1, 1), (1, 1), (1,), 1.0),
    ((70, 50), (16, 16), (3,), 0.0),
    ((70, 50), (32, 8), (2, 9), 0.5),
    ((40, 100), (64, 64), (), 0.5),
    ((60, 70), (20, 12), (17,), 0.4),
    ((130, 100), (128, 96), (70,), 0.5),
    ((64, 96), (32, 32), (0,), 0.5),
]
"""Shapes of weights and tiles, the leading shape of the inputs, and the fraction of tiles that are kept."""


# fp32 and fp16 take turns in `make test`; bf16 is left to GPUs.
@pytest.mark.parametrize(
    ("shape", "tile", "rows", "density", "dtype"),
    [
        pytest.param(*case, dtype, marks=pytest.mark.exhaustive if dtype == (DTYPES[0], DTYPES[2])[i % 2] else ())
        for i, case in enumerate(TILES)
        for dtype in DTYPES
    ],
    ids=str,
)
def test_tile_linear(shape, tile, rows, density, dtype):
    from sparse_lightning.kernels.tile_linear import triton

    if is_interpreted() and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bf16, not the numbers")
    # Small integers: all sums are exact.
    weight = torch.randint(-2, 3, shape, device=case_device()).to(dtype)
    kept = torch.rand(-(-shape[0] // tile[0]), -(-shape[1] // tile[1]), device=case_device()) < density
    weight *= kept.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]
    wide = torch.randint(-1, 2, (*rows, 2 * shape[1]), device=case_device()).to(dtype)
    parts = cut(weight, tile)
    for inputs in (wide[..., : shape[1]].contiguous(), wide[..., ::2], wide[..., : shape[1]]):
        for bias in (None, torch.arange(shape[0], device=case_device()).remainder(5).to(dtype)):
            wanted = tile_reference.tile_linear(inputs, *parts, bias, shape[0])
            assert torch.equal(triton.tile_linear(inputs, *parts, bias, shape[0]), wanted)


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
