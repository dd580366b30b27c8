"""The Triton kernels compiled ahead of time: vectors in the PTX, nothing spilled in the binary. See `triton_harness`.

Not collected by itself: `test_triton_kernels.py` runs it in a process of its own.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from triton_harness import ARCHITECTURES, compiled_for, loads, spills, wide_loads, wide_stores

WIDE = 16
"""Bytes of the widest access."""

OTHERS = ["none", "gradient", "norms"]

DTYPES = [torch.float32, torch.bfloat16]
BLOCKS = [(1, 1), (1, 4), (4, 4), (1, 8), (3, 12), (1, -1)]
GROUPS = [(2, "none"), (8, "none"), (16, "none")]

TILES = [
    *[(arch, torch.float16, (64, 64), 128) for arch in ARCHITECTURES],
    (80, torch.float32, (64, 64), 128),
    (90, torch.bfloat16, (32, 32), 1),
    (100, torch.bfloat16, (16, 64), 20),
]
"""Architectures, dtypes, tiles and rows of inputs."""

each_arch = pytest.mark.parametrize("arch", ARCHITECTURES)


def on_gpus(often, others):
    """What stands for the common case, on every GPU in both dtypes, in turn; the others on one of them each."""
    common = list(product(ARCHITECTURES, DTYPES, often))
    turns = list(zip(cycle(ARCHITECTURES), product(others, DTYPES), strict=False))
    quick = {(arch, DTYPES[i % 2], often[i % len(often)]) for i, arch in enumerate(ARCHITECTURES)}
    quick |= {(arch, dtype, case) for i, (arch, (case, dtype)) in enumerate(turns) if i % 2 == i // 2 % 2}
    cases = common + [(arch, dtype, case) for arch, (case, dtype) in turns]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.exhaustive) for case in cases]


each_block = pytest.mark.parametrize(("arch", "dtype", "block"), on_gpus([(32, 32)], BLOCKS), ids=str)
each_group = pytest.mark.parametrize(
    ("arch", "dtype", "group"), on_gpus([(4, other) for other in OTHERS], GROUPS), ids=str
)


def window_of(block, dtype, size=768):
    """A contiguous matrix in blocks, as the specification layer hands it to a kernel, and its grid."""
    rows, columns = block[0], size if block[1] == -1 else block[1]
    weight, grid = torch.zeros(size, size, dtype=dtype), (size // rows, size // columns)
    if rows == 1:
        return weight.view(-1, columns), (size * size // columns,)
    return weight.view(grid[0], rows, grid[1], columns), grid


def fills_a_vector(block, dtype):
    """Whether a vector of the widest access lies in one block, wherever it starts."""
    return block[1] == -1 or block[1] * dtype.itemsize % WIDE == 0


@each_block
def test_fill(arch, dtype, block):
    from sparse_lightning.kernels.block_apply import triton

    window, grid = window_of(block, dtype)
    with compiled_for(arch) as compiled:
        triton.fill_(window, torch.zeros(grid, dtype=torch.bool))
    (kernel,) = compiled
    assert spills(kernel) == 0
    if fills_a_vector(block, dtype):
        assert wide_stores(kernel) > 0
    assert wide_loads(kernel) == 0 or block == (1, 1), "only the mask of single weights is as long as a vector"


@each_arch
def test_fill_by_a_table(arch):
    from sparse_lightning.kernels.block_fill import triton
    from sparse_lightning.kernels.block_fill.windows import Pair, Window

    window = Window(0, 0, 0, (Pair(8, 8, 512, 64, 8), Pair(8, 8, 8, 1, 1)))
    with compiled_for(arch) as compiled, pytest.MonkeyPatch.context() as patch:
        # Marks are made by a kernel, which is only compiled here: as if it had marked all tiles.
        patch.setattr(torch, "zeros", torch.ones)
        table = triton.TritonFill([window], [4], torch.device("cpu"))
        table.fill([0], torch.ones(64, dtype=torch.bool))
    mark, fill = compiled
    assert spills(mark) == spills(fill) == 0
    assert wide_stores(fill) > 0


@each_block
def test_scale(arch, dtype, block):
    from sparse_lightning.kernels.block_apply import triton

    window, grid = window_of(block, dtype)
    with compiled_for(arch) as compiled:
        triton.scale_(window, torch.zeros(grid))
    (kernel,) = compiled
    assert spills(kernel) == 0
    if fills_a_vector(block, dtype):
        assert wide_loads(kernel) > 0
        assert wide_stores(kernel) > 0


@each_group
def test_select(arch, dtype, group):
    from sparse_lightning.kernels.nm_select import triton

    m, other = group
    weight = torch.zeros(512, 512, dtype=dtype)
    factor = {"none": None, "gradient": weight.clone(), "norms": torch.ones(512).expand(512, 512)}[other]
    pruned = torch.zeros(512, 512, dtype=torch.bool) if other == "norms" else None
    with compiled_for(arch) as compiled:
        triton.nm_select(weight, m // 2, m, factor, pruned)
    (kernel,) = compiled
    assert spills(kernel) == 0
    assert wide_loads(kernel) == loads(kernel), "a load is narrower than 128 bits"
    assert wide_stores(kernel) > 0
    assert "shfl" not in kernel.asm["ptx"], "a group is spread over threads"


@pytest.mark.parametrize(("arch", "m"), list(zip(ARCHITECTURES, [3, 5, 12], strict=True)))
def test_select_of_odd_groups(arch, m):
    from sparse_lightning.kernels.nm_select import triton

    with compiled_for(arch) as compiled:
        triton.nm_select(torch.zeros(64, 60), 2, m)
    (kernel,) = compiled
    assert spills(kernel) == 0


@each_arch
def test_addresses_are_64_bit(arch):
    from sparse_lightning.kernels.block_apply import triton

    with compiled_for(arch) as compiled:
        triton.fill_(torch.zeros(48, 4, 48, 4).transpose(0, 2).transpose(1, 3), torch.zeros(48, 48, dtype=torch.bool))
    (kernel,) = compiled
    assert "mul.lo.s64" in kernel.asm["ptx"] or "mad.lo.s64" in kernel.asm["ptx"], "strides are multiplied in 32 bits"
    assert spills(kernel) == 0


@pytest.mark.parametrize(("arch", "dtype", "tile", "rows"), TILES, ids=str)
def test_tile_linear(arch, dtype, tile, rows):
    from sparse_lightning.kernels.tile_linear import triton
    from sparse_lightning.tiles.cutting import cut

    parts = cut(torch.ones(256, 256, dtype=dtype), tile)
    with compiled_for(arch) as compiled:
        triton.tile_linear(torch.ones(rows, 256, dtype=dtype), *parts, torch.ones(256, dtype=dtype), 256)
    (kernel,) = compiled
    assert spills(kernel) == 0
    code = kernel.asm["ptx"]
    on_tensor_cores = any(name in code for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))
    assert on_tensor_cores == (dtype != torch.float32), "products of fp32 would be rounded to TF32"
    assert "cp.async" in code or wide_loads(kernel) > 0, "tiles are loaded in narrow pieces"


@pytest.mark.parametrize("m", [65, 512, 4096])
def test_large_groups_compile_nothing(m):
    """The comparisons of a group are unrolled: 512 of them would be compiled for minutes."""
    from sparse_lightning.kernels.nm_select import reference, triton

    weight = torch.randn(3, 2 * m, 2)[..., 0]
    wanted = weight.clone()
    with compiled_for(80) as compiled:
        mask = triton.nm_select(weight, 5, m)
    assert not compiled
    assert torch.equal(mask, reference.nm_select(wanted, 5, m))
    assert torch.equal(weight, wanted)


def test_a_spill_of_select_would_be_seen():
    from sparse_lightning.kernels.nm_select import triton

    with compiled_for(80, maxnreg=24) as compiled:
        triton.nm_select(torch.zeros(512, 512), 8, 16)
    assert spills(compiled[0]) > 0
