"""EndedRun: a run that was trained to its end. Its folder records how, and only training it longer changes that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import yaml

from sparse_lightning.app.folders import is_end, newest_checkpoint
from sparse_lightning.app.overrides import shortened
from sparse_lightning.errors import ConfigError

LIMITS = ("max_epochs", "max_steps", "max_time")
"""The arguments of the Trainer that end a run."""

FREE = (
    "name", "folder", "ckpt_path", "trust_checkpoint", "trusted_targets", "export", "logger", "data", "model.path",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.precision",
    "trainer.enable_progress_bar",
)  # fmt: skip
"""Places in a configuration that an export may set otherwise: they say where it runs, reads and writes."""

RECORD = ".ended.yaml"
"""The configuration that a run has ended with. Unlike `config.yaml` it stays as it is while a run is trained longer, so
that all processes, and later ones if these are killed, read the same."""

_OWN = ("ckpt_path", "trust_checkpoint", "folder", "export")
"""Overrides that belong to a command, not to the run that it resumes."""


@dataclass(frozen=True)
class EndedRun:
    """A run that has written its results.

    Args:
        folder: of the run.
        config: how it was trained, plain.
        is_complete: whether its newest checkpoint is that of its end; not if it was stopped while trained longer.
    """

    folder: Path
    config: dict[str, Any]
    is_complete: bool

    @staticmethod
    def of(folder: Path) -> EndedRun | None:
        """Return the run of a folder; None if it has not ended."""
        records = [folder / RECORD, folder / "config.yaml"]  # earlier versions have the second one only
        record = next((file for file in records if file.is_file()), None)
        if not (folder / "results.json").is_file() or record is None:
            return None
        return EndedRun(folder, yaml.safe_load(record.read_text("utf-8")) or {}, _is_at_its_end(folder))

    def goes_on(self, config: Mapping[str, Any]) -> bool:
        """Whether a configuration trains this run further: to a higher limit, or to its own if it was stopped."""
        before, now = self.config.get("trainer") or {}, config["trainer"]
        if not self.is_complete and all(before.get(name) == now.get(name) for name in LIMITS):
            return True
        return is_longer(config, self.config)

    def check_export(self, config: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless a configuration exports this run, and would train it as it was trained."""
        if not config["export"]:
            raise ConfigError(
                f"ckpt_path: the run in {self.folder} has ended: raise trainer.max_epochs to train longer, or choose "
                "what to export, such as export=compact"
            )
        if found := self._differences(config):
            told = ", ".join(f"{place}={before}, not {now}" for place, before, now in found)
            raise ConfigError(
                f"ckpt_path: the run in {self.folder} has ended, and was trained with {told}: repeat its overrides to "
                f"export it{self._overrides()}; or raise trainer.max_epochs to train it longer"
            )

    def _differences(self, config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """Return places, with the value of this run and another one; of values that one sets, the shortest place.

        Keys that the version which trained this run did not have are passed over.
        """
        before, now = _texts(self.config), _texts({key: config[key] for key in config if key in self.config})
        places = [place for place in {**before, **now} if before.get(place, "None") != now.get(place, "None")]
        found: dict[tuple[str, str, str], str] = {}
        for place in sorted(places, key=len):
            old, new = before.get(place, "None"), now.get(place, "None")
            found.setdefault((place.rpartition(".")[2], old, new), place)
        return sorted((place, shortened(old), shortened(new)) for (_, old, new), place in found.items())

    def _overrides(self) -> str:
        """Return the overrides that the run was started with, for a message; empty if Hydra did not record them."""
        file = self.folder / ".hydra" / "overrides.yaml"
        lines = yaml.safe_load(file.read_text("utf-8")) if file.is_file() else None
        kept = [line for line in lines or [] if line.partition("=")[0].lstrip("+") not in _OWN]
        return f", {' '.join(kept)}" if kept else ""


def is_longer(config: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a configuration has a higher limit than that of a run before."""
    limits, reached = config["trainer"], before.get("trainer") or {}
    return any(_is_higher(limits.get(name), reached.get(name)) for name in LIMITS)


def ended_with(folder: Path) -> dict[str, Any] | None:
    """Return the configuration that a run, or a dense baseline in its folder, has ended with; None for none."""
    file = folder / RECORD
    return (yaml.safe_load(file.read_text("utf-8")) or {}) if file.is_file() else None


def note_end(folder: Path, config: Mapping[str, Any]) -> None:
    """Record the configuration that a run, or a dense baseline, has ended with."""
    (folder / RECORD).write_text(yaml.safe_dump(dict(config), sort_keys=False), "utf-8")


@contextmanager
def kept_record(folder: Path) -> Iterator[None]:
    """Restore how an ended run was trained, if what is done inside fails before it has trained it any further.

    Hydra writes its files before a job starts, and a checkpoint turns out not to fit when Lightning loads it.
    """
    files = [] if EndedRun.of(folder) is None else [folder / "config.yaml", *sorted((folder / ".hydra").glob("*"))]
    contents, newest = {file: file.read_bytes() for file in files}, _identity(folder)
    try:
        yield
    except BaseException:
        if newest == _identity(folder):
            for file, content in contents.items():
                file.write_bytes(content)
        raise


def _identity(folder: Path) -> tuple[Path, int] | None:
    path = newest_checkpoint(folder / "checkpoints")
    return None if path is None else (path, os.stat(path).st_mtime_ns)


def _is_at_its_end(folder: Path) -> bool:
    """Whether the newest checkpoint was written at an end."""
    path = newest_checkpoint(folder / "checkpoints")
    return path is not None and is_end(path)


def _is_higher(now: Any, before: Any) -> bool:
    """Whether a limit is higher than another; None and -1 are no limit, and a time is any other one."""
    if isinstance(now, int | float | None) and isinstance(before, int | float | None):
        return _number(now) > _number(before)
    return bool(now != before)


def _number(limit: float | None) -> float:
    return inf if limit is None or limit == -1 else limit


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a configuration by place, without those that may differ; the run's folder is left out."""
    folder = str(config.get("folder") or "")
    found = {place: str(value) for place, value in _values(config) if not _is_free(place)}
    return {place: text.replace(folder, "") if folder else text for place, text in found.items()}


def _values(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping):
        yield place, node
        return
    for key, value in node.items():
        yield from _values(value, f"{place}.{key}" if place else str(key))


def _is_free(place: str) -> bool:
    return any(place == free or place.startswith(f"{free}.") for free in FREE)
