"""Training in several processes, with gloo on CPUs or NCCL on two GPUs: programs that each check one section of laws.

The reference, one process on the same data, is trained first; then processes are forked, so that imports are paid
once. Of the four, a layout uses as many as it needs: each layout has a process group of its own.

`python many_processes.py SECTION FOLDER` runs one by hand.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from many_jobs import (
    CONSTANT,
    EVERYTHING,
    LONG,
    QUICK,
    UNFUSED,
    Job,
    Reference,
    cases_of,
    check_cuts,
    check_lively,
    check_no_trace,
    check_same,
    group,
    whole,
)
from many_layouts import LARGE, LAYOUTS, alone, ddp, fsdp, fsdp_tp, tp
from many_messages import (
    Messages,
    check_counts,
    check_groups,
    check_growth,
    check_observation,
    check_silence,
    check_update,
)

from sparse_lightning import NM, Neurons, SparseLightningError

RANKS, SAVED = 4, 4
"""How many processes there are, and after which step of a long run it is saved, between two updates."""


def cases_of_layouts(plan):
    """Return the cases of each layout: five, or all pairs of a criterion and a method where steps are not fused."""
    found = [cases_of(number) for number in range(len(LAYOUTS))]
    for cases in found:
        assert [set(column) for column in zip(*cases, strict=True)] == EVERYTHING, f"{cases} leave something out"
    every = sorted({case for cases in found for case in cases})
    return found if plan.fused else [every] * len(LAYOUTS)


def references(cases, plan):
    """Return jobs in one process, by case."""
    jobs = {case: Job(case, plan=plan).run() for case in cases}
    for job in jobs.values():
        check_lively(job)
    return jobs


def half_of_layouts(half, folder, wanted, plan):
    """Run every second layout: each half uses the time in which the other waits."""
    start(in_layouts, RANKS, folder, wanted, plan, range(half, len(LAYOUTS), 2))


def in_layouts(rank, folder, wanted, plan, numbers):
    """Layouts, each with its cases: the masks of one process at every update, the hold, and no trace."""
    for number in numbers:
        name, (ranks, layout) = list(LAYOUTS.items())[number]
        if rank >= ranks:
            continue
        begin = time.perf_counter()
        with group(rank, ranks, folder, name, plan.device):
            cases = cases_of_layouts(plan)[number]
            for case in cases:
                job = Job(case, layout, plan)
                torch.manual_seed(rank)
                job.label = f"{name}, rank {rank}: {job.label}"
                check_same(job.run(), wanted[case])
            check_cuts(job)
            check_no_trace(job)
        if rank == 0:
            print(f"{name}: {len(cases)} cases in {time.perf_counter() - begin:.1f} s", flush=True)


def save_references(rank, file, plan, cases):
    """The jobs of one process, in a process of its own: CUDA cannot be used before a fork and after it."""
    jobs = references(cases, plan)
    torch.save({case: (job.masks, job.weights()) for case, job in jobs.items()}, file)


GROWING = (2, 1, 1)
"""Movement and RigL: each reads one sum of each block."""

KEPT = (1, 0, 0)
"""Taylor and Gradual: N:M in one pass."""

WATCHING = (3, 3, 0)
"""Wanda and Soft: norms of inputs, and multipliers."""

FROM_RANDOM = [(2, 1, 2), (0, 2, 1)]
"""Movement with RigL and ERK, and magnitude with SET and a global budget."""

RESUMED = [GROWING, WATCHING, (0, 4, 0)]
"""Cases with all that a checkpoint can hold: state and growth, norms of inputs and multipliers, strengths."""


def resumed(rank, folder, wanted):
    """From FSDP2 on 2 to 4, to DDP, to tensor parallel and to one process, and from one to 2, as if never stopped."""
    for case in RESUMED:
        tag = "".join(map(str, case))
        saved, saved_alone = f"{folder}/saved {tag}", f"{folder}/saved alone {tag}"
        if rank < 2:
            with group(rank, 2, folder, f"save {tag}"):
                state = Job(case, fsdp, LONG).run(0, SAVED).state()
                if rank == 0:
                    torch.save(state, saved)
        if rank == 2:
            torch.save(Job(case, alone, LONG).run(0, SAVED).state(), saved_alone)
        # The last ones at the same time, two and two: each needs a half of the processes.
        ways = ((saved, 0, 4, fsdp), (saved, 0, 2, ddp), (saved, 2, 2, tp), (saved_alone, 0, 2, fsdp))
        for number, (file, first, ranks, layout) in enumerate(ways):
            if first <= rank < first + ranks:
                with group(rank - first, ranks, folder, f"resume {tag} {number}"):
                    check_resumed(case, file, layout, wanted)
        if rank == 3:
            check_resumed(case, saved, alone, wanted)


def check_resumed(case, file, layout, wanted):
    """Loaded, and run to the end."""
    job = Job(case, layout, LONG).load(torch.load(file, weights_only=True)).run(SAVED)
    job.label = f"resumed by {layout.__name__}: {job.label}"
    check_same(job, wanted[case], SAVED)


def agreement(rank, folder):
    """An update communicates little, and a rank with another mask is found by all at the next update."""
    with group(rank, RANKS, folder, "both"):
        check_wire(Job(GROWING, fsdp_tp, LONG, LARGE))
        check_forward(Job(WATCHING, fsdp_tp, LONG, LARGE))
    with group(rank, RANKS, folder, "wire"):
        check_wire_of_groups(Job(KEPT, fsdp, QUICK, [NM("thin.rows.weight", 2, 4)]))
        job = Job(GROWING, fsdp, LONG, LARGE)
        check_growth(job, *check_wire(job))
        state = job.sparsifier.state_dict()
        if rank == 2:
            state["masks"]["wide.weight"]["bits"] ^= 1
        job.sparsifier.load_state_dict(state)
        with pytest.raises(SparseLightningError, match=r"^rank 2 and rank 0 hold different masks of wide\.weight: "):
            job.step(4)
    with group(rank, RANKS, folder, "postponed"):
        check_postponed(rank)


def check_forward(job):
    """A forward pass sends what it would send without the sparsifier, though it records norms of inputs."""
    job.run(0, 2)
    watched = messages_of_pass(job)
    job.sparsifier.detach()
    plain = messages_of_pass(job)
    assert watched == plain, f"{watched} messages in a forward pass, {plain} without the sparsifier"


def messages_of_pass(job):
    """Return how many messages a forward and a backward pass send."""
    with Messages() as messages:
        job.backward(2)
    return len(messages.sent)


def check_wire(job):
    """Check all messages of an update and the step after it; return the last grids that were sent, and gradients."""
    job.run(0, 2)
    check_counts(job)
    job.backward(2)
    gradients = {param: whole(param.grad) for param in job.net.parameters()}
    with Messages() as update:
        job.sparsifier.update()
    assert job.sparsifier.last_update.step == 2
    check_update(job, update, reductions=2)  # the movement, and the gradient
    with Messages() as silence:
        job.optimizer.step()
    check_silence(silence)
    with Messages() as observation:
        job.sparsifier.before_step()
    check_observation(job, observation, reductions=1)  # the movement
    with Messages() as silence:
        job.optimizer.step()
    check_silence(silence)
    return update.of(torch.float32)[-1], gradients


def check_wire_of_groups(job):
    """Check all messages of an update of N:M."""
    job.run(0, 2)
    job.backward(2)
    with Messages() as update:
        job.sparsifier.update()
    assert job.sparsifier.last_update.step == 2
    assert job.sparsifier.sparsity() > 0
    check_groups(job, update)


def check_postponed(rank):
    """If the scores of one rank are not finite, the update is postponed on all ranks."""
    job = Job((0, 0, 0), ddp)
    if rank == 1:
        with torch.no_grad():
            job.net.wide.weight[0, 0] = torch.nan
    for step in range(2):
        job.backward(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.sparsifier.update()
        messages = [str(warning.message) for warning in caught]
        assert any("not finite at step 0" in text for text in messages), f"rank {rank} did not postpone the update"
    assert job.sparsifier.last_update is None


def killed(rank, folder, wanted):
    """A run in which rank 1 is killed after a checkpoint was saved."""
    with group(rank, 2, folder, "killed"):
        job = Job(RESUMED[0], fsdp, LONG).run(0, SAVED)
        state = job.state()
        if rank == 0:
            torch.save(state, f"{folder}/last")
        dist.barrier()
        job.step(SAVED)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            job.run(SAVED + 1)
        except RuntimeError as error:
            print("rank 0 ends:", str(error).splitlines()[0], flush=True)
            time.sleep(600)  # the parent has to end it


def after_the_kill(rank, folder, wanted):
    """The job again, from its last checkpoint."""
    with group(rank, 2, folder, "again"):
        check_resumed(RESUMED[0], f"{folder}/last", fsdp, wanted)


def start(section, ranks, *arguments):
    """Run a section in forked processes; an error in one of them ends all."""
    mp.start_processes(section, arguments, ranks, start_method="fork")


def prepare():
    """Make warnings errors, as in pytest."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # A linear layer on three dimensions gives a view; the model changes none in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def check_layouts(folder, plan=QUICK):
    """Every layout has the masks of one process."""
    prepare()
    wanted = references({case for cases in cases_of_layouts(plan) for case in cases}, plan)
    start(half_of_layouts, 2, folder, wanted, plan)


def check_layouts_of_two(folder, device):
    """Every layout of two processes has the masks of one on the same kind of device."""
    prepare()
    plan = QUICK._replace(device=device)
    numbers = [number for number, (ranks, _) in enumerate(LAYOUTS.values()) if ranks == 2]
    cases = {case for number in numbers for case in cases_of_layouts(plan)[number]}
    start(save_references, 1, f"{folder}/references", plan, cases)
    saved = torch.load(f"{folder}/references", weights_only=True)
    wanted = {case: Reference(*found) for case, found in saved.items()}
    start(in_layouts, 2, folder, wanted, plan, numbers)


CROSSING = [Neurons("thin.rows", "thin.fours"), Neurons("thin.fours", "thin.sixes")]
"""Units that cross: rows of the middle layer belong to the second ones, and columns to the first."""


def crossing_job(layout=alone):
    """Train with units that cross."""
    return Job((0, 0, 0), layout, QUICK, CROSSING).run()


def sparse_from_the_start(rank, folder, wanted, crossing):
    """Random first masks, and units that cross, in FSDP2 with tensor parallelism and in DDP, as in one process."""
    for name, ranks, layout in (("fsdp_tp", 4, fsdp_tp), ("ddp", 2, ddp)):
        if rank < ranks:
            with group(rank, ranks, folder, f"first masks of {name}"):
                torch.manual_seed(rank)
                for case in FROM_RANDOM:
                    check_same(Job(case, layout, CONSTANT).run(), wanted[case])
                job = crossing_job(layout)
                check_same(job, crossing)
                assert job.sparsifier.sparsity() == crossing.sparsifier.sparsity(), "weights that are shared count once"


def check_first_masks(folder):
    """Sparse training begins with the same random mask in every layout."""
    prepare()
    start(sparse_from_the_start, RANKS, folder, references(FROM_RANDOM, CONSTANT), crossing_job())


def check_all_pairs_in_layouts(folder):
    """Every layout with each pair of a criterion and a method."""
    check_layouts(folder, UNFUSED)


def check_resuming(folder):
    """A run resumes in another layout."""
    prepare()
    start(resumed, RANKS, folder, references(RESUMED, LONG))


def check_agreement(folder):
    """Little is communicated, and ranks agree or raise an error."""
    prepare()
    start(agreement, RANKS, folder)


def check_a_kill(folder):
    """A job that loses a rank ends, and resumes from its last checkpoint."""
    prepare()
    wanted = references(RESUMED[:1], LONG)
    begin = time.perf_counter()
    try:
        start(killed, 2, folder, wanted)
    except mp.ProcessExitedException as error:
        print(f"after {time.perf_counter() - begin:.0f} s:", error, flush=True)
    start(after_the_kill, 2, folder, wanted)


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"](sys.argv[2])
