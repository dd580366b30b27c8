"""Models of the recipes: small networks for images and text, and Hugging Face models from a local folder."""

from __future__ import annotations

from sparse_lightning.models.classifier import Classifier
from sparse_lightning.models.digits_conv import DigitsConv
from sparse_lightning.models.digits_mlp import DigitsMLP
from sparse_lightning.models.digits_vit import DigitsViT
from sparse_lightning.models.gpt import GPT
from sparse_lightning.models.hlb_cifar10 import HlbCifar10
from sparse_lightning.models.huggingface import HuggingFace
from sparse_lightning.models.language_model import LanguageModel
from sparse_lightning.models.text_classifier import TextClassifier

__all__ = [
    "GPT",
    "Classifier",
    "DigitsConv",
    "DigitsMLP",
    "DigitsViT",
    "HlbCifar10",
    "HuggingFace",
    "LanguageModel",
    "TextClassifier",
]
