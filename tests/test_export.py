"""Exporters: what is written is what the model holds, bit for bit, in fewer bytes where blocks are zero."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_nets import LAYERS, Net
from strategies import block_shapes, views
from torch import nn

from sparse_lightning import (
    NM,
    Blocks,
    BlockSpec,
    CheckpointError,
    Constant,
    Custom,
    Filters,
    Heads,
    Magnitude,
    Neurons,
    ScopeSpec,
    SparseLightningError,
    Sparsifier,
    SparsityCallback,
    View,
    export,
)
from sparse_lightning.export import KeptBlocks, Weights
from sparse_lightning.patterns import Pattern


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits: −0.0 is not 0.0, and NaN is itself."""
    flat = [x.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def check_round_trip(path: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    loaded, state = KeptBlocks.load(path), model.state_dict()
    assert list(loaded) == list(state), "the names or their order are not those of the model"
    wrong = [name for name in state if not same_bits(loaded[name], state[name])]
    assert not wrong, f"{wrong} came back with other bits"
    return loaded


def pruned(model: nn.Module, *kinds: Pattern, sparsity: float = 0.75) -> Sparsifier:
    """A Sparsifier that has pruned a model in one step, and has left it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier(list(kinds), Constant(sparsity), Magnitude(), update_every=1)
    sparsifier.attach(model, optimizer, total_steps=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sparsifier.before_step()
    optimizer.step()
    sparsifier.detach()
    return sparsifier


def size(path: Path) -> int:
    """The bytes of all tensors in a file, without its header."""
    return sum(tensor.nbytes for tensor in load_file(path).values())


class Holder(nn.Module):
    """A model of one parameter."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight


class Attention(nn.Module):
    """A fused QKV, its output, and two convolutions in channels_last."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.first, self.norm, self.second = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.to(memory_format=torch.channels_last)


@given(st.data())
def test_any_view_and_block_comes_back_bit_for_bit(data):
    view = data.draw(views().filter(lambda view: view.layout.is_injective()))
    larger = st.tuples(*(st.integers(1, n + 3) for n in view.shape))
    shape = data.draw(block_shapes(view.shape, divide=False) | larger)
    spec = BlockSpec(view, shape, edge="partial")
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=spec.numblk(), max_size=spec.numblk())))
    spec.apply_mask(mask.view(spec.grid_shape).bool())
    layout = view.layout

    def scope(model):
        same = View(model.weight, layout.shape, layout.stride, layout.offset)
        return ScopeSpec(BlockSpec(same, shape, edge="partial"))

    model = Holder(view.param)
    with tempfile.TemporaryDirectory() as folder:
        path = KeptBlocks()(Path(folder), model, Sparsifier([Custom(scope)], Constant(0.5)))
        check_round_trip(path, model)
        kept = sum(t.numel() for name, t in load_file(path).items() if "/mask" not in name)
    assert kept == int((view.param != 0).sum()), "the file holds other elements than those that are not zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_zeros_with_a_sign_and_numbers_that_are_none_are_kept(dtype, tmp_path):
    weight = torch.zeros(8, 8, dtype=dtype)
    weight[0, 0], weight[5, 2], weight[2, 6] = -0.0, torch.nan, torch.inf
    model = Holder(nn.Parameter(weight))
    path = KeptBlocks()(tmp_path, model, Sparsifier([Blocks("weight", (4, 4))], Constant(0.5)))
    check_round_trip(path, model)
    assert load_file(path)["weight/blocks.0"].shape == (3, 4, 4)


COUPLED = {
    "heads": lambda: Heads(qkv="qkv", out="out", head_dim=4, order="qkv"),
    "filters": lambda: Filters("first"),
    "blocks of filters": lambda: Blocks("second.weight", (4, 8)),
    "edges": lambda: Blocks(["qkv.weight", "second.weight"], (7, 5), edge="partial"),
    "2:4": lambda: NM("out.weight"),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_coupled_and_strided_blocks_come_back(kind, tmp_path):
    model = Attention()
    sparsifier = pruned(model, COUPLED[kind]())
    path = KeptBlocks()(tmp_path, model, sparsifier)
    loaded = check_round_trip(path, model)
    assert any((value == 0).float().mean() > 0.4 for value in loaded.values()), "nothing was pruned"
    fresh = Attention()
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh.second.weight, model.second.weight)
    assert size(path) < size(Weights()(tmp_path, model, sparsifier))


def test_the_file_has_the_kept_blocks_and_no_others(tmp_path):
    model = nn.Linear(16, 8)
    sparsifier = pruned(model, Blocks("weight", (4, 4)))
    found = load_file(KeptBlocks()(tmp_path, model, sparsifier))
    mask = sparsifier.masks["weight"]
    tiles = model.weight.detach().view(2, 4, 4, 4).transpose(1, 2)
    assert torch.equal(found["weight/blocks.0"], tiles[~mask])
    bits = [int(found["weight/mask.0"][0]) >> i & 1 for i in range(8)]
    assert bits == mask.flatten().int().tolist()
    assert set(found) == {"weight/blocks.0", "weight/mask.0", "bias"}


def test_at_high_sparsity_the_file_is_much_smaller(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    sparsifier = pruned(model, Blocks("*.weight", (16, 16)), sparsity=0.9)
    whole, blocks = Weights()(tmp_path, model, sparsifier), KeptBlocks()(tmp_path, model, sparsifier)
    assert blocks.stat().st_size < 0.15 * whole.stat().st_size
    check_round_trip(blocks, model)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False))
    model[2].weight = model[0].weight
    return model


def test_tied_weights_are_saved_once_and_come_back_tied(tmp_path):
    model = tied()
    path = KeptBlocks()(tmp_path, model, pruned(model, Blocks("0.weight", (4, 4))))
    loaded = check_round_trip(path, model)
    assert loaded["0.weight"] is loaded["2.weight"]
    assert not any(name.startswith("2.") for name in load_file(path))


def test_tied_weights_load_into_the_plain_model(tmp_path):
    model, fresh = tied(), tied()
    path = Weights()(tmp_path, model, pruned(model, Blocks("0.weight", (4, 4))))
    fresh.load_state_dict(load_file(path))
    assert fresh[0].weight is fresh[2].weight
    assert torch.equal(fresh[2].weight, model[0].weight)


def test_a_file_of_version_0_1_0_is_loaded():
    """It was written by `export.Blocks` from weights that count from 1, with one 4×4 block of zeros."""
    loaded = KeptBlocks.load(Path(__file__).parent / "data" / "kept_blocks_0.1.0.safetensors")
    shapes = {"0.weight": (6, 10), "0.bias": (6,), "1.weight": (10, 6), "1.bias": (10,)}
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == shapes
    for name, shape in shapes.items():
        expected = torch.arange(1.0, loaded[name].numel() + 1).view(shape)
        if name == "0.weight":
            expected[:4, 4:8] = 0
        assert same_bits(loaded[name], expected), name


def test_the_former_name_works_and_warns():
    with pytest.warns(
        DeprecationWarning, match=r"export\.Blocks is deprecated: use sparse_lightning\.export\.KeptBlocks"
    ):
        former = export.Blocks
    assert former is KeptBlocks
    with pytest.raises(AttributeError, match="has no attribute 'Block'"):
        _ = export.Block


def test_two_patterns_on_parts_of_one_parameter(tmp_path):
    def rows(low):
        return Custom(lambda m: ScopeSpec(BlockSpec(View(m.weight, (4, 8), (8, 1), low * 8), (2, 4)), name=f"at {low}"))

    model = nn.Linear(8, 12)
    path = KeptBlocks()(tmp_path, model, pruned(model, rows(0), rows(8), sparsity=0.5))
    check_round_trip(path, model)
    found = load_file(path)
    assert found["weight/blocks.0"].shape == found["weight/blocks.1"].shape == (2, 2, 4)
    assert torch.equal(found["weight/rest"], model.weight.detach()[4:8].flatten())


def quick_trainer(*callbacks: L.Callback) -> L.Trainer:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=list(callbacks), **quiet)


SMALLER_THAN_A_BLOCK = {
    "rows of a matrix": lambda: nn.Linear(16, 3),
    "columns of a matrix": lambda: nn.Linear(3, 16),
    "both": lambda: nn.Linear(2, 3),
    "input channels": lambda: nn.Conv2d(3, 8, 3),
    "one channel, channels_last": lambda: nn.Conv2d(1, 6, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", SMALLER_THAN_A_BLOCK)
def test_weights_that_are_smaller_than_a_block_come_back(kind, tmp_path):
    model = SMALLER_THAN_A_BLOCK[kind]()
    path = KeptBlocks()(tmp_path, model, pruned(model, Blocks("weight", (4, 4), edge="partial"), sparsity=0.5))
    check_round_trip(path, model)


def test_blocks_that_are_much_larger_than_the_weights_cost_no_memory(tmp_path):
    model = nn.Linear(16, 3)
    path = KeptBlocks()(tmp_path, model, Sparsifier([Blocks("weight", (10**9, 10**9), edge="partial")], Constant(0.5)))
    check_round_trip(path, model)
    assert load_file(path)["weight/blocks.0"].shape == (1, 3, 16)


def with_block(path: Path, block: list[int], tensors: dict[str, torch.Tensor]) -> Path:
    """The file with another block in its header, and other tensors."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["sparse_lightning.blocks"])
    header["cut"]["weight"][0]["block"] = block
    save_file(tensors, path, {"sparse_lightning.blocks": json.dumps(header)})
    return path


def test_a_file_whose_header_has_a_block_that_is_larger_is_loaded(tmp_path):
    """0.1.0 writes such blocks with the shape that is configured, flattened as those at an edge are."""
    model = nn.Linear(16, 3)
    path = KeptBlocks()(tmp_path, model, pruned(model, Blocks("weight", (4, 4), edge="partial"), sparsity=0.5))
    found = load_file(path)
    former = {**found, "weight/blocks.0": found["weight/blocks.0"].flatten()}
    check_round_trip(with_block(path, [4, 4], former), model)


@pytest.mark.parametrize("block", [[0, 4], [-4, 4], [3, 10**40], [3], [3, 4, 1]], ids=str)
def test_a_block_that_is_none_raises(block, tmp_path):
    model = nn.Linear(16, 3)
    path = KeptBlocks()(tmp_path, model, pruned(model, Blocks("weight", (3, 4)), sparsity=0.5))
    with pytest.raises(CheckpointError, match=r"view \(3, 16\) and block \(.*\) do not fit weight of shape \(3, 16\)"):
        KeptBlocks.load(with_block(path, block, load_file(path)))


@pytest.mark.parametrize("block", [[3, 10**15], [10**15, 10**15], [10**15, 1]], ids=str)
def test_a_larger_block_that_does_not_fit_the_tensors_raises(block, tmp_path):
    model = nn.Linear(16, 3)
    path = KeptBlocks()(tmp_path, model, pruned(model, Blocks("weight", (3, 4)), sparsity=0.5))
    with pytest.raises(CheckpointError, match=r"weight/(mask|blocks)\.0 has"):
        KeptBlocks.load(with_block(path, block, load_file(path)))


def test_a_trained_model_is_exported_after_the_fit(tmp_path):
    net, callback = Net(), SparsityCallback([Blocks(LAYERS, (4, 4))], Constant(0.75), update_every=1)
    quick_trainer(callback).fit(net)
    check_round_trip(KeptBlocks()(tmp_path, net, callback.sparsifier), net)
    Net().load_state_dict(load_file(Weights()(tmp_path, net, callback.sparsifier)))


def test_neurons_with_their_biases_in_a_fit_that_still_goes_on(tmp_path):
    class Export(L.Callback):
        def on_train_end(self, trainer, pl_module):
            self.path = KeptBlocks()(tmp_path, pl_module, callback.sparsifier)

    net, callback, export = Net(), SparsityCallback([Neurons("up", "down")], Constant(0.75), update_every=1), Export()
    quick_trainer(callback, export).fit(net)
    assert (check_round_trip(export.path, net)["up.bias"] == 0).float().mean() == 0.75


def test_the_plain_model_loads_without_this_package(tmp_path):
    model = nn.Linear(8, 8)
    path = Weights()(tmp_path, model, pruned(model, Blocks("weight", (4, 4))))
    program = (
        "import sys, torch; from safetensors.torch import load_file\n"
        f"model = torch.nn.Linear(8, 8); model.load_state_dict(load_file({str(path)!r}))\n"
        "print(int((model.weight == 0).sum()), any(m.startswith('sparse_lightning') for m in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["48", "False"]


@pytest.mark.parametrize("exporter", [Weights, KeptBlocks])
def test_files_go_where_they_are_told_to_and_others_may_read_them(exporter, tmp_path):
    model = nn.Linear(8, 8)
    sparsifier, before = Sparsifier([Blocks("weight", (4, 4))], Constant(0.5)), model.weight.detach().clone()
    for _ in range(2):
        path = exporter(file="mine.safetensors")(tmp_path / "deep" / "er", model, sparsifier)
    assert path == tmp_path / "deep" / "er" / "mine.safetensors"
    (tmp_path / "any").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "any").stat().st_mode)
    assert torch.equal(model.weight, before)


def test_what_is_no_tensor_raises_by_its_name(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    model = nn.Sequential(Extra(4, 4))
    sparsifier = Sparsifier([Blocks("0.weight", (2, 2))], Constant(0.5))
    for exporter in (Weights(), KeptBlocks()):
        with pytest.raises(SparseLightningError, match=r"0\._extra_state in the state dict of Sequential is a dict"):
            exporter(tmp_path, model, sparsifier)


def damaged(kind: str, tmp_path: Path) -> Path:
    model, path = nn.Linear(8, 8), tmp_path / "blocks.safetensors"
    KeptBlocks()(tmp_path, model, pruned(model, Blocks("weight", (4, 4))))
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    if kind == "other file":
        save_file(tensors, path)
    elif kind == "no safetensors":
        path.write_bytes(b"hello, I am no safetensors file")
    elif kind == "missing tensor":
        save_file({name: t for name, t in tensors.items() if "mask" not in name}, path, header)
    elif kind == "fewer blocks":
        save_file({**tensors, "weight/blocks.0": torch.zeros(0, 4, 4)}, path, header)
    elif kind == "outside":
        read = json.loads(header["sparse_lightning.blocks"])
        read["cut"]["weight"][0]["offset"] = 40
        save_file(tensors, path, {"sparse_lightning.blocks": json.dumps(read)})
    return path


@pytest.mark.parametrize("kind", ["other file", "no safetensors", "missing tensor", "fewer blocks", "outside"])
def test_a_file_that_is_no_export_raises(kind, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"blocks\.safetensors does not contain the blocks of a model.*export.KeptBlocks"
    ):
        KeptBlocks.load(damaged(kind, tmp_path))
