"""nm_select: every implementation against a plain loop over the groups, and against the reference bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison  # noqa: F401
from torch.profiler import ProfilerActivity, profile

from sparse_lightning import BlockSpec, ScopeSpec
from sparse_lightning.errors import LayoutError, ScoreWarning, SparsityError
from sparse_lightning.kernels import block_score, nm_select
from sparse_lightning.kernels.nm_select import compiled, cpu, reference

pytestmark = pytest.mark.usefixtures("poison")

needs_compiler = pytest.mark.skipif(not block_score.compiled.has_compiler(), reason="needs a C++ compiler")

SELECT = {"reference": reference.nm_select, "cpu": cpu.nm_select, "chosen": nm_select.nm_select}
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
        reference.nm_select(weight, 2, 4, torch.ones(4096).expand_as(weight))
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


def bits(t):
    """A tensor as bytes: NaN equals NaN, and −0.0 is not 0.0."""
    return t.contiguous().view(torch.uint8)


def agrees_with_the_reference(weight, n, m, other=None):
    """The compiled selection gives the mask and the weights of the reference, bit for bit."""
    ours, theirs = weight.clone(), weight.clone()
    mask = compiled.nm_select(ours, n, m, other)
    assert torch.equal(mask, reference.nm_select(theirs, n, m, other)), "the mask is not the reference's"
    assert torch.equal(bits(ours), bits(theirs)), "the weights are not the reference's"


@st.composite
def odd_weights(draw, m):
    """fp32 with ties, NaN and inf in several rows of the compiled code and a rest, and what multiplies them."""
    groups = draw(st.integers(1, 5 * compiled.GROUPS))
    lines = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    weight = torch.tensor(ODD)[torch.randint(len(ODD), (lines, groups * m), generator=generator)]
    kind = draw(st.sampled_from(["none", "gradient", "norms"]))
    if kind == "none":
        return weight, None
    factors = torch.tensor([0.5, -2.0, 0.0, 1.0, math.inf, math.nan])
    wanted = weight.shape if kind == "gradient" else weight.shape[-1:]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    other = factors[torch.randint(len(factors), wanted, generator=generator)].to(dtype)
    return weight, other.expand(weight.shape)


@needs_compiler
@pytest.mark.parametrize("m", [3, 4, 8])
def test_compiled_is_the_reference_bit_for_bit(monkeypatch, m):
    @given(odd_weights(m), st.integers(0, m), st.sampled_from([20 * m, 50 * m + 1, 1 << 19]))
    def law(case, n, piece):
        monkeypatch.setattr(compiled, "PIECE", piece)
        agrees_with_the_reference(case[0], n, m, case[1])

    law()


@needs_compiler
@pytest.mark.parametrize("shape", [(2, 3, 500), (700,), (64, 4, 3, 4), (5, 63 * 4)])
def test_compiled_takes_any_shape(shape):
    weight = torch.randn(shape)
    for other in (None, torch.randn(shape), torch.rand(shape[-1]).expand(shape)):
        assert compiled.takes(weight, 4, other)
        agrees_with_the_reference(weight, 2, 4, other)


@needs_compiler
def test_one_compile_serves_every_n_and_mode():
    weight = torch.randn(40, 64)
    compiled.nm_select(weight.clone(), 1, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n, rows in itertools.product(range(5), (40, 17)):
            agrees_with_the_reference(weight[:rows], n, 4)
        with torch.no_grad():
            agrees_with_the_reference(weight, 2, 4)
        with torch.inference_mode():
            agrees_with_the_reference(weight.clone(), 2, 4)


@needs_compiler
def test_compiled_does_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        agrees_with_the_reference(torch.randn(40, 64, dtype=torch.float32), 2, 4)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_compiler
def test_a_compiled_selection_is_seen_by_autograd():
    weight = torch.nn.Parameter(torch.randn(40, 8))
    before = weight._version
    compiled.nm_select(weight.detach(), 2, 4)
    assert weight._version > before
    assert compiled.nm_select(torch.ones(0, 8), 2, 4).shape == (0, 8)


@needs_compiler
def test_compiled_needs_little_memory():
    weight = torch.randn(1 << 12, 1 << 12)
    compiled.nm_select(weight, 2, 4)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mask = compiled.nm_select(weight, 2, 4)
    made = sum(max(0, event.self_cpu_memory_usage) for event in recorded.events())
    assert mask.nbytes < made <= mask.nbytes + weight.nbytes * 0.05


@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "none"])
def test_compiled_is_chosen_where_it_pays_and_can_be(monkeypatch, copies, compiler):
    ran = []
    monkeypatch.setattr(block_score, "PAYS", 1000)
    monkeypatch.setattr(block_score.compiled, "has_compiler", lambda: compiler)
    monkeypatch.setattr(compiled, "nm_select", lambda *_: ran.append("compiled"))
    monkeypatch.setattr(cpu, "nm_select", lambda *_: ran.append("cpu"))
    large = torch.randn(8, 128)
    for weight in (large, large[:4], large.bfloat16(), torch.randn(128, 8).mT):
        nm_select.nm_select(weight, 2, 4)
    nm_select.nm_select(large.view(4, 2, 128), 2, 4, torch.rand(4, 1, 128))
    with copies():
        nm_select.nm_select(large, 2, 4)
    assert ran == ["compiled" if compiler else "cpu", "cpu", "cpu", "cpu", "cpu", "cpu"]
