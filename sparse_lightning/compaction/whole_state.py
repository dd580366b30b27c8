"""WholeState: state dicts of a model and its optimizers stay whole while units are removed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.compaction.kept_indices import KeptIndices
from sparse_lightning.compaction.optimizers import is_of_weights
from sparse_lightning.compaction.size_changes import own_tensors
from sparse_lightning.compat.own_hook import OwnHook


class Place(NamedTuple):
    """Where a tensor is: a parameter or buffer, or an entry of the state of one in an optimizer.

    Attributes:
        name: of the parameter or buffer.
        optimizer: the id of the optimizer; 0 for the model itself.
        key: of the entry.
    """

    name: str
    optimizer: int = 0
    key: str = ""


Widen = Callable[[str, Tensor], Tensor]
"""Returns a tensor of a model as it is in the whole model; its name is passed first."""

Take = Callable[[Place, Tensor], Tensor]
"""Returns what is left of a tensor of the whole model that is loaded."""


class WholeState:
    """Hooks by which `state_dict` returns whole tensors, and `load_state_dict` takes them.

    Checkpoints are those of the model without any removal, whoever saves them. A state dict with `keep_vars=True` has
    the parameters as they are.

    Args:
        model: from which units are removed.
        optimizers: of its parameters.
        tensors: what is cut, by name.
        kept: what is left of each.
        widen: returns a tensor as it is in the whole model.
        take: returns what is left of a tensor of the whole model that is loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        tensors: Mapping[str, Tensor],
        kept: Mapping[str, KeptIndices],
        widen: Widen,
        take: Take,
    ) -> None:
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._kept, self._widen, self._take = kept, widen, take
        self._handles: list[Any] = []
        self._keys: dict[nn.Module, dict[str, str]] = {}
        for module in model.modules():
            # By key, because a buffer may become another tensor: where it is assigned, or the model gets another dtype.
            named = {k: self._names[id(t)] for k, t in own_tensors(module).items() if id(t) in self._names}
            if named:
                self._keys[module] = named
                hooked: Any = module  # whose methods have no types
                self._handles.append(hooked.register_state_dict_post_hook(OwnHook(self._saving)))
                self._handles.append(hooked.register_load_state_dict_pre_hook(OwnHook(self._loading)))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_state_dict_post_hook(self._saving_optimizer))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._loading_optimizer))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _saving(self, module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for key, name in self._named(module, prefix).items():
            is_small = _has_shape(state.get(key), self._kept[name].small_shape)
            if is_small and not isinstance(state[key], nn.Parameter):
                state[key] = self._widen(name, state[key])

    def _loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for key, name in self._named(module, prefix).items():
            if key in state and tuple(state[key].shape) == self._kept[name].shape:
                state[key] = self._take(Place(name), state[key])

    def _named(self, module: nn.Module, prefix: str) -> dict[str, str]:
        return {f"{prefix}{key}": name for key, name in self._keys.get(module, {}).items()}

    def _saving_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        def widened(place: Place, value: Any) -> Any:
            left = self._kept[place.name]
            return left.widened(value) if is_of_weights(optimizer, place.key, value, left.small_shape) else value

        return self._changed(optimizer, state, widened)

    def _loading_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        def taken(place: Place, value: Any) -> Any:
            return self._take(place, value) if _has_shape(value, self._kept[place.name].shape) else value

        return self._changed(optimizer, state, taken)

    def _changed(
        self, optimizer: Optimizer, state: dict[str, Any], change: Callable[[Place, Any], Any]
    ) -> dict[str, Any]:
        """Return a state dict of an optimizer with each entry of parameters that are cut changed."""
        saved = [number for group in state["param_groups"] for number in group["params"]]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {n: self._names[id(p)] for n, p in zip(saved, held, strict=False) if id(p) in self._names}
        changed = dict(state["state"])
        for number, name in names.items():
            own = changed.get(number, {})
            if own:
                changed[number] = {k: change(Place(name, id(optimizer), k), value) for k, value in own.items()}
        return {**state, "state": changed}


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape
