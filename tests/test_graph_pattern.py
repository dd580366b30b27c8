"""Coupled: the families of the traced model as a pattern."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from graph_models import PLAIN, SEQUENCE, VECTORS
from torch import nn
from torch.utils.data import DataLoader

from sparse_lightning import Constant, Coupled, Filters, Heads, Neurons, PatternError, SparsityCallback
from sparse_lightning.app.cli import answer
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


def fit(model: L.LightningModule, batches: list[Any]) -> None:
    """Prune half of the units of each family."""
    pruning = SparsityCallback(patterns=[Coupled()], schedule=Constant(0.5))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"accelerator": "cpu", "logger": False, "limit_val_batches": 0, **quiet}
    trainer = L.Trainer(max_steps=len(batches), callbacks=[pruning], **options)
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


def test_the_command_line_prints_the_units_of_a_recipe_without_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answer(["--couplings", "recipe=digits_filters", "model.width=8", "model.hidden=12"]) == 0
    shown = capsys.readouterr().out
    assert "stages.0.conv1 (channels)  12" in shown
    assert "output: it is an output of the model" in shown
    assert not list(tmp_path.iterdir()), "nothing is trained or written"
