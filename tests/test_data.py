"""Data modules: the same data in every run, of the shapes they promise, and clear words about what is missing."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import LABELS, idx_bytes, save_bert, write_fashion, write_labelled

from sparse_lightning.data import Cifar10, Digits, FashionMnist, LabelledText, MissingError, StdlibText, TextFile
from sparse_lightning.data.cifar10 import RECORD
from sparse_lightning.data.idx_file import read_idx
from sparse_lightning.data.labelled_text import DEBIAN_PACKAGES, frequent_texts
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


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.booleans(), st.integers(0, 2**32 - 1))
def test_an_idx_file_gives_the_array_that_was_written(tmp_path_factory, shape, packed, seed):
    array = np.random.default_rng(seed).integers(0, 256, shape)
    file = tmp_path_factory.mktemp("idx") / "x"
    data = idx_bytes(array)
    file.with_name("x.gz" if packed else "x").write_bytes(gzip.compress(data) if packed else data)
    found = read_idx(file)
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, tuple(shape))
    assert np.array_equal(found.numpy(), array)


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist_is_read_from_its_four_files(tmp_path, packed):
    folder = write_fashion(tmp_path / "fashion", packed=packed)
    train, val = FashionMnist(str(folder), images=200).sets()
    assert (len(train), len(val)) == (200, 40)
    images, labels = train.tensors
    assert images.shape == (200, 1, 28, 28)
    assert torch.equal(labels, torch.arange(200) % 10)
    assert abs(float(images.mean())) < 1e-4
    assert float(images.std()) == pytest.approx(1, abs=1e-4)
    brightest = val.tensors[0].mean(3).argmax(2).flatten()
    assert torch.equal(brightest, 2 * val.tensors[1]), "validation images do not belong to their labels"


def test_fashion_mnist_that_is_missing_says_how_to_get_it(tmp_path):
    with pytest.raises(MissingError, match=r"apt-get install dataset-fashion-mnist.*four idx files"):
        FashionMnist(str(tmp_path))
    folder = write_fashion(tmp_path / "fashion", train=20, packed=True)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingError, match=r"has no t10k-labels-idx1-ubyte and no t10k-labels-idx1-ubyte.gz"):
        FashionMnist(str(folder)).sets()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"\0\0\x0d" + data[3:], lambda data: b""])
def test_a_broken_idx_file_is_refused(tmp_path, change):
    data = change(idx_bytes(np.ones((3, 4))))
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(MissingError, match=rf"x of {len(data)} bytes is not an idx file"):
        read_idx(tmp_path / "x")
    (tmp_path / "y.gz").write_bytes(gzip.compress(data)[:-4])
    with pytest.raises(MissingError, match=r"y.gz is not a complete gzip file"):
        read_idx(tmp_path / "y")


def test_labelled_texts_are_split_evenly_and_apart(tmp_path):
    file = tmp_path / "texts.tsv"
    file.write_text("".join(f"{label}\t{label} {i}\n" for label in LABELS for i in range(30)) + "rare\tx\nno tab\n")
    data = LabelledText(str(file), labels=3, train_texts=15, val_texts=10, tokens=12)
    read = [[bytes(row[0][: row[1].sum()].tolist()).decode() for row in part.tensors[0]] for part in data.sets()]
    assert [len(set(texts)) for texts in read] == [45, 30]
    assert not set(read[0]) & set(read[1])
    for part, texts in zip(data.sets(), read, strict=True):
        names = list(frequent_texts(file, 3))
        assert [text.split()[0] for text in texts] == [names[label] for label in part.tensors[1]]


def test_labelled_texts_are_read_by_a_tokenizer(tmp_path):
    file, bert = write_labelled(tmp_path / "texts.tsv"), save_bert(tmp_path / "bert")
    train, _ = LabelledText(str(file), str(bert), labels=3, val_texts=10, tokens=8).sets()
    ids, mask = train.tensors[0].unbind(1)
    assert (ids[:, 0] == 2).all(), "texts start with [CLS]"
    assert torch.equal(mask, (ids != 0).long())
    names = {name: 5 + i for i, name in enumerate(LABELS)}
    order = [names[name] for name in frequent_texts(file, 3)]
    assert ids[:, 2].tolist() == [order[label] for label in train.tensors[1]], "the second word is the label"


def test_labelled_texts_that_are_missing_say_how_to_make_them(tmp_path):
    with pytest.raises(MissingError, match=r"data.path is not set: .*a label, a tab and a text.*apt-cache dumpavail"):
        LabelledText()
    with pytest.raises(MissingError, match=r"data.path=.*no_such.* does not exist.*apt-cache dumpavail"):
        LabelledText(str(tmp_path / "no_such"))
    file = write_labelled(tmp_path / "texts.tsv", texts=5)
    with pytest.raises(MissingError, match=r"has 3 labels, fewer than data.labels=4"):
        LabelledText(str(file), labels=4).sets()
    with pytest.raises(MissingError, match=r"has 5 texts, too few for data.val_texts=5"):
        LabelledText(str(file), labels=3, val_texts=5).sets()


@pytest.mark.skipif(shutil.which("awk") is None, reason="awk is not installed")
def test_the_documented_command_makes_a_file_of_packages(tmp_path):
    """With what `apt-cache dumpavail` prints; apt need not be installed."""
    records = [
        "Package: {0}\nVersion: 1\nDescription: a tool: number {0}\n more text\nSection: {1}\n",
        "Package: {0}\nSection: {1}\nDescription-en: a tool, number {0}\nHomepage: x\n",
    ]
    listed = [records[i % 2].format(f"p{i}", LABELS[i % 3]) for i in range(30)]
    (tmp_path / "available").write_text("\n".join(listed) + "\n")
    command = DEBIAN_PACKAGES.replace("apt-cache dumpavail", "cat available")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    found = frequent_texts(tmp_path / "packages.tsv", 3)
    assert {label: len(texts) for label, texts in found.items()} == dict.fromkeys(LABELS, 10)
    assert "p1: a tool, number p1" in found["libs"]


def test_the_command_is_documented():
    page = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text("utf-8")
    assert DEBIAN_PACKAGES in page.replace("\\\n    ", "")
