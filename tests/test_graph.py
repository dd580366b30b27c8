"""Couplings: families of units that can be removed, and the reasons why others cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from graph_models import PLAIN, VECTORS, Function
from torch import nn

from sparse_lightning.errors import CouplingError
from sparse_lightning.graph import Couplings, TracedValue, couplings
from sparse_lightning.graph.atoms import Reason
from sparse_lightning.graph.call import RULES
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


def between(middle: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Two linear layers with 8 units, and a function of these between them."""
    return Function(lambda m, x: m.down(middle(m.up(x))), up=nn.Linear(4, 8), down=nn.Linear(8, 3))


def reason_of(found: Couplings, parameter: str) -> Reason:
    [reason] = [refusal.reason for refusal in found.refusals if parameter in refusal.parameters]
    return reason


def test_an_operation_without_a_rule_pins_what_it_touches_and_is_named():
    found = couplings(between(lambda x: torch.sort(x, -1).values), (VECTORS,))
    assert not found.families
    reason = reason_of(found, "up.bias")
    assert (reason.operation, reason.why.split(":")[0]) == ("aten.sort", "an operation without a rule")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda call, x: x, "its rule does not take these arguments"),
        (lambda call, x, shifts, dims: TracedValue((), ()), "its rule does not give a result of its shape"),
    ],
    ids=["arguments", "shape"],
)
def test_a_rule_that_does_not_fit_the_call_pins_what_it_touches_and_is_named(monkeypatch, other, why):
    monkeypatch.setitem(RULES, "aten.roll.default", other)
    found = couplings(between(lambda x: torch.roll(x, 1, -1)), (VECTORS,))
    assert not found.families, f"\n{found}"
    reason = reason_of(found, "up.bias")
    assert (reason.operation, reason.why.split(":")[0]) == ("aten.roll", why)


def test_rules_take_every_argument_of_their_operations():
    for name, registered in RULES.items():
        library, operation, overload = name.split(".")
        if library == "transformers":
            continue  # defined when transformers is imported
        schema = getattr(getattr(getattr(torch.ops, library), operation), overload)._schema
        by_place = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        by_name = {argument.name: None for argument in schema.arguments if argument.kwarg_only}
        inspect.signature(registered).bind("call", *by_place, **by_name)


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: nn.functional.hardtanh(x, 0.5, 1.0),
        lambda x: nn.functional.threshold(x, 0.5, 2.0),
        lambda x: nn.functional.threshold(x, -0.5, 2.0),
    ],
    ids=["hardtanh", "threshold", "threshold below zero"],
)
def test_functions_are_zero_at_zero_as_their_arguments_say(middle):
    model = between(lambda x: middle(x).sum(-1, keepdim=True).expand(-1, 8))
    found = couplings(model, (VECTORS,))
    zero = bool(middle(torch.zeros(1)) == 0)
    assert [family.units for family in found if "up.bias" in family.parameters()] == ([8] if zero else []), f"\n{found}"
    assert all(error <= TOLERANCE for error in worst_error(found).values())


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
    found = couplings(between(middle), (VECTORS,))
    assert not found.families, f"\n{found}"
    assert reason_of(found, "up.bias").operation == operation


def test_control_flow_on_data_is_an_error_that_points_to_the_hand_written_patterns():
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(CouplingError, match=r"torch.export cannot trace Branches: .*Heads, Neurons and Filters"):
        couplings(Branches(4, 4), (VECTORS,))


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_forward(model):
    """As Lightning does with a compiled LightningModule."""
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled", [lambda model: torch.compile(model, backend="eager"), compiled_in_place, compiled_forward]
)
def test_a_compiled_model_has_the_families_of_the_plain_one(compiled):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    wanted = str(couplings(model, (VECTORS,)))
    made = compiled(model)
    assert str(couplings(made, (VECTORS,))) == wanted
    made(VECTORS)
    assert str(couplings(made, (VECTORS,))) == wanted, "after it was called"


def doubled(self, x):
    return 2 * type(self).forward(self, x)


@pytest.mark.parametrize("of_layer", [True, False], ids=["layer", "model"])
def test_a_forward_that_is_replaced_on_the_instance_is_traced_with_its_parameters(of_layer):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    patched = model[0] if of_layer else model
    patched.forward = MethodType(doubled, patched)
    found = couplings(model, (torch.randn(2, 4),))
    assert [family.parameters() for family in found] == [["0.weight", "0.bias", "2.weight"]]
    assert "aten.mul.Tensor" in {str(node.target) for node in found.analysis.traced.program.graph.nodes}


@pytest.mark.usefixtures("own_precision")
def test_the_families_in_mixed_precision_of_accelerate_are_those_of_the_plain_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    wanted = [str(family.slices) for family in couplings(model, (torch.randn(2, 4),))]
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert [str(family.slices) for family in couplings(prepared, (torch.randn(2, 4),))] == wanted


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


class Caches(nn.Module):
    """Keeps what it computes once in a dict, and its activations in a list that another module reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.cache, self._seen = {}, []
        self.b.seen = self._seen

    def forward(self, x):
        if not self.cache:
            self.cache["positions"] = torch.linspace(0, 1, 4)
        self._seen.append(x.shape[0])
        return self.b(torch.relu(self.a(x + self.cache["positions"])) * (1 if self.b.seen else 0))


def test_a_trace_writes_nothing_into_the_containers_of_a_model():
    model = Caches()
    found = couplings(model, (torch.randn(2, 4),))
    assert [family.name for family in found] == ["a (units)"]
    assert (model.cache, model._seen) == ({}, [])
    model(torch.randn(2, 4))
    assert type(model.cache["positions"]) is torch.Tensor
