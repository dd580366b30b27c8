"""Size attributes: what modules of torch and Hugging Face remember of the shapes of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

Shape = tuple[int, ...]

Shapes = Mapping[str, Shape]
"""The new shapes of the parameters and buffers of a module, by name."""

Sizes = dict[str, int | list[int]]
"""New values of attributes, by name."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS)
"""Without a weight, they have running statistics of its shape."""


def size_attributes(module: nn.Module, shapes: Shapes, groups: int = 1) -> Sizes:
    """Return the size attributes of a module of a known class for new shapes of its parameters; empty for others.

    Args:
        module: with its old shapes and attributes.
        shapes: the new shapes.
        groups: the new number of groups of a convolution.

    Example:
        >>> size_attributes(nn.Linear(8, 4), {"weight": (3, 8), "bias": (3,)})
        {'out_features': 3, 'in_features': 8}
    """
    weight = shapes.get("weight", _first(shapes) if isinstance(module, _NORMS) else None)
    if weight is None:  # computed from others, and as large as before: what is cut is a bias alone
        return {}
    for classes, sizes in _KNOWN:
        if isinstance(module, classes):
            return sizes(module, weight, groups)
    return _conv1d(weight) if is_conv1d(module) else {}


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the transposed linear layer of Hugging Face."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def _first(shapes: Shapes) -> Shape | None:
    return next((shape for shape in shapes.values() if shape), None)


def _linear(module: nn.Module, weight: Shape, groups: int) -> Sizes:
    rows, columns = weight
    return {"out_features": rows, "in_features": columns}


def _convolution(module: nn.Module, weight: Shape, groups: int) -> Sizes:
    first, second = weight[:2]
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return {"out_channels": second * groups, "in_channels": first, "groups": groups}
    return {"out_channels": first, "in_channels": second * groups, "groups": groups}


def _batch_norm(module: nn.Module, weight: Shape, groups: int) -> Sizes:
    return {"num_features": weight[0]}


def _group_norm(module: nn.Module, weight: Shape, groups: int) -> Sizes:
    assert isinstance(module, nn.GroupNorm)
    channels = weight[0]
    return {"num_channels": channels, "num_groups": module.num_groups * channels // module.num_channels}


def _layer_norm(module: nn.Module, weight: Shape, groups: int) -> Sizes:
    return {"normalized_shape": list(weight)}


def _embedding(module: nn.Module, weight: Shape, groups: int) -> Sizes:
    rows, columns = weight
    return {"num_embeddings": rows, "embedding_dim": columns}


def _prelu(module: nn.Module, weight: Shape, groups: int) -> Sizes:
    return {"num_parameters": weight[0]}


def _conv1d(weight: Shape) -> Sizes:
    inputs, outputs = weight
    return {"nf": outputs, "nx": inputs}


_KNOWN: list[tuple[tuple[type[nn.Module], ...], Callable[[nn.Module, Shape, int], Sizes]]] = [
    ((nn.Linear,), _linear),
    (_CONVOLUTIONS, _convolution),
    (_NORMS, _batch_norm),
    ((nn.GroupNorm,), _group_norm),
    ((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    ((nn.PReLU,), _prelu),
]
