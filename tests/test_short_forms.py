"""What is passed without ceremony: a pattern without a list, a number for a schedule, names; and clear errors."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from sparse_lightning import (
    LAMP,
    AverageTaylor,
    Blocks,
    BlockSpec,
    Constant,
    Cubic,
    FlowError,
    Neurons,
    PatternError,
    RigL,
    Sparsifier,
    SparsityCallback,
    SparsityError,
    Strided,
    Taylor,
    check_pruned,
)

TILES = Blocks("*.weight", (4, 4))


def configured(*args, **kwargs):
    """Return the configuration of a Sparsifier; that of a callback is the same."""
    made = Sparsifier(*args, **kwargs).configuration
    assert str(SparsityCallback(*args, **kwargs).sparsifier.configuration.patterns) == str(made.patterns)
    return made


@pytest.mark.parametrize("patterns", [TILES, [TILES], (TILES,), {"tiles": TILES}], ids=str)
def test_one_pattern_needs_no_list(patterns):
    model = nn.Sequential(nn.Linear(8, 8))
    ours = Sparsifier(patterns, 0.5)
    ours.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(ours.masks) == ["0.weight"]


def test_blocks_on_a_parameter_need_no_list():
    weight = nn.Linear(8, 8).weight
    assert len(configured(BlockSpec(weight, (4, 4)), 0.5).patterns) == 1


@pytest.mark.parametrize("patterns", ["*.weight", 7, None], ids=repr)
def test_what_is_not_a_pattern_raises(patterns):
    with pytest.raises(PatternError, match=r"is not a pattern: pass Coupled, Blocks, NM"):
        Sparsifier(patterns, 0.5)


@pytest.mark.parametrize("number", [0.75, 0, 1, 1.0, 0.0])
def test_a_number_is_a_constant_schedule(number):
    assert configured(TILES, number).schedule == Constant(float(number))


@pytest.mark.parametrize("schedule", [True, "cubic", None, Cubic, CSVLogger("logs")], ids=lambda s: type(s).__name__)
def test_what_is_not_a_schedule_raises(schedule):
    with pytest.raises(SparsityError, match=r"schedule=.* is not a schedule: pass one, such as Cubic\(final=0\.9\)"):
        Sparsifier(TILES, schedule)


def test_a_number_that_is_not_a_sparsity_raises():
    with pytest.raises(SparsityError, match=r"1\.5"):
        Sparsifier(TILES, 1.5)


@pytest.mark.parametrize("name", ["taylor", "Taylor", "TAYLOR"])
def test_a_name_is_a_criterion(name):
    assert type(configured(TILES, 0.5, criterion=name).criterion) is Taylor


@pytest.mark.parametrize("name", ["average_taylor", "AverageTaylor", "average-taylor", "averagetaylor"])
def test_a_name_of_two_words(name):
    assert type(configured(TILES, 0.5, name).criterion) is AverageTaylor


def test_names_of_methods_and_budgets():
    made = configured(TILES, 0.5, method="rigl", budget="lamp")
    assert (type(made.method), type(made.budget)) == (RigL, LAMP)


@pytest.mark.parametrize(
    ("role", "given", "text"),
    [
        ("criterion", "tailor", r"no criterion 'tailor': did you mean 'taylor'\?"),
        ("criterion", "mag", r"no criterion 'mag': did you mean 'magnitude'\?"),
        ("criterion", "ema", r"criterion='ema' needs arguments: pass EMA\(…\), not its name"),
        ("criterion", Taylor, r"criterion=<class .*Taylor'> is not a criterion: pass one, such as Magnitude\(\)"),
        ("criterion", 3, r"criterion=3 is not a criterion"),
    ],
)
def test_what_is_not_a_criterion_raises(role, given, text):
    with pytest.raises(FlowError, match=text):
        Sparsifier(TILES, 0.5, **{role: given})


@pytest.mark.parametrize(
    ("role", "given", "text"),
    [
        ("method", "rigel", r"no method 'rigel': did you mean 'rigl'\?"),
        ("method", 0.5, r"method=0\.5 is not a method"),
        ("budget", "globl", r"no budget 'globl': did you mean 'global'\?"),
        ("budget", RigL(), r"budget=RigL.* is not a budget: pass one, such as Uniform\(\)"),
    ],
)
def test_what_is_not_a_method_or_a_budget_raises(role, given, text):
    with pytest.raises(SparsityError, match=text):
        Sparsifier(TILES, 0.5, **{role: given})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Blocks("*", 4), r"shape=4 is not a shape: pass a whole number for each dimension, such as \(4, 4\)"),
        (lambda: Blocks("*", "44"), r"shape='44' is not a shape"),
        (lambda: Blocks("*", (4, 0.5)), r"shape=\(4, 0\.5\) is not a shape"),
        (lambda: Blocks("*", (4, 4), scope=4), r"scope=4 is not a shape"),
        (lambda: Strided("*", {"split": [[-1]]}, block=4), r"block=4 is not a shape"),
    ],
)
def test_what_is_not_a_shape_raises(make, text):
    with pytest.raises(PatternError, match=text):
        make()


def test_a_state_dict_is_not_a_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    text = r"a (OrderedDict|list) is not a model: pass the nn\.Module itself, not its state dict or parameters"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PatternError, match=text):
        Sparsifier(TILES, 0.5).attach(model.state_dict(), optimizer)
    with pytest.raises(PatternError, match=text):
        Sparsifier(TILES, 0.5).attach(list(model.parameters()), optimizer)
    with pytest.raises(PatternError, match=text):
        check_pruned(model.state_dict(), torch.ones(1, 8), Neurons("0", "2"))
    ours = Sparsifier(TILES, 0.5)
    ours.attach(model, optimizer)
    with pytest.raises(PatternError, match=text):
        ours.mask_copy(model.state_dict())
