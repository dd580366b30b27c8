"""Couplings: families of units that can be removed, and the reasons why others cannot."""

from __future__ import annotations

import pytest
import torch
from graph_models import PLAIN, VECTORS
from torch import nn

from sparse_lightning.errors import CouplingError
from sparse_lightning.graph import Couplings, couplings
from sparse_lightning.graph.proof import TOLERANCE, Proof


def worst_error(found: Couplings) -> dict[str, float]:
    """The relative error of each family, zeroed against removed, of one unit and of every other."""
    proof = Proof(found.analysis, found.solution)
    return {
        family.name: max(
            proof.error([(family, units)])
            for units in ([family.units - 1], list(range(0, family.units, 2)))
            if len(units) < family.units or family.units == 1
        )
        for family in found
    }


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_have_the_families_worked_out_by_hand_and_each_is_proven(name):
    case = PLAIN[name]
    torch.manual_seed(0)
    found = couplings(case.build(), case.inputs)
    assert {family.name: family.units for family in found} == case.units, f"\n{found}"
    wrong = {family: error for family, error in worst_error(found).items() if not error <= TOLERANCE}
    assert not wrong, f"zeroing and removing give other outputs in {wrong}"
    for parameter, (operation, module) in case.refused.items():
        reasons = [r.reason for r in found.refusals if parameter in r.parameters]
        assert any((r.operation.startswith(operation), r.module) == (True, module) for r in reasons), f"\n{found}"


def test_the_model_is_not_changed():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    couplings(model, (VECTORS,), verify=True)
    assert model.training
    assert model[1].training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_without_inputs_the_error_says_how_to_pass_them():
    with pytest.raises(CouplingError, match=r"pass inputs, a tuple of tensors or a dict .*example_input_array"):
        couplings(nn.Linear(2, 2))
