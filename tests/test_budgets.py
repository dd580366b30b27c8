"""Budgets: exact counts, and the published formulas, against plain loops over real scopes."""

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
from sparse_lightning.budgets import ERK, LAMP, Contender, Global, Uniform
from sparse_lightning.errors import PatternError, SparsityError

TARGETS = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]), st.floats(0, 1))
BUDGETS = [Uniform(), ERK(), Global(), Global(floor=0.3), LAMP()]


def tiles(draw):
    """A matrix in blocks of one size, with a smaller edge, in one scope or a scope for each row of blocks."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    block = BlockSpec(torch.randn(rows, columns), (draw(st.integers(1, 2)), draw(st.integers(1, 3))), edge="partial")
    return ScopeSpec(block, draw(st.sampled_from([(-1, -1), (1, -1)])))


def neurons(draw):
    """Rows of one matrix with columns of another."""
    n = draw(st.integers(1, 5))
    up, down = BlockSpec(torch.randn(n, draw(st.integers(1, 3))), (1, -1)), BlockSpec(torch.randn(2, n), (-1, 1))
    return ScopeSpec(BlockCoupling([up, down], [(0, 1), (1, 0)]))


def shared(draw):
    """Blocks of two sizes that compete in one scope."""
    small = BlockSpec(torch.randn(2, draw(st.integers(1, 3))), (1, 1))
    return ScopeCoupling([ScopeSpec(small), ScopeSpec(BlockSpec(torch.randn(4, 2), (2, 2)))])


@st.composite
def contenders(draw, scores=(0.0, 0.5, 1.0, 1.0, 2.0, 3.5, -math.inf), max_size=3):
    found = []
    for i in range(draw(st.integers(1, max_size))):
        scope = draw(st.sampled_from([tiles, neurons, shared]))(draw)
        values = draw(st.lists(st.sampled_from(scores), min_size=scope.numblk(), max_size=scope.numblk()))
        gathered = torch.tensor(values).view(*scope.grid_shape, -1)
        found.append(Contender(f"layers.{i}.weight", scope, gathered))
    return found


def row(name, scores, **more):
    """One scope of single weights."""
    scope = ScopeSpec(BlockSpec(torch.ones(1, len(scores)), (1, 1)))
    return Contender(name, scope, torch.tensor([[scores]]), **more)


def counts(budget, them, target, final=1.0):
    return [kept.flatten().tolist() for kept in budget.split(them, target, final)]


@given(st.sampled_from(BUDGETS), contenders(), st.tuples(TARGETS, TARGETS))
def test_counts_fit_their_scopes_and_fall_as_the_target_rises(budget, them, targets):
    low, high = sorted(targets)
    before, after = budget.split(them, low, high), budget.split(them, high, high)
    for contender, more, fewer in zip(them, before, after, strict=True):
        assert more.dtype == torch.int64
        assert tuple(more.shape) == contender.scope.grid_shape
        assert bool(((fewer >= 0) & (fewer <= more) & (more <= contender.scope.numblk_per_scope())).all())
        masks = contender.scope.select(contender.scores, more)
        assert torch.equal((~masks).sum(-1), more)
    dense = budget.split(them, 0.0, high)
    assert all(bool((kept == c.scope.numblk_per_scope()).all()) for kept, c in zip(dense, them, strict=True))


@given(contenders(), TARGETS)
def test_uniform_prunes_the_same_part_of_every_scope(them, target):
    for contender, kept in zip(them, Uniform().split(them, target, 1.0), strict=True):
        n = contender.scores.shape[-1]
        assert bool((kept == n - math.floor(target * n + 1e-9)).all())


def sizes_by_hand(contender):
    """The weights of each block, counted: one number for each score."""
    scope, grids = contender.scope, {}
    for block in scope.blocks():
        marks = {spec: torch.ones(spec.view.shape) for spec in block.blocks()}
        grids[block] = block.norms(marks, p=1)
    return scope.gather(grids).flatten().tolist()


def plain_global(them, target, floor):
    """Blocks one by one, the lowest first, until the next one would be too much."""
    blocks = []  # (score, contender, index, scope, size)
    for c, contender in enumerate(them):
        n, sizes = contender.scores.shape[-1], sizes_by_hand(contender)
        for i, score in enumerate(contender.scores.flatten().tolist()):
            blocks.append((score, c, i, i // n, sizes[i]))
    room = target * sum(size for *_, size in blocks) + 1e-9 * max(size for *_, size in blocks)
    kept = [[contender.scores.shape[-1]] * contender.scope.numscp() for contender in them]
    for _, c, _, scope, size in sorted(blocks, key=lambda block: (block[0], -block[1], -block[2])):
        if kept[c][scope] <= max(1, math.ceil(floor * them[c].scores.shape[-1] - 1e-9)):
            continue
        if size > room:
            break
        room -= size
        kept[c][scope] -= 1
    return kept


@given(contenders(), TARGETS, st.sampled_from([0.0, 0.1, 0.5, 0.75, 1.0]))
def test_global_is_a_plain_loop_over_all_blocks(them, target, floor):
    assert counts(Global(floor), them, target) == plain_global(them, target, floor)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), TARGETS)
def test_global_prunes_the_exact_number_of_equal_blocks(first, second, width, target):
    def contender(name, n):
        scope = ScopeSpec(BlockSpec(torch.ones(1, n * width), (1, width)))
        return Contender(name, scope, torch.rand(1, 1, n))

    total = sum(sum(kept) for kept in counts(Global(), [contender("a", first), contender("b", second)], target))
    n = first + second
    assert total == max(2, n - math.floor(target * n + 1e-9)), "at least one block in each scope stays"


@given(contenders(max_size=2), TARGETS)
def test_global_prunes_the_lowest_blocks_of_all(them, target):
    kept_scores, pruned_scores = [], []
    for contender, kept in zip(them, Global().split(them, target, 1.0), strict=True):
        masks = contender.scope.select(contender.scores, kept)
        loose = kept > 1  # a scope with one block left may keep a low one
        kept_scores += contender.scores[loose][~masks[loose]].tolist()
        pruned_scores += contender.scores[masks].tolist()
    if kept_scores and pruned_scores:
        assert max(pruned_scores) <= min(kept_scores)


def test_of_equal_scores_the_earlier_contender_and_the_lower_index_are_kept():
    first, second = row("first", [1.0, 1.0, 1.0]), row("second", [1.0, 1.0, 1.0])
    assert [counts(Global(), [first, second], k / 6) for k in range(5)] == [
        [[3], [3]],
        [[3], [2]],
        [[3], [1]],
        [[2], [1]],
        [[1], [1]],
    ]


def test_rounding_costs_no_block():
    assert 0.29 * 100 < 29
    assert 0.07 * 100 > 7
    hundred = [row("a", [float(i) for i in range(100)])]
    assert counts(Uniform(), hundred, 0.29) == counts(Global(), hundred, 0.29) == [[71]]
    assert counts(Global(floor=0.07), hundred, 1.0) == [[7]]


def test_not_a_number_goes_first():
    assert counts(Global(), [row("a", [math.nan, 5.0]), row("b", [-math.inf, 1.0])], 0.25) == [[1], [2]]


@given(contenders(scores=(0.0, 0.5, 1.0, 2.0, 3.5), max_size=1))
def test_global_ranks_scores_as_if_all_blocks_were_of_one_size(them):
    one = them[0]
    for exponent in (0.0, 0.5, 1.0):
        contender = Contender(one.name, one.scope, one.scores, size_exponent=exponent)
        sizes = sizes_by_hand(contender)
        scores = contender.scores.flatten().tolist()
        expected = [score / size**exponent for score, size in zip(scores, sizes, strict=True)]
        assert Global().rank(contender).flatten().tolist() == pytest.approx(expected)
        assert Uniform().rank(contender) is contender.scores
        assert ERK().rank(contender) is contender.scores


def plain_lamp(scores):
    """score(u) = W[u]² / Σ W[v]² over the v whose weight is not smaller, as in the paper."""
    return [s**2 / sum(v**2 for v in scores if v >= s) if s else 0.0 for s in scores]


@given(st.lists(st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 100, width=32)), min_size=1, max_size=20))
def test_lamp_is_the_published_formula(scores):
    scope = ScopeSpec(BlockSpec(torch.ones(2, 3 * len(scores)), (2, 3)))
    ranked = LAMP().rank(Contender("a", scope, torch.tensor([[scores]])))
    normal = [float(x) for x in torch.tensor(scores) / 6]
    assert ranked.flatten().tolist() == pytest.approx(plain_lamp(normal), rel=1e-9, abs=1e-300)


@given(st.lists(st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-9, 9, width=32)), min_size=1, max_size=20))
def test_lamp_changes_no_order_within_a_contender(scores):
    ranked = LAMP().rank(row("a", scores)).flatten().tolist()
    pairs = sorted(zip(scores, ranked, strict=True))
    assert [r for _, r in pairs] == sorted(ranked)


def test_lamp_keeps_what_is_strong_in_its_own_layer():
    them = [row("large", [10.0, 20.0, 30.0, 40.0]), row("small", [0.1, 0.2, 0.3, 0.4])]
    ranked = [Contender(c.name, c.scope, LAMP().rank(c)) for c in them]
    assert counts(Global(), them, 0.5) == [[3], [1]]
    assert counts(LAMP(), ranked, 0.5) == [[2], [2]]


def test_one_score_that_is_not_a_number_leaves_the_ranks_of_others():
    ranked = LAMP().rank(row("a", [math.nan, 2.0, 1.0, math.inf])).flatten().tolist()
    assert math.isnan(ranked[0])
    assert 0 < ranked[2] < ranked[1] < ranked[3] == 1.0


def plain_erk(shapes, target):
    """The loop of RigL: layers that would be more than dense are made dense, and the others share what is left."""
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
    them = []
    for i, shape in enumerate(shapes):
        scope = ScopeSpec(BlockSpec(torch.ones(shape), (1,) * len(shape)))
        them.append(Contender(f"{i}", scope, torch.rand(*scope.grid_shape, math.prod(shape))))
    densities = plain_erk(shapes, target)
    assert sum(d * math.prod(s) for d, s in zip(densities, shapes, strict=True)) == pytest.approx(
        (1 - target) * sum(map(math.prod, shapes)), abs=1e-6
    )
    for shape, density, (kept,) in zip(shapes, densities, counts(ERK(), them, target), strict=True):
        n = math.prod(shape)
        wanted = density * n
        assert wanted - 1e-6 <= kept <= wanted + 1 + 1e-6, "whole blocks, rounded up"
        assert kept == n - math.floor((1 - density) * n + 1e-9) or abs(wanted - round(wanted)) < 1e-6


def test_erk_takes_the_shape_of_the_largest_parameter_and_counts_all_weights():
    up, down = BlockSpec(torch.ones(8, 2), (1, -1)), BlockSpec(torch.ones(16, 8), (-1, 1))
    coupled = Contender("ffn", ScopeSpec(BlockCoupling([up, down], [(0, 1), (1, 0)])), torch.rand(1, 1, 8))
    plain = Contender("out", ScopeSpec(BlockSpec(torch.ones(12, 12), (1, 1))), torch.rand(1, 1, 144))
    raw = [24 / 128, 24 / 144]
    epsilon = 0.5 * 288 / (raw[0] * 144 + raw[1] * 144)
    expected = [[8 - math.floor((1 - epsilon * raw[0]) * 8)], [144 - math.floor((1 - epsilon * raw[1]) * 144)]]
    assert counts(ERK(), [coupled, plain], 0.5) == expected
    assert counts(ERK(power=0.0), [coupled, plain], 0.5) == [[4], [72]]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_n_of_m_anneals_by_whole_numbers(budget):
    scope = ScopeSpec(BlockSpec(torch.ones(2, 8), (1, 1)), (1, 4))
    fixed = Contender("nm.weight", scope, torch.rand(2, 2, 4), final=1 - 2 / 4)
    free = row("free.weight", [float(i) for i in range(10)])
    targets = [0.0, 0.1, 0.44, 0.45, 0.8, 0.9]
    kept = [budget.split([fixed, free], target, final=0.9) for target in targets]
    assert [nm.unique().tolist() for nm, _ in kept] == [[4], [4], [4], [3], [3], [2]]
    alone = [budget.split([free], target, final=0.9) for target in targets]
    assert [int(rest) for _, rest in kept] == [int(rest) for (rest,) in alone], "N:M has no part in the rest"


@given(st.sampled_from([Uniform, ERK, Global, LAMP]), contenders(), TARGETS, TARGETS, TARGETS)
def test_an_override_is_reached_in_step_and_the_rest_share_the_target(budget, them, final, done, override):
    final = max(final, 0.01)
    target = final * done
    budgeted = budget(overrides={"*.0.weight": override, r"re:layers\.\d\.weight": 0.5, "*": 0.9})
    kept = budgeted.split(them, target, final)
    for i, contender in enumerate(them):
        o = 0.5 if i else override
        assert bool((kept[i] == contender.scope.sparsity_to_nnz(o * (target / final))).all()), "the first match holds"
    only_first = budget(overrides={"layers.0.*": override}).split(them, target, final)
    if len(them) > 1:
        alone = budget().split(them[1:], target, final)
        assert all(torch.equal(a, b) for a, b in zip(only_first[1:], alone, strict=True))


def test_an_override_holds_before_the_sparsity_of_the_pattern():
    fixed = row("nm.weight", [1.0, 2.0, 3.0, 4.0], final=0.5)
    assert counts(Global(), [fixed], 0.9, 0.9) == [[2]]
    assert counts(Global(overrides={"nm.*": 0.75}), [fixed], 0.9, 0.9) == [[1]]
    assert counts(Global(overrides={"nm.*": 0.75}), [fixed], 0.0, 0.0) == [[4]], "a run that prunes nothing"


@pytest.mark.parametrize("budget", [Uniform(overrides={"*.up": 0.5}), ERK(0.5), Global(0.1), LAMP(0.1)], ids=str)
def test_budgets_are_plain_data(budget):
    for other in (pickle.loads(pickle.dumps(budget)), copy.deepcopy(budget)):
        assert other == budget
        assert hash(other) == hash(budget)
    assert budget != type(budget)(overrides={"other": 0.5})


def test_hydra_gives_mappings():
    config = {"_target_": "sparse_lightning.budgets.Global", "floor": 0.1, "overrides": {"*.up": 0.5}}
    found = instantiate(config)
    assert found == Global(0.1, overrides={"*.up": 0.5})
    assert type(found.overrides) is dict


def test_what_a_caller_changes_later_does_not_change_a_budget():
    overrides = {"*.up": 0.5}
    budget = Uniform(overrides=overrides)
    overrides["*.down"] = 0.9
    assert budget == Uniform(overrides={"*.up": 0.5})


THEM = [row("layers.0.up.weight", [1.0, 2.0]), row("layers.0.down.weight", [1.0, 2.0])]
REFUSED = {
    "a floor above 1": (lambda: Global(floor=1.5), "floor of 1.5: it must lie between 0 and 1"),
    "a floor that is not a number": (lambda: Global(floor=math.nan), "floor of nan"),
    "an override above 1": (lambda: LAMP(overrides={"*.up": 2.0}), r"override '\*\.up' of 2.0"),
    "an override that is a bool": (lambda: LAMP(overrides={"*.up": True}), r"override '\*\.up' of True"),
    "overrides that are a list": (lambda: LAMP(overrides=["*.up"]), "give a mapping from names to sparsities"),
    "a negative power": (lambda: ERK(power=-1.0), "power=-1.0 of ERK"),
    "a target above 1": (lambda: Global().split(THEM, 1.5, 1.0), "target of 1.5: it must lie"),
    "a target that is not a number": (lambda: Uniform().split(THEM, math.nan, 1.0), "target of nan"),
    "a target above the final one": (
        lambda: ERK().split(THEM, 0.6, 0.5),
        "target of 0.6 above the final sparsity, 0.5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_with_names_and_numbers(case):
    act, text = REFUSED[case]
    with pytest.raises(SparsityError, match=text):
        act()


def test_an_override_that_matches_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(
        PatternError, match=r"override '\*\.upp\.weight' matches nothing.* did you mean '\*\.up\.weight'"
    ):
        Uniform(overrides={"*.upp.weight": 0.5}).split(THEM, 0.5, 1.0)
