"""Parts: the objects that a configuration describes, made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import torch
from hydra.errors import InstantiationException
from torch import nn

from sparse_lightning.callbacks import SparsityCallback
from sparse_lightning.configuration.trust import instantiate
from sparse_lightning.errors import ConfigError, SparseLightningError, UntrustedError
from sparse_lightning.export import Exporter
from sparse_lightning.patterns import Pattern, resolve


@dataclass(frozen=True)
class Parts:
    """Makes the parts of a run. What goes wrong is a `ConfigError` that names the place.

    Args:
        config: plain and checked.
        trusted: prefixes of dotted names that the user trusts.
    """

    config: dict[str, Any]
    trusted: tuple[str, ...] = ()

    def seed(self) -> None:
        """Begin all random numbers anew."""
        L.seed_everything(self.config["seed"], workers=True, verbose=False)

    def model(self) -> L.LightningModule:
        """The model."""
        return cast(L.LightningModule, self._made("model", L.LightningModule))

    def data(self) -> L.LightningDataModule:
        """The data."""
        return cast(L.LightningDataModule, self._made("data", L.LightningDataModule))

    def sparsity(self) -> SparsityCallback:
        """The callback that prunes."""
        names = ("schedule", "criterion", "method", "budget")
        made = {name: self._made(name) for name in names}
        with at("update_every"):
            return SparsityCallback(
                self.patterns(), **made, update_every=self.config["update_every"], seed=self.config["seed"]
            )

    def patterns(self) -> list[Pattern]:
        """The patterns, in their order."""
        return [self._make(node, f"pattern.{name}") for name, node in self.config["pattern"].items()]

    def logger(self) -> Any:
        """What metrics are written with; False for nothing."""
        return self._made("logger") if self.config["logger"] else False

    def exporter(self) -> Exporter | None:
        """What writes the model when training has ended; None for nothing."""
        return cast(Exporter, self._made("export")) if self.config["export"] else None

    def trainer(self, callbacks: Sequence[L.Callback], logger: Any) -> L.Trainer:
        """The trainer, with callbacks beside those of the configuration."""
        node = {**self.config["trainer"], "_partial_": True}
        own = instantiate(node.pop("callbacks", None) or [], "trainer.callbacks", self.trusted)
        factory = self._make(node, "trainer")
        with at("trainer"):
            return cast(L.Trainer, factory(callbacks=[*own, *callbacks], logger=logger))

    def check_small(self) -> L.Trainer:
        """Refuse what cannot be right in parts that cost nothing to make: all but the model and the data.

        Returns:
            A trainer that trains nothing, which tells about devices and processes.
        """
        self.sparsity()
        self.logger()
        self.exporter()
        factory = self._made("optimizer")
        with at("optimizer"):
            factory([nn.Parameter(torch.zeros(1))])  # its values are looked at when it gets parameters
        return self.trainer([], False)

    def check_patterns(self, model: L.LightningModule) -> None:
        """Refuse patterns that find nothing in the model, or what does not fit."""
        settings = self.sparsity().sparsifier.settings
        with at("pattern"):
            found = resolve(settings.patterns, model)
        with at("budget.overrides"):
            settings.budget.check_overrides([attachment.name for attachment in found])

    def _made(self, group: str, kind: type = object) -> Any:
        made = self._make(self.config[group], group)
        if not isinstance(made, kind):
            raise ConfigError(f"{group}._target_: {type(made).__name__} is no {kind.__name__}")
        return made

    def _make(self, node: Any, place: str) -> Any:
        with at(place):
            return instantiate(node, place, self.trusted)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Errors that arise inside become `ConfigError`s that name the place."""
    try:
        yield
    except UntrustedError:
        raise
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None:
            raise ConfigError(f"{place}: {' '.join(str(error).split())}") from error
        raise ConfigError(f"{_place(error, place)}: {cause}") from error
    except ConfigError:
        raise
    except (SparseLightningError, ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"{place}: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("lightning"):  # MisconfigurationException is a plain Exception
            raise ConfigError(f"{place}: {error}") from error
        raise


def _place(error: InstantiationException, place: str) -> str:
    """Hydra tells where in the node it was."""
    inner = str(error).rpartition("full_key: ")[2] if "full_key: " in str(error) else ""
    return f"{place}.{inner.strip()}" if inner.strip() else place
