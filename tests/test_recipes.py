"""Every recipe that lies in the folder runs, through the same function as the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparse_lightning.configuration.catalog import CONF, purpose
from sparse_lightning.configuration.compose import compose
from sparse_lightning.run import run

RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
SMALLER = {"hlb_cifar10": ["model.widths=[16,32,64]", "model.stem=16", "data.batch_size=8", "data.made=64"]}
"""What makes one batch of a recipe cheap, where it is not."""
NEEDS = {"finetune_transformer": "transformers"}


def text_of(recipe: str) -> str:
    return (CONF / "recipe" / f"{recipe}.yaml").read_text("utf-8")


def test_the_recipes_that_are_promised_are_there():
    promised = {"digits_blocks", "digits_filters", "digits_rigl", "gpt_heads", "gpt_2to4", "hlb_cifar10"}
    assert promised | {"finetune_transformer", "sweep"} <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_it_shows(recipe):
    said = purpose(text_of(recipe))
    assert said.endswith("."), f"{recipe}: let the first comment be a sentence on what it shows, not {said!r}"
    assert len(said) < 90, f"{recipe}: {said!r} is too long for a line of --help"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_in_the_page_about_them(recipe):
    page = Path(__file__).parent.parent / "docs" / "recipes.md"
    assert re.search(rf"`{recipe}`", page.read_text("utf-8")), f"docs/recipes.md says nothing about {recipe}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(recipe, tmp_path, monkeypatch):
    if recipe in NEEDS:
        pytest.importorskip(NEEDS[recipe])
    monkeypatch.chdir(tmp_path)
    quick = ["trainer.fast_dev_run=true", "trainer.enable_progress_bar=false", "logger=none"]
    config = compose([f"recipe={recipe}", *quick, *SMALLER.get(recipe, [])]).plain(str(tmp_path / "run"))
    outcome = run(config)
    assert outcome.metric is not None, f"{recipe}: its model logs no metric that it names"
    assert "actual" in outcome.table


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
    outcome = run(compose(overrides).plain(str(tmp_path / "run")))
    assert re.search(r"actual sparsity .* 0\.[45]\d", outcome.table), outcome.table


def test_nine_of_ten_blocks_go_and_the_accuracy_stays(tmp_path, monkeypatch):
    """With the MLP, which is quicker than the transformer of the recipe; `docs/recipes.md` has that one."""
    monkeypatch.chdir(tmp_path)
    model = ["model=digits_mlp", "pattern.blocks.match=[first.weight,second.weight]", "optimizer.lr=0.002"]
    quick = ["trainer.max_epochs=12", "trainer.enable_progress_bar=false", "logger=none", "update_every=10"]
    run(compose(["recipe=digits_blocks", *model, *quick]).plain(str(tmp_path / "run")))
    results = json.loads((tmp_path / "run" / "results.json").read_text("utf-8"))
    dense, sparse = (results[name]["val_accuracy"] for name in ("dense", "sparse"))
    assert dense > 0.96
    assert sparse > dense - 0.02
