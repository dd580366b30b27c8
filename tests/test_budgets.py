"""Budgets: exact counts and published formulas, against plain loops over real scopes."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st

from sparse_lightning import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec
from sparse_lightning.budgets import ERK, LAMP, Global, ScoredScope, Uniform
from sparse_lightning.errors import PatternError, SparsityError

TARGETS = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]), st.floats(0, 1))
BUDGETS = [Uniform(), ERK(), Global(), Global(min_density=0.3), LAMP()]


def tiles(draw):
    """A matrix in blocks of one size, with smaller edge blocks, in one scope or one scope per row of blocks."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    block = BlockSpec(torch.randn(rows, columns), (draw(st.integers(1, 2)), draw(st.integers(1, 3))), edge="partial")
    return ScopeSpec(block, draw(st.sampled_from([(-1, -1), (1, -1)])))


def neurons(draw):
    """Rows of one matrix coupled with columns of another."""
    n = draw(st.integers(1, 5))
    up, down = BlockSpec(torch.randn(n, draw(st.integers(1, 3))), (1, -1)), BlockSpec(torch.randn(2, n), (-1, 1))
    return ScopeSpec(BlockCoupling([up, down], [(0, 1), (1, 0)]))


def shared(draw):
    """Blocks of two sizes that compete in one scope."""
    small = BlockSpec(torch.randn(2, draw(st.integers(1, 3))), (1, 1))
    return ScopeCoupling([ScopeSpec(small), ScopeSpec(BlockSpec(torch.randn(4, 2), (2, 2)))])


@st.composite
def scored_scopes(draw, scores=(0.0, 0.5, 1.0, 1.0, 2.0, 3.5, -math.inf), max_size=3):
    found = []
    for i in range(draw(st.integers(1, max_size))):
        scope = draw(st.sampled_from([tiles, neurons, shared]))(draw)
        values = draw(st.lists(st.sampled_from(scores), min_size=scope.numblk(), max_size=scope.numblk()))
        gathered = torch.tensor(values).view(*scope.grid_shape, -1)
        found.append(ScoredScope(f"layers.{i}.weight", scope, gathered))
    return found


def row(name, scores, **more):
    """One scope of single weights."""
    scope = ScopeSpec(BlockSpec(torch.ones(1, len(scores)), (1, 1)))
    return ScoredScope(name, scope, torch.tensor([[scores]]), **more)


def counts(budget, scopes, target, final=1.0):
    return [kept.flatten().tolist() for kept in budget.split(scopes, target, final)]


@given(st.sampled_from(BUDGETS), scored_scopes(), st.tuples(TARGETS, TARGETS))
def test_counts_are_within_their_scopes_and_decrease_with_the_target(budget, scopes, targets):
    low, high = sorted(targets)
    before, after = budget.split(scopes, low, high), budget.split(scopes, high, high)
    for scored, more, fewer in zip(scopes, before, after, strict=True):
        assert more.dtype == torch.int64
        assert tuple(more.shape) == scored.scope.grid_shape
        assert bool(((fewer >= 0) & (fewer <= more) & (more <= scored.scope.numblk_per_scope())).all())
        masks = scored.scope.select(scored.scores, more)
        assert torch.equal((~masks).sum(-1), more)
    dense = budget.split(scopes, 0.0, high)
    assert all(bool((kept == c.scope.numblk_per_scope()).all()) for kept, c in zip(dense, scopes, strict=True))


@given(scored_scopes(), TARGETS)
def test_uniform_prunes_the_same_fraction_of_every_scope(scopes, target):
    for scored, kept in zip(scopes, Uniform().split(scopes, target, 1.0), strict=True):
        n = scored.scores.shape[-1]
        assert bool((kept == n - math.floor(target * n + 1e-9)).all())


def sizes_by_hand(scored):
    """The number of weights in each block, counted: one per score."""
    scope, grids = scored.scope, {}
    for block in scope.blocks():
        marks = {spec: torch.ones(spec.view.shape) for spec in block.blocks()}
        grids[block] = block.norms(marks, p=1)
    return scope.gather(grids).flatten().tolist()


def plain_global(scopes, target, min_density):
    """Prune blocks one by one, the lowest first, until the next one would exceed the target."""
    blocks = []  # (score, scored, index, scope, size)
    for c, scored in enumerate(scopes):
        n, sizes = scored.scores.shape[-1], sizes_by_hand(scored)
        for i, score in enumerate(scored.scores.flatten().tolist()):
            blocks.append((score, c, i, i // n, sizes[i]))
    room = target * sum(size for *_, size in blocks) + 1e-9 * max(size for *_, size in blocks)
    kept = [[scored.scores.shape[-1]] * scored.scope.numscp() for scored in scopes]
    for _, c, _, scope, size in sorted(blocks, key=lambda block: (block[0], -block[1], -block[2])):
        if kept[c][scope] <= max(1, math.ceil(min_density * scopes[c].scores.shape[-1] - 1e-9)):
            continue
        if size > room:
            break
        room -= size
        kept[c][scope] -= 1
    return kept


@given(scored_scopes(), TARGETS, st.sampled_from([0.0, 0.1, 0.5, 0.75, 1.0]))
def test_global_equals_a_plain_loop_over_all_blocks(scopes, target, min_density):
    assert counts(Global(min_density), scopes, target) == plain_global(scopes, target, min_density)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), TARGETS)
def test_global_prunes_the_exact_number_of_equal_blocks(first, second, width, target):
    def scored(name, n):
        scope = ScopeSpec(BlockSpec(torch.ones(1, n * width), (1, width)))
        return ScoredScope(name, scope, torch.rand(1, 1, n))

    total = sum(sum(kept) for kept in counts(Global(), [scored("a", first), scored("b", second)], target))
    n = first + second
    assert total == max(2, n - math.floor(target * n + 1e-9)), "each scope keeps at least one block"


@given(scored_scopes(max_size=2), TARGETS)
def test_global_prunes_the_lowest_blocks_of_all(scopes, target):
    kept_scores, pruned_scores = [], []
    for scored, kept in zip(scopes, Global().split(scopes, target, 1.0), strict=True):
        masks = scored.scope.select(scored.scores, kept)
        loose = kept > 1  # a scope with one block left may keep a low one
        kept_scores += scored.scores[loose][~masks[loose]].tolist()
        pruned_scores += scored.scores[masks].tolist()
    if kept_scores and pruned_scores:
        assert max(pruned_scores) <= min(kept_scores)


def test_of_equal_scores_the_earlier_scope_and_the_lower_index_are_kept():
    first, second = row("first", [1.0, 1.0, 1.0]), row("second", [1.0, 1.0, 1.0])
    assert [counts(Global(), [first, second], k / 6) for k in range(5)] == [
        [[3], [3]],
        [[3], [2]],
        [[3], [1]],
        [[2], [1]],
        [[1], [1]],
    ]


def test_rounding_errors_do_not_change_counts():
    """In floating point, 0.29 · 100 is a little less than 29, and 0.07 · 100 a little more than 7."""
    hundred = [row("a", [float(i) for i in range(100)])]
    assert counts(Uniform(), hundred, 0.29) == counts(Global(), hundred, 0.29) == [[71]]
    assert counts(Global(min_density=0.07), hundred, 1.0) == [[7]]


def test_nan_is_pruned_first():
    assert counts(Global(), [row("a", [math.nan, 5.0]), row("b", [-math.inf, 1.0])], 0.25) == [[1], [2]]


@given(scored_scopes(scores=(0.0, 0.5, 1.0, 2.0, 3.5), max_size=1))
def test_global_ranks_scores_as_if_all_blocks_were_of_one_size(scopes):
    one = scopes[0]
    for exponent in (0.0, 0.5, 1.0):
        scored = ScoredScope(one.name, one.scope, one.scores, size_exponent=exponent)
        sizes = sizes_by_hand(scored)
        scores = scored.scores.flatten().tolist()
        expected = [score / size**exponent for score, size in zip(scores, sizes, strict=True)]
        assert Global().rank(scored).flatten().tolist() == pytest.approx(expected)
        assert Uniform().rank(scored) is scored.scores
        assert ERK().rank(scored) is scored.scores


def plain_lamp(scores):
    """score(u) = W[u]² / Σ W[v]² over the v whose weight is not smaller, as in the paper."""
    return [s**2 / sum(v**2 for v in scores if v >= s) if s else 0.0 for s in scores]


@given(st.lists(st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 100, width=32)), min_size=1, max_size=20))
def test_lamp_is_the_published_formula(scores):
    scope = ScopeSpec(BlockSpec(torch.ones(2, 3 * len(scores)), (2, 3)))
    ranked = LAMP().rank(ScoredScope("a", scope, torch.tensor([[scores]])))
    normal = [float(x) for x in torch.tensor(scores) / 6]
    assert ranked.flatten().tolist() == pytest.approx(plain_lamp(normal), rel=1e-9, abs=1e-300)


@given(st.lists(st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-9, 9, width=32)), min_size=1, max_size=20))
def test_lamp_keeps_the_order_within_a_scope(scores):
    ranked = LAMP().rank(row("a", scores)).flatten().tolist()
    pairs = sorted(zip(scores, ranked, strict=True))
    assert [r for _, r in pairs] == sorted(ranked)


def test_lamp_keeps_the_highest_scores_of_each_layer():
    scopes = [row("large", [10.0, 20.0, 30.0, 40.0]), row("small", [0.1, 0.2, 0.3, 0.4])]
    ranked = [ScoredScope(c.name, c.scope, LAMP().rank(c)) for c in scopes]
    assert counts(Global(), scopes, 0.5) == [[3], [1]]
    assert counts(LAMP(), ranked, 0.5) == [[2], [2]]


def test_a_nan_score_does_not_change_the_ranks_of_others():
    ranked = LAMP().rank(row("a", [math.nan, 2.0, 1.0, math.inf])).flatten().tolist()
    assert math.isnan(ranked[0])
    assert 0 < ranked[2] < ranked[1] < ranked[3] == 1.0


def plain_erk(shapes, target):
    """The loop of RigL: layers with a density above 1 become dense, and the others split the remaining weights."""
    dense = set()
    while True:
        divisor, room, raw = 0.0, 0.0, {}
        for i, shape in enumerate(shapes):
            n = math.prod(shape)
            if i in dense:
                room -= n * target
            else:
                room += n * (1 - target)
                raw[i] = sum(shape) / math.prod(shape)
                divisor += raw[i] * n
        epsilon = room / divisor if raw else 0.0
        if not raw or max(raw.values()) * epsilon <= 1:
            return [1.0 if i in dense else epsilon * raw[i] for i in range(len(shapes))]
        dense |= {i for i, value in raw.items() if value == max(raw.values())}


SHAPES = st.lists(
    st.lists(st.integers(1, 12), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 2000), min_size=1
)


@given(SHAPES.filter(lambda shapes: len(shapes) <= 5), TARGETS)
def test_erk_is_the_published_formula(shapes, target):
    scopes = []
    for i, shape in enumerate(shapes):
        scope = ScopeSpec(BlockSpec(torch.ones(shape), (1,) * len(shape)))
        scopes.append(ScoredScope(f"{i}", scope, torch.rand(*scope.grid_shape, math.prod(shape))))
    densities = plain_erk(shapes, target)
    assert sum(d * math.prod(s) for d, s in zip(densities, shapes, strict=True)) == pytest.approx(
        (1 - target) * sum(map(math.prod, shapes)), abs=1e-6
    )
    for shape, density, (kept,) in zip(shapes, densities, counts(ERK(), scopes, target), strict=True):
        n = math.prod(shape)
        wanted = density * n
        assert wanted - 1e-6 <= kept <= wanted + 1 + 1e-6, "whole blocks, rounded up"
        assert kept == n - math.floor((1 - density) * n + 1e-9) or abs(wanted - round(wanted)) < 1e-6


def test_erk_uses_the_shape_of_the_largest_parameter_and_counts_all_weights():
    up, down = BlockSpec(torch.ones(8, 2), (1, -1)), BlockSpec(torch.ones(16, 8), (-1, 1))
    coupled = ScoredScope("ffn", ScopeSpec(BlockCoupling([up, down], [(0, 1), (1, 0)])), torch.rand(1, 1, 8))
    plain = ScoredScope("out", ScopeSpec(BlockSpec(torch.ones(12, 12), (1, 1))), torch.rand(1, 1, 144))
    raw = [24 / 128, 24 / 144]
    epsilon = 0.5 * 288 / (raw[0] * 144 + raw[1] * 144)
    expected = [[8 - math.floor((1 - epsilon * raw[0]) * 8)], [144 - math.floor((1 - epsilon * raw[1]) * 144)]]
    assert counts(ERK(), [coupled, plain], 0.5) == expected
    assert counts(ERK(power=0.0), [coupled, plain], 0.5) == [[4], [72]]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_n_of_m_anneals_by_whole_numbers(budget):
    scope = ScopeSpec(BlockSpec(torch.ones(2, 8), (1, 1)), (1, 4))
    fixed = ScoredScope("nm.weight", scope, torch.rand(2, 2, 4), final=1 - 2 / 4)
    free = row("free.weight", [float(i) for i in range(10)])
    targets = [0.0, 0.1, 0.44, 0.45, 0.8, 0.9]
    kept = [budget.split([fixed, free], target, final=0.9) for target in targets]
    assert [nm.unique().tolist() for nm, _ in kept] == [[4], [4], [4], [3], [3], [2]]
    alone = [budget.split([free], target, final=0.9) for target in targets]
    assert [int(rest) for _, rest in kept] == [int(rest) for (rest,) in alone], (
        "an N:M scope changes the counts of the others"
    )


@given(st.sampled_from([Uniform, ERK, Global, LAMP]), scored_scopes(), TARGETS, TARGETS, TARGETS)
def test_an_override_follows_the_schedule_and_the_other_scopes_split_the_target(budget, scopes, final, done, override):
    final = max(final, 0.01)
    target = final * done
    budgeted = budget(overrides={"*.0.weight": override, r"re:layers\.\d\.weight": 0.5, "*": 0.9})
    kept = budgeted.split(scopes, target, final)
    for i, scored in enumerate(scopes):
        o = 0.5 if i else override
        assert bool((kept[i] == scored.scope.sparsity_to_nnz(o * (target / final))).all()), "the first match applies"
    only_first = budget(overrides={"layers.0.*": override}).split(scopes, target, final)
    if len(scopes) > 1:
        alone = budget().split(scopes[1:], target, final)
        assert all(torch.equal(a, b) for a, b in zip(only_first[1:], alone, strict=True))


def test_an_override_takes_precedence_over_the_sparsity_of_the_pattern():
    fixed = row("nm.weight", [1.0, 2.0, 3.0, 4.0], final=0.5)
    assert counts(Global(), [fixed], 0.9, 0.9) == [[2]]
    assert counts(Global(overrides={"nm.*": 0.75}), [fixed], 0.9, 0.9) == [[1]]
    assert counts(Global(overrides={"nm.*": 0.75}), [fixed], 0.0, 0.0) == [[4]], "a run that prunes nothing"


@pytest.mark.parametrize("budget", [Uniform(overrides={"*.up": 0.5}), ERK(0.5), Global(0.1), LAMP(0.1)], ids=str)
def test_budgets_are_copied_and_pickled_by_value(budget):
    for other in (pickle.loads(pickle.dumps(budget)), copy.deepcopy(budget)):
        assert other == budget
        assert hash(other) == hash(budget)
    assert budget != type(budget)(overrides={"other": 0.5})


def test_hydra_passes_overrides_as_a_mapping():
    config = {"_target_": "sparse_lightning.budgets.Global", "min_density": 0.1, "overrides": {"*.up": 0.5}}
    found = instantiate(config)
    assert found == Global(0.1, overrides={"*.up": 0.5})
    assert type(found.overrides) is dict


def test_a_budget_copies_its_overrides():
    overrides = {"*.up": 0.5}
    budget = Uniform(overrides=overrides)
    overrides["*.down"] = 0.9
    assert budget == Uniform(overrides={"*.up": 0.5})


SCORED = [row("layers.0.up.weight", [1.0, 2.0]), row("layers.0.down.weight", [1.0, 2.0])]
INVALID = {
    "a min_density above 1": (lambda: Global(min_density=1.5), "min_density=1.5 is out of range: pass a number from 0"),
    "a min_density that is not a number": (lambda: Global(min_density=math.nan), "min_density=nan"),
    "an override above 1": (lambda: LAMP(overrides={"*.up": 2.0}), r"override '\*\.up'=2.0 is out of range"),
    "an override that is a bool": (lambda: LAMP(overrides={"*.up": True}), r"override '\*\.up'=True is out of range"),
    "overrides that are a list": (lambda: LAMP(overrides=["*.up"]), "is not a mapping: map names to final sparsities"),
    "a negative power": (lambda: ERK(power=-1.0), "power=-1.0 of ERK"),
    "a target above 1": (lambda: Global().split(SCORED, 1.5, 1.0), "target=1.5 is out of range"),
    "a target that is not a number": (lambda: Uniform().split(SCORED, math.nan, 1.0), "target=nan is out of range"),
    "a target above the final one": (
        lambda: ERK().split(SCORED, 0.6, 0.5),
        "target=0.6 is above final=0.5",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_errors_name_the_argument_and_its_value(case):
    act, text = INVALID[case]
    with pytest.raises(SparsityError, match=text):
        act()


def test_an_override_that_matches_nothing_raises_an_error_with_the_nearest_name():
    with pytest.raises(
        PatternError, match=r"override '\*\.upp\.weight' matches no pruned scope.* did you mean '\*\.up\.weight'"
    ):
        Uniform(overrides={"*.upp.weight": 0.5}).split(SCORED, 0.5, 1.0)


def test_what_a_scope_keeps_can_be_changed_alone():
    alike = [
        ScoredScope(f"scope {i}", ScopeSpec(BlockSpec(torch.randn(4, 4), (1, 1))), torch.rand(4, 4)) for i in range(2)
    ]
    first, second = Uniform().allocate(alike, 0.5)
    first += 1
    assert (int(first), int(second)) == (9, 8)
