"""Units that cross in a parameter: rows belong to units that it computes, columns to those that it reads."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparse_lightning import (
    Blocks,
    BlockSpec,
    Constant,
    Filters,
    Global,
    Linear,
    Magnitude,
    Neurons,
    RigL,
    ScopeSpec,
    Sparsifier,
    SparsityCallback,
    Uniform,
    check_pruned,
)
from sparse_lightning.blocks.union import count_zeros
from sparse_lightning.budgets import ScoredScope
from sparse_lightning.errors import PatternError
from sparse_lightning.export import KeptBlocks
from sparse_lightning.layout import Layout
from sparse_lightning.layout.crossing import meet, phases, units_cross
from sparse_lightning.metrics.functional import block_sparsity
from sparse_lightning.patterns import resolve
from sparse_lightning.report.outcome import Outcome
from sparse_lightning.report.results_table import results_table

CHAIN = [Neurons("0", "2"), Neurons("2", "4")]


def chain(a=12, b=10, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 3)).to(dtype)


class Conv(L.LightningModule):
    """Two convolutions in a row with their norms."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.first = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.second = nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.first(self.one(x)).relu()
        return self.head(self.second(self.two(x)).relu().mean((2, 3)))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(64, 2, 5, 5, generator=generator), torch.randint(4, (64,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=8)


CONVOLUTIONS = [Filters("one", norm="first", into="two"), Filters("two", norm="second", into="head")]


def strided(draw):
    """A layout with units first, inside of a matrix of 6×8."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    offset = 8 * draw(st.integers(0, 6 - rows)) + draw(st.integers(0, 8 - columns))
    whole = Layout((rows, columns), (8, 1), offset)
    return whole if draw(st.booleans()) else whole.permute((1, 0))


@given(st.data())
def test_layouts_of_one_phase_share_no_element(data):
    layouts = [strided(data.draw) for _ in range(data.draw(st.integers(1, 4)))]
    found = phases(layouts)
    offsets = [elements(layout) for layout in layouts]
    for i in range(len(layouts)):
        for j in range(i):
            assert meet(layouts[i], layouts[j]) == bool(offsets[i] & offsets[j])
            if found[i] == found[j]:
                assert not offsets[i] & offsets[j]


def elements(layout):
    rows, columns = layout.shape
    return {layout((i, j)) for i in range(rows) for j in range(columns)}


@given(st.data())
def test_units_cross_where_each_meets_several_of_the_other(data):
    one, other = strided(data.draw), strided(data.draw)
    if not elements(one) & elements(other):
        return
    unit = [elements(one.slice(0, i, i + 1)) for i in range(one.shape[0])]
    others = [elements(other.slice(0, i, i + 1)) for i in range(other.shape[0])]

    def several(units, of):
        met = [sum(bool(u & o) for o in of) for u in units]
        return len(of) == 1 or next(n for n in met if n) > 1

    assert units_cross(one, other) == (several(unit, others) and several(others, unit))


@settings(max_examples=examples(25))
@given(st.data())
def test_weights_of_several_blocks_count_once(data):
    weight = torch.randint(-1, 2, (4, 6)).float()
    weight[data.draw(st.integers(0, 3))] = 0
    weight[:, data.draw(st.integers(0, 5))] = 0
    shapes = st.lists(st.sampled_from([(1, -1), (-1, 1), (2, 3)]), min_size=1, max_size=3, unique=True)
    blocks = [BlockSpec(weight, shape) for shape in data.draw(shapes)]
    marked = torch.zeros(4, 6, dtype=torch.bool)
    for block in blocks:
        zero = block.norms() == 0
        marked |= block.get_masks(zero)[block]
    assert count_zeros(blocks) == (int(marked.sum()), 24)
    assert float(block_sparsity(blocks)) == pytest.approx(int(marked.sum()) / 24)


def test_only_units_may_cross():
    model = chain()
    assert len(resolve(CHAIN, model)) == 2
    with pytest.raises(PatternError, match=r"0\.weight .* already claimed by Neurons\(up='0', down='2'\)"):
        resolve([CHAIN[0], Neurons("0", "2")], model)
    with pytest.raises(PatternError, match="already claimed"):
        resolve([Blocks("2.weight", (2, 2)), CHAIN[0]], model)
    assert len(resolve(CONVOLUTIONS, Conv())) == 2
    with pytest.raises(PatternError, match=r"already claimed by Filters\(match=\('one',\)"):
        resolve([CONVOLUTIONS[0], Filters("one")], Conv())


def test_growth_of_units_that_cross_is_refused():
    model = chain()
    sparsifier = Sparsifier(CHAIN, Constant(0.5), method=RigL())
    text = r"RigL cannot grow units that cross: 0 \(neurons\) and 2 \(neurons\) share weights of 2\.weight"
    with pytest.raises(PatternError, match=text):
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(12, 10), (700, 600)], ids=["one thread", "all threads"])
def test_units_that_cross_are_held_and_counted_over_the_union(size, dtype):
    model = chain(*size, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparsifier = Sparsifier(CHAIN, Constant(0.5), Magnitude(), update_every=1)
    sparsifier.attach(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 6, dtype=dtype)).square().sum().backward()
        sparsifier.before_step()
        optimizer.step()
        rows, columns = (mask.flatten() for mask in sparsifier.masks.values())
        pruned = columns[:, None] | rows[None]
        assert not model[2].weight[pruned].any()
        assert model[2].weight[~pruned].all(), "only pruned weights are zero"
    a, b = size
    assert int(rows.sum()) == a // 2
    assert int(columns.sum()) == b // 2
    # The middle weight is zero in three quarters, what only one unit touches in a half.
    wanted = (0.5 * 6 * a + 0.5 * a + 0.75 * a * b + 0.5 * b + 0.5 * 3 * b) / (6 * a + a + a * b + b + 3 * b)
    assert sparsifier.sparsity() == pytest.approx(wanted)
    sparsifier.detach()


def test_convolutions_in_a_row_train_and_pruned_channels_contribute_nothing(tmp_path):
    model = Conv()
    callback = SparsityCallback(CONVOLUTIONS, Linear(0.5, begin=0, end=20), budget=Global(), update_every=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    L.Trainer(callbacks=[callback], max_epochs=4, enable_checkpointing=False, **quiet).fit(model)
    assert callback.sparsifier.masks
    check_pruned(model, torch.randn(2, 2, 5, 5), CONVOLUTIONS)
    path = KeptBlocks()(tmp_path, model, callback.sparsifier)
    loaded = KeptBlocks.load(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_second_run_of_the_same_callback_holds_the_same_units():
    model = chain()
    sparsifier = Sparsifier(CHAIN, Constant(0.5), Magnitude(), update_every=1)
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier.attach(model, optimizer)
        model(torch.randn(4, 6)).sum().backward()
        sparsifier.before_step()
        optimizer.step()
        sparsifier.detach()
    rows, columns = (mask.flatten() for mask in sparsifier.masks.values())
    assert not model[2].weight[columns[:, None] | rows[None]].any()


@given(st.integers(1, 40), st.integers(1, 16), st.floats(0, 1))
def test_scopes_keep_multiples_and_never_less_than_without(blocks, multiple, target):
    scope = ScoredScope("row", ScopeSpec(BlockSpec(torch.ones(1, blocks), (1, 1))), torch.rand(1, 1, blocks))
    [exact] = Uniform().split([scope], target, 1.0)
    [kept] = Uniform(multiple_of=multiple).split([scope], target, 1.0)
    assert exact <= kept <= blocks
    assert kept == blocks or (kept % multiple == 0 and kept - exact < multiple)


def test_the_table_says_what_multiples_cost():
    model = chain()
    sparsifier = Sparsifier(CHAIN, Constant(0.5), Magnitude(), budget=Uniform(multiple_of=8))
    sparsifier.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "0.3333 (0.5 rounded)" in sparsifier.summary()
    assert "0.2 (0.5 rounded)" in sparsifier.summary()
    sparsifier.detach()


def test_the_results_table_counts_weights_of_crossing_units_once():
    model = chain()
    sparsifier = Sparsifier(CHAIN, Constant(0.5), Magnitude(), update_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(model, optimizer)
    model(torch.randn(4, 6)).sum().backward()
    sparsifier.before_step()
    optimizer.step()
    outcome = Outcome.of(sparsifier)
    sparsifier.detach()
    shared = [row for row in outcome.rows if row.parameter == "2.weight"]
    assert [row.actual for row in shared] == [0.75, 0.75]
    assert outcome.weights == sum(model[i].weight.numel() for i in (0, 2, 4)) + 12 + 10
    assert outcome.zero / outcome.weights == outcome.actual
    assert f"{outcome.weights} weights" in results_table(outcome, {})


def test_a_run_with_crossing_units_resumes_bit_for_bit():
    def run(model, steps, saved=None):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sparsifier = Sparsifier(CHAIN, Linear(0.5, begin=0, end=8), update_every=2)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sparsifier.load_state_dict(saved[2])
        sparsifier.attach(model, optimizer)
        for step in steps:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            sparsifier.before_step()
            optimizer.step()
        sparsifier.detach()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))

    whole = run(chain(), range(12))
    resumed = run(chain(), range(5, 12), run(chain(), range(5)))
    assert all(torch.equal(resumed[0][name], weight) for name, weight in whole[0].items())
    assert resumed[2]["step"] == whole[2]["step"] == 12
    assert resumed[2]["last_update"] == whole[2]["last_update"]
    assert float((whole[0]["2.weight"] == 0).float().mean()) == 0.75
