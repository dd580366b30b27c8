"""block_apply: every implementation against index arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from poison import poison  # noqa: F401

from sparse_lightning.kernels import block_apply
from sparse_lightning.kernels.block_apply import cpu, reference

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn]


@st.composite
def windows(draw, dtype):
    """A window (n0, l0, n1, l1, …) on a larger storage, and a grid of coin tosses."""
    pairs = draw(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 8, 16, 17])), max_size=3))
    assume(math.prod(x for pair in pairs for x in pair) <= 600)
    gaps = [draw(st.integers(0, 2)) for _ in pairs]
    strides, step = [], draw(st.sampled_from([1, 1, 2]))
    for (n, length), gap in zip(reversed(pairs), gaps, strict=True):
        strides = [length * step, step, *strides]
        step = step * n * length + gap
    shape = [x for pair in pairs for x in pair]
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if pairs else 1
    storage = torch.randint(1, 100, (size + 3,)).to(dtype)
    bits = draw(st.lists(st.booleans(), min_size=(n := math.prod(p[0] for p in pairs)), max_size=n))
    mask = torch.tensor(bits, dtype=torch.bool).view([p[0] for p in pairs])
    return storage, shape, strides, mask


@pytest.mark.parametrize("fill_", [reference.fill_, cpu.fill_, block_apply.fill_], ids=["reference", "cpu", "chosen"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fill_is_index_arithmetic_on_the_storage(fill_, dtype):
    if fill_ is reference.fill_ and dtype == torch.float8_e4m3fn:
        pytest.skip("torch has no masked_fill_ for float8 on a CPU")

    @settings(max_examples=40)
    @given(windows(dtype))
    def law(case):
        storage, shape, strides, mask = case
        wanted = storage.double().tolist()
        for coord in itertools.product(*map(range, shape)):
            if mask[coord[0::2]]:
                wanted[sum(x * s for x, s in zip(coord, strides, strict=True))] = 0
        fill_(storage.as_strided(shape, strides), mask)
        assert storage.double().tolist() == wanted

    law()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_filled_block_is_plus_zero_whatever_it_held(length, dtype):
    odd = torch.tensor([math.inf, -math.inf, math.nan, -0.0, -1.0], dtype=dtype)
    window = odd.repeat(4 * length).view(-1)[: 4 * length].clone().view(4, length)
    kept = window[1].clone()
    block_apply.fill_(window, torch.tensor([True, False, True, True]))
    rest = window[[0, 2, 3]]
    assert (rest == 0).all()
    assert not rest.signbit().any(), "a pruned weight is −0.0"
    assert torch.equal(window[1].view(torch.uint8), kept.view(torch.uint8)), "a kept block changed its bits"


@pytest.mark.parametrize("length", [1, 4, 5, 16])
def test_a_fill_in_many_chunks_is_the_fill_in_one(monkeypatch, length):
    weights = torch.randn(6, 4, 10 * length)
    mask = torch.rand(6, 10) < 0.5
    wanted = weights * ~mask.repeat_interleave(length, 1)[:, None]
    monkeypatch.setattr("sparse_lightning.kernels.chunks.CPU_ELEMENTS", 7)
    block_apply.fill_(weights.view(6, 4, 10, length), mask)
    assert torch.equal(weights, wanted)


@given(st.data())
def test_scale_multiplies_each_block(data):
    storage, shape, strides, mask = data.draw(windows(torch.float32))
    factors = torch.where(mask, 0.5, 2.0)
    wanted = storage.tolist()
    for coord in itertools.product(*map(range, shape)):
        wanted[sum(x * s for x, s in zip(coord, strides, strict=True))] *= factors[coord[0::2]].item()
    block_apply.scale_(storage.as_strided(shape, strides), factors)
    assert storage.tolist() == wanted


def test_scaling_bf16_takes_the_multiplier_in_fp32():
    weights = torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    for _ in range(3):
        block_apply.scale_(weights.view(1, 4), torch.tensor([0.996]))
    assert weights[0, 0].item() == torch.tensor(3.0).mul(0.996).bfloat16().mul(0.996).bfloat16().mul(0.996).bfloat16()
