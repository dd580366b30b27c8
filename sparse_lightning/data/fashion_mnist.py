"""FashionMnist: 70,000 images of clothes, from idx files in a local folder."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import TensorDataset

from sparse_lightning.data.idx_file import read_idx
from sparse_lightning.data.loaders import TwoSets
from sparse_lightning.data.missing import MissingError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""

TRAIN, VAL = "train", "t10k"
"""How the names of the files start."""


class FashionMnist(TwoSets):
    """Fashion-MNIST, or any data set in its four files: images `(1, 28, 28)` of ten classes.

    Pixels have mean 0 and variance 1 over the training images. The validation set is the test set of Fashion-MNIST.

    Args:
        folder: the folder of `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
            `t10k-labels-idx1-ubyte`, plain or with `.gz`; None uses that of Debian's package `dataset-fashion-mnist`.
        batch_size: images in a batch.
        images: the number of training images, the first ones; None uses all.
        num_workers: processes that load data.

    Raises:
        MissingError: where the folder has no such files; it says how to get them.

    Example:
        >>> FashionMnist("no_such_folder")
        Traceback (most recent call last):
        sparse_lightning.data.missing.MissingError: data.folder=no_such_folder has no train-images-idx3-ubyte: ...
    """

    def __init__(
        self, folder: str | None = None, batch_size: int = 128, images: int | None = None, num_workers: int = 0
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.folder = _folder_of_files(folder)
        self.images = images

    def sets(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the training set and the validation set."""
        images, labels = (read_idx(self.folder / f"{TRAIN}-{kind}")[: self.images] for kind in KINDS)
        val_images, val_labels = (read_idx(self.folder / f"{VAL}-{kind}") for kind in KINDS)
        train, val = images.unsqueeze(1).float(), val_images.unsqueeze(1).float()
        mean, std = train.mean(), train.std()
        train.sub_(mean).div_(std)
        val.sub_(mean).div_(std)
        return TensorDataset(train, labels.long()), TensorDataset(val, val_labels.long())


KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _folder_of_files(folder: str | None) -> Path:
    found = DEBIAN if folder is None else Path(folder).expanduser()
    name = f"{TRAIN}-{KINDS[0]}"
    if not any((found / file).is_file() for file in (name, f"{name}.gz")):
        raise MissingError(
            f"data.folder={found} has no {name}: install Fashion-MNIST by `apt-get install dataset-fashion-mnist` and "
            f"leave data.folder out, or set it to a folder with the four idx files, plain or gzip"
        )
    return found
