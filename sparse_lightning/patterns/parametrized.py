"""Weights that a module computes from other parameters: by parametrizations, or by hooks as older functions do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils import parametrize

KEEPS_ZEROS = ["_SpectralNorm"]
"""Classes of parametrizations that only scale the weight: zeros of the original are zeros of the weight."""

_OF_HOOKS = {("_orig",): "a hook of spectral_norm or prune", ("_g", "_v"): "a hook of weight_norm"}


class Parametrized:
    """The computed weights of a model.

    Args:
        model: whose modules are searched.

    Attributes:
        names: the name of the weight, by the name of its original parameter, where pruning one prunes the other.
        computed: for each other computed weight, by name, why it cannot be pruned and what to do: the end of a message.

    Example:
        >>> from torch.nn.utils.parametrizations import spectral_norm
        >>> Parametrized(nn.Sequential(spectral_norm(nn.Linear(2, 2)))).names
        {'0.parametrizations.weight.original': '0.weight'}
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[str, str] = {}
        self.computed: dict[str, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            self._add_parametrizations(prefix, module)
            self._add_hooks(prefix, module)

    def _add_parametrizations(self, prefix: str, module: nn.Module) -> None:
        if not parametrize.is_parametrized(module):
            return
        listed = module.parametrizations
        assert isinstance(listed, nn.ModuleDict)
        for tensor, steps in listed.items():
            assert isinstance(steps, parametrize.ParametrizationList)
            name, kinds = _join(prefix, tensor), [type(step).__name__ for step in steps]
            originals = [_join(prefix, f"parametrizations.{tensor}.{each}") for each, _ in steps.named_parameters()]
            if all(kind in KEEPS_ZEROS for kind in kinds) and len(originals) == 1:
                self.names[originals[0]] = name
            else:
                remove = f"torch.nn.utils.parametrize.remove_parametrizations(module, {tensor!r})"
                self.computed[name] = _why(" and ".join(kinds), originals, remove)

    def _add_hooks(self, prefix: str, module: nn.Module) -> None:
        own = dict(module.named_parameters(recurse=False))
        for suffixes, by in _OF_HOOKS.items():
            for tensor in [name.removesuffix(suffixes[0]) for name in own if name.endswith(suffixes[0])]:
                originals = [f"{tensor}{suffix}" for suffix in suffixes]
                is_computed = tensor not in own and isinstance(getattr(module, tensor, None), Tensor)
                if is_computed and all(name in own for name in originals):
                    remove = "remove_spectral_norm, remove_weight_norm or prune.remove of torch.nn.utils"
                    self.computed[_join(prefix, tensor)] = _why(by, [_join(prefix, name) for name in originals], remove)


def _why(by: str, originals: Sequence[str], remove: str) -> str:
    return (
        f"which {by} computes from {' and '.join(originals)}: zeros of these may not be zeros of the weight. Call "
        f"{remove} before training; or name {originals[-1]} if its zeros are those of the weight"
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
