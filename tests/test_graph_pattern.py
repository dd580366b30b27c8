"""Coupled: the families of the traced model as a pattern."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from graph_models import PLAIN, SEQUENCE, VECTORS
from torch import nn
from torch.utils.data import DataLoader

from sparse_lightning import (
    Constant,
    Coupled,
    Filters,
    Heads,
    Neurons,
    NothingToRemoveWarning,
    PatternError,
    Shrink,
    SparseLightningError,
    SparsityCallback,
    compact,
)
from sparse_lightning.app.cli import answer
from sparse_lightning.compaction import compact_program
from sparse_lightning.graph import couplings
from sparse_lightning.models import GPT, DigitsConv, DigitsViT
from sparse_lightning.patterns import Pattern, resolve
from sparse_lightning.patterns.names import Names

SMALL = {
    "vit": lambda: DigitsViT(width=16, depth=2),
    "conv": lambda: DigitsConv(width=8, hidden=12, depth=2),
    "gpt": lambda: GPT(width=16, depth=2, heads=4, context=16),
}


def elements(pattern: Pattern, model: nn.Module) -> dict[frozenset[tuple[str, int]], str]:
    """The elements of each block, as names of parameters with offsets, and the scope they are in."""
    names = Names(model)
    found = {}
    for attachment in resolve([pattern], model):
        [block] = attachment.scope.blocks()
        parts = []
        for spec in block.blocks():
            offsets = torch.arange(spec.param.numel())
            storage = spec.view.layout.on(offsets)
            parts.append([{(names.name_of(spec.param), int(i)) for i in row.flatten()} for row in storage])
        for unit in zip(*parts, strict=True):
            found[frozenset().union(*unit)] = attachment.name
    return found


@pytest.mark.parametrize(
    ("model", "coupled", "written"),
    [
        ("vit", Coupled("* (heads)"), Heads("*.attn")),
        ("vit", Coupled("* (units)"), Neurons("*.up", "*.down")),
        ("gpt", Coupled("*.attn.*"), Heads("*.attn")),
        ("conv", Coupled("*.conv1 (channels)"), Filters("*.conv1", norm="*.norm1", into="*.conv2")),
    ],
    ids=["heads", "neurons", "fused heads", "filters"],
)  # fmt: skip
def test_units_have_the_elements_of_the_hand_written_patterns(model, coupled, written):
    built = SMALL[model]()
    assert elements(coupled, built).keys() == elements(written, built).keys()


def fit(model: L.LightningModule, batches: list[Any], shrink: Shrink | None = None, **options: Any) -> None:
    """Prune half of the units of each family."""
    pruning = SparsityCallback(patterns=[Coupled()], schedule=Constant(0.5), shrink=shrink)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"accelerator": "cpu", "logger": False, "limit_val_batches": 0, **quiet, **options}
    trainer = L.Trainer(max_steps=len(batches), callbacks=[pruning], **settings)
    trainer.fit(model, DataLoader(batches, batch_size=None), DataLoader(batches[:1], batch_size=None))


@pytest.mark.parametrize("name", SMALL)
def test_coupled_trains_a_recipe_model_to_the_requested_sparsity(name):
    torch.manual_seed(0)
    model = SMALL[name]()
    images = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    batch = torch.randint(0, 200, (4, 12)) if name == "gpt" else images
    fit(model, [batch] * 6)
    for attachment in resolve([Coupled()], model):
        [block] = attachment.scope.blocks()
        assert int((block.norms(p=float("inf")) == 0).sum()) == block.numblk() // 2, attachment.name


class Regression(L.LightningModule):
    """Trains a model on its own input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.example_input_array = model, SEQUENCE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch), batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("name", ["grouped queries", "fused", "interleaved"])
def test_pruned_heads_of_each_layout_contribute_nothing_after_training(name):
    torch.manual_seed(0)
    model = Regression(PLAIN[name].build())
    fit(model, [SEQUENCE] * 6)
    [(_, heads)] = PLAIN[name].units.items()
    [attachment] = resolve([Coupled()], model)
    [block] = attachment.scope.blocks()
    pruned = block.norms(p=float("inf")).flatten() == 0
    assert int(pruned.sum()) == heads // 2
    found = couplings(model)
    small = found.removal({attachment.name: pruned.nonzero().flatten().tolist()}).module()
    with torch.no_grad():
        torch.testing.assert_close(small(SEQUENCE), model.eval()(SEQUENCE))


def test_families_are_chosen_by_their_names_and_by_those_of_parameters():
    model = SMALL["vit"]()
    names = [made.name for made in resolve([Coupled(exclude="blocks.1.*")], model)]
    assert names == ["blocks.0.attn (heads)", "blocks.0.mlp (units)"]
    assert [made.name for made in resolve([Coupled("*.mlp.up.weight", exclude="blocks.0*")], model)] == [
        "blocks.1.mlp (units)"
    ]
    with pytest.raises(PatternError, match=r"Coupled\(match='\*.mpl'\) matches no family"):
        resolve([Coupled("*.mpl")], model)


def test_a_model_without_removable_units_is_an_error_with_the_reasons():
    with pytest.raises(PatternError, match="finds no units that can be removed: output: it is an output of the model"):
        resolve([Coupled(inputs=(VECTORS,))], nn.Linear(4, 4))
    assert str(Coupled(inputs=(VECTORS,))) == "Coupled()"


class Aside(nn.Module):
    """Computes with a module that is not its own, so that the trace does not use its parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)
        self.run = [nn.Linear(4, 3)]

    def forward(self, x):
        return self.run[0](x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Aside(), "up.weight: the traced forward pass does not use it; up.bias: .* Use"),
        (nn.Sequential(nn.ReLU()), "the model has no parameters with units. Use"),
    ],
    ids=["not used", "none"],
)
def test_a_model_of_which_nothing_is_traced_is_an_error_with_a_reason(model, reason):
    with pytest.raises(PatternError, match=f"finds no units that can be removed: {reason}"):
        resolve([Coupled(inputs=(torch.randn(2, 4),))], model)


def test_inputs_may_be_those_of_the_model():
    case = PLAIN["mlp"]
    model = case.build()
    with pytest.raises(PatternError, match="has no example inputs"):
        resolve([Coupled()], model)
    model.example_input_array = VECTORS
    assert len(resolve([Coupled()], model)) == 2


class Convolutions(Regression):
    """Two convolutions, which take inputs of their own dtype only; its example inputs are in single precision."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)))
        self.example_input_array = torch.zeros(2, 3, 8, 8)


PRECISIONS = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shrink", [None, Shrink(at_least=0.0)], ids=["whole", "shrunk"])
def test_a_convolution_is_traced_in_the_precision_of_its_trainer(precision, shrink):
    torch.manual_seed(0)
    model = Convolutions()
    fit(model, [torch.randn(4, 3, 8, 8)] * 6, precision=precision, shrink=shrink)
    weight = model.model[0].weight
    assert weight.dtype == PRECISIONS[precision]
    assert int((weight.flatten(1) == 0).all(1).sum()) == 8, "half of the 16 channels are not pruned"
    assert model.example_input_array.dtype == torch.float32, "the example inputs of the user were changed"
    assert len(compact(model).model[0].weight) == 8


@pytest.mark.parametrize("precision", PRECISIONS)
def test_example_inputs_are_those_that_the_trainer_makes_of_batches_where_weights_have_several_dtypes(precision):
    class OwnNorm(Convolutions):
        """Its norm stays in single precision, whatever the trainer has converted it to."""

        def __init__(self) -> None:
            super().__init__()
            self.model.insert(1, nn.BatchNorm2d(16))

        def on_fit_start(self) -> None:
            self.model[1].float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up, norm, *rest = self.model
            return nn.Sequential(*rest)(norm(up(x).float()).to(x.dtype))

    model = OwnNorm()
    fit(model, [torch.randn(4, 3, 8, 8)] * 2, precision=precision)
    assert {p.dtype for p in model.parameters()} == {torch.float32, PRECISIONS[precision]}
    assert [family.units for family in couplings(model)] == [16]


def test_inputs_that_are_passed_stay_as_they_are_and_the_error_says_to_cast_them():
    model, images = Convolutions().bfloat16(), torch.randn(2, 3, 8, 8)
    advice = r"The inputs are torch.float32 and the parameters torch.bfloat16: cast the inputs"
    with pytest.raises(PatternError, match=advice):
        resolve([Coupled(inputs=(images,))], model)
    assert len(resolve([Coupled(inputs=(images.bfloat16(),))], model)) == 1
    linear = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16()  # torch.export takes any dtype
    for make in (compact, compact_program):
        with pytest.raises(SparseLightningError, match=advice), pytest.warns(NothingToRemoveWarning):
            make(linear, (torch.randn(2, 4),))


def test_the_command_line_prints_the_units_of_a_recipe_without_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answer(["--couplings", "recipe=digits_filters", "model.width=8", "model.hidden=12"]) == 0
    shown = capsys.readouterr().out
    assert "stages.0.conv1 (channels)  12" in shown
    assert "output: it is an output of the model" in shown
    assert not list(tmp_path.iterdir()), "nothing is trained or written"
