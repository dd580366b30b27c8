"""Every YAML of conf/ composes, and every option of every group builds its objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparse_lightning.app import catalog
from sparse_lightning.app.check import SETTINGS, check
from sparse_lightning.app.compose import compose
from sparse_lightning.app.run import PreparedRun
from sparse_lightning.errors import ConfigError

ROOT = Path(__file__).parent.parent
OWN = str(Path(__file__).parent / "own_conf")
OPTIONS = [(file.parent.name, file.stem) for file in sorted((ROOT / "conf").glob("*/*.yaml"))]
OPTIONS = [(group, option) for group, option in OPTIONS if group != "recipe"]  # test_recipes.py runs these
GROUPS = {
    "model": {"digits_mlp", "digits_vit", "digits_conv", "gpt", "hlb_cifar10", "huggingface", "text_classifier"},
    "data": {"digits", "stdlib_text", "cifar10", "text_file", "fashion_mnist", "labelled_text"},
    "trainer": {"cpu", "gpu", "ddp", "fsdp2", "fsdp2_tp"},
    "optimizer": {"adamw", "sgd"},
    "pattern": {"blocks", "nm", "filters", "neurons", "heads", "heads_and_neurons", "strided"},
    "schedule": {"constant", "one_shot", "linear", "cubic", "cosine", "exponential", "steps", "cyclic", "join"},
    "criterion": {
        *("magnitude", "gradient", "taylor", "elementwise_taylor", "movement", "fisher", "adam_fisher"),
        *("sensitivity", "wanda", "random", "ema", "average_taylor", "auto", "obs"),
    },
    "budget": {"uniform", "erk", "global", "lamp"},
    "method": {"gradual", "one_shot", "rigl", "set", "soft", "proximal"},
    "compensation": {"none", "refit"},
    "shrink": {"none", "units"},
    "logger": {"csv", "tensorboard", "none"},
    "export": {"none", "weights", "blocks", "compact", "compact_graph", "onnx", "tiled", "semi_structured"},
}
BUILT_LATER = ("model", "data", "trainer")
"""Groups whose options may need a GPU, a file or another package: they are composed and checked, but not built."""
FITTING = {"gpt": {"data": "stdlib_text"}}
"""Options of other groups that an option needs."""


def plain(overrides, folder):
    return compose(overrides, OWN).plain(folder)


def test_the_groups_are_those_of_the_contract():
    assert set(catalog.groups()) == set(GROUPS)
    for group, names in GROUPS.items():
        assert names <= set(catalog.options(group)), group


def chosen_together(groups):
    """Choices of one option in each of these groups, in which every option occurs."""
    options = [[option for g, option in OPTIONS if g == group] for group in groups]
    rows = [[names[i % len(names)] for names in options] for i in range(max(map(len, options)))]
    return [dict(zip(groups, row, strict=True)) for row in rows]


def with_shrink_that_fits(choice):
    """The choice without `shrink` where the method lets blocks grow, or changes them: that is an error."""
    return choice if choice["method"] in ("gradual", "one_shot") else {**choice, "shrink": "none"}


BUILT = [with_shrink_that_fits(c) for c in chosen_together([group for group in GROUPS if group not in BUILT_LATER])]
CHECKED = [{**choice, **FITTING.get(choice["model"], {})} for choice in chosen_together(["model"])]
CHECKED += chosen_together(["data", "trainer"])


def check_choice(choice, folder):
    config = plain(["recipe=small", *(f"{group}={option}" for group, option in choice.items())], folder)
    check(config)
    assert set(config) == set(GROUPS) | set(SETTINGS)
    if not {*choice} & {*BUILT_LATER}:
        PreparedRun(config)


@pytest.mark.parametrize("choice", [*BUILT, *CHECKED], ids=lambda choice: ",".join(choice.values()))
def test_every_option_composes_and_builds_its_objects(choice, tmp_path):
    """Options of several groups at a time."""
    check_choice(choice, tmp_path)


@pytest.mark.parametrize("method", ["rigl", "set", "soft", "proximal"])
def test_methods_that_cannot_shrink_are_refused_when_a_run_is_composed(method, tmp_path):
    with pytest.raises(ConfigError, match=f"(?i)shrink: shrink cannot be used with {method}, which "):
        PreparedRun(plain(["recipe=small", "pattern=coupled", "shrink=units", f"method={method}"], tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS])
def test_every_option_alone_composes_and_builds_its_objects(group, option, tmp_path):
    check_choice({group: option, **FITTING.get(option, {})}, tmp_path)


@pytest.mark.parametrize("option", sorted(GROUPS["trainer"] - {"cpu", "gpu"}))
def test_every_trainer_for_several_devices_is_made_for_cpus_too(option, tmp_path):
    cpus = ["trainer.accelerator=cpu", "trainer.devices=4", "trainer.precision=32-true"]
    trainer = PreparedRun(plain(["recipe=small", f"trainer={option}", *cpus], tmp_path)).trainer
    assert trainer.world_size == 4
    wanted = {"fsdp2": (4, 1), "fsdp2_tp": (2, 2)}
    assert getattr(trainer.strategy, "sizes", None) == wanted.get(option)


def test_every_file_is_short_and_has_a_purpose():
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files
    for file in files:
        lines = file.read_text("utf-8").splitlines()
        assert catalog.purpose("\n".join(lines)), f"{file} has no comment with its purpose"
        assert len(lines) <= 40, file


def test_values_of_a_recipe_for_a_replaced_option_are_dropped(tmp_path):
    swapped = plain(["recipe=small", "pattern=nm", "pattern.nm.match=[first.weight]"], tmp_path)
    assert list(swapped["pattern"]) == ["nm"]
    kept = plain(["recipe=small", "schedule=linear", "schedule.final=0.3"], tmp_path)
    assert kept["schedule"]["final"] == 0.3


def test_the_folders_of_the_package_are_links():
    assert (ROOT / "sparse_lightning" / "conf").resolve() == ROOT / "conf"
    assert (ROOT / "sparse_lightning" / "recipes").resolve() == ROOT / "recipes"
    assert (ROOT / "conf" / "recipe").resolve() == ROOT / "recipes"
