"""Exactness: every update prunes exactly as many blocks as schedule and budget require."""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import parametrize
from small_nets import LAYERS, Net, batches
from torch import nn

from sparse_lightning import (
    ERK,
    LAMP,
    NM,
    SET,
    Blocks,
    Constant,
    Cosine,
    Cubic,
    Cyclic,
    Exponential,
    Global,
    Gradual,
    Join,
    Linear,
    Magnitude,
    Proximal,
    Random,
    RigL,
    Soft,
    Sparsifier,
    SparsityError,
    Steps,
    Uniform,
    methods,
    schedules,
)

STEPS = 12
UP, DOWN = 32, 16
"""Blocks of 4×4 in the two layers of `Net`."""

SCHEDULES = [
    Constant(0.6),
    schedules.OneShot(0.7, at=3),
    Linear(0.8, end=9),
    Cubic(0.9, begin=1, end=8, initial=0.2),
    Cosine(0.75),
    Exponential(0.75, end=7),
    Steps([(2, 0.3), (5, 0.55), (8, 0.99)]),
    Cyclic(low=0.2, high=0.8, period=5),
    Join([Linear(0.4, end=3), Linear(1.0, end=6, initial=0.4)], [4]),
]
BUDGETS = [Uniform(), ERK(), Global(), LAMP(), Global(min_density=0.25), Uniform(overrides={"up.*": 0.5})]
METHODS = [Gradual(), methods.PruneOnce(), RigL(drop_fraction=0.4), SET(drop_fraction=0.3), Soft(updates=3), Proximal()]
PRUNED_STAYS = (Gradual, Soft, Proximal)


def floor(x: float) -> int:
    """Round down as the package does."""
    return math.floor(x + 1e-9)


def required(budget, target: float, final: float) -> tuple[int, int] | int:
    """Return the blocks to prune: in each layer where scores don't matter, otherwise in all."""
    if isinstance(budget, Global):
        kept = [max(1, math.ceil(budget.min_density * n - 1e-9)) for n in (UP, DOWN)]
        return min(floor(target * (UP + DOWN)), UP + DOWN - sum(kept))
    if isinstance(budget, ERK):
        return erdos_renyi_kernel(target)
    own = budget.overrides.get("up.*", final)
    return floor(own * target / final * UP) if final else 0, floor(target * DOWN)


def erdos_renyi_kernel(target: float) -> tuple[int, int]:
    """Densities proportional to (rows + columns)/(rows·columns), none above 1, that keep 1 − target of all weights."""
    shapes, weights = [(32, 16), (8, 32)], [512, 256]
    raw = [(r + c) / (r * c) for r, c in shapes]
    budget = (1 - target) * sum(weights)
    dense: set[int] = set()
    while True:
        free = [i for i in range(2) if i not in dense]
        left = budget - sum(weights[i] for i in dense)
        scale = left / sum(raw[i] * weights[i] for i in free) if free else 0.0
        over = [i for i in free if raw[i] * scale > 1]
        if not over:
            break
        dense.add(max(over, key=lambda i: raw[i]))
    density = [1.0 if i in dense else raw[i] * scale for i in range(2)]
    return floor((1 - density[0]) * UP), floor((1 - density[1]) * DOWN)


def rises_after_the_first_update(plan) -> bool:
    targets = [plan(step) for step in range(STEPS) if plan.is_update(step, 2) and plan(step) > 0]
    return bool(targets) and max(targets) > targets[0]


def label(part) -> str:
    """Return the name of a budget with its arguments, and of others without."""
    return str(part) if isinstance(part, Uniform | Global | ERK) else type(part).__name__


@parametrize(ids=label, schedule=SCHEDULES, budget=BUDGETS, method=METHODS)
def test_counts(schedule, budget, method):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], schedule, method=method, budget=budget, update_every=2)
    plan = schedule.resolve(STEPS)
    if isinstance(method, methods.PruneOnce) and rises_after_the_first_update(plan):
        text = rf"PruneOnce .*{type(plan).__name__} alone.*would never reach.*OneShot\({plan.final:.4g}\)"
        with pytest.raises(SparsityError, match=text):
            sparsifier.attach(model, optimizer, total_steps=STEPS)
        return
    sparsifier.attach(model, optimizer, total_steps=STEPS)
    highest, shot, updates = 0.0, None, 0
    x, y = next(iter(batches()))
    for step in range(STEPS):
        nn.functional.mse_loss(model(x), y).backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()
        if not plan.is_update(step, 2):
            continue
        updates += 1
        target = plan(step)
        highest = max(highest, target)
        if shot is None and target > 0:
            shot = target
        if isinstance(method, methods.PruneOnce):
            target = shot or 0.0
        elif isinstance(method, PRUNED_STAYS):
            target = highest
        pruned = [int(sparsifier.masks[name].sum()) for name in LAYERS]
        wanted = required(budget, target, plan.final)
        assert (sum(pruned) if isinstance(wanted, int) else tuple(pruned)) == wanted, f"step {step}, target {target}"
        if isinstance(budget, Global):
            kept = [max(1, math.ceil(budget.min_density * n - 1e-9)) for n in (UP, DOWN)]
            assert all(n - p >= k for n, p, k in zip((UP, DOWN), pruned, kept, strict=True)), "a floor was broken"
        zero = [int((w.detach().unfold(0, 4, 4).unfold(1, 4, 4) == 0).all(-1).all(-1).sum()) for w in weights(model)]
        # A block may be zero without being pruned where it has just grown, or where a proximal step has left it.
        assert all(z >= p for z, p in zip(zero, pruned, strict=True))
    assert updates
    assert sparsifier.last_update.target == plan(sparsifier.last_update.step)


def weights(model):
    """The two weights of `Net`."""
    return model.up.weight, model.down.weight


def train(sparsifier, model, optimizer, steps, seen):
    """Make some steps, and call `seen()` after each."""
    x, y = next(iter(batches()))
    for _ in range(steps):
        nn.functional.mse_loss(model(x), y).backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()
        seen()


@pytest.mark.parametrize("final", [0.5, 0.9])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
def test_n_m_anneals_by_whole_numbers(n, m, final):
    """Whatever the schedule ends with, N:M ends with N of M; on the way each group has the same count."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = Sparsifier([NM("up.weight", n, m)], Linear(final, end=20), update_every=1)
    sparsifier.attach(model, optimizer)
    kept = []

    def look():
        groups = (model.up.weight.detach() != 0).view(-1, m).sum(-1).unique()
        assert len(groups) == 1, "groups differ"
        kept.append(int(groups))

    train(sparsifier, model, optimizer, 25, look)
    assert kept == sorted(kept, reverse=True)
    assert set(kept) == set(range(n, m + 1))
    expected = [m - floor((m - n) * min(1, step / 20)) for step in range(25)]
    assert kept == expected


@pytest.mark.parametrize("method", [SET(drop_fraction=0.3), RigL(drop_fraction=0.5)], ids=lambda m: type(m).__name__)
def test_drop_and_growth_counts(method):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5, end=1.0), method=method, update_every=1)
    sparsifier.attach(model, optimizer, total_steps=STEPS)
    masks = []
    train(sparsifier, model, optimizer, STEPS, lambda: masks.append(sparsifier.masks))
    for step in range(1, STEPS):
        share = 0.3 if type(method) is SET else 0.5 * (1 + math.cos(math.pi * step / (STEPS - 1))) / 2
        for name, n in zip(LAYERS, (UP, DOWN), strict=True):
            before, after = masks[step - 1][name], masks[step][name]
            wanted = floor(share * n / 2)
            assert int((~before & after).sum()) == wanted, f"{name}: dropped at step {step}"
            assert int((before & ~after).sum()) == wanted, f"{name}: grown at step {step}"


def test_rigl_drops_the_smallest_and_grows_by_the_dense_gradient():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = Sparsifier([Blocks("up.weight", (4, 4))], Constant(0.5), Magnitude(), RigL(0.5), update_every=1)
    sparsifier.attach(model, optimizer, total_steps=100)
    x, y = next(iter(batches()))
    train(sparsifier, model, optimizer, 1, lambda: None)
    before = sparsifier.masks["up.weight"].flatten()
    nn.functional.mse_loss(model(x), y).backward()
    size = blocks_of(model.up.weight).norm(dim=-1)
    pull = blocks_of(model.up.weight.grad).norm(dim=-1)
    sparsifier.before_step()
    after = sparsifier.masks["up.weight"].flatten()
    dropped, grown = ~before & after, before & ~after
    assert dropped.any()
    assert size[dropped].max() <= size[~before & ~after].min()
    assert pull[grown].min() >= pull[before & after].max()


def blocks_of(t):
    """`(blocks, 16)`."""
    return t.detach().unfold(0, 4, 4).unfold(1, 4, 4).reshape(-1, 16)


def test_lamp_by_its_formula():
    """Score² over the sum of all scores² that are not smaller, in each layer; then the lowest of all are pruned."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.6), criterion=Magnitude(2), budget=LAMP())
    sparsifier.attach(model, optimizer, total_steps=10)
    scores = []
    for weight in weights(model):
        squares = blocks_of(weight).square().sum(-1).tolist()
        scores += [s / sum(t for t in squares if t >= s) for s in squares]
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    wanted = set(order[: floor(0.6 * len(scores))])
    sparsifier.before_step()
    pruned = torch.cat([sparsifier.masks[name].flatten() for name in LAYERS]).nonzero().flatten().tolist()
    assert set(pruned) == wanted


@pytest.mark.parametrize("updates", [2, 4])
def test_soft_shrinks_step_by_step_to_the_scheduled_zero(updates):
    """A block that is pruned at update u had j/updates of its weights left j updates before."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    start = blocks_of(model.up.weight).clone()
    sparsifier = Sparsifier(
        [Blocks("up.weight", (4, 4))], Linear(0.75, end=12), method=Soft(updates), update_every=2, criterion=Magnitude()
    )
    sparsifier.attach(model, optimizer)
    left = []
    train(sparsifier, model, optimizer, 14, lambda: left.append(blocks_of(model.up.weight)[:, 0] / start[:, 0]))
    at_updates = torch.stack(left[0:13:2])
    for block in range(UP):
        course = at_updates[:, block].tolist()
        if course[-1] == 0:
            gone = course.index(0)
            wanted = [min(1.0, (gone - u) / updates) for u in range(gone)]
            assert course[:gone] == pytest.approx(wanted, abs=1e-6)
        else:
            assert course == pytest.approx([1.0] * 7, abs=1e-6)
    assert int((at_updates[-1] == 0).sum()) == 24


def test_proximal_brings_blocks_to_zero_before_they_are_pruned():
    """Without gradients, those to be pruned next arrive at zero by the shrinking alone; others stay as they are."""
    model = Net()
    before = blocks_of(model.up.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier([Blocks("up.weight", (4, 4))], Linear(0.5, end=20), Magnitude(), Proximal(), update_every=5)
    sparsifier.attach(model, optimizer)
    zero, pruned = [], []

    def look():
        zero.append(int((blocks_of(model.up.weight) == 0).all(-1).sum()))
        pruned.append(int(sparsifier.masks["up.weight"].sum()))

    train(sparsifier, model, optimizer, 25, look)
    for update in (5, 10, 15, 20):
        assert zero[update - 1] == pruned[update], "the strength did not reach the target"
    assert pruned[-1] == 16
    kept = ~sparsifier.masks["up.weight"].flatten()
    assert torch.equal(blocks_of(model.up.weight)[kept], before[kept]), "blocks that stay were shrunk"


def test_random_scores_prune_the_same_in_every_run():
    masks = []
    for _ in range(2):
        model = Net()
        sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5), criterion=Random(), seed=3)
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=10)
        sparsifier.before_step()
        masks.append(sparsifier.masks)
        torch.rand(7)
    for name in LAYERS:
        assert masks[0][name].any(), "nothing was pruned"
        assert torch.equal(masks[0][name], masks[1][name])


class Scored(Magnitude):
    """A magnitude that declares no factor: N:M groups are scored weight by weight."""

    factor = None


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
def test_n_m_in_one_pass_prunes_what_scores_prune(n, m):
    """No two weights of a group are equal, so there is one right mask."""
    masks = []
    for criterion in (Magnitude(), Scored()):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sparsifier = Sparsifier([NM(LAYERS, n, m)], Linear(0.5, end=8), criterion=criterion, update_every=2)
        sparsifier.attach(model, optimizer)
        seen = []
        train(sparsifier, model, optimizer, 10, lambda seen=seen, s=sparsifier: seen.append(s.masks))
        masks.append(seen)
    assert all(int(mask.sum()) == mask.numel() * (m - n) // m for mask in masks[0][-1].values())
    for one, other in zip(*masks, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in LAYERS)


@pytest.mark.parametrize(("criterion", "in_one_pass"), [(Magnitude(), True), (Scored(), False)], ids=label)
def test_n_m_by_magnitude_makes_no_tensor_as_large_as_the_weights(criterion, in_one_pass, copies):
    """Only a criterion that has to be asked for each score takes the memory for them."""
    model = nn.Linear(2048, 2048, bias=False)
    sparsifier = Sparsifier([NM("weight", 2, 4)], Constant(0.5), criterion=criterion, update_every=1)
    sparsifier.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=2)
    with copies() as made:
        sparsifier.update()
    assert sparsifier.sparsity() == 0.5
    assert (made.bytes < model.weight.nbytes) == in_one_pass
