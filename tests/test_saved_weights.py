"""Weights of checkpoints, in one file or in shards, are loaded into a whole model without a Trainer."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as in_shards

from sparse_lightning.app.saved_weights import load_weights
from sparse_lightning.errors import CheckpointError


class Net(L.LightningModule):
    """With a tied parameter, a buffer, and on request no memory before `configure_model`."""

    def __init__(self, seed, is_late=False, extra=False):
        super().__init__()
        torch.manual_seed(seed)
        with torch.device("meta" if is_late else "cpu"):
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.extra = nn.Linear(4, 4) if extra else None

    def configure_model(self):
        if self.first.weight.is_meta:
            self.to_empty(device="cpu")
            self.last.weight = self.first.weight


@pytest.fixture(params=["file", "shards"])
def saved(request, tmp_path):
    """A checkpoint as Lightning writes it, and its weights."""
    weights = Net(0).state_dict()
    path = tmp_path / "last.ckpt"
    if request.param == "file":
        torch.save({"state_dict": weights, "epoch": 3}, path)
    else:
        state = {"state_dict": weights, "optimizer_0": {"state.first.weight.exp_avg": torch.ones(4, 4)}}
        with pytest.warns(UserWarning, match=r"torch.distributed is .*"):
            in_shards.save(state, checkpoint_id=path)
    return path, weights


@pytest.mark.parametrize("is_late", [False, True])
def test_all_weights_are_those_of_the_checkpoint(saved, is_late):
    path, weights = saved
    model = Net(1, is_late)
    load_weights(model, path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert model.last.weight is model.first.weight


def test_a_checkpoint_of_another_model_is_refused(saved):
    with pytest.raises((CheckpointError, RuntimeError), match=r"extra\.(bias|weight)"):
        load_weights(Net(1, extra=True), saved[0])
