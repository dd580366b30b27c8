"""check_pruned: whether pruned units could as well be removed, tried out on a copy of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.claims import resolve
from sparse_lightning.patterns.given import Patterns
from sparse_lightning.patterns.pattern import Attachment


def check_pruned(
    model: nn.Module, inputs: Any, patterns: Patterns, *, tolerance: float = 1e-2, seed: int = 0
) -> dict[str, float]:
    """Check that a pruned unit (neuron, head, channel) contributes nothing, and that no other unit loses weights.

    In a copy of the model with random weights, every second unit is pruned in all of its parameters. The output must be
    the same as if only the weights that read these units were zero: it changes if a pattern takes rows of other heads,
    for example, or if a norm mixes channels.

    Args:
        model: the model; it is not changed. The copy is in evaluation mode.
        inputs: of its `forward`: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        patterns: as for `Sparsifier`. Patterns without coupled units are passed over.
        tolerance: the largest difference, relative to the change of the output when the units are removed.
        seed: of the random weights.

    Returns:
        The difference for each scope, by name.

    Raises:
        PatternError: if a difference is larger than the tolerance, if removed units do not change the output, or if
            no pattern has coupled units.

    Example:
        >>> from sparse_lightning import Neurons
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> list(check_pruned(mlp, torch.ones(2, 4), [Neurons("0", "2")]))
        ['0 (neurons)']
    """
    copy = deepcopy(model)
    found = [each for each in resolve(patterns, copy) if any(block.readers() for block in each.scope.blocks())]
    if not found:
        raise PatternError(f"{patterns} couple no layers, so that there is nothing to check: remove this call")
    trial = _Trial(copy.eval(), inputs, seed)
    differences = {each.name: trial.difference(each) for each in found}
    wrong = {name: value for name, value in differences.items() if not value <= tolerance}
    if wrong:
        raise PatternError(
            f"{', '.join(wrong)}: pruned units change what the other units compute, by {max(wrong.values()):.2g} of "
            "what the pruned ones contribute. The pattern takes weights of other units, or something mixes the units: "
            "check the names of the layers, head_dim, and for a fused projection the order of its rows"
        )
    return differences


class _Trial:
    """A copy of a model with inputs.

    Args:
        model: the copy; its coupled weights are replaced.
        inputs: of its `forward`.
        seed: of the weights, and of what is random in the model.
    """

    def __init__(self, model: nn.Module, inputs: Any, seed: int) -> None:
        self._model, self._inputs, self._seed = model, inputs, seed

    @torch.no_grad()
    def difference(self, attachment: Attachment) -> float:
        """Return how much the output changes, relative to what the pruned units contribute."""
        params = {id(p): p for block in attachment.scope.blocks() for p in block.unique_params()}.values()
        self._randomize(params)
        whole = self._outputs()
        for block in attachment.scope.blocks():
            for spec in block.readers():
                spec.apply_mask(block.grid_of(spec, _every_second(block)))
        removed = self._outputs()
        for block in attachment.scope.blocks():
            block.apply_mask(_every_second(block))
        effect = _distance(removed, whole)
        if effect == 0:
            raise PatternError(
                f"{attachment.name}: the output is the same with half of the units removed, so that nothing can be "
                "checked: pass inputs that use these layers"
            )
        return _distance(removed, self._outputs()) / effect

    def _randomize(self, params: Any) -> None:
        """Draw weights at a scale that lets every unit contribute, since trained or initial ones may be zero."""
        generator = torch.Generator().manual_seed(self._seed)
        for param in params:
            std = param.shape[-1] ** -0.5 if param.ndim > 1 else 0.5
            param.copy_(torch.randn(param.shape, generator=generator) * std)

    def _outputs(self) -> list[Tensor]:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self._seed)
            if isinstance(self._inputs, Mapping):
                made = self._model(**self._inputs)
            elif isinstance(self._inputs, Sequence):
                made = self._model(*self._inputs)
            else:
                made = self._model(self._inputs)
        return [tensor.double() for tensor in _tensors(made)]


def _every_second(block: SparseBlock) -> Tensor:
    """Return a mask of every second unit: the first of each two, so that of two units one is left."""
    device = block.unique_params()[0].device
    return (torch.arange(block.numblk(), device=device) % 2 == 0).reshape(block.grid_shape)


def _tensors(made: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of an output: a tensor, or tensors in tuples, lists and mappings."""
    if isinstance(made, Tensor):
        if made.is_floating_point():
            yield made
    elif isinstance(made, Mapping):
        for each in made.values():
            yield from _tensors(each)
    elif isinstance(made, (tuple, list)):
        for each in made:
            yield from _tensors(each)


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest absolute difference of two outputs."""
    pairs = zip(some, others, strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
