"""The callback from YAML in a Hydra application of the user's, in the layout of lightning-hydra-template.

The template has a group `callbacks` whose options are mappings of objects, and instantiates each in a loop, without
`_convert_`: Hydra passes lists and mappings as OmegaConf's own, and OmegaConf wraps dataclass instances in them.
"""

from __future__ import annotations

import pickle
from copy import deepcopy

import hydra
import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.demos.boring_classes import RandomDataset
from omegaconf import OmegaConf
from torch import nn

from sparse_lightning import Coupled, Join, Linear, Sparsifier, SparsityCallback
from sparse_lightning.patterns import as_list

PATTERNS = {
    # the class: its arguments, and what is pruned to half by them
    "Blocks": ({"match": ["up.weight", "down.weight"], "shape": [4, 4], "scope": [2, 2]}, "up.weight"),
    "NM": ({"match": "up.weight"}, "up.weight"),
    "Filters": ({"match": "conv"}, "conv.weight"),
    "Neurons": ({"up": "up", "down": "down"}, "up.weight"),
    "Heads": ({"q": "q", "k": "k", "v": "v", "out": "out", "head_dim": 4}, "q.weight"),
    "Strided": (
        {"match": "up.weight", "view": {"split": [[-1], [-1, 2, 4]], "permute": [0, 1, 3, 2]}, "block": [1, 1, 1, 2]},
        "up.weight",
    ),
}
MAGNITUDE = {"_target_": "sparse_lightning.Magnitude"}
SCHEDULE = {"_target_": "sparse_lightning.Constant", "final": 0.5}


class Model(L.LightningModule):
    """Has something for each pattern."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.lr = lr
        self.conv = nn.Conv1d(1, 8, 1)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def training_step(self, batch, batch_idx):
        x = self.conv(batch[:, None]).mean(2)
        x = self.out(self.q(x) * self.k(x) + self.v(x))
        return self.down(self.up(x).relu()).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Data(L.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(8, 16), self.batch_size)


def node(name):
    return {"_target_": f"sparse_lightning.{name}", **PATTERNS[name][0]}


def callback_of(patterns, **others):
    given = {
        "patterns": patterns,
        "schedule": SCHEDULE,
        "update_every": 1,
        "criterion": MAGNITUDE,
        **others,
    }
    return instantiate(OmegaConf.create({"_target_": "sparse_lightning.SparsityCallback", **given}))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("in_form", [lambda made: [made], lambda made: {"mine": made}], ids=["list", "mapping"])
def test_every_pattern_works_from_yaml_without_convert(name, in_form):
    """As with plain lists: the same patterns, blocks and names in checkpoints."""
    made = callback_of(in_form(node(name)))
    plain = instantiate(node(name), _convert_="all")
    same = SparsityCallback(in_form(plain), Linear(0.5))
    assert made.sparsifier.configuration.patterns == same.sparsifier.configuration.patterns == in_form(plain)
    assert made.state_key == same.state_key
    model = Model()
    made.sparsifier.attach(model, model.configure_optimizers(), 4)
    made.sparsifier.update()
    made.sparsifier.hold()
    assert (model.get_parameter(PATTERNS[name][1]) == 0).float().mean() == 0.5
    assert pickle.loads(pickle.dumps(made.sparsifier.configuration)).patterns == in_form(plain)


def test_a_sparsifier_and_lists_of_schedules_work_too():
    parts = [{"_target_": "sparse_lightning.Linear", "final": final, "begin": 0} for final in (0.5, 0.75)]
    steps = {"_target_": "sparse_lightning.Steps", "milestones": {2: 0.5, 3: 0.8}}
    joined = {"_target_": "sparse_lightning.Join", "schedules": [*parts, steps], "boundaries": [0.25, 0.5]}
    made = instantiate(
        OmegaConf.create({"_target_": "sparse_lightning.Sparsifier", "patterns": [node("Blocks")], "schedule": joined})
    )
    assert isinstance(made, Sparsifier)
    assert made.configuration.schedule == Join([*(instantiate(p) for p in parts), instantiate(steps)], [0.25, 0.5])


def test_overrides_of_a_budget_and_other_parts_are_plain_enough_to_copy():
    budget = {"_target_": "sparse_lightning.Uniform", "overrides": {"up.weight": 0.25}}
    criterion = {"_target_": "sparse_lightning.EMA", "criterion": MAGNITUDE}
    method = {"_target_": "sparse_lightning.SET"}
    made = callback_of([node("Blocks")], budget=budget, criterion=criterion, method=method).sparsifier
    model = Model()
    made.attach(model, model.configure_optimizers(), 4)
    made.update()
    assert made.sparsities()
    assert deepcopy(made).configuration.budget == made.configuration.budget


TEMPLATE = {
    "train.yaml": """
        # @package _global_
        defaults:
          - _self_
          - data: mine
          - model: mine
          - callbacks: default
          - trainer: default
        seed: 12345
        """,
    "data/mine.yaml": "_target_: test_hydra_application.Data\nbatch_size: 4\n",
    "model/mine.yaml": "_target_: test_hydra_application.Model\nlr: 0.1\n",
    "callbacks/default.yaml": """
        defaults:
          - model_summary
          - sparsity
          - sparse_checkpoint
          - _self_
        model_summary:
          max_depth: -1
        """,
    "callbacks/model_summary.yaml": """
        model_summary:
          _target_: lightning.pytorch.callbacks.RichModelSummary
          max_depth: 1
        """,
    "callbacks/sparse_checkpoint.yaml": """
        sparse_checkpoint:
          _target_: sparse_lightning.SparseModelCheckpoint
          monitor: sparsity/actual
          mode: max
        """,
    "callbacks/sparsity.yaml": """
        sparsity:
          _target_: sparse_lightning.SparsityCallback
          patterns:
            - _target_: sparse_lightning.Blocks
              match: [q.weight, k.weight]
              shape: [4, 4]
            - _target_: sparse_lightning.Neurons
              up: up
              down: down
          schedule:
            _target_: sparse_lightning.Linear
            final: 0.5
            begin: 0
            end: 1.0
          update_every: 1
        """,
    "callbacks/by_group.yaml": """
        defaults:
          - /sparse_lightning/pattern@sparsity.patterns: blocks
          - /sparse_lightning/schedule@sparsity.schedule: cubic
        sparsity:
          _target_: sparse_lightning.SparsityCallback
          patterns:
            blocks:
              match: up.weight
          schedule:
            final: 0.5
        """,
    "trainer/default.yaml": """
        _target_: lightning.pytorch.trainer.Trainer
        default_root_dir: ${oc.env:TEMPLATE_FOLDER}
        accelerator: cpu
        max_epochs: 1
        enable_progress_bar: false
        logger: false
        """,
}


def instantiate_callbacks(config):
    """As the template does it."""
    return [instantiate(found) for found in config.values() if "_target_" in found]


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Compose and train as the template's train.py does."""
    for name, text in TEMPLATE.items():
        file = tmp_path / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        file.write_text("\n".join(line[indent:] for line in lines))
    monkeypatch.setenv("TEMPLATE_FOLDER", str(tmp_path))

    def train(*overrides):
        with hydra.initialize_config_dir(str(tmp_path / "configs"), version_base="1.3"):
            config = hydra.compose("train.yaml", list(overrides))
        L.seed_everything(config.seed, workers=True, verbose=False)
        data, model = instantiate(config.data), instantiate(config.model)
        callbacks = instantiate_callbacks(config.callbacks)
        trainer = instantiate(config.trainer, callbacks=callbacks)
        trainer.fit(model=model, datamodule=data)
        return model, trainer

    return train


def test_the_layout_of_the_template_trains_with_the_callback_from_yaml(template):
    model, trainer = template()
    for name in ("q.weight", "up.weight", "down.weight"):
        assert (model.get_parameter(name) == 0).float().mean() == 0.5
    assert trainer.checkpoint_callback.best_model_path
    model, _ = template(
        "callbacks.sparsity.schedule.final=0.25",
        "callbacks.sparsity.patterns.0.match=q.weight",
        "trainer.default_root_dir=${oc.env:TEMPLATE_FOLDER}/second",
    )
    assert [(model.get_parameter(name) == 0).float().mean() for name in ("q.weight", "k.weight")] == [0.25, 0]


def test_the_groups_of_the_plugin_are_mappings_of_patterns(template):
    model, trainer = template("callbacks=by_group", "callbacks.sparsity.schedule.end=0.9")
    assert (model.up.weight == 0).float().mean() == 0.5
    assert "sparsity/blocks" in trainer.callback_metrics


def test_units_of_the_traced_model_are_found_by_target():
    node = {"_target_": "sparse_lightning.Coupled", "match": ["*up*"], "exclude": "down*"}
    for patterns in ([node], {"units": node}):
        callback = callback_of(patterns)
        [pattern] = as_list(callback.sparsifier.configuration.patterns)
        assert isinstance(pattern, Coupled)
        assert tuple(pattern.match) == ("*up*",)
