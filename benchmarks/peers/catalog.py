"""The libraries that are compared, and why some cannot be."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

from peer import Peer

MODULES = {
    "ours": ("Ours", "OursMagnitude", "OursShrink", "OursMagnitudeShrink"),
    "mask_loop": ("MaskLoop",),
    "model_pruning": ("LightningModelPruning",),
    "torch_ao": ("TorchAO",),
    "torch_pruning_peer": ("TorchPruning", "TorchPruningForgetting"),
    "torchao_pat": ("Pat",),
    "modelopt_peer": ("ModelOpt",),
    "nncf_peer": ("NNCF",),
}
LEFT_OUT = {
    "neural-compressor": "version 3.10 has no pruning for torch",
    "sparseml": "deprecated by its authors, and version 1.9.0 has no code",
}
"""Other libraries, and why they are not measured."""


def peers() -> tuple[list[type[Peer]], dict[str, str]]:
    """The libraries that can be imported, dense first, and why others cannot."""
    found: list[type[Peer]] = [Peer]
    missing = {}
    for module, names in MODULES.items():
        try:
            found += [getattr(import_module(module), name) for name in names]
        except ImportError as error:
            missing[names[0]] = str(error)
    return found, missing


def versions(found: list[type[Peer]]) -> dict[str, str]:
    """The versions of their packages."""
    return {name: version(name) for name in dict.fromkeys(peer.package for peer in found)}
