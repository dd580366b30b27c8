"""resize: give a fresh model the tensors and sizes of a compacted one, after all of them are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sparse_lightning.compaction.compact import like
from sparse_lightning.compaction.head_attributes import HEAD_ATTRIBUTES
from sparse_lightning.compaction.size_attributes import Shapes, Sizes, size_attributes
from sparse_lightning.compaction.size_changes import own_tensors, set_sizes
from sparse_lightning.export.compact_header import CompactHeader
from sparse_lightning.export.state import first_names, tensors_of


def check_fit(model: nn.Module, header: CompactHeader, found: Mapping[str, Tensor]) -> None:
    """Check that a file belongs to a model: names, shapes, dtypes, and values of attributes.

    Raises:
        ValueError: if it does not, with the reason.
    """
    whole = _expected(model, header)
    names = first_names(whole)
    tied = {name: first for name, first in names.items() if name != first}
    if tied != header.tied:
        odd = min(set(tied.items()) ^ set(header.tied.items()))
        raise ValueError(f"{odd[0]} is tied to {odd[1]} in the file or in the model only")
    odd_names = set(names.values()) ^ set(found)
    if odd_names:
        raise ValueError(f"{min(odd_names)} is in the file or in the model only")
    unknown = set(header.shapes) - set(whole)
    if unknown:
        raise ValueError(f"it has a shape of {min(unknown)}, which is not in the model")
    for name, first in names.items():
        _check_tensor(name, whole[name], found[first], header.shapes.get(name))
    for name, sizes in header.attributes.items():
        _check_attributes(name, model.get_submodule(name), sizes)
    _check_known(model, header, {name: tuple(found[first].shape) for name, first in names.items()})


def _expected(model: nn.Module, header: CompactHeader) -> dict[str, Tensor]:
    """Return the tensors of the model that the file must have, by name."""
    whole = tensors_of(model)
    for name in header.unregistered:
        path, _, last = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), last, None)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is not a tensor of the model")
        whole[name] = tensor
    return whole


def _check_tensor(name: str, whole: Tensor, small: Tensor, before: tuple[int, ...] | None) -> None:
    expected = tuple(small.shape) if before is None else before
    if tuple(whole.shape) != expected:
        raise ValueError(f"{name} has the shape {tuple(whole.shape)} in the model, and {expected} in the file")
    if whole.dtype != small.dtype:
        raise ValueError(f"{name} is {whole.dtype} in the model, and {small.dtype} in the file")
    fits = len(expected) == small.ndim and all(0 < b <= a for a, b in zip(expected, small.shape, strict=False))
    if not fits and before is not None:
        raise ValueError(f"{name} of shape {tuple(small.shape)} is not a part of {expected}")


def _check_attributes(name: str, module: nn.Module, sizes: Sizes) -> None:
    """Check that each is a size that compaction changes, and not larger than that of the model."""
    for key, value in sizes.items():
        before = _plain(vars(module).get(key))
        olds, news = ([v] if isinstance(v, int) else v for v in (before, value))
        is_size = before is not None and not isinstance(before, bool) and type(before) is type(value)
        if not is_size or key not in SIZE_NAMES or len(olds) != len(news):
            raise ValueError(f"{key} of {name or 'the model'} is not a size that compact changes")
        if any(new > old for old, new in zip(olds, news, strict=True)):
            raise ValueError(f"{key}={value} of {name or 'the model'} is larger than {before} in the model")


def _check_known(model: nn.Module, header: CompactHeader, shapes: Shapes) -> None:
    """Check that the attributes of modules of known classes are those of the shapes of their tensors."""
    for name, module in model.named_modules():
        own = {key: shapes.get(f"{name}.{key}" if name else key) for key in own_tensors(module)}
        if any(f"{name}.{key}" in header.shapes for key in own):
            stated = header.attributes.get(name, {})
            groups = stated.get("groups", getattr(module, "groups", 1))
            known = {key: shape for key, shape in own.items() if shape is not None}
            for key, value in size_attributes(module, known, groups if isinstance(groups, int) else 1).items():
                if stated.get(key, _plain(getattr(module, key))) != value:
                    raise ValueError(f"{key} of {name} does not have the value {value} of its tensors")


def resize(model: nn.Module, header: CompactHeader, found: Mapping[str, Tensor]) -> None:
    """Put the tensors of a file in the place of those of a model, and set its size attributes, in place."""
    whole = _expected(model, header)
    made: dict[str, Tensor] = {}
    for name, first in first_names(whole).items():
        if first not in made:
            made[first] = _placed(whole[first], found[first])
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, made[first])
    for name, sizes in header.attributes.items():
        set_sizes(model.get_submodule(name), sizes)


def _placed(whole: Tensor, small: Tensor) -> Tensor:
    return like(whole, small if whole.is_meta else small.to(whole.device))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


SIZE_NAMES = HEAD_ATTRIBUTES | {
    "out_features",
    "in_features",
    "out_channels",
    "in_channels",
    "groups",
    "num_features",
    "num_channels",
    "num_groups",
    "normalized_shape",
    "num_embeddings",
    "embedding_dim",
    "num_parameters",
    "nf",
    "nx",
}
"""The attributes that a file may change."""
