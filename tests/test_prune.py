"""prune: a trained model in one call, layer by layer, with and without compensation, in one process and in two."""

from __future__ import annotations

import copy
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from small_nets import Net, batches
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sparse_lightning import (
    EMA,
    NM,
    OBS,
    AdamFisher,
    Blocks,
    Constant,
    FlowError,
    Gradient,
    Heads,
    Magnitude,
    Movement,
    Neurons,
    PatternError,
    Random,
    Refit,
    SparseLightningError,
    Sparsifier,
    SparsityCallback,
    SparsityError,
    Taylor,
    Wanda,
    prune,
)
from sparse_lightning.models import GPT

NEURONS = [Neurons("0", "2")]


def trained_mlp(hidden=128, steps=200):
    """Return a network of two layers that has learned something."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 8))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        x = torch.randn(128, 16)
        loss = (net(x) - torch.sin(x[:, :8] * 2) - x[:, 8:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def trained_gpt(width=32, depth=2, steps=25):
    """Return a small GPT that has read some of this file, and its tokens."""
    torch.manual_seed(2)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = GPT(width=width, depth=depth, heads=4, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    draw = torch.Generator().manual_seed(0)
    tokens = [
        torch.stack([text[i : i + 64] for i in torch.randint(len(text) - 64, (8,), generator=draw)])
        for _ in range(steps)
    ]
    for window in tokens:
        loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), tokens


def by_calling(model, batch):
    """Run a LightningModule without its training step."""
    return model(batch)


def errors(model, patterns, seen, held_back):
    """Return the output error on data that was held back, by criterion, without and with Refit."""
    with torch.no_grad():
        wanted = model(held_back)
    found = {}
    for criterion in (Magnitude(), Wanda(), OBS()):
        pair = []
        for compensation in (None, Refit()):
            pruned = copy.deepcopy(model)
            prune(pruned, patterns, 0.5, seen, criterion, compensation, step=by_calling, progress=False)
            with torch.no_grad():
                pair.append(float((pruned(held_back) - wanted).norm()))
        found[type(criterion).__name__] = pair
    return found


def check_errors(found):
    """The laws of compensation on a whole model."""
    for name in ("Magnitude", "Wanda"):
        plain, refitted = found[name]
        assert refitted <= plain / 3, f"{name}: {refitted} with Refit, {plain} without"
        assert found["OBS"][1] <= refitted, f"OBS leaves {found['OBS'][1]}, {name} {refitted}"


def test_refit_leaves_a_third_of_the_output_error_of_an_mlp_or_less():
    seen, held_back = [torch.randn(256, 16) for _ in range(8)], torch.randn(500, 16)
    check_errors(errors(trained_mlp(), NEURONS, seen, held_back))


@pytest.mark.parametrize("criterion", [Magnitude(), Wanda()], ids=lambda c: type(c).__name__)
def test_refit_is_the_best_that_kept_units_allow(criterion):
    """Narrow layers lose more: at 64 units, weights that are fitted to the held-back data itself are hardly better."""
    model, held_back = trained_mlp(64), torch.randn(2000, 16)
    pruned = copy.deepcopy(model)
    [mask] = prune(pruned, NEURONS, 0.5, list(torch.randn(16, 256, 16)), criterion, Refit(), progress=False).values()
    with torch.no_grad():
        wanted, hidden = model(held_back), model[:2](held_back)[:, ~mask.flatten()]
        ones = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
        best = (ones @ torch.linalg.lstsq(ones, wanted).solution - wanted).norm()
        assert (pruned(held_back) - wanted).norm() <= 1.05 * best


def test_refit_leaves_a_third_of_the_output_error_of_a_gpt_or_less():
    model, tokens = trained_gpt()
    neurons = [Neurons("blocks.*.mlp.up", "blocks.*.mlp.down")]
    check_errors(errors(model, neurons, tokens[:12], torch.cat(tokens[12:16])))


@pytest.mark.exhaustive
def test_refit_leaves_a_third_of_the_output_error_of_the_gpt_of_the_recipe_or_less():
    model, tokens = trained_gpt(width=128, depth=3, steps=100)
    neurons = [Neurons("blocks.*.mlp.up", "blocks.*.mlp.down")]
    check_errors(errors(model, neurons, tokens[:24], torch.cat(tokens[24:32])))


def test_inputs_come_from_the_layers_that_are_already_pruned():
    """Two layers, listed in the wrong order; the plain computation prunes the first, then observes the second."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double(), torch.randn(50, 8).double()
    plain = copy.deepcopy(model)
    columns = [Blocks("2.weight", (-1, 1)), Blocks("0.weight", (-1, 1))]
    masks = prune(model, columns, 0.5, [x[:20], x[20:]], Wanda(), progress=False)
    hidden = x
    for i in (0, 2):
        weight = plain[i].weight.detach()
        scores = (weight.abs() * hidden.norm(dim=0)).sum(0)
        pruned = scores <= scores.kthvalue(4).values
        assert torch.equal(masks[f"{i}.weight"].flatten(), pruned)
        weight[:, pruned] = 0.0
        hidden = plain[: i + 2](x).detach()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert list(masks) == ["2.weight", "0.weight"], "masks are in the order of the patterns"


CASES = {
    "units by gradients": ([Neurons("up", "down")], Taylor()),
    "tiles by a running sum": ([Blocks(["up.weight", "down.weight"], (4, 4))], Movement()),
    "tiles by a moving average": ([Blocks("up.weight", (4, 4))], EMA(Gradient(), 0.5)),
    "groups": ([NM(["up.weight", "down.weight"])], None),
    "units at random": ([Neurons("up", "down")], Random()),
    "by name": ([Neurons("up", "down")], "magnitude"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compensation", [None, Refit()], ids=["plain", "refit"])
def test_a_lightning_module_is_pruned_and_left_as_it_was(case, compensation):
    patterns, criterion = CASES[case]
    model = Net()
    model.norm.eval()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = prune(model, patterns, 0.5, batches(3), criterion, compensation, progress=False)
    assert all(mask.double().mean() == 0.5 for mask in masks.values())
    assert float((model.down.weight == 0).double().mean()) == (0.0 if case.endswith("average") else 0.5)
    assert (model.training, model.norm.training, model.up.training) == (True, False, True)
    assert torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight))
    assert not any(module._forward_pre_hooks for module in model.modules()), "a hook is left behind"
    assert list(before) == list(model.state_dict())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed - {"up.weight", "up.bias", "down.weight", "down.bias"} == set()


def test_gradients_are_the_mean_over_batches():
    model, data = Net(), list(batches(3))
    plain = copy.deepcopy(model)
    for x, y in data:
        nn.functional.mse_loss(plain(x), y).backward()
    scores = (plain.up.weight * plain.up.weight.grad).view(8, 4, 4, 4).sum((1, 3)).abs()
    masks = prune(model, [Blocks("up.weight", (4, 4))], 0.25, iter(data), Taylor(), progress=False)
    wanted = torch.zeros(32, dtype=torch.bool)
    wanted[scores.flatten().argsort()[:8]] = True
    assert torch.equal(masks["up.weight"].flatten(), wanted)


def test_masks_are_taken_up_by_what_trains_the_model():
    model = Net()
    tiles = [Neurons("up", "down")]
    masks = prune(model, tiles, 0.5, batches(3), compensation=Refit(), progress=False)
    [pruned] = [mask.flatten() for mask in masks.values()]
    sparsity = SparsityCallback(tiles, Constant(0.5), masks=masks)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(max_epochs=1, callbacks=[sparsity], logger=False, accelerator="cpu", limit_val_batches=0, **quiet).fit(
        model
    )
    for name, mask in masks.items():
        assert torch.equal(sparsity.sparsifier.masks[name], mask)
    assert (model.up.weight[pruned] == 0).all()
    assert (model.down.weight[:, pruned] == 0).all()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = Sparsifier(tiles, 0.5, masks=masks)
    sparsifier.attach(model, optimizer)
    assert sparsifier.sparsity() == 0.5


def test_heads_of_a_transformer_of_hugging_face_style_batches():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = GPT(width=32, depth=1, heads=4, context=16)

        def forward(self, tokens, labels=None):
            logits = self.attn(tokens)
            loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"logits": logits, "loss": loss}

    model, tokens = Attends(), torch.randint(256, (4, 16))
    seen = [{"tokens": tokens, "labels": tokens}] * 2
    patterns = [Heads("attn.blocks.0.attn"), Neurons("attn.blocks.*.mlp.up", "attn.blocks.*.mlp.down")]
    masks = prune(model, patterns, 0.5, seen, Taylor(), Refit(), progress=False)
    assert [int(mask.sum()) for mask in masks.values()] == [2, 64]


def test_what_is_wrong_is_refused_before_anything_is_pruned(capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SparsityError, match=r"sparsity=1\.5 is out of range"):
        prune(model, NEURONS, 1.5, [])
    for wrong in ("0.5", None, True, float("nan")):
        with pytest.raises(SparsityError, match=f"sparsity={wrong!r} is out of range"):
            prune(model, NEURONS, wrong, [])
    meta = copy.deepcopy(model).to("meta")
    with pytest.raises(SparseLightningError, match=r"0 \(neurons\) is on the meta device"):
        prune(meta, NEURONS, 0.5, [torch.zeros(2, 4)])
    with pytest.raises(PatternError, match=r"'nothing' matches no parameter"):
        prune(model, [Blocks("nothing", (2, 2))], 0.5, [torch.zeros(2, 4)])
    with pytest.raises(SparsityError, match=r"tensor of shape \(6, 4\), whose rows .*: pass a list of batches"):
        prune(model, NEURONS, 0.5, torch.zeros(6, 4))
    with pytest.raises(SparsityError, match=r"one mapping with the keys \['x'\].*: pass a list of batches"):
        prune(model, NEURONS, 0.5, {"x": torch.zeros(6, 4)})
    with pytest.raises(SparseLightningError, match="batches is empty"):
        prune(model, NEURONS, 0.5, [])
    with pytest.raises(SparseLightningError, match="returns no loss for a batch: pass step"):
        prune(model, NEURONS, 0.5, [torch.zeros(2, 4)], Taylor())
    with pytest.raises(FlowError, match=r"optimizer\.exp_avg_sq of 0 \(neurons\) is missing"):
        prune(model, NEURONS, 0.5, [torch.zeros(2, 4)], AdamFisher())
    with pytest.raises(SparseLightningError, match=r"scores of 0 \(neurons\) are not finite"):
        prune(model, NEURONS, 0.5, [torch.full((2, 4), torch.nan)], Wanda())
    model[0].weight.requires_grad_(False)
    with pytest.raises(FlowError, match=r"0\.weight has no gradient: it is frozen"):
        prune(model, NEURONS, 0.5, [torch.ones(2, 4)], Taylor(), step=lambda net, x: net(x).sum())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    capsys.readouterr()
    prune(model, NEURONS, 0.5, [torch.ones(2, 4)])
    assert "prune: 100%" in capsys.readouterr().err


class Stream:
    """Batches that can be read once: a second loop continues the first, as those of sockets and queues do."""

    def __init__(self, batches):
        self._left = iter(batches)

    def __iter__(self):
        yield from self._left


class StreamDataset(Stream, IterableDataset):
    """The same as a data set of torch."""


FORMS = {
    "tuples with labels": lambda data: [(x, torch.zeros(len(x))) for x in data],
    "a loader": lambda data: DataLoader(TensorDataset(torch.cat(data)), batch_size=len(data[0])),
    "a generator": lambda data: (x for x in data),
    "a stream": Stream,
    "a loader of a stream": lambda data: DataLoader(StreamDataset(data), batch_size=None),
    "keywords": lambda data: [{"input": x} for x in data],
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_any_form_are_all_read_for_each_scope(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    data = [torch.randn(20, 8) + i for i in range(3)]
    plain, patterns = copy.deepcopy(model), [Neurons("0", "2"), Neurons("2", "4")]
    wanted = prune(plain, patterns, 0.5, data, Wanda(), Refit(), progress=False)
    found = prune(model, patterns, 0.5, FORMS[form](data), Wanda(), Refit(), progress=False)
    assert all(torch.equal(found[name], mask) for name, mask in wanted.items())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.parametrize("criterion", [Wanda(), Taylor()], ids=lambda c: type(c).__name__)
def test_modes_statistics_and_random_numbers_stay_as_they_were(criterion):
    torch.manual_seed(0)
    norm, drop = nn.BatchNorm1d(16), nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), drop, nn.Linear(16, 4)).bfloat16()
    data = [torch.randn(20, 8).bfloat16() for _ in range(3)]
    model[3].eval()
    before, numbers = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    options = {"step": lambda net, x: net(x).float().square().mean(), "progress": False}
    prune(model, [Neurons("0", "4")], 0.5, data, criterion, Refit(), **options)
    assert [module.training for module in model] == [True, True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model[4].weight.dtype == torch.bfloat16
    assert int((model[4].weight == 0).all(0).sum()) == 8
    with pytest.raises(RuntimeError, match=r"size of tensor|shapes cannot be multiplied"):
        prune(model, [Neurons("0", "4")], 0.75, [data[0], data[0][:, :3]], criterion, **options)
    assert [module.training for module in model] == [True, True, True, False, True]
    assert not any(module._forward_pre_hooks for module in model), "a hook is left behind"


@pytest.mark.parametrize("criterion", [Wanda(), OBS(), Magnitude()], ids=lambda c: type(c).__name__)
def test_at_a_sparsity_of_zero_nothing_changes_and_at_one_nothing_is_left(criterion):
    model, data = trained_mlp(16, steps=1), [torch.randn(64, 16)]
    before = copy.deepcopy(model.state_dict())
    [mask] = prune(model, NEURONS, 0, data, criterion, Refit(), progress=False).values()
    assert not mask.any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    [mask] = prune(model, NEURONS, 1, data, criterion, Refit(), progress=False).values()
    assert mask.all()
    assert not model[2].weight.any()
    assert torch.isfinite(model(data[0])).all()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_a_weight_that_two_layers_share_is_pruned_for_both_and_not_compensated_for_one():
    model, data, tiles = Tied(), [torch.randn(20, 8)], [Blocks("first.weight", (4, 4))]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PatternError, match=r"first\.weight is shared by first and second, and Refit.*: exclude it"):
        prune(model, tiles, 0.5, data, Wanda(), Refit(), progress=False)
    with pytest.raises(PatternError, match=r"first\.weight is shared by first and second, and Refit"):
        Sparsifier(tiles, 0.5, compensation=Refit()).attach(model, torch.optim.SGD(model.parameters(), 0.1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    prune(model, tiles, 0.5, data, Wanda(), progress=False)
    assert model.second.weight is model.first.weight
    assert int((model.second.weight == 0).sum()) == 32


class OneArgument(Net):
    """Its training step takes no index."""

    def training_step(self, batch):
        return {"loss": super().training_step(batch, 0)}


def test_training_steps_of_any_signature_are_made_and_those_that_optimize_raise_an_error():
    [mask] = prune(OneArgument(), [Neurons("up", "down")], 0.5, batches(2), Taylor(), progress=False).values()
    assert int(mask.sum()) == 16
    model = Net()
    model.automatic_optimization = False
    with pytest.raises(SparseLightningError, match=r"Net has automatic_optimization=False.*: pass step"):
        prune(model, [Neurons("up", "down")], 0.5, batches(2), progress=False)


SHARDED = [
    ([Neurons("up", "down")], OBS(), Refit()),
    ([Blocks(["up.weight", "down.weight"], (4, 4))], Wanda(), Refit()),
    ([NM("down.weight")], Magnitude(), Refit()),
    ([Neurons("up", "down")], Taylor(), None),
]


def shard_and_prune(rank, folder, wanted):
    """Prune a model in shards, where each rank has half of the batches."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for (patterns, criterion, compensation), (masks, weights) in zip(SHARDED, wanted, strict=True):
        torch.manual_seed(0)
        model = Net()
        fully_shard(model)
        mine = list(batches(4))[rank::2]
        found = prune(model, patterns, 0.5, mine, criterion, compensation, progress=False)
        for name, mask in masks.items():
            assert torch.equal(found[name], mask), f"{name} of {patterns}"
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), weights[name], rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_sharded_model_is_pruned_as_the_whole_one(tmp_path):
    wanted = []
    for patterns, criterion, compensation in SHARDED:
        torch.manual_seed(0)
        model = Net()
        masks = prune(model, patterns, 0.5, batches(4), criterion, compensation, progress=False)
        wanted.append((masks, model.state_dict()))
    on_ranks(shard_and_prune, (tmp_path, wanted), 2)
