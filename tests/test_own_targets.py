"""Models and data of the user's: a new target starts from its own arguments; the YAML of the documents works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.compose import compose
from sparse_lightning.app.prepare import prepare_runs
from sparse_lightning.errors import UntrustedError

DOCS = Path(__file__).parent.parent / "docs"
MINE = """
import lightning as L
from sparse_lightning.data import Digits
from sparse_lightning.models import DigitsMLP

class MyModel(DigitsMLP):
    def __init__(self, optimizer=None, hidden: int = 48, depth: int = 1):
        super().__init__(optimizer, hidden=hidden)
        self.depth = depth

class MyLightningModule(MyModel):
    pass

class MyData(Digits):
    def __init__(self, batch_size: int = 24):
        super().__init__(batch_size)
"""
TRUST = "trusted_targets=[my_pkg]"


@pytest.fixture
def my_pkg(tmp_path, monkeypatch):
    """A package of the user's that can be imported, in the current folder."""
    (tmp_path / "my_pkg.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def plain(*typed, config_dir=None):
    return compose(["recipe=digits_rigl", *typed], config_dir).plain("outputs/mine")


def test_a_new_target_starts_from_its_own_arguments(my_pkg):
    model = plain("model._target_=my_pkg.MyModel", TRUST)["model"]
    assert model == {"_target_": "my_pkg.MyModel"}
    model = plain("model._target_=my_pkg.MyModel", "model.hidden=16", "+model.depth=2", TRUST)["model"]
    assert model == {"_target_": "my_pkg.MyModel", "hidden": 16, "depth": 2}
    assert plain("data._target_=my_pkg.MyData", TRUST)["data"] == {"_target_": "my_pkg.MyData"}
    schedule = plain("schedule._target_=sparse_lightning.Steps", "+schedule.milestones={5:0.5}")["schedule"]
    assert schedule == {"_target_": "sparse_lightning.Steps", "milestones": {5: 0.5}}, "Steps takes no final"
    optimizer = plain("optimizer._target_=torch.optim.SGD")["optimizer"]
    assert optimizer == {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.002}
    assert plain()["model"]["hidden"], "the option itself is as it was"


def test_values_of_a_recipe_are_not_meant_for_a_class_that_the_user_types(my_pkg):
    own = str(Path(__file__).parent / "own_conf")
    typed = ["recipe=small", "model._target_=my_pkg.MyModel", TRUST]
    assert compose(typed, own).plain("x")["model"] == {"_target_": "my_pkg.MyModel"}, "the recipe sets model.hidden"
    typed += ["model.hidden=8", "model.optimizer=null"]
    assert compose(typed, own).plain("x")["model"].keys() == {"_target_", "hidden", "optimizer"}
    listed = compose(["recipe=small", "model._target_=torch.nn.Linear"], own).plain("x")["model"]
    assert "hidden" not in listed, "it does not take it"


def test_entries_of_a_pattern_start_anew_too():
    typed = ["recipe=small", "pattern.blocks._target_=sparse_lightning.NM"]
    entry = compose(typed, str(Path(__file__).parent / "own_conf")).plain("x")["pattern"]["blocks"]
    assert entry == {"_target_": "sparse_lightning.NM", "match": ["first.weight", "second.weight"]}, "of the recipe"


def test_a_run_with_a_model_and_data_of_the_user_is_built(my_pkg):
    typed = ["recipe=digits_rigl", "model._target_=my_pkg.MyModel", "data._target_=my_pkg.MyData", TRUST]
    checked = check_runs([*typed, "model.optimizer=${optimizer}"])
    model, data, _ = prepare_runs(checked).take(checked.runs[0]).build()
    assert (type(model).__name__, model.depth, data.batch_size) == ("MyModel", 1, 24)


def test_a_module_that_is_not_found_names_the_way():
    with pytest.raises(UntrustedError, match=r"not_here is not an installed module\. Install it, .*PYTHONPATH=\. sp"):
        check_runs(["model._target_=not_here.Model", "trusted_targets=[not_here]"])


def recipes_of_the_documents():
    """Every YAML block of the documents that is a recipe."""
    for page in sorted(DOCS.glob("*.md")):
        for i, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)):
            if text.startswith("# @package _global_"):
                yield pytest.param(text, id=f"{page.stem}_{i}")


@pytest.mark.parametrize("text", list(recipes_of_the_documents()))
def test_recipes_of_the_documents_work(text, my_pkg):
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/mine.yaml").write_text(text)
    match = [] if "pattern:" in text else ["pattern.blocks.match=[first.weight]"]
    checked = check_runs(["recipe=mine", TRUST, *match], "conf")
    prepare_runs(checked).take(checked.runs[0]).build()
