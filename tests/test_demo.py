"""The demo as users start it, and the patterns that it builds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import torch
from matplotlib.image import imread

from sparse_lightning import demo
from sparse_lightning.demo import SPARSITY, TinyViT, count_zeros, patterns_of, prune

ROOT = Path(__file__).parent.parent


def test_the_demo_prints_the_table_and_writes_pictures(tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "pictures"
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(out)])
    runpy.run_path(demo.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split()[:3] == ["name", "of", "parameter"]
    for name in SPARSITY:
        assert any(line.startswith(name) and "×" in line for line in lines), f"{name} is not in the table"
    assert re.search(r"two-of-four +0 → +256 of +512 weights are zero", printed)

    files = [Path(line) for line in lines if line.endswith(".png")]
    assert sorted(files) == sorted(out.iterdir())
    assert {file.stem for file in files} == {*SPARSITY, "patterns"}
    for file in files:
        picture = imread(file)
        assert min(picture.shape[:2]) > 200, f"{file.name} is too small to see anything"
        assert picture[..., :3].std() > 0.05, f"{file.name} is blank"
    published = ROOT / "docs" / "images" / "patterns.png"
    assert published.stat().st_size < 200_000
    assert imread(published).shape[:2] == imread(out / "patterns.png").shape[:2], "docs/images/patterns.png is old"


def test_each_pattern_prunes_its_fraction_of_the_weights_and_nothing_else():
    torch.manual_seed(0)
    model = TinyViT()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scopes = patterns_of(model).get_all_scopes()
    assert [scope.name for scope in scopes] == list(SPARSITY)
    zeros = {}
    for scope in scopes:
        prune(scope, SPARSITY[scope.name])
        zeros[scope.name] = count_zeros(scope)
    # By hand: 8 of 16 filters of 27; 2 of 4 heads of 4·(4·16); 24 of 32 neurons of 16+16; 3 of 4 tiles in each of
    # 12 rows, of 16; half of 32·16, twice; 16 of 28 tiles of 16.
    assert list(zeros.values()) == [216, 512, 768, 576, 256, 256, 256]
    changed = sum(int((p != before[name]).sum()) for name, p in model.named_parameters())
    assert changed == sum(zeros.values())


def test_the_stem_stays_in_channels_last_and_the_model_runs():
    model = TinyViT()
    for scope in patterns_of(model).get_all_scopes():
        prune(scope, SPARSITY[scope.name])
    assert model.stem.weight.is_contiguous(memory_format=torch.channels_last)
    assert model(torch.randn(2, 3, 24, 24)).isfinite().all()
