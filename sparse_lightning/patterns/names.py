"""Names: the parameters and modules of a model by plain name, and how globs match them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from sparse_lightning.compat.plain_names import plain_name
from sparse_lightning.errors import PatternError, did_you_mean
from sparse_lightning.layout import Layout
from sparse_lightning.layout.crossing import meet, units_cross
from sparse_lightning.patterns.parametrized import Parametrized

_WILDCARD = re.compile(r"(\*+|\?|\[!?\]?[^\]]*\])")
_HIDDEN = re.compile(r"(?:^|\.)(lora_|original_module\.)")
"""What PEFT adds, and the frozen modules of which it trains a copy: names that only a glob with this text matches."""


def matches(pattern: str, name: str) -> bool:
    r"""Whether a glob, or a regular expression after `re:`, matches a whole name.

    Example:
        >>> matches("*.up.weight", "layers.0.up.weight"), matches(r"re:layers\.\d", "layers.10")
        (True, False)
    """
    return captures(pattern, name) is not None


def captures(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the text that the wildcards of a glob, or the groups of a regular expression, match; None without a match.

    Example:
        >>> captures("*.layers.?.up", "encoder.layers.3.up")
        ('encoder', '3')
    """
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else tuple(text or "" for text in found.groups())


def narrowed(glob: str, star: str) -> str:
    r"""Return a glob as a regular expression in which each `*` is another group; an expression stays as it is.

    Example:
        >>> narrowed("*.output.dense", r"(.*\.\d+)")
        're:(.*\\.\\d+)\\.output\\.dense'
    """
    if glob.startswith("re:"):
        return glob
    pieces = _WILDCARD.split(glob)
    texts = [re.escape(piece) if not i % 2 else star if "*" in piece else "(.)" for i, piece in enumerate(pieces)]
    return f"re:{''.join(texts)}"


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise PatternError(f"{pattern!r} is not a regular expression: {error}. Fix it, or use a glob") from error
    pieces = _WILDCARD.split(pattern)
    texts = (f"({_glob_part(piece)})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))
    return re.compile("".join(texts), re.DOTALL)


def _glob_part(wildcard: str) -> str:
    """Return the regular expression that fnmatch makes of one wildcard, without the anchors."""
    return translate(wildcard).removeprefix("(?s:").rpartition(")")[0]


class Names:
    """The parameters and modules of a model by plain name.

    A tied parameter is listed under each of its names. A wrapper and its inner module share a plain name, which then
    refers to the inner module. Two parameters with the same plain name keep their full names.

    Args:
        model: as it is when patterns are attached: wrapped and sharded.

    Attributes:
        parameters: by plain name.
        modules: by plain name.
        computed: weights that are computed from parameters whose zeros may not be zeros of the weight, by plain name,
            with the reason and what to do: the end of a message.

    Example:
        >>> names = Names(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
        >>> list(names.parameters)
        ['0.weight', '0.bias']
        >>> names.find("*.weight")
        {'0.weight': ('0',)}
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise PatternError(
                f"a {type(model).__name__} is not a model: pass the nn.Module itself, not its state dict or parameters"
            )
        self.model = model
        self.parameters: dict[str, nn.Parameter] = {}
        self.modules: dict[str, nn.Module] = {}
        self.passed_over: list[str] = []
        """Parameters that match a pattern and have fewer dimensions than its blocks."""
        self._claims: dict[int, list[tuple[str, Layout | None]]] = {}
        self._full: dict[str, str] = {}
        for full, module in model.named_modules(remove_duplicate=False):
            self.modules[plain_name(full)] = module
            self._full[plain_name(full)] = full
        parametrized = Parametrized(model)
        self.computed = {plain_name(name): why for name, why in parametrized.computed.items()}
        for full, parameter in model.named_parameters(remove_duplicate=False):
            plain = plain_name(parametrized.names.get(full, full))
            name = plain if self.parameters.get(plain, parameter) is parameter else full
            self.parameters[name] = parameter
            self._full[name] = full
        originals = {plain_name(original): plain_name(name) for original, name in parametrized.names.items()}
        self._plain_of = {original: name for original, name in originals.items() if name in self.parameters}
        self._name_of = {id(parameter): name for name, parameter in reversed(self.parameters.items())}

    def find(self, pattern: str) -> dict[str, tuple[str, ...]]:
        """Return the names of matching parameters, each with the text that the wildcards match."""
        self._check_not_computed(pattern)
        found = self._find(pattern, self.parameters)
        _check_can_be_divided({name: [self.parameters[name]] for name in found})
        return found

    def find_modules(self, pattern: str) -> dict[str, tuple[str, ...]]:
        """Return the names of matching modules, each with the text that the wildcards match."""
        self._check_not_computed(pattern, of_modules=True)
        found = self._find(pattern, self.modules)
        _check_can_be_divided({name: self.modules[name].parameters(recurse=False) for name in found})
        return found

    def _check_not_computed(self, pattern: str, of_modules: bool = False) -> None:
        """Raise a PatternError if a pattern matches a weight, or its module, that is computed from others."""
        for name, why in self.computed.items():
            if captures(pattern, name.removesuffix(".weight") if of_modules else name) is not None:
                raise PatternError(f"{pattern!r} matches {name}, {why}")

    def _find(self, pattern: str, known: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Match plain and full names; those that PEFT adds only if the glob contains `lora_` or `original_module.`."""
        found = {}
        for name in known:
            caught = captures(pattern, name)
            if caught is None and self._full[name] != name:
                caught = captures(pattern, self._full[name])
            hidden = _HIDDEN.search(name)
            if caught is not None and (hidden is None or hidden[1] in pattern):
                found[name] = caught
        return found

    def name_in_model(self, traced: str) -> str:
        """Return the name of the parameter that is called so in the traced model, where nothing is wrapped.

        Two parameters with the same plain name keep their full names.

        Example:
            >>> from torch.nn.utils.parametrizations import spectral_norm
            >>> Names(nn.Sequential(spectral_norm(nn.Linear(2, 2)))).name_in_model("0.parametrizations.weight.original")
            '0.weight'
        """
        if traced in self.parameters:
            return traced
        return self._plain_of.get(plain_name(traced), plain_name(traced))

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the first name of a parameter; None if it is not in the model."""
        return self._name_of.get(id(parameter))

    def claim(self, parameter: Tensor, owner: str, units: Layout | None = None) -> None:
        """Record the pattern that claims a parameter, and the layout of its units if they may cross others."""
        self._claims.setdefault(id(parameter), []).append((owner, units))

    def owner_of(self, parameter: Tensor, units: Layout | None = None) -> str | None:
        """Return the first pattern that claimed a parameter; None if it is unclaimed.

        Args:
            parameter: of the model.
            units: the layout of units of this parameter; claims that they only cross do not count.
        """
        claims = self._claims.get(id(parameter), ())
        return next((owner for owner, other in claims if not may_share(units, other)), None)


def may_share(one: Layout | None, other: Layout | None) -> bool:
    """Whether units of one parameter may be pruned apart: they share no weight, or cross as rows and columns do."""
    return one is not None and other is not None and (not meet(one, other) or units_cross(one, other))


def _check_can_be_divided(found: Mapping[str, Iterable[nn.Parameter]]) -> None:
    """Raise a PatternError if a parameter has no shape yet, or no strides."""
    for name, parameter in [(name, parameter) for name, listed in found.items() for parameter in listed]:
        if isinstance(parameter, UninitializedParameter):
            raise PatternError(
                f"{name} is lazy and has no shape yet, so it cannot be divided into blocks: run one batch through the "
                "model before training"
            )
        if parameter.layout != torch.strided:
            raise PatternError(
                f"{name} has the layout {parameter.layout}, which stores no zeros, so it cannot be divided into "
                "blocks: convert it by to_dense() before the optimizer is made, or exclude it"
            )


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the name that is closest to a glob, or a glob that matches such names.

    Example:
        >>> nearest("*.mpl.up", ["layers.0.mlp.up", "layers.1.mlp.up"])
        ": did you mean '*.mlp.up'?"
    """
    known = list(names)
    hint = did_you_mean(pattern, {glob: None for name in known for glob in _globs_for(name)})
    return hint if "did you mean" in hint else did_you_mean(pattern, known)


def _globs_for(name: str) -> list[str]:
    """Return a name and globs that match it: numbers become stars, and so do leading or trailing parts."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    n = len(parts)
    spans = [(i, j) for i in range(n) for j in range(n, i, -1)]
    return [name, *("*." * (i > 0) + ".".join(parts[i:j]) + ".*" * (j < n) for i, j in spans)]
