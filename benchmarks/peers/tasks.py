"""Tasks: real data, a model, and how to train it with any library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from peer import Peer
from plan import Plan
from stack import check
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparse_lightning.data import FashionMnist, LabelledText
from sparse_lightning.models import DigitsMLP, TextClassifier

Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Data and a model.

    Args:
        name: of both.
        train: inputs and labels.
        test: inputs and labels.
        build: makes the model.
        layers: to prune, in order.
        reader: the layer that reads the last of them.
        lr: the learning rate of Adam, which falls to zero over the run.
        batch: inputs of a step.
    """

    name: str
    train: Part
    test: Part
    build: Callable[[], nn.Module]
    layers: list[str]
    reader: str
    lr: float
    batch: int

    def accuracy(self, kind: type[Peer], plan: Plan, seed: int) -> float:
        """Train one model, check its sparsity, and return the percentage of the test set that is correct."""
        torch.manual_seed(seed)
        model, (inputs, labels) = self.build(), self.train
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        peer = kind(model, self.layers, self.reader, optimizer, plan, inputs[: self.batch])
        draw = torch.Generator().manual_seed(seed)
        for step in range(plan.steps):
            for group in peer.optimizer.param_groups:
                group["lr"] = self.lr * (1 - step / plan.steps)
            batch = torch.randint(len(inputs), (self.batch,), generator=draw)
            peer.optimizer.zero_grad()
            cross_entropy(peer.model(inputs[batch]), labels[batch]).backward()
            peer.before_step(step)
            peer.optimizer.step()
            peer.after_step(step)
        finished = peer.finish()
        if kind is not Peer:
            check(peer, finished)
        return 100 * self._correct(finished.eval())

    def _correct(self, model: nn.Module) -> float:
        inputs, labels = self.test
        with torch.no_grad():
            found = torch.cat([model(part).argmax(-1) for part in inputs.split(500)])
        return (found == labels).float().mean().item()


def fashion(folder: str | None) -> Task:
    """An MLP on Fashion-MNIST."""
    train, test = (part.tensors for part in FashionMnist(folder).sets())
    layers = ["first", "second"]
    return Task(
        "MLP 784-512-512-10 on Fashion-MNIST",
        train,
        test,
        lambda: DigitsMLP(hidden=512, pixels=784),
        layers,
        "head",
        2e-3,
        128,
    )


def encoder(folder: str, texts: str) -> Task:
    """A sentence encoder on labelled texts."""
    train, test = (part.tensors for part in LabelledText(texts, folder).sets())

    def build() -> nn.Module:
        return TextClassifier(path=folder)

    names = [name for name, module in build().named_modules() if isinstance(module, nn.Linear) and "layer." in name]
    return Task("encoder on labelled texts", train, test, build, names, "head", 1e-4, 16)
