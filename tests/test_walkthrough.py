"""The walks through one optimizer step and one command-line run in CONTRIBUTING.md are what happens."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import CodeType

import lightning as L
import pytest
from small_nets import LAYERS, Net

import sparse_lightning
from sparse_lightning import Blocks, Linear, SparsityCallback
from sparse_lightning.app.cli import main

PACKAGE = Path(sparse_lightning.__file__).parent
PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"
NUMBER = re.compile(r"^\d+\. ", re.MULTILINE)
LINE = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)` `(?P<name>[\w.]+)`: ", re.MULTILINE)
TITLES = ["One optimizer step", "One command-line run"]


def section(title: str) -> str:
    """The text below a heading of the page."""
    return PAGE.read_text("utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]


def steps(title: str) -> list[tuple[str, str]]:
    """The file and the function of each line of a walk."""
    return [(found["file"], found["name"]) for found in LINE.finditer(section(title))]


def code(file: str, name: str) -> CodeType:
    """The code of the function that a line names, which is defined in the file that it names."""
    dotted = ".".join([PACKAGE.name, *Path(file).with_suffix("").parts]).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    found = inspect.unwrap(reduce(getattr, name.split("."), module)).__code__
    assert Path(found.co_filename) == PACKAGE / file, f"{name} is in {found.co_filename}"
    return found


@contextmanager
def recorded(calls: list[CodeType]):
    """Note every function of the package that is called inside, in order."""

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            calls.append(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def first_not_followed(walk: list[tuple[str, str]], calls: list[CodeType]) -> tuple[str, str] | None:
    """The first line of a walk that is not called after the lines before it."""
    rest = iter(calls)
    return next((step for step in walk if not any(code(*step) is call for call in rest)), None)


class Records(L.Callback):
    """Records one training batch, from before its optimizer step to the end of the batch."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self._context = recorded(self.calls)

    def on_after_backward(self, trainer, pl_module):
        """Start at the second step, when hooks have been set up and cached."""
        if trainer.global_step == 1:
            self._context.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Stop."""
        if trainer.global_step == 2:
            self._context.__exit__(None, None, None)


def test_an_optimizer_step_takes_the_walk():
    records = Records()
    pruning = SparsityCallback([Blocks(LAYERS, (4, 4))], Linear(0.75, end=3), update_every=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_steps=4,
        callbacks=[pruning, records],
        accelerator="cpu",
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        limit_val_batches=0,
        **quiet,
    )
    trainer.fit(Net())
    assert first_not_followed(steps("One optimizer step"), records.calls) is None


TINY = (
    "model=digits_mlp",
    "pattern.blocks.match=first.weight",
    "update_every=1",
    "trainer.max_epochs=1",
    "+trainer.limit_train_batches=2",
    "+trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
)


def test_a_command_line_run_takes_the_walk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls: list[CodeType] = []
    with pytest.raises(SystemExit) as ended, recorded(calls):
        main(["export=weights", *TINY])
    assert ended.value.code == 0
    assert first_not_followed(steps("One command-line run"), calls) is None


@pytest.mark.parametrize("title", TITLES)
def test_a_walk_fails_where_the_order_is_another(title):
    walk = steps(title)
    calls = [code(*step) for step in walk]
    assert first_not_followed(walk, calls) is None
    assert first_not_followed([*walk[1:], walk[0]], calls) == walk[0]
    assert first_not_followed(walk, calls[:-1]) == walk[-1]


@pytest.mark.parametrize("title", TITLES)
def test_every_line_of_a_walk_names_a_file_and_a_function(title):
    walk = steps(title)
    assert len(walk) > 10, f"there is no walk through {title}"
    assert len(walk) == len(NUMBER.findall(section(title)))
