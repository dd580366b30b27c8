"""Compact: the model without its zero units, in a file that a fresh model or any process with torch loads."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import nn

from sparse_lightning.compaction import Compacted, compact_program, compacted
from sparse_lightning.compaction.compact import STAGES as OF_MODULE
from sparse_lightning.compaction.program import STAGES as OF_PROGRAM
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import CheckpointError, CouplingError
from sparse_lightning.export.compact_header import CompactHeader
from sparse_lightning.export.reading import read_tensors
from sparse_lightning.export.resize import check_fit, resize
from sparse_lightning.export.saving import save_tensors
from sparse_lightning.export.state import check_whole, first_names, plain, tensors_of, writes
from sparse_lightning.graph.inputs import Inputs
from sparse_lightning.progress import stage, stages

HEADER = "sparse_lightning.compact"
"""The entry of the file's metadata that describes what was removed."""

_log = logging.getLogger(__name__)

Route = Literal["module", "graph"]

FILES = {"module": "compact.safetensors", "graph": "compact.pt2"}
"""The name of the file of each route."""

STAGES = {"module": OF_MODULE + 1, "graph": OF_PROGRAM + 1}
"""Of the progress bar of each route."""


class Compact:
    """Saves a pruned model without the units that are zero, see `compact`.

    The route "module" writes a safetensors file with the small tensors, and a header with the shapes, the size
    attributes and the units that are kept; `load` resizes a fresh model of the same class by it. Nothing in the file is
    executed, and all of it is checked before the model changes. The route "graph" writes the traced program, with sizes
    rewritten: `torch.export.load(path).module()` runs it without this package and without the model's class.

    The smaller model is compared with the pruned one on the inputs before anything is written.

    Args:
        route: "module" or "graph".
        inputs: a tuple of positional or a dict of keyword arguments of the model; None takes its
            `example_input_array` or `dummy_inputs`.
        file: the name of the file; None for `compact.safetensors` or `compact.pt2`.

    Example:
        >>> import tempfile
        >>> from sparse_lightning import Constant, Neurons
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> with torch.no_grad():
        ...     for weights in (model[0].weight[:5], model[0].bias[:5], model[2].weight[:, :5]):
        ...         _ = weights.zero_()
        >>> sparsifier, x = Sparsifier([Neurons("0", "2")], Constant(0.625)), torch.randn(2, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Compact(inputs=(x,))(Path(folder), model, sparsifier)
        ...     fresh = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        ...     loaded = Compact.load(path, into=fresh)
        >>> torch.allclose(loaded(x), model(x), atol=1e-6), loaded[0]
        (True, Linear(in_features=4, out_features=3, bias=True))
    """

    def __init__(self, route: Route = "module", inputs: Inputs = None, file: str | None = None) -> None:
        if route not in FILES:
            raise CouplingError(f"route={route!r} is not a route: use 'module' or 'graph'")
        self.route, self.inputs, self.file = route, inputs, file or FILES[route]

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the file; see `Exporter`.

        Raises:
            SparseLightningError: if parameters are sharded, or the smaller model has other outputs.
        """
        path = Path(folder) / self.file
        check_whole(model, "units are counted in one", "Compact")
        if writes():
            path.parent.mkdir(parents=True, exist_ok=True)
            _log.info("tracing %s, removing its zero units and comparing outputs", type(model).__name__)
            with stages("export", STAGES[self.route], model):
                save = _saver(model, self.route, self.inputs)
                stage(f"writing {path.name}")
                save(path)
        return path

    @staticmethod
    def load(path: Path | str, into: nn.Module) -> nn.Module:
        """Resize a fresh model, and load the tensors of a file of the route "module" into it.

        Args:
            path: the file.
            into: a model of the exported class, configuration and dtype; its layers are resized in place.

        Returns:
            The model.

        Raises:
            CheckpointError: if the file was not written by `Compact`, is damaged, or belongs to another model.
        """
        try:
            text, found = read_tensors(path, HEADER)
            header = CompactHeader.from_text(text)
            check_fit(into, header, found)
        except (SafetensorError, KeyError, AttributeError, ValueError, RecursionError, OSError) as error:
            raise CheckpointError(
                f"{_reason(error)}: {path} is not a compacted {type(into).__name__} of this configuration. Pass a file "
                'that sparse_lightning.export.Compact(route="module") has written, and a model of the class and '
                "configuration that was exported"
            ) from error
        resize(into, header, found)
        return into


def _saver(model: nn.Module, route: Route, inputs: Inputs) -> Callable[[Path], None]:
    """Return what writes the compacted model."""
    if route == "module":
        return partial(_save_module, compacted(model, inputs))
    return partial(_save_program, compact_program(model, inputs).program)


def _reason(error: Exception) -> str:
    """Return what is wrong with a file, in words."""
    if isinstance(error, KeyError):
        return "the file has no header of Compact"
    return f"the file is damaged or no safetensors ({error})" if isinstance(error, SafetensorError) else str(error)


def _save_module(made: Compacted, path: Path) -> None:
    state = tensors_of(made.model)
    state |= {name: _tensor_at(made.model, name) for name in made.unregistered}
    names = first_names(state)
    found = {name: plain(state[name]) for name in dict.fromkeys(names.values())}
    header = CompactHeader(
        {name: first for name, first in names.items() if name != first},
        {name: shape for name, shape in made.shapes.items() if name in state},
        made.attributes,
        made.units,
        made.unregistered,
    )
    save_tensors({name: t for name, t in found.items() if t is not None}, path, {HEADER: header.to_text()})


def _tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    found = getattr(model.get_submodule(path), last)
    assert isinstance(found, torch.Tensor)
    return found


def _save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    made = io.BytesIO()
    torch.export.save(program, made)
    path.unlink(missing_ok=True)  # a link is replaced, and what it points to stays
    path.write_bytes(made.getvalue())
