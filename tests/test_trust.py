"""Recipes and checkpoints that would run code: each is refused with its reason, and nothing runs."""

from __future__ import annotations

import inspect
import itertools
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import sparse_lightning
from sparse_lightning.app.allowlist import ALLOWED, FILES, FOLDERS, INPUTS, PACKAGES, UPLOADS, is_within
from sparse_lightning.app.catalog import purpose
from sparse_lightning.app.check import check
from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.cli import answer
from sparse_lightning.app.compose import compose
from sparse_lightning.app.shards import check_checkpoint, check_word
from sparse_lightning.app.trust import check_trust, instantiate
from sparse_lightning.app.yaml_limits import MAX_FILES, YamlLimits
from sparse_lightning.errors import CheckpointError, ConfigError, UntrustedError

HOSTILE = Path(__file__).parent / "hostile"
RECIPES = sorted((HOSTILE / "recipe").glob("*.yaml"))


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return (Path.touch, (self.proof,))


@pytest.fixture
def proof(tmp_path, monkeypatch):
    """The file that every hostile recipe would make."""
    file = tmp_path / "proof"
    (tmp_path / "hubconf.py").write_text(f"open({str(file)!r}, 'w')\ndef evil(): pass\n")
    (tmp_path / "script.py").write_text(f"open({str(file)!r}, 'w')\n")
    (tmp_path / "link").symlink_to(os.path.abspath(os.sep))
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(Evil(file)))
    monkeypatch.setenv("HOSTILE_PROOF", str(file))
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path))
    monkeypatch.setenv("HOSTILE_SCRIPT", str(tmp_path / "script.py"))
    monkeypatch.setenv("HOSTILE_PICKLE", str(tmp_path / "evil.pickle"))
    monkeypatch.chdir(tmp_path)
    return file


def test_the_proof_is_made_where_nothing_stops_it(proof):
    pickle.loads((proof.parent / "evil.pickle").read_bytes())
    assert proof.exists()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_hostile_recipe_is_refused_with_its_reason(recipe, proof):
    with pytest.raises(UntrustedError, match=purpose(recipe.read_text("utf-8"))):
        check_runs([f"recipe={recipe.stem}"], str(HOSTILE))
    assert not proof.exists(), f"{recipe.stem} has run"


def test_the_command_line_refuses_before_hydra_runs_anything(proof):
    names = [recipe.stem for recipe in RECIPES if recipe.stem.startswith(("hydra_", "os_system", "sweeper"))]
    assert {"hydra_callback", "hydra_logging", "hydra_launcher", "os_system", "sweeper"} <= set(names)
    program = (
        "import sys; from sparse_lightning.app.cli import answer\n"
        "for name in sys.argv[2:]: assert answer(['--config-dir', sys.argv[1], f'recipe={name}']) == 2"
    )
    command = [sys.executable, "-c", program, HOSTILE, *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    messages = ran.stderr.splitlines()
    for name, message in zip(names, messages, strict=True):
        assert re.search(purpose((HOSTILE / "recipe" / f"{name}.yaml").read_text("utf-8")), message)
    assert not proof.exists()
    assert sorted(os.listdir(proof.parent)) == ["evil.pickle", "hubconf.py", "link", "script.py"]


def test_a_checkpoint_that_would_run_code_is_refused(proof):
    torch.save({"state_dict": {}, "evil": Evil(proof)}, "evil.ckpt")
    with pytest.raises(ConfigError, match=r"evil\.ckpt holds more than tensors and plain values: \w"):
        check_checkpoint(L.Trainer(logger=False, accelerator="cpu"), BoringModel(), "evil.ckpt")
    assert not proof.exists()
    torch.load("evil.ckpt", weights_only=False)
    assert proof.exists(), "it would have"


OTHER_MODELS = {
    "weight": (
        torch.ones(3, 32),
        r"has layer\.weight of shape \(3, 32\), and BoringModel one of \(2, 32\), and 1 more",
    ),
    "name": (None, r"has other, which BoringModel does not have: resume with the model"),
}


@pytest.mark.parametrize(("weight", "text"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused_before_it_is_loaded(weight, text, tmp_path):
    model, trainer = BoringModel(), L.Trainer(logger=False, accelerator="cpu")
    wider = {"layer.weight": weight, "layer.bias": torch.ones(3)}
    state = wider if weight is not None else {**model.state_dict(), "other": torch.ones(1)}
    torch.save({"state_dict": state}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=rf"ckpt_path: .*other\.ckpt {text}"):
        check_checkpoint(trainer, model, tmp_path / "other.ckpt")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "own.ckpt")
    check_checkpoint(trainer, model, tmp_path / "own.ckpt")


@pytest.mark.parametrize("size", [0, 300])
def test_a_truncated_checkpoint_is_refused(size, tmp_path):
    model = BoringModel()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "cut.ckpt")
    trainer = L.Trainer(logger=False, accelerator="cpu")
    check_checkpoint(trainer, model, tmp_path / "cut.ckpt")
    os.truncate(tmp_path / "cut.ckpt", size)
    with pytest.raises(ConfigError, match=r"cut\.ckpt is not a checkpoint, or is truncated"):
        check_checkpoint(trainer, model, tmp_path / "cut.ckpt")


def test_nothing_is_called_where_a_later_target_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_pkg.py").write_text("def make(): open('made', 'w')\n")
    monkeypatch.delitem(sys.modules, "my_pkg", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = {"first": {"_target_": "my_pkg.make"}, "second": {"_target_": "os.system", "command": "ls"}}
    with pytest.raises(UntrustedError, match=r"second\._target_"):
        instantiate(config, trusted=["my_pkg"])
    assert not Path("made").exists()
    assert "my_pkg" not in sys.modules, "a package was imported before all names were looked at"


def test_a_prefix_that_the_user_trusts_works(tmp_path, monkeypatch):
    (tmp_path / "our_pkg.py").write_text("import os\n\nclass Thing:\n    pass\n\ncall = os.system\n")
    monkeypatch.syspath_prepend(tmp_path)
    thing = {"_target_": "our_pkg.Thing"}
    with pytest.raises(UntrustedError, match=r"trusted_targets=\[our_pkg\]"):
        instantiate(thing, "model")
    assert type(instantiate(thing, "model", ["our_pkg"])).__name__ == "Thing"
    with pytest.raises(UntrustedError, match=r"posix.system|nt.system"):
        instantiate({"_target_": "our_pkg.call"}, "model", ["our_pkg"])
    with pytest.raises(UntrustedError, match="our_pkgs"):
        check_trust({"_target_": "our_pkgs.Thing"}, trusted=["our_pkg"])


@pytest.mark.parametrize(
    "path",
    [
        "torch.nn.Linear",
        "torch.nn.functional.relu",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "torch.utils.data.DataLoader",
        "torchmetrics.classification.MulticlassAccuracy",
        "lightning.Trainer",
        "lightning.pytorch.loggers.CSVLogger",
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.strategies.DDPStrategy",
        "sparse_lightning.Blocks",
        "sparse_lightning.schedules.OneShot",
    ],
)
def test_what_recipes_need_is_allowed(path):
    check_trust({"model": {"_target_": path}})


@pytest.mark.parametrize("path", ["", "os", 5, None, "torch", "torch.nn", "torch..nn", "torch.nn.", ["os", "system"]])
def test_what_is_no_name_is_refused(path):
    with pytest.raises(UntrustedError, match=r"model\._target_"):
        check_trust({"model": {"_target_": path}})


FORBIDDEN = ("app", "compat", "moved", "demo", "cli", "configuration", "run")
"""Rooms of this package, under their present and former names, that no configuration may name."""


@pytest.mark.parametrize(
    "path",
    [
        "app.run.run",
        "app.run.PreparedRun",
        "app.trust.instantiate",
        "app.cli.main",
        "app.launch.launch",
        "app.job.Job",
        "run.run",
        "configuration.trust.instantiate",
        "configuration.parts.Factory",
        "configuration.compose.compose",
        "cli.main",
        "demo.main",
        "moved.install",
        "compat.hydra.argument_parser",
        "compat.lightning.started_processes",
        "data.missing.optional",
        "data.missing.import_module",
        "import_module",
        "install",
    ],
)
def test_what_imports_or_runs_by_name_is_refused_under_old_and_new_names(path):
    with pytest.raises(UntrustedError):
        check_trust({"model": {"_target_": f"sparse_lightning.{path}"}})


def test_no_public_callable_of_the_application_can_be_named():
    """Every module of this package, and every name in it, wherever it was imported from."""
    seen = 0
    for module in modules():
        for name in [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]:
            path = f"{module.__name__}.{name}"
            home = str(getattr(vars(module)[name], "__module__", ""))
            if is_allowed(path):
                seen += 1
                assert not is_within(path, [f"sparse_lightning.{room}" for room in FORBIDDEN]), path
                assert not is_within(home, [f"sparse_lightning.{room}" for room in FORBIDDEN]), path
                assert isinstance(vars(module)[name], type) or home.startswith("torch"), f"{path} is a function"
    assert seen, "classes such as sparse_lightning.criteria.Magnitude are allowed"


def modules():
    """Every module of this package that can be imported here."""
    for found in pkgutil.walk_packages(sparse_lightning.__path__, "sparse_lightning."):
        if "triton" not in found.name and not found.name.endswith("__main__"):
            yield import_module(found.name)


def is_allowed(path):
    try:
        check_trust({"_target_": path})
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("path", ["draw", "drawing.draw", "copy_", "empty_strided", "nm_select", "blocks.view.copy_"])
def test_functions_of_the_package_are_not_on_the_list(path):
    with pytest.raises(UntrustedError, match=rf"it is not on the list .* trusted_targets=\[sparse_lightning\.{path}\]"):
        check_trust({"_target_": f"sparse_lightning.{path}"})


def objects_of_the_list():
    """Every object of the allowlist, by its dotted name."""
    names = [(home, name) for home, listed in ALLOWED.items() for name in listed.split()]
    found = {f"{home}.{name}": getattr(import_module(home), name, None) for home, name in names}
    return {path: thing for path, thing in found.items() if thing is not None}  # Muon, for one, is new in torch


def test_nothing_on_the_list_runs_loads_or_writes():
    """Only classes, apart from three activations; whatever takes a path is in a table of paths."""
    paths = re.compile(r"path|dir|file|folder|root|url|tokenizer|registry")
    tables = (FOLDERS, FILES, INPUTS, UPLOADS)
    listed = objects_of_the_list()
    functions = {path for path, thing in listed.items() if not isinstance(thing, type)}
    assert functions == {"torch.nn.functional.gelu", "torch.nn.functional.relu", "torch.nn.functional.silu"}
    for path in set(listed) - functions:
        taken = {name for name in inspect.signature(listed[path]).parameters if paths.search(name)}
        checked = {name for table in tables for name in table.get(path, "").split()}
        assert taken <= checked | {"profiler"}, f"{path} takes paths that are not checked"
    assert set().union(*tables) <= set(listed)


def walked(loaded):
    """Every public callable of some modules by its dotted name."""
    for module in loaded:
        for name, thing in list(vars(module).items()):
            if callable(thing) and not name.startswith("_"):
                yield f"{module.__name__}.{name}", thing


def loaded_modules():
    return [module for name, module in list(sys.modules.items()) if is_public(name) and module is not None]


def is_public(name):
    return is_within(name, PACKAGES) and "._" not in name


def check_walk(loaded):
    allowed = {id(thing) for thing in objects_of_the_list().values()}
    seen = passed = 0
    for path, thing in walked(loaded):
        seen += 1
        if is_allowed(path):
            passed += 1
            assert id(thing) in allowed, f"{path} passes, and is not on the list"
    return seen, passed


def test_no_public_callable_outside_of_the_list_passes():
    """Every module of torch, Lightning, torchmetrics and this package that is imported by importing them."""
    objects_of_the_list()
    seen, passed = check_walk(loaded_modules())
    assert seen > 10_000
    assert passed > 300


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_no_public_callable_of_any_module_passes():
    """The same for every module that can be imported, in a process of its own: importing all has side effects."""
    program = (
        "import pkgutil, sys, warnings; from importlib import import_module; warnings.simplefilter('ignore')\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_trust as t\n"
        "for package in t.PACKAGES:\n"
        "    for found in pkgutil.walk_packages(import_module(package).__path__, package + '.', lambda name: None):\n"
        "        try: t.is_public(found.name) and 'launch' not in found.name and import_module(found.name)\n"
        "        except BaseException: pass\n"
        "t.objects_of_the_list(); seen, passed = t.check_walk(t.loaded_modules()); print(seen, passed)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.split()[-2]) > 16_000, "no more than the modules that are imported anyway"


@pytest.mark.parametrize(
    "path",
    [
        "lightning.pytorch.Trainer",
        "lightning.pytorch.trainer.trainer.Trainer",
        "torch.nn.modules.linear.Linear",
        "torch.optim.adamw.AdamW",
        "torchmetrics.Accuracy",
        "sparse_lightning.patterns.Blocks",
        "sparse_lightning.strategy.Sharded",
        "sparse_lightning.metrics_file.MetricsFile",
    ],
)
def test_another_name_of_a_listed_class_is_allowed(path):
    """Also module paths of version 0.1.0."""
    check_trust({"_target_": path})


@pytest.mark.parametrize("prefix", ["torch.nn.init", "torch.nn.init.ones_", "torch"])
def test_what_is_not_listed_needs_the_word_of_the_user(prefix):
    node = {"a": {"_target_": "torch.nn.init.ones_", "_partial_": True}}
    with pytest.raises(UntrustedError, match=r"a\._target_: 'torch.nn.init.ones_' .* trusted_targets=\[torch.nn.init"):
        check_trust(node)
    assert instantiate(node, trusted=[prefix])["a"].func is torch.nn.init.ones_


def test_a_trusted_package_does_not_lend_its_imports(tmp_path, monkeypatch):
    (tmp_path / "lending.py").write_text("import os, torch\nfrom torch.nn import Linear\nload = torch.load\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("os.system", "torch.load", "load", "torch.hub.load"):
        with pytest.raises(UntrustedError, match=rf"'lending.{name}' is not allowed: it is "):
            check_trust({"_target_": f"lending.{name}"}, trusted=["lending"])
    check_trust({"_target_": "lending.Linear"}, trusted=["lending"])


CHECKPOINTS = "lightning.pytorch.callbacks.ModelCheckpoint"


def run_of(*typed):
    return check_runs(["recipe=digits_rigl", *typed])


@pytest.mark.parametrize("value", ["${folder}", "${folder}/best", "${folder}/a/../b"])
def test_a_path_below_the_folder_of_the_run_is_allowed(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(f"+trainer.callbacks=[{{_target_: {CHECKPOINTS}, dirpath: {value}, filename: 'best/{{step}}'}}]")


@pytest.mark.parametrize(
    "typed",
    [
        "logger.folder=.",
        "logger.folder=outputs",
        "+trainer.default_root_dir=elsewhere",
        "+trainer.default_root_dir=${folder}/../other",
        f"+trainer.callbacks=[{{_target_: {CHECKPOINTS}, dirpath: checkpoints}}]",
        f"+trainer.callbacks=[{{_target_: {CHECKPOINTS}, dirpath: '${{folder}}', filename: /tmp/best}}]",
    ],
)
def test_a_path_outside_of_the_folder_of_the_run_is_refused(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UntrustedError, match=r"is not allowed: it is outside of the run's folder\. Write "):
        run_of(typed)


def test_a_link_that_leads_out_of_the_folder_of_the_run_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inside").symlink_to(tmp_path)
    config = compose(["recipe=digits_rigl", "logger.folder=${folder}/inside"]).plain(tmp_path / "run")
    with pytest.raises(UntrustedError, match=r"logger\.folder: '.*inside' is not allowed"):
        check(config)


def test_files_are_read_where_the_user_says(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = ["recipe=finetune_transformer", f"data.path={tmp_path}/text.txt", f"model.path={tmp_path}/llama"]
    check_runs(text)  # data.tokenizer is ${model.path}
    own = Path("conf", "recipe", "own.yaml")
    own.parent.mkdir(parents=True)
    for path, is_fine in (("text.txt", True), ("../text.txt", False), (f"{tmp_path}/text.txt", False)):
        own.write_text(f"{HEADER}defaults: [{{override /data: text_file}}]\ndata: {{path: {path}}}\n")
        if is_fine:
            check_runs(["recipe=own"], "conf")
            continue
        with pytest.raises(UntrustedError, match=r"data\.path: .* is not allowed in a recipe: .* Pass data\.path=… on"):
            check_runs(["recipe=own"], "conf")
        check_runs(["recipe=own", f"data.path={path}"], "conf")


def test_a_sharded_checkpoint_needs_the_word_of_the_user(tmp_path):
    check_word(None, False)
    check_word(tmp_path / "file.ckpt", False)
    check_word(tmp_path, True)
    with pytest.raises(
        UntrustedError, match=r"\.metadata is a pickle, .* add trust_checkpoint=true to the command line"
    ):
        check_word(tmp_path, False)


HEADER = "# @package _global_\n"
ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
TEXTS = "".join(f"x{i}: ${{x{i - 1}}}${{x{i - 1}}}\n" for i in range(1, 40))
LISTS = "".join(f"x{i}: ['${{x{i - 1}}}', '${{x{i - 1}}}']\n" for i in range(1, 40))
NESTED = "".join(f"k{i}: x{i}\nx{i}: ['${{${{k{i - 1}}}}}', '${{${{k{i - 1}}}}}']\n" for i in range(1, 40))
CHAIN = "".join(f"x{i}: ${{x{i - 1}}}\n" for i in range(1, 1500))
SPLIT = ["".join(TEXTS.splitlines(keepends=True)[half]) for half in (slice(None, 20), slice(20, None))]
FOR_HYDRA = "hydra: {job: {config: {override_dirname: {kv_sep: '${x39}'}}}}\n"  # Hydra resolves it while it composes
HUGE = {
    # the recipe: what the message says
    "aliases": ("a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + ALIASES, "more than 10,000 keys and values"),
    "keys": ("schedule:\n" + "".join(f"  k{i}: 1\n" for i in range(20_000)), "more than 10,000 keys and values"),
    "bytes": (f"name: {'x' * 10_000_000}", "10,0.* bytes, more than 500,000"),
    "depth": (f"model: {'[' * 5000}{']' * 5000}", "nested more than 50 levels deep"),
    "alias_of_itself": ("model: &m {x: *m}", r"the alias \*m includes itself"),
    "defaults_of_itself": ("defaults: [/recipe: huge]", "the configuration includes itself"),
    "value_of_itself": ("name: ${name}", "name: Recursive interpolation"),
    "files": ("defaults: [/recipe/more]\nx0: aa\n" + SPLIT[0], "its interpolations grow"),
    "merged": ("defaults: [/recipe/merging]\nx0: aa\n" + TEXTS + "name: ${x39}${x39}", "its interpolations grow"),
    "wide": (f"x0: {'x' * 400_000}\nname: {'${x0}' * 3000}", "its interpolations grow"),
    "long": (f"name: {'${seed}' * 5000}", "its interpolations grow: they have more than 20,000 characters"),
    "inside": (f"name: {'${' * 2000}x{'}' * 2000}", "its interpolations grow: .* or 5 inside of one another"),
    "base_60": (f"seed: 1{':59' * 100_000}", "the number 1:59.* has 300,001 digits"),
    "explicit_key": (f"? {'k' * 5000}\n: 1", "the key kkkkkkkkkkkkkkkkkkkk… has 5,000 characters"),
    "texts": ("x0: aa\n" + TEXTS, "its interpolations grow: they are resolved more than 1,000 times"),
    "lists": ("x0: [1]\n" + LISTS, "its interpolations grow: they are resolved more than 1,000 times"),
    "nested": ("k0: x0\nx0: [1]\n" + NESTED, "its interpolations grow: they are resolved more than 1,000 times"),
    "chain": ("x0: 1\n" + CHAIN, "its interpolations grow|RecursionError raised while resolving"),
    "for_hydra": ("x0: aa\n" + TEXTS + "hydra: {job: {name: '${x39}'}}", "its interpolations grow"),
    "tag": ("seed: !!python/object/apply:os.system [ls]", "it has the tag '.*os.system'. Write values without tags"),
    "plain_tag": ("seed: !!int '1'", "it has the tag 'tag:yaml.org,2002:int'. Write values without tags"),
    "copies": ("defaults: [/recipe/b0@x, /recipe/b0@y]", "include one another more than 1,000 times"),
}


CALLS = 5_000_000
"""More than a configuration costs that resolves as many interpolations as are allowed."""


@contextmanager
def counted_calls():
    """Count calls of functions, of Python and of C: work, whatever the machine does beside it."""
    counter = itertools.count()
    sys.setprofile(lambda frame, event, argument: event.endswith("call") and next(counter))
    try:
        yield lambda: next(counter)
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("text", "message"), HUGE.values(), ids=list(HUGE))
def test_a_file_that_would_grow_huge_is_refused_at_once(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("recipe").mkdir()
    Path("recipe", "huge.yaml").write_text(HEADER + text)
    for i in range(15):
        Path("recipe", f"b{i}.yaml").write_text(f"defaults: [/recipe/b{i + 1}@x, /recipe/b{i + 1}@y]\n")
    Path("recipe", "b15.yaml").write_text("a: 1\n")
    Path("recipe", "more.yaml").write_text(
        f"{HEADER}{SPLIT[1]}hydra: {{job: {{config: {{override_dirname: {{kv_sep: '${{x39}}'}}}}}}}}\n"
    )
    Path("recipe", "merging.yaml").write_text(f"{HEADER}name: {{a: 1}}\n")
    with counted_calls() as calls:
        assert answer(["--config-dir", str(tmp_path), "recipe=huge"]) == 2
    assert calls() < CALLS, "it was expanded: that would take millions of times as many"
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_is_not_regular_is_refused(kind, tmp_path):
    """A pipe never ends where nothing is written to it, and a device such as /dev/zero has no end."""
    Path(tmp_path, "recipe").mkdir()
    file = Path(tmp_path, "recipe", "endless.yaml")
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"is not allowed: it is not a regular file\. Use a YAML file"):
        YamlLimits().add(file)
    with pytest.raises(ConfigError, match="recipe=endless is not allowed: its file is not a regular file"):
        check_runs(["recipe=endless"], str(tmp_path))


def test_a_configuration_of_many_files_is_refused(tmp_path):
    limits, file = YamlLimits(), tmp_path / "small.yaml"
    file.write_text("{}")
    for _ in range(MAX_FILES):
        limits.add(file)
    with pytest.raises(ConfigError, match=r"small\.yaml is not allowed: the configuration has more than 200 files"):
        limits.add(file)


def test_the_user_may_start_many_processes():
    run_of("data.num_workers=300")


def test_documented_module_paths_of_the_first_version_still_import():
    from sparse_lightning.configuration.catalog import options
    from sparse_lightning.configuration.compose import compose
    from sparse_lightning.configuration.trust import instantiate as former
    from sparse_lightning.run import run

    assert (former, run) == (instantiate, import_module("sparse_lightning.app.run").run)
    assert compose(["schedule.final=0.5"]).config.schedule.final == 0.5
    assert "cubic" in options("schedule")


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_recipe_without_an_end_is_not_read(make, tmp_path, capsys):
    (tmp_path / "recipe").mkdir()
    make(tmp_path / "recipe" / "endless.yaml")
    assert answer(["--config-dir", str(tmp_path), "recipe=endless"]) == 2
    assert "recipe=endless is not allowed: its file is not a regular file. Use a YAML" in capsys.readouterr().err
