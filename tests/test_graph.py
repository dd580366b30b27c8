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


def test_an_operation_without_a_rule_pins_what_it_touches_and_is_named():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.sort(self.up(x), -1).values)

    found = couplings(Odd(), (VECTORS,))
    assert not found.families
    [reason] = [refusal.reason for refusal in found.refusals if "up.bias" in refusal.parameters]
    assert (reason.operation, reason.why.split(":")[0]) == ("aten.sort", "an operation without a rule")


@pytest.mark.parametrize(
    ("middle", "operation"),
    [
        (lambda x: x.softmax(-1), "aten.softmax.int"),
        (lambda x: x / x.mean(-1, keepdim=True), "aten.mean.dim"),
        (lambda x: x.log(), "aten.log"),
        (lambda x: 1 / x, "aten.reciprocal"),
        (lambda x: x - x.amax(-1, keepdim=True), "aten.amax"),
        (lambda x: x * x.cumsum(-1), "aten.cumsum"),
        (lambda x: nn.functional.group_norm(x, 2), "aten.group_norm"),
        (lambda x: nn.functional.layer_norm(x, (8,)), "aten.layer_norm"),
    ],
)
def test_what_mixes_units_or_is_not_finite_at_zero_pins_them(middle, operation):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(middle(self.up(x)))

    found = couplings(Net(), (VECTORS,))
    assert not found.families, f"\n{found}"
    [reason] = [refusal.reason for refusal in found.refusals if "up.bias" in refusal.parameters]
    assert reason.operation == operation


def test_control_flow_on_data_is_an_error_that_points_to_the_hand_written_patterns():
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(CouplingError, match=r"torch.export cannot trace Branches: .*Heads, Neurons and Filters"):
        couplings(Branches(4, 4), (VECTORS,))


def test_a_removal_gives_the_indices_that_are_left_and_a_smaller_program_for_any_batch():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    found = couplings(model, (VECTORS,))
    removal = found.removal({"0 (units)": [1, 5]})
    assert [indices.tolist() for indices in removal.kept("2.weight")] == [[0, 1, 2], [0, 2, 3, 4, 6, 7]]
    small = removal.module()
    assert small.get_parameter("0.weight").shape == (6, 4)
    with torch.no_grad():
        model[2].weight[:, [1, 5]] = 0
        x = torch.randn(5, 4)
        torch.testing.assert_close(small(x), model(x))


def test_the_table_has_families_with_their_slices_and_refusals_with_their_reasons():
    text = str(couplings(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (VECTORS,)))
    assert "0 (units)  8      0.weight[0, :], 0.bias[0], 2.weight[:, 0]" in text
    assert "output: it is an output of the model" in text
