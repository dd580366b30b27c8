"""tiled: a copy of a model whose linear layers skip zero tiles, wherever that is faster."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparse_lightning.compat.torch import has_hooks
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.graph.inputs import ExampleInputs, Inputs
from sparse_lightning.progress import stage, stages
from sparse_lightning.tiles.cutting import best_tile, tile_shape
from sparse_lightning.tiles.linear import TileLinear
from sparse_lightning.tiles.table import TiledLayer, TileTable
from sparse_lightning.tiles.timing import compare

DENSE = 0.95
"""The fraction of the dense weights from which on tiles are not tried, and of the dense time from which on not used."""

SHAPES = 8
"""The number of different shapes of inputs that are recorded for a layer."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""The largest difference of the outputs, relative to the largest output; 2 % for narrower dtypes."""


def tiled(model: nn.Module, inputs: Inputs = None, tile: int | tuple[int, int] | None = None) -> nn.Module:
    """Return a copy of a model in which linear layers skip the tiles of their weights that are zero.

    The model is called once to record the inputs of its layers. Each `nn.Linear` with enough zero tiles is then timed
    on them, dense and tiled, and stays dense unless tiles are faster. The copy has `tile_table`, which lists what was
    decided for each layer. It is meant for inference: gradients flow to its inputs, not to tiled weights. A zero
    weight is skipped whatever it is multiplied with, also if that is infinite or NaN.

    Args:
        model: a trained and pruned model; it is not modified.
        inputs: a tuple of positional or a dict of keyword arguments of the model; None takes the model's
            `example_input_array` or `dummy_inputs`. Their sizes should be those of the later use: tiles may be faster
            for one row and slower for many.
        tile: the outputs × inputs of a tile, or one number for both; None finds a shape for each layer.

    Raises:
        LayoutError: if the tile is not one or two whole numbers.
        SparseLightningError: if there are no inputs, or the model reads the weight of a tiled layer by itself.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        >>> with torch.no_grad():
        ...     _ = model[0].weight[:960].zero_()
        >>> small = tiled(model, (torch.randn(1, 1024),))
        >>> type(small[0]).__name__, type(small[2]).__name__, type(model[0]).__name__
        ('TileLinear', 'Linear', 'Linear')
        >>> [layer.reason for layer in small.tile_table]
        ['', 'few tiles are zero']
    """
    shape = None if tile is None else tile_shape(tile)
    copied = copy.deepcopy(model)
    device = next((tensor.device for tensor in (*copied.parameters(), *copied.buffers())), torch.device("cpu"))
    arguments = ExampleInputs.of(copied, inputs).on(device)
    seen = _record(copied, arguments)
    layers: list[TiledLayer] = []
    found: dict[nn.Module, nn.Module] = {}
    linear = [(name, module) for name, module in copied.named_modules() if type(module) is nn.Linear]
    with stages("tiled", len(linear), model):
        for name, module in linear:
            stage(f"timing {name or type(module).__name__}")
            layer, converted = _decide(name, module, _obstacle(copied, module), seen.get(module, []), shape)
            layers.append(layer)
            if converted is not None:
                found[module] = converted
    result = _replaced(copied, found)
    if found:
        _check_runs(result, arguments)
    result.tile_table = TileTable(tuple(layers))  # type: ignore[assignment]
    return result


def _record(model: nn.Module, inputs: ExampleInputs) -> dict[nn.Module, list[Tensor]]:
    """Return the inputs of each linear layer in one call of the model, one of each shape."""
    seen: dict[nn.Module, dict[object, Tensor]] = {}

    def see(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        given = args[0] if args else kwargs["input"]
        known = seen.setdefault(module, {})
        if len(known) < SHAPES:
            known.setdefault((given.shape, given.dtype), given.detach())

    linear = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in linear]
    try:
        inputs.run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return {module: list(known.values()) for module, known in seen.items()}


def _obstacle(model: nn.Module, layer: nn.Linear) -> str:
    """Return why a layer can't be replaced, whatever its weight is; an empty string if it can."""
    if type(layer.weight) is not nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__}"
    if has_hooks(layer):
        return "it has hooks"
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and layer in module.children():
            return "nn.TransformerEncoderLayer reads its weight"
        own = [parameter for _, parameter in module.named_parameters(recurse=False)]
        if module is not layer and any(parameter is layer.weight for parameter in own):
            return f"its weight is shared with {name or 'the model'}"
    return ""


def _decide(
    name: str, layer: nn.Linear, obstacle: str, inputs: Sequence[Tensor], tile: tuple[int, int] | None
) -> tuple[TiledLayer, TileLinear | None]:
    """Return what is decided for a layer, and its tiles if they take its place."""
    about = TiledLayer(name, tuple(layer.weight.shape))
    if obstacle:
        return replace(about, reason=obstacle), None
    if not inputs:
        return replace(about, reason="the model did not call it"), None
    if not layer.weight.numel():
        return replace(about, reason="it has no weights"), None
    if any(tensor.dtype != layer.weight.dtype for tensor in inputs):
        return replace(about, reason="its inputs have another dtype than its weight"), None
    found = TileLinear.of(layer, tile or best_tile(layer.weight))
    about = replace(about, tile=found.tile, kept=len(found.tiles) / (found.grid[0] * found.grid[1]))
    if found.tiles.numel() >= DENSE * layer.weight.numel():
        return replace(about, reason="few tiles are zero"), None
    with torch.no_grad():
        if not all(_same(found(tensor), layer(tensor)) for tensor in inputs):
            return replace(about, reason="tiles give other outputs for these inputs, which are not all finite"), None
        dense, sparse = compare(layer, found, inputs)
    about = replace(about, dense_seconds=dense, tiles_seconds=sparse)
    if sparse > DENSE * dense:
        return replace(about, reason="tiles are not faster"), None
    return about, found


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two outputs differ by no more than the order of sums explains."""
    if not ours.numel():
        return True
    difference = (ours - theirs).abs().max()
    return bool(difference <= TOLERANCE.get(ours.dtype, 0.02) * theirs.abs().max().clamp(min=1e-30))


def _replaced(model: nn.Module, found: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put layers in the place of others, wherever a model has them."""
    if model in found:
        return found[model]
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in found:
            model.set_submodule(name, found[module])
    return model


def _check_runs(model: nn.Module, inputs: ExampleInputs) -> None:
    try:
        inputs.run(model)
    except AttributeError as error:
        raise SparseLightningError(
            f"{type(model).__name__} can't be tiled: it reads an attribute of a linear layer that a TileLinear does "
            f"not have ({error}). Call the layer instead of reading its weight"
        ) from error
