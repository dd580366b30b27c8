"""The program that compares libraries: its loops and checks, with those parts that need no other library."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from sparse_lightning import Cubic

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path[:0] = [str(FOLDER / "peers"), str(FOLDER)]

import cost  # noqa: E402
from catalog import MODULES  # noqa: E402
from cost_page import whole_run, with_runs  # noqa: E402
from mask_loop import MaskLoop  # noqa: E402
from ours import Ours, OursMagnitude  # noqa: E402
from page import Plot, Table  # noqa: E402
from pages import BEGIN, END, block, pages  # noqa: E402
from peer import Peer  # noqa: E402
from plan import Plan  # noqa: E402
from quality_page import Found, verdict  # noqa: E402
from results import Measurement, Results, facts  # noqa: E402
from stack import Stack, check  # noqa: E402
from torch_ao import TorchAO  # noqa: E402


@pytest.mark.parametrize("steps", [40, 200, 2000])
def test_all_libraries_follow_the_ramp_of_the_default_schedule(steps):
    plan, default = Plan("4×4", 0.9, steps), Cubic(0.9).resolve(steps)
    targets = {step: target for step in range(steps) if (target := plan.target(step)) is not None}
    assert 20 <= len(targets) <= 35
    assert targets == {step: default(step) for step in targets}
    assert list(targets.values())[-1] == pytest.approx(0.9)


def trained(kind: type[Peer], pattern: str, sparsity: float) -> tuple[Peer, torch.nn.Module]:
    stack = Stack(kind, 3 * 64 * 64, 3, Plan(pattern, sparsity, 30), batch=8)
    for _ in range(30):
        stack.step()
    return stack.peer, stack.peer.finish()


@pytest.mark.filterwarnings("ignore:.* prunes much at each")
@pytest.mark.parametrize("pattern", Peer.patterns)
def test_what_each_library_leaves_is_counted(pattern):
    sparsity = 0.5 if pattern in ("2:4", "units") else 0.75
    for kind in (Ours, OursMagnitude, MaskLoop, TorchAO):
        if kind.can(pattern):
            peer, model = trained(kind, pattern, sparsity)
            assert check(peer, model) == pytest.approx(sparsity, abs=0.02), kind.name
            assert type(model).__name__ == "Layers"
            assert not any("parametrizations" in name for name in model.state_dict())


@pytest.mark.filterwarnings("ignore:.* prunes much at each")
def test_pruned_units_are_removed_after_the_last_update_and_the_rest_trains_on():
    peer, model = trained(OursMagnitude, "units", 0.5)
    x, smaller = torch.randn(4, 64), peer.shrunk()
    assert [layer.weight.shape[0] for layer in smaller.model.layers] == [32, 32, 32, 64]
    torch.testing.assert_close(smaller.model(x), model(x))
    before = copy.deepcopy(smaller.model.state_dict())
    smaller.model(x).square().mean().backward()
    smaller.optimizer.step()
    assert all((before[name] != new).any() for name, new in smaller.model.state_dict().items())
    assert trained(OursMagnitude, "4×4", 0.75)[0].shrunk() is None


def test_a_run_counts_its_updates_and_the_smaller_steps_after_the_last_one():
    masked = {"step held": 1.1, "step between": 1.2, "update": 0.5}
    assert whole_run(masked) == pytest.approx(1.1 + 30 / 1000 * (9 * 0.1 + 0.5))
    assert whole_run({**masked, "run": 1.3}) == 1.3, "it was timed"
    removed = {"step held": 1.1, "update": 0.5, "step small": 0.6, "removal": 20.0}
    assert whole_run(removed) == pytest.approx(0.7 * 1.1 + 0.3 * 0.6 + (30 * 0.5 + 20) / 1000)


def test_a_model_that_is_not_sparse_is_not_reported():
    peer, model = trained(Peer, "4×4", 0.75)
    with pytest.raises(AssertionError, match=r"dense: the sparsity is 0\.0000 instead of 0\.7500"):
        check(peer, model)


def test_the_mask_loop_by_hand_agrees_with_torch_ao():
    found = [trained(kind, "4×4", 0.75)[1] for kind in (MaskLoop, TorchAO)]
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert float(mse_loss(found[0](x), found[1](x))) < 1e-3


def test_every_library_has_a_module_of_its_own():
    assert all((FOLDER / "peers" / f"{module}.py").is_file() for module in MODULES)


def test_a_table_is_markdown():
    assert Table("t", ["a", "b"], [["1", "2"]]).markdown() == "### t\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"


ROOT = FOLDER.parent
RUN = {"machine": "a machine", "python": "3.11", "versions": {"torch": "2"}, "absent": {"other": "why"}}


def measured(library: str, seed: int, accuracy: float, sparsity: float = 0.95) -> Measurement:
    case = {"task": "MLP on Fashion-MNIST", "pattern": "4×4", "sparsity": sparsity, "steps": 300}
    return Measurement("quality", {**case, "library": library, "seed": seed}, lambda: {"accuracy": accuracy})


def test_a_run_that_was_cut_measures_what_is_missing_and_what_failed(tmp_path):
    def fail() -> dict[str, float]:
        raise RuntimeError("cut")

    due = [measured("a", seed, 80.0 + seed) for seed in range(3)]
    results = Results(tmp_path / "measurements.jsonl")
    results.add(due[0], facts(1))
    results.add(Measurement("quality", due[1].case, fail), facts(1))
    again = Results(tmp_path / "measurements.jsonl")
    assert [one.case["seed"] for one in again.missing(due)] == [1, 2]
    assert [record.values for record in again.failed("quality")] == [{"error": "RuntimeError('cut')"}]
    for one in list(again.missing(due)):
        again.add(one, facts(1))
    assert not list(Results(tmp_path / "measurements.jsonl").missing(due))
    assert not again.failed("quality"), "the last measurement of a case counts"


def test_a_page_says_how_many_seeds_there_are_and_who_is_ahead(tmp_path):
    results = Results(tmp_path / "measurements.jsonl")
    results.start(RUN)
    for library, values in {"sparse_lightning, defaults": (83.0, 83.2), "mask loop by hand": (81.0, 81.4)}.items():
        for seed, accuracy in enumerate(values):
            results.add(measured(library, seed, accuracy), facts(1))
    results.add(measured("sparse_lightning, defaults", 2, 99.0), facts(1))  # a seed that the other does not have yet
    index, quality = pages(results)
    for page in (index, quality):
        page.write(tmp_path)
    row = "| 4×4, MLP on Fashion-MNIST | 95 % | – | 83.1 | 81.2 (mask loop by hand) | +1.9, **ahead** | 2 |"
    assert row in (tmp_path / "README.md").read_text("utf-8")
    assert row in block(results)
    text = (tmp_path / "quality.md").read_text("utf-8")
    assert "**Incomplete**: 3 of 5 seeds at most" in text
    assert "| mask loop by hand | 95 % | 81.2 | 0.4 | 2 |" in text


def test_a_difference_within_the_spread_is_not_called_one():
    assert verdict(Found([80.0, 82.0]), Found([81.0, 82.5])) == "-0.8, within the spread of 2.0"
    assert verdict(Found([80.0, 80.5]), Found([82.0, 82.5])) == "-2.0, **behind**"
    assert verdict(Found([80.0]), Found([82.0])) == "-2.0, one seed only"


def test_plots_have_no_ground_of_their_own(tmp_path):
    lines = {"sparse_lightning": [(1.0, 2.0, 1.5, 2.5), (2.0, 3.0, 3.0, 3.0)]}
    assert Plot("p", "t", "x", "y", lines).write(tmp_path) == "![t: y over x](p.svg)\n"
    text = (tmp_path / "p.svg").read_text("utf-8")
    assert "#ffffff" not in text
    assert "<dc:date>" not in text


def test_the_pages_in_docs_are_made_of_their_measurements(tmp_path):
    folder = ROOT / "docs" / "results"
    made = pages(Results(folder / "measurements.jsonl"))
    for page in made:
        page.write(tmp_path)
        assert (tmp_path / f"{page.name}.md").read_text("utf-8") == (folder / f"{page.name}.md").read_text("utf-8")
        assert all((folder / f"{plot.file}.svg").is_file() for plot in page.plots)
    assert "/tmp" not in (folder / "measurements.jsonl").read_text("utf-8")


def test_the_figures_of_the_readme_are_those_of_the_results():
    text = (ROOT / "README.md").read_text("utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0]
    whole = (ROOT / "docs" / "results" / "README.md").read_text("utf-8")
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) > 4
    assert all(row in whole.splitlines() for row in rows)
    assert (ROOT / shown.partition("](")[2].partition(")")[0]).is_file()


@pytest.mark.parametrize("count", range(2, 9))
def test_in_whole_runs_each_library_follows_each_other_one_equally_often(count):
    names = [f"library {i}" for i in range(count)]
    orders = [cost.in_turn(names, step) for step in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert followed == dict.fromkeys(permutations(names, 2), 2)


def test_whole_runs_of_libraries_are_those_that_pages_show(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "SIZES", [cost.Size(3 * 64 * 64, 3, batch=4), cost.Size(10**7, 1000)])
    monkeypatch.setattr(cost, "PATTERNS", ("4×4",))
    [measurement] = cost.runs([Peer, OursMagnitude, MaskLoop, TorchAO])
    results = Results(tmp_path / "measurements.jsonl")
    results.start(RUN)
    values = results.add(measurement, facts(1)).values
    assert list(values) == [OursMagnitude.name, MaskLoop.name]
    assert all(ratio > 0 for ratio in values.values())
    held = {"update": 0.5, "step held": 1.1, "checkpoint held": 1.0}
    for library in (MaskLoop.name, TorchAO.name):
        results.add(Measurement("cost", {**measurement.case, "library": library}, lambda: held), facts(1))
    found = with_runs(results.of("cost"), results.of("runs"))
    assert whole_run(found[0].values) == values[MaskLoop.name], "it was timed"
    assert whole_run(found[1].values) == pytest.approx(1.1 + 0.03 * 0.5), "it was added up"
