"""ONNX: the model without its zero units, as an ONNX file."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparse_lightning.compaction.fixed_sizes import DIMENSIONS
from sparse_lightning.compaction.program import STAGES as OF_PROGRAM
from sparse_lightning.compaction.program import SmallProgram, compact_program
from sparse_lightning.compaction.same_outputs import difference, tensors_in
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.export.state import check_whole, writes
from sparse_lightning.graph.inputs import Inputs
from sparse_lightning.progress import stage, stages

STAGES = OF_PROGRAM + 3
"""Of the progress bar."""

_log = logging.getLogger(__name__)


class ONNX:
    """Saves a pruned model without the units that are zero as an ONNX file, see `compact`.

    It is made from the program of `Compact(route="graph")`, with batch and sequence dynamic, and run by onnxruntime:
    its outputs must be those of the model before it is written. It needs the extra `onnx`.

    Args:
        inputs: a tuple of positional or a dict of keyword arguments of the model; None takes its
            `example_input_array` or `dummy_inputs`.
        file: the name of the file.
    """

    def __init__(self, inputs: Inputs = None, file: str = "model.onnx") -> None:
        self.inputs, self.file = inputs, file

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the file; see `Exporter`.

        Raises:
            SparseLightningError: if parameters are sharded, the extra is not installed, or onnxruntime computes other
                outputs.
        """
        path = Path(folder) / self.file
        check_whole(model, "units are counted in one", "ONNX")
        if writes():
            with stages("export", STAGES, model):
                small = compact_program(model, self.inputs)
                _log.info("converting the program of %s to ONNX", type(model).__name__)
                stage("converting the program to ONNX")
                made = _converted(small)
                _name_dimensions(made.model.graph)
                _name_outputs(made.model.graph, small.names)
                stage("comparing outputs in onnxruntime")
                _check(made, small, type(model).__name__)
                stage(f"writing {path.name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)  # a link is replaced, and what it points to stays
                made.save(path)
        return path


def _converted(small: SmallProgram) -> Any:
    try:
        import onnxruntime  # noqa: F401 - optional
        import onnxscript  # noqa: F401 - optional
    except ImportError as error:
        raise SparseLightningError(
            f"{error.name} is not installed, and ONNX files are written and checked with it: "
            'pip install "sparse-lightning[onnx]"'
        ) from error
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice of torch.onnx on its own internals
            return torch.onnx.export(small.program, dynamo=True, verbose=False)
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _name_dimensions(graph: Any) -> None:
    """Name the dimensions that may vary by what they are, where torch has numbered them: batch, then sequence."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                _add_name(names, size.value, DIMENSIONS[axis] if axis < len(DIMENSIONS) else f"{value.name}_{axis}")
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    values = [*graph.inputs, *(made for node in graph for made in node.outputs)] if names else []
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                value.shape[axis] = pattern.sub(lambda found: names[found[0]], size.value)


def _name_outputs(graph: Any, names: tuple[str, ...]) -> None:
    """Give outputs the names that they have in the model; those that are taken, as by an input, end in `_output`."""
    if len(names) != len(graph.outputs):
        return
    taken = {value.name for value in (*graph.inputs, *(made for node in graph for made in node.outputs))}
    taken |= set(graph.initializers)
    for value, name in zip(graph.outputs, names, strict=True):
        free = name
        while free in taken and free != value.name:
            free += "_output"
        taken.add(free)
        value.name = free


def _add_name(names: dict[str, str], symbol: str, wanted: str) -> None:
    """Name a symbol, once; another symbol of the same name gets a number."""
    if symbol not in names:
        same = sum(name.rstrip("_0123456789") == wanted for name in names.values())
        names[symbol] = f"{wanted}_{same + 1}" if same else wanted


def _check(made: Any, small: SmallProgram, name: str) -> None:
    """Run the ONNX program on the inputs, and compare its outputs with those of the traced one."""
    import onnxruntime

    session = onnxruntime.InferenceSession(made.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    given = tensors_in((small.inputs.args, small.inputs.kwargs))
    feed = {each.name: t.cpu().numpy() for each, t in zip(session.get_inputs(), given, strict=True)}
    with torch.no_grad():
        expected = tensors_in(small.program.module()(*small.inputs.args, **small.inputs.kwargs))
    outputs = [torch.from_numpy(array) for array in session.run(None, feed)]
    gap = difference([tensor.cpu() for tensor in expected], outputs)
    if gap is not None:
        raise SparseLightningError(
            f"{name} cannot be exported as ONNX: onnxruntime computes other outputs ({gap}). Export the program by "
            'sparse_lightning.export.Compact(route="graph") instead'
        )
