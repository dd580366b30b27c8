"""Names of version 0.1.0 keep working for a release: the same thing, and a DeprecationWarning with the new name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import sparse_lightning
from sparse_lightning import (
    LAMP,
    SET,
    Blocks,
    BlockSpec,
    Constant,
    Global,
    RigL,
    ScopeSpec,
    Sparsifier,
    budgets,
    methods,
)
from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.compose import compose
from sparse_lightning.app.renamed_keys import accept_old_keys
from sparse_lightning.app.trust import instantiate
from sparse_lightning.budgets import Budget, ScoredScope
from sparse_lightning.errors import ConfigError
from sparse_lightning.moved import MOVED, new_name

PACKAGE = Path(sparse_lightning.__file__).parent


@pytest.mark.parametrize(
    ("make", "value", "text"),
    [
        (
            lambda: RigL(share=0.4),
            RigL(drop_fraction=0.4),
            r"RigL\(share=…\) is deprecated: use RigL\(drop_fraction=…\)",
        ),
        (lambda: SET(share=0.4), SET(drop_fraction=0.4), r"SET\(share=…\) is deprecated"),
        (lambda: Global(floor=0.4), Global(min_density=0.4), r"use Global\(min_density=…\)"),
        (lambda: LAMP(floor=0.4, overrides={"a": 0.5}), LAMP(0.4, overrides={"a": 0.5}), r"LAMP\(floor=…\)"),
        (lambda: RigL(0.4).share, 0.4, r"RigL\.share is deprecated: use RigL\.drop_fraction"),
        (lambda: Global(0.4).floor, 0.4, r"Global\.floor is deprecated: use Global\.min_density"),
        (lambda: methods.Case, methods.UpdateContext, r"methods\.Case is deprecated: use .*methods\.UpdateContext"),
        (lambda: methods.OneShot, methods.PruneOnce, r"methods\.OneShot is deprecated: use .*methods\.PruneOnce"),
        (lambda: budgets.Contender, budgets.ScoredScope, r"budgets\.Contender is deprecated"),
    ],
)
def test_an_old_name_means_the_new_one(make, value, text):
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert make() == value
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}, "it points to the caller"


def test_both_names_at_once_raise():
    with pytest.raises(TypeError, match="both drop_fraction and share"):
        RigL(share=0.1, drop_fraction=0.2)


def test_settings_of_a_sparsifier():
    sparsifier = Sparsifier([Blocks("weight", (1, 1))], Constant(0.5))
    with pytest.warns(DeprecationWarning, match=r"Sparsifier\.settings is deprecated"):
        assert sparsifier.settings is sparsifier.configuration


def test_a_budget_that_overrides_the_old_method_is_called():
    with pytest.warns(DeprecationWarning, match=r"Half\.share is deprecated: use Half\.allocate"):

        @dataclass(frozen=True)
        class Half(Budget):
            def share(self, contenders, target):
                return [contender.kept_at(0.5) for contender in contenders]

    scored = ScoredScope("w", ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1))), torch.rand(1, 1, 4))
    assert int(Half().split([scored], 0.0, 1.0)[0]) == 2


def test_a_method_that_overrides_the_old_method_is_called():
    with pytest.warns(DeprecationWarning, match=r"Never\.share_at is deprecated: use Never\.drop_fraction_at"):

        class Never(RigL):
            def share_at(self, progress):
                return 0.0

    assert Never(0.4).drop_fraction_at(0.0) == 0.0


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_path_is_the_new_module(old):
    assert not (PACKAGE / f"{old.replace('.', '/')}.py").exists(), "the old place is free"
    assert importlib.import_module(f"sparse_lightning.{old}") is importlib.import_module(
        f"sparse_lightning.{MOVED[old]}"
    )


def test_submodules_follow_their_package():
    from sparse_lightning.configuration.trust import instantiate

    assert instantiate.__module__ == "sparse_lightning.app.trust"
    assert new_name("sparse_lightning.no_such_module") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sparse_lightning.configuration.no_such_module")


def test_old_paths_are_found_in_a_fresh_process_and_import_no_torch_by_themselves():
    program = (
        "import sparse_lightning, sys; assert 'torch' not in sys.modules; import sparse_lightning.table as t; t.table"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_model_is_pruned_by_the_old_spelling():
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(DeprecationWarning, match="share"):
        method = RigL(share=0.5)
    sparsifier = Sparsifier([Blocks("weight", (2, 2))], Constant(0.5, end=0), method=method, update_every=1)
    sparsifier.attach(model, optimizer)
    model(torch.ones(1, 8)).sum().backward()
    sparsifier.before_step()
    optimizer.step()
    assert sparsifier.sparsity() == 0.5


RECIPE = """# @package _global_
# A recipe of version 0.1.0.
defaults:
  - override /method: rigl
  - override /budget: global
method: {share: 0.4}
budget: {floor: 0.2}
"""


@pytest.fixture
def old_recipe(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "old.yaml").write_text(RECIPE, "utf-8")
    return str(tmp_path)


def test_a_recipe_with_old_keys_is_the_recipe_with_new_ones(old_recipe):
    with pytest.warns(DeprecationWarning, match="is deprecated: use") as caught:
        config = compose(["recipe=old"], old_recipe).plain(".")
    texts = {str(warning.message) for warning in caught}
    assert texts == {
        "method.share is deprecated: use method.drop_fraction",
        "budget.floor is deprecated: use budget.min_density",
    }
    assert instantiate(config["method"]) == RigL(0.4)
    assert instantiate(config["budget"]) == Global(0.2)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("method=rigl method.share=0.6", 0.6),
        ("recipe=old method.share=0.6", 0.6),
        ("recipe=old method.drop_fraction=0.6", 0.6),
        ("recipe=old method=set", 0.4),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_what_is_typed_wins_under_either_name(typed, value, old_recipe):
    [run] = check_runs(accept_old_keys(typed.split()), old_recipe).runs
    method = run.plain(".")["method"]
    assert (method["drop_fraction"], "share" in method) == (value, False)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_an_old_key_of_another_method_is_not_accepted():
    with pytest.raises(ConfigError, match=r"method\.share: Soft takes no 'share'"):
        check_runs(accept_old_keys(["method=soft", "method.share=0.6"]))
