"""The usual patterns as data; how many weights each prunes is worked out by hand."""

from __future__ import annotations

import torch
from torch import nn

from sparse_lightning import BlockCoupling, BlockSpec, ScopeSpec, View


def prune(scope, sparsity):
    masks = scope.hard_threshold(nnz=scope.sparsity_to_nnz(sparsity))
    return sum(int((spec.data == 0).sum()) for block in masks for spec in block.blocks())


def test_two_of_four():
    """64 × 64 weights in 1024 groups of 4; each loses 2: 2048 weights."""
    weight = nn.Parameter(torch.randn(64, 64))
    scope = ScopeSpec(BlockSpec(weight, (1, 1)), (1, 4))
    assert scope.sparsity_to_nnz(0.5) == 2
    assert prune(scope, 0.5) == 2048
    assert ((weight.view(64, 16, 4) != 0).sum(-1) == 2).all()


def test_pairs_in_four_of_eight():
    """64 × 64 weights in 512 groups of 4 pairs; each loses 2 pairs: 512 · 4 = 2048 weights."""
    weight = nn.Parameter(torch.randn(64, 64))
    scope = ScopeSpec(BlockSpec(weight, (1, 2)), (1, 4))
    assert prune(scope, 0.5) == 2048
    pairs = weight.view(64, 8, 4, 2) != 0
    assert (pairs.all(-1) == pairs.any(-1)).all(), "a pair was torn apart"
    assert (pairs.any(-1).sum(-1) == 2).all()


def test_row_balanced_blocks():
    """128 × 256 weights: 4 rows of 8 blocks of 32 × 32; 75 % of 8 is 6 in each: 4 · 6 · 1024 = 24576 weights."""
    weight = nn.Parameter(torch.randn(128, 256))
    scope = ScopeSpec(BlockSpec(weight, (32, 32)), (1, -1))
    assert prune(scope, 0.75) == 24576
    assert ((scope.block.norms() == 0).sum(-1) == 6).all()


def test_columns_eight_apart():
    """16 rows of 4 runs of 16; in a run 8 pairs (c, c + 8), 2 groups of 4 that lose 2: 16 · 4 · 2 · 2 · 2 = 512."""
    weight = nn.Parameter(torch.randn(16, 64))
    view = View(weight, (16, 4, 8, 2), (64, 16, 1, 8))
    scope = ScopeSpec(BlockSpec(view, (1, 1, 1, 2)), (1, 1, 4, 1))
    assert scope.numblk_per_scope() == 4
    assert prune(scope, 0.5) == 512
    runs = weight.view(16, 4, 2, 8) != 0
    assert torch.equal(runs[:, :, 0], runs[:, :, 1]), "columns eight apart were not pruned together"
    assert (runs[:, :, 0].view(16, 4, 2, 4).sum(-1) == 2).all()


def test_whole_conv_filters():
    """32 filters of 16 · 3 · 3 = 144 weights; half of them: 2304 weights."""
    weight = nn.Parameter(torch.randn(32, 16, 3, 3).contiguous(memory_format=torch.channels_last))
    scope = ScopeSpec(BlockSpec(weight, (1, -1, -1, -1)))
    assert prune(scope, 0.5) == 2304
    assert ((weight != 0).flatten(1).all(1) == (weight != 0).flatten(1).any(1)).all()


def test_neurons_of_an_mlp():
    """48 neurons, each a row of 16 and a column of 16; two thirds are 32: 32 · 32 = 1024 weights."""
    up, down = nn.Linear(16, 48), nn.Linear(48, 16)
    rows, columns = BlockSpec(up.weight, (1, -1)), BlockSpec(down.weight, (-1, 1))
    bias = BlockSpec(View(up.bias, (48, 1), (1, 1)), (1, 1))
    scope = ScopeSpec(BlockCoupling([rows, columns, bias], [None, (1, 0), None]))
    assert prune(scope, 2 / 3) == 1024 + 32
    dead = ~up.weight.any(1)
    assert torch.equal(dead, ~down.weight.any(0))
    x = torch.randn(5, 16)
    small_up, small_down = up.weight[~dead], down.weight[:, ~dead]
    small = torch.relu(x @ small_up.T + up.bias[~dead]) @ small_down.T + down.bias
    torch.testing.assert_close(down(torch.relu(up(x))), small)


def test_heads_of_a_fused_qkv():
    """4 heads of size 8 in width 32: q, k and v rows 3 · 8 · 32 and out columns 32 · 8, 1024 a head; half: 2048."""
    qkv, out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
    inside = BlockSpec(View(qkv.weight, (3, 4, 8, 32), (1024, 256, 32, 1)), (-1, 1, -1, -1))
    outside = BlockSpec(View(out.weight, (32, 4, 8, 1), (32, 8, 1, 1)), (-1, 1, -1, -1))
    scope = ScopeSpec(BlockCoupling([inside, outside]))
    assert scope.numblk_per_scope() == 4
    assert prune(scope, 0.5) == 2048
    dead = ~qkv.weight.view(3, 4, 256).any(-1)
    assert torch.equal(dead[0], dead[1])
    assert torch.equal(dead[0], dead[2])
    assert torch.equal(dead[0], ~out.weight.view(32, 4, 8).any(-1).any(0))
