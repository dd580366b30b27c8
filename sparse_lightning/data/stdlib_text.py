"""StdlibText: the sources of Python's standard library as text."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sparse_lightning.data.loaders import TwoSets
from sparse_lightning.data.missing import MissingError
from sparse_lightning.data.windows import Windows, from_bytes, split

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class StdlibText(TwoSets):
    """Python's own sources, byte by byte: real text that every machine has.

    Batches are token ids of shape `(batch_size, context + 1)`. The last tenth is for validation.

    Args:
        batch_size: sequences in a batch.
        context: the length of a sequence, in bytes.
        size: how many bytes to read, from files in the order of their names.
        num_workers: processes that load data.

    Example:
        >>> next(iter(StdlibText(batch_size=4, context=32, size=10_000).train_dataloader())).shape
        torch.Size([4, 33])
    """

    def __init__(self, batch_size: int = 16, context: int = 128, size: int = 1_000_000, num_workers: int = 0) -> None:
        super().__init__(batch_size, num_workers)
        self.context = context
        self.size = size

    def sets(self) -> tuple[Windows, Windows]:
        """Return the training set and the validation set."""
        return split(from_bytes(stdlib_sources(self.size)), self.context, self.batch_size)


def stdlib_sources(size: int) -> bytes:
    """Return the first bytes of the standard library's modules, concatenated in the order of their names."""
    text = bytearray()
    for path in _modules(Path(sysconfig.get_path("stdlib"))):
        text += path.read_bytes()
        if len(text) >= size:
            break
    if not text:
        raise MissingError("this Python has no sources of its standard library: use data=text_file with data.path=…")
    return bytes(text[:size])


def _modules(folder: Path) -> Iterator[Path]:
    """Yield the modules of a folder, then those of the packages in it."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    yield from (path for path in inside if path.suffix == ".py" and path.is_file())
    for path in inside:
        if path.name not in _LEFT_OUT and (path / "__init__.py").is_file():
            yield from _modules(path)
