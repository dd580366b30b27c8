"""Blocks and scopes where patterns are expected, and strided views written as data."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn

from sparse_lightning import (
    BlockCoupling,
    Blocks,
    BlockSpec,
    Constant,
    LayoutError,
    PatternError,
    ScopeCoupling,
    ScopeSpec,
    Sparsifier,
    SparsityCallback,
    Strided,
    View,
)
from sparse_lightning.app.compose import compose
from sparse_lightning.app.run import run
from sparse_lightning.patterns import resolve, summary
from sparse_lightning.patterns.names import Names


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x))))


def neurons(model):
    specs = [BlockSpec(model.up.weight, (1, -1)), BlockSpec(model.down.weight, (-1, 1))]
    return BlockCoupling(specs, orders=[None, (1, 0)])


def zero_fraction(weight):
    return float((weight == 0).float().mean())


def pairs(weight, name=None):
    """Columns eight apart."""
    rows, k = weight.shape
    return BlockSpec(View(weight, (rows, k // 16, 8, 2), (k, 16, 1, 8)), (1, 1, 1, 2), name=name)


MADE = {
    "BlockSpec": lambda m: BlockSpec(m.up.weight, (4, 4)),
    "BlockCoupling": neurons,
    "ScopeSpec": lambda m: ScopeSpec(pairs(m.up.weight), (1, 1, 4, 1)),
    "ScopeCoupling": lambda m: ScopeCoupling([ScopeSpec(BlockSpec(w.weight, (2, 2))) for w in (m.up, m.down)]),
}


def trained(model, patterns, steps=3):
    """Train with a plain loop at half sparsity; return the Sparsifier, still attached."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(patterns, Constant(0.5), update_every=1)
    sparsifier.attach(model, optimizer, total_steps=steps)
    for _ in range(steps):
        model(torch.randn(4, 16)).square().sum().backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()
    return sparsifier


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("listed", [lambda made: [made], lambda made: {"mine": made}], ids=["list", "mapping"])
def test_a_sparsifier_takes_blocks_and_scopes(kind, listed):
    model = MLP()
    made = MADE[kind](model)
    sparsifier = trained(model, listed(made))
    assert sparsifier.sparsity() == 0.5
    blocks = made.blocks() if kind.startswith("Scope") else [made]
    assert sum(block.nnz() for block in blocks) * 2 == sum(block.numel() for block in blocks)
    label = "mine" if isinstance(listed(made), dict) else "scopes"
    assert sparsifier.sparsities() == {label: 0.5}
    [scope] = sparsifier.scopes.values()
    assert scope is made or scope.blocks()[0] is made


def test_two_of_four_pairs_of_columns_are_kept():
    model = MLP()
    trained(model, [ScopeSpec(pairs(model.up.weight), (1, 1, 4, 1))])
    zero = model.up.weight.detach() == 0
    assert torch.equal(zero[:, :8], zero[:, 8:])
    assert (zero[:, :4].sum(1) == 2).all()


def test_names_are_those_of_the_scope_the_block_or_the_parameter():
    model = MLP()
    given = [
        ScopeSpec(BlockSpec(model.up.weight, (1, -1), name="rows"), name="scope"),
        BlockSpec(model.down.weight, (1, -1), name="block"),
        BlockSpec(model.head.weight, (1, -1)),
        BlockCoupling([BlockSpec(model.head.bias, (1,))]),
    ]
    assert [found.name for found in resolve(given, model)] == ["scope", "block", "head.weight", "head.bias"]
    assert [found.pattern for found in resolve(given, model)] == ["scopes"] * 4


def test_patterns_and_scopes_mix_and_the_first_claim_wins():
    model = MLP()
    found = resolve([neurons(model), Blocks("*.weight", (4, 4))], model)
    assert [(a.pattern, a.name) for a in found] == [("scopes", "up.weight"), ("blocks", "head.weight")]
    labelled = resolve({"mlp": neurons(model), "rest": Blocks("*.weight", (4, 4))}, model)
    assert [a.pattern for a in labelled] == ["mlp", "rest"]
    assert "head.weight" in summary(labelled)


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (lambda m: [Blocks("up.weight", (4, 4)), pairs(m.up.weight)], "already claimed by Blocks"),
        (lambda m: [BlockSpec(m.up.weight, (4, 4)), pairs(m.up.weight)], "already claimed by BlockSpec"),
        (lambda m: [pairs(m.up.weight), pairs(m.up.weight)], "already claimed by BlockSpec"),
        (lambda m: {"a": neurons(m), "b": BlockSpec(m.down.weight, (4, 4))}, "already claimed by BlockCoupling"),
        (lambda m: [BlockSpec(View(m.up.weight, (3, 4), (1, 1)), (1, 1))], "twice"),
        (lambda m: [BlockSpec(nn.Parameter(torch.ones(4, 4)), (2, 2), name="w")], "'w'.*not a parameter of MLP"),
        (lambda m: [m.up.weight], "is not a pattern: pass Coupled, Blocks.*or a BlockSpec"),
        (lambda m: ["*.weight"], "is not a pattern"),
    ],
)
def test_what_can_not_be_attached_is_refused(patterns, text):
    model = MLP()
    with pytest.raises(PatternError, match=text):
        resolve(patterns(model), model)


class Trains(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = MLP()

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(16, 16), batch_size=4)


def test_the_callback_takes_scopes_and_resumes(tmp_path):
    def callback(model):
        scope = ScopeSpec(pairs(model.net.up.weight), (1, 1, 4, 1), name="2:4 apart")
        patterns = {"apart": scope, "rest": Blocks("*head.weight", (2, 2))}
        return SparsityCallback(patterns, Constant(0.5), update_every=1)

    quiet = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    model = Trains()
    trainer = L.Trainer(max_epochs=1, callbacks=[first := callback(model)], enable_checkpointing=False, **quiet)
    trainer.fit(model)
    assert set(first.state_dict()["masks"]) == {"2:4 apart", "net.head.weight"}
    assert {"sparsity/apart", "sparsity/rest"} <= set(trainer.callback_metrics)
    assert zero_fraction(model.net.up.weight) == 0.5
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    model = Trains()
    other = callback(model)
    assert other.state_key == first.state_key
    L.Trainer(max_epochs=2, callbacks=[other], enable_checkpointing=False, **quiet).fit(
        model, ckpt_path=tmp_path / "run.ckpt", weights_only=True
    )
    assert zero_fraction(model.net.up.weight) == 0.5


APART = {"split": [[-1], [-1, 2, 8]], "permute": [0, 1, 3, 2]}


def test_a_strided_pattern_is_the_view_of_the_specification():
    model = MLP()
    found = resolve([Strided(["up.weight", "down.weight"], APART, (1, 1, 1, 2), (1, 1, 4, 1))], model)
    for attachment, weight in zip(found, (model.up.weight, model.down.weight), strict=True):
        assert attachment.scope.blocks()[0] == pairs(weight)
        assert attachment.scope.members()[0].shape == (1, 1, 4, 1)
    strides = {"shape": [32, 1, 8, 2], "stride": [16, 16, 1, 8], "offset": 0}
    [same] = resolve([Strided("up.weight", strides, (1, 1, 1, 2), (1, 1, 4, 1))], model)
    assert same.scope.blocks() == [pairs(model.up.weight)]
    del strides["offset"]
    assert Strided("up.weight", strides, (1,)).resolve(Names(model))[0].scope.blocks()[0].view.offset == 0


def test_a_strided_pattern_from_yaml_needs_no_conversion():
    given = OmegaConf.create({"view": {**APART, "shape": None}, "block": [1, 1, 1, 2], "scope": [1, 1, 4, 1]})
    pattern = Strided("up.weight", **given)
    assert pattern == Strided("up.weight", APART, (1, 1, 1, 2), (1, 1, 4, 1))
    assert hash(pattern) == hash(Strided("up.weight", APART, (1, 1, 1, 2), (1, 1, 4, 1)))
    assert "permute" in str(pattern)


def test_a_mapping_of_patterns_is_instantiated_by_hydra():
    strided = {"_target_": "sparse_lightning.Strided", "match": "up.weight", "view": APART}
    tiles = {"_target_": "sparse_lightning.Blocks", "match": "down.weight", "shape": [4, 4]}
    callback = instantiate(
        {
            "_target_": "sparse_lightning.SparsityCallback",
            "_convert_": "partial",
            "patterns": {"apart": {**strided, "block": [1, 1, 1, 2], "scope": [1, 1, 4, 1]}, "tiles": tiles},
            "schedule": {"_target_": "sparse_lightning.Constant", "final": 0.5},
        }
    )
    found = resolve(callback.sparsifier.configuration.patterns, MLP())
    assert [(a.pattern, a.name) for a in found] == [("apart", "up.weight"), ("tiles", "down.weight")]


@pytest.mark.parametrize(
    ("view", "text"),
    [
        ({"splits": [[-1]]}, "no 'splits': did you mean 'split'"),
        ({"shape": [4]}, "pass shape and stride"),
        ({"shape": [4], "stride": [1], "split": [[-1]]}, "shape, split, stride"),
        ({"permute": [0]}, "pass shape and stride"),
        ({}, "no keys"),
        ([4, 4], "is not a view"),
    ],
)
def test_a_view_that_is_not_complete_is_refused(view, text):
    with pytest.raises(PatternError, match=text):
        Strided("*", view, (1,))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("up.weight", {"split": [[-1], [-1, 5]]}, (1,)), r"does not fit up\.weight of shape \(32, 16\).*split into"),
        (("up.bias", APART, (1,)), r"splits 2 dimensions of a parameter of shape \(32,\)"),
        (("up.weight", {"split": [[-1], [-1]], "permute": [0, 0]}, (1,)), "does not permute"),
        (("up.weight", {"shape": [33], "stride": [16]}, (1,)), "outside of its parameter"),
        (("up.weight", APART, (1, 1, 3)), r"block \(1, 1, 3\) does not fit .* is not a multiple of 3"),
        (("nothing", APART, (1,)), "matches no parameter"),
    ],
)
def test_a_view_that_does_not_fit_is_refused_with_the_name(arguments, text):
    with pytest.raises(PatternError, match=text):
        resolve([Strided(*arguments)], MLP())


def test_a_parameter_that_can_not_be_pruned_is_refused_by_name():
    model = nn.Module()
    model.codes = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(PatternError, match=r"codes of shape \(4, 4\).*torch\.int8"):
        resolve([Blocks("codes", (2, 2))], model)
    with pytest.raises(LayoutError, match=r"torch\.int8"):
        BlockSpec(model.codes, (2, 2))


def test_the_recipe_trains_coupled_two_of_four(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["trainer.max_epochs=2", "trainer.enable_progress_bar=false", "logger=none", "compare_dense=false"]
    run(compose(["recipe=coupled_2to4", "update_every=5", "export=weights", *quick]).plain(str(tmp_path / "run")))
    [file] = (tmp_path / "run").rglob("model.safetensors")
    weights = load_file(file)
    for name in ("first.weight", "second.weight"):
        zero = weights[name].unflatten(1, (-1, 2, 8)) == 0
        assert torch.equal(zero[:, :, 0], zero[:, :, 1]), "columns eight apart are pruned together"
        assert (zero[:, :, 0].unflatten(2, (2, 4)).sum(-1) == 2).all(), "two of every four pairs"
