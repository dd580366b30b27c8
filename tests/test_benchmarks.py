"""The benchmarks start as `make` calls them, also where the data of some are missing."""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks" / "peers"), str(ROOT / "benchmarks")]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_bench_peers_without_arguments_measures_everything(monkeypatch):
    shown = subprocess.run(["make", "-n", "bench-peers"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _, _, arguments = shown.strip().splitlines()[-1].partition("benchmarks/peers/run.py")
    run = importlib.import_module("run")
    monkeypatch.setattr(sys, "argv", ["run.py", *shlex.split(arguments)])
    chosen = run.arguments()
    assert tuple(chosen.questions) == run.QUESTIONS
    assert chosen.only == ""


@pytest.mark.parametrize("name", ["one_call", "quality_encoder"])
def test_benchmarks_whose_data_are_missing_say_so_and_do_not_stop_the_others(name, monkeypatch, capsys):
    benchmark = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    benchmark.main()
    assert "not measured: pass --encoder and --texts" in capsys.readouterr().out
