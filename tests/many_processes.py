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


def shared_cases():
    """Return the cases of each layout: five of each kind of layout, shared by the numbers of processes it runs on."""
    kinds = {}
    for name, (_, layout) in LAYOUTS.items():
        kinds.setdefault(layout, []).append(name)
    found = {}
    for number, names in enumerate(kinds.values()):
        check_everything(cases_of(number))
        found |= {name: cases_of(number)[i :: len(names)] for i, name in enumerate(names)}
    return found


def five_cases():
    """Return five cases of each layout."""
    found = {name: cases_of(number) for number, name in enumerate(LAYOUTS)}
    for cases in found.values():
        check_everything(cases)
    return found


def all_pairs():
    """Return all pairs of a criterion and a method, for each layout."""
    every = sorted({case for cases in five_cases().values() for case in cases})
    return dict.fromkeys(LAYOUTS, every)


def check_everything(cases):
    """Each criterion, each method and each budget is in one of the cases."""
    assert [set(column) for column in zip(*cases, strict=True)] == EVERYTHING, f"{cases} leave something out"


def references(cases, plan):
    """Return jobs in one process, by case."""
    jobs = {case: Job(case, plan=plan).run() for case in cases}
    for job in jobs.values():
        check_lively(job)
    return jobs


def half_of_layouts(half, folder, wanted, plan, cases):
    """Run every second layout: each half uses the time in which the other waits."""
    start(in_layouts, RANKS, folder, wanted, plan, dict(list(cases.items())[half::2]))


def in_layouts(rank, folder, wanted, plan, chosen):
    """Layouts, each with its cases: the masks of one process at every update, the hold, and no trace."""
    for name, cases in chosen.items():
        ranks, layout = LAYOUTS[name]
        if rank >= ranks:
            continue
        begin = time.perf_counter()
        with group(rank, ranks, folder, name, plan.device):
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


WAYS = {
    # from how many processes, on which of them, to which layout; two and two can run at the same time
    "from 2 to 4": (2, range(4), fsdp),
    "from 2 to DDP": (2, range(2), ddp),
    "from 2 to tensor parallel": (2, range(2, 4), tp),
    "from 1 to 2": (1, range(2), fsdp),
    "from 2 to 1": (2, range(3, 4), alone),
}
"""How a run of FSDP2, or of one process, resumes."""

EVERY_WAY = {case: list(WAYS) for case in RESUMED}
SOME_WAYS = dict(zip(RESUMED, [list(WAYS)[:1], list(WAYS)[1:3], list(WAYS)[3:]], strict=True))
"""Each way with one of the cases."""


def resumed(rank, folder, wanted, chosen):
    """From FSDP2 on 2 to 4, to DDP, to tensor parallel and to one process, and from one to 2, as if never stopped."""
    for case, names in chosen.items():
        tag = "".join(map(str, case))
        saved, ways = f"{folder}/saved {tag} by", [WAYS[name] for name in names]
        if rank < 2 and any(ranks == 2 for ranks, _, _ in ways):
            with group(rank, 2, folder, f"save {tag}"):
                state = Job(case, fsdp, LONG).run(0, SAVED).state()
                if rank == 0:
                    torch.save(state, f"{saved} 2")
        if rank == 2 and any(ranks == 1 for ranks, _, _ in ways):
            torch.save(Job(case, alone, LONG).run(0, SAVED).state(), f"{saved} 1")
        with group(rank, RANKS, folder, f"saved {tag}"):
            dist.barrier()
        for number, (before, ranks, layout) in enumerate(ways):
            if rank in ranks:
                with group(rank - ranks[0], len(ranks), folder, f"resume {tag} {number}"):
                    check_resumed(case, f"{saved} {before}", layout, wanted)


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


def check_layouts(folder):
    """Every layout has the masks of one process."""
    check_cases(folder, QUICK, shared_cases())


def check_all_pairs_in_layouts(folder):
    """Every layout with each pair of a criterion and a method."""
    check_cases(folder, UNFUSED, all_pairs())


def check_cases(folder, plan, cases):
    """Every layout has the masks of one process in its cases."""
    prepare()
    wanted = references({case for some in cases.values() for case in some}, plan)
    start(half_of_layouts, 2, folder, wanted, plan, cases)


def check_layouts_of_two(folder, device):
    """Every layout of two processes has the masks of one on the same kind of device."""
    prepare()
    plan = QUICK._replace(device=device)
    cases = {name: some for name, some in five_cases().items() if LAYOUTS[name][0] == 2}
    start(save_references, 1, f"{folder}/references", plan, {case for some in cases.values() for case in some})
    saved = torch.load(f"{folder}/references", weights_only=True)
    wanted = {case: Reference(*found) for case, found in saved.items()}
    start(in_layouts, 2, folder, wanted, plan, cases)


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


def check_resuming(folder):
    """A run resumes in other layouts."""
    prepare()
    start(resumed, RANKS, folder, references(RESUMED, LONG), SOME_WAYS)


def check_resuming_in_every_way(folder):
    """Each case resumes in each of the other layouts."""
    prepare()
    start(resumed, RANKS, folder, references(RESUMED, LONG), EVERY_WAY)


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
