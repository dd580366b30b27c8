"""nm_select: every implementation against a plain loop over the groups, and against the reference bit for bit."""

from __future__ import annotations

import itertools
import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from poison import poison  # noqa: F401
from torch.profiler import ProfilerActivity, profile

from sparse_lightning import BlockSpec, ScopeSpec
from sparse_lightning.errors import LayoutError, ScoreWarning, SparsityError
from sparse_lightning.kernels import nm_select
from sparse_lightning.kernels.native import library
from sparse_lightning.kernels.nm_select import native, reference

pytestmark = pytest.mark.usefixtures("poison")

needs_native = pytest.mark.skipif(library(native.SOURCE) is None, reason="needs a C++ compiler on x86 Linux")

each_select = pytest.mark.parametrize(
    "select",
    [
        pytest.param(reference.nm_select, id="reference"),
        pytest.param(native.nm_select, id="native", marks=needs_native),
        pytest.param(nm_select.nm_select, id="chosen"),
    ],
)
ODD = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-7, -3.0, math.inf, -math.inf, math.nan]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def plain_selection(scores, n, m):
    """The mask that keeps n of every m, one group at a time."""
    pruned = []
    for group in scores.reshape(-1, m).tolist():
        best = sorted(range(m), key=lambda i: (math.isnan(group[i]), 0 if math.isnan(group[i]) else -group[i], i))
        worst = set(best[n:])
        pruned += [i in worst for i in range(m)]
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
@pytest.mark.hypothesis
def test_selection_is_a_plain_loop_over_the_groups(select, dtype):
    @settings(max_examples=examples(30))
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
    monkeypatch.setattr("sparse_lightning.kernels.chunks.CPU_ELEMENTS", 700)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 3, 63, 64, 65, 100, 512, 513, 4099])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 2)], ids=str)
def test_groups_have_any_size(monkeypatch, m, shape, dtype):
    """Awkward sizes in strides whose rows cannot be merged; the choice between implementations is the library's."""
    monkeypatch.setattr(native, "LARGE", 1)
    wide = torch.randn(*shape, 2 * m, 3).mul(4).round().div(4).to(dtype)
    weight = wide[..., 1].movedim(-1, 0).contiguous().movedim(0, -1) if len(shape) > 1 else wide[..., 1]
    norms = torch.rand(2 * m).to(dtype)
    for other, n in itertools.product([None, norms], sorted({0, 1, m // 2, m})):
        ours = weight.clone(memory_format=torch.preserve_format) if len(shape) > 1 else wide.clone()[..., 1]
        factor = None if other is None else other.expand(weight.shape)
        mask = nm_select.nm_select(ours, n, m, other)
        assert torch.equal(mask, plain_selection(plain_scores(weight, factor), n, m)), f"{n}:{m}"
        assert torch.equal(ours, weight.masked_fill(mask, 0)), f"{n}:{m}"


@each_select
@given(data=st.data(), m=st.integers(1, 6), groups=st.integers(1, 5))
def test_what_is_pruned_stays_so_and_the_best_of_the_others_are_kept(select, data, m, groups):
    values = st.sampled_from([0.0, -0.0, 1.0, -2.0, math.inf, math.nan])
    weight = torch.tensor(data.draw(st.lists(values, min_size=m * groups, max_size=m * groups)))
    pruned = torch.tensor(data.draw(st.lists(st.booleans(), min_size=m * groups, max_size=m * groups)))
    n = data.draw(st.integers(0, m))
    before, mask = weight.clone(), select(weight, n, m, None, pruned)
    assert not (pruned & ~mask).any()
    assert torch.equal(torch.nan_to_num(weight), torch.nan_to_num(before.masked_fill(mask, 0)))
    for own, gone, score in zip(mask.view(-1, m), pruned.view(-1, m), before.abs().view(-1, m), strict=True):
        rivals = sorted((-x if x == x else 1, i) for i, x in enumerate(score.tolist()) if not gone[i])
        assert (~own).nonzero().flatten().tolist() == sorted(i for _, i in rivals[:n])


@pytest.mark.parametrize("pruned", [torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 8)])
def test_what_is_pruned_is_a_mask_of_the_shape_of_the_weight(pruned):
    with pytest.raises(LayoutError, match="pass a boolean mask of the shape of the weight"):
        nm_select.nm_select(torch.ones(2, 8), 2, 4, pruned=pruned)


def test_selecting_needs_little_memory(copies):
    weight = torch.randn(1024, 4096)
    with copies() as made:
        reference.nm_select(weight, 2, 4, torch.ones(4096).expand_as(weight))
    assert made.largest <= weight.numel(), "more than the mask"
    assert made.bytes <= weight.numel() * 4 * 0.25, "a tensor of scores"


@pytest.mark.parametrize(
    ("weight", "n", "m", "error", "message"),
    [
        (torch.ones(2, 6), 2, 4, LayoutError, r"groups of 4 .* shape \(2, 6\)"),
        (torch.tensor(1.0), 1, 2, LayoutError, "groups of 2"),
        (torch.ones(2, 8), 5, 4, SparsityError, "n=5 is out of range: groups of m=4 weights"),
        (torch.ones(2, 8), -1, 4, SparsityError, "n=-1 is out of range: groups of m=4 weights"),
        (torch.ones(2, 8, dtype=torch.int32), 2, 4, LayoutError, "torch.int32"),
    ],
)
def test_an_invalid_selection_raises_an_error(weight, n, m, error, message):
    with pytest.raises(error, match=message):
        nm_select.nm_select(weight, n, m)


def test_invalid_ones_of_many_raise_an_error():
    with pytest.raises(SparsityError, match="n=5 is out of range"):
        nm_select.nm_select_many([torch.ones(2, 8)] * 2, [2, 5], 4)
    with pytest.raises(LayoutError, match="groups of 4"):
        nm_select.nm_select_many([torch.ones(2, 8), torch.ones(2, 6)], [2, 2], 4)


def test_a_factor_that_does_not_broadcast_raises_an_error():
    with pytest.raises(LayoutError, match=r"\(3,\) does not broadcast to the weight's \(2, 8\)"):
        nm_select.nm_select(torch.ones(2, 8), 2, 4, torch.ones(3))


def bits(t):
    """A tensor as bytes: NaN equals NaN, and −0.0 is not 0.0."""
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # a single element may have any stride


@st.composite
def many_groups(draw):
    """Weights in several segments of the kernel and a rest, with ties, NaN and inf, and what multiplies them."""
    m = draw(st.sampled_from([1, 2, 3, 4, 8, 17, 64]))
    shape = (*draw(st.lists(st.integers(1, 3), max_size=2)), m * draw(st.integers(1, 1 + 1500 // m)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    dtype = draw(st.sampled_from(FLOATS))
    weight = torch.tensor(ODD, dtype=dtype)[torch.randint(len(ODD), shape, generator=generator)]
    kind = draw(st.sampled_from(["none", "gradient", "norms"]))
    if kind == "none":
        return weight, draw(st.integers(0, m)), m, None
    factors = torch.tensor([0.5, -2.0, 0.0, 1.0, math.inf, math.nan])
    wanted = weight.shape if kind == "gradient" else weight.shape[-1:]
    other = factors[torch.randint(len(factors), wanted, generator=generator)].to(draw(st.sampled_from(FLOATS)))
    return weight, draw(st.integers(0, m)), m, other.expand(weight.shape)


@needs_native
@given(many_groups(), st.integers(1, 3), st.sampled_from([None, 0.1, 0.9]))
def test_native_is_the_reference_bit_for_bit(case, threads, fraction):
    weight, n, m, other = case
    pruned = None if fraction is None else torch.rand(weight.shape) < fraction
    ours, theirs = weight.clone(), weight.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        mask = native.nm_select(ours, n, m, other, pruned)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(mask, reference.nm_select(theirs, n, m, other, pruned)), "the mask is not the reference's"
    assert torch.equal(bits(ours), bits(theirs)), "the weights are not the reference's"


@st.composite
def alike_weights(draw):
    """Weights of one shape, in equal or mixed strides, how many each keeps, and what multiplies them."""
    m, number = draw(st.sampled_from([1, 2, 3, 4, 8, 17])), draw(st.integers(1, 5))
    shape = (*draw(st.lists(st.integers(1, 3), max_size=2)), m * draw(st.integers(1, 1 + 600 // m)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    strides = draw(st.sampled_from(["contiguous", "transposed", "sliced", "mixed"]))

    def laid_out(t, i):
        kind = ["contiguous", "transposed", "sliced"][i % 3] if strides == "mixed" else strides
        if kind == "transposed" and t.ndim > 1:
            return t.mT.contiguous().mT
        return torch.stack([t.neg(), t], -1)[..., 1] if kind == "sliced" else t

    def drawn(values, dtype, wanted):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), wanted, generator=generator)]

    dtype = draw(st.sampled_from(FLOATS))
    weights = [laid_out(drawn(ODD, dtype, shape), i) for i in range(number)]
    kept = draw(st.lists(st.integers(0, m), min_size=number, max_size=number))
    kind = draw(st.sampled_from(["none", "gradient", "norms", "rows"]))
    if kind == "none":
        return weights, kept, m, None
    wanted = {"gradient": shape, "norms": shape[-1:], "rows": (*shape[:-1], 1)}[kind]
    factors, other_dtype = [0.5, -2.0, 0.0, 1.0, 1e-39, math.inf, math.nan], draw(st.sampled_from(FLOATS))
    return weights, kept, m, [laid_out(drawn(factors, other_dtype, wanted), i) for i in range(number)]


@given(alike_weights(), st.integers(1, 4), st.sampled_from([None, "contiguous", "mixed"]))
def test_many_weights_in_one_call_are_selected_as_each_by_itself(case, threads, strided):
    weights, kept, m, others = case
    pruned = [torch.rand(w.shape) < 0.5 for w in weights] if strided else [None] * len(weights)
    if strided == "mixed":
        pruned = [torch.stack([mask, ~mask], -1)[..., 0] if i % 2 else mask for i, mask in enumerate(pruned)]
    ours, theirs = [w.clone() for w in weights], [w.clone() for w in weights]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with patch.object(native, "LARGE", 1), patch.object(native, "SMALL", 0):
            masks = nm_select.nm_select_many(ours, kept, m, others, pruned if strided else None)
    finally:
        torch.set_num_threads(before)
    for i, weight in enumerate(theirs):
        other = None if others is None else others[i].expand(weight.shape)
        wanted = reference.nm_select(weight, kept[i], m, other, pruned[i])
        assert torch.equal(masks[i], wanted), f"mask {i} is not the reference's"
        assert torch.equal(bits(ours[i]), bits(weight)), f"weight {i} is not the reference's"


@needs_native
def test_alike_weights_take_one_call_of_the_kernel():
    weights, norms = [torch.randn(16, 64) for _ in range(9)], [torch.rand(64) for _ in range(9)]
    with patch.object(native, "nm_select_many", wraps=native.nm_select_many) as select:
        for others in (None, norms):
            nm_select.nm_select_many(weights, [2] * 9, 4, others)
        assert select.call_count == 2
        nm_select.nm_select_many([*weights[:8], torch.randn(64, 16).mT], [2] * 9, 4)
    assert select.call_count == 2, "a weight with other strides"


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_narrow_number_is_scored_as_by_the_reference(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[torch.randperm(len(every))].view(64, -1)
    for other in (None, torch.rand(every.shape), every.flip(0)):
        ours, theirs = every.clone(), every.clone()
        assert torch.equal(native.nm_select(ours, 2, 4, other), reference.nm_select(theirs, 2, 4, other))
        assert torch.equal(bits(ours), bits(theirs))


@needs_native
def test_native_needs_little_memory():
    weight, norms = torch.randn(1 << 12, 1 << 12), torch.rand(1 << 12)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mask = native.nm_select(weight, 2, 4)
    made = sum(max(0, event.self_cpu_memory_usage) for event in recorded.events())
    assert mask.nbytes <= made <= mask.nbytes + weight.nbytes * 0.05
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        native.nm_select(weight, 2, 4, norms.expand_as(weight))
    largest = max(event.self_cpu_memory_usage for event in recorded.events())
    assert largest <= mask.nbytes, "the scores of more than a chunk"


@pytest.mark.parametrize("built", [pytest.param(True, marks=needs_native), False], ids=["compiler", "none"])
def test_native_is_chosen_where_it_pays_and_can_be_built(monkeypatch, built):
    ran = []
    monkeypatch.setattr(native, "LARGE", 1000)
    if not built:
        monkeypatch.setattr(native, "library", lambda _: None)
    monkeypatch.setattr(native, "nm_select", lambda *_: ran.append("native"))
    monkeypatch.setattr(reference, "nm_select", lambda *_: ran.append("reference"))
    large, fast = torch.randn(8, 128), "native" if built else "reference"
    for weight in (large, large.bfloat16(), torch.randn(128, 8).mT, large[:4], large.to(torch.float8_e4m3fn)):
        nm_select.nm_select(weight, 2, 4)
    nm_select.nm_select(large, 2, 128)
    assert ran == [fast, fast, fast, "reference", "reference", "reference"]
