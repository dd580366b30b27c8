"""Tiles: the outputs of the masked model from the tiles that are not zero, by every path and in every place."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from poison import poison  # noqa: F401
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from sparse_lightning import (
    Blocks,
    CheckpointError,
    Constant,
    LayoutError,
    SparseLightningError,
    Sparsifier,
    TileLinear,
    tiled,
)
from sparse_lightning.export import Tiled
from sparse_lightning.kernels import tile_linear as op
from sparse_lightning.kernels.tile_linear import gathered, native, reference
from sparse_lightning.tiles.cutting import best_tile, cut, joined, zero_tiles

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PATHS = {"reference": reference.tile_linear, "gathered": gathered.tile_linear, "operator": op._operator}

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler and a CPU with AVX2")


def with_zero_tiles(linear: nn.Linear, tile: tuple[int, int], density: float) -> nn.Linear:
    """Zero tiles of the weight of a layer; `density` is the probability of a tile to be kept."""
    rows, columns = linear.weight.shape
    kept = torch.rand(-(-rows // tile[0]), -(-columns // tile[1])) < density
    with torch.no_grad():
        linear.weight *= kept.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:rows, :columns]
    return linear


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    if not ours.numel():
        return 0.0
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-300))


@st.composite
def layers(draw):
    """A layer in any dtype with zero tiles, the shape of its tiles, and inputs with any strides."""
    out, width = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    tile = draw(st.sampled_from([(16, 8), (32, 32), (64, 16), (48, 5), (7, 3), (1, 1)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    linear = nn.Linear(width, out, bias=draw(st.booleans()), dtype=draw(st.sampled_from(DTYPES)))
    with_zero_tiles(linear, tile, draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])))
    leading = draw(st.sampled_from([(), (0,), (1,), (2, 3), (5, 1, 4), (61,)]))
    wide = torch.randn(*leading, 2 * width).to(linear.weight.dtype)
    inputs = draw(st.sampled_from([wide[..., :width].contiguous(), wide[..., ::2], wide[..., width:]]))
    return linear, tile, inputs


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("path", [*PATHS, pytest.param("native", marks=needs_compiler)])
def test_every_path_gives_the_outputs_of_the_dense_layer(path):
    @settings(max_examples=examples(40))
    @given(layers())
    def law(case):
        linear, tile, inputs = case
        parts = cut(linear.weight, tile)
        bias = None if linear.bias is None else linear.bias.detach()
        wanted = F.linear(inputs.double(), linear.weight.detach().double(), None if bias is None else bias.double())
        run = native.operator() if path == "native" else PATHS[path]
        ours = run(inputs, *parts, bias, linear.out_features)
        if path == "native" and tile[0] % 16:
            assert ours is None
            return
        assert ours.dtype == inputs.dtype
        assert ours.is_contiguous()
        assert relative_error(ours, wanted) < TOLERANCE[inputs.dtype]

    law()


@given(layers())
def test_cutting_a_weight_loses_nothing(case):
    linear, tile, _ = case
    layer = TileLinear.of(linear, tile)
    assert torch.equal(layer.dense_weight(), linear.weight)
    assert len(layer.tiles) == int((~zero_tiles(linear.weight, tile)).sum())
    assert all(bool(t.any()) for t in layer.tiles), "a zero tile is kept"
    assert TileLinear(linear.in_features, linear.out_features, *cut(linear.weight, tile)).tile == tile


def test_numbers_that_are_none_are_kept():
    weight = torch.zeros(4, 4)
    weight[0, 0], weight[3, 3] = torch.nan, torch.inf
    assert zero_tiles(weight, (2, 2)).tolist() == [[False, True], [True, False]]
    assert torch.equal(joined(*cut(weight, (2, 2)), (4, 4)).nan_to_num(), weight.nan_to_num())


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 4, 5, 48, 131])
def test_many_rows_and_threads(rows, threads):
    linear = with_zero_tiles(nn.Linear(300, 700), (32, 16), 0.4)
    with torch.no_grad():
        linear.weight[:64].zero_()
        linear.weight[-1] = 1
        layer, inputs = TileLinear.of(linear, (32, 16)), torch.randn(rows, 300)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        ours = layer(inputs)
        torch.set_num_threads(before)
        assert relative_error(ours, linear(inputs)) < TOLERANCE[torch.float32]


def test_gradients_flow_to_the_inputs():
    layer = TileLinear.of(with_zero_tiles(nn.Linear(20, 40, dtype=torch.float64), (16, 8), 0.5), (16, 8))
    inputs = torch.randn(2, 3, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, inputs)
    assert torch.autograd.gradgradcheck(layer, inputs)


def test_the_operator_follows_the_rules_of_torch():
    layer = TileLinear.of(with_zero_tiles(nn.Linear(20, 40), (16, 8), 0.5), (16, 8))
    inputs = torch.randn(3, 20, requires_grad=True)
    torch.library.opcheck(op._operator, (inputs, layer.tiles, layer.pointers, layer.columns, layer.bias, 40))


@pytest.mark.parametrize("gradient", [False, True])
def test_torch_compile_takes_it_in_one_graph(gradient):
    linear = with_zero_tiles(nn.Linear(20, 40), (16, 8), 0.5)
    model = nn.Sequential(TileLinear.of(linear, (16, 8)), nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = torch.randn(3, 20, requires_grad=gradient)
    ours, wanted = compiled(inputs), linear(inputs).relu()
    assert relative_error(ours.detach(), wanted.detach()) < 1e-5
    if gradient:
        weights = torch.randn_like(wanted)
        found = [torch.autograd.grad((y * weights).sum(), inputs)[0] for y in (ours, wanted)]
        assert relative_error(*found) < 1e-5


def test_torch_export_keeps_the_operator_and_other_batches():
    linear = with_zero_tiles(nn.Linear(20, 40), (16, 8), 0.5)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(TileLinear.of(linear, (16, 8)), (torch.randn(3, 20),), dynamic_shapes=(batch,))
    assert "sparse_lightning.tile_linear" in str(program.graph)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    inputs = torch.randn(7, 20)
    assert relative_error(torch.export.load(file).module()(inputs), linear(inputs).detach()) < 1e-5


def test_autocast_computes_in_its_dtype():
    linear, inputs = with_zero_tiles(nn.Linear(64, 32), (16, 16), 0.5), torch.randn(4, 64)
    layer = TileLinear.of(linear, (16, 16))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, wanted = layer(inputs), linear(inputs)
    assert ours.dtype == wanted.dtype == torch.bfloat16
    assert relative_error(ours, wanted) < 1e-2


def test_a_state_dict_is_all_of_a_layer():
    layer = TileLinear.of(with_zero_tiles(nn.Linear(64, 32), (16, 16), 0.5), (16, 16))
    other = copy.deepcopy(layer)
    other.tiles.zero_()
    other.bias.zero_()
    other.load_state_dict(layer.state_dict())
    inputs = torch.randn(2, 64)
    assert torch.equal(other(inputs), layer(inputs))
    assert set(layer.state_dict()) == {"tiles", "pointers", "columns", "bias"}
    assert not list(layer.parameters())
    assert layer.to(torch.float64)(inputs.double()).dtype == torch.float64


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("tile", [(32, 32), (64, 64)])
def test_memory_is_that_of_the_kept_tiles(tile, sparsity):
    linear = nn.Linear(768, 3072, bias=False)
    grid = zero_tiles(linear.weight, tile)
    pruned = torch.rand(grid.shape).flatten().argsort().argsort().view(grid.shape) < sparsity * grid.numel()
    with torch.no_grad():
        linear.weight[pruned.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)] = 0
    layer = TileLinear.of(linear, tile)
    used = sum(buffer.nbytes for buffer in layer.buffers())
    assert used <= (1 - sparsity + 0.02) * linear.weight.nbytes
    assert best_tile(linear.weight) == tile


WRONG = {
    "columns outside": lambda t, p, c: (t, p, c + 2),
    "negative columns": lambda t, p, c: (t, p, c - 1),
    "a tile twice": lambda t, p, c: (t, p, c * 0),
    "pointers that fall": lambda t, p, c: (t, torch.tensor([0, 4, 2, 4], dtype=torch.int32), c),
    "pointers beyond the tiles": lambda t, p, c: (t, p * 2, c),
    "too few pointers": lambda t, p, c: (t, p[:-1], c),
    "64-bit columns": lambda t, p, c: (t, p, c.long()),
    "more columns than tiles": lambda t, p, c: (t, p, torch.cat([c, c])),
    "flat tiles": lambda t, p, c: (t.flatten(1), p, c),
    "empty tiles": lambda t, p, c: (t[:, :0], p, c),
}


@pytest.mark.parametrize("kind", WRONG)
def test_tiles_that_form_no_weight_raise(kind):
    weight = torch.ones(48, 32)
    weight[16:32, :16] = 0
    tiles, pointers, columns = WRONG[kind](*cut(weight, (16, 16)))
    with pytest.raises(LayoutError, match="these are not the tiles of a 48×32 weight"):
        TileLinear(32, 48, tiles, pointers, columns)
    if native.is_available() and kind not in {"a tile twice", "flat tiles"}:  # what would be read out of bounds
        with pytest.raises(RuntimeError, match="tile_linear"):
            native.operator()(torch.ones(32), tiles, pointers, columns, None, 48)


def test_inputs_of_another_size_raise():
    layer = TileLinear.of(nn.Linear(64, 32), (16, 16))
    with pytest.raises(LayoutError, match=r"inputs of shape \(2, 63\) do not fit a layer with 64 input features"):
        layer(torch.randn(2, 63))
    with pytest.raises(LayoutError, match="tiles of 0×4 weights are not possible"):
        TileLinear.of(nn.Linear(64, 32), (0, 4))


class Reused(nn.Module):
    """One layer in two places, called with a keyword; a tied one, one with a hook, one that is never called."""

    def __init__(self):
        super().__init__()
        self.first = with_zero_tiles(nn.Linear(1024, 1024), (32, 32), 0.05)
        self.again = nn.ModuleDict({"same": self.first})
        self.dense = nn.Linear(1024, 64)
        self.tied, self.other = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.other.weight = self.tied.weight
        self.hooked, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
        self.hooked.register_forward_hook(_double)

    def forward(self, x):
        x = self.again["same"](input=self.first(x).relu())
        return self.hooked(self.other(self.tied(self.dense(x))))


def _double(module, args, output):
    return 2 * output


def test_a_model_keeps_its_outputs_and_the_original_is_untouched():
    model = Reused().train()
    state, inputs = copy.deepcopy(model.state_dict()), torch.randn(16, 1024)
    small = tiled(model, (inputs,))
    assert type(small) is Reused
    assert isinstance(small.first, TileLinear)
    assert small.again["same"] is small.first
    assert small.training
    assert small.first.training
    assert type(model.first) is nn.Linear
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    assert relative_error(small(inputs).detach(), model(inputs).detach()) < 1e-5
    reasons = {layer.name: layer.reason for layer in small.tile_table}
    assert reasons == {
        "first": "",
        "dense": "few tiles are zero",
        "tied": "its weight is shared with other",
        "other": "its weight is shared with tied",
        "hooked": "it has hooks",
        "unused": "the model did not call it",
    }
    (layer,) = [layer for layer in small.tile_table if not layer.reason]
    assert layer.speedup > 1
    assert "dense: it has hooks" in str(small.tile_table)


def test_inputs_come_from_the_model_or_from_keywords():
    model = with_zero_tiles(nn.Linear(1024, 1024), (64, 64), 0.02)
    inputs = torch.randn(4, 1024)
    with pytest.raises(SparseLightningError, match="Linear has no example inputs: pass inputs"):
        tiled(model)
    assert isinstance(tiled(model, {"input": inputs}), TileLinear)
    model.example_input_array = inputs
    assert isinstance(tiled(model, tile=(16, 64)), TileLinear)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_fully_pruned_layers(dtype):
    model = nn.Sequential(nn.Linear(1024, 1024, dtype=dtype), nn.Linear(1024, 1000, dtype=dtype))
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight[64:].zero_()
        small, inputs = tiled(model, (torch.randn(8, 1024, dtype=dtype),)), torch.randn(3, 1024, dtype=dtype)
        assert len(small[0].tiles) == 0
        assert relative_error(small(inputs), model(inputs)) < TOLERANCE[dtype]


def test_inputs_that_are_not_finite_leave_a_layer_dense():
    model, inputs = with_zero_tiles(nn.Linear(256, 256), (32, 32), 0.1), torch.full((2, 256), torch.inf)
    assert tiled(model, (inputs,)).tile_table.layers[0].reason.startswith("tiles give other outputs")


def test_layers_whose_weight_others_read_stay_dense():
    model = nn.TransformerEncoderLayer(64, 2, dim_feedforward=1024, batch_first=True).eval()
    for layer in (model.linear1, model.linear2):
        with_zero_tiles(layer, (16, 16), 0.02)
    inputs = torch.randn(2, 3, 64)
    small = tiled(model, (inputs,))
    assert type(small.linear1) is nn.Linear
    assert small.tile_table.layers[-1].reason == "nn.TransformerEncoderLayer reads its weight"
    assert torch.equal(small(inputs), model(inputs))


class ReadsWeight(nn.Module):
    """Calls a layer, and reads its weight."""

    def __init__(self):
        super().__init__()
        self.layer = with_zero_tiles(nn.Linear(1024, 1024), (64, 64), 0.02)

    def forward(self, x):
        return self.layer(x) + self.layer.weight.sum()


def test_a_model_that_reads_a_weight_raises():
    with pytest.raises(SparseLightningError, match=r"ReadsWeight can't be tiled: .* Call the layer instead"):
        tiled(ReadsWeight(), (torch.randn(4, 1024),))


@pytest.mark.slow
def test_without_a_compiler_torch_computes_it():
    code = """
import os, torch
os.environ["PATH"], os.environ["CXX"] = "", ""
from torch import nn
from sparse_lightning import TileLinear
from sparse_lightning.kernels.tile_linear import native
assert not native.is_available()
linear = nn.Linear(64, 64)
linear.weight.data[:32] = 0
inputs = torch.randn(3, 64)
assert torch.allclose(TileLinear.of(linear, (16, 16))(inputs), linear(inputs), atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def fresh_copy(model: nn.Module) -> nn.Module:
    """A model with the same layers, and all tensors zero."""
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            tensor.zero_()
    return fresh


SPARSIFIER = Sparsifier([Blocks("*weight", (32, 32))], Constant(0.5))


def exported(model: nn.Module, folder, rows: int = 4) -> tuple[nn.Module, torch.Tensor]:
    """The path of an exported model, and its inputs."""
    inputs = torch.randn(rows, 1024)
    return Tiled((inputs,))(folder, model, SPARSIFIER), inputs


def test_a_file_gives_the_tiled_model_back(tmp_path):
    model = Reused()
    path, inputs = exported(model, tmp_path)
    loaded = Tiled.load(path, into=fresh_copy(model))
    assert loaded.again["same"] is loaded.first
    assert isinstance(loaded.first, TileLinear)
    assert loaded.other.weight is loaded.tied.weight
    assert relative_error(loaded(inputs).detach(), model(inputs).detach()) < 1e-5
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert path.stat().st_size < 0.2 * whole


def test_a_layer_by_itself_is_exported_too(tmp_path):
    model = with_zero_tiles(nn.Linear(1024, 1024, bias=False), (64, 64), 0.02)
    path, inputs = exported(model, tmp_path)
    assert relative_error(Tiled.load(path, into=fresh_copy(model))(inputs), model(inputs).detach()) < 1e-5


def edited(path, edit) -> None:
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["sparse_lightning.tiled"])
    tensors = load_file(path)
    edit(header, tensors)
    save_file(tensors, path, {"sparse_lightning.tiled": json.dumps(header)})


HOSTILE = {
    "columns outside": lambda h, t: t["first.columns"].fill_(1 << 30),
    "negative columns": lambda h, t: t["first.columns"].fill_(-5),
    "repeated columns": lambda h, t: t["first.columns"].zero_(),
    "huge pointers": lambda h, t: t["first.pointers"].fill_(1 << 30),
    "negative pointers": lambda h, t: t["first.pointers"].fill_(-1),
    "fewer tiles": lambda h, t: t.update({"first.tiles": t["first.tiles"][:1].clone()}),
    "integers for tiles": lambda h, t: t.update({"first.tiles": t["first.tiles"].long()}),
    "another dtype": lambda h, t: t.update({"first.tiles": t["first.tiles"].double()}),
    "no bias": lambda h, t: h["names"].pop("first.bias"),
    "a short bias": lambda h, t: t.update({"first.bias": t["first.bias"][:3].clone()}),
    "a missing tensor": lambda h, t: t.pop("dense.weight"),
    "a tensor of another shape": lambda h, t: t.update({"dense.weight": torch.zeros(2, 2)}),
    "a tensor too many": lambda h, t: h["names"].update(more="dense.weight"),
    "a layer that is none": lambda h, t: h["layers"].update({"again": "again"}),
    "a layer elsewhere": lambda h, t: h["layers"].update({"nowhere.at.all": "first"}),
    "an attribute for a layer": lambda h, t: h["layers"].update({"forward": "forward"}),
    "names that are no names": lambda h, t: h.update(names=[1, 2]),
    "layers of another kind": lambda h, t: h.update(layers={"dense": "first"}),
    "another format": lambda h, t: h.update(format=2),
    "a format that is none": lambda h, t: h.update(format=True),
    "a key too many": lambda h, t: h.update(code="print(1)"),
}


@pytest.fixture(scope="module")
def reused_file(tmp_path_factory):
    model = Reused()
    return model, exported(model, tmp_path_factory.mktemp("tiled"))[0]


@pytest.mark.parametrize("kind", [*HOSTILE, "cut short", "no safetensors", "no header", "another model", "no file"])
def test_a_file_that_does_not_fit_raises_and_changes_nothing(kind, reused_file, tmp_path):
    model, original = reused_file
    path, into = tmp_path / "tiled.safetensors", nn.Linear(4, 4) if kind == "another model" else fresh_copy(model)
    content = original.read_bytes()
    if kind != "no file":
        path.write_bytes({"cut short": content[:-9], "no safetensors": b"hello, I am a pickle"}.get(kind, content))
    if kind == "no header":
        save_file(load_file(path), path)
    if kind in HOSTILE:
        edited(path, HOSTILE[kind])
    before = str(into)
    with pytest.raises(CheckpointError, match=r"tiled\.safetensors does not contain the tiles of this"):
        Tiled.load(path, into=into)
    assert str(into) == before
    assert not any(tensor.any() for tensor in into.state_dict().values()) or kind == "another model"


def test_a_tile_is_one_or_two_numbers():
    model = with_zero_tiles(nn.Linear(1024, 1024), (32, 32), 0.02)
    assert tiled(model, (torch.randn(1, 1024),), tile=32).tile == (32, 32)
    for wrong in (0, (32,), (32, 32, 1), (32, 0), 1.5, "32"):
        with pytest.raises(LayoutError, match="is not the shape of a tile: pass outputs × inputs"):
            tiled(model, (torch.randn(1, 1024),), tile=wrong)
