"""Every recipe of the folder runs, through the same function as the command line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_data import save_bert, write_fashion, write_labelled

from sparse_lightning.app.catalog import CONF, purpose
from sparse_lightning.app.check import check
from sparse_lightning.app.compose import compose
from sparse_lightning.app.run import run
from sparse_lightning.errors import ConfigError

RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
SMALLER = {
    "hlb_cifar10": ["model.widths=[16,32,64]", "model.stem=16", "data.batch_size=8", "data.made=64"],
    "prune_once": ["model.width=32", "model.depth=2", "data.size=20000", "data.context=32", "data.batch_size=4"],
}
"""Overrides that make one batch of a recipe cheap."""
PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
NEEDS = {"finetune_transformer": "transformers", "finetune_encoder": "transformers"}
FILES = {
    "fashion_blocks": lambda folder: [f"data.folder={write_fashion(folder)}", "model.hidden=32"],
    "fashion_filters": lambda folder: [f"data.folder={write_fashion(folder)}", "model.width=8", "model.hidden=16"],
    "finetune_encoder": lambda folder: [f"data.path={write_labelled(folder / 'texts.tsv')}", *FEW_TEXTS],
}
"""For each recipe on data of the user's: writes small files, and returns the overrides that name them."""
FEW_TEXTS = ["data.labels=3", "data.val_texts=10"]


def test_the_recipes_that_are_promised_are_there():
    promised = {"digits_blocks", "digits_filters", "digits_rigl", "gpt_heads", "gpt_2to4", "hlb_cifar10"}
    assert promised | {"finetune_transformer", "sweep"} <= set(RECIPES)


@pytest.mark.parametrize(
    ("recipe", "smaller"),
    [
        *(pytest.param(recipe, SMALLER.get(recipe, []), id=recipe) for recipe in RECIPES),
        pytest.param("prune_once", [], marks=pytest.mark.exhaustive, id="prune_once, as large as it is"),
    ],
)
def test_a_recipe_is_documented_and_runs(recipe, smaller, tmp_path, monkeypatch):
    text = purpose((CONF / "recipe" / f"{recipe}.yaml").read_text("utf-8"))
    assert text.endswith("."), f"{recipe}: the first comment should be a sentence on what it shows, not {text!r}"
    assert len(text) < 90, f"{recipe}: {text!r} is too long for a line of --help"
    assert f"| `{recipe}` |" in PAGE.read_text("utf-8"), f"docs/recipes.md has no row for {recipe}"
    if recipe in NEEDS:
        pytest.importorskip(NEEDS[recipe])
    monkeypatch.chdir(tmp_path)
    quick = ["trainer.fast_dev_run=true", "trainer.enable_progress_bar=false", "logger=none"]
    files = FILES.get(recipe, lambda folder: [])(tmp_path)
    result = run(compose([f"recipe={recipe}", *quick, *smaller, *files]).plain(str(tmp_path / "run")))
    written = json.loads((tmp_path / "run" / "results.json").read_text("utf-8"))
    assert result.metric in written["sparse"].values(), f"{recipe}: its model logs no metric that it names"
    assert written["parameters"], f"{recipe}: its patterns match nothing"
    for row in written["parameters"]:
        assert re.search(rf"^{re.escape(row['parameter'])} .* {row['actual']:.4f}$", result.table, re.MULTILINE), row


def test_a_hugging_face_model_of_ones_own_runs_with_a_text_of_ones_own(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from test_data import word_tokenizer

    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "llama")
    word_tokenizer(tmp_path / "llama")
    (tmp_path / "text.txt").write_text("ab cd " * 400)
    own = [f"model.path={tmp_path}/llama", f"data.path={tmp_path}/text.txt", "data.context=8", "data.batch_size=4"]
    short = ["trainer.limit_train_batches=6", "trainer.limit_val_batches=2", "update_every=1", "compare_dense=false"]
    overrides = ["recipe=finetune_transformer", *own, *short, "trainer.enable_progress_bar=false"]
    result = run(compose(overrides).plain(str(tmp_path / "run")))
    assert re.search(r"actual sparsity .* 0\.[45]\d", result.table), result.table

    run(compose([*overrides, "ckpt_path=last", "export=weights"]).plain(str(tmp_path / "run")))
    trained = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, weight in load_file(tmp_path / "run" / "model.safetensors").items():
        assert torch.equal(weight, trained[name]), f"{name} is exported as it was before training"


def test_an_encoder_of_ones_own_is_fine_tuned_on_texts_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [f"model.path={save_bert(tmp_path / 'bert')}", f"data.path={write_labelled(tmp_path / 'texts.tsv')}"]
    quick = ["trainer.max_epochs=9", "trainer.enable_progress_bar=false", "update_every=1", "optimizer.lr=0.001"]
    overrides = ["recipe=finetune_encoder", *paths, *FEW_TEXTS, "data.batch_size=10", *quick, "compare_dense=false"]
    result = run(compose(overrides).plain(str(tmp_path / "run")))
    assert re.search(r"actual sparsity .* 0\.[45]\d", result.table), result.table
    assert result.metric == 1.0, "the label is a word of each text"


def test_what_a_recipe_lacks_is_named_with_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for recipe, given, wanted in (
        ("fashion_blocks", "data.folder=none_here", "apt-get install dataset-fashion-mnist"),
        ("finetune_encoder", "data.path=none_here", "apt-cache dumpavail"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            run(compose([f"recipe={recipe}", given]).plain(str(tmp_path / "run")))


def test_a_pretrained_model_is_fine_tuned_without_a_dense_baseline():
    assert compose(["recipe=finetune_transformer"]).plain(".")["compare_dense"] is False
    assert compose(["recipe=finetune_transformer", "compare_dense=true"]).plain(".")["compare_dense"] is True


def documented_commands():
    """The commands of docs/many-devices.md that fine-tune, one line each."""
    text = (PAGE.parent / "many-devices.md").read_text("utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if "recipe=finetune_transformer" in line]


@pytest.mark.parametrize("command", documented_commands())
def test_a_documented_command_for_many_devices_composes(command):
    overrides = [word for word in shlex.split(command) if "=" in word]
    config = compose(overrides).plain(".")
    check(config)
    trainer = config["trainer"]
    assert trainer["strategy"]["_target_"] == "sparse_lightning.callbacks.strategy.Sharded"
    started = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", command)
    assert (trainer["num_nodes"], trainer["devices"]) == (tuple(map(int, started.groups())) if started else (1, 8))


def test_the_documented_commands_are_for_one_machine_and_for_two():
    assert [command.split()[0] for command in documented_commands()] == ["sparse-lightning", "torchrun"]


def test_at_90_percent_sparsity_the_accuracy_stays(tmp_path, monkeypatch):
    """With the MLP, which is quicker than the transformer of the recipe; `docs/recipes.md` has that one."""
    monkeypatch.chdir(tmp_path)
    model = ["model=digits_mlp", "pattern.blocks.match=[first.weight,second.weight]", "optimizer.lr=0.002"]
    quick = ["trainer.max_epochs=12", "trainer.enable_progress_bar=false", "logger=none", "update_every=10"]
    run(compose(["recipe=digits_blocks", *model, *quick]).plain(str(tmp_path / "run")))
    results = json.loads((tmp_path / "run" / "results.json").read_text("utf-8"))
    dense, sparse = (results[name]["val_accuracy"] for name in ("dense", "sparse"))
    assert dense > 0.96
    assert sparse > dense - 0.02
