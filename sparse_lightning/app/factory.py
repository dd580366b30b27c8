"""Factory: builds the objects that a configuration describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import torch
from hydra.errors import InstantiationException
from torch import nn

from sparse_lightning.app.trust import instantiate
from sparse_lightning.callbacks import SparsityCallback
from sparse_lightning.engine.first_masks import check_first_masks
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import ConfigError, SparseLightningError, UntrustedError
from sparse_lightning.export import Exporter
from sparse_lightning.patterns import resolve


@dataclass(frozen=True)
class Factory:
    """Build the objects of a run; every call builds a new one.

    Args:
        config: plain and checked.
        trusted: prefixes of dotted names that the user trusts.

    Raises:
        ConfigError: where an object cannot be built; it names the place in the configuration.
    """

    config: dict[str, Any]
    trusted: tuple[str, ...] = ()

    def seed(self) -> None:
        """Seed all random number generators."""
        L.seed_everything(self.config["seed"], workers=True, verbose=False)

    def model_and_data(self) -> tuple[L.LightningModule, L.LightningDataModule]:
        """Return a model and its data, which depend on the seed only."""
        self.seed()
        return self._made("model", L.LightningModule), self._made("data", L.LightningDataModule)

    def sparsity(self) -> SparsityCallback:
        """Return the callback that prunes."""
        made = {name: self._made(name) for name in ("schedule", "method", "budget")}
        made["criterion"] = self._made("criterion") if self.config["criterion"] else None
        patterns = [self._make(node, f"pattern.{name}") for name, node in self.config["pattern"].items()]
        with at("masks"):
            check_first_masks(self.config["masks"])
        with at("update_every"):
            settings = {name: self.config[name] for name in ("update_every", "observe_every", "seed", "masks")}
            return SparsityCallback(patterns, **made, **settings)

    def logger(self) -> Any:
        """Return the logger; False for none."""
        return self._made("logger") if self.config["logger"] else False

    def exporter(self) -> Exporter | None:
        """Return what writes the model after training; None for nothing."""
        return cast(Exporter, self._made("export")) if self.config["export"] else None

    def trainer(self, callbacks: Sequence[L.Callback]) -> L.Trainer:
        """Return a trainer without loggers, with callbacks beside those of the configuration."""
        node = {**self.config["trainer"], "_partial_": True}
        own = instantiate(node.pop("callbacks", None) or [], "trainer.callbacks", self.trusted)
        build = self._make(node, "trainer")
        with at("trainer"):
            return cast(L.Trainer, build(callbacks=[*own, *callbacks], logger=False))

    def check_optimizer(self) -> None:
        """Raise `ConfigError` for invalid values of the optimizer, which it checks when it gets parameters."""
        build = self._made("optimizer")
        with at("optimizer"):
            build([nn.Parameter(torch.zeros(1))])

    def check_patterns(self, sparsifier: Sparsifier, model: L.LightningModule) -> None:
        """Raise `ConfigError` where patterns do not match the model, or overrides of the budget no scope."""
        configuration = sparsifier.configuration
        with at("pattern"):
            found = resolve(configuration.patterns, model)
        with at("budget.overrides"):
            configuration.budget.check_overrides([attachment.name for attachment in found])

    def _made(self, group: str, kind: type = object) -> Any:
        made = self._make(self.config[group], group)
        if not isinstance(made, kind):
            raise ConfigError(f"{group}._target_: {type(made).__name__} is not a {kind.__name__}")
        return made

    def _make(self, node: Any, place: str) -> Any:
        with at(place):
            return instantiate(node, place, self.trusted)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Turn errors of building an object into `ConfigError`s that name the place."""
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
    """Return the place of an error, with what Hydra adds to it."""
    inner = str(error).rpartition("full_key: ")[2] if "full_key: " in str(error) else ""
    return f"{place}.{inner.strip()}" if inner.strip() else place
