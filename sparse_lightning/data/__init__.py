"""Data that needs no download: handwritten digits, Python's own sources, and files of a local folder."""

from __future__ import annotations

from sparse_lightning.data.cifar10 import Cifar10
from sparse_lightning.data.digits import Digits
from sparse_lightning.data.fashion_mnist import FashionMnist
from sparse_lightning.data.labelled_text import LabelledText
from sparse_lightning.data.missing import MissingError
from sparse_lightning.data.stdlib_text import StdlibText
from sparse_lightning.data.text_file import TextFile

__all__ = ["Cifar10", "Digits", "FashionMnist", "LabelledText", "MissingError", "StdlibText", "TextFile"]
