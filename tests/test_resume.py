"""Resume: a run that is killed and resumed ends bit for bit as the run that was not killed."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest
import torch
from forked import FORKED
from resumable import CASES, SAVE_EVERY, STEPS, train, train_until
from small_nets import LAYERS

KILLS = {"movement": (4, 10, 20), "soft": (9, 17)}
"""Before which steps runs are killed; others are once."""

# A run that is resumed saves where it saved before.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def last_checkpoint(folder: Path) -> Path:
    """The one of the latest step."""
    return max(folder.glob("saved/step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))


def logged(folder: Path) -> dict[int, dict[str, str]]:
    """What was logged of sparsity, by step, over all versions of the log."""
    rows = {}
    for path in sorted(folder.glob("logs/version_*/metrics.csv")):
        for row in csv.DictReader(path.read_text().splitlines()):
            found = {k: v for k, v in row.items() if k.startswith("sparsity/") and v}
            if found:
                rows[int(row["step"])] = found
    return rows


def flat(value, place=""):
    """All leaves of a nested state, with where they are."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{place}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from flat(inner, f"{place}/{i}")
    else:
        yield place, value


def differences(one, other) -> list[str]:
    """The places at which two states are not bit for bit the same."""
    one, other = dict(flat(one)), dict(flat(other))
    found = sorted(set(one) ^ set(other))
    for place in set(one) & set(other):
        a, b = one[place], other[place]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        found += [] if same else [place]
    return found


def end_of(trainer, net, ours) -> dict:
    """All that a run leaves behind."""
    return {
        "weights": dict(net.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "callbacks": [callback.state_dict() for callback in ours],
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed(case, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = end_of(*train(case, tmp_path / "whole"))
        for die_at in KILLS.get(case, (13,)):
            folder = tmp_path / f"killed at {die_at}"
            run = FORKED.Process(target=train_until, args=(case, folder, die_at))
            run.start()
            run.join()
            assert run.exitcode == -signal.SIGKILL
            ckpt = last_checkpoint(folder)
            assert ckpt.stem == f"step={die_at // SAVE_EVERY * SAVE_EVERY}"
            resumed = end_of(*train(case, folder, ckpt_path=str(ckpt)))
            assert not differences(whole, resumed)
            assert logged(folder) == logged(tmp_path / "whole"), "sparsity was logged otherwise"
    finally:
        torch.set_num_threads(threads)
    assert all(callback["step"] == STEPS for callback in whole["callbacks"])
    assert any((weight == 0).any() for weight in whole["weights"].values()), "nothing was pruned"


def test_the_masks_of_a_run_are_in_its_checkpoint(tmp_path):
    _, _, [callback] = train("rigl", tmp_path)
    saved = torch.load(last_checkpoint(tmp_path), weights_only=True)
    state = saved["callbacks"][callback.state_key]
    assert set(state["masks"]) == set(LAYERS)
    assert not differences(state, callback.state_dict())
