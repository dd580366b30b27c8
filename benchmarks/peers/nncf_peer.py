"""nncf: magnitude pruning of single weights, as a hook in each forward pass."""

from __future__ import annotations

import logging
from typing import Any

import nncf
import torch
from nncf.parameters import PruneMode
from nncf.torch.function_hook.pruning.magnitude.algo import update_pruning_ratio
from peer import Peer
from torch import nn

MODE = PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL


class NNCF(Peer):
    """Unstructured only; its schedules count epochs, so that its ratio is set at our updates."""

    name = "nncf"
    package = "nncf"
    patterns = ("1×1",)

    def start(self) -> None:
        """Insert the masks."""
        nncf.set_log_level(logging.ERROR)
        self.model.to(memory_format=torch.contiguous_format)  # it cannot flatten weights in channels_last
        scope = nncf.IgnoredScope(names=[f"{name}.weight" for name in self.structure.others(self.model)])
        pruned: Any = nncf.prune(self.model, MODE, ratio=0.0, ignored_scope=scope, examples_inputs=self.example)
        self.model = pruned

    def update(self, target: float) -> None:
        """Prune to a sparsity."""
        update_pruning_ratio(self.model, MODE, target)

    def finish(self) -> nn.Module:
        """Write the zeros into the weights."""
        finished: nn.Module = nncf.strip(self.model, do_copy=False, strip_format=nncf.StripFormat.IN_PLACE)
        return finished
