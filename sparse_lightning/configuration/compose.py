"""Compose: Hydra's configuration as plain values, with errors that name the place and the nearest right name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse_lightning.configuration import catalog
from sparse_lightning.configuration.leftovers import without_leftovers
from sparse_lightning.errors import ConfigError
from sparse_lightning.nearest import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Composed:
    """A configuration as Hydra has composed it.

    Args:
        config: the job's part, with its interpolations.
        hydra: Hydra's own part.
    """

    config: DictConfig
    hydra: DictConfig

    @property
    def is_sweep(self) -> bool:
        """Whether the configuration itself asks for a multirun."""
        return self.hydra.mode is not None and self.hydra.mode.name == "MULTIRUN"

    def folder(self, place: str) -> Path:
        """A folder that Hydra's part names, such as "run.dir"."""
        return self._resolving(lambda: Path(str(OmegaConf.select(self.hydra, place))))

    def plain(self, folder: Path | str) -> dict[str, Any]:
        """The job's part in plain values, all interpolations resolved, for a run in a folder."""
        config = self.config.copy()
        OmegaConf.set_struct(config, False)
        config.folder = str(folder)
        found = self._resolving(lambda: _plain(config))
        return without_leftovers(found, list(self.hydra.overrides.task))

    def _resolving(self, action: Callable[[], T]) -> T:
        before = HydraConfig.instance().cfg
        HydraConfig.instance().cfg = OmegaConf.create({"hydra": self.hydra})  # type: ignore[assignment]
        try:
            return action()
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key or 'config'}: {_first_line(error)}") from error
        finally:
            HydraConfig.instance().cfg = before


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> Composed:
    """Compose the primary config with overrides, as the command line does.

    Args:
        overrides: such as "recipe=digits_rigl" and "schedule.final=0.95".
        config_dir: a folder with options and recipes of one's own.

    Example:
        >>> compose(["schedule.final=0.5"]).config.schedule.final
        0.5
        >>> compose(["schedule=cubik"])
        Traceback (most recent call last):
        sparse_lightning.errors.ConfigError: schedule: there is no option 'cubik': did you mean 'cubic'?
    """
    lines = [*overrides, *search_path(config_dir)]
    try:
        with opened():
            made = hydra.compose("config", lines, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise _translated(error, overrides, config_dir) from error
    hydra_part = made.hydra
    config = OmegaConf.masked_copy(made, [str(key) for key in made if key != "hydra"])
    return Composed(config, hydra_part)


def expanded(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep.

    Example:
        >>> expanded(["seed=1,2", "criterion=taylor"])
        [['seed=1', 'criterion=taylor'], ['seed=2', 'criterion=taylor']]
    """
    choices = []
    for override in parsed(overrides):
        is_discrete = override.is_sweep_override() and override.is_discrete_sweep()
        key, line = override.get_key_element(), cast(str, override.input_line)
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()] if is_discrete else [line])
    return [list(run) for run in product(*choices)]


def parsed(overrides: Sequence[str]) -> list[Any]:
    """Overrides by Hydra's grammar."""
    try:
        return list(OverridesParser.create().parse_overrides(list(overrides)))
    except HydraException as error:
        raise ConfigError(f"{_first_line(error)}. An override is key=value, such as schedule.final=0.9") from error


def opened() -> AbstractContextManager[None]:
    """Hydra with the configuration of this package; what it was before is restored."""
    return cast(AbstractContextManager[None], hydra.initialize_config_dir(str(catalog.CONF.resolve()), "run", "1.3"))


def search_path(config_dir: str | None) -> list[str]:
    """The override by which Hydra looks into a folder too."""
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    return [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]


def _plain(config: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))


_NO_OPTION = re.compile(r"Could not find '(?P<group>[\w/]+)/(?P<option>[^/']+)'")
_NO_PACKAGE = re.compile(r"In '(?P<file>recipe/[^']+)': Could not override '[\w/]+@recipe\.")
_NO_KEY = re.compile(r"Could not override '(?P<key>[^']+)'|Key '(?P<short>[^']+)' is not in struct")


def _translated(error: Exception, overrides: Sequence[str], config_dir: str | None) -> ConfigError:
    text = f"{error}\n{error.__cause__ or ''}"
    if isinstance(error, yaml.MarkedYAMLError) or "yaml" in type(error.__cause__).__module__:
        return ConfigError(f"a YAML file cannot be read: {' '.join(text.split())}")
    if found := _NO_OPTION.search(text):
        group, option = found["group"], found["option"]
        known = [*catalog.options(group), *_own_options(config_dir, group)]
        return ConfigError(f"{group}: there is no option {option!r}{did_you_mean(option, known)}")
    if found := _NO_PACKAGE.search(text):
        return ConfigError(f"{found['file']}: its first line has to be `# @package _global_`, above any other comment")
    if found := _NO_KEY.search(text):
        key = (found["key"] or found["short"]).partition("@")[0]
        return ConfigError(f"{key}: there is no such key{_nearest_key(key, overrides, config_dir)}")
    full_key = getattr(error.__cause__, "full_key", None) or getattr(error, "full_key", None)
    return ConfigError(f"{full_key or 'config'}: {' '.join(str(error).split())}")


def _own_options(config_dir: str | None, group: str) -> list[str]:
    return [] if config_dir is None else sorted(file.stem for file in Path(config_dir, group).glob("*.yaml"))


def _nearest_key(key: str, overrides: Sequence[str], config_dir: str | None) -> str:
    """The nearest key beside a wrong one, in the configuration without it."""
    choices = [line for line in overrides if line.partition("=")[0] in {*catalog.groups(), "recipe"}]
    if len(choices) == len(overrides):
        return did_you_mean(key, catalog.groups())  # what is wrong stands in a recipe
    node: Any = compose(choices, config_dir).config
    parents, _, last = key.replace("/", ".").rpartition(".")
    for part in filter(None, parents.split(".")):
        if not isinstance(node, DictConfig) or part not in node:
            return did_you_mean(part, map(str, node) if isinstance(node, DictConfig) else ())
        node = node._get_node(part)
    if not isinstance(node, DictConfig):
        return f": {parents} has a value and no keys"
    if last in node:
        return f" inside of it: to add one, write +{key}=…"
    if "_target_" in node and _takes(str(node["_target_"]), last):
        return f" in the configuration, but its target takes it: write +{key}=…"
    return did_you_mean(last, map(str, node))


def _takes(path: str, name: str) -> bool:
    from sparse_lightning.configuration.arguments import parameters_of
    from sparse_lightning.configuration.trust import Target, check_name

    try:
        check_name(Target("", path), ())
        return name in parameters_of(path)
    except ConfigError:
        return False


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
