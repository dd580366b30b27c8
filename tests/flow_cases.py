"""What the tests of flows share: small criteria, awkward parameters, random flows, and how two runs are compared.

Not collected by itself.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from hypothesis import strategies as st
from torch import nn

from sparse_lightning import BlockCoupling, BlockSpec, ScopeSpec, View
from sparse_lightning.criteria import (
    EMA,
    AdamFisher,
    ElementwiseTaylor,
    Fisher,
    Gradient,
    Magnitude,
    Movement,
    Random,
    Sensitivity,
    Taylor,
    Wanda,
)
from sparse_lightning.flow import (
    Abs,
    Criterion,
    Exp,
    L2Norm,
    Load,
    Log,
    Max,
    Maximum,
    Mean,
    Min,
    Minimum,
    Normalize,
    Pick,
    Relu,
    Save,
    Scorer,
    Sigmoid,
    Sources,
    Sqrt,
    Square,
    Stack,
    Sum,
    Where,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

SHIPPED = {
    "magnitude L1": Magnitude(p=1),
    "magnitude L2": Magnitude(),
    "magnitude max": Magnitude(p=math.inf),
    "gradient": Gradient(),
    "taylor": Taylor(),
    "elementwise taylor": ElementwiseTaylor(),
    "movement": Movement(),
    "fisher": Fisher(decay=0.7),
    "adam fisher": AdamFisher(),
    "sensitivity": Sensitivity(),
    "wanda": Wanda(),
    "random": Random(),
    "EMA": EMA(ElementwiseTaylor(), decay=0.6),
}


def criterion_of(flow, **states):
    """A criterion from a function, for tests."""
    body = {"flow": lambda self, x: flow(x), "states": states}
    return type("Made", (Criterion,), body)()


def param(*shape, seed=0, dtype=torch.float32, device="cpu"):
    made = nn.Parameter(drawn(*shape, seed=seed, dtype=dtype, device=device))
    made.grad = drawn(*shape, seed=seed + 1, dtype=dtype, device=device)
    return made


def drawn(*shape, seed, dtype, device):
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def scorer_for(criterion, scope, **options):
    scorer = Scorer(criterion, **options)
    scorer.attach("w", scope)
    return scorer


def scores_of(criterion, scope, **options):
    return scorer_for(criterion, scope, **options).score()


def rows(values):
    """A scope whose blocks are single weights with these values, so that scores are easy to follow."""
    return ScopeSpec(BlockSpec(torch.tensor([values]), (1, 1)))


def transposed(*shape, seed, dtype, device="cpu"):
    """A parameter and a gradient whose first dimension is the fastest in memory."""
    made = nn.Parameter(param(*shape[::-1], seed=seed, dtype=dtype, device=device).detach().t())
    made.grad = param(*shape[::-1], seed=seed + 1, dtype=dtype, device=device).detach().t()
    return made


def matrices(dtype=torch.float32, long=500, device="cpu"):
    """As large as it takes to be worth compiling where little else is; edges in both dimensions."""
    wide = transposed(63, long, seed=7, dtype=dtype, device=device)
    return {
        "matrix": ScopeSpec(BlockSpec(param(long, 63, dtype=dtype, device=device), (7, 5), edge="partial")),
        "transposed": ScopeSpec(BlockSpec(wide, (4, 53), edge="partial")),
    }


def awkward(dtype=torch.float32, device="cpu"):
    """Awkward sizes (1, 3, 63, 500), strides (channels last, flipped, a gradient's own), couplings and edges."""
    make = partial(param, dtype=dtype, device=device)
    conv = nn.Parameter(make(63, 4, 3, 3, seed=11).detach().contiguous(memory_format=torch.channels_last))
    conv.grad = make(63, 4, 3, 3, seed=12).detach()
    up, down, odd = make(24, 10), make(7, 24, seed=3), make(500, 3, seed=4)
    other = make(63, 63, seed=8)
    other.grad = other.grad.t().contiguous().t()
    neurons = BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], [None, (1, 0)])
    return {
        "conv": ScopeSpec(BlockSpec(conv, (4, 3, 2, -1), edge="partial")),
        "filters": ScopeSpec(BlockSpec(make(63, 3, 3, 3, seed=9), (1, -1, -1, -1))),
        "neurons": ScopeSpec(neurons),
        "backwards": ScopeSpec(BlockSpec(View(odd, (500, 3), (3, -1), 2), (63, 2), edge="partial")),
        "other strides": ScopeSpec(BlockSpec(other, (9, 7))),
        "vector": ScopeSpec(BlockSpec(make(500, seed=10), (63,), edge="partial")),
        "one": ScopeSpec(BlockSpec(make(1, 1, seed=5), (1, 1))),
        "singles": ScopeSpec(BlockSpec(make(3, 63, seed=6), (1, 1))),
    }


def in_turn(first=0, long=500, device="cpu"):
    """The matrices and the awkward ones, their dtypes taking turns."""
    made = [matrices(dtype, long, device) | awkward(dtype, device) for dtype in DTYPES]
    return {name: made[(first + i) % len(made)][name] for i, name in enumerate(made[0])}


def sources_for(scopes, run=0):
    """All that a flow may ask for: gradients of this run, what an optimizer keeps, and norms of inputs."""
    params = [p for scope in scopes.values() for p in scope.unique_params()]
    adam = torch.optim.AdamW(params)
    adam.state.update({p: {"exp_avg_sq": p.grad.square()} for p in params})
    norms = {p: torch.rand(p.shape[-1], generator=torch.Generator().manual_seed(len(p))).to(p.device) for p in params}
    grads = {p: p.grad * 0.5**run for p in params}
    return Sources(optimizers=[adam], input_norms=norms, grads=grads, step=run, target=0.5)


def scores_by(lowering, criterion, scopes, runs=2):
    """The scores of each block after some runs, by the name of its scope."""
    device = next(p.device for scope in scopes.values() for p in scope.unique_params())
    scorer = Scorer(criterion, device, lowering=lowering)
    for name, scope in scopes.items():
        scorer.attach(name, scope)
    for run in range(runs):
        scores = scorer.score(sources_for(scopes, run))
    return {name: scores[block] for name, scope in scopes.items() for block in scope.blocks()}


def check_agreement(lowering, criterion, scopes, same=None):
    """A lowering gives the scores of the reference, on the same scopes or on those of another device."""
    wanted = scores_by("reference", criterion, same or scopes)
    for name, grid in scores_by(lowering, criterion, scopes).items():
        assert not grid.isnan().any(), f"{name} has scores that are not numbers"
        close, found = wanted[name].cpu(), grid.cpu()
        torch.testing.assert_close(found, close, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


# All are continuous and grow slowly, so that what one rounds otherwise than the other stays a small difference.
UNARY = [
    Abs(),
    Relu(),
    Sigmoid(),
    lambda v: -v,
    lambda v: v * 1.5 - 1,
    lambda v: 0.25 - v,
    lambda v: Square()(Sigmoid()(v)),
    lambda v: Sqrt()(Abs()(v) + 0.25),
    lambda v: Log()(Abs()(v) + 1),
    lambda v: Exp()(-Abs()(v)),
]
BINARY = [
    Maximum(),
    Minimum(),
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: Sigmoid()(a) * b,
    lambda a, b: a / (Abs()(b) + 1),
    lambda a, b: Where()(a > b, a - b, 0.5 * (b - a)),
    lambda a, b: Where()(a >= 0.5, b * (a - 0.5), 0.0),
    lambda a, b: Where()(a < b, 0.0, a - b),
    lambda a, b: Where()(b <= -0.5, a * (b + 0.5), 0),
]
REDUCE = [Sum, Mean, Max, Min, L2Norm]


@st.composite
def flows(draw):
    """A flow that hypothesis puts together from the operations, with a field of state `kept`."""
    earlier = st.integers(0, 10**3)
    unary = st.tuples(st.sampled_from(UNARY), earlier)
    binary = st.tuples(st.sampled_from(BINARY), earlier, earlier)
    steps = draw(st.lists(unary | binary, min_size=2, max_size=9))
    reductions = draw(st.lists(st.sampled_from(REDUCE), min_size=2, max_size=2))

    def flow(x):
        elements = [x.weight, x.grad]
        for operation, *arguments in steps:
            elements.append(operation(*(elements[-1 - at % len(elements)] for at in arguments)))
        first, second = (reduce()(Sigmoid()(v) + 0.5) for reduce, v in zip(reductions, elements[-2:], strict=True))
        pair = Stack()(first, Normalize()(second))
        kept = Load()(x.state["kept"]) * 0.5 + Pick(0)(pair)
        Save()(kept, x.state["kept"])
        return kept + Pick(1)(pair) * 0.125

    return flow
