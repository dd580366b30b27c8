"""Metrics, as functions and as classes, against counts with numpy and with sets; also in two processes."""

from __future__ import annotations

import itertools
import pickle

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from forked import on_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from torchmetrics import MetricCollection

from sparse_lightning import BlockCoupling, BlockSpec, LayoutError, ScopeCoupling, ScopeSpec, SparseLightningError
from sparse_lightning.metrics import BlockSparsity, MaskChurn, MaskOverlap, block_sparsity, mask_churn, mask_overlap

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def ratio(part, total, if_empty):
    return pytest.approx(part / total if total else if_empty, abs=1e-6)


def plain_sparsity(cases):
    """The fraction of elements in tiles without a non-zero, tile by tile; a case is an array and a block shape."""
    zero = total = 0
    for array, block in cases:
        for corner in itertools.product(*(range(0, n, b) for n, b in zip(array.shape, block, strict=True))):
            tile = array[tuple(slice(c, c + b) for c, b in zip(corner, block, strict=True))]
            zero += 0 if np.any(tile != 0) else tile.size  # NaN != 0
            total += tile.size
    return ratio(zero, total, 0.0)


def plain_churn(updates):
    changed = sum(int(np.sum(a[name] != b[name])) for a, b in updates for name in a)
    return ratio(changed, sum(grid.size for a, _ in updates for grid in a.values()), 0.0)


def pruned_set(masks):
    return {(name, *index) for name, grid in masks.items() for index in np.ndindex(grid.shape) if grid[index]}


def plain_overlap(updates):
    sets = [(pruned_set(a), pruned_set(b)) for a, b in updates]
    return ratio(sum(len(a & b) for a, b in sets), sum(len(a | b) for a, b in sets), 1.0)


MASK_METRICS = [
    pytest.param(MaskChurn, mask_churn, plain_churn, id="churn"),
    pytest.param(MaskOverlap, mask_overlap, plain_overlap, id="overlap"),
]
CLASSES = [BlockSparsity, MaskChurn, MaskOverlap]


@st.composite
def tiled_arrays(draw):
    """An array and a block shape that may not divide it; tiles of zeros, and values that are nearly zero or odd."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    block = tuple(draw(st.integers(1, 4)) for _ in shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    array = rng.choice([1.0, 0.0, -0.0, 1e-7, np.nan, np.inf], size=shape, p=[0.1, 0.4, 0.4, 0.05, 0.025, 0.025])
    for corner in itertools.product(*(range(0, n, b) for n, b in zip(shape, block, strict=True))):
        if rng.random() < 0.5:
            array[tuple(slice(c, c + b) for c, b in zip(corner, block, strict=True))] = 0.0
    return array, block


@st.composite
def mask_updates(draw):
    """Updates of a metric of masks: pairs of mappings from names to boolean arrays of the same shapes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    updates = []
    for _ in range(draw(st.integers(1, 3))):
        shapes = draw(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 5), max_size=3), max_size=3))
        fraction_pruned = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        updates.append(tuple({k: rng.random(tuple(s)) < fraction_pruned for k, s in shapes.items()} for _ in range(2)))
    return updates


def as_tensors(masks):
    return {name: torch.from_numpy(np.asarray(grid)) for name, grid in masks.items()}


def spec_of(array, block, dtype=torch.float32):
    return BlockSpec(torch.nn.Parameter(torch.tensor(array).to(dtype)), block, edge="partial")


@given(st.lists(tiled_arrays(), min_size=1, max_size=3), st.sampled_from(DTYPES))
def test_block_sparsity_is_counted_from_the_weights(cases, dtype):
    specs = [spec_of(array, block, dtype) for array, block in cases]
    metric = BlockSparsity()
    for spec, case in zip(specs, cases, strict=True):
        assert float(block_sparsity(spec)) == plain_sparsity([case])
        assert float(metric(spec)) == plain_sparsity([case]), "forward returns the value of its own update"
    assert float(metric.compute()) == plain_sparsity(cases), "updates add up by weights"
    assert float(block_sparsity(iter(specs))) == plain_sparsity(cases), "several blocks count as one set of weights"


def test_block_sparsity_of_scopes_and_couplings():
    rows = BlockSpec(torch.nn.Parameter(torch.ones(4, 3)), (1, -1))
    columns = BlockSpec(torch.nn.Parameter(torch.ones(2, 4)), (-1, 1))
    neurons = BlockCoupling([rows, columns], orders=[(0, 1), (1, 0)])
    tiles = BlockSpec(torch.nn.Parameter(torch.ones(5, 5)), (2, 2), edge="partial")
    neurons.apply_mask(torch.tensor([[True], [False], [False], [False]]))
    rows.apply_mask(torch.tensor([[True], [True], [False], [False]]))  # the second neuron lives on in its column
    tiles.apply_mask(torch.arange(9).reshape(3, 3) >= 7)  # the last two: 1×2 and 1×1
    assert block_sparsity(neurons) == torch.tensor(5 / 20)
    assert block_sparsity(ScopeSpec(tiles)) == torch.tensor(3 / 25)
    both = ScopeCoupling([ScopeSpec(neurons), ScopeSpec(tiles)])
    assert block_sparsity(both) == block_sparsity([neurons, ScopeSpec(tiles)]) == torch.tensor(8 / 45)
    assert block_sparsity([]) == 0


@pytest.mark.parametrize(("metric_class", "function", "plain"), MASK_METRICS)
@given(updates=mask_updates())
@example(updates=[({}, {})])
def test_mask_metrics_are_counts_of_set_members(metric_class, function, plain, updates):
    metric = metric_class()
    for a, b in updates:
        assert float(function(as_tensors(a), as_tensors(b))) == plain([(a, b)])
        assert float(metric(as_tensors(a), as_tensors(b))) == plain([(a, b)]), "forward: its own update"
        for name in a:
            grids = torch.from_numpy(np.asarray(a[name])), torch.from_numpy(np.asarray(b[name]))
            assert float(function(*grids)) == plain([({name: a[name]}, {name: b[name]})])
    assert float(metric.compute()) == plain(updates)
    metric.reset()
    metric.update(*map(as_tensors, updates[0]))
    assert float(metric.compute()) == plain(updates[:1]), "reset forgets"


@pytest.mark.parametrize("function", [mask_churn, mask_overlap])
def test_masks_may_be_named_in_any_order_and_by_blocks(function):
    block = spec_of(np.ones((2, 2)), (1, 1))
    first, second = torch.tensor([True, False]), torch.tensor([True, True])
    swapped = function({"x": first, block: second}, {block: second, "x": first})
    assert swapped == function(first, first)


def arguments_of(metric_class, many=1):
    """An update of which a third of `3 · many` entries are zero, changed or pruned by both."""
    if metric_class is BlockSparsity:
        weight = torch.ones(3, many)
        weight[0] = 0
        return (BlockSpec(weight, (1, 1)),)
    first = torch.tensor([[True], [False], [False]]).expand(3, many)
    return (first, torch.zeros_like(first)) if metric_class is MaskChurn else (first, torch.ones_like(first))


@pytest.mark.parametrize("metric_class", CLASSES)
def test_a_metric_keeps_two_whole_numbers_and_leaves_no_trace_in_a_model(metric_class):
    metric = metric_class().set_dtype(torch.bfloat16).to(torch.bfloat16).half()
    for _ in range(3):
        metric.update(*arguments_of(metric_class, many=257))
    assert [int(state) for state in metric.metric_state.values()] == [771, 2313], "bf16 would lose ones from 257 on"
    assert {state.dtype for state in metric.metric_state.values()} == {torch.int64}
    assert not metric.state_dict()
    assert not list(metric.buffers())


@pytest.mark.parametrize("metric_class", CLASSES)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_values_are_fp32_whatever_the_default_dtype(metric_class, default):
    """Lightning's bf16-true precision sets the default dtype while a step runs."""
    metric = metric_class()
    torch.set_default_dtype(default)
    try:
        value = metric(*arguments_of(metric_class))
        assert value.dtype == metric.compute().dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(value) == ratio(1, 3, 0.0)


@pytest.mark.parametrize("metric_class", CLASSES)
def test_a_pickled_metric_continues_where_it_was(metric_class):
    metric = metric_class()
    metric.update(*arguments_of(metric_class, many=5))
    again = pickle.loads(pickle.dumps(metric))
    again.update(*arguments_of(metric_class))
    assert float(again.compute()) == ratio(1, 3, 0.0)
    assert [int(state) for state in again.metric_state.values()] == [6, 18]
    assert [int(state) for state in metric.metric_state.values()] == [5, 15], "the copy is apart from the original"


@pytest.mark.parametrize("metric_class", CLASSES)
def test_plot_returns_a_figure(metric_class):
    matplotlib.use("Agg")
    metric = metric_class()
    values = [metric(*arguments_of(metric_class)) for _ in range(3)]
    try:
        figure, axes = metric.plot()
        assert figure.axes == [axes]
        assert axes.get_ylabel() == metric_class.__name__
        assert axes.lines[0].get_ydata() == ratio(1, 3, 0.0)
        _, over_steps = metric.plot(values)
        assert list(over_steps.lines[0].get_ydata()) == pytest.approx([1 / 3] * 3)
        assert metric.plot(values, ax=axes)[1] is axes
    finally:
        plt.close("all")


def test_a_collection_does_not_take_one_metric_for_another():
    """After the first update both metrics have counted 1 and 2: states of one name would be shared from then on."""
    collection = MetricCollection([MaskChurn(), MaskOverlap()])
    collection.update(torch.tensor([True, False]), torch.tensor([True, True]))
    collection.update(torch.tensor([True, True, False]), torch.tensor([True, True, False]))
    found = {name: float(value) for name, value in collection.compute().items()}
    assert found == {"MaskChurn": ratio(1, 5, 0.0), "MaskOverlap": ratio(3, 4, 0.0)}


GRID = torch.tensor([True, False])


@pytest.mark.parametrize("metric_class", [MaskChurn, MaskOverlap])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (GRID, GRID[:1], r"cannot compare the mask of shapes \(2,\) and \(1,\): pass masks of the same grid"),
        ({"fc": GRID}, {"fc": GRID[None]}, r"cannot compare 'fc' of shapes \(2,\) and \(1, 2\)"),
        (
            {"fc": GRID, "up": GRID},
            {"fc": GRID},
            r"only the first has \['up'\], only the second has \[\]. Pass masks of",
        ),
        ({"fc": GRID}, {"fd": GRID}, r"only the first has \['fc'\], only the second has \['fd'\]"),
        ({"fc": GRID}, GRID, "masks of type dict and Tensor: pass two grids, or two mappings"),
        (GRID, GRID.float(), r"the mask is of type torch.float32: pass a boolean tensor, True where a block is pruned"),
        ({"fc": [True]}, {"fc": GRID}, "'fc' is of type list: pass a boolean tensor"),
    ],
)
def test_masks_that_do_not_match_raise_and_are_not_counted(metric_class, first, second, message):
    metric = metric_class()
    with pytest.raises(SparseLightningError, match=message) as raised:
        metric.update(first, second)
    assert isinstance(raised.value, LayoutError)
    assert not any(metric.metric_state.values())


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(torch.ones(2), "Tensor"), ("fc", "str"), (3, "int"), ({"fc": None}, "str"), ([torch.nn.ReLU()], "ReLU")],
)
def test_the_sparsity_of_what_has_no_blocks_raises(wrong, name):
    with pytest.raises(LayoutError, match=f"the sparsity of a {name}: pass a scope, a block, or several of them"):
        block_sparsity(wrong)


def random_updates(rank):
    """What one process sees: arrays with block shapes, and pairs of masks; not as many in each, and some empty."""
    rng = np.random.default_rng(rank)
    shapes = [(4, 6), (3, 5), (0, 2)][rank:]
    arrays = [(rng.integers(0, 2, shape) * rng.integers(0, 2, shape[:1])[:, None], (1, 2)) for shape in shapes]
    masks = [tuple({"fc": rng.random(shape) < 0.5, "no": rng.random(0) < 0.5} for _ in "ab") for shape in shapes]
    return arrays, masks


def compare_in_process(rank, processes, file):
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=processes)
    every = [random_updates(r) for r in range(processes)]
    all_arrays, all_masks = (list(itertools.chain(*kind)) for kind in zip(*every, strict=True))
    arrays, masks = every[rank]
    inputs = {
        BlockSparsity: ([(spec_of(*case, torch.bfloat16),) for case in arrays], plain_sparsity(all_arrays)),
        MaskChurn: ([tuple(map(as_tensors, pair)) for pair in masks], plain_churn(all_masks)),
        MaskOverlap: ([tuple(map(as_tensors, pair)) for pair in masks], plain_overlap(all_masks)),
    }
    for metric_class, (updates, expected) in inputs.items():
        metric = metric_class()
        for update in updates:
            metric.update(*update)
        own = [int(state) for state in metric.metric_state.values()]
        assert float(metric.compute()) == expected, f"{metric_class.__name__} over all processes"
        assert [int(state) for state in metric.metric_state.values()] == own, "the own counts are back after compute"
        assert own[0] / max(own[1], 1) != expected, "the processes differ, or this test could not fail"
        on_step = metric_class(dist_sync_on_step=True)
        assert float(on_step(*arguments_of(metric_class, many=rank + 1))) == ratio(1, 3, 0.0)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_count_together(tmp_path):
    on_ranks(compare_in_process, (2, tmp_path / "rendezvous"), 2)
