"""A parameter that is replaced while attached is noticed at the next step, and where the sparsity is read."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from small_nets import LAYERS, Net, batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_lightning import Blocks, Constant, PatternError, SparseLightningError, Sparsifier
from sparse_lightning.engine.replaced import Replaced
from sparse_lightning.kernels.native import is_supported
from sparse_lightning.kernels.watch.places import NativePlaces, PythonPlaces

needs_native = pytest.mark.skipif(not is_supported(), reason="needs a C++ compiler on x86 Linux")

TEXT = r"up\.weight.* was replaced by another tensor.*load_state_dict\(assign=True\).*call detach\(\)"


def attached():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = Sparsifier(Blocks(LAYERS, (4, 4)), Constant(0.75, end=9), "magnitude", update_every=1)
    ours.attach(net, optimizer)
    step(net, optimizer, ours)
    assert ours.sparsity() == 0.75
    return net, optimizer, ours


def step(net, optimizer, ours):
    x, y = next(iter(batches()))
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()


def assign(net):
    net.load_state_dict(copy.deepcopy(Net().state_dict()), assign=True)


def replace_parameter(net):
    net.up.weight = nn.Parameter(torch.randn_like(net.up.weight))


def replace_module(net):
    net.up = nn.Linear(16, 32)


CHANGES = [assign, replace_parameter, replace_module]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_replaced_parameter_is_noticed_at_the_next_step(change):
    net, optimizer, ours = attached()
    change(net)
    with pytest.raises(SparseLightningError, match=TEXT):
        step(net, optimizer, ours)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_sparsity_of_what_is_not_in_the_model_is_not_reported(change):
    net, _, ours = attached()
    change(net)
    for read in (ours.sparsity, ours.sparsities):
        with pytest.raises(SparseLightningError, match=TEXT):
            read()


def test_attaching_again_takes_the_new_parameters():
    net, _, ours = attached()
    assign(net)
    ours.detach()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="they are zeroed now"):
        ours.attach(net, optimizer)
    step(net, optimizer, ours)
    assert ours.sparsity() == 0.75
    assert float((net.up.weight == 0).float().mean()) == 0.75


def test_what_keeps_the_parameters_is_not_an_error():
    """Weights that are loaded in place, other layers, and a module that is wrapped, as torch.compile does."""
    net, optimizer, ours = attached()
    net.load_state_dict(Net().state_dict())
    ours.hold()
    net.norm = nn.LayerNorm(32)
    step(net, optimizer, ours)
    net.up = torch.compile(net.up, backend="eager")
    ours.sparsity()
    ours.sparsity()
    assert ours.sparsity() == 0.75


@settings(max_examples=4)
@given(st.sampled_from([1, 300, 600]), st.data())
def test_a_single_parameter_or_module_of_a_model_of_any_size_is_noticed_at_once(layers, data):
    net = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(layers)])
    watch = Replaced(net, dict(net.named_parameters()))
    watch.check()
    place = data.draw(st.integers(0, layers - 1))
    if data.draw(st.booleans()):
        net[place].weight = nn.Parameter(torch.ones(1, 1))
    else:
        net[place] = nn.Linear(1, 1, bias=False)
    with pytest.raises(SparseLightningError, match=rf"^{place}\.weight was replaced"):
        watch.check()


@pytest.mark.parametrize("kind", [PythonPlaces, pytest.param(NativePlaces, marks=needs_native)])
@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(), min_size=1), min_size=1, max_size=5), st.data())
def test_entries_of_dicts_are_compared_by_identity(kind, dicts, data):
    entries = [(held, key) for held in dicts for key in held]
    found = kind(entries)
    assert found.hold_same()
    held, key = data.draw(st.sampled_from(entries))
    if data.draw(st.booleans()):
        held[key] = [held[key]]
    else:
        del held[key]
    assert not found.hold_same()


def test_masks_are_copies_so_that_writing_to_them_changes_nothing():
    net, _, ours = attached()
    for mask in ours.masks.values():
        mask.fill_(False)
    assert all(mask.float().mean() == 0.75 for mask in ours.masks.values())
    with torch.no_grad():
        net.up.weight.fill_(1.0)
    ours.hold()
    assert float((net.up.weight == 0).float().mean()) == 0.75


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head.weight = self.up.weight

    def forward(self, x):
        return self.head(self.up(x).relu())


def attached_to(net, match):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = Sparsifier(Blocks(match, (4, 4)), Constant(0.75, end=9), "magnitude", update_every=1)
    ours.attach(net, optimizer)
    optimizer.zero_grad()
    net(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return optimizer, ours


@pytest.mark.parametrize("name", ["up", "head"])
def test_untying_a_shared_parameter_is_noticed(name):
    net = Tied()
    optimizer, _ = attached_to(net, "up.weight")
    getattr(net, name).weight = nn.Parameter(net.up.weight.detach().clone())
    other = {"up": "head", "head": "up"}[name]
    with pytest.raises(SparseLightningError, match=rf"^{name}\.weight was .*attached one is {other}\.weight.*untying"):
        optimizer.step()


def test_a_layer_that_is_wrapped_is_followed_and_its_new_name_is_reported():
    net, optimizer, ours = attached()
    net.up = nn.Sequential(net.up)
    with pytest.warns(UserWarning, match=r"^up\.weight is up\.0\.weight now.*masks are held.*wrap first, then attach"):
        step(net, optimizer, ours)
    step(net, optimizer, ours)
    assert ours.sparsity() == 0.75
    assert float((net.up[0].weight == 0).float().mean()) == 0.75
    net.up[0] = nn.Linear(16, 32)
    with pytest.raises(SparseLightningError, match=r"up\.0\.weight was replaced"):
        step(net, optimizer, ours)


def test_a_parametrization_that_keeps_no_zeros_is_refused_and_one_that_scales_is_not():
    net, optimizer, ours = attached()
    nn.utils.parametrizations.spectral_norm(net.down)
    step(net, optimizer, ours)
    assert ours.sparsity() == 0.75
    nn.utils.parametrizations.weight_norm(net.up)
    with pytest.raises(PatternError, match=r"^up\.weight was wrapped after .*_WeightNorm computes from .*remove_param"):
        step(net, optimizer, ours)


def test_peft_may_wrap_layers_and_a_copy_that_it_trains_is_named():
    peft = pytest.importorskip("peft")
    net, _, ours = attached()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["down"]), net)
    assert ours.sparsity() == 0.75
    net, _, ours = attached()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["down"], modules_to_save=["up"]), net)
    with pytest.raises(SparseLightningError, match=r"up\.weight was .*\(the attached one is up\.original_module"):
        ours.sparsity()


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_are_checked_and_those_that_fsdp_gathers_are_known(mesh):
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer, ours = attached_to(net, "*.weight")
    assert ours.sparsity() == 0.75
    net(torch.ones(2, 16))
    assert not isinstance(net[2].weight, DTensor), "the outer module keeps what it gathers, until the backward pass"
    assert ours.sparsity() == 0.75
    net.reshard()
    assert ours.sparsity() == 0.75
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    with pytest.raises(SparseLightningError, match=r"^0\.weight was replaced"):
        optimizer.step()
