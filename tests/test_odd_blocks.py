"""KeptBlocks.load of files that others have changed: a state dict, or a CheckpointError; never anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from law_examples import examples
from safetensors.torch import load_file, save_file
from torch import nn

from sparse_lightning import Blocks, CheckpointError, Constant, Neurons, Sparsifier
from sparse_lightning.export import KeptBlocks
from sparse_lightning.export.blocks import HEADER

ODD = [None, True, -1, 0, 1, 3, 10**6, 10**15, 10**40, 0.5, "4", [], [4], [4, 4], [[4]], {}, {"0.weight": "0.weight"}]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a file with blocks, coupled units, a smaller block at the edge and a plain tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Linear(7, 7))
    ours = Sparsifier([Neurons("0", "2"), Blocks("3.weight", (2, 4), edge="partial")], Constant(0.5), "magnitude")
    ours.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.update_now()
    return KeptBlocks()(tmp_path_factory.mktemp("blocks"), model, ours), model.state_dict()


def parts(path: Path) -> tuple[dict, dict]:
    """Return the tensors and the header of a file."""
    size = int.from_bytes(path.read_bytes()[:8], "little")
    return load_file(path), json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"][HEADER])


def places(value, place=()):
    """Yield the place of every value in a nested header."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))


def changed(value, place, new):
    """Return a copy of a nested header with another value at a place."""
    if not place:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[place[0]] = changed(value[place[0]], place[1:], new)
    return copied


def check(path: Path) -> None:
    """Loading gives tensors that are not too large for the file, or a CheckpointError that names it."""
    try:
        loaded = KeptBlocks.load(path)
    except CheckpointError as error:
        loaded, text = {}, str(error)
    else:
        text = f"{path} is a file that KeptBlocks has written"
    assert str(path) in text
    assert "KeptBlocks has written" in text
    assert sum(tensor.numel() for tensor in loaded.values()) <= 4096 * path.stat().st_size


def test_the_file_itself_is_loaded(written):
    path, state = written
    assert all(torch.equal(tensor, state[name]) for name, tensor in KeptBlocks.load(path).items())


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_value_of_the_header_may_be_odd(written, tmp_path, data):
    path, _ = written
    tensors, header = parts(path)
    place = data.draw(st.sampled_from(list(places(header))))
    odd = tmp_path / "odd.safetensors"
    save_file(tensors, odd, {HEADER: json.dumps(changed(header, place, data.draw(st.sampled_from(ODD))))})
    check(odd)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_tensor_may_be_odd(written, tmp_path, data):
    path, _ = written
    tensors, header = parts(path)
    name = data.draw(st.sampled_from(sorted(tensors)))
    odd = data.draw(st.sampled_from([None, torch.zeros(0), torch.ones(3), torch.ones(1000), torch.ones(2).byte()]))
    found = {**tensors, **({"more": torch.ones(2)} if data.draw(st.booleans()) else {}), name: odd}
    file = tmp_path / "odd.safetensors"
    save_file({key: tensor for key, tensor in found.items() if tensor is not None}, file, {HEADER: json.dumps(header)})
    check(file)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_bytes_may_be_cut_or_changed(written, tmp_path, data):
    path, _ = written
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(bytes(raw)[: data.draw(st.sampled_from([len(raw), at]))])
    check(odd)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (("format",), 2, r"it has the format 2, and this version reads 1"),
        (("names", "0.bias"), "0.bios", r"it has 0\.bias tied to 0\.bios, which is not in its state dict"),
        (("cut", "3.weight", 0, "param"), [7, 10**9], r"declares \d+ elements, more than its \d+ bytes can"),
        (("cut", "3.weight", 0, "stride"), [10**9, 1], r"elements, more than its \d+ bytes can stand for"),
        (("cut", "3.weight", 0, "view"), [70, 7], r"view \(70, 7\) and block \(2, 4\) do not fit 3\.weight of shape"),
        (("cut", "3.weight", 0, "block"), [4, 4], r"3\.weight/mask\.0 has|3\.weight/blocks\.0 has"),
        (("cut", "3.weight", 0, "offset"), 10**30, r"do not fit 3\.weight"),
        (("cut", "3.weight"), [], r"its blocks are not a mapping of lists"),
    ],
    ids=str,
)
def test_what_is_odd_is_named(written, tmp_path, place, value, text):
    tensors, header = parts(written[0])
    odd = tmp_path / "odd.safetensors"
    save_file(tensors, odd, {HEADER: json.dumps(changed(header, place, value))})
    with pytest.raises(CheckpointError, match=text):
        KeptBlocks.load(odd)


def test_a_header_that_is_nested_deeply_raises(written, tmp_path):
    tensors, _ = parts(written[0])
    odd = tmp_path / "odd.safetensors"
    save_file(tensors, odd, {HEADER: "[" * 100_000})
    with pytest.raises(CheckpointError, match="does not contain the blocks of a model"):
        KeptBlocks.load(odd)
