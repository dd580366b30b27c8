"""Replaced: notices that a parameter of the model is another tensor than the one that is attached."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.compat.torch import put_in_place_by_fsdp, slots
from sparse_lightning.errors import PatternError, SparseLightningError
from sparse_lightning.kernels.watch.places import PythonPlaces, places
from sparse_lightning.patterns.names import Names


class Replaced:
    """The places in a model at which attached parameters are, and the modules on the way to them.

    Each step compares all of them, a pointer for each, in one call.

    Args:
        model: holds the parameters; it is not kept alive.
        params: the attached parameters by plain name, tied ones under each of their names.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self._model, self._params = weakref.ref(model), dict(params)
        self._has_shards = any(is_sharded(param) for param in params.values())
        self._places = self._find(model)

    def _find(self, model: nn.Module) -> PythonPlaces:
        return places(slots(model, {id(param) for param in self._params.values()}))

    def check(self) -> None:
        """Raise an error if a parameter was replaced; modules may be, as by `torch.compile`."""
        if self._places.hold_same():
            return
        model = self._model()
        if model is not None:
            self._compare(model)

    def _compare(self, model: nn.Module) -> None:
        """Compare the parameters by name; where only modules were wrapped or replaced, look at the new ones."""
        names = Names(model)
        sharded = put_in_place_by_fsdp(model) if self._has_shards else {}
        now = {name: sharded.get(id(param), param) for name, param in names.parameters.items()}
        others = [name for name, param in self._params.items() if now.get(name) is not param]
        for name in others:
            if name in names.computed:
                raise PatternError(f"{name} was wrapped after the model was attached, {names.computed[name]}")
        self._follow({name: self._name_in(now, name) for name in others if name not in now})
        gone = [name for name in others if name in self._params]
        if gone:
            raise SparseLightningError(self._why(gone, now))
        if not sharded:
            self._places = self._find(model)

    def _name_in(self, now: Mapping[str, Tensor], name: str) -> str | None:
        """Return the name of an attached parameter that it has not had before; None if it has no such name."""
        param = self._params[name]
        return next((new for new, other in now.items() if other is param and new not in self._params), None)

    def _follow(self, renamed: Mapping[str, str | None]) -> None:
        """Warn that layers were wrapped: their parameters are in the model under other names."""
        found = {old: new for old, new in renamed.items() if new is not None}
        self._params = {found.get(name, name): param for name, param in self._params.items()}
        if found:
            texts = [f"{old} is {new} now" for old, new in found.items()]
            warnings.warn(
                f"{_some(texts)}: modules were wrapped or renamed after the model was attached. The masks are held, "
                "and saved under the names of before, which a resumed run does not find: wrap first, then attach",
                stacklevel=2,
            )

    def _why(self, gone: Sequence[str], now: Mapping[str, Tensor]) -> str:
        attached = [new for name in gone for new, other in now.items() if other is self._params[name]]
        where = f" (the attached one is {_some(attached)})" if attached else ""
        return (
            f"{_some(gone)} was replaced by another tensor after the model was attached{where}, as "
            "load_state_dict(assign=True), a new module, untying and modules_to_save of PEFT do: neither the optimizer "
            "nor the masks have it. Replace parameters before the optimizer is made; or call detach(), make a new "
            "optimizer, and call attach()"
        )


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
