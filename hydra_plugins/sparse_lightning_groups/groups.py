"""A search path under which the groups are `sparse_lightning/schedule` and so on. It imports no torch."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

PREFIX = "sparse_lightning"


class SparseLightningGroups(SearchPathPlugin):
    """Adds the groups behind those of the application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra when an application starts."""
        search_path.append("sparse_lightning", f"{SparseLightningSource.scheme()}://groups")


class SparseLightningSource(ConfigSource):
    """The folder `sparse_lightning/conf`, one level down: so that its groups do not get in the way of others."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        from sparse_lightning.configuration.catalog import CONF

        self._conf = CONF

    @staticmethod
    def scheme() -> str:
        """How the search path names it."""
        return "sparse-lightning"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option."""
        file = self._file(config_path)
        if file is None or not file.is_file():
            raise ConfigLoadError(f"Config not found : {config_path}")
        text = file.read_text("utf-8")
        header = ConfigSource._get_header_dict(text)
        where = f"{self.scheme()}://{self.path}"
        return ConfigResult(config=OmegaConf.create(text), path=where, provider=self.provider, header=header)

    def available(self) -> bool:
        """Whether the folder is there."""
        return self._conf.is_dir()

    def is_group(self, config_path: str) -> bool:
        """Whether a path is a folder of options."""
        inner = self._inner(config_path)
        return config_path.strip("/") == "" or (inner is not None and (self._conf / inner).is_dir())

    def is_config(self, config_path: str) -> bool:
        """Whether a path is an option; the primary config is none."""
        file = self._file(config_path)
        return file is not None and file.is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The groups or options at a path."""
        inner = self._inner(config_path)
        names = [PREFIX] if inner is None else [entry.name for entry in (self._conf / inner).iterdir()]
        found: list[str] = []
        for name in names:
            path = f"{config_path}/{name}".lstrip("/")
            self._list_add_result(found, path, name, results_filter)
        return sorted(set(found))

    def _file(self, config_path: str) -> Path | None:
        inner = self._inner(config_path)
        return None if not inner or "/" not in inner else self._conf / self._normalize_file_name(inner)

    def _inner(self, config_path: str) -> str | None:
        """What is left of a path behind the prefix; None where it does not begin with it."""
        first, _, rest = config_path.strip("/").partition("/")
        return rest if first == PREFIX else None
