"""Factory: builds the objects that a configuration describes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import lightning as L
import torch
from hydra.errors import InstantiationException
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import Optimizer

from sparse_lightning.app.one_call import OneCall, check_options
from sparse_lightning.app.trust import instantiate
from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.budgets import Budget
from sparse_lightning.callbacks import SparsityCallback
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compensation import Compensation
from sparse_lightning.engine.first_masks import check_first_masks
from sparse_lightning.engine.shrinkable import check_method
from sparse_lightning.engine.shrinking import Shrinking
from sparse_lightning.errors import ConfigError, SparseLightningError, UntrustedError
from sparse_lightning.export import Exporter
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import Method
from sparse_lightning.patterns import Pattern, resolve
from sparse_lightning.schedules import Schedule
from sparse_lightning.schedules.schedule import is_number

PARTS: dict[str, type] = {
    "schedule": Schedule,
    "method": Method,
    "budget": Budget,
    "criterion": Criterion,
    "compensation": Compensation,
    "shrink": Shrink,
}
"""The groups of a SparsityCallback that have one object, and its base class; an empty group is left to the default."""


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
        made = {name: self._made(name, kind) for name, kind in PARTS.items() if self.config[name]}
        nodes = self.config["pattern"].items()
        patterns = [self._make(node, f"pattern.{name}", Pattern, SparseBlock, SparseScope) for name, node in nodes]
        with at("masks"):
            check_first_masks(self.config["masks"])
        with at("shrink"):
            if "shrink" in made and "method" in made:
                check_method(made["method"])
        if self.config["calibration_batches"] is not None:
            return self._one_call(patterns, made)
        with at("update_every"):
            settings = {name: self.config[name] for name in ("update_every", "observe_every", "seed", "masks")}
            return SparsityCallback(patterns, **made, **settings)

    def _one_call(self, patterns: list[Any], made: dict[str, Any]) -> OneCall:
        """Return the callback that prunes by one call of `prune`."""
        check_options(made, self.config)
        parts = {name: made.get(name) for name in ("schedule", "criterion", "compensation", "shrink")}
        settings = {name: self.config[name] for name in ("seed", "masks")}
        return OneCall(patterns, batches=self.config["calibration_batches"], **parts, **settings)  # type: ignore[arg-type]

    def logger(self) -> Any:
        """Return the logger; False for none."""
        return self._made("logger", Logger) if self.config["logger"] else False

    def exporter(self) -> Exporter | None:
        """Return what writes the model after training; None for nothing."""
        if not self.config["export"]:
            return None
        made = self._made("export")
        if not _can_export(made):
            raise ConfigError(
                f"export._target_: {self.config['export']['_target_']} cannot export: it is not called with a folder, "
                "a model and a Sparsifier. Choose export=weights, or another"
            )
        return cast(Exporter, made)

    def trainer(self, callbacks: Sequence[L.Callback]) -> L.Trainer:
        """Return a trainer without loggers, with callbacks beside those of the configuration."""
        node = {**self.config["trainer"], "_partial_": True}
        _check_validation(node)
        _check_training(node)
        own = self._callbacks(node.pop("callbacks", None) or [])
        build = self._make(node, "trainer")
        with at("trainer"):
            made = build(callbacks=[*own, *callbacks], logger=False)
        return cast(L.Trainer, _checked(made, "trainer", (L.Trainer,)))

    def check_optimizer(self) -> None:
        """Raise `ConfigError` for invalid values of the optimizer, which it checks when it gets parameters."""
        build = self._made("optimizer", partial)
        for key, value in self.config["optimizer"].items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"optimizer.{key}: {value} is not finite: pass a number")
        with at("optimizer"):
            made = build([nn.Parameter(torch.zeros(1))])
        _checked(made, "optimizer", (Optimizer,))

    def check_patterns(self, pruning: SparsityCallback, model: L.LightningModule, trainer: L.Trainer) -> None:
        """Raise `ConfigError` where patterns do not match the model, or overrides of the budget no scope."""
        configuration = pruning.sparsifier.configuration
        with at("pattern"):
            found = resolve(configuration.patterns, model)
        with at("shrink"):
            if configuration.shrink is not None:
                Shrinking(configuration.shrink, found, model, [])
        with at("budget.overrides"):
            configuration.budget.check_overrides([attachment.name for attachment in found])
        if isinstance(pruning, OneCall):
            with at("calibration_batches"):
                pruning.check(model, trainer)

    def _callbacks(self, nodes: Any) -> list[L.Callback]:
        if not isinstance(nodes, list):
            raise ConfigError(f"trainer.callbacks: {nodes!r} is not a list: write - _target_: … for each callback")
        return [self._make(node, f"trainer.callbacks[{i}]", L.Callback) for i, node in enumerate(nodes)]

    def _made(self, group: str, *kinds: type) -> Any:
        return self._make(self.config[group], group, *kinds)

    def _make(self, node: Any, place: str, *kinds: type) -> Any:
        with at(place):
            made = instantiate(node, place, self.trusted)
        return _checked(made, place, kinds or (object,))


def _checked(made: Any, place: str, kinds: tuple[type, ...]) -> Any:
    """Return an object of one of some kinds; raise `ConfigError` for any other."""
    if isinstance(made, kinds):
        return made
    if isinstance(made, partial):
        raise ConfigError(f"{place}._partial_: true makes no {kinds[0].__name__} yet. Remove it")
    if partial in kinds:
        raise ConfigError(f"{place}._partial_: true is missing: the parameters of the model are passed later. Add it")
    wanted, group = " or ".join(kind.__name__ for kind in kinds), place.partition(".")[0]
    raise ConfigError(f"{place}._target_: {type(made).__name__} is not a {wanted}. Choose an option of {group}")


def _check_validation(node: dict[str, Any]) -> None:
    """Raise `ConfigError` for a distance between validations that Lightning accepts and then divides by."""
    numbers = {key: value for key, value in node.items() if is_number(value)}
    for key in ("val_check_interval", "check_val_every_n_epoch"):
        if numbers.get(key, 1) <= 0:
            raise ConfigError(
                f"trainer.{key}: {numbers[key]} is out of range: pass a positive number, or "
                "trainer.limit_val_batches=0 for no validation"
            )


def _check_training(node: dict[str, Any]) -> None:
    """Raise `ConfigError` for values that Lightning accepts, and by which nothing or the reverse is trained."""
    numbers = {key: value for key, value in node.items() if is_number(value)}
    for key in ("max_steps", "limit_train_batches"):
        if numbers.get(key) == 0:
            raise ConfigError(f"trainer.{key}: 0 trains nothing: pass a positive number")
    if numbers.get("accumulate_grad_batches", 1) < 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches: {numbers['accumulate_grad_batches']} is out of range: pass 1 or more"
        )
    if numbers.get("gradient_clip_val", 0) < 0:
        raise ConfigError(
            f"trainer.gradient_clip_val: {numbers['gradient_clip_val']} would reverse the gradients: pass a positive "
            "number, or null for no clipping"
        )


def _can_export(made: Any) -> bool:
    """Whether an object can be called with a folder, a model and a Sparsifier."""
    try:
        inspect.signature(made).bind("folder", "model", "sparsifier")
    except (TypeError, ValueError):
        return False
    return not isinstance(made, partial | type | nn.Module)


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
        raise ConfigError(f"{_place(error, place)}: {_without_frames(cause)}") from error
    except ConfigError:
        raise
    except (SparseLightningError, ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"{place}: {_without_frames(error)}") from error
    except Exception as error:
        if type(error).__module__.startswith("lightning"):  # MisconfigurationException is a plain Exception
            raise ConfigError(f"{place}: {error}") from error
        raise


def _without_frames(error: BaseException) -> str:
    """Return the text of an error without the C++ stack that torch adds to some."""
    return str(error).partition("\nException raised from")[0]


def _place(error: InstantiationException, place: str) -> str:
    """Return the place of an error, with what Hydra adds to it."""
    inner = str(error).rpartition("full_key: ")[2] if "full_key: " in str(error) else ""
    return f"{place}.{inner.strip()}" if inner.strip() else place
