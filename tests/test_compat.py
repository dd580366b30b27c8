"""Private names of other libraries that this package uses: each test fails by name when the library changes."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from subprocess import Popen

import lightning as L
import pytest
import torch
from accelerate import Accelerator
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

import sparse_lightning
from sparse_lightning.compat.accelerate import BeforeClipping, in_own_precision, plain_forward
from sparse_lightning.compat.hydra import CORE_PLUGINS, argument_parser, raising_errors, reading_files
from sparse_lightning.compat.lightning import (
    accumulates,
    make_loaders_again,
    prepared_batch,
    set_mesh_sizes,
    started_processes,
    state_key,
    validates_next,
)
from sparse_lightning.compat.omegaconf import resolving

PACKAGE = Path(sparse_lightning.__file__).parent


def test_hydra_internal_utils_get_args_parser_knows_the_flags_that_are_used():
    flags = "config_path config_name config_dir experimental_rerun multirun cfg info hydra_help shell_completion"
    options = argument_parser().parse_intermixed_args(["seed=1", "-m", "--config-dir", "x", "name=y"])
    assert set(flags.split()) <= set(vars(options))
    assert (options.overrides, options.multirun, options.config_dir) == (["seed=1", "name=y"], True, "x")


def test_hydra_internal_sources_registry_lets_files_be_measured_before_they_are_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1")
    seen: list[Path] = []
    with reading_files(seen.append), initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert hydra_compose("config").a == 1
    assert seen == [(tmp_path / "config.yaml").resolve()], "Hydra reads files by another class than it registers"
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        hydra_compose("config")
    assert len(seen) == 1, "files are measured only inside of the context"


def test_hydra_internal_core_plugins_has_the_basic_launcher_and_sweeper():
    homes = {
        found.__name__: found.__module__ for kind in (Launcher, Sweeper) for found in Plugins.instance().discover(kind)
    }
    assert homes["BasicLauncher"].startswith(f"{CORE_PLUGINS}.")
    assert homes["BasicSweeper"].startswith(f"{CORE_PLUGINS}.")


@pytest.mark.parametrize(("name", "before", "after"), [("_data_parallel_size", 5, 3), ("_tensor_parallel_size", 7, 2)])
def test_lightning_keeps_the_sizes_of_the_mesh_in_these_attributes(name, before, after):
    strategy = ModelParallelStrategy(data_parallel_size=5, tensor_parallel_size=7)
    assert vars(strategy).get(name) == before, f"ModelParallelStrategy has no {name} any more"
    set_mesh_sizes(strategy, 3, 2)
    assert vars(strategy)[name] == after


def test_lightning_procs_of_the_launcher_lists_started_processes():
    trainer = L.Trainer(strategy=DDPStrategy(), accelerator="cpu", devices=2, logger=False)
    assert hasattr(trainer.strategy.launcher, "procs"), "Lightning's launcher has no `procs` any more"
    process = Popen([sys.executable, "-c", ""])
    trainer.strategy.launcher.procs.append(process)
    assert started_processes(trainer) == [process]
    process.wait()


def test_lightning_generate_state_key_names_the_class_and_the_data():
    """Checkpoints of earlier runs are found by this text."""
    assert hasattr(L.Callback, "_generate_state_key"), "Lightning's Callback has no _generate_state_key any more"
    assert state_key(Timer(), patterns=["a", "b"]) == "Timer{'patterns': ['a', 'b']}"


def test_lightning_on_before_batch_transfer_calls_the_hooks_that_a_batch_of_training_goes_through():
    class Doubling(BoringModel):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return 2 * batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch + 1

        def on_train_batch_start(self, batch, batch_idx):
            found.append(prepared_batch(self.trainer, torch.ones(2)))

    found, quiet = [], {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    assert hasattr(Doubling, "_on_before_batch_transfer"), "LightningModule has no _on_before_batch_transfer any more"
    trainer = L.Trainer(accelerator="cpu", precision="bf16-true", max_steps=1, limit_val_batches=0, **quiet)
    trainer.fit(Doubling())
    assert found[0].tolist() == [3, 3]
    assert found[0].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Be aware that when using `ckpt_path`")
def test_lightning_makes_the_loaders_of_combined_loader_again_and_gives_them_their_states(tmp_path):
    """Steps are counted before states are read, which would be lost; without a resume, loaders are made once."""
    made, given = [], []

    class Loader(DataLoader):
        def state_dict(self):
            return {"batches": 1}

        def load_state_dict(self, state):
            given.append(state)

    class Counting(BoringModel):
        def train_dataloader(self):
            made.append(Loader(torch.ones(6, 32), batch_size=2))
            return made[-1]

        def on_fit_start(self):
            assert self.trainer.estimated_stepping_batches == 3
            assert hasattr(self.trainer.fit_loop, "_combined_loader"), "the fit loop has no _combined_loader any more"
            assert self.trainer.fit_loop._combined_loader._state_dicts() == [{"batches": 1}]
            make_loaders_again(self.trainer)

    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "max_epochs": 1, "limit_val_batches": 0}
    L.Trainer(callbacks=[every], **quiet).fit(Counting())
    assert (len(made), given) == (1, [])
    resumed = L.Trainer(enable_checkpointing=False, **quiet)
    resumed.fit(Counting(), ckpt_path=tmp_path / "step=1.ckpt")
    assert (len(made), given) == (3, [{"batches": 1}])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_lightning_should_accumulate_and_should_check_val_fx_of_its_data_fetcher_tell_what_follows_a_batch():
    told, followed = [], []

    class Tells(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert trainer.fit_loop._data_fetcher is not None
            told.append((accumulates(trainer), validates_next(trainer)))
            followed.append("batch")

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            followed.append("step")

        def on_validation_start(self, trainer, pl_module):
            followed.append("validation")

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 0}
    model = BoringModel()
    model.train_dataloader = lambda: DataLoader(torch.ones(14, 32), batch_size=2)
    length = {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 2, "limit_val_batches": 1}
    L.Trainer(callbacks=[Tells()], **length, **quiet).fit(model)
    epoch = [(True, False), (True, True), (False, False), (True, True), (True, False), (False, True), (False, False)]
    assert told == 2 * epoch
    happened = "batch batch validation step batch batch validation batch step batch validation step batch"
    assert followed == 2 * happened.split()


def test_accelerate_optimizers_of_an_accelerator_are_those_that_it_unscales_before_clipping():
    layer = torch.nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert hasattr(accelerator, "_optimizers"), "Accelerator has no _optimizers any more"
    plain, called = Accelerator.unscale_gradients, []
    hooks = [BeforeClipping(o, lambda: called.append(1)) for o in (optimizer.optimizer, object())]
    layer(torch.ones(1, 2)).sum().backward()
    accelerator.clip_grad_norm_(layer.parameters(), 1.0)
    assert called == [1], "Accelerator.clip_grad_norm_ does not call unscale_gradients once"
    for hook in hooks:
        hook.remove()
    assert Accelerator.unscale_gradients is plain


@pytest.mark.usefixtures("own_precision")
def test_accelerate_keeps_the_forward_that_it_wraps_as_original_forward():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    plain, x = model.forward, torch.rand(3, 2)
    exact = model(x)
    assert plain_forward(model) == plain
    Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    wrapped = model.forward
    assert wrapped.__module__.startswith("accelerate."), "Accelerate wraps forward by a function of another package"
    assert plain_forward(model) == plain, "Accelerate does not keep forward as _original_forward any more"
    assert not torch.equal(model(x), exact)
    with in_own_precision(model):
        assert torch.equal(model(x), exact)
    assert model.forward is wrapped


def test_a_forward_that_others_have_replaced_is_the_plain_one():
    layer = torch.nn.Linear(2, 2)
    layer._original_forward, layer.forward = layer.forward, lambda x: 2 * x
    assert plain_forward(layer) is layer.forward


def sources() -> dict[str, ast.Module]:
    """The modules of the package and of its plugin, parsed, by path."""
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "hydra_plugins").rglob("*.py")]
    return {file.relative_to(PACKAGE.parent).as_posix(): ast.parse(file.read_text("utf-8")) for file in files}


def is_private(name: object) -> bool:
    """Whether a name begins with one underscore; names such as `_target_` are keys of Hydra."""
    return isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*(?<!_)", name) is not None


def defined(tree: ast.Module) -> set[str]:
    """The private names that a module defines: functions, classes, variables, and attributes that it assigns."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return set(filter(is_private, found))


def used(tree: ast.Module) -> set[str]:
    """The private names that a module imports, reads as attributes, also by `getattr`, or passes as keywords."""
    found: set[object] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found |= {part for name in [getattr(node, "module", None) or "", *names] for part in name.split(".")}
        elif isinstance(node, ast.keyword):
            found.add(node.arg)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            found.add(getattr(node.args[1], "value", None))
    return set(filter(is_private, found))


def test_private_names_of_other_libraries_are_used_in_compat_only():
    """A private name that no module of the package defines belongs to another library."""
    trees = sources()
    ours = set().union(*map(defined, trees.values()))
    foreign = {path: used(tree) - ours for path, tree in trees.items() if used(tree) - ours}
    assert foreign == {
        "sparse_lightning/compat/accelerate.py": {"_original_forward"},
        "sparse_lightning/compat/hydra.py": {"_internal"},
        "sparse_lightning/compat/lightning.py": {
            "_combined_loader",
            "_data_fetcher",
            "_data_parallel_size",
            "_generate_state_key",
            "_on_before_batch_transfer",
            "_should_accumulate",
            "_should_check_val_fx",
            "_state_dicts",
            "_tensor_parallel_size",
        },
        "sparse_lightning/compat/torch.py": {
            "_dynamo",
            "_op",
            "_ops",
            "_pytree",
            "_schema",
            "_backward_hooks",
            "_compiled_call_impl",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_fsdp_flattened",
            "_fsdp_param_group",
            "_fsdp_param_groups",
            "_get_current_dispatch_mode",
            "_get_fsdp_state",
            "_local_tensor",
            "_optimizer_step_post_hooks",
            "_optimizer_step_pre_hooks",
            "_orig_mod",
            "_python_dispatch",
            "_torchdynamo_orig_callable",
            "_utils",
        },
    }, "a name that is new here needs a test by name, in this file or in test_compat_torch.py"


def test_omegaconf_container_resolves_interpolations_by_these_methods():
    config = OmegaConf.create({"a": "text", "b": "${a}${a}", "c": "${b}", "d": "${oc.select:a}"})
    seen: list[str] = []
    with resolving(seen.append):
        assert OmegaConf.to_container(config, resolve=True)["c"] == "texttext"
    assert seen.count("") == 2 + 3 + 1, "OmegaConf resolves them by other methods"
    assert "texttext" in seen
    OmegaConf.to_container(config, resolve=True)
    assert seen.count("") == 6, "they are measured only inside of the context"


def test_hydra_internal_utils_is_under_debugger_lets_errors_through(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("a: 1\nhydra: {run: {dir: .}, output_subdir: null}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["program"])

    @hydra_main(version_base="1.3", config_path=str(tmp_path), config_name="config")
    def program(config):
        raise OSError("full")

    with raising_errors(), pytest.raises(OSError, match="full"):
        program()
    with pytest.raises(SystemExit):
        program()
