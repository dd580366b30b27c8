"""Several processes: the masks of a sharded run are those of a run in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from many_layouts import LAYOUTS

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def run(program, *arguments, seconds=240):
    """What a program prints; a program that fails, or does not end, fails the test with all that it printed."""
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # In a session of its own: its processes can be ended with it.
    with subprocess.Popen(command, **streams, text=True, start_new_session=True) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{program} did not end in {seconds} s:\n{process.communicate()[0]}")
    assert process.returncode == 0, printed
    return printed


def test_masks_of_every_layout_are_those_of_one_process(tmp_path):
    """Each criterion, method, budget and kind of block in each layout; see `many_layouts` and `many_jobs`."""
    printed = run("many_processes.py", "layouts", tmp_path)
    for layout in LAYOUTS:
        assert f"{layout}: " in printed, printed


def test_resumed_in_other_layouts(tmp_path):
    run("many_processes.py", "resumed", tmp_path)


def test_little_travels_and_a_rank_that_disagrees_is_named(tmp_path):
    run("many_processes.py", "agreement", tmp_path)


def test_a_killed_rank_ends_the_job_which_resumes(tmp_path):
    assert "process 1 terminated with signal SIGKILL" in run("many_processes.py", "killed", tmp_path)


def test_trainers_with_ddp_fsdp2_and_tensor_parallelism(tmp_path):
    run("many_trainers.py", tmp_path)


def test_attaching_to_a_model_of_70_billion_parameters():
    print(run("large_model.py"))
