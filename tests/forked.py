"""Processes that begin with Lightning imported: a server imports it once, and each of them is a fork of the server."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["lightning"])


def on_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call a function with its rank and arguments in so many processes; what one raises is raised here."""
    torch.multiprocessing.start_processes(work, arguments, ranks, start_method="forkserver")
