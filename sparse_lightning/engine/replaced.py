"""Replaced: notices that a parameter of the model is another tensor than the one that is attached."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.compat.torch import slots
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.patterns.names import Names

PER_STEP = 256
"""How many places are compared at a step."""

_get: Callable[[dict[str, Any], str], Any] = dict.get


class Replaced:
    """The places in a model at which attached parameters are, and the modules on the way to them.

    A step compares a few hundred pointers at most, in turn where there are more. `load_state_dict(assign=True)`
    replaces all parameters and is noticed at once, a single module of a large model some steps later. Sharded
    parameters are left out: FSDP puts others in their place for each forward pass.

    Args:
        model: holds the parameters; it is not kept alive.
        params: the attached parameters, by plain name.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self._model = weakref.ref(model)
        self._params = {name: param for name, param in params.items() if not is_sharded(param)}
        self._find(model)

    def _find(self, model: nn.Module) -> None:
        self._next = 0
        found = slots(model, {id(param) for param in self._params.values()})
        self._holders: list[dict[str, Any]] = [holder for holder, _ in found]
        self._keys = [key for _, key in found]
        self._values = [holder[key] for holder, key in found]

    def check_some(self) -> None:
        """Check as many places as a step may cost, others at the next call."""
        begin, self._next = self._next, (self._next + PER_STEP) if self._next + PER_STEP < len(self._keys) else 0
        self._check(slice(begin, begin + PER_STEP))

    def check(self) -> None:
        """Raise an error if a parameter was replaced; modules may be, as by `torch.compile`."""
        self._check(slice(None))

    def _check(self, places: slice) -> None:
        now_held = map(_get, self._holders[places], self._keys[places])
        if all(map(is_, now_held, self._values[places])):
            return
        model = self._model()
        if model is None:
            return
        now = Names(model).parameters
        gone = [name for name, param in self._params.items() if now.get(name) is not param]
        if gone:
            some = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
            raise SparseLightningError(
                f"{some} was replaced by another tensor after the model was attached, as load_state_dict(assign=True) "
                "and a new module do: neither the optimizer nor the masks have it. Replace parameters before the "
                "optimizer is made; or call detach(), make a new optimizer, and call attach()"
            )
        self._find(model)
