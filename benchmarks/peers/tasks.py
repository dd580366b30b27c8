"""Tasks: real data, a model, and how to train it with any library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from peer import Peer
from plan import Plan
from stack import check
from structure import Structure, prunable
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import sparse_lightning as sl
from sparse_lightning.data import FashionMnist, LabelledText, StdlibText
from sparse_lightning.models import GPT, DigitsConv, DigitsMLP, TextClassifier

Part = tuple[Tensor, Tensor]
"""Inputs and labels."""


@dataclass(frozen=True)
class Task:
    """Data and a model.

    Args:
        name: of both.
        load: returns the data to train on, and to test on; called when they are needed.
        build: makes the model.
        structure: describes a model.
        lr: the learning rate of Adam, which falls to zero over the run.
        batch: inputs of a step.
        steps: optimizer steps of a run.
        head_lr: the learning rate of a new head on a pretrained model; None for that of all.
    """

    name: str
    load: Callable[[], tuple[Part, Part]]
    build: Callable[[], nn.Module]
    structure: Callable[[nn.Module], Structure]
    lr: float
    batch: int
    steps: int
    head_lr: float | None = None

    def accuracy(self, kind: type[Peer], plan: Plan, seed: int) -> dict[str, float]:
        """Train one model, check its sparsity, and return the percentage of the test set that is correct."""
        return {"accuracy": round(100 * self.correct(self.trained(kind, plan, seed)), 3)}

    def trained(self, kind: type[Peer], plan: Plan, seed: int) -> nn.Module:
        """Train one model and check its sparsity."""
        torch.manual_seed(seed)
        model, (inputs, labels) = self.build(), self.load()[0]
        peer = kind(model, self.structure(model), self._optimizer(model), plan, inputs[: self.batch])
        draw = torch.Generator().manual_seed(seed)
        peer.model.train()
        for step in range(plan.steps):
            for group in peer.optimizer.param_groups:
                group["lr"] = group["first_lr"] * (1 - step / plan.steps)
            batch = torch.randint(len(inputs), (self.batch,), generator=draw)
            peer.optimizer.zero_grad()
            cross_entropy(peer.model(inputs[batch]).flatten(0, -2), labels[batch].flatten()).backward()
            peer.before_step(step)
            peer.optimizer.step()
            peer.after_step(step)
        finished = peer.finish()
        if kind is not Peer:
            check(peer, finished)
        return finished.eval()

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        head = [] if self.head_lr is None else list(model.get_submodule("head").parameters())
        new = {id(parameter) for parameter in head}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in new]
        groups = [{"params": rest, "first_lr": self.lr}, {"params": head, "first_lr": self.head_lr}]
        return torch.optim.Adam([group for group in groups if group["params"]], lr=self.lr)

    def correct(self, model: nn.Module) -> float:
        """The fraction of the test set that a model predicts correctly."""
        inputs, labels = self.load()[1]
        with torch.no_grad():
            found = torch.cat([model(part).argmax(-1) for part in inputs.split(500)])
        return (found == labels).float().mean().item()


def fashion_mlp(folder: str | None) -> Task:
    """An MLP on Fashion-MNIST."""

    def structure(_: nn.Module) -> Structure:
        layers = ["first", "second"]
        neurons: list[sl.Pattern] = [sl.Neurons("first", "second"), sl.Neurons("second", "head")]
        return Structure(layers, dict.fromkeys(layers, 1), neurons)

    build = partial(DigitsMLP, hidden=256, pixels=784)
    load = partial(fashion_images, folder, shrink=1)
    return Task("MLP on Fashion-MNIST", load, build, structure, lr=2e-3, batch=128, steps=300)


def fashion_resnet(folder: str | None) -> Task:
    """A small ResNet on Fashion-MNIST, at half the resolution."""

    def structure(model: nn.Module) -> Structure:
        convolutions = [name for name in prunable(model) if name.startswith("stages.")]
        units = {name: 1 for name in convolutions if name.endswith("conv1")}
        return Structure(convolutions, units, [sl.Filters("stages.*.conv1", "stages.*.norm1", "stages.*.conv2")])

    build = partial(DigitsConv, width=16, hidden=32, depth=3)
    load = partial(fashion_images, folder, shrink=2)
    return Task("ResNet on Fashion-MNIST", load, build, structure, lr=5e-3, batch=64, steps=150)


@cache
def fashion_images(folder: str | None, shrink: int) -> tuple[Part, Part]:
    """Images and labels; each `shrink`×`shrink` pixels averaged."""
    train, test = (part.tensors for part in FashionMnist(folder).sets())
    return (avg_pool2d(train[0], shrink), train[1]), (avg_pool2d(test[0], shrink), test[1])


def encoder(folder: str, texts: str) -> Task:
    """A pretrained sentence encoder that learns to classify short texts."""

    @cache
    def load() -> tuple[Part, Part]:
        train, test = (part.tensors for part in LabelledText(texts, folder, tokens=16).sets())
        return train, test

    def structure(model: nn.Module) -> Structure:
        linear = [name for name in prunable(model) if ".layer." in name]
        size = model.encoder.config.hidden_size // model.encoder.config.num_attention_heads
        units = {name: size for name in linear if name.endswith("query")}
        units |= {name: 1 for name in linear if name.endswith("intermediate.dense")}
        beside = [name for name in linear if name.endswith(("key", "value"))]
        neurons = sl.Neurons("*.intermediate.dense", r"re:(.*\.layer\.\d+)\.output\.dense")
        return Structure(linear, units, [sl.Heads("*.attention"), neurons], beside)

    build = partial(TextClassifier, path=folder)
    return Task("MiniLM on sections of Debian", load, build, structure, lr=2e-4, batch=16, steps=50, head_lr=1e-2)


def characters() -> Task:
    """A GPT on the characters of Python's standard library."""

    @cache
    def load() -> tuple[Part, Part]:
        sets = [torch.stack([windows[i] for i in range(len(windows))]) for windows in StdlibText(context=64).sets()]
        (train, test) = ((tokens[:, :-1], tokens[:, 1:]) for tokens in sets)
        return train, (test[0][:300], test[1][:300])

    def structure(model: nn.Module) -> Structure:
        linear = [name for name in prunable(model) if name.startswith("blocks.")]
        units = {name: 1 for name in linear if name.endswith("mlp.up")}
        return Structure(linear, units, [sl.Neurons("blocks.*.mlp.up", "blocks.*.mlp.down")])

    build = partial(GPT, width=64, depth=2, heads=4, context=64)
    return Task("character GPT", load, build, structure, lr=3e-3, batch=16, steps=1000)
