"""What the hold must not do: write outside of the parameters, or keep a table that does not fit them any more."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from sparse_lightning import (
    SET,
    Blocks,
    Constant,
    Gradual,
    LayoutError,
    Linear,
    Magnitude,
    Movement,
    RigL,
    Sparsifier,
    SparsityError,
    Wanda,
)


def attached(model, optimizer=None, **settings):
    """Attach with half of the 2×2 blocks pruned by one step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier([Blocks("*weight", (2, 2))], Constant(0.5, end=0), update_every=1, **settings)
    sparsifier.attach(model, optimizer)
    step(model, optimizer)
    return sparsifier, optimizer


def step(model, *optimizers):
    """Make a step with gradients that would move every weight."""
    for param in model.parameters():
        param.grad = torch.rand_like(param) + 1
    for optimizer in optimizers:
        optimizer.step()


def inside(shape, dtype=torch.float32):
    """A tensor in the middle of a storage of ones, and the storage."""
    storage = torch.ones(4 * math.prod(shape), dtype=dtype)
    start = math.prod(shape)
    return storage[start : start + math.prod(shape)].view(shape), storage


def test_a_parameter_that_shrinks_raises_an_error_and_nothing_is_written():
    model = nn.Linear(8, 64, bias=False)
    sparsifier, _ = attached(model)
    part, storage = inside((8, 8))
    model.weight.data = part
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"changed its shape from \(64, 8\) to \(8, 8\)"):
            sparsifier.hold()
        assert bool((storage == 1).all())


def test_a_copy_with_another_shape_raises_an_error_and_nothing_is_written():
    model = nn.Linear(8, 64, bias=False)
    sparsifier, _ = attached(model)
    other = nn.Linear(8, 8, bias=False)
    other.weight.data, storage = inside((8, 8))
    with pytest.raises(LayoutError, match=r"shape \(8, 8\)"):
        sparsifier.mask_copy(other)
    assert bool((storage == 1).all())


def test_a_dtype_that_cannot_be_pruned_raises_an_error_each_time():
    model = nn.Linear(8, 8, bias=False)
    sparsifier, _ = attached(model)
    part, storage = inside((8, 8), torch.int8)
    model.weight.requires_grad_(False)
    model.weight.data = part
    for _ in range(3):
        with pytest.raises(LayoutError, match=r"torch\.int8"):
            sparsifier.hold()
        assert bool((storage == 1).all())


def test_another_dtype_at_the_same_address_is_noticed():
    model = nn.Linear(16, 16, bias=False)
    buffer = torch.ones(1024)
    model.weight.data = buffer[:256].view(16, 16)
    sparsifier, optimizer = attached(model)
    zeros = model.weight == 0
    narrow = buffer.view(torch.bfloat16)
    narrow.fill_(1)
    model.weight.data = narrow[:256].view(16, 16)
    model.weight.grad = None
    sparsifier.hold()
    assert torch.equal(model.weight == 0, zeros)
    assert bool((narrow[256:] == 1).all())
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_optimizers_that_exchange_their_parameters_are_followed():
    model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
    first, second = (torch.optim.SGD([layer.weight], lr=0.1) for layer in model)
    sparsifier = Sparsifier([Blocks("*weight", (2, 2))], Constant(0.5, end=0), update_every=1)
    sparsifier.attach(model, [first, second])
    step(model, first, second)
    assert sparsifier.sparsity() == 0.5
    groups = first.param_groups[0], second.param_groups[0]
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    for optimizer in (first, second, first):
        step(model, optimizer)
        assert sparsifier.sparsity() == 0.5


def test_a_copy_of_an_attached_sparsifier_is_detached_and_has_its_masks():
    model = nn.Linear(8, 8)
    sparsifier, optimizer = attached(model)
    copied = copy.deepcopy(sparsifier)
    assert sparsifier.is_attached
    assert not copied.is_attached
    other = copy.deepcopy(model)
    copied.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert torch.equal(copied.masks["weight"], sparsifier.masks["weight"])
    step(model, optimizer)
    assert sparsifier.step == 2
    assert copied.step == 1


class Forgetful(Gradual):
    """Remembers one number, whatever the number of scopes, and declares that it decides on many."""

    decides_scopes_apart = True

    def remember(self, context, mask):
        return torch.tensor([1.0, 2.0, 3.0])


def test_a_memory_that_does_not_fit_the_scopes_raises_an_error_before_masks_change():
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = Magnitude(), Forgetful()
    sparsifier = Sparsifier([Blocks("*weight", (2, 2))], Constant(0.5, end=0), *parts, update_every=1)
    sparsifier.attach(model, optimizer)
    with pytest.raises(SparsityError, match=r"Forgetful.remember returned a tensor of shape \(3,\)"):
        sparsifier.update_now()
    assert not any(mask.any() for mask in sparsifier.masks.values())


def test_parameters_without_weights_are_no_obstacle():
    model = nn.ParameterDict({"weight": nn.Parameter(torch.empty(4, 0))})
    sparsifier, _ = attached(model)
    assert sparsifier.sparsity() == 0


def test_a_step_is_observed_once_however_often_it_is_prepared():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Linear(0.5, end=10)
    sparsifier = Sparsifier([Blocks("weight", (2, 2))], schedule, Movement(), update_every=5)
    sparsifier.attach(model, optimizer)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.rand_like(param)
        for _ in range(3):
            sparsifier.before_step()
        optimizer.step()
    assert sparsifier.state_dict()["scorer"]["runs"] == 2


def late_run(method, steps, saved=None):
    """Train without `before_step`, so that grown blocks wait for their first step; return all state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    sparsifier = Sparsifier([Blocks("*weight", (2, 2))], Constant(0.5, end=12), method=method, update_every=3)
    begin = 0
    if saved is not None:
        begin = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sparsifier.load_state_dict(saved["sparsifier"])
    sparsifier.attach(model, optimizer)
    for i in range(begin, steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "sparsifier": sparsifier}
    return {"step": steps, **{name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}}


@pytest.mark.parametrize("method", [RigL(), SET()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("cut", range(1, 12, 2))
def test_blocks_that_wait_for_their_first_step_are_part_of_a_checkpoint(method, cut):
    through, resumed = late_run(method, 14), late_run(method, 14, late_run(method, cut))
    assert all(torch.equal(through["model"][name], resumed["model"][name]) for name in through["model"])


def wanda_run(steps, saved=None):
    """Train with norms of inputs that are summed over many steps."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparsifier = Sparsifier([Blocks("weight", (2, 2))], Linear(0.5, end=20), Wanda(), update_every=20)
    begin = 0
    if saved is not None:
        begin = saved[0]
        sparsifier.load_state_dict(saved[1])
    sparsifier.attach(model, optimizer)
    for i in range(begin, steps):
        torch.manual_seed(i)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return steps, copy.deepcopy(sparsifier.state_dict())


@pytest.mark.parametrize("cut", range(2, 19, 2))
def test_norms_of_inputs_are_resumed_bit_for_bit(cut):
    (_, through), (_, resumed) = wanda_run(19), wanda_run(19, wanda_run(cut))
    assert torch.equal(through["input_norms"]["weight"], resumed["input_norms"]["weight"])
