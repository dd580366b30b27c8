"""Defaults: one set for Python, the callback and Hydra; the criterion and the rhythm fit the model and the run."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparse_lightning as sl
from sparse_lightning import (
    EMA,
    ERK,
    NM,
    SET,
    AverageTaylor,
    Blocks,
    CheckpointError,
    Constant,
    Cosine,
    Cubic,
    ElementwiseTaylor,
    Exponential,
    Join,
    Linear,
    Magnitude,
    OneShot,
    RigL,
    Sparsifier,
    SparsityCallback,
    Steps,
)
from sparse_lightning.app.compose import compose
from sparse_lightning.engine.defaults import default_update_every

CONF = Path(__file__).parent.parent / "conf"
RAMPS = [Linear, Cubic, Cosine, Exponential]


class Net(nn.Module):
    """Two layers, an attention whose output layer is never called, and a parameter of no layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.free = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        x = self.down(torch.relu(self.up(x))) @ self.free
        return self.attention(x, x, x)[0]


def attached(*patterns, schedule=None, total_steps=100, net=None, **settings):
    """A Sparsifier on a network, the network, and its optimizer."""
    net = net or Net()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    sparsifier = Sparsifier(list(patterns) or [Blocks("*.weight", (4, 4))], schedule or Cubic(0.5), **settings)
    sparsifier.attach(net, optimizer, total_steps)
    return sparsifier, net, optimizer


def train(sparsifier, net, optimizer, steps):
    """Train on data that depend on the step only."""
    for _ in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 + sparsifier.step))
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        sparsifier.before_step()
        optimizer.step()


def frozen(net, name):
    net.get_parameter(name).requires_grad_(False)
    return net


TILES = Blocks(["up.weight", "down.weight"], (4, 4))
CRITERIA = {
    "blocks": (AverageTaylor, [TILES], Net),
    "blocks and N:M": (AverageTaylor, [Blocks("up.weight", (4, 4)), NM("down.weight")], Net),
    "N:M of layers": (sl.Wanda, [NM(["up.weight", "down.weight"])], Net),
    "N:M of a parameter without a layer": (Magnitude, [NM(["up.weight", "free"])], Net),
    "N:M of a layer that is not called": (Magnitude, [NM("attention.out_proj.weight")], Net),
    "a frozen parameter": (Magnitude, [TILES], lambda: frozen(Net(), "up.weight")),
    "a frozen parameter without blocks": (AverageTaylor, [TILES], lambda: frozen(Net(), "free")),
    "N:M of a frozen parameter": (sl.Wanda, [NM(["up.weight", "down.weight"])], lambda: frozen(Net(), "up.weight")),
}


@pytest.mark.parametrize("case", CRITERIA)
def test_the_default_criterion_fits_the_model_and_prunes_it(case):
    kind, patterns, net = CRITERIA[case]
    sparsifier, model, optimizer = attached(*patterns, net=net(), schedule=Linear(0.5, end=5))
    assert f"Gradual by {kind.__name__}: " in sparsifier.summary().splitlines()[0]
    train(sparsifier, model, optimizer, 7)
    assert sparsifier.sparsity() == 0.5


def test_average_taylor_is_the_moving_average_of_every_step():
    masks = {}
    for criterion in (AverageTaylor(0.8), EMA(ElementwiseTaylor(), 0.8)):
        schedule = Linear(0.5, end=9)
        sparsifier, net, optimizer = attached(
            TILES, criterion=criterion, schedule=schedule, update_every=3, total_steps=20
        )
        train(sparsifier, net, optimizer, 7)
        masks[criterion] = sparsifier.masks
    first, second = masks.values()
    assert all(torch.equal(first[name], second[name]) for name in first)
    # By hand: the sums of |w·g| over the blocks of steps that were observed, the later ones with more weight.
    sparsifier, net, optimizer = attached(TILES, criterion=AverageTaylor(0.8), schedule=OneShot(0.5, at=3))
    sums = []
    for _ in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 + sparsifier.step))
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        product = (net.up.weight * net.up.weight.grad).detach().abs()
        sums.append(product.unfold(0, 4, 4).unfold(1, 4, 4).sum((-1, -2)))
        sparsifier.before_step()
        optimizer.step()
    average = sum(0.8 ** (3 - i) * each for i, each in enumerate(sums))
    weakest = average.flatten().argsort()[: average.numel() // 2]
    assert set(sparsifier.masks["up.weight"].flatten().nonzero().flatten().tolist()) == set(weakest.tolist())


@given(st.integers(0, 100_000), st.integers(0, 200_000))
def test_update_every_makes_some_30_updates_over_the_schedule(begin, length):
    schedule = Cubic(0.5, begin=begin, end=begin + length)
    every = default_update_every(schedule)
    assert every == max(1, length // 30)
    updates = len(range(begin, begin + length, every)) + 1
    assert updates <= 61
    assert updates >= min(31, length + 1)


@pytest.mark.parametrize("total_steps", [None, 3000])
def test_a_schedule_in_steps_has_its_rhythm_without_a_length(total_steps):
    sparsifier, *_ = attached(TILES, schedule=Cubic(0.5, end=600), total_steps=total_steps)
    assert "masks updated every 20 steps from step 0 to 600" in sparsifier.summary()


def test_a_constant_schedule_needs_no_length():
    sparsifier, net, optimizer = attached(TILES, schedule=Constant(0.5), total_steps=None)
    assert "masks updated every 100 steps from step 0 on" in sparsifier.summary()
    train(sparsifier, net, optimizer, 2)
    assert sparsifier.sparsity() == 0.5


def test_the_first_table_names_what_was_passed():
    sparsifier, *_ = attached(TILES, criterion=Magnitude(), method=SET(), update_every=7)
    assert sparsifier.summary().startswith("SET by Magnitude: masks updated every 7 steps from step 10 to 69\n")
    sparsifier, *_ = attached(TILES, update_every=1, observe_every=3)
    first = "Gradual by AverageTaylor: observed every 3 steps, masks updated every step from step 10 to 69\n"
    assert sparsifier.summary().startswith(first)


def defaults(callable_):
    """The defaults of the arguments of a callable."""
    found = inspect.signature(callable_).parameters.values()
    return {p.name: p.default for p in found if p.default is not inspect.Parameter.empty}


def test_the_callback_and_the_sparsifier_have_the_same_defaults():
    assert defaults(SparsityCallback) == defaults(Sparsifier)
    assert defaults(Sparsifier)["update_every"] is None
    assert defaults(Sparsifier)["criterion"] is None


def test_the_configuration_has_the_defaults_of_python():
    config = yaml.safe_load((CONF / "config.yaml").read_text("utf-8"))
    for name in ("update_every", "observe_every"):
        assert config[name] == defaults(Sparsifier)[name], name
    chosen = {
        group: option for entry in config["defaults"] if isinstance(entry, dict) for group, option in entry.items()
    }
    assert (chosen["criterion"], chosen["method"], chosen["budget"]) == ("auto", "gradual", "uniform")
    assert yaml.safe_load((CONF / "criterion" / "auto.yaml").read_text("utf-8")) == {}


@pytest.mark.parametrize("file", sorted(CONF.glob("schedule/*.yaml")), ids=lambda file: file.stem)
def test_schedules_of_the_configuration_have_the_defaults_of_python(file):
    node = yaml.safe_load(file.read_text("utf-8"))
    kind = getattr(sl, node["_target_"].rpartition(".")[2])
    required = {name: value for name, value in node.items() if name not in defaults(kind) or name == "_target_"}
    if kind is Join:
        required["boundaries"] = node["boundaries"]
    assert instantiate(node, _convert_="all") == instantiate(required, _convert_="all")


@pytest.mark.parametrize("group", ["method", "criterion", "budget"])
def test_parts_of_the_configuration_have_the_defaults_of_python(group):
    for file in sorted((CONF / group).glob("*.yaml")):
        node = yaml.safe_load(file.read_text("utf-8"))
        if not node:
            continue
        kind = getattr(sl, node.pop("_target_").rpartition(".")[2])
        for name, value in node.items():
            if name in defaults(kind) and not isinstance(value, dict):
                assert value == defaults(kind)[name], f"{file.stem}: {name}"


@pytest.mark.parametrize("recipe", ["gpt_heads", "finetune_transformer"])
def test_recipes_of_transformers_use_the_default_criterion(recipe, tmp_path):
    assert compose([f"recipe={recipe}"]).plain(tmp_path)["criterion"]["_target_"] == "sparse_lightning.AverageTaylor"


FEW = "Cubic has 4 updates from step 0 to 300, one every 100 steps, .* pass update_every=10, or None"
LATE = "{} makes its last update at step 99, and the run ends after 100 steps: .* not trained after it.* end=0.7"
WARNS = {
    "few updates": ({"schedule": Cubic(0.5, end=300), "update_every": 100, "total_steps": 500}, FEW),
    "few updates, unknown length": ({"schedule": Cubic(0.5, end=300), "update_every": 100, "total_steps": None}, FEW),
    "few steps": (
        {"schedule": Cubic(0.5, end=1)},
        "Cubic has 2 updates from step 0 to 1, .* end it later, such as end=0.7; .* end=1 is step 1",
    ),
    "a short fraction": ({"schedule": Cubic(0.5, begin=0.5, end=0.52)}, "Cubic has 2 updates .* end it later"),
    "the last step": ({"schedule": Linear(0.5, end=1.0), "update_every": 5}, LATE.format("Linear")),
    "the last step, in steps": ({"schedule": Linear(0.5, end=99)}, LATE.format("Linear")),
    "all at the last step": ({"schedule": OneShot(0.5, at=1.0)}, LATE.format("OneShot")),
    "a milestone at the last step": ({"schedule": Steps({0.5: 0.3, 1.0: 0.5})}, LATE.format("Steps")),
}
QUIET = {
    "the defaults": {},
    "five updates": {"schedule": Cubic(0.5, end=400), "update_every": 100, "total_steps": 500},
    "one shot": {"schedule": OneShot(0.5, at=0.5)},
    "milestones": {"schedule": Steps({0.2: 0.3, 0.6: 0.5}), "update_every": 50},
    "constant to the end": {"schedule": Constant(0.5, end=1.0), "update_every": 90},
    "one step after the last update": {"schedule": Linear(0.5, end=98)},
    "a trial of a few steps": {"schedule": Linear(0.5, end=1.0), "update_every": 5, "total_steps": 8},
}


@pytest.mark.parametrize("case", WARNS)
def test_a_rhythm_that_costs_accuracy_warns_once_with_numbers(case):
    settings, text = WARNS[case]
    with pytest.warns(UserWarning, match=text) as caught:
        attached(TILES, **settings)
    assert len(caught) == 1


@pytest.mark.parametrize("case", QUIET)
def test_other_rhythms_do_not_warn(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(TILES, **QUIET[case])


@pytest.mark.parametrize("total_steps", [3, 10, 30, 31, 50, 99, 1000, 12345])
@pytest.mark.parametrize("kind", RAMPS)
def test_the_defaults_never_warn(kind, total_steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(TILES, schedule=kind(0.5), total_steps=total_steps)


def first_masks(method, seed=0, criterion=None, schedule=None, **settings):
    """The masks of the first update."""
    criterion, schedule = criterion or Magnitude(), schedule or Constant(0.75)
    sparsifier, net, optimizer = attached(
        TILES, schedule=schedule, criterion=criterion, method=method, seed=seed, **settings
    )
    train(sparsifier, net, optimizer, 1)
    return sparsifier.masks


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", [SET, RigL])
@pytest.mark.parametrize("criterion", [None, AverageTaylor()], ids=["magnitude", "average"])
def test_sparse_training_begins_with_a_random_mask_of_exact_size(kind, criterion):
    masks = first_masks(kind(), criterion=criterion)
    assert [int(mask.sum()) for mask in masks.values()] == [24, 24]
    assert same(masks, first_masks(kind(), criterion=sl.Gradient())), "the mask depends on scores"
    assert same(masks, first_masks(kind(), criterion=criterion)), "the mask is another one in the same run"
    assert not same(masks, first_masks(kind(), seed=1, criterion=criterion)), "the mask does not depend on the seed"


@pytest.mark.parametrize("kind", [SET, RigL])
def test_the_first_mask_is_by_scores_where_that_is_passed_or_sparsity_is_not_constant(kind):
    by_scores = first_masks(sl.Gradual())
    assert same(by_scores, first_masks(kind(first=None)))
    assert same(by_scores, first_masks(kind(first=Magnitude())))
    ramp = Linear(0.9, begin=0, end=50, initial=0.75)
    assert same(by_scores, first_masks(kind(), schedule=ramp))


@pytest.mark.parametrize("kind", [SET, RigL])
def test_a_random_first_mask_has_the_counts_of_its_budget(kind):
    both = [first_masks(method, budget=ERK()) for method in (kind(), kind(first=None))]
    counts = [[int(mask.sum()) for mask in masks.values()] for masks in both]
    assert counts[0] == counts[1]
    assert not same(*both)


@pytest.mark.parametrize("killed_at", [2, 5, 6])
def test_a_run_that_is_resumed_has_the_same_random_first_mask(killed_at):
    def begin():
        return attached(TILES, schedule=Constant(0.75, begin=5), method=RigL(), update_every=2)

    whole, net, optimizer = begin()
    train(whole, net, optimizer, 9)
    first, first_net, first_optimizer = begin()
    train(first, first_net, first_optimizer, killed_at)
    state = first.state_dict()
    second, second_net, second_optimizer = begin()
    second_net.load_state_dict(first_net.state_dict())
    second.load_state_dict(state)
    train(second, second_net, second_optimizer, 9 - killed_at)
    assert same(whole.masks, second.masks)


@pytest.mark.parametrize("schedule", [Constant(0.75), Linear(0.75, end=20)], ids=["constant", "ramp"])
def test_a_dense_run_that_is_continued_sparse_begins_by_scores(schedule):
    masks = []
    for method in (RigL(), sl.Gradual()):
        sparsifier, net, optimizer = attached(TILES, schedule=schedule, criterion=Magnitude(), method=method)
        sparsifier.seek(50)
        train(sparsifier, net, optimizer, 1)
        masks.append(sparsifier.masks)
    assert same(*masks), "trained weights were pruned at random"


def test_a_model_that_is_pruned_already_keeps_its_masks():
    sparsifier, net, optimizer = attached(TILES, schedule=Constant(0.75), criterion=Magnitude(), method=RigL(0.0))
    train(sparsifier, net, optimizer, 1)
    masks = sparsifier.masks
    sparsifier.detach()
    sparsifier.rewind()
    sparsifier.attach(net, optimizer, 100)
    train(sparsifier, net, optimizer, 1)
    assert same(masks, sparsifier.masks)


def test_a_checkpoint_is_resumed_with_the_default_criterion_that_it_was_saved_with():
    settings = {"criterion": Magnitude(), "update_every": 100, "schedule": Linear(0.5, end=400), "total_steps": 500}
    old, net, optimizer = attached(TILES, **settings)
    state = old.state_dict()
    old.detach()
    by_name = Sparsifier([TILES], Linear(0.5, end=400))
    by_name.load_state_dict(state)
    by_name.attach(net, optimizer, 500)
    assert by_name.summary().startswith("Gradual by Magnitude: masks updated every 13 steps")
    del state["criterion"]  # as 0.1.0 saved it, whose defaults were Magnitude and 100
    resumed = Sparsifier([TILES], Linear(0.5, end=400))
    resumed.load_state_dict(state)
    by_name.detach()
    resumed.attach(net, optimizer, 500)
    assert resumed.summary().startswith("Gradual by Magnitude: masks updated every 100 steps")


def test_a_checkpoint_of_another_criterion_raises_an_error_that_says_so():
    saved, *_ = attached(TILES, criterion=Magnitude())
    other, *_ = attached(TILES)
    with pytest.raises(CheckpointError, match=r"no state of AverageTaylor.* Magnitude\(\), the default of 0.1.0"):
        other.load_state_dict(saved.state_dict())
