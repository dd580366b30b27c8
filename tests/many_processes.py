"""Training in several processes, with gloo on CPUs: a program that checks one section of laws.

Run as `python many_processes.py SECTION FOLDER`. The reference, one process on the same data, is trained first; then
processes are forked, so that imports are paid once. Of the four, a layout uses as many as it needs: each layout has a
process group of its own.
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
    EVERYTHING,
    LONG,
    QUICK,
    Job,
    cases_of,
    check_cuts,
    check_lively,
    check_no_trace,
    check_same,
    group,
    whole,
)
from many_layouts import LARGE, LAYOUTS, alone, ddp, fsdp, fsdp_tp, tp
from many_messages import Messages, check_groups, check_growth, check_silence, check_update

from sparse_lightning import NM, SparseLightningError

RANKS, SAVED = 4, 4
"""How many processes there are, and after which step of a long run it is saved, between two updates."""


def all_cases():
    """Those of all layouts."""
    found = [cases_of(number) for number in range(len(LAYOUTS))]
    for cases in found:
        assert [set(column) for column in zip(*cases, strict=True)] == EVERYTHING, f"{cases} leave something out"
    return {case for cases in found for case in cases}


def references(cases, plan):
    """Jobs in one process, by case."""
    jobs = {case: Job(case, plan=plan).run() for case in cases}
    for job in jobs.values():
        check_lively(job)
    return jobs


def layouts(half, folder, wanted):
    """Every second layout, so that the two halves use the time in which the other waits."""
    start(in_layouts, RANKS, folder, wanted, range(half, len(LAYOUTS), 2))


def in_layouts(rank, folder, wanted, numbers):
    """Layouts, each with five cases: the masks of one process at every update, the hold, and no trace."""
    for number in numbers:
        name, (ranks, layout) = list(LAYOUTS.items())[number]
        if rank >= ranks:
            continue
        begin = time.perf_counter()
        with group(rank, ranks, folder, name):
            for case in cases_of(number):
                job = Job(case, layout)
                torch.manual_seed(rank)
                job.label = f"{name}, rank {rank}: {job.label}"
                check_same(job.run(), wanted[case])
            check_cuts(job)
            check_no_trace(job)
        if rank == 0:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


GROWING = (2, 1, 1)
"""Movement and RigL: each reads one sum of each block."""

KEPT = (1, 0, 0)
"""Taylor and Gradual: N:M in one pass."""

WATCHING = (3, 3, 0)
"""Wanda and Soft: norms of inputs, and multipliers."""

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
    """What travels at an update is small; and a rank with another mask is found by all at the next one."""
    with group(rank, RANKS, folder, "both"):
        check_wire(Job(GROWING, fsdp_tp, LONG, LARGE))
        check_forward(Job(WATCHING, fsdp_tp, LONG, LARGE))
    with group(rank, RANKS, folder, "wire"):
        check_wire_of_groups(Job(KEPT, fsdp, QUICK, [NM("thin.rows.weight", 2, 4)]))
        job = Job(GROWING, fsdp, LONG, LARGE)
        check_growth(job, *check_wire(job))
        spoilt = dict(job.sparsifier.masks)
        if rank == 2:
            name = "wide.weight"
            [attached] = [a for a in job.sparsifier._work.attached if a.name == name]
            attached.set_masks({name: ~spoilt[name]})
        with pytest.raises(SparseLightningError, match=r"^rank 2 holds another mask of wide\.weight than rank 0"):
            job.step(4)
    with group(rank, RANKS, folder, "postponed"):
        check_postponed(rank)


def check_forward(job):
    """A forward pass sends what it would send without the sparsifier, though inputs are watched in it."""
    job.run(0, 2)
    watched = messages_of_pass(job)
    job.sparsifier.detach()
    plain = messages_of_pass(job)
    assert watched == plain, f"{watched} messages in a forward pass, {plain} without the sparsifier"


def messages_of_pass(job):
    """How many messages a forward and a backward pass send."""
    with Messages() as messages:
        job.backward(2)
    return len(messages.sent)


def check_wire(job):
    """An update and the step after it, with all messages read; gives the last grids that travelled, and gradients."""
    job.run(0, 2)
    job.backward(2)
    gradients = {param: whole(param.grad) for param in job.net.parameters()}
    with Messages() as update:
        job.sparsifier.update()
    assert job.sparsifier.last_update.step == 2
    check_update(job, update, reductions=2)  # the movement, and the gradient
    with Messages() as silence:
        job.optimizer.step()
        job.sparsifier.before_step()
        job.optimizer.step()
    check_silence(silence)
    return update.of(torch.float32)[-1], gradients


def check_wire_of_groups(job):
    """An update of N:M, with all messages read."""
    job.run(0, 2)
    job.backward(2)
    with Messages() as update:
        job.sparsifier.update()
    assert job.sparsifier.last_update.step == 2
    assert job.sparsifier.sparsity() > 0
    check_groups(job, update)


def check_postponed(rank):
    """A rank whose scores are no numbers makes all of them wait, not only itself."""
    job = Job((0, 0, 0), ddp)
    if rank == 1:
        with torch.no_grad():
            job.net.wide.weight[0, 0] = torch.nan
    for step in range(2):
        job.backward(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.sparsifier.update()
        assert any("not finite at step 0" in str(warning.message) for warning in caught), f"rank {rank} did not wait"
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


def main(section, folder):
    """Train the references, then check a section."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # A linear layer on three dimensions gives a view; the model changes none in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if section == "agreement":
        start(agreement, RANKS, folder)
        return
    if section == "layouts":
        start(layouts, 2, folder, references(all_cases(), QUICK))
        return
    wanted = references(RESUMED, LONG)
    if section == "resumed":
        start(resumed, RANKS, folder, wanted)
        return
    begin = time.perf_counter()
    try:
        start(killed, 2, folder, wanted)
    except mp.ProcessExitedException as error:
        print(f"after {time.perf_counter() - begin:.0f} s:", error, flush=True)
    start(after_the_kill, 2, folder, wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
