"""A checkpoint that version 0.1.0 has written resumes, to the masks and weights that 0.1.0 ended with."""

from __future__ import annotations

import pytest
import torch
from saved_run import FILE, STEPS, masks, train


def test_a_checkpoint_of_the_first_version_resumes_to_the_same_masks_and_weights():
    expected = torch.load(FILE, weights_only=True)["expected"]
    assert all(mask.any() for mask in expected["masks"].values()), "the file would show nothing"
    trainer, model, ours = train(STEPS, FILE)
    assert trainer.global_step == STEPS
    found = masks(ours)
    assert set(found) == set(expected["masks"])
    for name, mask in expected["masks"].items():
        assert torch.equal(found[name], mask), f"the mask of {name} is another one than 0.1.0 ended with"
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(model.state_dict()[name], weights, rtol=1e-4, atol=1e-5)


def test_the_checkpoint_was_taken_on_the_way():
    saved, expected = (torch.load(FILE, weights_only=True)[key] for key in ("callbacks", "expected"))
    pruned = {name: entry["bits"] for state in saved.values() for name, entry in state["masks"].items()}
    assert set(pruned) == set(expected["masks"])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            torch.load(FILE, weights_only=True)["state_dict"]["up.weight"], expected["weights"]["up.weight"]
        )
