"""Cases of stages in Triton against the plain fold: in the interpreter, or on a GPU. See `triton_harness`.

Not collected by itself: `test_triton_kernels.py` runs it in processes of its own.
"""

from __future__ import annotations

import math
from itertools import chain, cycle

import pytest
import torch
from pairwise import in_turn
from poison import poison  # noqa: F401
from triton_harness import case_device, is_interpreted

from sparse_lightning.blocks.local_blocks import LocalBlocks
from sparse_lightning.kernels.block_score import reference, triton
from sparse_lightning.kernels.stage import OPERATIONS, Ref, Stage, Step
from sparse_lightning.layout import Layout

pytestmark = [
    pytest.mark.usefixtures("poison"),
    # In the interpreter numpy computes the steps, and speaks up where torch and GPUs give inf or NaN.
    pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (1, 1),
    (3, 63),
    (500, 1),
    (1, 500),
    (63, 1, 3, 4),
    (3, 3, 1, 63),
    (2, 9, 3, 21),
    (1, 100, 2, 63),
    (3, 2, 2, 3, 5, 1),
    (2, 3, 1, 5, 3, 7),
    (2, 1, 1, 3, 2, 2, 3, 1, 2, 5),
]


def a_stage(inputs, *steps, folds):
    """A stage of `(operation, *arguments)`; an integer argument is an earlier value, a float a number."""
    made = [Step(name, tuple(Ref(x) if isinstance(x, int) else x for x in args)) for name, *args in steps]
    return Stage(inputs, tuple(made), tuple((Ref(at), kind) for at, kind in folds))


STAGES = {
    "sum": a_stage(1, folds=[(0, "sum")]),
    "magnitude": a_stage(1, ("abs", 0), folds=[(1, "sum")]),
    "squared": a_stage(1, ("square", 0), folds=[(1, "sum")]),
    "taylor": a_stage(2, ("mul", 0, 1), folds=[(2, "sum")]),
    "taylor of elements": a_stage(2, ("mul", 0, 1), ("abs", 2), folds=[(3, "sum")]),
    "adam fisher": a_stage(2, ("square", 0), ("mul", 2, 1), ("neg", 3), folds=[(3, "sum"), (4, "min")]),
    "several folds": a_stage(2, ("sub", 0, 1), folds=[(0, "max"), (1, "min"), (2, "sum"), (0, "sum")]),
    "roots": a_stage(1, ("abs", 0), ("sqrt", 1), ("add", 2, 1.5), ("div", 0, 3), folds=[(4, "sum"), (2, "sum")]),
    "logarithm": a_stage(1, ("abs", 0), ("add", 1, 1e-3), ("log", 2), folds=[(3, "sum")]),
    "exponential": a_stage(1, ("exp", 0), ("sigmoid", 0), folds=[(1, "sum"), (2, "sum")]),
    "whole powers": a_stage(
        1, ("power", 0, 3.0), ("power", 0, 0.0), ("power", 0, -2.0), folds=[(1, "sum"), (2, "sum")]
    ),
    "powers": a_stage(
        2, ("abs", 0), ("power", 2, 0.7), ("power", 2, 1), ("power", 2.0, 0), folds=[(i, "sum") for i in (3, 4, 5)]
    ),
    "powers of negative numbers": a_stage(1, ("power", 0, 1.5), folds=[(1, "sum")]),
    "bounds": a_stage(
        2, ("maximum", 0, 1), ("minimum", 2, 0.5), ("maximum", -0.5, 3), ("relu", 0), folds=[(4, "sum"), (5, "max")]
    ),
    "where": a_stage(2, ("gt", 0, 1), ("where", 2, 0, -1.0), ("lt", 3, 0.5), ("where", 4, 1, 3), folds=[(5, "sum")]),
    "comparisons": a_stage(
        2,
        ("ge", 0, 1),
        ("le", 0, 0.0),
        *(("where", i, 1, 0.25) for i in (2, 3)),
        folds=[(i, "sum") for i in (4, 5)],
    ),
    "infinite numbers": a_stage(1, ("minimum", 0, math.inf), ("maximum", 1, -math.inf), folds=[(2, "sum")]),
}


def contiguous(values):
    return values.clone()


def transposed(values):
    """The last dimension is the slowest in memory."""
    order = list(reversed(range(values.ndim)))
    return values.permute(order).contiguous().permute(order)


def sliced(values):
    """Every other column of a larger storage that starts unaligned; what lies between is NaN."""
    storage = values.new_full((*values.shape[:-1], 2 * values.shape[-1] + 1), math.nan)
    storage[..., 1::2] = values
    return storage[..., 1::2]


def expanded(values):
    """The first element of every block of the first pair stands for all of its column: stride 0."""
    return values[:, :1].clone().expand(values.shape)


LAYOUTS = [contiguous, transposed, sliced, expanded]


def make_windows(stage, shape, layouts, dtypes, odd=()):
    """One window for each input: layouts and dtypes in turn, every seventh value one of the odd ones."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    windows = []
    for _, layout, dtype in zip(range(stage.inputs), cycle(layouts), cycle(dtypes), strict=False):
        values = torch.randn(shape, generator=generator)
        for i, x in enumerate(odd):
            values.view(-1)[i :: 7 + len(odd)] = x
        windows.append(layout(values.to(case_device(), dtype)))
    return windows


def check(stage, windows):
    wanted = reference.fold(stage, windows)
    got = triton.fold(stage, windows)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, i=i: f"fold {i}: {m}")


def rotated(choices, by):
    return [*choices[by % len(choices) :], *choices[: by % len(choices)]]


PARTS = 3
"""Each stage meets the shapes in as many parts, of which `make test` runs one."""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, part, marks=() if part == i % PARTS else pytest.mark.exhaustive)
        for i, name in enumerate(STAGES)
        for part in range(PARTS)
    ],
)
def test_every_stage(name, part):
    """Each on every shape; the layouts and dtypes of the inputs take turns."""
    for i, shape in list(enumerate(SHAPES))[part::PARTS]:
        check(STAGES[name], make_windows(STAGES[name], shape, rotated(LAYOUTS, i), rotated(DTYPES, i // 2)))


@in_turn(ids=lambda value: getattr(value, "__name__", str(value)), layout=LAYOUTS, dtype=DTYPES)
def test_every_layout_and_dtype(layout, dtype):
    for shape in SHAPES:
        check(STAGES["taylor"], make_windows(STAGES["taylor"], shape, [layout, contiguous], [dtype]))


@in_turn(
    name=["several folds", "bounds", "where", "comparisons", "sum"],
    odd=[[math.nan], [math.inf, -math.inf, -0.0], [math.nan, math.inf]],
)
def test_odd_numbers(name, odd):
    """NaN reaches the largest, the smallest and the sum, as in torch."""
    for shape in [(3, 63), (2, 9, 3, 21), (2, 3, 1, 5, 3, 7)]:
        check(STAGES[name], make_windows(STAGES[name], shape, LAYOUTS, DTYPES, odd))


def test_one_nan_in_a_large_block():
    stage = a_stage(1, folds=[(0, "max"), (0, "min"), (0, "sum")])
    for at in (0, 2999):
        window = torch.randn(2, 3000, device=case_device())
        window[1, at] = math.nan
        check(stage, [window])


def test_few_large_blocks_are_split():
    """The parts of a cut block are folded again."""
    shape = (1, 60, 1, 500)
    assert triton.split_of(shape)[1] > 1
    check(STAGES["taylor"], make_windows(STAGES["taylor"], shape, LAYOUTS, DTYPES))
    highest = a_stage(1, folds=[(0, "max")])
    check(highest, make_windows(highest, (1, 6, 1, 1000), LAYOUTS, DTYPES, [math.nan]))


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (63, 1), (4, 4), (500, 500)])
def test_a_part_with_edge_blocks(block):
    """All regions of a matrix that its blocks do not divide, and a gradient of other strides."""
    weight, gradient = torch.randn(63, 50, device=case_device()), torch.randn(50, 63, device=case_device()).T
    part = LocalBlocks.whole(weight, Layout.of(weight), block, [gradient])
    [wanted], [got] = (part.fold(STAGES["taylor"], run) for run in (reference.fold, triton.fold))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not is_interpreted(), reason="the storage is a sparse file")
def test_addresses_are_64_bit(tmp_path):
    far = (1 << 31) + 8
    storage = torch.from_file(str(tmp_path / "weights"), shared=True, size=far + 6, dtype=torch.float16)
    for shape, stride in [((2, 6), (far, 1)), ((1, 2, 1, 6), (0, far, 0, 1)), ((3, 2), (2, far))]:
        window = storage.as_strided(shape, stride)
        window.copy_(torch.randn(shape))
        check(STAGES["magnitude"], [window])


@pytest.mark.parametrize(
    "window",
    [
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn([2] * 12),
        torch.randn(3, 0),
        torch.randn(0, 4),
        torch.randn(()),
    ],
    ids=["fp64", "six pairs", "empty blocks", "no blocks", "a number"],
)
def test_what_the_reference_takes(window):
    window = window.to(case_device())
    [wanted], [got] = (run(STAGES["magnitude"], [window]) for run in (reference.fold, triton.fold))
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)


def test_every_operation_has_an_expression_and_a_case():
    assert set(triton.EXPRESSIONS) == set(OPERATIONS)
    assert {step.operation for stage in STAGES.values() for step in stage.steps} == set(OPERATIONS)
    assert {kind for _, kind in chain(*(stage.folds for stage in STAGES.values()))} == {"sum", "max", "min"}
