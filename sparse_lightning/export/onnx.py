"""ONNX: the model without its zero units, as an ONNX file."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparse_lightning.compaction.program import SmallProgram, compact_program
from sparse_lightning.compaction.same_outputs import difference, tensors_in
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.export.state import check_whole, writes
from sparse_lightning.graph.inputs import Inputs


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
            small = compact_program(model, self.inputs)
            made = _converted(small)
            _check(made, small, type(model).__name__)
            path.parent.mkdir(parents=True, exist_ok=True)
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
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice of torch.onnx on its own internals
            return torch.onnx.export(small.program, dynamo=True, verbose=False)
    finally:
        logger.setLevel(before)


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
