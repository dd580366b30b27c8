"""SparsityCallback in a Lightning Trainer: no trace in the model, logs, repeated fits, errors."""

from __future__ import annotations

import copy
import gc
import sys

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
    Blocks,
    BlockSpec,
    CheckpointError,
    Constant,
    Cubic,
    Custom,
    Linear,
    Movement,
    Neurons,
    PatternError,
    ScopeSpec,
    ScoreWarning,
    ShortRunWarning,
    Sparsifier,
    SparsityCallback,
    SparsityError,
    Taylor,
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
    """All names and types in a model that an attached callback could change."""
    return (
        list(net.state_dict()),
        [type(module) for module in net.modules()],
        [name for name, _ in net.named_buffers()],
        [name for name, _ in net.named_parameters()],
        [sorted(vars(module)) for module in net.modules() if module is not net],
    )


class Looks(L.Callback):
    """Compares the model with the plain one during training."""

    def __init__(self, plain):
        self.plain, self.looked = plain, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Compare."""
        assert anatomy(pl_module) == self.plain
        self.looked += 1


@pytest.mark.parametrize("criterion", [None, Wanda(), Movement()], ids=["magnitude", "wanda", "movement"])
def test_the_callback_leaves_no_trace_in_the_model(criterion):
    net = Net()
    plain = anatomy(net)
    look = Looks(plain)
    trainer(callback(criterion=criterion), look).fit(net)
    assert look.looked
    assert anatomy(net) == plain
    assert not any(module._forward_pre_hooks for module in net.modules())


class Plain(nn.Module):
    """The layers of `Net` without Lightning."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)


def test_the_checkpoint_loads_into_the_plain_model_without_this_package(tmp_path, monkeypatch):
    net = Net()
    run = trainer(callback())
    run.fit(net)
    run.save_checkpoint(tmp_path / "sparse.ckpt")
    for name in [n for n in sys.modules if n.partition(".")[0] == "sparse_lightning"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises an error
    plain = Plain()
    plain.load_state_dict(torch.load(tmp_path / "sparse.ckpt", weights_only=True)["state_dict"], strict=True)
    assert [int((w == 0).sum()) for w in (plain.up.weight, plain.down.weight)] == [384, 192]


def test_every_update_is_logged_with_target_and_actual_sparsity(tmp_path):
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


def test_the_summary_lists_the_attached_blocks(caplog):
    with caplog.at_level("INFO"):
        trainer(callback(), max_steps=1).fit(Net())
    assert "up.weight 32×16" in caplog.text
    assert "4×4" in caplog.text


def test_a_second_fit_resumes_and_a_new_trainer_restarts_the_schedule():
    net, ours = Net(), callback(schedule=Linear(0.5, end=10), update_every=1)
    first = trainer(ours, max_epochs=1)
    with pytest.warns(ShortRunWarning, match="beyond the run of 8 steps"):
        first.fit(net)
    masks = copy.deepcopy(ours.state_dict()["masks"])
    assert ours.sparsifier.step == 8
    first.fit_loop.max_epochs = 2
    first.fit(net)
    assert ours.sparsifier.step == 16
    assert int((net.up.weight == 0).sum()) == 256
    second = trainer(ours, max_epochs=1)
    with pytest.warns(ShortRunWarning, match="beyond the run of 8 steps"):
        second.fit(net)
    assert ours.sparsifier.step == 8
    assert int((net.up.weight == 0).sum()) == 256, "pruned blocks stay pruned"
    assert masks.keys() == ours.state_dict()["masks"].keys()


def test_a_callback_that_is_reused_on_another_model_warns():
    """No warning for a copy of the model, such as one loaded from a checkpoint: its pruned blocks are zero already."""
    net, ours = Net(), callback()
    trainer(ours).fit(net)
    trainer(ours).fit(copy.deepcopy(net))  # a warning would be an error
    other = Net()
    with pytest.warns(UserWarning, match=r"up.weight, down.weight had pruned blocks in the previous model"):
        trainer(ours).fit(other)
    assert int((other.up.weight == 0).sum()) == 384


@pytest.mark.parametrize("nothing", [{"limit_train_batches": 0}, {"max_steps": 0}, {"max_epochs": 0}], ids=str)
def test_a_fit_without_training_does_not_change_the_model(nothing):
    net = Net()
    before = copy.deepcopy(net.state_dict())
    trainer(callback(), **nothing).fit(net)
    assert all(torch.equal(net.state_dict()[name], weight) for name, weight in before.items())


class Endless(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        while True:
            yield torch.ones(16), torch.ones(8)


def test_a_schedule_in_fractions_of_a_run_of_unknown_length_raises_an_error():
    """Lightning estimates −1 steps for data without a length, and inf for max_epochs=-1."""
    net = Net()
    net.train_dataloader = lambda: DataLoader(Endless())
    for run in (trainer(callback(), max_epochs=1), trainer(callback(), max_epochs=-1, max_time="00:00:00:01")):
        with pytest.raises(SparsityError, match=r"end=0.9 of Cubic is a fraction.* total_steps is unknown"):
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


def test_repeated_fits_leak_no_hooks_and_no_tensors():
    def traces(net):
        gc.collect()
        hooks = sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in net.modules()
        )
        objects = gc.get_objects()
        kinds = set(map(type, objects))  # few kinds, of a million objects
        of_tensors = {kind for kind in kinds if issubclass(kind, torch.Tensor)}
        of_sparsifiers = {kind for kind in kinds if issubclass(kind, Sparsifier)}
        numbers = sum(o.numel() for o in objects if type(o) in of_tensors)
        return hooks, numbers, sum(type(o) in of_sparsifiers for o in objects)

    net, ours, found = Net(), callback(criterion=Wanda()), []
    others = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]  # of other tests: none is freed now
    for i in range(4):
        run = trainer(ours, max_steps=4)
        run.fit(net)
        del run
        if i in (1, 3):  # the first fit fills caches
            found.append(traces(net))
    assert found[0][0] == 0
    assert found[1] == found[0]
    del others


def test_two_callbacks_prune_one_model():
    net = Net()
    one = callback(patterns=[Blocks("up.weight", (4, 4))])
    two = callback(patterns=[Blocks("down.weight", (2, 2))], schedule=Constant(0.5))
    assert one.state_key != two.state_key
    trainer(one, two).fit(net)
    assert int((net.up.weight == 0).sum()) == 384
    assert int((net.down.weight == 0).sum()) == 128


def test_two_callbacks_on_the_same_weights_raise_an_error():
    one, two = callback(), callback(patterns=[Neurons("up", "down")])
    with pytest.raises(PatternError, match=r"of another callback claim the same weights"):
        trainer(one, two).fit(Net())


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_flatten_parameters_raise_an_error(strategy, monkeypatch):
    run, ours = trainer(callback()), callback()
    # Neither can be initialized on a CPU.
    monkeypatch.setattr(L.Trainer, "strategy", object.__new__(strategy))
    with pytest.raises(PatternError, match=rf"{strategy.__name__} flattens parameters.*ModelParallelStrategy"):
        ours.setup(run, Net(), "fit")


class Exploding(Net):
    """A model with gradients that are not finite at some steps."""

    bad = {4: float("nan"), 6: float("inf")}  # noqa: RUF012 - read only

    def on_after_backward(self):
        """Overwrite one gradient."""
        if self.global_step in self.bad:
            self.down.weight.grad[3, 5] = self.bad[self.global_step]


@pytest.mark.parametrize("criterion", [Taylor(), Movement()], ids=["taylor", "movement"])
def test_nan_and_inf_gradients_postpone_the_update_and_name_the_parameter(criterion):
    net, ours = Exploding(), callback(schedule=Linear(0.5, end=8), criterion=criterion)
    masks = {}

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            masks[trainer.global_step - 1] = {k: v.clone() for k, v in ours.sparsifier.masks.items()}
            # The step itself makes weights NaN in any model: continue as if it had been skipped.
            with torch.no_grad():
                for p in pl_module.parameters():
                    p.nan_to_num_(0, 0, 0)
            for state in trainer.optimizers[0].state.values():
                for value in state.values():
                    value.nan_to_num_(0, 0, 0)

    with pytest.warns(ScoreWarning, match=r"down.weight have scores that are not finite at step [46]: the masks stay"):
        trainer(ours, Watch()).fit(net)
    assert all(torch.equal(masks[3][k], masks[4][k]) for k in LAYERS), "the update was not postponed"
    assert not all(torch.equal(masks[4][k], masks[5][k]) for k in LAYERS), "the update was not made at the next step"
    assert int(masks[8]["up.weight"].sum()) == 16


class Skips(Net):
    """A model with a batch without loss, and so without gradients."""

    def training_step(self, batch, batch_idx):
        """Return None at the step of an update."""
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
    """Raises an error during training."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Raise at step 11."""
        if trainer.global_step == 11:
            raise RuntimeError("something went wrong")


# Lightning warns of its own callback for exceptions.
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
    """The scopes of a `Custom` pattern."""
    return [ScopeSpec(BlockSpec(model.up.weight, (16, 16), name="up"))]


def test_the_state_key_is_the_same_in_every_process():
    key = callback(patterns=[Custom(halves)]).state_key
    assert "halves" in key
    assert "0x" not in key


def saved_state(patterns=None, **changes):
    """The state after a short run."""
    ours = callback(**({"patterns": patterns} if patterns else {}), **changes)
    trainer(ours, max_steps=4).fit(Net())
    return ours.state_dict()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            lambda: saved_state([Blocks("up.weight", (4, 4))]),
            r"the checkpoint has no masks for down.weight: resume with",
        ),
        (
            lambda: saved_state([Blocks(LAYERS, (8, 8))]),
            r"a mask of shape \(4, 2\) for up.weight, whose grid .* \(8, 4\)",
        ),
    ],
    ids=["other patterns", "other blocks"],
)
def test_a_checkpoint_of_another_model_raises_an_error(state, text):
    ours = callback()
    ours.load_state_dict(state())
    with pytest.raises(CheckpointError, match=text):
        trainer(ours, max_steps=4).fit(Net())


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_is_not_resumed_with_other_patterns(tmp_path):
    def fit(patterns, **resumed):
        saving = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="state", enable_version_counter=False)
        callbacks = [SparsityCallback(patterns, Constant(0.5)), saving]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = L.Trainer(max_epochs=2 if resumed else 1, limit_val_batches=0, callbacks=callbacks, **quiet)
        trainer.fit(Net(), **resumed)

    fit([Blocks(LAYERS, (4, 4))])
    text = r"has masks of .*\(4, 4\).* but this callback is .*\(2, 2\).*same patterns"
    with pytest.raises(CheckpointError, match=text):
        fit([Blocks(LAYERS, (2, 2))], ckpt_path=tmp_path / "state.ckpt")
