"""Names: the parameters and modules of a model by plain name, and how patterns of names match them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import lru_cache

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparse_lightning.errors import PatternError
from sparse_lightning.nearest import did_you_mean

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))"
    r"(?:_orig_mod|base_layer|base_model\.model|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module)"
    r"(?:\.|$)"
)
_WILDCARD = re.compile(r"(\*+|\?|\[!?\]?[^\]]*\])")
_ADAPTER = re.compile(r"(?:^|\.)lora_")


def plain_name(name: str) -> str:
    """A name without the parts that torch.compile, PEFT, checkpointing, FSDP and Fabric put into it.

    Example:
        >>> plain_name("_orig_mod.layers.0.up.base_layer.weight")
        'layers.0.up.weight'
    """
    shorter = _WRAPPERS.sub("", name).rstrip(".")
    return shorter if shorter == name else plain_name(shorter)


def matches(pattern: str, name: str) -> bool:
    r"""Whether a glob, or a regular expression after `re:`, matches a whole name.

    Example:
        >>> matches("*.up.weight", "layers.0.up.weight"), matches(r"re:layers\.\d", "layers.10")
        (True, False)
    """
    return captures(pattern, name) is not None


def captures(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the wildcards of a glob, or the groups of a regular expression, stand for in a name; None: no match.

    Example:
        >>> captures("*.layers.?.up", "encoder.layers.3.up")
        ('encoder', '3')
    """
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else tuple(text or "" for text in found.groups())


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise PatternError(f"{pattern!r} is not a regular expression: {error}. Mend it, or use a glob") from error
    pieces = _WILDCARD.split(pattern)
    texts = (f"({_glob_part(piece)})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))
    return re.compile("".join(texts), re.DOTALL)


def _glob_part(wildcard: str) -> str:
    """One wildcard as fnmatch has it, without the anchors around."""
    return translate(wildcard).removeprefix("(?s:").rpartition(")")[0]


class Names:
    """The parameters and modules of a model by plain name.

    A tied parameter stands under each of its names. Of a wrapper and the module inside, which share a plain
    name, the inner one counts. Two parameters whose plain names are the same keep their full names.

    Args:
        model: the model, as it is when patterns are attached: wrapped and sharded.

    Example:
        >>> names = Names(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
        >>> list(names.parameters)
        ['0.weight', '0.bias']
        >>> names.find("*.weight")
        {'0.weight': ('0',)}
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters: dict[str, nn.Parameter] = {}
        self.modules: dict[str, nn.Module] = {}
        self.owners: dict[int, str] = {}
        self._full: dict[str, str] = {}
        for full, module in model.named_modules(remove_duplicate=False):
            self.modules[plain_name(full)] = module
            self._full[plain_name(full)] = full
        for full, parameter in model.named_parameters(remove_duplicate=False):
            plain = plain_name(full)
            name = plain if self.parameters.get(plain, parameter) is parameter else full
            self.parameters[name] = parameter
            self._full[name] = full
        self._name_of = {id(parameter): name for name, parameter in reversed(self.parameters.items())}

    def find(self, pattern: str) -> dict[str, tuple[str, ...]]:
        """The names of parameters that match, with what the wildcards captured."""
        found = self._find(pattern, self.parameters)
        _refuse_lazy({name: [self.parameters[name]] for name in found})
        return found

    def find_modules(self, pattern: str) -> dict[str, tuple[str, ...]]:
        """The names of modules that match, with what the wildcards captured."""
        found = self._find(pattern, self.modules)
        _refuse_lazy({name: self.modules[name].parameters(recurse=False) for name in found})
        return found

    def _find(self, pattern: str, known: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Full names match too; LoRA's own parameters only where a pattern names them, as none did before LoRA."""
        found = {}
        for name in known:
            caught = captures(pattern, name)
            if caught is None and self._full[name] != name:
                caught = captures(pattern, self._full[name])
            if caught is not None and ("lora_" in pattern or not _ADAPTER.search(name)):
                found[name] = caught
        return found

    def name_of(self, parameter: Tensor) -> str | None:
        """The first name of a parameter, None if the model does not have it."""
        return self._name_of.get(id(parameter))

    def claim(self, parameter: Tensor, owner: str) -> None:
        """Note the pattern that took a parameter; the first one stays."""
        self.owners.setdefault(id(parameter), owner)

    def owner_of(self, parameter: Tensor) -> str | None:
        """The pattern that took a parameter."""
        return self.owners.get(id(parameter))


def _refuse_lazy(found: Mapping[str, Iterable[nn.Parameter]]) -> None:
    """Raise where a parameter of what was found has no shape yet."""
    for name, parameters in found.items():
        if any(is_lazy(parameter) for parameter in parameters):
            raise PatternError(
                f"{name} is lazy and has no shape yet, so there is nothing to cut into blocks: run a batch through "
                "the model before it is trained"
            )


def nearest(pattern: str, names: Iterable[str]) -> str:
    """The end of an error message: the name nearest to a pattern, or the glob that would match such names.

    Example:
        >>> nearest("*.mpl.up", ["layers.0.mlp.up", "layers.1.mlp.up"])
        ": did you mean '*.mlp.up'?"
    """
    known = list(names)
    hint = did_you_mean(pattern, {glob: None for name in known for glob in _globs_for(name)})
    return hint if "did you mean" in hint else did_you_mean(pattern, known)


def _globs_for(name: str) -> list[str]:
    """A name, and the globs for it and its like: numbers as stars, and what leads or trails as one star."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    n = len(parts)
    spans = [(i, j) for i in range(n) for j in range(n, i, -1)]
    return [name, *("*." * (i > 0) + ".".join(parts[i:j]) + ".*" * (j < n) for i, j in spans)]
