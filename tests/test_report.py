"""Reports: files are read back, and their numbers compared with counts that are made without the package."""

from __future__ import annotations

import csv
import json
import math
import threading
from importlib.util import find_spec

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib import pyplot
from matplotlib.image import imread
from matplotlib.text import Text
from safetensors import safe_open
from safetensors.torch import load_file
from small_nets import BATCHES, LAYERS, Net, batches

from sparse_lightning import (
    NM,
    Blocks,
    Constant,
    Coupled,
    Cubic,
    Linear,
    Neurons,
    SparseLightningError,
    Sparsifier,
    SparsityCallback,
    SparsityError,
)
from sparse_lightning.report import History, Outcome, Report, leave, sweep, write, write_report
from sparse_lightning.report.curves import draw_curves
from sparse_lightning.report.figures import pixels
from sparse_lightning.report.mask_figure import draw_masks
from sparse_lightning.report.mask_images import mask_image
from sparse_lightning.report.runs import runs_in
from sparse_lightning.report.sweep_figure import draw_sweep, lines_of

FILES = {"masks.safetensors", "masks.png", "sparsity.png", "table.txt", "results.json", "report.html"}


def pruning(**changes):
    """The callback of most tests."""
    settings = {"patterns": [Blocks(LAYERS, (4, 4))], "schedule": Cubic(0.75, 0, 0.9), "update_every": 2}
    return SparsityCallback(**{**settings, **changes})


def trainer(*callbacks, **options):
    """A quiet trainer."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {**quiet, "accelerator": "cpu", "enable_model_summary": False, "max_epochs": 2, **options}
    return L.Trainer(callbacks=list(callbacks), **settings)


def zero_tiles(weight: torch.Tensor, b: int = 4) -> float:
    """The fraction of the tiles of a weight that are zero."""
    rows, columns = weight.shape
    tiles = weight.detach().reshape(rows // b, b, columns // b, b).abs().amax((1, 3))
    return float((tiles == 0).float().mean())


def check_picture(path):
    """A picture that opens, has some size, and several colours."""
    picture = imread(path)[..., :3]
    assert min(picture.shape[:2]) > 200
    colours = np.unique((picture * 255).astype(int) @ [1 << 16, 1 << 8, 1])
    assert len(colours) > 10, f"{path.name} is nearly blank"
    return picture


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a report beside a dense one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    net, callback, report = Net(), pruning(), Report(folder, dense={"val_loss": 0.25})
    # Report stands first: it must not matter.
    trainer(report, callback).fit(net)
    return folder, net, callback, report


def test_a_run_leaves_its_files(run):
    folder, _, _, report = run
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / "table.txt").read_text(encoding="utf-8") == report.table + "\n"


def test_the_table_has_what_is_counted_from_the_weights(run):
    _, net, _, report = run
    lines = report.table.splitlines()
    assert lines[0].split() == ["parameter", "shape", "block", "target", "actual"]
    for line, weight, shape in ((lines[2], net.up.weight, "32×16"), (lines[3], net.down.weight, "8×32")):
        name, seen, block, target, actual = line.split()
        assert (name.endswith(".weight"), seen, block) == (True, shape, "4×4")
        assert float(actual) == pytest.approx(zero_tiles(weight), abs=5e-5)
        assert float(target) == pytest.approx(0.75, abs=5e-5)
    assert lines[4].split() == ["all", "768", "weights", "0.7500", "0.7500"]


def test_the_table_has_the_metrics_dense_beside_sparse(run):
    _, net, _, report = run
    with torch.no_grad():
        losses = [torch.nn.functional.mse_loss(net(x), y) for x, y in batches(2)]
    heading, *rest = report.table.splitlines()[-5:]
    assert heading.split() == ["after", str(2 * BATCHES), "steps", "dense", "sparse"]
    name, dense, sparse = rest[-1].split()
    assert (name, dense) == ("val_loss", "0.2500")
    assert float(sparse) == pytest.approx(float(sum(losses) / 2), abs=1e-4)
    assert rest[-2].split() == ["actual", "sparsity", "-", "0.7500"]


def test_actual_is_counted_and_not_what_the_mask_says(tmp_path):
    class Spoil(L.Callback):
        def on_train_end(self, trainer, pl_module):
            with torch.no_grad():
                pl_module.down.weight.fill_(1.0)

    net, callback, report = Net(), pruning(), Report(tmp_path)
    trainer(callback, Spoil(), report).fit(net)
    _, _, up, down, *_ = report.table.splitlines()
    assert (up.split()[-2:], down.split()[-2:]) == (["0.7500", "0.7500"], ["0.7500", "0.0000"])


def test_masks_are_saved_by_name(run):
    folder, net, callback, _ = run
    masks = load_file(folder / "masks.safetensors")
    assert {name: (mask.dtype, tuple(mask.shape)) for name, mask in masks.items()} == {
        "up.weight": (torch.bool, (8, 4)),
        "down.weight": (torch.bool, (2, 8)),
    }
    for name, mask in masks.items():
        assert torch.equal(mask, callback.sparsifier.masks[name])
        wide = mask.repeat_interleave(4, 0).repeat_interleave(4, 1)
        assert torch.equal(net.get_parameter(name) == 0, wide), "the mask is True where weights are not zero"
    with safe_open(folder / "masks.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["True"], metadata["step"], float(metadata["actual"])) == ("pruned", str(2 * BATCHES), 0.75)
    assert metadata["format"] == "sparse_lightning.masks", "what readers of the file know it by"


def test_results_are_plain_numbers(run):
    folder, net, _, report = run
    found = json.loads((folder / "results.json").read_text())
    assert found["metric"] == "val_loss"
    assert found["dense"] == {"val_loss": 0.25}
    assert found["sparse"]["val_loss"] == report.results["sparse"]["val_loss"]
    assert not any(name.startswith("sparsity") for name in found["sparse"])
    assert (found["target"], found["actual"], found["step"]) == (0.75, 0.75, 2 * BATCHES)
    up = found["parameters"][0]
    assert (up["parameter"], up["shape"], up["weights"]) == ("up.weight", [32, 16], 512)
    assert up["zero"] == int((net.up.weight == 0).sum())
    assert found["scopes"] == [
        {"name": "up.weight", "pattern": "blocks", "blocks": 32, "kept": 8},
        {"name": "down.weight", "pattern": "blocks", "blocks": 16, "kept": 4},
    ]
    history = found["history"]
    assert (history["steps"], history["actual"]) == (report.steps, report.actual)
    assert history["loss"] == pytest.approx(report.loss, rel=1e-5)
    assert history["metrics"]["val_loss"]["steps"] == [BATCHES, 2 * BATCHES], "one value for each validation"
    assert history["metrics"]["val_loss"]["values"][-1] == pytest.approx(found["sparse"]["val_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["masks.png", "sparsity.png"])
def test_pictures_are_not_blank(run, name):
    check_picture(run[0] / name)


def test_the_mask_of_each_layer_is_drawn(run):
    _, _, callback, _ = run
    figure = draw_masks(callback.sparsifier.masks)
    for axes, (name, mask) in zip(figure.axes, callback.sparsifier.masks.items(), strict=True):
        assert np.array_equal(np.asarray(axes.images[0].get_array()), 1.0 - mask.float().numpy())
        title = axes.get_title(loc="left")
        assert name in title
        assert f"{float(mask.float().mean()):.1%} pruned" in title


def test_curves_show_what_was_recorded(run):
    report = run[-1]
    figure = draw_curves(report)
    axes, behind = figure.axes
    lines = {line.get_label().split(",")[0]: line for line in (*axes.get_lines(), *behind.get_lines())}
    assert np.array_equal(lines["actual sparsity"].get_ydata(), report.actual)
    assert np.array_equal(lines["target"].get_xdata(), report.steps)
    assert np.array_equal(lines["training loss"].get_ydata(), report.loss)
    assert (axes.get_xlabel(), axes.get_ylabel(), behind.get_ylabel()) == (
        "optimizer step",
        "sparsity",
        "training loss",
    )


def test_history_has_every_update_and_the_loss_of_every_step(run):
    report, schedule = run[-1], Cubic(0.75, 0, 0.9).resolve(2 * BATCHES)
    updates = [step for step in range(2 * BATCHES) if schedule.is_update(step, 2)]
    assert report.steps == [*updates, 2 * BATCHES]
    assert report.target == [pytest.approx(schedule(step)) for step in report.steps]
    assert report.actual == sorted(report.actual)
    assert report.actual[-1] == 0.75
    assert report.loss_steps == list(range(1, 2 * BATCHES + 1))
    assert all(math.isfinite(loss) for loss in report.loss)


def test_the_loss_is_that_of_the_training_step():
    class Losses(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen.append(float(trainer.callback_metrics["loss"]))

    history, losses = History(), Losses()
    trainer(history, losses).fit(Net())
    assert history.loss == losses.seen
    assert history.steps == [], "there is no sparsity to record in a dense run"


def test_accumulated_batches_are_one_step():
    history = History()
    trainer(history, pruning(), accumulate_grad_batches=4).fit(Net())
    assert history.loss_steps == sorted(set(history.loss_steps))
    assert history.loss_steps[-1] == 2 * BATCHES // 4


def test_manual_optimization_gives_the_logged_loss():
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            self.log("train_loss", loss)

    history = History()
    trainer(history, pruning()).fit(Manual())
    assert len(history.loss) == 2 * BATCHES
    assert history.actual[-1] == 0.75


def test_a_long_run_keeps_so_many_losses_and_they_are_spread():
    history = History(points=10)
    trainer(history, pruning(), max_epochs=6).fit(Net())
    assert 5 <= len(history.loss) <= 10
    assert set(np.diff(history.loss_steps)) == {8}
    assert history.loss_steps[-1] == 6 * BATCHES


def test_a_history_needs_room():
    with pytest.raises(SparsityError, match="points=1 of History is too small: it must be at least 2"):
        History(points=1)


def test_a_resumed_history_is_that_of_the_whole_run(tmp_path):
    class SaveFirstEpoch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "first.ckpt")

    def fit(ckpt_path=None):
        torch.manual_seed(0)
        history = History()
        run = trainer(pruning(), history, SaveFirstEpoch(), max_epochs=3)
        run.fit(Net(), ckpt_path=ckpt_path, weights_only=True)
        return history

    whole = fit()
    resumed = fit(tmp_path / "first.ckpt")
    assert resumed.state_dict() == whole.state_dict()
    kinds = {type(value) for values in whole.state_dict().values() if isinstance(values, list) for value in values}
    assert kinds == {int, float}


def test_a_second_trainer_begins_anew_and_a_second_fit_goes_on():
    history, callback = History(), pruning(schedule=Linear(0.5, end=4))
    first, net = trainer(history, callback, max_epochs=1), Net()
    first.fit(net)
    first.fit_loop.max_epochs = 2
    first.fit(net)
    assert history.loss_steps == list(range(1, 2 * BATCHES + 1))
    assert history.steps == sorted(set(history.steps))
    trainer(history, pruning(), max_epochs=1).fit(Net())
    assert history.loss_steps == list(range(1, BATCHES + 1))


def test_coupled_parameters_each_have_a_row(tmp_path):
    net, callback, report = Net(), pruning(patterns=[Neurons("up", "down")]), Report(tmp_path)
    trainer(callback, report).fit(net)
    rows = [line.split() for line in report.table.splitlines()[2:5]]
    assert [(row[0], row[1]) for row in rows] == [("up.weight", "32×16"), ("up.bias", "32"), ("down.weight", "8×32")]
    assert {(row[-2], row[-1]) for row in rows} == {("0.7500", "0.7500")}
    assert float((net.up.weight == 0).all(1).float().mean()) == 0.75
    assert "in rows of 16" in draw_masks(callback.sparsifier.masks).axes[0].get_title(loc="left")


def test_weights_of_units_that_cross_are_counted_once(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    sparsifier = Sparsifier([Neurons("0", "1"), Neurons("1", "2")], Constant(0.5), update_every=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsifier.attach(net, optimizer, total_steps=10)
    net(torch.ones(1, 4)).sum().backward()
    sparsifier.before_step()
    optimizer.step()
    write_report(tmp_path, Outcome.of(sparsifier), History(), {})
    sparsifier.detach()
    results = json.loads((tmp_path / "results.json").read_text())
    held = [p for name, p in net.named_parameters() if name != "2.bias"]
    assert results["weights"] == sum(p.numel() for p in held)
    assert results["zero"] == sum(int((p == 0).sum()) for p in held)


def test_a_bias_that_is_zero_by_chance_is_not_counted_as_pruned(tmp_path):
    net, callback = Net(), pruning(patterns=[Neurons("up", "down")], schedule=Constant(0.5))
    torch.nn.init.zeros_(net.up.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    callback.sparsifier.attach(net, optimizer, total_steps=10)
    assert [row.actual for row in Outcome.of(callback.sparsifier).rows] == [0.0] * 3
    callback.sparsifier.detach()


def test_two_callbacks_have_one_report(tmp_path):
    net, report = Net(), Report(tmp_path)
    blocks, fine = pruning(patterns=[Blocks("up.weight", (4, 4))]), pruning(patterns=[NM("down.weight")])
    trainer(blocks, fine, report).fit(net)
    assert set(load_file(tmp_path / "masks.safetensors")) == {"up.weight", "down.weight"}
    counted = int((net.up.weight == 0).sum() + (net.down.weight == 0).sum()) / 768
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["actual"] == pytest.approx(counted)
    assert report.actual[-1] == pytest.approx(counted)


def test_a_report_on_nothing_raises_before_training(tmp_path):
    with pytest.raises(
        SparseLightningError, match="Report needs a SparsityCallback: add one to the Trainer's callbacks"
    ):
        trainer(Report(tmp_path)).fit(Net())
    with pytest.raises(SparseLightningError, match="a report needs a Sparsifier: add a SparsityCallback"):
        Outcome.of([])
    assert not any(tmp_path.iterdir())


def test_a_report_is_written_without_a_trainer(tmp_path):
    net = Net()
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5), update_every=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    sparsifier.attach(net, optimizer, total_steps=10)
    for x, y in batches(2):
        torch.nn.functional.mse_loss(net(x), y).backward()
        sparsifier.before_step()
        optimizer.step()
    results = {"sparse": {"val_loss": math.nan}}
    text = write_report(tmp_path / "new" / "folder", Outcome.of(sparsifier), History(), results)
    with pytest.warns(DeprecationWarning, match=r"report\.leave is deprecated: use write_report with Outcome\.of"):
        assert leave(tmp_path / "former", sparsifier, History(), results) == text
    sparsifier.detach()
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == FILES
    assert text.splitlines()[-1].split() == ["val_loss", "nan"]
    found = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert (found["dense"], found["sparse"]) == ({}, {"val_loss": None})


def test_a_report_can_be_written_again_with_other_results(run, tmp_path):
    report = run[-1]
    text = write_report(tmp_path, report.outcome, report, {"sparse": {"test_accuracy": 0.5}})
    assert text.splitlines()[-1].split() == ["test_accuracy", "0.5000"]
    with pytest.warns(DeprecationWarning, match=r"report\.write is deprecated: use write_report"):
        assert write(tmp_path, report.outcome, report, {"sparse": {"test_accuracy": 0.5}}) == text


class WithInputs(Net):
    """Its forward pass is timed on example inputs, which are in single precision."""

    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(2, 16)


class WithUnits(WithInputs):
    """Without the norm, which pins the units between its layers."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Identity()


PATTERNS = {"blocks": (WithInputs, Blocks(LAYERS, (4, 4))), "compact": (WithUnits, Coupled())}


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("form", PATTERNS)
def test_a_report_of_any_precision_has_the_time_of_a_forward_pass(tmp_path, form, precision):
    build, pattern = PATTERNS[form]
    trainer(pruning(patterns=[pattern]), Report(tmp_path), precision=precision).fit(build())
    assert {path.name for path in tmp_path.iterdir()} == FILES
    measured = json.loads((tmp_path / "results.json").read_text("utf-8"))["footprint"]
    assert (measured["export"], measured["dense"]["ms"] > 0) == (form, True)
    assert (measured["sparse"]["ms"] is not None) == (form == "compact"), "kept blocks are not timed"


@pytest.mark.parametrize("form", PATTERNS)
def test_a_model_that_does_not_run_on_its_example_inputs_keeps_its_results(tmp_path, form, caplog):
    build, pattern = PATTERNS[form]

    class OfOtherInputs(L.Callback):
        def on_train_end(self, trainer, pl_module):
            pl_module.example_input_array = torch.zeros(2, 17)

    report = Report(tmp_path)
    trainer(pruning(patterns=[pattern]), OfOtherInputs(), report).fit(build())
    assert {path.name for path in tmp_path.iterdir()} == FILES
    measured = json.loads((tmp_path / "results.json").read_text("utf-8"))["footprint"]
    assert [measured[kind]["ms"] for kind in ("dense", "sparse")] == [None, None]
    assert measured["dense"]["parameters"] > measured["sparse"]["parameters"] > 0
    [line] = [line for line in report.table.splitlines() if line.startswith("ms per forward")]
    assert line.split()[-2:] == ["-", "-"]
    assert f"{build.__name__} is not timed, as it does not run on its example inputs: RuntimeError: mat1" in caplog.text


def test_a_model_that_cannot_be_copied_keeps_its_results(tmp_path, caplog):
    net = WithUnits()
    net.lock = threading.Lock()
    trainer(pruning(patterns=[Coupled()]), Report(tmp_path)).fit(net)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    measured = json.loads((tmp_path / "results.json").read_text("utf-8"))["footprint"]
    assert (measured["export"], measured["dense"]["ms"] > 0) == ("blocks", True)
    assert "the compacted model is left out of the results: TypeError: cannot pickle" in caplog.text


def test_fast_dev_run_leaves_a_report(tmp_path):
    trainer(pruning(), Report(tmp_path), fast_dev_run=True).fit(Net())
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_of_many_masks_some_are_drawn_and_the_page_says_so():
    masks = {f"layers.{i}.weight": torch.eye(4, dtype=torch.bool) for i in range(40)}
    figure = draw_masks(masks)
    assert len(figure.axes) == 24
    assert figure.axes[0].get_title(loc="left").startswith("layers.0.weight")
    assert figure.axes[-1].get_title(loc="left").startswith("layers.39.weight")
    assert figure.get_suptitle() == "160 of 640 blocks pruned, 25.0%; 16 of 40 masks are not drawn"


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (0, 3), (5, 1), (1, 700), (64, 1, 3, 3), (300, 1000), (2, 1000)], ids=str
)
def test_masks_of_any_shape_can_be_drawn(shape):
    mask = torch.rand(shape) < 0.3
    image = mask_image(mask)
    assert max(image.shape) <= 256
    if mask.numel():
        assert np.nanmean(image) == pytest.approx(1 - float(mask.float().mean()), abs=0.02)
    assert pixels(draw_masks({"a rather long name.of.a.parameter.in.some.module.of.a.large.model.weight": mask})).size


def test_titles_and_legends_stay_on_the_page_and_apart(run):
    for figure in (draw_curves(run[-1]), draw_masks(run[2].sparsifier.masks)):
        pixels(figure)
        renderer, page = figure.canvas.get_renderer(), figure.bbox
        shown = [(axes, axes.get_title(loc="left")) for axes in figure.axes if axes.get_title(loc="left")]
        titles = [text for axes, title in shown for text in axes.findobj(Text) if text.get_text() == title]
        assert len(titles) == len(shown)
        boxes = [thing.get_window_extent(renderer) for thing in (*titles, *figure.legends)]
        assert boxes
        for box in boxes:
            assert min(box.x0, box.y0) >= 0
            assert box.x1 <= page.x1
            assert box.y1 <= page.y1
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_curves_of_losses_that_are_not_finite(tmp_path):
    history = History()
    history.loss_steps, history.loss = list(range(60)), [math.nan, math.inf] * 30
    figure = draw_curves(history)
    figure.savefig(tmp_path / "curves.png")
    assert np.isnan(figure.axes[1].get_lines()[0].get_ydata()).all(), "nothing to draw, and no error"
    empty = draw_curves(History())
    empty.savefig(tmp_path / "empty.png")
    assert not any(axes.get_lines() for axes in empty.axes)


def test_no_figure_is_left_in_pyplot(run):
    assert pyplot.get_fignums() == []


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_gets_a_picture_of_each_mask_at_each_update_and_all_at_the_end(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="")
    report = Report(tmp_path / "files")
    trainer(pruning(), report, logger=logger).fit(Net())
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert set(events.Tags()["images"]) == {"masks", "masks/up.weight", "masks/down.weight"}
    assert [event.step for event in events.Images("masks/up.weight")] == report.steps[:-1]
    (page,) = events.Images("masks")
    assert page.step == 2 * BATCHES
    (tmp_path / "page.png").write_bytes(page.encoded_image_string)
    assert np.array_equal(check_picture(tmp_path / "page.png"), check_picture(tmp_path / "files" / "masks.png"))
    (tmp_path / "last.png").write_bytes(events.Images("masks/up.weight")[-1].encoded_image_string)
    last = imread(tmp_path / "last.png")[..., :3]
    assert last.shape[0] == 2 * last.shape[1] == 128
    dark = last[8::16, 8::16].mean(-1) < 0.6
    assert np.array_equal(dark, ~load_file(tmp_path / "files" / "masks.safetensors")["up.weight"].numpy())


def make_run(folder, overrides, results=None):
    """What Hydra and a run leave in a folder."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {x}\n" for x in overrides) or "[]\n")
    if results is not None:
        accuracy, target = results
        found = {"metric": "val_accuracy", "dense": {"val_accuracy": 0.97}, "sparse": {"val_accuracy": accuracy}}
        (folder / "results.json").write_text(json.dumps({**found, "target": target, "actual": target - 0.001}))


@pytest.fixture
def swept(tmp_path):
    """A sweep of two sparsities and two criteria, of which one run has failed and one was cut short."""
    grid = [(0.5, "magnitude", 0.96), (0.9, "magnitude", 0.90), (0.5, "taylor", 0.965), (0.9, "taylor", 0.93)]
    for i, (final, criterion, accuracy) in enumerate(grid):
        make_run(tmp_path / str(i), [f"schedule.final={final}", f"criterion={criterion}", "seed=3"], (accuracy, final))
    make_run(tmp_path / "10", ["schedule.final=0.5", "criterion=fisher", "seed=3"])
    make_run(tmp_path / "9", ["schedule.final=0.9", "criterion=fisher", "seed=3"])
    (tmp_path / "9" / "results.json").write_text('{"metric": "val_a')
    return tmp_path


def test_a_sweep_becomes_one_table(swept):
    text = sweep(swept)
    lines = [line.split() for line in text.splitlines()]
    metrics = ["val_accuracy", "dense", "val_accuracy", "sparse"]
    assert lines[0] == ["run", "schedule.final", "criterion", "target", "actual", *metrics]
    assert [line[0] for line in lines[2:8]] == ["2", "0", "3", "1", "9", "10"], "by target, the best first, failed last"
    assert lines[2] == ["2", "0.5", "taylor", "0.5000", "0.4990", "0.9700", "0.9650"]
    assert lines[6] == ["9", "0.9", "fisher", "failed"]
    assert "2 of 6 runs failed" in text
    assert "seed" not in text, "what is the same in all runs tells nothing"
    assert (swept / "sweep.txt").read_text(encoding="utf-8") == text + "\n"


def test_a_sweep_becomes_a_csv_with_all_runs(swept):
    sweep(swept)
    rows = list(csv.DictReader((swept / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["failed"] * 2
    assert float(rows[0]["val_accuracy sparse"]) == 0.965
    assert rows[-1]["val_accuracy sparse"] == ""


def test_a_sweep_becomes_a_picture_with_a_line_for_each_criterion(swept):
    sweep(swept)
    check_picture(swept / "sweep.png")
    figure = draw_sweep(runs_in(swept), ["schedule.final", "criterion"], "val_accuracy")
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["magnitude", "taylor", "dense"]
    assert lines["taylor"].get_xdata().tolist() == [0.499, 0.899]
    assert lines["taylor"].get_ydata().tolist() == [0.965, 0.93]
    assert axes.get_title(loc="left") == "4 of 6 runs, 2 failed"


def test_a_sweep_that_is_made_again_is_the_same(swept):
    assert sweep(swept) == sweep(swept)


def test_a_sweep_in_which_all_has_failed(tmp_path):
    make_run(tmp_path / "0", ["criterion=taylor"])
    assert "1 of 1 runs failed" in sweep(tmp_path)
    check_picture(tmp_path / "sweep.png")


def test_runs_with_several_choices_are_named_by_all_of_them(tmp_path):
    for i, (rate, every) in enumerate([("0.1", "5"), ("0.1", "10"), ("0.2", "5")]):
        make_run(tmp_path / str(i), [f"+optimizer.lr={rate}", f"update_every={every}"], (0.9, 0.5))
    lines = lines_of(runs_in(tmp_path), ["optimizer.lr", "update_every"], "val_accuracy")
    assert next(iter(lines)) == "optimizer.lr=0.1, update_every=5"
    assert len(lines) == 3


def test_real_runs_can_be_swept(tmp_path):
    for i, final in enumerate((0.25, 0.75)):
        trainer(pruning(schedule=Linear(final, end=0.9)), Report(tmp_path / str(i))).fit(Net())
        (tmp_path / str(i) / ".hydra").mkdir()
        (tmp_path / str(i) / ".hydra" / "overrides.yaml").write_text(f"- schedule.final={final}\n")
    rows = [line.split() for line in sweep(tmp_path).splitlines()]
    assert rows[0][-2:] == ["val_loss", "sparse"]
    assert [row[:4] for row in rows[2:]] == [["0", "0.25", "0.2500", "0.2500"], ["1", "0.75", "0.7500", "0.7500"]]


def test_a_folder_without_runs_raises(tmp_path):
    with pytest.raises(SparseLightningError, match=r"has no runs: .*Pass the folder of a multirun"):
        sweep(tmp_path)
