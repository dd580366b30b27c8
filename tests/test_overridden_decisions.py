"""A subclass that overrides a decision is called for it, on N:M groups as on any other blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import nn

from sparse_lightning import NM, Blocks, Gradual, Linear, Magnitude, Sparsifier
from sparse_lightning.engine import nm_groups
from sparse_lightning.flow import Abs, Criterion, Sum
from sparse_lightning.methods import PruneOnce

WEIGHTS = {"N:M groups": [NM("0.weight")], "blocks": [Blocks("0.weight", (1, 1), scope=(1, 4))]}


class Smallest(Magnitude):
    """Keeps the smallest weights: the opposite of what the class above declares about its flow."""

    def flow(self, x):
        """The negative magnitude."""
        return -Sum()(Abs()(x.weight))


class First(Gradual):
    """Keeps the first blocks of each scope, whatever their scores."""

    def choose(self, context):
        """By index."""
        places = torch.arange(context.scores.shape[-1], dtype=torch.float32).expand(context.scores.shape)
        return context.select(-places, self.kept(context))


@dataclass(frozen=True)
class Notes(Gradual):
    """Remembers the scores of the blocks that are left."""

    seen: ClassVar[list[torch.Tensor]] = []

    def remember(self, context, mask):
        """The scores, zero where pruned."""
        self.seen.append(context.scores.clone())
        return context.scores.masked_fill(mask, 0)


class All(Gradual):
    """Keeps all blocks that are left."""

    def kept(self, context):
        """As many as there are."""
        return context.active


class LaterOnce(PruneOnce):
    """One-shot pruning that keeps the first blocks."""

    choose = First.choose


def prune(patterns, **parts) -> nn.Sequential:
    """One update to a sparsity of one half, by distinct weights that are not in order."""
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.randperm(128, generator=torch.Generator().manual_seed(0)).view(8, 16) + 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier(patterns, Linear(0.5, end=1), update_every=1, **{"criterion": Magnitude(), **parts})
    sparsifier.attach(model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 16)).sum().backward()
        sparsifier.before_step()
        optimizer.step()
    sparsifier.detach()
    return model


@pytest.mark.parametrize("patterns", WEIGHTS.values(), ids=WEIGHTS)
def test_a_criterion_that_overrides_flow_is_asked(patterns):
    weight = prune(patterns, criterion=Smallest())[0].weight.detach().view(-1, 4)
    original = torch.randperm(128, generator=torch.Generator().manual_seed(0)).view(-1, 4) + 1.0
    kept = original.sort(-1).values[:, :2]
    assert torch.equal(weight.sort(-1).values[:, 2:], kept), "the two smallest weights of each group are kept"


@pytest.mark.parametrize("method", [First(), LaterOnce()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("patterns", WEIGHTS.values(), ids=WEIGHTS)
def test_a_method_that_overrides_choose_is_asked(patterns, method):
    zero = prune(patterns, method=method)[0].weight.detach().view(-1, 4) == 0
    assert torch.equal(zero, torch.tensor([[False, False, True, True]]).expand_as(zero))


@pytest.mark.parametrize("patterns", WEIGHTS.values(), ids=WEIGHTS)
def test_a_method_that_overrides_remember_gets_the_scores(patterns):
    Notes.seen.clear()
    prune(patterns, method=Notes())
    original = torch.randperm(128, generator=torch.Generator().manual_seed(0)).view(-1, 4) + 1.0
    assert Notes.seen
    assert torch.equal(Notes.seen[0].view(-1, 4), original)


@pytest.mark.parametrize("patterns", WEIGHTS.values(), ids=WEIGHTS)
def test_a_method_that_overrides_kept_is_asked(patterns):
    assert (prune(patterns, method=All())[0].weight != 0).all()


@pytest.mark.parametrize(
    ("parts", "passes"),
    [
        ({}, True),
        ({"method": PruneOnce()}, True),
        ({"method": All()}, True),
        ({"method": First()}, False),
        ({"method": Notes()}, False),
        ({"criterion": Smallest()}, False),
    ],
    ids=["default", "PruneOnce", "All", "First", "Notes", "Smallest"],
)
def test_one_pass_is_used_where_no_decision_is_overridden(parts, passes):
    with patch.object(nm_groups, "nm_select_many", wraps=nm_groups.nm_select_many) as select:
        prune(WEIGHTS["N:M groups"], **parts)
    assert bool(select.call_count) == passes


def test_a_flag_counts_only_with_the_methods_that_its_class_knows():
    class Own(Criterion):
        factor = "weight"

        def flow(self, x):
            return Sum()(Abs()(x.weight))

    class Later(Own):
        def flow(self, x):
            return super().flow(x)

    assert nm_groups.declares(Own(), "factor", "flow")
    assert not nm_groups.declares(Later(), "factor", "flow")
