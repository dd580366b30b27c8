"""Compose a configuration with Hydra; errors name the place in it and the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse_lightning.app import catalog
from sparse_lightning.app.arguments import parameters_of
from sparse_lightning.app.growth import limited_growth
from sparse_lightning.app.new_targets import drop_replaced
from sparse_lightning.app.overrides import parsed
from sparse_lightning.app.renamed_keys import with_new_keys
from sparse_lightning.app.stale_overrides import without_stale_overrides
from sparse_lightning.app.sweeps import options, values_to_check
from sparse_lightning.app.trust import Target, check_name
from sparse_lightning.app.yaml_limits import YamlLimits
from sparse_lightning.compat.hydra import reading_files
from sparse_lightning.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Composed:
    """A configuration that Hydra has composed.

    Args:
        config: the job's configuration, with its interpolations.
        hydra: Hydra's own configuration.
    """

    config: DictConfig
    hydra: DictConfig

    @property
    def key(self) -> str:
        """A text that is equal for equal configurations of jobs."""
        return OmegaConf.to_yaml(self.config)

    @property
    def raw(self) -> dict[str, Any]:
        """The job's configuration as plain values, with its interpolations as they are written."""
        return cast(dict[str, Any], OmegaConf.to_container(self.config))

    @property
    def overrides(self) -> list[str]:
        """The overrides of the job as they were typed: `${…}` in them stays."""
        return cast(list[str], OmegaConf.to_container(self.hydra.overrides.task))

    @property
    def is_sweep(self) -> bool:
        """Whether the configuration itself requests a multirun."""
        return self.hydra.mode is not None and self.hydra.mode.name == "MULTIRUN"

    def folder(self, place: str) -> Path:
        """Return a folder that Hydra's configuration names, such as "run.dir"."""
        return as_folder(self._resolving(lambda: OmegaConf.select(self.hydra, place)), f"hydra.{place}")

    @property
    def given_folder(self) -> Path:
        """The folder that the user has typed as `folder=…`."""
        return as_folder(self._resolving(lambda: self.config.folder), "folder")

    def plain(self, folder: Path | str) -> dict[str, Any]:
        """Return the job's configuration as plain values, for a run in a folder, with all interpolations resolved."""
        config = self.config.copy()
        OmegaConf.set_struct(config, False)
        config.folder = str(folder)
        drop_replaced(config, self.hydra, self.overrides)
        found = self._resolving(lambda: _plain(config))
        return without_stale_overrides(with_new_keys(found, self.overrides), self.overrides)

    def _resolving(self, action: Callable[[], T]) -> T:
        before = HydraConfig.instance().cfg
        HydraConfig.instance().cfg = OmegaConf.create({"hydra": self.hydra})  # type: ignore[assignment]
        try:
            with limited_growth():
                return action()
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key or 'config'}: {_first_line(error)}") from error
        except RecursionError as error:
            raise ConfigError(
                "config: its interpolations refer to one another too deeply. Use fewer of them"
            ) from error
        finally:
            HydraConfig.instance().cfg = before


def as_folder(value: Any, place: str) -> Path:
    """Return the folder that a value names.

    Raises:
        ConfigError: where it is not the name of a folder of its own.
    """
    if not isinstance(value, str) or Path(value).name in ("", ".."):
        raise ConfigError(f"{place}: {value!r} is not the name of a folder: write one, such as {place}=outputs/mine")
    return Path(value)


def compose(overrides: Sequence[str] = (), config_dir: str | None = None, number: int = 0) -> Composed:
    """Compose the primary config with overrides, as the command line does.

    Args:
        overrides: such as "recipe=digits_rigl" and "schedule.final=0.95".
        config_dir: a folder with your own options and recipes.
        number: the index of the run in its sweep, which may name its folder.

    Example:
        >>> compose(["schedule.final=0.5"]).config.schedule.final
        0.5
        >>> compose(["schedule=cubik"])
        Traceback (most recent call last):
        sparse_lightning.errors.ConfigError: schedule: there is no option 'cubik': did you mean 'cubic'?
    """
    lines = [*overrides, *search_path(config_dir), f"hydra.job.num={number}", f"hydra.job.id={number}"]
    try:
        with (
            limited_growth(),
            reading_files(YamlLimits().add),
            hydra.initialize_config_dir(str(catalog.CONF.resolve()), "run", "1.3"),
        ):
            made = hydra.compose("config", lines, return_hydra_config=True)
    except RecursionError as error:
        raise ConfigError(
            f"{' '.join(overrides)}: the configuration includes itself by its defaults or an interpolation. Remove that"
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise _translated(error, overrides, config_dir) from error
    except (OSError, UnicodeDecodeError) as error:  # a file without permission, a name that is too long for one
        raise ConfigError(f"a file of the configuration cannot be read: {error}. Check its name and content") from error
    config = OmegaConf.masked_copy(made, [str(key) for key in made if key != "hydra"])
    return Composed(config, made.hydra)


def expanded(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep; of an interval, its ends.

    Example:
        >>> expanded(["seed=1,2", "criterion=taylor"])
        [['seed=1', 'criterion=taylor'], ['seed=2', 'criterion=taylor']]
    """
    choices = [values_to_check(override) for override in parsed(overrides)]
    return [list(run) for run in product(*choices)]


def search_path(config_dir: str | None) -> list[str]:
    """Return the override that adds a folder to Hydra's search path."""
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    return [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]


def _plain(config: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))


_NO_OPTION = re.compile(r"Could not find '(?P<group>[\w/]+)/(?P<option>[^/']+)'")
_NO_PACKAGE = re.compile(r"In '(?P<file>recipe/[^']+)': Could not override '[\w/]+@recipe\.")
_KEY_EXISTS = re.compile(r"An item is already at '(?P<key>[^']+)'")
_NO_KEY = re.compile(r"Could not override '(?P<key>[^']+)'|Key '(?P<short>[^']+)' is not in struct")


def _translated(error: Exception, overrides: Sequence[str], config_dir: str | None) -> ConfigError:
    text = f"{error}\n{error.__cause__ or ''}"
    if isinstance(error, yaml.MarkedYAMLError) or "yaml" in type(error.__cause__).__module__:
        return ConfigError(f"a YAML file cannot be parsed: {' '.join(text.split())}")
    if found := _NO_OPTION.search(text):
        group, option = found["group"], found["option"]
        known = options(group, config_dir)
        if option in known:
            return ConfigError(f"{group}={option} is not allowed: its file is not a regular file. Use a YAML file")
        return ConfigError(f"{group}: there is no option {option!r}{did_you_mean(option, known)}")
    if found := _NO_PACKAGE.search(text):
        return ConfigError(f"{found['file']}: the first line must be `# @package _global_`, above any other comment")
    if found := _KEY_EXISTS.search(text):
        return ConfigError(f"{found['key']}: this key exists already: write it without +")
    if found := _NO_KEY.search(text):
        key = (found["key"] or found["short"]).partition("@")[0]
        return ConfigError(f"{key}: there is no such key{_nearest_key(key, overrides, config_dir)}")
    full_key = getattr(error.__cause__, "full_key", None) or getattr(error, "full_key", None)
    return ConfigError(f"{full_key or 'config'}: {' '.join(str(error).split())}")


def _nearest_key(key: str, overrides: Sequence[str], config_dir: str | None) -> str:
    """Return the end of a message about a wrong key: the nearest one, in the configuration without it."""
    choices = [line for line in overrides if line.partition("=")[0] in {*catalog.groups(), "recipe"}]
    if len(choices) == len(overrides):
        return did_you_mean(key, catalog.groups())  # the wrong key is in a recipe
    node: Any = OmegaConf.to_container(compose(choices, config_dir).config)
    parents, _, last = key.replace("/", ".").rpartition(".")
    for part in filter(None, parents.split(".")):
        if not isinstance(node, dict) or part not in node:
            return did_you_mean(part, map(str, node) if isinstance(node, dict) else ())
        node = node[part]
    if not isinstance(node, dict):
        return f": {parents} has a value and no keys"
    if last in node:
        return f" in its present value: to add one, write +{key}=…"
    if "_target_" in node and _takes(str(node["_target_"]), last):
        return f" in the configuration, but its target takes it: write +{key}=…"
    return did_you_mean(last, map(str, node))


def _takes(path: str, name: str) -> bool:
    try:
        check_name(Target("", path), ())
        return name in parameters_of(path)
    except ConfigError:
        return False


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
