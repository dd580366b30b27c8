"""Lowerings: the reference against the meaning of the operations, and the compiled lowering against the reference.

Triton runs in a process of its own: see `test_triton_kernels`.
"""

from __future__ import annotations

from itertools import count, product

import pytest
import torch
from flow_cases import (
    DTYPES,
    SHIPPED,
    check_agreement,
    criterion_of,
    flows,
    in_turn,
    matrices,
    param,
    scores_of,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from law_examples import examples
from poison import poison  # noqa: F401
from torch.utils.flop_counter import FlopCounterMode

from sparse_lightning import BlockSpec, FlowError, ScopeSpec
from sparse_lightning.criteria import Taylor
from sparse_lightning.flow import FORMAT, Load, Normalize, Save, State, trace
from sparse_lightning.flow.context import Value
from sparse_lightning.flow.ops import BlockReduction, Grouped
from sparse_lightning.kernels import block_score
from sparse_lightning.kernels.block_score import compiled, native, reference
from sparse_lightning.kernels.stage import Ref, Stage, Step, elementwise

pytestmark = pytest.mark.usefixtures("poison")

SHAPES = st.sampled_from([(1, 1), (3, 5), (63, 4), (5, 7, 3), (500,), (8, 3, 3, 3)])

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CRITERIA_AND_DTYPES = [
    pytest.param(name, dtype, marks=() if i % len(DTYPES) == j else pytest.mark.exhaustive, id=f"{name}-{dtype}")
    for (i, name), (j, dtype) in product(enumerate(SHIPPED), enumerate(DTYPES))
]
"""Each criterion in one dtype, which take turns; the other combinations are exhaustive."""

needs_native = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler on x86 Linux")
needs_compiler = pytest.mark.skipif(not compiled.has_compiler(), reason="there is no C++ compiler")


def naive(context, scope, loaded):
    """Execute the traced graph op by op on all elements of one BlockSpec: the plainest meaning of a flow."""
    spec = scope.block
    sizes = spec.block_sizes().flatten()
    values = {}
    for name in ("weight", "grad"):
        tensor = spec.param.detach() if name == "weight" else spec.param.grad
        if name in context.inputs:
            parts = [spec.view_of(tensor).data[_slices(spec, at)].flatten().double() for at in _grid(spec)]
            values[context.inputs[name].id] = parts
    for node in context.live_nodes():
        if isinstance(node.op, Save):
            continue
        args = [values[x.id] if isinstance(x, Value) and x.id in values else x for x in node.inputs]
        if isinstance(node.op, Load):
            out = loaded.double()
        elif isinstance(node.op, BlockReduction):
            out = torch.stack([node.op.execute(part) for part in args[0]]).view(-1, 1, 1)
        elif isinstance(node.op, Grouped):
            assert isinstance(node.op, Normalize)
            out = args[0] / args[0].norm() if args[0].norm() > 0 else args[0] * 0
        elif node.output.format is FORMAT.ELEMENT:
            out = [node.op.execute(*(a[i] if isinstance(a, list) else a for a in args)) for i in range(len(sizes))]
        else:
            out = node.op.execute(*args)
        values[node.output.id] = out
    return values[context.result.id].flatten()


def _grid(spec):
    return list(product(*map(range, spec.grid_shape)))


def _slices(spec, at):
    return tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, spec.shape, strict=True))


@each_dtype
@pytest.mark.hypothesis
def test_random_flows_mean_what_their_operations_say(dtype):
    @settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
    @given(flows(), SHAPES, st.data())
    def law(flow, shape, data):
        weight = param(*shape, seed=data.draw(st.integers(0, 9)), dtype=dtype)
        order = data.draw(st.permutations(range(len(shape))))
        back = [order.index(d) for d in range(len(shape))]
        weight.grad = weight.grad.permute(order).contiguous().permute(back)
        block = [data.draw(st.integers(1, n)) for n in shape]
        scope = ScopeSpec(BlockSpec(weight, block, edge="partial"))
        criterion = criterion_of(flow, kept=State(fill=0.5))
        context = trace(criterion)
        got = scores_of(criterion, scope, lowering="reference")[scope.block].flatten()
        wanted = naive(context, scope, torch.full((scope.numblk(), 1, 1), 0.5))
        torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=2e-4)

    law()


def test_memory_that_nobody_wrote_is_poisoned():
    like = torch.ones(2, 3)
    made = [torch.empty(2), torch.empty_like(like), torch.empty_strided((2, 3), (1, 2)), like.new_empty(4)]
    made += [like.new_empty_strided((2,), (3,)), torch._C._dynamo.guards._empty_strided_cpu((2,), (1,), torch.float16)]
    assert all(t.isnan().all() for t in made)
    assert torch.empty(3, dtype=torch.bool).all()
    assert torch.empty(3, dtype=torch.int8).eq(126).all()


@pytest.fixture
def compiled_from(monkeypatch):
    """Return a function that sets the size from which windows are compiled; a larger one that is not fails the test."""
    plain = reference.fold

    def from_size(worth):
        def fallback(stage, windows):
            assert windows[0].numel() < worth or windows[0].dim() > 4, "a window was left to the reference"
            return plain(stage, windows)

        monkeypatch.setattr(compiled, "WORTH", worth)
        monkeypatch.setattr(reference, "fold", fallback)

    return from_size


@pytest.fixture
def native_only(monkeypatch):
    """Let a window fail the test that the native kernel leaves to another lowering, and return the kernels in use."""
    used = set()
    plain = native._built

    def built(stage, dtypes):
        kernel = plain(stage, dtypes)
        if kernel is not None:
            used.add(stage)
        return kernel

    monkeypatch.setattr(native, "_built", built)
    return used


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(("criterion", "dtype"), CRITERIA_AND_DTYPES)
def test_native_agrees_on_every_criterion(criterion, dtype, native_only):
    check_agreement("native", SHIPPED[criterion], matrices(dtype))
    stages = [stage for stage in native_only if stage.inputs]
    if dtype in native.TYPES and trace(SHIPPED[criterion]).inputs.keys() & {"weight", "grad"}:
        assert stages, "the native kernel was not used"


@needs_native
@pytest.mark.slow
def test_native_agrees_on_every_layout(native_only):
    check_agreement("native", Taylor(), in_turn())
    assert native_only


@needs_native
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1, len(DTYPES)))
def test_native_agrees_on_every_layout_and_dtype(first):
    check_agreement("native", Taylor(), in_turn(first))


@needs_native
@pytest.mark.slow
@pytest.mark.hypothesis
def test_native_agrees_on_random_flows():
    turns = count()

    @settings(
        max_examples=examples(3), phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(flows())
    def law(flow):
        check_agreement("native", criterion_of(flow, kept=State()), matrices(DTYPES[next(turns) % 3]))

    law()


@needs_native
@given(st.data())
def test_native_windows_of_any_shape_and_stride(data):
    """Sums and extremes of windows of one to three pairs of dimensions, with NaN and infinities, by any threads."""
    shape = [data.draw(st.integers(1, 5)) for _ in range(2 * data.draw(st.integers(1, 3)))]
    order = data.draw(st.permutations(range(len(shape))))
    window = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    if data.draw(st.booleans()):
        window[(0,) * len(shape)] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    stage = Stage(1, (Step("abs", (Ref(0),)),), ((Ref(1), "sum"), (Ref(0), "max"), (Ref(0), "min")))
    wanted = reference.fold(stage, [window])
    torch.testing.assert_close(native.fold(stage, [window]), wanted, equal_nan=True)


@needs_native
def test_native_takes_any_number_of_a_flow():
    """Infinity, as in the least of some weights, NaN, zero below zero, subnormal and large numbers."""
    numbers = [torch.inf, -torch.inf, torch.nan, -0.0, 1e-42, 1 / 3, 3.0, 2.0**63, 1e25]
    steps = [Step("maximum", (Ref(0), 0.25))]
    for number in numbers:
        steps += [Step("gt", (Ref(0), number)), Step("mul", (Ref(1), number)), Step("div", (number, Ref(1)))]
    stage = Stage(1, tuple(steps), tuple((Ref(i), "max") for i in range(1, len(steps) + 1)))
    window = torch.randn(3, 2, 2, 4)
    assert native._built(stage, (window.dtype,)) is not None, "the native kernel was not used"
    single = [
        elementwise(Stage(1, stage.steps, (fold,)), [window])[0].to(torch.float32).amax((1, 3)) for fold in stage.folds
    ]
    torch.testing.assert_close(native.fold(stage, [window]), single, equal_nan=True, rtol=0, atol=0)


@needs_native
def test_native_results_do_not_depend_on_threads():
    stage = Stage(2, (Step("mul", (Ref(0), Ref(1))),), ((Ref(2), "sum"),))
    windows = [torch.randn(64, 8, 64, 8) for _ in range(2)]
    threads = torch.get_num_threads()
    try:
        found = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(native.fold(stage, windows)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("criterion", "dtype"), CRITERIA_AND_DTYPES)
def test_compiled_agrees_on_every_criterion(criterion, dtype, compiled_from):
    """Compiling takes a second: the edges of the matrices are left to the reference, and one kernel serves the rest."""
    compiled_from(20000)
    check_agreement("compiled", SHIPPED[criterion], matrices(dtype))


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_agrees_on_every_layout(compiled_from):
    """The size from which a kernel is compiled is set to that of the smallest parameters."""
    compiled_from(1)
    check_agreement("compiled", Taylor(), in_turn())


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1, len(DTYPES)))
def test_compiled_agrees_on_every_layout_and_dtype(first, compiled_from):
    compiled_from(1)
    check_agreement("compiled", Taylor(), in_turn(first))


@needs_compiler
@pytest.mark.slow
@pytest.mark.hypothesis
def test_compiled_agrees_on_random_flows(compiled_from):
    compiled_from(20000)
    turns = count()

    @settings(
        max_examples=examples(1), phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(flows())
    def law(flow):
        check_agreement("compiled", criterion_of(flow, kept=State()), matrices(DTYPES[next(turns) % 3]))

    law()


@needs_compiler
def test_stages_are_compiled_separately_and_beyond_their_variants_take_the_reference(monkeypatch):
    """Two stages with one variant each; a second variant of the first is left to the reference."""
    monkeypatch.setattr(compiled, "WORTH", 1)
    monkeypatch.setattr(compiled, "VARIANTS", 1)
    folds = [((Ref(0), kind),) for kind in ("max", "min")]
    highest, lowest = (Stage(1, (Step("sub", (Ref(0), 0.125)),), fold) for fold in folds)
    window = torch.randn(4, 3, 5, 2)
    for stage, values in product([highest, lowest], [window, window[:, :, :1, :1], window.bfloat16()]):
        torch.testing.assert_close(compiled.fold(stage, [values]), reference.fold(stage, [values]))


@needs_compiler
def test_under_a_dispatch_mode_the_reference_runs(monkeypatch):
    """A mode that counts operations sees those of an update."""
    monkeypatch.setattr(compiled, "WORTH", 1)
    stage, window = Stage(1, (Step("abs", (Ref(0),)),), ((Ref(1), "sum"),)), torch.randn(4, 3, 5, 2)
    with FlopCounterMode(display=False):
        [watched] = compiled.fold(stage, [window])
    torch.testing.assert_close(watched, window.abs().sum((1, 3)))


def test_the_choice_of_a_lowering():
    cpu = torch.device("cpu")
    assert block_score.choose(cpu, 1000) is reference.fold
    assert block_score.choose(cpu, 1000, "compiled") is compiled.fold
    if native.is_available():
        assert block_score.choose(cpu, block_score.PAYS_ONCE) is native.fold
    elif compiled.has_compiler():
        assert block_score.choose(cpu, block_score.PAYS) is compiled.fold


def test_without_a_compiler_the_reference_is_chosen_and_requesting_compiled_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    compiled.has_compiler.cache_clear()
    try:
        assert block_score.choose(torch.device("cpu"), 1 << 30) is reference.fold
        with pytest.raises(FlowError, match=r"'compiled' needs a C\+\+ compiler"):
            block_score.check_lowering("compiled")
        with pytest.raises(FlowError, match=r"'native' needs a C\+\+ compiler on x86 Linux"):
            block_score.check_lowering("native")
    finally:
        compiled.has_compiler.cache_clear()
