"""SparsityCallback: what it leaves behind, what it says, and what it refuses."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from small_nets import LAYERS, Net
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sparse_lightning import (
    AdamFisher,
    Blocks,
    BlockSpec,
    CheckpointError,
    Constant,
    Cubic,
    Custom,
    FlowError,
    Global,
    Gradual,
    Linear,
    Movement,
    Neurons,
    PatternError,
    ScopeSpec,
    ScoreWarning,
    SparseLightningError,
    Sparsifier,
    SparsityCallback,
    SparsityError,
    Taylor,
    Uniform,
    Wanda,
)


def callback(**changes):
    """The callback of most tests."""
    settings = {"patterns": [Blocks(LAYERS, (4, 4))], "schedule": Cubic(final=0.75, end=0.9), "update_every": 2}
    return SparsityCallback(**{**settings, **changes})


def trainer(*callbacks, **options):
    """A quiet trainer."""
    quiet = {"logger": False, "enable_checkpointing": False}
    return L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**quiet, "max_epochs": 2, **options},
    )


def anatomy(net):
    """All that could give away that something was attached."""
    return (
        list(net.state_dict()),
        [type(module) for module in net.modules()],
        [name for name, _ in net.named_buffers()],
        [name for name, _ in net.named_parameters()],
        [sorted(vars(module)) for module in net.modules() if module is not net],
    )


class Looks(L.Callback):
    """Compares the model in the middle of training."""

    def __init__(self, plain):
        self.plain, self.looked = plain, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Nothing may show."""
        assert anatomy(pl_module) == self.plain
        self.looked += 1


@pytest.mark.parametrize("criterion", [None, Wanda(), Movement()], ids=["magnitude", "wanda", "movement"])
def test_no_trace(criterion):
    net = Net()
    plain = anatomy(net)
    look = Looks(plain)
    trainer(callback(criterion=criterion), look).fit(net)
    assert look.looked
    assert anatomy(net) == plain
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_the_checkpoint_loads_into_the_plain_model_without_this_package(tmp_path):
    net = Net()
    run = trainer(callback())
    run.fit(net)
    run.save_checkpoint(tmp_path / "sparse.ckpt")
    program = f"""
import sys
sys.modules["sparse_lightning"] = None  # an import fails from here on
import torch
from torch import nn
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)
plain = Plain()
plain.load_state_dict(torch.load({str(tmp_path / "sparse.ckpt")!r}, weights_only=True)["state_dict"], strict=True)
print([int((w == 0).sum()) for w in (plain.up.weight, plain.down.weight)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[384, 192]", done.stderr


def test_what_is_logged(tmp_path):
    net, ours = Net(), callback(patterns=[Blocks("up.weight", (4, 4)), Blocks("down.weight", (4, 4))])
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    run = trainer(ours, logger=logger)
    run.fit(net)
    lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    head = lines[0].split(",")
    rows = [dict(zip(head, line.split(","), strict=True)) for line in lines[1:]]
    rows = [row for row in rows if row["sparsity/target"]]
    plan = Cubic(final=0.75, end=0.9).resolve(16)
    assert [int(row["step"]) for row in rows] == [step for step in range(16) if plan.is_update(step, 2)]
    for row in rows:
        target = plan(int(row["step"]))
        assert float(row["sparsity/target"]) == pytest.approx(target)
        pruned = int(32 * target + 1e-9), int(16 * target + 1e-9)
        assert float(row["sparsity/blocks"]) == pytest.approx(pruned[0] / 32)
        assert float(row["sparsity/blocks_2"]) == pytest.approx(pruned[1] / 16)
        assert float(row["sparsity/actual"]) == pytest.approx((pruned[0] * 16 + pruned[1] * 16) / 768)
    assert float(rows[0]["sparsity/churn"]) == 0
    assert {"sparsity/target", "sparsity/actual"} <= set(run.progress_bar_metrics)


def test_the_summary_names_what_was_attached(caplog):
    with caplog.at_level("INFO"):
        trainer(callback(), max_steps=1).fit(Net())
    assert "up.weight 32×16" in caplog.text
    assert "4×4" in caplog.text


def test_a_second_fit_goes_on_and_a_new_trainer_starts_the_schedule_again():
    net, ours = Net(), callback(schedule=Linear(0.5, end=10), update_every=1)
    first = trainer(ours, max_epochs=1)
    first.fit(net)
    masks = copy.deepcopy(ours.state_dict()["masks"])
    assert ours.sparsifier.step == 8
    first.fit_loop.max_epochs = 2
    first.fit(net)
    assert ours.sparsifier.step == 16
    assert int((net.up.weight == 0).sum()) == 256
    second = trainer(ours, max_epochs=1)
    second.fit(net)
    assert ours.sparsifier.step == 8
    assert int((net.up.weight == 0).sum()) == 256, "what was pruned stays pruned"
    assert masks.keys() == ours.state_dict()["masks"].keys()


def test_another_model_with_the_same_callback_is_told_of_its_masks():
    """Those of a copy of the model, as one that is loaded from a checkpoint, are zero already."""
    net, ours = Net(), callback()
    trainer(ours).fit(net)
    trainer(ours).fit(copy.deepcopy(net))  # a warning would be an error
    other = Net()
    with pytest.warns(UserWarning, match=r"up.weight, down.weight had blocks pruned in the last model, and they were"):
        trainer(ours).fit(other)
    assert int((other.up.weight == 0).sum()) == 384


@pytest.mark.parametrize("nothing", [{"limit_train_batches": 0}, {"max_steps": 0}, {"max_epochs": 0}], ids=str)
def test_a_fit_that_trains_nothing_leaves_the_model(nothing):
    net = Net()
    before = copy.deepcopy(net.state_dict())
    trainer(callback(), **nothing).fit(net)
    assert all(torch.equal(net.state_dict()[name], weight) for name, weight in before.items())


class Endless(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        while True:
            yield torch.ones(16), torch.ones(8)


def test_parts_of_a_run_whose_length_nobody_knows():
    """Lightning says −1 where data has no length, and inf where epochs have no end."""
    net = Net()
    net.train_dataloader = lambda: DataLoader(Endless())
    for run in (trainer(callback(), max_epochs=1), trainer(callback(), max_epochs=-1, max_time="00:00:00:01")):
        with pytest.raises(SparsityError, match=r"end=0.9 of Cubic is a part of the run, and nobody knows how long"):
            run.fit(net)
    trainer(callback(), max_epochs=1, max_steps=9).fit(net)
    assert int((net.up.weight == 0).sum()) == 384


def test_validate_and_test_before_and_after_a_fit():
    net, ours = Net(), callback()
    net.test_step, net.test_dataloader = net.validation_step, net.val_dataloader
    run = trainer(ours)
    run.validate(net, verbose=False)
    run.fit(net)
    run.validate(net, verbose=False)
    run.test(net, verbose=False)
    assert int((net.up.weight == 0).sum()) == 384


def test_ten_fits_leave_what_one_leaves():
    def traces(net):
        gc.collect()
        hooks = sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in net.modules()
        )
        kinds = [(type(o), o) for o in gc.get_objects()]
        numbers = sum(o.numel() for kind, o in kinds if issubclass(kind, torch.Tensor))
        return hooks, numbers, sum(issubclass(kind, Sparsifier) for kind, _ in kinds)

    net, ours, found = Net(), callback(criterion=Wanda()), []
    for i in range(10):
        run = trainer(ours, max_steps=4)
        run.fit(net)
        del run
        if i in (1, 9):  # the first fit makes what is made once, such as caches
            found.append(traces(net))
    assert found[0][0] == 0
    assert found[1] == found[0]


def test_nothing_keeps_the_model_alive_after_detach():
    """Lightning ties a callback to the model by its `log`; the Sparsifier in it lets go."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    ours = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5, end=9), criterion=Wanda(), update_every=1)
    ours.attach(net, optimizer)
    for _ in range(2):
        net(torch.ones(2, 16)).sum().backward()
        ours.before_step()
        optimizer.step()
    watch = weakref.ref(net.up.weight)
    ours.detach()
    del net, optimizer
    gc.collect()
    assert watch() is None
    assert ours.state_dict()["step"] == 2


def test_two_callbacks_on_one_model():
    net = Net()
    one = callback(patterns=[Blocks("up.weight", (4, 4))])
    two = callback(patterns=[Blocks("down.weight", (2, 2))], schedule=Constant(0.5))
    assert one.state_key != two.state_key
    trainer(one, two).fit(net)
    assert int((net.up.weight == 0).sum()) == 384
    assert int((net.down.weight == 0).sum()) == 128


def test_two_callbacks_that_want_the_same_weights():
    one, two = callback(), callback(patterns=[Neurons("up", "down")])
    with pytest.raises(PatternError, match=r"of another callback claim the same weights"):
        trainer(one, two).fit(Net())


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_flatten_parameters(strategy):
    run, ours = trainer(callback()), callback()
    # Neither can be made on a CPU: the hook is given one that was not.
    run._accelerator_connector.strategy = object.__new__(strategy)
    with pytest.raises(PatternError, match=rf"{strategy.__name__} flattens parameters.*ModelParallelStrategy"):
        ours.setup(run, Net(), "fit")


class Exploding(Net):
    """Gradients of one parameter are not finite in some steps."""

    bad = {4: float("nan"), 6: float("inf")}  # noqa: RUF012 - read only

    def on_after_backward(self):
        """Break one gradient."""
        if self.global_step in self.bad:
            self.down.weight.grad[3, 5] = self.bad[self.global_step]


@pytest.mark.parametrize("criterion", [Taylor(), Movement()], ids=["taylor", "movement"])
def test_nan_and_inf_gradients_leave_the_masks_and_name_the_parameter(criterion):
    net, ours = Exploding(), callback(schedule=Linear(0.5, end=8), criterion=criterion)
    masks = {}

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            masks[trainer.global_step - 1] = {k: v.clone() for k, v in ours.sparsifier.masks.items()}
            # The broken step itself would end the training of any model: go on as if it had been skipped.
            with torch.no_grad():
                for p in pl_module.parameters():
                    p.nan_to_num_(0, 0, 0)
            for state in trainer.optimizers[0].state.values():
                for value in state.values():
                    value.nan_to_num_(0, 0, 0)

    with pytest.warns(ScoreWarning, match=r"down.weight have scores that are not finite at step [46]: the masks stay"):
        trainer(ours, Watch()).fit(net)
    assert all(torch.equal(masks[3][k], masks[4][k]) for k in LAYERS), "the update was skipped"
    assert not all(torch.equal(masks[4][k], masks[5][k]) for k in LAYERS), "and made at the next step"
    assert int(masks[8]["up.weight"].sum()) == 16


class Skips(Net):
    """Some batches have no loss, and so no gradients."""

    def training_step(self, batch, batch_idx):
        """Nothing at the step of an update."""
        return None if self.global_step == 4 and batch_idx == 4 else super().training_step(batch, batch_idx)


# Lightning warns of a step that returns nothing.
@pytest.mark.filterwarnings("ignore:.*returned `None`.*")
def test_a_step_without_gradients_postpones_the_update():
    net, ours = Skips(), callback(schedule=Linear(0.5, end=8), criterion=Taylor())
    with pytest.warns(ScoreWarning, match=r"up.weight, down.weight have no gradient at step 4"):
        trainer(ours).fit(net)
    assert int((net.up.weight == 0).sum()) == 256


def test_a_dense_run_that_is_resumed_with_the_callback_finishes_the_schedule(tmp_path):
    dense = trainer(max_epochs=1)
    dense.fit(Net())
    dense.save_checkpoint(tmp_path / "dense.ckpt")
    net, ours = Net(), callback(schedule=Linear(0.75), update_every=4)
    trainer(ours, max_epochs=2).fit(net, ckpt_path=tmp_path / "dense.ckpt")
    assert ours.sparsifier.step == 16
    assert int((net.up.weight == 0).sum()) == 384


class Raises(L.Callback):
    """Something goes wrong."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """In the middle."""
        if trainer.global_step == 11:
            raise RuntimeError("something went wrong")


# Lightning's own callback for exceptions makes Lightning warn.
@pytest.mark.filterwarnings("ignore:.*was called without a model.*", "ignore:.*no last checkpoint available.*")
def test_an_average_that_is_saved_on_an_exception_is_masked(tmp_path):
    ours = callback(schedule=Linear(0.75, end=8))
    saving = OnExceptionCheckpoint(tmp_path, "last words")
    with pytest.raises(RuntimeError, match="something went wrong"):
        trainer(ours, EMAWeightAveraging(decay=0.7), Raises(), saving, enable_checkpointing=True).fit(Net())
    saved = torch.load(tmp_path / "last words.ckpt", weights_only=True)["state_dict"]
    assert [int((saved[name] == 0).sum()) for name in LAYERS] == [384, 192]
    assert not ours.sparsifier.is_attached


def halves(model):
    """The scopes of a custom pattern."""
    return [ScopeSpec(BlockSpec(model.up.weight, (16, 16), name="up"))]


def test_the_key_of_the_state_is_the_same_in_every_process():
    key = callback(patterns=[Custom(halves)]).state_key
    assert "halves" in key
    assert "0x" not in key


def test_the_summary_has_what_the_budget_gives():
    for budget, texts in {
        Uniform(overrides={"up.*": 0.25}): ["0.25", "0.75"],
        Global(): ["0.75 shared", "0.75 shared"],
    }.items():
        ours = attach(schedule=Constant(0.75, end=9), budget=budget)
        assert [line.split("  ")[-1].strip() for line in ours.summary().splitlines()[2:]] == texts


def saved_state(patterns=None, **changes):
    """The state after a short run."""
    ours = callback(**({"patterns": patterns} if patterns else {}), **changes)
    trainer(ours, max_steps=4).fit(Net())
    return ours.state_dict()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (lambda: saved_state([Blocks("up.weight", (4, 4))]), r"it lacks down.weight, and has none"),
        (
            lambda: saved_state([Blocks(LAYERS, (8, 8))]),
            r"a mask of shape \(4, 2\) for up.weight, whose grid .* \(8, 4\)",
        ),
    ],
    ids=["other patterns", "other blocks"],
)
def test_a_checkpoint_of_another_model(state, text):
    ours = callback()
    ours.load_state_dict(state())
    with pytest.raises(CheckpointError, match=text):
        trainer(ours, max_steps=4).fit(Net())


def attach(net=None, optimizer=None, **changes):
    """A Sparsifier on a model."""
    net = net or Net()
    settings = {"patterns": [Blocks(LAYERS, (4, 4))], "schedule": Constant(0.5, end=9), "update_every": 2}
    made = Sparsifier(**{**settings, **changes})
    made.attach(net, optimizer or torch.optim.SGD(net.parameters(), lr=0.1))
    return made


def lazy():
    """A model with a layer whose shape is not known yet."""
    net = Net()
    net.up = nn.LazyLinear(32)
    return net


def frozen():
    """A model with a frozen layer."""
    net = Net()
    net.up.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: attach(schedule=Constant(0.5)), SparsityError, "whole steps|total"),
        (lambda: attach(update_every=0), SparsityError, "an update every 0 steps: it must be at least 1"),
        (lambda: attach(patterns=[Blocks("upp.weight", (4, 4))]), PatternError, "did you mean 'up.weight'"),
        (lambda: attach(patterns=[Blocks(LAYERS, (5, 4))]), PatternError, r"up.weight of shape \(32, 16\)"),
        (lambda: attach(patterns=[Neurons("up", "down"), Blocks(LAYERS, (4, 4))]), PatternError, "claimed"),
        (lambda: attach(criterion=AdamFisher()), FlowError, "exp_avg_sq is not there for up.weight"),
        (lambda: attach(frozen(), criterion=Taylor()), FlowError, "needs gradients, and up.weight is frozen"),
        (lambda: attach(lazy()), PatternError, "up.weight is lazy and has no shape yet"),
        (lambda: attach(lazy(), patterns=[Neurons("up", "down")]), PatternError, "up is lazy and has no shape yet"),
        (lambda: Constant(1.5), SparsityError, "1.5"),
        (lambda: attach().attach(Net(), []), SparseLightningError, "attached to a model already"),
        (lambda: Sparsifier([], Constant(0.5), method=Gradual()).target, SparseLightningError, "not attached"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_lazy_layer_that_no_pattern_names():
    net = lazy()
    made = attach(net, torch.optim.SGD(net.down.parameters(), lr=0.1), patterns=[Blocks("down.weight", (4, 4))])
    assert list(made.masks) == ["down.weight"]


class Counted(torch.optim.SGD):
    """Counts the steps of all of its kind."""

    steps = 0

    def step(self, closure=None):
        """One more."""
        Counted.steps += 1
        return super().step(closure)


def test_an_optimizer_is_tried_out_only_where_scores_read_its_state(monkeypatch):
    monkeypatch.setattr(Counted, "steps", 0)
    net = Net()
    attach(net, Counted(net.parameters(), lr=0.1))
    assert Counted.steps == 0
    with pytest.raises(FlowError, match="exp_avg_sq is not there"):
        attach(net, Counted(net.parameters(), lr=0.1), criterion=AdamFisher())
    assert Counted.steps > 0


def test_a_refused_attach_leaves_no_hooks():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5, end=9), criterion=AdamFisher())
    with pytest.raises(FlowError):
        made.attach(net, optimizer)
    assert not optimizer._optimizer_step_post_hooks
    assert not made.is_attached
    nn.functional.mse_loss(net(torch.ones(1, 16)), torch.ones(1, 8)).backward()
    optimizer.step()
