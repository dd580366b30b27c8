"""block_apply and nm_select: every implementation against index arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from poison import poison  # noqa: F401

from sparse_lightning import BlockSpec, ScopeSpec
from sparse_lightning.errors import LayoutError, ScoreWarning, SparsityError
from sparse_lightning.kernels import block_apply, nm_select
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
    monkeypatch.setattr("sparse_lightning.chunk.CPU_ELEMENTS", 7)
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


SELECT = {"reference": nm_select.reference.nm_select, "cpu": nm_select.cpu.nm_select, "chosen": nm_select.nm_select}
each_select = pytest.mark.parametrize("select", SELECT.values(), ids=SELECT)
ODD = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-7, -3.0, math.inf, -math.inf, math.nan]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def plain_selection(scores, n, m):
    """The mask that keeps n of every m, one group at a time."""
    pruned = []
    for group in scores.reshape(-1, m).tolist():
        best = sorted(range(m), key=lambda i: (math.isnan(group[i]), 0 if math.isnan(group[i]) else -group[i], i))
        pruned += [i in best[n:] for i in range(m)]
    return torch.tensor(pruned, dtype=torch.bool).view(scores.shape)


def plain_scores(weight, other):
    """`|w|` or `|w·other|` in fp32, or in fp64 for fp64."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return (weight.to(wide) if other is None else weight.to(wide) * other.to(wide)).abs()


@st.composite
def selections(draw, dtype):
    """Weights with ties, NaN and inf in some strides, what they are multiplied with, and n of m."""
    m = draw(st.integers(1, 17))
    n = draw(st.integers(0, m))
    shape = (*draw(st.lists(st.integers(1, 4), max_size=2)), m * draw(st.integers(1, 5)))
    values = draw(st.lists(st.sampled_from(ODD), min_size=(k := math.prod(shape)), max_size=k))
    weight = torch.tensor(values, dtype=dtype).view(shape)
    strides = draw(st.sampled_from(["contiguous", "transposed", "sliced"]))
    if strides == "transposed":
        weight = weight.mT.contiguous().mT if weight.ndim > 1 else weight
    elif strides == "sliced":
        weight = torch.stack([weight.neg(), weight, weight], -1)[..., 1]
    kind = draw(st.sampled_from(["none", "gradient", "norms"]))
    if kind == "none":
        return weight, None, n, m
    wanted = shape if kind == "gradient" else shape[-1:]
    others = draw(
        st.lists(st.sampled_from([0.5, -2.0, 0.0, 1.0, math.inf]), min_size=(k := math.prod(wanted)), max_size=k)
    )
    return weight, torch.tensor(others, dtype=dtype).view(wanted).expand(shape), n, m


@each_select
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_selection_is_a_plain_loop_over_the_groups(select, dtype):
    @settings(max_examples=60)
    @given(selections(dtype))
    def law(case):
        weight, other, n, m = case
        wanted = plain_selection(plain_scores(weight, other), n, m)
        kept = weight.clone()
        mask = select(weight, n, m, other)
        assert torch.equal(mask, wanted)
        assert not weight[mask].any(), "a pruned weight is not zero"
        assert not weight[mask].signbit().any(), "a pruned weight is −0.0"
        assert torch.equal(weight[~mask].nan_to_num(7), kept[~mask].nan_to_num(7)), "a kept weight changed"

    law()


@each_select
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "m"), [((3, 63), 7), ((500, 500), 5), ((63, 500), 4), ((8,), 8), ((2, 3, 32), 16)])
def test_selection_is_that_of_a_scope(select, dtype, shape, m):
    weight = torch.randn(shape).mul(4).round().to(dtype)
    weight.view(-1)[::31] = math.nan
    gradient = torch.randn(shape).to(dtype)
    scope = ScopeSpec(BlockSpec(weight.clone(), (1,) * len(shape)), (1,) * (len(shape) - 1) + (m,))
    for other, n in itertools.product(
        [None, gradient, gradient.view(-1, shape[-1])[0].expand(shape)], {0, 1, m // 2, m}
    ):
        with pytest.warns(ScoreWarning, match="NaN"):
            wanted = scope.select(plain_scores(weight, other), n)
        assert torch.equal(select(weight.clone(), n, m, other), wanted)


@each_select
def test_a_selection_in_many_chunks_is_the_selection_in_one(monkeypatch, select):
    weight, norms = torch.randn(9, 5, 60), torch.rand(60)
    wanted = {m: plain_selection(weight.abs(), 2, m) for m in (4, 5)}
    monkeypatch.setattr("sparse_lightning.chunk.CPU_ELEMENTS", 700)
    for m, mask in wanted.items():
        assert torch.equal(select(weight.clone(), 2, m), mask)
        other = norms.expand(weight.shape)
        assert torch.equal(select(weight.clone(), 2, m, other), plain_selection((weight * norms).abs(), 2, m))


@each_select
def test_a_selection_is_seen_by_autograd(select):
    weight = torch.nn.Parameter(torch.randn(4, 8))
    before = weight._version
    select(weight.detach(), 2, 4)
    assert weight._version > before


@each_select
def test_a_selection_of_nothing_is_empty(select):
    assert select(torch.ones(0, 8), 2, 4).shape == (0, 8)


def test_selecting_needs_little_memory(copies):
    weight = torch.randn(1024, 4096)
    with copies() as made:
        nm_select.reference.nm_select(weight, 2, 4, torch.ones(4096).expand_as(weight))
    assert made.largest <= weight.numel(), "more than the mask"
    assert made.bytes <= weight.numel() * 4 * 0.25, "a tensor of scores"


@pytest.mark.parametrize(
    ("weight", "n", "m", "error", "message"),
    [
        (torch.ones(2, 6), 2, 4, LayoutError, r"groups of 4 .* shape \(2, 6\)"),
        (torch.tensor(1.0), 1, 2, LayoutError, "groups of 2"),
        (torch.ones(2, 8), 5, 4, SparsityError, "5 of 4 weights"),
        (torch.ones(2, 8), -1, 4, SparsityError, "-1 of 4 weights"),
        (torch.ones(2, 8, dtype=torch.int32), 2, 4, LayoutError, "torch.int32"),
    ],
)
def test_a_selection_that_can_not_be_is_refused(weight, n, m, error, message):
    with pytest.raises(error, match=message):
        nm_select.nm_select(weight, n, m)


def test_what_does_not_broadcast_is_refused():
    with pytest.raises(LayoutError, match=r"\(3,\) does not broadcast to the weight's \(2, 8\)"):
        nm_select.nm_select(torch.ones(2, 8), 2, 4, torch.ones(3))
