"""A search path with the groups of sparse_lightning, such as `sparse_lightning/schedule`. It imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from sparse_lightning.app.catalog import CONF

PREFIX = "sparse_lightning"

_HEADER = re.compile(r"\A\s*#\s*@(\w+)\s+(\S+)\s*$", re.MULTILINE)
"""A directive in the first line of a file, such as `# @package _global_`."""


class SparseLightningGroups(SearchPathPlugin):
    """Add the groups after those of the application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the source; Hydra calls this when an application starts."""
        search_path.append("sparse_lightning", f"{SparseLightningSource.scheme()}://groups")


class SparseLightningSource(ConfigSource):
    """The folder `sparse_lightning/conf` below a prefix, so that its groups do not collide with others."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of its URL in the search path."""
        return "sparse-lightning"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option."""
        file = self._file(config_path)
        if file is None or not file.is_file():
            raise ConfigLoadError(f"Config not found : {config_path}")
        text = file.read_text("utf-8")
        header = {"package": None, **dict(_HEADER.findall(text))}
        where = f"{self.scheme()}://{self.path}"
        return ConfigResult(config=OmegaConf.create(text), path=where, provider=self.provider, header=header)

    def available(self) -> bool:
        """Whether the folder exists."""
        return CONF.is_dir()

    def is_group(self, config_path: str) -> bool:
        """Whether a path is a folder of options."""
        inner = self._inner(config_path)
        return config_path.strip("/") == "" or (inner is not None and (CONF / inner).is_dir())

    def is_config(self, config_path: str) -> bool:
        """Whether a path is an option of a group."""
        file = self._file(config_path)
        return file is not None and file.is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the groups or options at a path."""
        inner = self._inner(config_path)
        names = [PREFIX] if inner is None else [entry.name for entry in (CONF / inner).iterdir()]
        paths = {name: f"{config_path}/{name}".lstrip("/") for name in names}
        groups = {name for name, path in paths.items() if self.is_group(path)}
        options = {name.removesuffix(".yaml") for name, path in paths.items() if self.is_config(path)}
        chosen = {ObjectType.GROUP: groups, ObjectType.CONFIG: options}
        return sorted(groups | options if results_filter is None else chosen.get(results_filter, set()))

    def _file(self, config_path: str) -> Path | None:
        inner = self._inner(config_path)
        return None if not inner or "/" not in inner else CONF / f"{inner.removesuffix('.yaml')}.yaml"

    def _inner(self, config_path: str) -> str | None:
        """Return a path without the prefix; None where it does not start with it."""
        first, _, rest = config_path.strip("/").partition("/")
        return rest if first == PREFIX else None
