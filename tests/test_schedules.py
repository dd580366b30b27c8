"""Schedules: targets that stay in bounds, updates that stay in their span, and the formulas that were published."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sparse_lightning.engine.position import Position
from sparse_lightning.errors import SparseLightningError, SparsityError
from sparse_lightning.schedules import (
    Constant,
    Cosine,
    Cubic,
    Cyclic,
    Exponential,
    Join,
    Linear,
    OneShot,
    Ramp,
    Schedule,
    Steps,
)

SPARSITIES = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.9, 1]), st.floats(0, 1))
STEPS = st.integers(0, 60)
FRACTIONS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
RAMPS = [Linear, Cubic, Cosine, Exponential]


@st.composite
def spans(draw):
    """Two steps in order; optimizer steps, or fractions of the run."""
    return tuple(sorted(draw(st.tuples(STEPS, STEPS) if draw(st.booleans()) else st.tuples(FRACTIONS, FRACTIONS))))


@st.composite
def ramps(draw, kinds=tuple(RAMPS)):
    kind, (begin, end) = draw(st.sampled_from(kinds)), draw(spans())
    initial, final = sorted(draw(st.tuples(SPARSITIES, SPARSITIES)))
    more = {"rate": draw(st.floats(1e-6, 50))} if kind is Exponential else {}
    return kind(final, begin, end, initial, **more)


@st.composite
def step_schedules(draw):
    at = draw(st.sampled_from([STEPS, FRACTIONS]))
    steps = sorted(draw(st.sets(at, min_size=1, max_size=4)))
    milestones = [(step, draw(SPARSITIES)) for step in steps]
    return Steps(dict(milestones) if draw(st.booleans()) else milestones)


@st.composite
def cyclics(draw):
    low, high = sorted(draw(st.tuples(SPARSITIES, SPARSITIES)))
    period = draw(st.one_of(st.integers(1, 40), st.floats(0.01, 1)))
    return Cyclic(low, high, period, *draw(spans()))


SIMPLE = st.one_of(
    ramps(),
    step_schedules(),
    cyclics(),
    st.builds(lambda final, span: Constant(final, *span), SPARSITIES, spans()),
    st.builds(OneShot, SPARSITIES, st.one_of(STEPS, FRACTIONS)),
)


@st.composite
def joins(draw, segments=SIMPLE):
    """Segments that are long enough for every schedule in optimizer steps."""
    schedules = draw(st.lists(segments, min_size=1, max_size=3))
    first = 61 + draw(st.integers(0, 9))
    return Join(schedules, [first + 70 * i for i in range(len(schedules) - 1)])


# A Join of Joins of up to three segments of 70 steps each.
NESTED = st.builds(lambda a, b: Join([a, b], [300]), joins(), joins())
SCHEDULES = st.one_of(SIMPLE, joins(), NESTED)
TOTALS = st.integers(1, 120)


@st.composite
def resolved(draw, schedules=SCHEDULES):
    """A schedule in optimizer steps, and all steps around its span."""
    schedule = draw(schedules).resolve(draw(TOTALS))
    return schedule, range(max(0, schedule.span[0] - 2), schedule.span[1] + 4)


@given(resolved(), st.integers(1, 500))
def test_targets_are_sparsities_that_change_within_the_span_and_final_is_the_highest(case, later):
    schedule, steps = case
    targets = [schedule(step) for step in steps]
    assert all(0 <= target <= schedule.final for target in targets)
    assert max(targets) == schedule.final
    begin, end = schedule.span
    assert schedule(end + later) == schedule(end)
    assert len({schedule(step) for step in range(begin)}) <= 1


@given(resolved(), st.integers(1, 30))
def test_updates_lie_in_the_span_and_hold_its_begin_and_its_end(case, every):
    schedule, steps = case
    updates = [step for step in range(steps.stop) if schedule.is_update(step, every)]
    assert (updates[0], updates[-1]) == schedule.span
    assert set(updates) <= {step for step in steps if schedule.is_update(step)}


@given(resolved(st.one_of(ramps(), cyclics())), st.integers(1, 30))
def test_updates_come_every_so_many_steps(case, every):
    schedule, steps = case
    begin, end = schedule.span
    updates = [step for step in steps if schedule.is_update(step, every)]
    assert updates == sorted({*range(begin, end + 1, every), end})


@given(resolved(), st.integers(1, 30), st.lists(st.integers(0, 300), max_size=8))
def test_a_position_knows_the_updates_of_its_schedule_wherever_it_moves(case, every, jumps):
    """It asks for many steps ahead: what it knows must hold in order, backwards and after jumps."""
    schedule, steps = case
    position = Position(schedule, every, None)
    for step in [*steps, *reversed(steps), *jumps]:
        position.step = step
        assert position.is_due() == schedule.is_update(step, every)


@given(resolved(), st.one_of(st.none(), TOTALS))
def test_a_resolved_schedule_resolves_to_itself(case, total):
    schedule, _ = case
    assert schedule.resolve(total) == schedule


@given(st.one_of(ramps(), step_schedules(), cyclics()), TOTALS)
def test_fractions_of_the_run_become_steps_and_steps_stay(schedule, total):
    steps = [at for at, _ in schedule.milestones] if isinstance(schedule, Steps) else [schedule.begin, schedule.end]
    expected = [at if isinstance(at, int) else round(at * (total - 1)) for at in steps]
    assert schedule.resolve(total).span == (expected[0], expected[-1])


@given(SCHEDULES, TOTALS)
def test_pickles_and_copies_are_equal_and_fields_cannot_be_set(schedule, total):
    for one in (schedule, schedule.resolve(total)):
        for other in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
            assert other == one
            assert hash(other) == hash(one)
            assert other.resolve(total) == one.resolve(total)
    with pytest.raises(FrozenInstanceError):
        schedule.final = 0.5


def plain_rise(ramp, p):
    """The formulas as they are published, p from 0 to 1."""
    return {
        Linear: lambda: p,
        Cubic: lambda: 1 - (1 - p) ** 3,
        Cosine: lambda: 0.5 - 0.5 * math.cos(math.pi * p),
        Exponential: lambda: (1 - math.exp(-ramp.rate * p)) / (1 - math.exp(-ramp.rate)),
    }[type(ramp)]()


@given(resolved(ramps()))
def test_a_ramp_rises_by_its_formula_from_initial_to_final_both_exact(case):
    ramp, steps = case
    begin, end = ramp.span
    targets = [ramp(step) for step in steps]
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(targets))
    assert ramp(end) == ramp.final
    assert begin == end or ramp(begin) == ramp.initial
    for step in range(begin, end):
        done = plain_rise(ramp, (step - begin) / (end - begin))
        assert ramp(step) == pytest.approx(ramp.initial + (ramp.final - ramp.initial) * done, abs=1e-9)


@given(st.integers(0, 50), st.integers(1, 100), st.integers(1, 10), SPARSITIES, SPARSITIES)
def test_cubic_is_the_schedule_of_zhu_and_gupta(t0, n, delta_t, s_i, s_f):
    """s_t = s_f + (s_i − s_f) (1 − (t − t0) / (n Δt))³ for t in t0, t0 + Δt, …, t0 + n Δt."""
    s_i, s_f = sorted([s_i, s_f])
    cubic = Cubic(s_f, begin=t0, end=t0 + n * delta_t, initial=s_i)
    for t in range(t0, t0 + n * delta_t + 1, delta_t):
        assert cubic.is_update(t, every=delta_t)
        assert cubic(t) == pytest.approx(s_f + (s_i - s_f) * (1 - (t - t0) / (n * delta_t)) ** 3, abs=1e-12)


@given(resolved(step_schedules()), st.integers(1, 30))
def test_steps_hold_the_last_milestone_and_each_is_an_update(case, every):
    schedule, steps = case
    begin, end = schedule.span
    updates = {step for step in steps if schedule.is_update(step, every)}
    assert updates == {*range(begin, end + 1, every), *(at for at, _ in schedule.milestones)}
    for step in steps:
        target = 0.0
        for at, sparsity in schedule.milestones:
            if step >= at:
                target = sparsity
        assert schedule(step) == target


@given(resolved(cyclics()))
def test_a_cycle_is_a_wave_until_its_last_maximum(case):
    schedule, _ = case
    (begin, end), period = schedule.span, schedule.period
    tops = [begin + period / 2 + k * period for k in range(end - begin + 1) if begin + period / 2 + k * period <= end]
    for step in range(begin, end + 1):
        wave = (1 - math.cos(2 * math.pi * (step - begin) / period)) / 2
        expected = schedule.low + (schedule.high - schedule.low) * wave
        if step >= (tops[-1] if tops else end):
            expected = schedule.high
        assert schedule(step) == pytest.approx(expected, abs=1e-9)
    if begin < end and (not tops or begin < tops[-1]):
        assert schedule(begin) == schedule.low


@given(resolved(joins()), st.integers(1, 30))
def test_a_join_is_each_schedule_in_its_segment(case, every):
    schedule, steps = case
    starts = [0, *schedule.boundaries]
    for step in range(steps.stop):
        i = max(k for k, start in enumerate(starts) if start <= step)
        part, at = schedule.schedules[i], step - starts[i]
        assert schedule.is_update(step, every) == part.is_update(at, every)
        if i and at < part.span[0]:
            assert schedule(step) == schedule(starts[i] - 1), "the target stays where the one before left it"
        else:
            assert schedule(step) == part(at)


@pytest.mark.parametrize("kind", RAMPS)
def test_the_run_ends_at_its_last_step(kind):
    schedule = kind(0.9, begin=0.1, end=0.7).resolve(101)
    assert schedule == kind(0.9, begin=10, end=70)
    assert kind(0.9, begin=0.0, end=1.0).resolve(101).span == (0, 100)
    assert kind(0.9).resolve(1)(0) == 0.9, "a run of one step ends where it begins"


@pytest.mark.parametrize("kind", RAMPS)
def test_by_default_a_ramp_leaves_steps_to_train_before_and_after(kind):
    assert kind(0.9) == kind(0.9, begin=0.1, end=0.7)
    assert Cyclic(0.1, 0.9, 0.2) == Cyclic(0.1, 0.9, 0.2, begin=0.1, end=0.9)


@pytest.mark.parametrize("kind", RAMPS)
def test_a_ramp_to_a_step_begins_at_step_0_and_needs_no_total_steps(kind):
    assert kind(0.9, end=50).resolve(None).span == (0, 50)
    assert kind(0.9, end=0.05).resolve(101).span == (0, 5), "the default would begin after the end"
    assert kind(0.9, begin=0.02, end=0.05).resolve(101).span == (2, 5)
    assert Cyclic(0.1, 0.9, 5, end=50).resolve(None).span == (0, 50)


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_a_constant_schedule_needs_no_total_steps(end, step):
    schedule = Constant(0.5, end=end).resolve(None)
    assert schedule(step) == 0.5
    assert schedule.is_update(step, every=1), "updates never end"
    with pytest.raises(SparsityError, match=r"begin=0.5 of Constant is a fraction of the run"):
        Constant(0.5, begin=0.5).resolve(None)


def test_a_fraction_of_the_run_in_a_join_is_a_fraction_of_its_segment():
    schedule = Join([Cubic(0.5, 0, 1.0), Linear(0.9, 0.5, 1.0, 0.5)], [0.6]).resolve(101)
    assert schedule == Join([Cubic(0.5, 0, 59), Linear(0.9, 20, 40, 0.5)], [60])


def test_a_run_too_short_for_all_of_it_keeps_what_comes_last():
    assert Steps({0.1: 0.5, 0.6: 0.7, 0.9: 0.9}).resolve(3) == Steps({0: 0.5, 1: 0.7, 2: 0.9})
    assert Steps({0.1: 0.5, 0.6: 0.7, 0.9: 0.9}).resolve(1) == Steps({0: 0.9})
    assert Join([Linear(0.5), Linear(0.9)], [0.5]).resolve(1) == Join([Linear(0.9, 0, 0)])
    assert Cyclic(0.1, 0.9, period=0.1).resolve(1)(0) == 0.9


def test_hydra_passes_lists_and_mappings():
    config = OmegaConf.create(
        {
            "_target_": "sparse_lightning.schedules.Join",
            "schedules": [
                {"_target_": "sparse_lightning.schedules.Steps", "milestones": {0: 0.5, 10: 0.6}},
                {"_target_": "sparse_lightning.schedules.Steps", "milestones": [[0, 0.7], [10, 0.8]]},
                {"_target_": "sparse_lightning.schedules.Cubic", "final": 0.9},
            ],
            "boundaries": [100, 200],
        }
    )
    expected = Join([Steps([(0, 0.5), (10, 0.6)]), Steps([(0, 0.7), (10, 0.8)]), Cubic(0.9)], [100, 200])
    for convert in ("partial", "object", "all"):
        found = instantiate(config, _convert_=convert)
        assert found == expected
        assert hash(pickle.loads(pickle.dumps(found))) == hash(expected)


@dataclass(frozen=True)
class Sudden(Ramp):
    """A ramp as a user writes it, that rises too far."""

    def rise(self, p):
        return 3 * p


def test_a_ramp_of_ones_own_is_one_method_and_cannot_leave_its_bounds():
    schedule = Sudden(0.6, begin=0.0, end=1.0, initial=0.3).resolve(7)
    assert [round(schedule(step), 9) for step in range(7)] == [0.3, 0.45, 0.6, 0.6, 0.6, 0.6, 0.6]
    assert schedule == Sudden(0.6, 0, 6, 0.3)


WRONG = {
    "a sparsity above 1": (lambda: Linear(1.5), "final=1.5 of Linear: a sparsity must lie between 0"),
    "a negative sparsity": (lambda: Cubic(0.5, initial=-0.1), "initial=-0.1 of Cubic"),
    "a sparsity that is not a number": (lambda: Constant(math.nan), "final=nan of Constant"),
    "a sparsity that is a bool": (lambda: OneShot(True), "final=True of OneShot"),
    "a sparsity that is a text": (lambda: OneShot("0.5"), "final='0.5' of OneShot"),
    "a step that is a bool": (lambda: OneShot(0.5, at=True), "at=True of OneShot is not a step: pass an int ≥ 0"),
    "a negative step": (lambda: Linear(0.5, begin=-1), "begin=-1 of Linear"),
    "a fraction above 1": (lambda: Linear(0.5, end=100.0), r"end=100.0 of Linear.* a float between 0.0 and 1.0"),
    "a fraction that is not a number": (lambda: Linear(0.5, end=math.nan), "end=nan of Linear"),
    "an end before the begin": (
        lambda: Cosine(0.5, 20, 10),
        "from begin=20 to end=10 .* lower begin or raise end",
    ),
    "fractions in the wrong order": (lambda: Cosine(0.5, 0.5, 0.1), "from begin=0.5 to end=0.1"),
    "a fall": (lambda: Linear(0.5, initial=0.9), "initial=0.9 of Linear is above final=0.5.* Steps, Cyclic or Join"),
    "a wave upside down": (lambda: Cyclic(0.9, 0.5, 10), "low=0.9 of Cyclic is above high=0.5"),
    "a wave of no steps": (
        lambda: Cyclic(0.1, 0.5, 0),
        "period=0 of Cyclic is too short: it must be at least one step",
    ),
    "a rate of zero": (lambda: Exponential(0.5, rate=0), "rate=0 of Exponential is not a positive number"),
    "no milestones": (lambda: Steps([]), "Steps has no milestones"),
    "a milestone that is no pair": (lambda: Steps([5]), "milestone 5 of Steps is not a pair"),
    "a milestone of too much": (lambda: Steps({5: 2}), "sparsity at 5=2 of Steps"),
    "milestones in disorder": (lambda: Steps([(9, 0.5), (5, 0.6)]), "milestone 9 of Steps comes before 5"),
    "two milestones at once": (lambda: Steps([(9, 0.5), (9, 0.6)]), "milestone 9 of Steps comes before 9"),
    "too few boundaries": (lambda: Join([Linear(0.5)] * 3, [5]), "3 schedules and 1 boundaries"),
    "nothing to join": (lambda: Join([], []), "0 schedules and 0 boundaries"),
    "a number to join": (lambda: Join([0.5]), "0.5 in a Join is not a schedule"),
    "boundaries in disorder": (lambda: Join([Linear(0.5)] * 3, [9, 5]), "boundary 9 of Join comes before 5"),
    "no run": (lambda: Linear(0.5).resolve(0), "cannot be resolved with total_steps=0: it must be at least 1"),
    "a run without a length": (
        lambda: Linear(0.5).resolve(None),
        "end=0.7 of Linear is a fraction of the run, but total_steps is unknown: .* end=1000",
    ),
    "fractions that are called": (lambda: Linear(0.5)(3), r"begin=0.1 of Linear .* call resolve\(total_steps\) first"),
    "a period that is a fraction": (lambda: Cyclic(0.1, 0.5, 0.5, 0, 9)(3), "period=0.5 of Cyclic .* call resolve"),
    "milestones that are fractions": (lambda: Steps({0.5: 0.5})(3), "milestone=0.5 of Steps .* call resolve"),
    "boundaries that are fractions": (
        lambda: Join([OneShot(0.5)] * 2, [0.5])(3),
        "boundary=0.5 of Join .* call resolve",
    ),
    "an end before the begin, in this run": (
        lambda: Linear(0.5, begin=50, end=1.0).resolve(11),
        r"Linear\(final=0.5, begin=50, end=1.0.* in a run of 11 steps: .* begin=50 to end=10",
    ),
    "milestones in disorder, in this run": (
        lambda: Steps([(1, 0.5), (50, 0.6), (0.1, 0.7)]).resolve(11),
        "milestone 50 of Steps comes before 1",
    ),
    "boundaries in disorder, in this run": (
        lambda: Join([OneShot(0.5)] * 3, [50, 0.0]).resolve(11),
        "boundary 50 of Join comes before 0",
    ),
    "a schedule that does not fit its segment": (
        lambda: Join([Linear(0.5, end=10), OneShot(0.9)], [10]).resolve(None),
        "in a Join has its last update at step 10, but its segment has 10 steps .*: end it earlier",
    ),
    "an update every 0 steps": (lambda: Linear(0.5, end=9).is_update(3, every=0), "every=0 is not a number of steps"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_raise_with_names_and_numbers(case):
    act, text = WRONG[case]
    with pytest.raises(SparsityError, match=text) as caught:
        act()
    assert isinstance(caught.value, SparseLightningError)
    assert isinstance(caught.value, ValueError)


def test_a_schedule_without_a_target_is_abstract():
    with pytest.raises(TypeError, match="__call__"):
        Schedule()
