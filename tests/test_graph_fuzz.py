"""Couplings of random models: no family that fails the proof."""

from __future__ import annotations

import pytest
from graph_fuzz import RandomModel
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples

from sparse_lightning.graph import couplings
from sparse_lightning.graph.proof import TOLERANCE, Proof


def check(seed: int) -> int:
    """Prove each family by itself and all together; return how many there are."""
    model = RandomModel(seed)
    found = couplings(model, model.inputs)
    proof = Proof(found.analysis, found.solution, seed)
    several = [family for family in found if family.units > 1]
    tries = [[(family, list(range(seed % 2, family.units, 2)))] for family in several]
    for removed in [*tries, [(family, [family.units - 1]) for family in several]]:
        error = proof.error(removed) if removed else 0.0
        assert error <= TOLERANCE, f"seed {seed}, {[family.name for family, _ in removed]}: {error}\n{found}"
    return len(found)


@settings(max_examples=examples(4), deadline=None)
@given(st.integers(0, 2**31))
def test_zeroing_and_removing_the_units_of_random_models_agree(seed):
    check(seed)


@pytest.mark.exhaustive
def test_zeroing_and_removing_the_units_of_a_thousand_random_models_agree():
    counts = [check(seed) for seed in range(1000)]
    assert sum(count > 0 for count in counts) > 500, "most random models have units that can be removed"
