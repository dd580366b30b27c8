"""Patterns on a model: what they attach, in which order, and which errors they raise."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_names import LoRA, Peft
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from sparse_lightning import BlockSpec, ScopeCoupling, ScopeSpec, Sparsifier, View
from sparse_lightning.errors import LayoutError, PatternError
from sparse_lightning.patterns import NM, Blocks, Custom, Filters, Heads, Neurons, resolve, summary


class Layer(nn.Module):
    """A transformer layer of width 8, with 2 heads and 16 neurons."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.norm = nn.LayerNorm(8)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 12)

    def forward(self, x):
        return self.head(x)


def elements(attachments):
    """For each parameter how often each of its elements lies in a block."""
    counts = {}
    for attachment in attachments:
        for block in attachment.scope.blocks():
            for spec in block.blocks():
                count = counts.setdefault(spec.param, torch.zeros(spec.param.shape))
                spec.view.like(count).data.add_(1)
    return counts


PATTERNS = [
    Blocks("*.weight", (2, 2), edge="partial", scope="tensor"),
    Blocks(["*.mlp.*.weight", "head.weight"], (4, 8)),
    NM(["*.up.weight", "head.weight"]),
    Neurons("*.up", "*.down"),
    Heads("*.attn"),
    Custom(lambda model: ScopeSpec(BlockSpec(model.head.weight, (1, -1)))),
]


@given(st.lists(st.sampled_from(PATTERNS), unique=True, min_size=1, max_size=4))
def test_no_weight_is_in_two_blocks_whatever_the_order(patterns):
    """Either an error is raised, or all blocks are disjoint and all names are different."""
    model = Transformer()
    for layer in model.layers:
        layer.norm = nn.Identity()
    try:
        found = resolve(patterns, model)
    except PatternError as error:
        if "claim" not in str(error):
            raise
        return
    assert all((count <= 1).all() for count in elements(found).values())
    assert len({a.name for a in found}) == len(found)
    assert list(dict.fromkeys(a.pattern for a in found)) == [
        f"{p.label}_2" if p.label in [q.label for q in patterns[:i]] else p.label for i, p in enumerate(patterns)
    ]


def test_blocks_of_each_scope():
    model = nn.ModuleDict({"a": nn.Linear(8, 16)})
    sizes = {"tensor": (1, 8), "row": (4, 2), "column": (2, 4), (2, 1): (4, 2)}
    for scope, (scopes, blocks) in sizes.items():
        [found] = resolve([Blocks("*.weight", shape=[4, 4], scope=scope)], model)
        assert (found.scope.numscp(), found.scope.numblk_per_scope()) == (scopes, blocks), scope
        assert (found.name, found.pattern, found.final) == ("a.weight", "blocks", None)
    [found] = resolve([Blocks(["a.weight"], [-1, 3], edge="partial")], model)
    assert found.scope.blocks()[0].grid_shape == (1, 3)


def test_patterns_take_lists_as_hydra_gives_them():
    assert Blocks(["a", "b"], [4, 4], scope=[1, -1]) == Blocks(("a", "b"), (4, 4), scope=(1, -1))
    assert Blocks("a", [4, 4]) == Blocks(["a"], (4, 4))
    for pattern in (Blocks("a", (1, 2)), NM("a", 1, 4), Filters("a", norm="b"), Neurons("a", "b"), Heads("a")):
        assert pickle.loads(pickle.dumps(pattern)) == pattern


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (4, 4)])
def test_n_of_m_along_the_inputs(n, m):
    model = nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3), nn.Conv2d(16, 2, 3), nn.ConvTranspose2d(8, 5, 2))
    found = resolve([NM("*.weight", n=n, m=m)], model)
    assert [a.name for a in found] == ["0.weight", "2.weight", "3.weight"], "a norm has no inputs"
    for attachment in found:
        assert attachment.final == 1 - n / m
        scope = attachment.scope
        assert scope.sparsity_to_nnz(attachment.final) == n
        scope.hard_threshold(nnz=n)
    groups = [model[0].weight.unflatten(1, (-1, m)), model[2].weight.unflatten(1, (-1, m))]
    groups.append(model[3].weight.transpose(0, 1).unflatten(1, (-1, m)))
    for weight in groups:
        assert ((weight != 0).sum(2) == n).all()


def test_the_first_match_wins():
    model = Transformer()
    found = resolve([Blocks("*.up.weight", (4, 4)), NM("*.mlp.*.weight"), Blocks("*", (1,), scope="tensor")], model)
    owners = {a.name: a.pattern for a in found}
    assert owners["layers.0.mlp.up.weight"] == "blocks"
    assert owners["layers.0.mlp.down.weight"] == "nm"
    assert owners["layers.0.norm.weight"] == "blocks_2"
    assert set(owners) == {name for name, _ in model.named_parameters()}


def test_blocks_do_not_even_look_at_what_was_claimed():
    """A shape that would not divide a claimed parameter is no error."""
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(9, 9)})
    found = resolve([Blocks("b.weight", (3, 3)), Blocks("*.weight", (4, 4))], model)
    assert [a.name for a in found] == ["b.weight", "a.weight"]
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
    assert [a.name for a in resolve([Blocks("0.*", (1,)), Filters("*")], cnn)] == ["0.weight", "0.bias", "1 (filters)"]


def test_a_coupled_pattern_behind_one_that_has_its_weights_raises():
    with pytest.raises(PatternError) as caught:
        resolve([Blocks("*.mlp.*.weight", (4, 4)), Neurons("*.up", "*.down")], Transformer())
    text = str(caught.value)
    for part in ("Neurons(up='*.up', down='*.down')", "Blocks(match=('*.mlp.*.weight',), shape=(4, 4))"):
        assert part in text, "both patterns are named"
    assert "layers.0.mlp.up.weight of shape (16, 8)" in text
    assert "Change the order" in text
    assert len(resolve([Neurons("*.up", "*.down"), Blocks("*.mlp.*.bias", (1,))], Transformer())) == 4


def test_only_units_may_share_a_matrix():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 4))
    assert len(resolve([Neurons("0", "1"), Neurons("1", "2")], model)) == 2, "columns and rows of the second layer"
    with pytest.raises(PatternError, match=r"Neurons\(up='1'.*1\.weight of shape \(6, 8\).*Blocks\(match="):
        resolve([Blocks("1.weight", (2, 2)), Neurons("1", "2")], model)
    with pytest.raises(PatternError, match=r"claims weights of 1\.weight of shape \(6, 8\) twice"):
        resolve([Custom(lambda m: [ScopeSpec(BlockSpec(m[1].weight, b)) for b in ((1, -1), (-1, 1))])], model)


def test_parts_of_a_parameter_may_go_to_several_patterns():
    model = nn.ModuleDict({"a": nn.Linear(4, 8)})

    def half(low):
        return lambda m: ScopeSpec(BlockSpec(View(m["a"].weight, (4, 4), (4, 1), offset=4 * low), (1, -1)))

    found = resolve([Custom(half(0)), Custom(half(4))], model)
    assert [(a.name, a.pattern) for a in found] == [("a.weight", "custom"), ("a.weight #2", "custom_2")]
    with pytest.raises(PatternError, match=r"needs weights of a\.weight of shape \(8, 4\)"):
        resolve([Custom(half(0)), Custom(half(3))], model)


def test_a_view_that_sees_a_weight_twice_raises():
    model = nn.ModuleDict({"a": nn.Linear(4, 8)})
    windows = Custom(lambda m: ScopeSpec(BlockSpec(View(m["a"].weight, (7, 8), (4, 1)), (1, -1))))
    with pytest.raises(PatternError, match=r"a weight of a\.weight of shape \(8, 4\) twice"):
        resolve([windows], model)


def test_custom_gets_the_model_and_names_its_scopes():
    model = Transformer()

    def shared(module):
        assert module is model
        blocks = [BlockSpec(layer.mlp["up"].weight, (4, 4)) for layer in module.layers]
        return [ScopeCoupling([ScopeSpec(block) for block in blocks], name="all ups")]

    [found] = resolve([Custom(shared)], model)
    assert (found.name, found.pattern, found.scope.numblk()) == ("all ups", "custom", 16)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda model: [], "returns no scopes for Transformer"),
        (lambda model: [model.head], "not a scope: return a ScopeSpec, a ScopeCoupling"),
        (lambda model: ScopeSpec(BlockSpec(torch.ones(2, 2), (1, 1))), "not a parameter of the model"),
    ],
)
def test_custom_scopes_that_do_not_belong_to_the_model_raise(fn, text):
    with pytest.raises(PatternError, match=text):
        resolve([Custom(fn)], Transformer())


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (Blocks("*.mpl.*.weight", (2, 2)), r"'\*\.mpl\.\*\.weight' matches no parameter: did you mean"),
        (Blocks(["head.weight", "haed.bias"], (2,)), "'haed.bias' matches no parameter: did you mean 'head.bias'"),
        (NM("*.upp.weight"), r"did you mean '\*\.up\.weight'"),
        (NM("*.norm.*"), r"with 2 or more dimensions: layers\.0\.norm\.weight has the shape \(8,\)"),
        (Neurons("*.upp", "*.down"), r"'\*\.upp' matches no layer with a weight: did you mean '\*\.up'"),
        (
            Neurons("*.norm", "*.down"),
            r"layers\.0\.norm has no partner in down: .* wildcard text \('layers\.0',\), only \('layers\.0\.mlp',\)",
        ),
        (Heads("*.atn"), r"'\*\.atn' matches no module: did you mean '\*\.attn'"),
        (Filters("*"), r"no convolution: .* has the shape .*For linear layers, use Neurons"),
    ],
)
def test_a_pattern_that_matches_nothing_names_what_is_near(pattern, text):
    with pytest.raises(PatternError, match=text):
        resolve([pattern], Transformer())


def test_a_pattern_whose_matches_are_all_claimed_says_so():
    with pytest.raises(PatternError) as caught:
        resolve([Heads("*.attn"), Neurons("*.up", "*.down"), Blocks("*.mlp.*.weight", (2, 2))], Transformer())
    text = str(caught.value)
    assert text.startswith("Blocks(match=('*.mlp.*.weight',), shape=(2, 2)) matches no unclaimed parameter")
    assert "already claimed by Neurons(up='*.up', down='*.down')" in text
    assert "Heads" not in text
    assert "order" in text


def test_shapes_that_do_not_fit_raise_with_the_parameter():
    for pattern in (Blocks("*.up.weight", (5, 8)), Blocks("*.up.weight", (4, 4), scope=(3,)), NM("*.up.weight", 2, 3)):
        with pytest.raises(PatternError, match=r"layers\.0\.mlp\.up\.weight of shape \(16, 8\).*[Cc]hange") as caught:
            resolve([pattern], Transformer())
        assert str(pattern) in str(caught.value)
    with pytest.raises(PatternError, match=r"with 2 or more dimensions: layers\.0\.norm\.weight has the shape \(8,\)"):
        resolve([Blocks("*.norm.weight", (4, 4))], Transformer())
    with pytest.raises(PatternError, match=r"block \(5, 8\)") as caught:
        resolve([Blocks("*.up.weight", (5, 8))], Transformer())
    assert isinstance(caught.value.__cause__, LayoutError)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Blocks("a", (1,), scope="rows"), "there is no scope 'rows': did you mean 'row'"),
        (lambda: Blocks([], (1,)), "does not name parameters"),
        (lambda: NM("a", 5, 4), "n=5, m=4 is not an N:M pattern: n must lie between 1 and m"),
        (lambda: NM("a", 0, 4), "n must lie between 1 and m"),
        (lambda: Heads("a", head_dim=0), "head_dim=0 must be at least 1"),
        (lambda: resolve([{"match": "a"}], nn.Linear(1, 1)), "is not a pattern"),
    ],
)
def test_arguments_that_mean_nothing_raise(make, text):
    with pytest.raises(PatternError, match=text):
        make()


def test_a_tied_parameter_is_attached_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert [a.name for a in resolve([Blocks("*", (2, 2))], model)] == ["embedding.weight"]
    assert [a.name for a in resolve([Blocks(["head.*", "*"], (2, 2))], model)] == ["head.weight"]
    with pytest.raises(PatternError, match="matches no unclaimed parameter"):
        resolve([Blocks("head.*", (2, 2)), Blocks("embedding.*", (2, 2))], model)


EVERYTHING = [Heads("*.attn"), Neurons("*.up", "*.down"), Blocks("*.weight", (4,))]


def described(model):
    return [(a.name, a.pattern, a.scope.numel(), a.scope.grid_shape) for a in resolve(EVERYTHING, model)]


def test_wrapped_models_are_attached_as_the_plain_one_is():
    plain = described(Transformer())
    assert described(torch.compile(Transformer())) == plain
    lora = Transformer()
    for layer in lora.layers:
        layer.mlp["up"] = LoRA(layer.mlp["up"])
    lora.head = LoRA(lora.head)
    # The rows of an adapter are pruned with the units of its layer.
    assert [each[:2] + each[3:] for each in described(Peft(lora))] == [each[:2] + each[3:] for each in plain]
    meta = Transformer().to("meta")
    assert described(meta) == plain


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fully_sharded_models_are_attached_as_the_plain_one_is(one_process):
    model = Transformer()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert described(model) == described(Transformer())


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # there is one process
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel.*:FutureWarning")  # FSDP1 is what is tested
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flat_parameters_raise(one_process, use_orig_params):
    model = Transformer()
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    for seen in (wrapped, model):
        with pytest.raises(PatternError, match=r"flat parameter of FSDP1.*ModelParallelStrategy"):
            resolve(EVERYTHING, seen)


def test_deepspeed_parameters_raise():
    model = Transformer()
    model.head.weight.ds_id = 0
    with pytest.raises(PatternError, match=r"head\.weight of shape \(12, 8\) is partitioned by DeepSpeed.*FSDP2"):
        resolve(EVERYTHING, model)


def test_attachments_see_the_live_weights():
    model = Transformer()
    found = resolve(EVERYTHING, model)
    for attachment in found:
        for block in attachment.scope.blocks():
            block.apply_mask(torch.ones(block.grid_shape, dtype=torch.bool))
    alive = {name for name, parameter in model.named_parameters() if parameter.any()}
    biases = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    assert alive <= biases, "all weights were attached"


def test_the_former_name_of_error_context_works_and_warns():
    pattern, parameter = Blocks("a", (1,)), nn.Parameter(torch.ones(3))
    with pytest.warns(DeprecationWarning, match=r"Pattern\.refusing is deprecated: use error_context"):
        former = pattern.refusing("a", parameter)
    with pytest.raises(PatternError, match=r"does not fit a of shape \(3,\)"), former:
        BlockSpec(parameter, (2,))


def test_a_summary_reads_the_public_attributes_only():
    """At run time, scopes with masks take the place of attachments."""
    [found] = resolve([NM("weight")], nn.Linear(8, 4))
    scope = SimpleNamespace(name=found.name, pattern=found.pattern, scope=found.scope, final=found.final)
    assert summary([scope], budgets={"weight": "0.5"}) == summary([found], budgets={"weight": "0.5"})


def test_the_summary_lists_every_parameter_once():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(8, 4))
    found = resolve([Filters("0", norm="1"), Blocks("2.weight", (2, 4), scope="row")], model)
    assert summary(found, budgets={"2.weight": "0.75"}).splitlines() == [
        "pattern  parameter         view                block    grid     scope    budget",
        "-------  ----------------  ------------------  -------  -------  -------  ------",
        "filters  0.weight 4×3×3×3  whole               1×3×3×3  4×1×1×1  4×1×1×1       -",
        "         0.bias 4          4×1×1×1 by 1,1,1,1  1×1×1×1  4×1×1×1",
        "         1.weight 4        4×1×1×1 by 1,1,1,1  1×1×1×1  4×1×1×1",
        "         1.bias 4          4×1×1×1 by 1,1,1,1  1×1×1×1  4×1×1×1",
        "blocks   2.weight 4×8      whole               2×4      2×2      1×2        0.75",
    ]
    assert "budget" not in summary(found)


@given(st.lists(st.sampled_from([-1, 1, 2, 4]), min_size=1, max_size=4))
def test_blocks_pass_over_parameters_with_fewer_dimensions_than_the_block(shape):
    """Norms and biases match `*`, and are no matrices; of those with as many dimensions, none is left out."""
    model = nn.Sequential(nn.Conv1d(4, 4, 4), nn.BatchNorm1d(4), nn.Linear(4, 8))
    fitting = {name for name, p in model.named_parameters() if p.ndim >= len(shape)}
    if fitting:
        assert {found.name for found in resolve([Blocks("*", shape)], model)} == fitting
    else:
        with pytest.raises(PatternError, match=r"no parameter with 4 or more dimensions.*remove entries of the shape"):
            resolve([Blocks("*", shape)], model)


def test_the_summary_lists_what_was_passed_over():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    ours = Sparsifier([Blocks("*.weight", (4, 4)), Blocks("1.weight", (4,))], 0.5)
    ours.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ours.summary().splitlines()[-1] == "passed over, with fewer dimensions than the block: *.weight"
    ours.detach()
    plain = Sparsifier([Blocks("0.weight", (4, 4))], 0.5)
    plain.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "passed over" not in plain.summary()


def test_the_hint_about_edges_appears_where_it_helps():
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(PatternError, match='edge="partial"'):
        resolve([Blocks("0.weight", (3, 4))], model)
    with pytest.raises(PatternError) as caught:
        resolve([Blocks("0.weight", (0, 4))], model)
    assert "edge=" not in str(caught.value)
    resolve([Blocks("0.weight", (3, 4), edge="partial")], model)


def test_a_block_that_does_not_fit_is_described_once_with_the_shape_that_missing_entries_give():
    model = nn.Sequential(nn.Linear(8, 6))
    with pytest.raises(PatternError) as refused:
        resolve([Blocks("0.weight", (4,))], model)
    text = str(refused.value)
    assert text.count("0.weight of shape (6, 8)") == text.count("does not fit") == 1, text
    assert "dimension 0 has 6 elements, which is not a multiple of 4" in text
    row = summary(resolve([Blocks("0.weight", (3,))], model)).splitlines()[-1]
    assert row.split()[-3:] == ["3×1", "2×8", "2×8"], "(3,) is 3×1 in a matrix"
