"""Cut parameters: what shards reduce adds up to the whole, what they write equals the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import block_shapes, shapes, tensors, walks

from sparse_lightning import BlockSpec, Layout, LayoutError, View
from sparse_lightning.blocks import alike_blocks
from sparse_lightning.blocks.alike_blocks import AlikeBlocks, CopyRoom
from sparse_lightning.blocks.reductions import MAX, MIN, SUM
from sparse_lightning.kernels.block_score import native, reference
from sparse_lightning.layout.regions import cut, regions, whole

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler on x86 Linux")


def boxes_of(shape, cuts):
    """The boxes between cuts, given for each dimension; empty ones included."""
    bounds = [[0, *sorted(c), n] for c, n in zip(cuts, shape, strict=True)]
    return list(itertools.product(*(list(itertools.pairwise(b)) for b in bounds)))


def local_of(tensor, box):
    """What one rank holds of a tensor: a tensor of its own."""
    return tensor.detach()[tuple(slice(lo, hi) for lo, hi in box)].clone(memory_format=torch.contiguous_format)


@st.composite
def cut_specs(draw, signed=True):
    """A spec on a view of a parameter, smaller blocks at the edge allowed, and the boxes of a cut parameter."""
    param = draw(tensors(shape=draw(shapes(max_dims=3, max_numel=128))))
    layout = draw(walks(Layout.of(param), signed=signed, kinds=["permute", "slice", "step", "flip", "split", "insert"]))
    view = View(param, layout.shape, layout.stride, layout.offset)
    spec = BlockSpec(view, draw(block_shapes(view.shape, divide=False)), edge="partial")
    cuts = [draw(st.lists(st.integers(0, n), max_size=2)) for n in param.shape]
    return spec, boxes_of(param.shape, cuts)


@given(cut_specs(), st.sampled_from([SUM, MAX, MIN]))
def test_reductions_of_the_parts_combine_to_the_reduction_of_the_whole(case, reduction):
    spec, boxes = case
    total = reference.start(reduction.kind, spec.grid_shape, spec.param)
    for box in boxes:
        total = reduction.combine(total, spec.part_of_box(local_of(spec.param, box), box).reduce(reduction))
    assert torch.equal(total, spec.part().reduce(reduction))


def folded_in_place(spec, box, reduction):
    """What the native kernel folds of a box, where it is."""
    local, grid = local_of(spec.param, box), reference.start(reduction.kind, (1, *spec.grid_shape), spec.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike_blocks, "held", lambda _: local)
        patch.setattr(spec, "part", lambda *_: spec.part_of_box(local, box))
        AlikeBlocks([spec], []).fold_into([grid], reduction.stage, native.fold, CopyRoom())
    return grid[0]


@needs_compiler
@given(cut_specs(), st.sampled_from([SUM, MAX]))
def test_the_native_kernel_folds_each_part_where_it_is(case, reduction):
    spec, boxes = case
    total = reference.start(reduction.kind, spec.grid_shape, spec.param)
    for box in boxes:
        total = reduction.combine(total, folded_in_place(spec, box, reduction))
    torch.testing.assert_close(total, spec.part().reduce(reduction))


@needs_compiler
def test_pieces_of_a_shard_that_all_belong_to_one_block_add_up():
    """The shard holds the end of the first row of the view and the beginning of the second."""
    weight = torch.arange(24.0).view(4, 6) + 1
    spec = BlockSpec(View(weight, (2, 12), (12, 1)), (-1, -1))
    assert folded_in_place(spec, ((1, 3), (0, 6)), SUM).item() == weight[1:3].sum().item()


@given(cut_specs(), st.data())
def test_masks_applied_to_the_parts_are_the_mask_applied_to_the_whole(case, data):
    spec, boxes = case
    bits = data.draw(st.lists(st.booleans(), min_size=spec.numblk(), max_size=spec.numblk()))
    mask = torch.tensor(bits).view(spec.grid_shape)
    locals_ = [local_of(spec.param, box) for box in boxes]
    for local, box in zip(locals_, boxes, strict=True):
        spec.part_of_box(local, box).fill_(mask)
    spec.apply_mask(mask)
    for local, box in zip(locals_, boxes, strict=True):
        assert torch.equal(local, local_of(spec.param, box)), f"the box {box} differs from the whole"


@given(cut_specs())
def test_every_element_of_a_view_lies_in_the_pieces_of_exactly_one_box(case):
    spec, boxes = case
    seen = torch.zeros(spec.view.shape, dtype=torch.int64)
    base = Layout.of(spec.param)
    for box in boxes:
        local = Layout([hi - lo for lo, hi in box])
        for piece in cut(spec.view.layout, base, box, local):
            seen[tuple(slice(lo, hi) for lo, hi in piece.box)] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("rows", range(0, 25))
def test_a_fused_qkv_cut_at_every_row(rows):
    """(3 · heads · size, width) seen as (3, heads, size, width): a row of the cut lies within a head."""
    weight = torch.arange(24 * 4.0).view(24, 4) + 1
    heads = BlockSpec(View(weight, (3, 4, 2, 4), (32, 8, 4, 1)), (-1, 1, -1, -1), name="qkv")
    assert heads.grid_shape == (1, 4, 1, 1)
    parts = [heads.part_of_box(weight[a:b].clone(), ((a, b), (0, 4))) for a, b in ((0, rows), (rows, 24))]
    assert torch.equal(parts[0].reduce(SUM) + parts[1].reduce(SUM), weight.view(3, 4, 8).sum((0, 2)).view(1, 4, 1, 1))
    mask = torch.tensor([True, False, False, True]).view(1, 4, 1, 1)
    for part in parts:
        part.fill_(mask)
    together = torch.cat([p.tensors[0] for p in parts]).view(3, 4, 8)
    assert not together[:, [0, 3]].any()
    assert torch.equal(together[:, [1, 2]], weight.view(3, 4, 8)[:, [1, 2]])


@pytest.mark.parametrize("columns", range(0, 13))
def test_a_flattened_view_of_a_parameter_cut_along_its_columns(columns):
    """Each row of the shard is a stretch of its own in the flat view."""
    weight = torch.arange(5 * 12.0).view(5, 12) + 1
    spec = BlockSpec(View(weight, (60,), (1,)), (7,), edge="partial")
    parts = [spec.part_of_box(weight[:, a:b].clone(), ((0, 5), (a, b))) for a, b in ((0, columns), (columns, 12))]
    assert torch.equal(parts[0].reduce(SUM) + parts[1].reduce(SUM), spec.part().reduce(SUM))


def test_a_conv_weight_seen_as_a_matrix_and_sharded_by_filters():
    weight = torch.randn(10, 6, 3, 3)
    spec = BlockSpec(View(weight, (10, 54), (54, 1)), (4, 32), edge="partial")
    bounds = [(0, 3), (3, 3), (3, 10)]
    parts = [spec.part_of_box(weight[a:b].clone(), ((a, b), (0, 6), (0, 3), (0, 3))) for a, b in bounds]
    total = sum(part.reduce(SUM) for part in parts)
    torch.testing.assert_close(total, spec.part().reduce(SUM))


def test_a_shard_of_a_large_parameter_is_a_short_list_of_rectangles():
    """100 rows of 32-row blocks on 3 ranks: head, body and tail, not a list as long as the parameter."""
    base = Layout((4096, 1 << 16))
    found = regions(base, base, (32, 32), ((1366, 2732), (5, 60000)), Layout((1366, 59995)))
    assert len(found) <= 9
    flat = Layout((4096 * (1 << 16),))
    assert len(regions(flat, base, (1024,), ((1366, 2732), (0, 1 << 16)), Layout((1366, 1 << 16)))) <= 3


def test_an_empty_shard_holds_nothing_and_takes_any_mask():
    spec = BlockSpec(torch.ones(4, 4), (2, 2))
    part = spec.part_of_box(torch.ones(0, 4), ((4, 4), (0, 4)))
    assert part.reduce(SUM).tolist() == [[0, 0], [0, 0]]
    part.fill_(torch.ones(2, 2, dtype=torch.bool))


def test_a_box_that_does_not_fit_its_local_tensor_raises_an_error():
    spec = BlockSpec(torch.ones(4, 4), (2, 2))
    with pytest.raises(LayoutError, match=r"does not have the shape of its local part"):
        spec.part_of_box(torch.ones(3, 4), ((0, 2), (0, 4)))


def test_a_view_across_dimensions_can_not_be_cut_through_them():
    weight = torch.ones(4, 4)
    diagonal = BlockSpec(View(weight, (4,), (5,)), (1,))
    with pytest.raises(LayoutError, match=r"can't be cut .* crosses its dimensions"):
        diagonal.part_of_box(torch.ones(4, 2), ((0, 4), (0, 2)))


def test_the_whole_is_the_box_of_all():
    assert whole((2, 3)) == ((0, 2), (0, 3))
