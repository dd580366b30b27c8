"""Compensating: Gram matrices of a model in training, for compensation at updates and for removal errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.compensation import Compensation, GramMatrices
from sparse_lightning.compensation.removal import DAMP, removal_errors
from sparse_lightning.compensation.weight_blocks import check_read, compensate, read_weights
from sparse_lightning.engine.masked_scope import MaskedScope


class Compensating:
    """Observes the inputs of layers that read what is pruned, shortly before each update.

    Args:
        compensation: changes kept weights at updates that prune; None for removal errors only.
        scopes: what is attached.
        model: where the layers are; forward passes without gradients are ignored.
        names: of parameters, by their id.
    """

    def __init__(
        self,
        compensation: Compensation | None,
        scopes: Sequence[MaskedScope],
        model: nn.Module,
        names: Mapping[int, str],
    ) -> None:
        self._compensation = compensation
        self._blocks = {name: block for scope in scopes for name, block in scope.live_blocks.items()}
        weights = read_weights(self._blocks.values(), model, names)
        check_read(compensation, weights, model)
        self._grams = GramMatrices(model, weights, only_training=True)

    def observe(self, is_near: bool) -> None:
        """Observe the forward passes from here on if an update is near."""
        self._grams.is_observing = is_near

    def removal_error(self, block: SparseBlock) -> Tensor:
        """Return the removal errors of a block; all ranks must call it."""
        return removal_errors(block, self._grams, DAMP)

    def before_pruning(self, masks: Mapping[str, Tensor]) -> None:
        """Change the weights that are kept by new masks, by name; all ranks must call it."""
        if self._compensation is not None:
            compensate(self._compensation, self._blocks, masks, self._grams)

    def is_finite(self) -> bool:
        """Whether the inputs that this process has observed are finite."""
        return self._grams.is_finite()

    def reset(self) -> None:
        """Start new Gram matrices after an update."""
        self._grams.reset()

    def end(self) -> None:
        """Let the next input start new Gram matrices."""
        self._grams.end()

    @property
    def is_ended(self) -> bool:
        """Whether the next input starts new Gram matrices."""
        return self._grams.is_ended

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._grams.close()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the Gram matrices since the last update; all ranks must call it."""
        return {name: total.cpu() for name, total in self._grams.totals().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        self._grams.load(state)
