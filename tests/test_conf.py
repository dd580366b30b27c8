"""Every YAML of conf/ and recipes/ composes, and every option of every group makes its objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparse_lightning.configuration import catalog
from sparse_lightning.configuration.check import SETTINGS, check
from sparse_lightning.configuration.compose import compose
from sparse_lightning.configuration.parts import Parts

ROOT = Path(__file__).parent.parent
OWN = str(Path(__file__).parent / "own_conf")
OPTIONS = [(file.parent.name, file.stem) for file in sorted((ROOT / "conf").glob("*/*.yaml"))]
GROUPS = {
    "model": {"digits_mlp", "digits_vit", "digits_conv", "gpt", "hlb_cifar10", "huggingface"},
    "data": {"digits", "stdlib_text", "cifar10", "text_file"},
    "trainer": {"cpu", "gpu", "ddp", "fsdp2", "fsdp2_tp"},
    "optimizer": {"adamw", "sgd"},
    "pattern": {"blocks", "nm", "filters", "neurons", "heads", "heads_and_neurons"},
    "schedule": {"constant", "one_shot", "linear", "cubic", "cosine", "exponential", "steps", "cyclic", "join"},
    "criterion": {
        *("magnitude", "gradient", "taylor", "elementwise_taylor", "movement", "fisher", "adam_fisher"),
        *("sensitivity", "wanda", "random", "ema"),
    },
    "budget": {"uniform", "erk", "global", "lamp"},
    "method": {"gradual", "one_shot", "rigl", "set", "soft", "proximal"},
    "logger": {"csv", "tensorboard", "none"},
    "export": {"none", "weights", "blocks"},
}
SMALL = [pair for pair in OPTIONS if pair[0] not in ("recipe", "model", "data", "trainer")]
FITTING = {"gpt": ["data=stdlib_text"]}
"""What an option needs beside it."""


def plain(overrides, folder):
    return compose(overrides, OWN).plain(folder)


def test_the_groups_are_those_of_the_contract():
    assert set(catalog.groups()) == set(GROUPS)
    for group, names in GROUPS.items():
        assert names <= set(catalog.options(group)), group


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids="=".join)
def test_every_option_composes_and_is_checked(group, option, tmp_path):
    chosen = [f"recipe={option}"] if group == "recipe" else ["recipe=small", f"{group}={option}"]
    config = plain([*chosen, *FITTING.get(option, [])], tmp_path)
    check(config)
    assert set(config) == set(GROUPS) | set(SETTINGS)


@pytest.mark.parametrize(("group", "option"), SMALL, ids="=".join)
def test_every_small_option_makes_its_objects(group, option, tmp_path):
    Parts(plain(["recipe=small", f"{group}={option}"], tmp_path)).check_small()


@pytest.mark.parametrize("option", sorted(GROUPS["trainer"] - {"cpu", "gpu"}))
def test_every_trainer_for_several_devices_is_made_for_cpus_too(option, tmp_path):
    cpus = ["trainer.accelerator=cpu", "trainer.devices=4", "trainer.precision=32-true"]
    trainer = Parts(plain(["recipe=small", f"trainer={option}", *cpus], tmp_path)).check_small()
    assert trainer.world_size == 4
    wanted = {"fsdp2": (4, 1), "fsdp2_tp": (2, 2)}
    assert getattr(trainer.strategy, "sizes", None) == wanted.get(option)


@pytest.mark.parametrize("file", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_is_short_and_says_what_it_is_for(file):
    lines = file.read_text("utf-8").splitlines()
    assert catalog.purpose("\n".join(lines)), f"{file} does not say what it is for"
    assert len(lines) <= 40


def test_what_a_recipe_says_about_another_option_is_left_out(tmp_path):
    swapped = plain(["recipe=small", "pattern=nm", "pattern.nm.match=[first.weight]"], tmp_path)
    assert list(swapped["pattern"]) == ["nm"]
    kept = plain(["recipe=small", "schedule=linear", "schedule.final=0.3"], tmp_path)
    assert kept["schedule"]["final"] == 0.3


def test_the_folders_are_links_and_the_wheel_takes_their_files():
    assert (ROOT / "sparse_lightning" / "conf").resolve() == ROOT / "conf"
    assert (ROOT / "sparse_lightning" / "recipes").resolve() == ROOT / "recipes"
    assert (ROOT / "conf" / "recipe").resolve() == ROOT / "recipes"
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert '"conf/**/*.yaml", "recipes/**/*.yaml"' in text
