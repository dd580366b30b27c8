"""Stacks: scopes of parameters that lie alike are scored and decided together, with the results of each by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import parametrize
from strategies import block_shapes, shapes, walks
from torch import nn

from sparse_lightning import (
    ERK,
    LAMP,
    SET,
    BlockCoupling,
    Blocks,
    BlockSpec,
    Constant,
    Global,
    Gradual,
    Layout,
    Linear,
    Neurons,
    Proximal,
    PruneOnce,
    RigL,
    ScopeCoupling,
    ScopeSpec,
    Soft,
    Sparsifier,
    Uniform,
    View,
)
from sparse_lightning.blocks import alike_blocks, scope_stack
from sparse_lightning.blocks.scope_stack import stacks
from sparse_lightning.criteria import EMA, ElementwiseTaylor, Fisher, Magnitude, Movement, Random, Taylor
from sparse_lightning.flow import Scorer, Sources, pruned_blocks
from sparse_lightning.kernels.block_score import native

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler on x86 Linux")


@st.composite
def alike(draw):
    """Some scopes on equal views of different parameters of one shape, with any strides, and a gradient for each."""
    shape = draw(shapes(max_dims=3, max_numel=64))
    base = torch.zeros(shape)
    layout = draw(walks(Layout.of(base), kinds=["permute", "slice", "step", "flip", "split", "insert"]))
    block = draw(block_shapes(layout.shape, divide=False))
    scope = draw(
        block_shapes(
            BlockSpec(View(base, layout.shape, layout.stride, layout.offset), block, edge="partial").grid_shape
        )
    )

    def make():
        param = nn.Parameter(torch.randn(shape))
        param.grad = torch.randn(shape).t().contiguous().t() if len(shape) == 2 else torch.randn(shape)
        view = View(param, layout.shape, layout.stride, layout.offset)
        return ScopeSpec(BlockSpec(view, block, edge="partial"), scope)

    return [make() for _ in range(draw(st.integers(1, 4)))]


def scores_of(criterion, scopes, monkeypatch, small, lowering=None):
    """The scores of scopes, stacked if they have at most this many blocks."""
    monkeypatch.setattr(scope_stack, "SMALL", small)
    scorer = Scorer(criterion, lowering=lowering)
    for i, scope in enumerate(scopes):
        scorer.attach(str(i), scope)
    for _ in range(2):
        scores = scorer.score(Sources(step=3, target=0.5))
    return [scores[block] for scope in scopes for block in scope.blocks()]


@given(alike(), alike(), st.sampled_from([Magnitude(p=2), Taylor(), Movement(), EMA(Fisher()), Random()]))
def test_scores_of_a_stack_are_those_of_each_parameter(first, second, criterion):
    scopes = [scope for pair in zip(first, second, strict=False) for scope in pair]
    with pytest.MonkeyPatch.context() as patch:
        together = scores_of(criterion, scopes, patch, 1 << 16)
        apart = scores_of(criterion, scopes, patch, 0)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("small", "together"), [(0, 1 << 20), (1 << 16, 100)])
def test_copies_of_parameters_are_bounded_and_large_ones_are_not_copied(small, together, monkeypatch):
    scopes = [ScopeSpec(BlockSpec(nn.Parameter(torch.randn(8, 6)), (2, 3))) for _ in range(7)]
    apart = scores_of(Magnitude(), scopes, monkeypatch, 0)
    monkeypatch.setattr(alike_blocks, "SMALL", small)
    monkeypatch.setattr(alike_blocks, "TOGETHER", together)
    copied = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors, **rest: copied.append(len(tensors)) or stack(tensors, **rest))
    found = scores_of(Magnitude(), scopes, monkeypatch, 1 << 16)
    assert all(map(torch.equal, found, apart))
    assert [n for n in copied if n > 1] == ([] if small == 0 else [2, 2, 2] * 2)


@needs_compiler
@settings(max_examples=20)
@given(alike(), alike(), st.sampled_from([Magnitude(p=2), Taylor()]))
def test_the_native_kernel_reads_parameters_that_lie_alike_where_they_are(first, second, criterion):
    scopes = [scope for pair in zip(first, second, strict=False) for scope in pair]
    with pytest.MonkeyPatch.context() as patch:
        together = scores_of(criterion, scopes, patch, 1 << 16, "native")
        apart = scores_of(criterion, scopes, patch, 0, "native")
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("lowering", ["reference", pytest.param("native", marks=needs_compiler)])
@settings(max_examples=30)
@given(scopes=alike(), data=st.data())
def test_pruned_blocks_are_not_read_where_their_scores_are_zero_anyway(lowering, scopes, data):
    """With weights of zero in pruned blocks, and gradients that are not finite there, scores are as without either."""
    wide = st.integers(1, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruned_blocks, "WORTH", 1)
        patch.setattr(pruned_blocks, "LINE", 1)
        patch.setattr(native, "LINE", data.draw(wide))
        pruned = {}
        for i, scope in enumerate(scopes):
            [block] = scope.blocks()
            pruned[str(i)] = mask = torch.rand(block.grid_shape) < 0.5
            block.apply_mask(mask)
        wanted = scored(scopes, Sources(), lowering)
        for scope, mask in zip(scopes, pruned.values(), strict=True):
            [block] = scope.blocks()
            where = block.view.like(block.param.grad).read()
            where[block.expand_to_elements(mask)] = torch.nan
        found = scored(scopes, Sources(pruned=pruned), lowering)
    for name, scope in enumerate(scopes):
        [block] = scope.blocks()
        torch.testing.assert_close(found[block], wanted[block])
        assert not found[block][pruned[str(name)]].any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [True, False])
@settings(max_examples=10)
@given(scopes=alike())
def test_scores_follow_masks_that_change_between_two_runs(mode, in_place, scopes):
    with pytest.MonkeyPatch.context() as patch, mode():
        patch.setattr(pruned_blocks, "WORTH", 1)
        patch.setattr(pruned_blocks, "LINE", 1)
        scorer = Scorer(ElementwiseTaylor())
        for i, scope in enumerate(scopes):
            scorer.attach(str(i), scope)
        blocks = [block for scope in scopes for block in scope.blocks()]
        masks = {str(i): torch.zeros(block.grid_shape, dtype=torch.bool) for i, block in enumerate(blocks)}
        scorer.score(Sources(pruned=masks))
        for name, mask in masks.items():
            masks[name] = mask.fill_(True) if in_place else torch.ones_like(mask)
        found = scorer.score(Sources(pruned=masks))
    assert not any(scores.any() for scores in found.values())


def scored(scopes, sources, lowering):
    """Scores by the product of weight and gradient."""
    scorer = Scorer(ElementwiseTaylor(), lowering=lowering)
    for i, scope in enumerate(scopes):
        scorer.attach(str(i), scope)
    return scorer.score(sources)


@given(alike())
def test_values_gathered_by_a_stack_are_those_of_each_scope(scopes):
    found = stacks(scopes)
    assert [scope for stack in found for scope in stack.scopes] == scopes
    for stack in found:
        values = {block: torch.randn(block.grid_shape) for block in stack.blocks()}
        gathered = stack.gather(values)
        assert gathered.shape == (*stack.grid_shape, stack.numblk_per_scope())
        for scope, own in zip(stack.scopes, gathered, strict=True):
            assert torch.equal(own, scope.gather(values))
        assert all(torch.equal(grid, values[block]) for block, grid in stack.scatter(gathered).items())
        assert (stack.numel(), stack.numblk()) == tuple(
            sum(n) for n in zip(*((s.numel(), s.numblk()) for s in stack.scopes), strict=True)
        )


def coupled(up_shape=(8, 4)):
    up, down = nn.Parameter(torch.randn(up_shape)), nn.Parameter(torch.randn(up_shape[1], up_shape[0]))
    rows, columns = BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))
    return ScopeSpec(BlockCoupling([rows, columns], orders=[(0, 1), (1, 0)]))


def test_only_what_lies_alike_is_stacked():
    plain = [ScopeSpec(BlockSpec(torch.ones(4, 8), (2, 2))) for _ in range(3)]
    transposed = ScopeSpec(BlockSpec(torch.ones(8, 4).t(), (2, 2)))
    narrow, rows = ScopeSpec(BlockSpec(torch.ones(4, 8).bfloat16(), (2, 2))), ScopeSpec(plain[0].block, (1, -1))
    pair = ScopeCoupling([ScopeSpec(BlockSpec(torch.ones(4, 8), (2, 2))) for _ in range(2)])
    found = stacks([plain[0], transposed, plain[1], narrow, rows, pair, coupled(), plain[2], coupled()])
    assert sorted(len(stack.scopes) for stack in found) == [1, 1, 1, 1, 2, 3]


def test_a_stack_has_a_bounded_number_of_blocks(monkeypatch):
    monkeypatch.setattr(scope_stack, "TOGETHER", 25)
    found = stacks(ScopeSpec(BlockSpec(torch.ones(4, 8), (2, 2))) for _ in range(7))
    assert [len(stack.scopes) for stack in found] == [3, 3, 1]


class Deep(nn.Module):
    """Layers of two shapes, and neurons of two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8 if i % 3 else 16) for i in range(7)])
        self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)])

    def forward(self, x):
        return sum(layer(x).sum(-1) for layer in self.layers) + sum(mlp(x).sum(-1) for mlp in self.mlps)


def train(method, budget, criterion):
    """Return the masks of every step, the weights, and the state of a run."""
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    patterns = [Blocks("layers.*.weight", (4, 4)), Neurons("mlps.*.0", "mlps.*.2")]
    schedule = Constant(0.6, begin=2, end=6) if isinstance(method, PruneOnce) else Linear(0.6, end=6)
    sparsifier = Sparsifier(patterns, schedule, criterion, method, budget, update_every=2)
    sparsifier.attach(model, optimizer)
    torch.manual_seed(1)
    masks = []
    for _ in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()
        masks.append(sparsifier.masks)
    return masks, [p.detach().clone() for p in model.parameters()], sparsifier.state_dict()


@parametrize(
    ids=lambda part: type(part).__name__,
    method=[Gradual(), PruneOnce(), SET(), RigL(), Soft(), Proximal()],
    budget=[Uniform(), ERK(), Global(), LAMP(), Uniform(overrides={"layers.0.weight": 0.25})],
    criterion=[Magnitude(), Taylor(), EMA(Taylor()), Random()],
)
def test_a_run_is_the_same_together_and_apart(method, budget, criterion, monkeypatch):
    together = train(method, budget, criterion)
    monkeypatch.setattr(scope_stack, "SMALL", 0)
    apart = train(method, budget, criterion)
    for a, b in zip(together[0], apart[0], strict=True):
        assert set(a) == set(b)
        assert all(torch.equal(a[name], b[name]) for name in a)
    for a, b in zip(together[1], apart[1], strict=True):
        torch.testing.assert_close(a, b)
    assert list(together[2]["memory"]) == list(apart[2]["memory"])


class OnlyOneScope(Gradual):
    """A method of a user's, which looks at the scope of one parameter."""

    def choose(self, context):
        [block] = context.scope.blocks()
        assert context.scores.shape == (*context.scope.grid_shape, context.scope.numblk_per_scope())
        assert context.scope.grid_shape == (1,) * block.grid_ndim
        return super().choose(context)


def test_a_method_that_overrides_a_decision_is_called_for_each_parameter():
    masks, _, _ = train(OnlyOneScope(), Uniform(), Magnitude())
    plain, _, _ = train(Gradual(), Uniform(), Magnitude())
    assert all(torch.equal(masks[-1][name], plain[-1][name]) for name in plain[-1])
