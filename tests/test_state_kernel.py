"""State is advanced by a kernel in place, and in parts by torch: the same bits as all at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparse_lightning import EMA, BlockSpec, Criterion, ElementwiseTaylor, Fisher, Movement, ScopeSpec, State
from sparse_lightning.flow import Scorer, Sources, grid_run
from sparse_lightning.flow import scorer as scorer_module
from sparse_lightning.flow.ops import Abs, Greater, L2Norm, Load, Max, Maximum, Mean, Save, Sqrt, Sum, Where
from sparse_lightning.flow.state_kernel import StateKernel
from sparse_lightning.kernels.block_score import native

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler on x86 Linux")
ONE_KERNEL, IN_PARTS, AT_ONCE = "one kernel", "in parts", "at once"


class Mixed(Criterion):
    """Two fields, three reductions, a condition, and a field that is read but never saved."""

    def __init__(self):
        self.states = {"a": State(fill=0.5), "b": State(), "constant": State(fill=3.0)}

    def flow(self, x):
        a, b, constant = (Load()(x.state[name]) for name in ("a", "b", "constant"))
        norm, mean, most = L2Norm()(x.weight), Mean()(x.grad), Max()(Abs()(x.grad))
        Save()(Where()(Greater()(norm, most), 0.3 * a + constant / norm, Maximum()(a, -mean) - 1 / 3), x.state["a"])
        Save()(Abs()(b - mean * mean), x.state["b"])
        return Sum()(x.weight) + a


class Rooted(Criterion):
    """torch rounds roots and reciprocals in its own way."""

    def __init__(self):
        self.states = {"root": State(fill=2.0)}

    def flow(self, x):
        root = Sqrt()(Load()(x.state["root"]) + 1 / (1 + Sum()(Abs()(x.grad))))
        Save()(root, x.state["root"])
        return root


class Counted(Criterion):
    """Integers are left to torch."""

    def __init__(self):
        self.states = {"steps": State(dtype=torch.int64)}

    def flow(self, x):
        steps = Load()(x.state["steps"]) + 1
        Save()(steps, x.state["steps"])
        return Sum()(x.weight) + steps


CRITERIA = [Movement(), EMA(ElementwiseTaylor()), EMA(Fisher(), 0.3), Mixed(), Rooted(), Counted()]


def observed(criterion, scopes, gradients, way):
    """The state and the scores after observing gradients, computed in one of the ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer_module, "MANY", 0 if way == ONE_KERNEL else 1 << 30)
        patch.setitem(grid_run.TOGETHER, "cpu", 7 if way == IN_PARTS else 1 << 30)
        scorer = Scorer(criterion, lowering="native" if native.is_available() else "reference")
        for i, scope in enumerate(scopes):
            scorer.attach(str(i), scope)
        for step, values in enumerate(gradients):
            for scope, value in zip(scopes, values, strict=True):
                scope.blocks()[0].param.grad = value
            scorer.observe(Sources(step=step))
        before = scorer.state_dict()
        scores = scorer.score(Sources(step=9))
        return before, scorer.state_dict(), [scores[scope.blocks()[0]] for scope in scopes]


def assert_same(a, b):
    """Assert that nested states have the same bits."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("way", [pytest.param(ONE_KERNEL, marks=needs_compiler), IN_PARTS])
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (2, 3)]),
    st.sampled_from(CRITERIA),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, torch.nan, torch.inf]),
    st.integers(0, 99),
)
def test_state_is_the_same_bits_however_it_is_advanced(way, shapes, block, criterion, dtype, broken, seed):
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    scopes = [ScopeSpec(BlockSpec(param, block, edge="partial")) for param in params]
    gradients = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(3)]
    if broken is not None:
        gradients[1][-1][-1, -1] = broken
    assert_same(observed(criterion, scopes, gradients, way), observed(criterion, scopes, gradients, AT_ONCE))


def test_a_step_with_a_gradient_that_is_not_finite_leaves_all_state_as_it_was():
    weights = [nn.Parameter(torch.randn(40, 30)) for _ in range(2)]
    scopes = [ScopeSpec(BlockSpec(weight, (1, 1))) for weight in weights]
    good = [torch.randn(40, 30) for _ in weights]
    bad = [good[0], good[1].clone().index_fill_(0, torch.tensor([39]), torch.nan)]
    for way in [ONE_KERNEL, IN_PARTS, AT_ONCE]:
        without, *_ = observed(EMA(ElementwiseTaylor()), scopes, [good], way)
        found, *_ = observed(EMA(ElementwiseTaylor()), scopes, [good, bad], way)
        assert_same(found["fields"], without["fields"])


def test_which_programs_have_a_kernel():
    assert [StateKernel.of(Scorer(criterion).program) is not None for criterion in CRITERIA] == [True] * 4 + [False] * 2
