"""2:4 weights: stored in little more than half of the bytes, bit for bit; run on GPUs with sparse tensor cores only."""

from __future__ import annotations

import json

import pytest
import torch
from devices import needs_gpu
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from sparse_lightning import NM, CheckpointError, Constant, SparseLightningError, Sparsifier, nm_select
from sparse_lightning.export import SemiStructured, semi_structured
from sparse_lightning.export.semi_structured import HEADER, is_2to4, pack, read, unpack

SPARSIFIER = Sparsifier([NM("weight")], Constant(0.5))


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), st.data())
def test_packed_weights_come_back_bit_for_bit(rows, groups, dtype, data):
    weight = torch.randn(rows, 4 * groups).to(dtype)
    weight[:, ::3] = 0
    nm_select(weight, data.draw(st.integers(0, 2)), 4)
    assert is_2to4(weight)
    values, places = pack(weight)
    assert values.shape == (rows, 2 * groups)
    assert places.shape == (rows, groups)
    assert torch.equal(unpack(values, places), weight)


def test_other_weights_are_not_2to4():
    assert not is_2to4(torch.tensor([[1.0, 1, 1, 0]]))
    assert not is_2to4(torch.zeros(4, 6))
    assert not is_2to4(torch.zeros(4))


def test_a_model_on_the_cpu_raises(tmp_path):
    with pytest.raises(SparseLightningError, match="sm_80 or newer only, and the model is on cpu: move it"):
        SemiStructured()(tmp_path, nn.Linear(64, 64), SPARSIFIER)
    with pytest.raises(SparseLightningError, match="the model is on cpu"):
        SemiStructured.load(tmp_path / "any", into=nn.Linear(64, 64))
    assert not list(tmp_path.iterdir())


def packed_linear(monkeypatch, folder):
    """A file of a 2:4 layer, written as if the CPU were such a GPU."""
    linear = nn.Linear(64, 32, dtype=torch.float16)
    nm_select(linear.weight.data, 2, 4)
    monkeypatch.setattr(semi_structured, "check_device", lambda model: None)
    return linear, SemiStructured()(folder, linear, SPARSIFIER)


def test_a_file_has_the_weights(monkeypatch, tmp_path):
    linear, path = packed_linear(monkeypatch, tmp_path)
    state, layers = read(path)
    assert layers == [""]
    assert all(torch.equal(state[name], value) for name, value in linear.state_dict().items())
    assert load_file(path)["weight/values"].shape == (32, 32)
    with pytest.raises(SparseLightningError, match="no linear layer of Linear has 2:4 weights"):
        SemiStructured()(tmp_path, nn.Linear(64, 64), SPARSIFIER)


@pytest.mark.parametrize("kind", ["order", "large", "shape", "missing", "cut short", "no header"])
def test_a_damaged_file_raises(kind, monkeypatch, tmp_path):
    _, path = packed_linear(monkeypatch, tmp_path)
    tensors, header = load_file(path), {HEADER: json.dumps({"names": {"weight": "weight"}, "layers": [""]})}
    if kind in {"order", "large"}:
        tensors["weight/places"].fill_(5 if kind == "order" else 255)
    elif kind == "shape":
        tensors["weight/values"] = torch.zeros(2, 2)
    elif kind == "missing":
        del tensors["weight/places"]
    save_file(tensors, path, None if kind == "no header" else header)
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="does not contain 2:4 weights"):
        read(path)


@needs_gpu
def test_a_model_runs_from_its_file(tmp_path):
    if torch.cuda.get_device_capability() < semi_structured.CAPABILITY:
        pytest.skip("needs sparse tensor cores")
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU()).cuda().half()
    nm_select(model[0].weight.data, 2, 4)
    loaded = SemiStructured.load(SemiStructured()(tmp_path, model, SPARSIFIER), into=model)
    inputs = torch.randn(128, 256, device="cuda").half()
    assert torch.allclose(loaded(inputs), model(inputs), atol=1e-2)
