"""N:M groups of parameters that lie alike: decided by one call, as if each parameter were attached alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from torch import nn

from sparse_lightning import NM, Gradual, Linear, Magnitude, PruneOnce, Sparsifier, Uniform, Wanda
from sparse_lightning.criteria import ElementwiseTaylor
from sparse_lightning.engine import masked_stack, nm_groups
from sparse_lightning.errors import ScoreWarning
from sparse_lightning.schedules import Constant


class Deep(nn.Module):
    """Linear layers of two shapes and two convolutions; one weight has other strides than those of its shape."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 12 if i == 2 else 8) for i in range(5)])
        self.convolutions = nn.ModuleList([nn.Conv1d(8, 4, 3) for _ in range(2)])
        self.layers[3].weight = nn.Parameter(self.layers[3].weight.detach().t().contiguous().t())
        self.to(dtype)

    def forward(self, x):
        outputs = [layer(x) for layer in self.layers] + [
            layer(x.unsqueeze(-1).expand(-1, -1, 5)) for layer in self.convolutions
        ]
        return sum(output.square().mean() for output in outputs)


NAMES = [name for name, parameter in Deep().named_parameters() if parameter.ndim > 1]
CALLS = 4
"""Of the selection in an update: two shapes of linear layers, one of other strides, and the convolutions."""


def train(patterns, seed, dtype, steps=6, **parts):
    """Return masks, weights and optimizer state of a run with one Sparsifier for each list of patterns."""
    model = Deep(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = Constant(0.5, begin=2, end=5) if isinstance(parts.get("method"), PruneOnce) else Linear(0.5, end=4)
    sparsifiers = [Sparsifier([each], schedule, update_every=1, **parts) for each in patterns]
    for sparsifier in sparsifiers:
        sparsifier.attach(model, optimizer)
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, 8, dtype=dtype)).backward()
        for sparsifier in sparsifiers:
            sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()
    masks = {name: mask for sparsifier in sparsifiers for name, mask in sparsifier.masks.items()}
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return masks, [p.detach() for p in model.parameters()] + moments


@pytest.mark.hypothesis
def test_a_run_is_that_of_parameters_that_are_attached_alone():
    @settings(max_examples=examples(5), deadline=None)
    @given(
        st.integers(0, 1 << 16),
        st.sampled_from([(2, 4), (1, 4), (3, 8), (1, 2)]),
        st.sampled_from([Magnitude(), Wanda(), ElementwiseTaylor()]),
        st.sampled_from([Gradual(), PruneOnce()]),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.sampled_from([masked_stack.SELECTED, 150]),
    )
    def law(seed, nm, criterion, method, dtype, most):
        parts = {"criterion": criterion, "method": method}
        with patch.object(masked_stack, "SELECTED", most):
            together = train([NM(NAMES, *nm)], seed, dtype, **parts)
        apart = train([NM(name, *nm) for name in NAMES], seed, dtype, **parts)
        assert set(together[0]) == set(apart[0])
        assert all(torch.equal(mask, apart[0][name]) for name, mask in together[0].items())
        assert all(torch.equal(a, b) for a, b in zip(together[1], apart[1], strict=True))

    law()


def test_scopes_of_a_stack_keep_their_own_numbers():
    budget = Uniform(overrides={NAMES[1]: 0.25, NAMES[4]: 0.75})
    masks, _ = train([NM(NAMES)], 0, torch.float32, budget=budget, criterion=Magnitude())
    for name, mask in masks.items():
        wanted = {NAMES[1]: 1, NAMES[4]: 3}.get(name, 2)
        assert (mask.movedim(1, -1).unflatten(-1, (-1, 4)).sum(-1) == wanted).all(), name


@pytest.mark.parametrize("criterion", [Magnitude(), Wanda()], ids=lambda criterion: type(criterion).__name__)
def test_an_update_takes_one_call_for_parameters_that_lie_alike(criterion):
    with patch.object(nm_groups, "nm_select_many", wraps=nm_groups.nm_select_many) as select:
        train([NM(NAMES)], 0, torch.float32, steps=1, criterion=criterion)
    assert select.call_count == CALLS


def test_a_method_that_overrides_kept_is_asked_for_each_parameter():
    class Noted(Gradual):
        def kept(self, context):
            shapes.append(context.mask.shape)
            return super().kept(context)

    shapes: list[torch.Size] = []
    train([NM(NAMES)], 0, torch.float32, steps=1, method=Noted(), criterion=Magnitude())
    assert len(shapes) == len(NAMES)


def test_weights_that_are_not_finite_postpone_the_update_of_all():
    model = Deep()
    with torch.no_grad():
        model.layers[1].weight[0, 0] = torch.nan
        model.layers[4].weight[0, 0] = -torch.inf
    before = [p.detach().clone() for p in model.parameters()]
    sparsifier = Sparsifier([NM(NAMES)], Constant(0.5), Magnitude(), update_every=1)
    sparsifier.attach(model, torch.optim.SGD(model.parameters()))
    with pytest.warns(ScoreWarning, match=f"^{NAMES[1]}, {NAMES[4]} have scores that are not finite"):
        sparsifier.before_step()
    assert not any(mask.any() for mask in sparsifier.masks.values())
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, model.parameters(), strict=True))
