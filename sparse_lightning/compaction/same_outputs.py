"""Same outputs: a smaller model is compared with the whole one before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.compaction.size_attributes import Sizes
from sparse_lightning.compaction.zero_units import KeptUnits
from sparse_lightning.compat.torch import leaves
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.graph.inputs import ExampleInputs

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}
"""The largest difference of the outputs, relative to the largest output; that of narrower dtypes is `NARROW`."""

NARROW = 0.02

Tolerances = tuple[Mapping[torch.dtype, float], float]

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError)
"""What models raise that are called with sizes that they do not expect."""


@dataclass(frozen=True)
class SizeSearch:
    """Finds the size of the whole model that a smaller copy still computes with.

    Args:
        shapes: of the parameters of the whole model, by each of their names.
        small: the smaller model.
        attributes: the size attributes that were changed.
        units: what is left of each family.
    """

    shapes: Mapping[str, Sequence[int]]
    small: nn.Module
    attributes: Mapping[str, Sizes]
    units: Mapping[str, KeptUnits]

    def culprit(self, error: BaseException | None) -> str:
        """Return the module and the attribute to name in an error: those of the innermost frame that has some."""
        names = {id(module): name for name, module in self.small.named_modules()}
        frames = [(names[id(m)], used) for m, used in _frames(error) if id(m) in names][::-1]
        for name, used in frames:
            found = [key for key in self._sizes(name) if key in used]
            if found:
                return self._shown(name, found)
        inner = next((name for name, _ in frames if self._cut_below(name)), None)
        if inner is not None:
            return self._shown(inner, [])
        every = [name for name, _ in self.small.named_modules() if self._sizes(name)]
        return f"perhaps {self._shown(every[0], self._sizes(every[0]))}" if every else ""

    def _shown(self, name: str, attributes: list[str]) -> str:
        module = self.small.get_submodule(name)
        where = f"{name or 'the model'} ({type(module).__name__})"
        if not attributes:
            return f"the code of {where} computes with a size of the whole model"
        first = attributes[0]
        return f"{where} computes with its attribute {first}={vars(module)[first]}, a size of the whole model"

    def _sizes(self, name: str) -> list[str]:
        """Return the attributes of a module that have a size of a dimension that was cut, and were not changed."""
        cut = self._cut_below(name)
        known = self.attributes.get(name, {})
        held = vars(self.small.get_submodule(name))
        return [key for key, value in held.items() if type(value) is int and value in cut and key not in known]

    def _cut_below(self, name: str) -> set[int]:
        """Return the old sizes of all dimensions of the parameters in a module that were cut."""
        below = self.small.get_submodule(name).named_parameters(name)
        pairs = [zip(self.shapes[full], parameter.shape, strict=True) for full, parameter in below]
        return {a for pair in pairs for a, b in pair if a != b}


def _frames(error: BaseException | None) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Return the module of each frame of a traceback that is one of its methods, with the names that it uses."""
    trace = None if error is None else error.__traceback__
    found = []
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            found.append((module, trace.tb_frame.f_code.co_names))
        trace = trace.tb_next
    return found


@dataclass(frozen=True)
class Change:
    """How a smaller model is not the whole one.

    Args:
        text: what computes with a size of the whole model, and what that changes.
        cause: the error that was raised, if one was.
    """

    text: str
    cause: BaseException | None


def change_of(
    expected: list[Tensor], inputs: ExampleInputs, search: SizeSearch, tolerances: Tolerances = (TOLERANCE, NARROW)
) -> Change | None:
    """Compare the outputs of a smaller model on the inputs with those of the whole one; None if they are the same.

    Args:
        expected: the outputs of the whole model, as `outputs` returns them.
        inputs: what both are called with.
        search: has the smaller model, and finds the size that it still computes with.
        tolerances: for wide dtypes, and for narrower ones.
    """
    cause: BaseException | None = None
    try:
        reason = difference(expected, outputs(search.small, inputs), tolerances)
    except FAILURES as error:
        cause, reason = error, _first_line(error)
    if reason is None:
        return None
    culprit = search.culprit(cause) or "its code tells units apart by their position or number"
    return Change(f"{culprit} ({reason})", cause)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def check_same(expected: list[Tensor], inputs: ExampleInputs, search: SizeSearch, refusal: str, advice: str) -> None:
    """Raise an error if a smaller model fails or gives other outputs than the whole one, see `change_of`.

    Args:
        expected: the outputs of the whole model.
        inputs: what both are called with.
        search: has the smaller model.
        refusal: what cannot be done then.
        advice: what to do instead.
    """
    change = change_of(expected, inputs, search)
    if change is not None:
        raise SparseLightningError(
            f"{type(search.small).__name__} {refusal}: {change.text}. {advice}"
        ) from change.cause


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a model, by each of their names."""
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def outputs(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    """Return the tensors that a model computes in eval mode, without gradients; its modes are restored."""
    devices = [d for d in {t.device for t in model.parameters()} if d.type == "cuda"]
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return tensors_in(inputs.run(model))


def outputs_of_whole(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    """Return the `outputs` that those of a smaller model are compared with.

    Raises:
        SparseLightningError: if the model does not run on the inputs; torch.export does not check all dtypes.
    """
    try:
        return outputs(model, inputs)
    except FAILURES as error:
        advice = inputs.cast_advice(model) or "Check that it runs on them in eval mode"
        name, reason = type(model).__name__, _first_line(error)
        raise SparseLightningError(f"{name} does not run on its example inputs: {reason}. {advice}") from error


def runs_on(model: nn.Module, inputs: ExampleInputs) -> bool:
    """Whether a model computes finite outputs of inputs that it was not traced with."""
    try:
        return all(bool(tensor.isfinite().all()) for tensor in outputs(model, inputs))
    except FAILURES:
        return False


def tensors_in(made: Any) -> list[Tensor]:
    """Return the tensors of nested outputs."""
    return [leaf.detach() for leaf in leaves(made) if isinstance(leaf, Tensor)]


def difference(expected: list[Tensor], made: list[Tensor], tolerances: Tolerances = (TOLERANCE, NARROW)) -> str | None:
    """Return how outputs differ by more than the order of sums explains; None if they do not."""
    if len(expected) != len(made):
        return f"{len(made)} outputs instead of {len(expected)}"
    for one, other in zip(expected, made, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"an output is {tuple(other.shape)} {other.dtype} instead of {tuple(one.shape)} {one.dtype}"
        gap = relative_error(one, other)
        if not gap <= tolerances[0].get(one.dtype, tolerances[1] if one.is_floating_point() else 0.0):
            return f"outputs differ by {gap:.1e} of the largest"
    return None


def relative_error(expected: Tensor, made: Tensor) -> float:
    """Return the largest difference relative to the largest value; elements that are equal, or both NaN, count as 0."""
    same = (expected == made) | (expected.isnan() & made.isnan())
    if bool(same.all()):
        return 0.0
    wide = torch.float64 if expected.is_floating_point() else expected.dtype
    if wide != torch.float64:
        return float("inf")
    one, other = expected[~same].to(wide), made[~same].to(wide)
    finite = expected[expected.isfinite()].to(wide)
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    gap = float((one - other).abs().max())
    return gap / scale if scale else gap
