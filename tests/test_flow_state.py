"""State of flows: kept between runs and in checkpoints."""

from __future__ import annotations

import io

import pytest
import torch
from flow_cases import criterion_of, param, rows, scorer_for
from hypothesis import given
from hypothesis import strategies as st
from poison import poison  # noqa: F401

from sparse_lightning import BlockSpec, CheckpointError, ScopeSpec
from sparse_lightning.flow import Load, Max, Mean, Pick, Rank, Save, Scorer, Stack, State, Sum, paged

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("order", ["save first", "load first"])
def test_load_returns_the_value_of_the_previous_run(order):
    def flow(x):
        total = Sum()(x.weight)
        if order == "save first":
            Save()(total, x.state["kept"])
            return Load()(x.state["kept"])
        before = Load()(x.state["kept"])
        Save()(total, x.state["kept"])
        return before

    scope = rows([1.0, 2.0])
    scorer = scorer_for(criterion_of(flow, kept=State(fill=-7.0)), scope)
    assert scorer.score()[scope.block].tolist() == [[-7, -7]]
    scope.block.param.mul_(10)
    assert scorer.score()[scope.block].tolist() == [[1, 2]]
    assert scorer.score()[scope.block].tolist() == [[10, 20]]


def counter(fill=0.0):
    def flow(x):
        kept = Load()(x.state["runs"]) + 1 + 0 * Sum()(x.weight)
        Save()(kept, x.state["runs"])
        return kept

    return criterion_of(flow, runs=State(fill=fill))


def test_attach_and_detach_leave_the_state_of_other_scopes_bit_for_bit():
    scopes = [ScopeSpec(BlockSpec(param(300, 2, seed=i), (1, 1))) for i in range(4)]
    scorer = Scorer(criterion_of(_movement, saliency=State()))
    for i, scope in enumerate(scopes[:3]):
        scorer.attach(f"s{i}", scope)
    scorer.score()
    before = scorer.state_dict()["fields"]["saliency"]
    scorer.detach("s1")
    scorer.attach("s3", scopes[3])
    after = scorer.state_dict()["fields"]["saliency"]
    assert set(after) == {"s0", "s2", "s3"}
    assert torch.equal(before["s0"], after["s0"])
    assert torch.equal(before["s2"], after["s2"])
    assert not after["s3"].any(), "a reused page does not start at its fill value"


def _movement(x):
    saliency = Load()(x.state["saliency"]) + Sum()(-x.weight * x.grad)
    Save()(saliency, x.state["saliency"])
    return saliency


def test_scores_after_attach_and_detach_are_those_of_a_new_scorer():
    """Sizes, indices in the state and groups follow the attached scopes."""
    criterion = criterion_of(lambda x: Mean()(x.weight) + Rank(per="scope")(Sum()(x.weight)) + Rank()(Max()(x.grad)))
    scopes = {f"s{i}": ScopeSpec(BlockSpec(param(7, 5 + i, seed=i), (2, 3), edge="partial")) for i in range(3)}
    changed, fresh = Scorer(criterion), Scorer(criterion)
    for name in ("s0", "s1"):
        changed.attach(name, scopes[name])
    changed.score()
    changed.detach("s0")
    changed.attach("s2", scopes["s2"])
    for name in ("s1", "s2"):
        fresh.attach(name, scopes[name])
    got, wanted = changed.score(), fresh.score()
    assert list(got) == list(wanted)
    assert all(torch.equal(got[block], grid) for block, grid in wanted.items())


def test_a_reused_page_starts_at_its_fill_value():
    scorer = Scorer(counter(fill=100.0))
    first, second = rows([1.0] * 300), rows([1.0] * 300)
    scorer.attach("a", first)
    scorer.score()
    pages = list(scorer.table.pages["a"])
    scorer.detach("a")
    scorer.attach("b", second)
    assert scorer.table.pages["b"] == pages, "the pages were not reused: the test shows nothing"
    assert (scorer.score()[second.block] == 101).all()


def test_state_is_restored_from_a_checkpoint_loaded_with_weights_only():
    scope = ScopeSpec(BlockSpec(param(20, 30), (2, 3)))
    scorer = scorer_for(criterion_of(_movement, saliency=State()), scope)
    scorer.score()
    file = io.BytesIO()
    torch.save(scorer.state_dict(), file)
    file.seek(0)
    other = scorer_for(criterion_of(_movement, saliency=State()), scope)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.score()[scope.block], scorer.score()[scope.block])
    assert other.runs == 2


def test_state_with_equal_entries_is_saved_as_one_entry_and_other_state_is_not():
    scope = ScopeSpec(BlockSpec(param(20, 30), (1, 1)))
    scorer = scorer_for(criterion_of(_movement, saliency=State()), scope)
    assert scorer.state_dict()["fields"]["saliency"]["w"].shape == (1, 1, 1)
    expected = scorer.score()[scope.block]
    saved = scorer.state_dict()
    assert saved["fields"]["saliency"]["w"].shape == (600, 1, 1)
    assert torch.equal(scorer.score()[scope.block], 2 * expected)
    scorer.load_state_dict(saved)
    assert torch.equal(scorer.score()[scope.block], 2 * expected)
    scorer.forget()
    assert scorer.state_dict()["fields"]["saliency"]["w"].shape == (1, 1, 1)
    scorer.load_state_dict(scorer.state_dict())
    assert torch.equal(scorer.score()[scope.block], expected)


def test_a_checkpoint_of_another_model_raises_an_error_and_changes_nothing():
    small = scorer_for(counter(), rows([1.0, 2.0]))
    small.score()
    large = scorer_for(counter(), rows([1.0, 2.0, 3.0]))
    large.score()
    kept = large.state_dict()
    with pytest.raises(CheckpointError, match=r"\(2, 1, 1\) entries of state 'runs' for 'w', which has 3 blocks"):
        large.load_state_dict(small.state_dict())
    with pytest.raises(CheckpointError, match=r"for \[\], not \['w'\]"):
        large.load_state_dict({"runs": 1, "fields": {}})
    assert torch.equal(large.state_dict()["fields"]["runs"]["w"], kept["fields"]["runs"]["w"])


def test_stack_and_pick_hold_several_statistics_in_one_value():
    def flow(x):
        Save()(Stack()(Sum()(x.weight), Max()(x.weight)), x.state["pair"])
        kept = Load()(x.state["pair"])
        return Pick(0)(kept) + 10 * Pick(1)(kept)

    scope = ScopeSpec(BlockSpec(torch.tensor([[1.0, 2.0, 3.0, 5.0]]), (1, 2)))
    scorer = scorer_for(criterion_of(flow, pair=State(inner=(2, 1))), scope)
    assert scorer.score()[scope.block].tolist() == [[0, 0]]
    assert scorer.score()[scope.block].tolist() == [[23, 58]]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6), st.integers(1, 8))
def test_ranges_are_read_and_written_as_an_index_of_each_entry(runs, long):
    """Runs of places that do not overlap, in any order."""
    starts, end = [], 0
    for gap, length in runs:
        starts.append((end + gap, length))
        end += gap + length
    index = torch.cat([torch.arange(start, start + length) for start, length in sorted(starts, key=lambda r: -r[1])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "RUN", long)
        places = paged.EntryIndex.of(index)
    buffer = torch.randn(end + 3, 1, 2)
    assert torch.equal(places.read(buffer), buffer[index])
    wanted, values = buffer.clone(), torch.randn(len(index), 1, 2)
    wanted[index] = values
    places.write(buffer, values)
    assert torch.equal(buffer, wanted)
    if long == 1:
        assert not isinstance(places.found, torch.Tensor)
