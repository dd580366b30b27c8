"""Programs and ONNX files of models of Hugging Face and others: batch and sequence may vary, or a warning says so."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch import nn

from sparse_lightning import (
    Constant,
    Coupled,
    FixedSizeWarning,
    PretrainedConfigWarning,
    Sparsifier,
    compact,
    couplings,
)
from sparse_lightning.compaction import compact_program
from sparse_lightning.compaction.same_outputs import relative_error, tensors_in
from sparse_lightning.export import ONNX, Compact
from sparse_lightning.layout import Layout

SPARSIFIER = Sparsifier([Coupled()], Constant(0.5))
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
TOKENS = {
    "BertForSequenceClassification": {**SIZES, "max_position_embeddings": 24, "num_labels": 3},
    "DistilBertForSequenceClassification": {
        **{"vocab_size": 32, "dim": 16, "n_layers": 1, "n_heads": 4, "hidden_dim": 24},
        "max_position_embeddings": 24,
    },
    "GPT2LMHeadModel": {
        **{"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 24},
        **{"bos_token_id": 1, "eos_token_id": 1},
    },
    "LlamaForCausalLM": {**SIZES, "num_key_value_heads": 2},
}
BY_NAME = ("BertForSequenceClassification", "GPT2LMHeadModel")
"""Those that get a dict of inputs; the others get a tuple."""

IMAGES = {
    "ViTForImageClassification": {
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24},
        **{"image_size": 8, "patch_size": 4, "num_labels": 3},
    },
    "ResNetForImageClassification": {
        **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "num_labels": 3,
    },
}


def built(name: str) -> nn.Module:
    """A model of Hugging Face in float64 with random biases."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.split('For')[0].removesuffix('LMHeadModel')}Config")
    model = getattr(transformers, name)(config(**{**TOKENS, **IMAGES}[name])).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def halved(model: nn.Module, inputs, *parts: str) -> nn.Module:
    """The model with the first half of the units of each family zeroed; of those with a part in their names, if any."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = [each for each in couplings(model, inputs) if not parts or any(part in each.name for part in parts)]
    for family in found:
        for piece in family.slices:
            tensor = parameters[piece.name].data
            piece.layout(Layout.of(tensor)).on(tensor)[: family.units // 2] = 0
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 32, shape)


def mask(*shape: int) -> torch.Tensor:
    """Of tokens, with the last of the first example masked."""
    made = torch.ones(shape, dtype=torch.long)
    made[0, shape[1] // 2 + 1 :] = 0
    return made


def check(program, model: nn.Module, *args, **kwargs) -> None:
    """Compare the outputs of a program with those of the masked model."""
    with torch.no_grad():
        expected, made = tensors_in(model(*args, **kwargs)), tensors_in(program(*args, **kwargs))
    assert len(made) == 1
    assert relative_error(expected[0], made[0]) <= 1e-12


@pytest.mark.parametrize("name", TOKENS)
def test_programs_of_language_models_take_other_batches_and_sequences(name, tmp_path):
    by_name = name in BY_NAME

    def given(*shape):
        tokens = {"input_ids": ids(*shape), "attention_mask": mask(*shape)}
        return tokens if by_name else tuple(tokens.values())

    model = halved(built(name), given(4, 4))  # 4 is the number of heads, too
    program = torch.export.load(Compact("graph", given(4, 4))(tmp_path, model, SPARSIFIER)).module()
    for shape in ((4, 4), (5, 7), (4, 1), (1, 9), (1, 1), (2, 24)):
        made = given(*shape)
        check(program, model, *(() if by_name else made), **(made if by_name else {}))


@pytest.mark.parametrize("name", IMAGES)
def test_programs_of_vision_models_take_other_batches(name):
    model = halved(built(name), (torch.randn(1, 3, 8, 8).double(),))  # the residual network adds in place
    program = compact_program(model, (torch.randn(1, 3, 8, 8).double(),)).program.module()
    for batch in (1, 2, 5):
        check(program, model, torch.randn(batch, 3, 8, 8).double())


class Batches(nn.Module):
    """Takes a batch by keywords that its signature does not name, as some LightningModules do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, **batch):
        return {"scores": self.net(batch["x"])}


def test_arguments_that_a_signature_does_not_name_may_vary():
    model = halved(Batches().eval(), {"x": torch.randn(3, 4)})
    program = compact_program(model, {"x": torch.randn(3, 4)}).program.module()
    for size in (1, 2, 5):
        x = torch.randn(size, 4)
        assert torch.allclose(program(x=x)["scores"], model(x=x)["scores"], atol=1e-6)


class Fixed(nn.Module):
    """Its code has the size of a batch or of a sequence written into it."""

    def __init__(self, batch: int, sequence: int) -> None:
        super().__init__()
        self.embedding, self.sizes = nn.Embedding(32, 4), (batch, sequence)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, tokens):
        return self.net(self.embedding(tokens).reshape(*self.sizes, 4))


@pytest.mark.parametrize(
    ("sizes", "given", "said"),
    [
        ((3, -1), (3, 5), r"tokens, dimension 0 \(batch\): 3\b"),
        ((-1, 5), (3, 5), r"tokens, dimension 1 \(sequence\): 5\b"),
        ((3, 5), (3, 5), r"dimension 0 \(batch\): 3; tokens, dimension 1 \(sequence\): 5\b"),
        ((-1, 1), (3, 1), r"dimension 1 \(sequence\): 1\b.*2 or more"),
    ],
)
def test_one_warning_names_the_input_and_the_dimension_that_is_fixed(sizes, given, said):
    model = halved(Fixed(*sizes).eval(), (ids(*given),))
    with pytest.warns(FixedSizeWarning, match=said) as found:
        compact_program(model, (ids(*given),))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (2, 6)),
        (nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Conv1d(8, 3, 3)), (2, 1, 9)),
        (nn.Sequential(nn.Flatten(), nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 3)), (2, 5, 3)),
    ],
    ids=["features", "channels", "flattened"],
)
def test_sizes_of_layers_are_no_batch_or_sequence(model, shape):
    halved(model.eval(), (torch.randn(shape),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compact_program(model, (torch.randn(shape),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", pytest.param("LlamaForCausalLM", marks=pytest.mark.exhaustive)]
)
def test_onnx_files_have_the_names_and_sizes_of_models_of_hugging_face(name, tmp_path, capfd):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = halved(built(name).float(), {"input_ids": ids(2, 6)})
    path = ONNX({"input_ids": ids(2, 6)})(tmp_path, model, SPARSIFIER)
    said = capfd.readouterr()
    assert "failed" not in said.out + said.err
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("input_ids", ["batch", "sequence"])]
    [made] = session.get_outputs()
    assert made.name == "logits"
    assert made.shape == (["batch", 3] if "Bert" in name else ["batch", "sequence", 32])
    for shape in ((2, 6), (3, 9), (1, 1)):
        tokens = ids(*shape)
        [found] = session.run(None, {"input_ids": tokens.numpy()})
        assert relative_error(model(tokens).logits.detach(), torch.from_numpy(found)) <= 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "DistilBertForSequenceClassification",
        "GPT2LMHeadModel",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("BertForSequenceClassification", "LlamaForCausalLM", "ViTForImageClassification")
        ),
    ],
)
def test_compact_models_with_fewer_neurons_are_loaded_by_from_pretrained(name, tmp_path):
    given = (ids(2, 6),) if name in TOKENS else (torch.randn(2, 3, 8, 8).double(),)
    model = halved(built(name), given, "mlp", "ffn", "layer.0 (units)")
    small = compact(model, given)
    small.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    check(lambda *args: loaded(*args).logits, model, *given)


def test_compact_warns_once_of_sizes_that_a_config_of_hugging_face_cannot_hold():
    model = halved(built("BertForSequenceClassification"), (ids(2, 6),), "(heads)")
    with pytest.warns(PretrainedConfigWarning, match="config of BertForSeq.*save it with .*Compact") as found:
        compact(model, (ids(2, 6),))
    assert len(found) == 1
