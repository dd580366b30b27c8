"""Progress bars: on a terminal, for what takes long, and nowhere else."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from sparse_lightning import Constant, Coupled, Sparsifier, compact, couplings, progress, prune, tiled
from sparse_lightning.export import ONNX, Compact
from sparse_lightning.progress import stage, stages

INPUTS = (torch.randn(2, 4),)
SPARSIFIER = Sparsifier([Coupled(inputs=INPUTS)], Constant(0.5))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def half_zero():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for weights in (model[0].weight[:4], model[0].bias[:4], model[2].weight[:, :4]):
            weights.zero_()
    return model


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))  # pytest sets that of sys before each test
    return made


@pytest.fixture
def bars(terminal, monkeypatch):
    """Every bar that is made, in order."""
    found = []

    class Kept(progress._Bar):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(progress, "_Bar", Kept)
    return found


def wait_for(terminal, text):
    end = time.monotonic() + 30
    while text not in terminal.getvalue():
        assert time.monotonic() < end, f"{text!r} was not drawn: {terminal.getvalue()!r}"
        time.sleep(0.005)


def test_a_bar_shows_the_stage_while_it_runs_and_is_erased_after_it(terminal, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    with stages("export", 2):
        stage("tracing Net")
        wait_for(terminal, "export: tracing Net 0/2")
        stage("writing net.onnx")
        wait_for(terminal, "export: writing net.onnx 1/2")
    assert re.search(r"\| 00:0\d", terminal.getvalue())
    assert terminal.getvalue().endswith("\r"), "the line is cleared, and what is printed next begins there"


def test_what_is_short_shows_nothing(terminal):
    with stages("export", 1):
        stage("tracing")
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    "run",
    [
        lambda model, folder: couplings(model, INPUTS),
        lambda model, folder: compact(model, INPUTS),
        lambda model, folder: Compact(inputs=INPUTS)(folder, model, SPARSIFIER),
        lambda model, folder: Compact("graph", INPUTS)(folder, model, SPARSIFIER),
        lambda model, folder: tiled(model, INPUTS),
        lambda model, folder: prune(model, [Coupled("0*", INPUTS)], 0.5, criterion="magnitude"),
        pytest.param(
            lambda model, folder: ONNX(INPUTS)(folder, model, SPARSIFIER),
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        ),
    ],
    ids=["couplings", "compact", "Compact", "Compact, graph", "tiled", "prune", "ONNX"],
)
def test_the_last_stage_is_the_last_of_those_that_are_announced(run, bars, tmp_path):
    run(half_zero(), tmp_path)
    assert bars
    assert [(bar.title, bar.begun) for bar in bars] == [(bar.title, bar.total) for bar in bars]


def test_stages_inside_of_others_are_theirs_and_an_error_ends_the_bar(bars):
    def fail():
        with stages("outer", 2):
            stage("first")
            with stages("inner", 1):
                stage("second")
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert [(bar.title, bar.begun, bar.thread.is_alive()) for bar in bars] == [("outer", 2, False)]
    with stages("next", 1):
        pass
    assert len(bars) == 2


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers, self.example_input_array = half_zero(), INPUTS[0]

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("shown", [True, False])
def test_the_trainer_decides_for_its_model(bars, shown):
    model = Net()
    compact(model)
    assert len(bars) == 1, "without a Trainer there is a bar"
    quiet = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False, "enable_model_summary": False}
    model.trainer = L.Trainer(**quiet, enable_progress_bar=shown)
    compact(model)
    assert len(bars) == 1 + shown


def test_there_is_no_bar_without_a_terminal_or_if_it_is_not_wanted(bars, monkeypatch):
    prune(half_zero(), [Coupled("0*", INPUTS)], 0.5, criterion="magnitude", progress=False)
    assert [bar.title for bar in bars] == ["couplings"]
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=io.StringIO()))
    compact(half_zero(), INPUTS)
    assert len(bars) == 1
