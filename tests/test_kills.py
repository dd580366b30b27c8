"""Runs that are killed at random moments resume bit for bit, with every criterion, method and budget."""

from __future__ import annotations

import random
import signal

import pytest
from forked import FORKED
from many_kills import BUDGETS, CRITERIA, METHODS, Case, calls_of, fit, newest_whole, train_until
from pairwise import pairwise
from test_resume import differences, one_thread

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.slow,
    # A run that is resumed saves where it saved before.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # Runs this short have few updates, and blocks whose gradients are not there at the first step wait.
    pytest.mark.filterwarnings("ignore::sparse_lightning.ShortRunWarning"),
]

CASES = [
    Case(**parts)
    for parts in pairwise(
        criterion=CRITERIA, method=METHODS, budget=BUDGETS, accumulate=[1, 2], pattern=["blocks", "neurons"]
    )
]
KILLS = 100


def check_kills(case: Case, kills: int, seed: int, folder) -> None:
    """Kill a run at random calls; each resumed run must end as the whole one."""
    whole, calls = calls_of(case, folder / "whole")
    assert any((weight == 0).any() for weight in whole["weights"].values()), f"{case}: nothing was pruned"
    draw = random.Random(seed)
    for i in range(kills):
        killed, at = folder / f"killed {i}", draw.randrange(1, calls)
        run = FORKED.Process(target=train_until, args=(case, killed, at))
        run.start()
        run.join()
        assert run.exitcode == -signal.SIGKILL, f"{case} was not killed at call {at} of {calls}"
        found = newest_whole(killed)
        resumed = fit(case, killed, ckpt_path=None if found is None else str(found))
        assert not differences(whole, resumed), f"{case}, killed at call {at} of {calls}, resumed from {found}"


@pytest.mark.parametrize(
    "case",
    [
        Case("ema of wanda", "gradual", "global", accumulate=2),
        Case("sensitivity", "rigl", "erk", pattern="neurons"),
        Case("adam_fisher", "soft", "lamp"),
    ],
    ids=lambda case: f"{case.criterion}, {case.method}",
)
def test_a_run_that_is_killed_at_any_moment_resumes(case, tmp_path, one_thread):
    check_kills(case, 1, len(case.criterion), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len(CASES)))
def test_all_criteria_methods_and_budgets_resume(number, tmp_path, one_thread):
    """About a hundred kills over all pairs of parts."""
    check_kills(CASES[number], -(-KILLS // len(CASES)), number, tmp_path)
