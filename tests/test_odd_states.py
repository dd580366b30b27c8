"""States with entries of other kinds, gradients and parameters without memory of their own: errors of this package."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparse_lightning as sl
from sparse_lightning.engine.saved_state import REQUIRED, check_form


def attached(match="*.weight", layers=None, **parts):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) if layers is None else layers
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = sl.Sparsifier([sl.Blocks(match, (4, 4))], sl.Linear(0.5, end=3), update_every=1, **parts)
    ours.attach(net, optimizer)
    return net, optimizer, ours


def steps(net, optimizer, ours, count=4):
    for _ in range(count):
        net(torch.ones(2, 8)).square().sum().backward()
        ours.before_step()
        optimizer.step()
        optimizer.zero_grad()
    return ours


def places(node, path=()):
    """All entries of a state, at any depth, by their keys."""
    yield path
    for key, value in node.items() if isinstance(node, dict) else ():
        yield from places(value, (*path, key))


SAVED = steps(*attached(criterion=sl.Wanda())).state_dict()
WRONG = [None, "text", b"bytes", [1], 1.5, object(), torch.ones(2), {"a": 1}, {7: 7}]


@given(st.sampled_from([path for path in places(SAVED) if path]), st.sampled_from(WRONG))
def test_an_entry_of_another_kind_is_refused_with_its_place(path, wrong):
    state = copy.deepcopy(SAVED)
    node = state
    for key in path[:-1]:
        node = node[key]
    if isinstance(wrong, type(node[path[-1]])) or (path[-1] in ("target", "churn", "shape")):
        return
    node[path[-1]] = wrong
    for ours in (sl.Sparsifier([sl.Blocks("*", (4, 4))], 0.5), attached(criterion=sl.Wanda())[2]):
        before = copy.deepcopy(ours.masks)
        with pytest.raises(
            sl.CheckpointError, match=r"the state of the Sparsifier has .*damaged, or not what.*another"
        ):
            ours.load_state_dict(state)
        assert all(mask.equal(before[name]) for name, mask in ours.masks.items())


def test_what_is_no_state_is_refused_and_every_own_state_is_taken():
    for wrong in (7, None, [1]):
        with pytest.raises(sl.CheckpointError, match="is not the state of a Sparsifier"):
            sl.Sparsifier([sl.Blocks("*", (4, 4))], 0.5).load_state_dict(wrong)
    for method in (sl.RigL(), sl.Soft(), sl.Proximal(), sl.Gradual()):
        state = steps(*attached(criterion="magnitude", method=method)).state_dict()
        assert set(REQUIRED) <= set(state)
        check_form(state)
    check_form(steps(*attached(criterion=sl.Wanda(), compensation=sl.Refit())).state_dict())


def test_a_gradient_whose_elements_share_memory_is_masked_in_a_copy():
    net, optimizer, ours = attached(criterion="magnitude")
    for _ in range(5):
        for param in net.parameters():
            param.grad = torch.ones(()).expand(param.shape)
        ours.before_step()
        assert float((net[0].weight.grad == 0).float().mean()) == float((net[0].weight == 0).float().mean())
        optimizer.step()
    assert ours.sparsity() == 0.5


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_sparse_layouts_are_refused_by_name(convert):
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(convert(torch.eye(8)))
    with pytest.raises(sl.PatternError, match=r"^weight has the layout torch\.sparse_.*to_dense\(\)"):
        attached("weight", layer)
    with pytest.raises(sl.LayoutError, match=r"layout torch\.sparse_.*to_dense\(\)"):
        sl.BlockSpec(layer.weight, (4, 4))


def test_what_needs_values_is_refused_on_the_meta_device():
    net, _, ours = attached(layers=nn.Sequential(nn.Linear(8, 8)).to("meta"), criterion="magnitude")
    assert "0.weight 8×8" in ours.summary(), "shapes are enough for that"
    pruned = [sl.Blocks("*.weight", (4, 4))], 0.5, [torch.ones(2, 8)], sl.Magnitude()
    for use in (ours.sparsity, ours.update_now, lambda: sl.prune(net, *pruned, progress=False)):
        with pytest.raises(sl.SparseLightningError, match=r"^0\.weight is on the meta device.*to_empty\(\)"):
            use()


@pytest.mark.parametrize("number", [1e39, -1e300, 10**400])
def test_numbers_beyond_fp32_are_refused_when_a_flow_is_traced(number):
    class Large(sl.Criterion):
        def flow(self, x):
            return sl.flow.Sum()(x.weight * number)

    with pytest.raises(sl.FlowError, match=r"the number .* is beyond the range of fp32.*up to 3\.4e\+38"):
        attached(criterion=Large())


class Branches(nn.Module):
    """Branches on a value."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.up(x)
        return self.down(x.relu() if x.sum() > 0 else x)


def test_a_trace_that_fails_says_why_and_prints_nothing(capfd):
    with pytest.raises(sl.CouplingError, match=r"cannot trace Branches: .*Control flow that depends on data"):
        sl.couplings(Branches(), torch.ones(2, 8))
    with pytest.raises(sl.CouplingError, match=r"cannot trace Linear: .*Check that the model runs on") as found:
        sl.couplings(nn.Linear(8, 8), torch.ones(2, 7))
    assert "Control flow" not in str(found.value)
    assert "".join(capfd.readouterr()) == ""


def test_prune_refuses_what_it_cannot_score():
    net, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [torch.ones(2, 8)]
    with pytest.raises(sl.PatternError, match=r"no patterns were passed.*such as Blocks\(\)"):
        sl.prune(net, [], 0.5, batch, progress=False)
    frozen = net.requires_grad_(False)
    with pytest.raises(sl.FlowError, match=r"loss of the batches has no gradient: .*frozen.*requires_grad_\(\).*Wanda"):
        sl.prune(frozen, [sl.Neurons("0", "1")], 0.5, batch, sl.Taylor(), step=lambda m, x: m(x).sum(), progress=False)
