"""Models of the recipes: they learn, and reach the sparsity of their recipe with pruned blocks held at zero."""

from __future__ import annotations

import fnmatch
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from small_nets import Spy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from sparse_lightning import Cubic, LayoutError, SparsityCallback
from sparse_lightning.app.compose import compose
from sparse_lightning.app.factory import Factory
from sparse_lightning.data import Cifar10, Digits, MissingError, StdlibText, TextFile
from sparse_lightning.models import GPT, DigitsConv, DigitsMLP, DigitsViT, HlbCifar10, HuggingFace
from sparse_lightning.models.sharding import ShardingError

ADAMW = partial(torch.optim.AdamW, lr=2e-3)
SGD = partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True)


class Losses(L.Callback):
    """The training loss of each batch."""

    def __init__(self):
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def small_hlb() -> HlbCifar10:
    return HlbCifar10(SGD, widths=(16, 32, 64), stem=16)


def small_llama() -> HuggingFace:
    pytest.importorskip("transformers")
    return HuggingFace(ADAMW)


def small_text() -> StdlibText:
    return StdlibText(batch_size=8, context=32, size=50_000)


CASES = {
    "digits_blocks": (lambda: DigitsViT(ADAMW, width=32, depth=1), Digits, 40),
    "digits_rigl": (lambda: DigitsMLP(ADAMW, hidden=64), Digits, 40),
    "digits_filters": (lambda: DigitsConv(ADAMW, width=8, hidden=16), Digits, 30),
    "gpt_heads": (lambda: GPT(ADAMW, context=32, width=32, depth=2), small_text, 40),
    "gpt_2to4": (lambda: GPT(ADAMW, context=32, width=32, depth=2), small_text, 40),
    "hlb_cifar10": (small_hlb, lambda: Cifar10(batch_size=32, made=256), 5),
    "finetune_transformer": (small_llama, lambda: TextFile(batch_size=4, context=32), 20),
}
"""For each recipe that names a pattern of its own: a small model of its kind, its data, and how many steps."""


@pytest.mark.parametrize("recipe", CASES)
def test_models_have_example_inputs(recipe):
    model = CASES[recipe][0]().eval()
    assert model(model.example_input_array).isfinite().all()


def sparsity_of(recipe: str) -> SparsityCallback:
    """The callback that a recipe makes."""
    config = compose([f"recipe={recipe}", "update_every=1"]).plain("/tmp")
    return Factory(config).sparsity()


def fit(model: L.LightningModule, data: L.LightningDataModule, steps: int, *callbacks: L.Callback) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    limits = {"max_epochs": 2, "limit_train_batches": steps // 2 or 1, "limit_val_batches": 2}
    if steps % 2:
        limits |= {"max_epochs": 1, "limit_train_batches": steps}
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=list(callbacks), **quiet, **limits)
    trainer.fit(model, datamodule=data)
    return trainer


@cache
def trained(recipe: str) -> tuple[L.LightningModule, SparsityCallback, Losses, Spy, L.Trainer]:
    """A small model with the pattern of its recipe, trained once for all tests that look at it."""
    make, data, steps = CASES[recipe]
    torch.manual_seed(0)
    model, pruning, losses = make(), sparsity_of(recipe), Losses()
    spy = Spy(pruning.sparsifier)
    return model, pruning, losses, spy, fit(model, data(), steps, pruning, losses, spy)


@pytest.mark.parametrize("recipe", CASES)
def test_a_model_learns_with_the_pattern_of_its_recipe(recipe):
    model, pruning, losses, spy, trainer = trained(recipe)
    assert all(torch.isfinite(torch.tensor(losses.values))), f"{recipe}: the loss is not finite: {losses.values}"
    third = len(losses.values) // 3
    first, last = sum(losses.values[:third]) / third, sum(losses.values[-third:]) / third
    assert last < first, f"{recipe}: the loss does not fall: {losses.values}"
    assert spy.readings["batch end"] == len(losses.values) == CASES[recipe][2]
    assert spy.pruned, f"{recipe}: nothing was pruned"
    target, actual = (float(trainer.callback_metrics[f"sparsity/{name}"]) for name in ("target", "actual"))
    assert target == pytest.approx(pruning.sparsifier.configuration.schedule.final)
    assert actual == pytest.approx(EXPECTED.get(recipe, target), abs=0.02)
    assert model.metric in trainer.callback_metrics
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)


EXPECTED = {"gpt_heads": 0.68}
"""Where a recipe gives some parts another sparsity: of the small model as a whole."""


class OneBatch(Cifar10):
    """The same images at each step, so that losses are of one thing."""

    def train_dataloader(self):
        return DataLoader([next(iter(super().train_dataloader()))] * 5, batch_size=None)


def test_hlb_cifar10_falls_for_five_steps_in_channels_last():
    model, losses = small_hlb(), Losses()
    pruning = sparsity_of("hlb_cifar10")
    spy = Spy(pruning.sparsifier)
    fit(model, OneBatch(batch_size=64, made=64), 5, pruning, losses, spy)
    for name, weight in model.named_parameters():
        if weight.ndim == 4 and weight.shape[1] > 1 and weight.shape[2] > 1:
            assert weight.is_contiguous(memory_format=torch.channels_last), f"{name} is not in channels_last"
    assert len(losses.values) == 5
    assert all(later < earlier for earlier, later in pairwise(losses.values)), losses.values
    assert spy.readings["batch end"] == 5
    assert spy.pruned


def test_hlb_cifar10_whitens_its_first_images_and_does_not_train_that():
    model = small_hlb()
    fit(model, Cifar10(batch_size=32, made=64), 1)
    filters = model.whiten.weight.detach().clone()
    assert not model.whiten.weight.requires_grad
    images = torch.stack([Cifar10(made=64).sets()[0][i][0] for i in range(64)])
    inside = torch.nn.functional.conv2d(images, filters).transpose(0, 1).flatten(1).cov()
    off = inside - inside.diagonal().diag()
    assert float(off.abs().max()) < 0.3 * float(inside.diagonal().max()), "patches are still correlated"


@pytest.mark.parametrize(("recipe", "name"), [("digits_filters", "stages.0.conv1"), ("hlb_cifar10", "groups.0.conv2")])
def test_a_pruned_filter_takes_its_norm_and_its_reader_along(recipe, name):
    model = trained(recipe)[0]
    owner, conv = name.rsplit(".", 1)
    number = int(conv[-1])
    group = model.get_submodule(owner)
    dead = group.get_submodule(conv).weight.detach().flatten(1).abs().sum(1) == 0
    norm = group.get_submodule(f"norm{number}")
    reader = group.get_submodule(f"conv{number + 1}").weight.detach()
    assert dead.any()
    assert not norm.weight[dead].any()
    assert not norm.bias[dead].any()
    assert not reader[:, dead].any()


def save_llama(folder: Path, **changes) -> Path:
    """A model that is smaller than any that is shipped, as `save_pretrained` writes it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **changes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_model_is_read_from_its_folder(tmp_path, tied):
    folder = save_llama(tmp_path / "llama", tie_word_embeddings=tied)
    model, again = HuggingFace(ADAMW, str(folder)), HuggingFace(ADAMW, str(folder))
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens), again(tokens))
    assert model.training
    assert all(module.training for module in model.modules())
    pruning = sparsity_of("finetune_transformer")
    spy = Spy(pruning.sparsifier)
    trainer = fit(model, TextFile(batch_size=4, context=32), 8, pruning, spy)
    assert float(trainer.callback_metrics["sparsity/actual"]) == pytest.approx(0.5, abs=0.02)
    assert spy.pruned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_model_is_that_of_from_pretrained(tmp_path, tied, dtype):
    """Built on the meta device; parameters stay the objects that an optimizer may hold when weights are read."""
    transformers = pytest.importorskip("transformers")
    folder = save_llama(tmp_path / "llama", tie_word_embeddings=tied)
    transformers.AutoModelForCausalLM.from_pretrained(folder).to(dtype).save_pretrained(folder)
    model = HuggingFace(ADAMW, str(folder))
    held = list(model.parameters())
    assert all(weight.is_meta for weight in held)
    model.configure_model()
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert list(model.model.state_dict()) == list(wanted.state_dict())
    for name, tensor in [*wanted.named_parameters(), *wanted.named_buffers()]:
        found = model.model.get_parameter(name) if "inv_freq" not in name else model.model.get_buffer(name)
        assert found.dtype == torch.float32
        assert torch.equal(found, tensor), name
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model.eval()(tokens), wanted.eval()(tokens).logits)


def test_a_checkpoint_of_a_base_model_is_found_by_its_names(tmp_path):
    """A folder whose names lack the prefix of the model with a head, as those of the first GPT-2 do."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
    wanted = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    wanted.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = HuggingFace(ADAMW, str(tmp_path))
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model.eval()(tokens), wanted.eval()(tokens).logits)


def test_a_checkpoint_with_other_names_is_read_whole_with_a_warning(tmp_path):
    """Transformers may convert names and shapes, which cannot be read in slices."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    folder = save_llama(tmp_path, tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    stored.pop("model.norm.weight")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    model = HuggingFace(ADAMW, str(folder))
    with pytest.warns(UserWarning, match=r"model.norm.weight of LlamaForCausalLM is not stored .* reads it whole"):
        model.configure_model()
    assert torch.equal(model.model.get_parameter("model.norm.weight"), torch.ones(32)), "as transformers fills it"
    assert torch.equal(model.model.get_parameter("model.embed_tokens.weight"), stored["model.embed_tokens.weight"])


def test_a_folder_without_safetensors_is_named(tmp_path):
    folder = save_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingError, match=r"has no model.safetensors .*save_pretrained"):
        HuggingFace(path=str(folder))


def test_an_index_names_files_of_its_folder_only(tmp_path):
    folder = save_llama(tmp_path / "llama")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../elsewhere.safetensors"}}')
    with pytest.raises(MissingError, match=r"\.\./elsewhere.safetensors .* is not a file of that folder"):
        HuggingFace(path=str(folder))


def test_gpt2_with_its_transposed_layers_takes_heads_and_neurons(tmp_path):
    transformers = pytest.importorskip("transformers")
    from sparse_lightning import Heads, Neurons

    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    patterns = [Heads("*.attn"), Neurons(up="*.mlp.c_fc", down="*.mlp.c_proj")]
    pruning = SparsityCallback(patterns, Cubic(0.5), update_every=1)
    trainer = fit(HuggingFace(ADAMW, str(tmp_path)), TextFile(batch_size=4, context=32), 6, pruning)
    assert float(trainer.callback_metrics["sparsity/actual"]) == pytest.approx(0.5)


def test_a_folder_that_is_not_there_is_named():
    pytest.importorskip("transformers")
    with pytest.raises(
        MissingError, match=r"model.path=/no/such does not exist: set it to the folder of a Hugging Face"
    ):
        HuggingFace(path="/no/such")


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingError, match=r"pip install 'sparse-lightning\[hf\]'"):
        HuggingFace()


def test_a_model_takes_any_optimizer_and_any_loader():
    model = small_hlb()
    model.optimizer_factory = ADAMW
    loader = DataLoader(TensorDataset(torch.randn(8, 3, 32, 32), torch.randint(10, (8,))), batch_size=4)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    L.Trainer(accelerator="cpu", fast_dev_run=True, **quiet).fit(model, loader, loader)
    assert isinstance(model.optimizers(use_pl_optimizer=False), torch.optim.AdamW)


@pytest.fixture
def mesh():
    """A mesh of one device, as `ModelParallelStrategy` makes it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", CASES)
def test_a_model_shards_itself_once_where_there_is_a_mesh(recipe, mesh, monkeypatch):
    model, data = CASES[recipe][0](), CASES[recipe][1]()
    batch = next(iter(data.val_dataloader()))
    inputs = batch[0] if isinstance(batch, list) else batch[:, :-1]
    model.eval()
    model.configure_model()
    assert not isinstance(model, FSDPModule), "there is no mesh yet"
    wanted = model(inputs)
    monkeypatch.setattr(L.LightningModule, "device_mesh", property(lambda self: mesh))
    model.configure_model()
    model.configure_model()
    assert isinstance(model, FSDPModule)
    assert all(isinstance(part, FSDPModule) for part in model.shards())
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    torch.testing.assert_close(model(inputs), wanted)


def test_plans_for_tensor_parallelism_name_layers_and_fall_on_heads():
    for model in (DigitsViT(), GPT(), small_llama()):
        names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
        for pattern in model.tensor_plan(2):
            assert fnmatch.filter(names, pattern), f"{type(model).__name__}: {pattern} names no layer"
    with pytest.raises(ShardingError, match="num_key_value_heads=4 cannot be split over 8 devices: choose"):
        small_llama().tensor_plan(8)
    with pytest.raises(ShardingError, match="DigitsConv has no plan for tensor parallelism over 2 devices"):
        DigitsConv().tensor_plan(2)


def test_heads_that_do_not_divide_the_width_raise_an_error():
    with pytest.raises(LayoutError, match="heads=5 does not divide width=32: change one of them"):
        GPT(ADAMW, context=8, width=32, heads=5)
