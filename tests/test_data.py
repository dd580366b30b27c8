"""Data modules: the same data in every run, of the shapes they promise, and clear words about what is missing."""

from __future__ import annotations

import sys

import lightning as L
import numpy as np
import pytest
import torch

from sparse_lightning.data import Cifar10, Digits, MissingError, StdlibText, TextFile
from sparse_lightning.data.cifar10 import RECORD
from sparse_lightning.data.missing import optional
from sparse_lightning.data.windows import Windows

MODULES = {
    "digits": lambda: Digits(batch_size=16),
    "stdlib_text": lambda: StdlibText(batch_size=4, context=32, size=20_000),
    "text_file": lambda: TextFile(batch_size=4, context=32),
    "cifar10": lambda: Cifar10(batch_size=8, made=64),
}
SHAPES = {
    "digits": [(16, 1, 8, 8), (16,)],
    "stdlib_text": [(4, 33)],
    "text_file": [(4, 33)],
    "cifar10": [(8, 3, 32, 32), (8,)],
}


def tensors(batch) -> list[torch.Tensor]:
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


def first_batches(name: str) -> list[torch.Tensor]:
    L.seed_everything(3, verbose=False)
    data = MODULES[name]()
    return [t for loader in (data.train_dataloader(), data.val_dataloader()) for t in tensors(next(iter(loader)))]


@pytest.mark.parametrize("name", MODULES)
def test_the_same_seed_gives_the_same_batches(name):
    pairs = zip(first_batches(name), first_batches(name), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", MODULES)
def test_batches_have_the_shapes_that_are_promised(name):
    found = first_batches(name)
    assert [tuple(t.shape) for t in found] == 2 * SHAPES[name]
    assert all(torch.isfinite(t.float()).all() for t in found)


def test_digits_are_split_the_same_way_whatever_the_seed():
    sets = []
    for seed in (1, 2):
        L.seed_everything(seed, verbose=False)
        sets.append(Digits().sets())
    assert [len(part) for part in sets[0]] == [1437, 360]
    assert torch.equal(sets[0][1].tensors[0], sets[1][1].tensors[0])
    images = sets[0][0].tensors[0]
    assert abs(float(images.mean())) < 1e-5
    assert float(images.std()) == pytest.approx(1, abs=1e-5)


def test_no_digit_is_in_both_sets():
    train, val = ({image.numpy().tobytes() for image in part.tensors[0]} for part in Digits().sets())
    assert not train & val


def test_the_standard_library_is_python():
    train, _ = StdlibText(context=64, size=5_000).sets()
    assert b"import" in bytes(train.tokens.tolist())
    assert len(train.tokens) == 4_500


def test_each_token_of_a_text_is_a_target_once():
    pieces = Windows(torch.arange(1001), context=10)
    targets = torch.cat([pieces[i][1:] for i in range(len(pieces))])
    assert torch.equal(targets, torch.arange(1, 1001))


def test_a_text_file_is_read_as_bytes_or_by_a_tokenizer(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("ab cd " * 200)
    train, _ = TextFile(str(file), context=8).sets()
    assert bytes(train[0].tolist()) == b"ab cd ab "
    train, _ = TextFile(str(file), tokenizer=str(word_tokenizer(tmp_path / "words")), context=8).sets()
    assert train[0].tolist() == [0, 1] * 4 + [0]


def word_tokenizer(folder):
    """A tokenizer of two words, on disk."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"ab": 0, "cd": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


def write_cifar10(folder, images_per_file: int = 40) -> None:
    """Files as CIFAR-10's binary version has them."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (images_per_file, RECORD), np.uint8)
        records[:, 0] %= 10
        records[0] = 0  # a black image of class 0
        records.tofile(folder / f"{name}.bin")


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read_from_its_binary_files(tmp_path, inside):
    write_cifar10(tmp_path / "cifar" / inside)
    train, val = Cifar10(str(tmp_path / "cifar")).sets()
    assert (len(train), len(val)) == (200, 40)
    black, label = val[0]
    assert int(label) == 0
    assert black[:, 0, 0].tolist() == pytest.approx([-0.4914 / 0.2470, -0.4822 / 0.2435, -0.4465 / 0.2616])


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(MissingError, match=r"data.folder=.*no_such.* does not exist"):
        Cifar10(str(tmp_path / "no_such"))
    with pytest.raises(MissingError, match=r"binary version.*not from pickles"):
        Cifar10(str(tmp_path))
    with pytest.raises(MissingError, match=r"data.path=.* does not exist: set it to a text file"):
        TextFile(str(tmp_path / "no_such.txt"))
    with pytest.raises(MissingError, match=r"data.tokenizer=.* does not exist"):
        TextFile(tokenizer=str(tmp_path / "no_such"))


def test_a_broken_file_of_cifar10_is_refused(tmp_path):
    write_cifar10(tmp_path / "cifar")
    (tmp_path / "cifar" / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(MissingError, match=r"test_batch.bin of 3 bytes"):
        Cifar10(str(tmp_path / "cifar")).sets()


def test_a_text_that_is_too_short_is_refused(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("short")
    with pytest.raises(MissingError, match=r"a text of 5 tokens .* use more text"):
        TextFile(str(file), context=4).sets()


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingError, match="is not installed: pip install 'scikit-learn'"):
        optional("sklearn.datasets", "scikit-learn")
