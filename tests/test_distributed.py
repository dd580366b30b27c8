"""Several processes: the masks of a sharded run are those of a run in one process."""

from __future__ import annotations

import many_processes
import pytest
from devices import CUDA_ON_TWO
from forked import printed_by
from large_model import attach_to_large_model
from many_coupled import check_coupled
from many_hugging_face import check_shards
from many_layouts import LAYOUTS
from many_trainers import check_trainers

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a program in a folder of its own and returns what it printed."""
    folder = tmp_path / "work"
    folder.mkdir()
    return lambda program, *rest, **options: printed_by(program, folder, *rest, file=tmp_path / "printed", **options)


def test_masks_of_every_layout_are_those_of_one_process(run):
    """Each criterion, method, budget and kind of block in each kind of layout; see `many_layouts` and `many_jobs`."""
    printed = run(many_processes.check_layouts)
    for layout, cases in many_processes.shared_cases().items():
        assert f"{layout}: {len(cases)} cases" in printed, printed


@pytest.mark.exhaustive
def test_masks_of_every_layout_with_all_pairs_of_criterion_and_method(run):
    printed = run(many_processes.check_all_pairs_in_layouts, seconds=1200)
    for layout in LAYOUTS:
        assert f"{layout}: 25 cases" in printed, printed


def test_sparse_training_begins_with_the_same_random_mask_in_every_layout(run):
    run(many_processes.check_first_masks)


def test_resumed_in_other_layouts(run):
    run(many_processes.check_resuming)


@pytest.mark.exhaustive
def test_resumed_in_every_other_layout(run):
    run(many_processes.check_resuming_in_every_way)


def test_little_is_communicated_and_a_rank_that_disagrees_is_named(run):
    run(many_processes.check_agreement)


def test_a_killed_rank_ends_the_job_which_resumes(run):
    assert "process 1 terminated with signal SIGKILL" in run(many_processes.check_a_kill)


on_two_devices = pytest.mark.parametrize("device", ["cpu", CUDA_ON_TWO])
"""By gloo on CPUs, and by NCCL on two GPUs."""


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.exhaustive), CUDA_ON_TWO])
def test_masks_of_two_devices_are_those_of_one(run, device):
    """On CPUs, these layouts are among those of `test_masks_of_every_layout_are_those_of_one_process`."""
    printed = run(many_processes.check_layouts_of_two, device)
    for layout, (ranks, _) in LAYOUTS.items():
        assert (f"{layout}: 5 cases" in printed) == (ranks == 2), printed


@on_two_devices
def test_trainers_with_ddp_fsdp2_and_tensor_parallelism(run, device):
    run(check_trainers, device)


def test_each_process_reads_its_shards_of_a_hugging_face_model(run):
    pytest.importorskip("transformers")
    printed = run(check_shards)
    assert "(2, 1): read" in printed
    assert "(1, 2): read" in printed


def test_units_found_by_coupled_are_those_of_one_process_under_ddp_and_fsdp2(tmp_path):
    assert "the same masks: gpt" in printed_by(check_coupled, ["gpt"], file=tmp_path / "printed")


@pytest.mark.exhaustive
def test_units_found_by_coupled_in_a_vit_and_a_conv_net_are_those_of_one_process(tmp_path):
    assert "the same masks: vit, conv" in printed_by(check_coupled, ["vit", "conv"], file=tmp_path / "printed")


def test_attaching_to_a_model_of_70_billion_parameters(tmp_path):
    printed = printed_by(attach_to_large_model, file=tmp_path / "printed")
    assert "70.6 B parameters, 55,050,880 blocks" in printed
