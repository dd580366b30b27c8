"""Compact models at the end of runs: what the closing table says, and exports of runs that have ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from sparse_lightning.app.compose import compose
from sparse_lightning.app.run import run
from sparse_lightning.export import Compact
from sparse_lightning.models import DigitsMLP

OWN = str(Path(__file__).parent / "own_conf")
UNITS = ["recipe=small", "pattern=coupled", "compare_dense=false", "schedule.final=0.5"]


def test_a_run_says_what_is_gained_and_its_end_is_exported_again_without_training(tmp_path):
    made = run(compose([*UNITS, "export=compact"], OWN).plain(tmp_path))
    numbers = json.loads((tmp_path / "results.json").read_text("utf-8"))
    costs, [exported] = numbers["footprint"], numbers["exports"]
    assert costs["export"] == "compact"
    loaded = Compact.load(tmp_path / "compact.safetensors", into=DigitsMLP(hidden=32))
    assert costs["sparse"]["parameters"] == sum(p.numel() for p in loaded.parameters()) < costs["dense"]["parameters"]
    assert costs["sparse"]["bytes"] < exported["bytes"] == (tmp_path / "compact.safetensors").stat().st_size
    assert [family["units"] for family in numbers["families"]] == [32, 32]
    assert [family["left"] for family in numbers["families"]] == [len(loaded.first.bias), len(loaded.second.bias)]
    assert all(costs[kind]["ms"] > 0 for kind in ("dense", "sparse"))
    for line in ("parameters", "bytes if exported", "ms per forward"):
        assert f"\n{line} " in made.table

    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    before = (os.stat(checkpoint).st_mtime_ns, numbers["history"], numbers["sparse"])
    os.remove(tmp_path / "compact.safetensors")
    again = run(compose([*UNITS, "export=compact", "ckpt_path=last"], OWN).plain(tmp_path))
    numbers = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert (os.stat(checkpoint).st_mtime_ns, numbers["history"], numbers["sparse"]) == before
    assert again.table == made.table
    other = Compact.load(tmp_path / "compact.safetensors", into=DigitsMLP(hidden=32))
    assert all(torch.equal(one, two) for one, two in zip(loaded.parameters(), other.parameters(), strict=True))


def test_a_run_with_tiles_says_what_kept_blocks_need(tmp_path):
    run(compose(["recipe=small", "compare_dense=false"], OWN).plain(tmp_path))
    costs = json.loads((tmp_path / "results.json").read_text("utf-8"))["footprint"]
    assert costs["export"] == "blocks"
    assert costs["sparse"]["parameters"] < costs["dense"]["parameters"]
    assert costs["sparse"]["bytes"] < costs["dense"]["bytes"]


def test_an_export_from_the_path_of_a_checkpoint_has_the_report_of_its_run(tmp_path):
    first, other = tmp_path / "first", tmp_path / "other"
    made = run(compose(UNITS, OWN).plain(first))
    path = f"ckpt_path={first / 'checkpoints' / 'last.ckpt'}"
    again = run(compose([*UNITS, "export=compact", path], OWN).plain(other))
    before, after = (json.loads((folder / "results.json").read_text("utf-8")) for folder in (first, other))
    assert again.table == made.table
    assert after["sparse"] == before["sparse"] != {}
    assert after["exports"][0]["file"] == "compact.safetensors"
    assert "exports" not in before
    assert not (other / "checkpoints").exists(), "it was trained again"
