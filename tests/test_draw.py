"""draw: what is shown is what block operations reach, and nothing else is touched."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from graph_models import PLAIN
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.image import imread
from matplotlib.text import Text
from strategies import block_shapes, offsets, views

from sparse_lightning import (
    BlockCoupling,
    BlockSpec,
    CouplingError,
    Layout,
    LayoutError,
    ScopeCoupling,
    ScopeSpec,
    View,
    couplings,
)
from sparse_lightning.drawing import PALETTE, colours_of, draw
from sparse_lightning.drawing.block_map import NO_BLOCK, BlockMap, block_maps_of, number_elements
from sparse_lightning.drawing.family_block import family_block


def expected_numbers(spec: BlockSpec) -> list[int]:
    """The block of each element of the parameter in row-major order, by index arithmetic."""
    number_at = {}
    for coord, offset in zip(itertools.product(*map(range, spec.view.shape)), offsets(spec.view.layout), strict=True):
        block = [x // b for x, b in zip(coord, spec.shape, strict=True)]
        number_at[offset] = Layout(spec.grid_shape)(block)
    return [number_at.get(offset, NO_BLOCK) for offset in offsets(Layout.of(spec.param))]


def block_map_of(spec: BlockSpec, max_side: int = 512) -> BlockMap:
    [block_map] = block_maps_of(spec, max_side)
    return block_map


def hatched(figure) -> int:
    """How many elements are hatched, in all maps."""
    return sum(len(axes.collections[0].get_segments()) for axes in figure.axes if axes.collections)


def pixels(figure, number: int = 0) -> np.ndarray:
    return np.asarray(figure.axes[number].images[0].get_array())


def caption_of(axes) -> str:
    return axes.get_title(loc="left")


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


def neurons(n: int = 6) -> BlockCoupling:
    up, down = BlockSpec(weight(n, 4), (1, -1), name="up"), BlockSpec(weight(3, n), (-1, 1), name="down")
    return BlockCoupling([up, down], orders=[None, (1, 0)], name="neurons")


@given(st.data())
def test_every_element_has_the_number_of_its_block(data):
    view = data.draw(views())
    spec = BlockSpec(view, data.draw(block_shapes(view.shape, divide=False)), edge="partial")
    assert block_map_of(spec).numbers.ravel().tolist() == expected_numbers(spec)


@given(st.data())
def test_a_cropped_picture_is_a_part_of_the_whole_one(data):
    view = data.draw(views())
    spec = BlockSpec(view, data.draw(block_shapes(view.shape, divide=False)), edge="partial")
    max_side = data.draw(st.integers(1, 5))
    whole, part = block_map_of(spec), block_map_of(spec, max_side)
    assert max(part.numbers.shape) <= max_side
    (row, column), (rows, columns) = part.origin, part.numbers.shape
    assert (part.numbers == whole.numbers[row : row + rows, column : column + columns]).all()
    assert part.is_cropped == (part.numbers.size < whole.numbers.size)
    assert (part.numbers != NO_BLOCK).any(), "a cropped picture shows at least one block"


@given(st.data())
def test_scopes_are_numbered_as_they_gather_their_blocks(data):
    shape = data.draw(st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8])))
    spec = BlockSpec(torch.zeros(shape), data.draw(block_shapes(shape)))
    scope = ScopeSpec(spec, data.draw(block_shapes(spec.grid_shape)))
    scopes = block_maps_of(scope)[0].numbers // scope.numblk_per_scope()
    assert set(scopes.ravel()) == set(range(scope.numscp()))
    sizes = [b * s for b, s in zip(spec.shape, scope.shape, strict=True)]
    for i, j in itertools.product(*map(range, shape)):
        assert scopes[i, j] == Layout(scope.grid_shape)((i // sizes[0], j // sizes[1]))


@given(st.data())
def test_neighbours_differ_in_colour(data):
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    order = data.draw(st.permutations(range(rows * columns)))
    image = np.array(order).reshape(rows, columns).repeat(2, 0)
    seen = colours_of([image])[image]
    assert (seen[:, 1:] != seen[:, :-1]).all()
    assert (seen[2:] != seen[:-2]).all()
    assert seen.max() < len(PALETTE)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 3, 4), (3, 2, 3, 3)], ids=str)
@pytest.mark.parametrize("edge", ["error", "partial"])
def test_as_many_elements_are_hatched_as_the_mask_prunes(shape, edge):
    block = (1, -1) if edge == "error" else (2, 2)
    spec = BlockSpec(weight(*shape), block[: len(shape)], edge=edge)
    mask = torch.arange(spec.numblk()).view(spec.grid_shape) % 3 == 0
    figure = draw(spec, mask)
    assert hatched(figure) == int(spec.get_masks(mask)[spec].sum())
    assert pixels(figure).shape[:2] == (shape[0] if len(shape) > 1 else 1, math.prod(shape[1:] or shape))


def test_pruned_elements_stand_where_the_weights_become_zero():
    param = weight(8, 32)
    pairs = BlockSpec(View(param, (8, 2, 8, 2), (32, 16, 1, 8)), (1, 1, 1, 2))
    scope = ScopeSpec(pairs, (1, 1, 4, 1))
    mask = scope.select(pairs.norms(), 2)
    image = pixels(draw(scope, mask))
    pairs.apply_mask(mask)
    pale = image.min(-1) > 0.75
    assert (pale == (param.detach() == 0).numpy()).all()


def test_columns_eight_apart_form_one_block():
    spec = BlockSpec(View(weight(2, 32), (2, 2, 8, 2), (32, 16, 1, 8)), (1, 1, 1, 2))
    numbers = block_maps_of(spec)[0].numbers
    first = [*range(8), *range(8)]
    assert numbers[0].tolist() == first + [8 + x for x in first]
    assert numbers[1].tolist() == [16 + x for x in numbers[0]]


def test_a_transposed_parameter_is_drawn_in_its_own_coordinates():
    spec = BlockSpec(torch.zeros(4, 6).t(), (3, 4))
    assert (block_maps_of(spec)[0].numbers == np.repeat([[0], [1]], 3, 0)).all()
    assert block_maps_of(spec)[0].numbers.shape == (6, 4)


def test_a_view_with_negative_strides_counts_backwards():
    spec = BlockSpec(View(torch.zeros(6), (3,), (-2,), offset=5), (1,))
    assert block_maps_of(spec)[0].numbers.tolist() == [[-1, 2, -1, 1, -1, 0]]


def test_elements_outside_of_the_view_are_white():
    image = pixels(draw(BlockSpec(View(torch.zeros(4, 4), (2, 4), (4, 1), offset=8), (1, -1))))
    assert (image[:2] == 1).all()
    assert not (image[2:] == 1).all(-1).any()


def test_coupled_blocks_have_one_colour_in_all_maps():
    coupling = neurons()
    up, down = pixels(draw(coupling)), pixels(draw(coupling), 1)
    assert (up[:, 0] == down[0]).all()
    assert len(np.unique(up[:, 0], axis=0)) == coupling.numblk()


def test_views_of_one_parameter_share_a_map():
    qkv, out = weight(12, 4), weight(4, 4)
    parts = [BlockSpec(View(qkv, (4, 4), (4, 1), offset=16 * i), (2, -1), name="qkv"[i]) for i in range(3)]
    heads = BlockCoupling([*parts, BlockSpec(out, (-1, 2), name="out")], orders=[None] * 3 + [(1, 0)])
    figure = draw(heads, torch.tensor([[True], [False]]))
    assert len(figure.axes) == 2
    assert [block_map.numbers[:, 0].tolist() for block_map in block_maps_of(heads)] == [[0, 0, 1, 1] * 3, [0] * 4]
    assert hatched(figure) == heads.numel() // 2


def test_coupled_scopes_are_laid_on_one_another():
    a, b = BlockSpec(weight(4, 6), (1, 1), name="a"), BlockSpec(weight(3, 4), (1, 1), name="b")
    coupled = ScopeCoupling([ScopeSpec(a, (1, -1)), ScopeSpec(b, (-1, 1))], orders=[None, (1, 0)], name="both")
    masks = coupled.select({a: a.norms(), b: b.norms()}, 4)
    figure = draw(coupled, masks)
    assert hatched(figure) == 4 * 5
    left, right = (block_map.numbers // coupled.numblk_per_scope() for block_map in block_maps_of(coupled))
    assert (left == np.arange(4)[:, None]).all()
    assert (right == np.arange(4)).all()


def test_masks_are_taken_in_every_form_that_select_gives():
    block = BlockSpec(weight(4, 8), (1, 1))
    scope = ScopeSpec(block, (1, 4))
    grid, gathered = scope.select(block.norms(), 1), scope.select(scope.block_norms(), 1)
    images = [pixels(draw(scope, mask)) for mask in (grid, gathered, {block: grid})]
    assert (images[0] == images[1]).all()
    assert (images[0] == images[2]).all()


def test_title_and_caption_say_what_is_drawn():
    pairs = BlockSpec(View(weight(8, 32), (8, 2, 8, 2), (32, 16, 1, 8)), (1, 1, 1, 2), name="fc.weight")
    figure = draw(ScopeSpec(pairs, (1, 1, 4, 1), name="pairs"), torch.zeros(8, 2, 8, 1, dtype=torch.bool))
    assert figure.get_suptitle().splitlines()[0] == "pairs: 32 scopes of 4 blocks; 0 of 128 blocks pruned"
    caption = caption_of(figure.axes[0])
    for words in ("parameter 8×32", "fc.weight", "view 8×2×8×2", "block 1×1×1×2", "grid 8×2×8×1", "scope 1×1×4×1"):
        assert words in caption


@pytest.mark.parametrize(
    "make", [neurons, lambda: BlockSpec(weight(2, 3), (1, 1)), lambda: BlockSpec(weight(9), (4,), edge="partial")]
)
def test_text_does_not_overlap_and_stays_on_the_page(make):
    figure = draw(make())
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    captions = [text for axes in figure.axes for text in axes.findobj(Text) if text.get_text() == caption_of(axes)]
    assert len(captions) == len(figure.axes)
    labels = [axes.xaxis.label for axes in figure.axes]
    boxes = [text.get_window_extent(renderer) for text in (*figure.texts, *captions, *labels)]
    assert [text.get_text() for text in figure.texts] == [figure.get_suptitle()]
    page = figure.bbox
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= page.x1
        assert box.y1 <= page.y1
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)


def test_drawing_leaves_weights_alone():
    param = weight(8, 8)
    before, loss = param.detach().clone(), param.square().sum()
    spec = BlockSpec(param, (2, 2))
    draw(ScopeSpec(spec, (1, -1)), spec.norms() < 1)
    assert torch.equal(param, before)
    assert param.grad is None
    loss.backward()  # raises an error if anything was written to the weights, even the same values


def test_a_parameter_without_storage_can_be_drawn():
    assert pixels(draw(BlockSpec(torch.empty(4, 4, device="meta"), (2, 2)))).shape == (4, 4, 3)


def test_no_figure_is_left_in_pyplot():
    draw(BlockSpec(weight(4, 4), (2, 2)))
    assert pyplot.get_fignums() == []


def test_the_saved_picture_shows_the_colours(tmp_path):
    scope = ScopeSpec(BlockSpec(weight(8, 8), (2, 2)), (1, -1))
    draw(scope, torch.eye(4, dtype=torch.bool)).savefig(tmp_path / "scopes.png")
    picture = imread(tmp_path / "scopes.png")[..., :3]
    assert min(picture.shape[:2]) > 200
    for colour in PALETTE[:4]:
        assert (abs(picture - colour).max(-1) < 0.01).mean() > 0.005, f"colour {colour} is not in the picture"


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1)], ids=str)
def test_the_smallest_parameters(shape, tmp_path):
    draw(BlockSpec(torch.zeros(shape), (1,) * len(shape))).savefig(tmp_path / "small.png")
    assert (tmp_path / "small.png").stat().st_size > 0


def test_a_large_parameter_is_cropped_to_where_its_view_begins():
    qkv = torch.empty(3 * 1024, 1024)
    value = BlockSpec(View(qkv, (1024, 1024), (1024, 1), offset=2048 * 1024), (32, 32))
    (block_map,) = block_maps_of(value)
    assert block_map.origin == (2048, 0)
    assert block_map.numbers.shape == (256, 256)
    assert np.unique(block_map.numbers).size == 8 * 8
    caption = caption_of(draw(value).axes[0]).replace("\n  ", "")
    assert "only rows 2048–2303 and columns 0–255 are drawn" in caption


def test_a_diagonal_of_a_large_parameter_is_found_though_it_can_not_be_cut():
    diagonal = BlockSpec(View(torch.empty(300, 300), (300,), (301,)), (1,))
    (block_map,) = block_maps_of(diagonal)
    assert (block_map.numbers == np.where(np.eye(256, dtype=bool), np.arange(256), NO_BLOCK)).all()


def test_numbers_are_spread_over_a_box():
    spec = BlockSpec(torch.empty(4, 6), (2, 3))
    found = number_elements(spec, torch.tensor([[7, 8], [9, 10]]), ((1, 3), (2, 4)))
    assert found.tolist() == [[7, 8], [9, 10]]


def test_a_view_that_overlaps_itself_raises():
    with pytest.raises(LayoutError, match="contains some element twice"):
        draw(BlockSpec(View(torch.zeros(6), (3, 3), (1, 1)), (1, 1)))


def test_masks_that_do_not_fit_raise():
    block = BlockSpec(weight(4, 4), (2, 2), name="fc")
    with pytest.raises(LayoutError, match=r"torch.float32.*'fc'.*boolean grid of shape \(2, 2\)"):
        draw(block, torch.zeros(2, 2))
    with pytest.raises(LayoutError, match=r"shape \(4, 4\).*'fc'"):
        draw(block, torch.zeros(4, 4, dtype=torch.bool))
    other = BlockSpec(weight(4, 4), (2, 2), name="other")
    coupled = ScopeCoupling([ScopeSpec(block), ScopeSpec(other)], name="both")
    with pytest.raises(CouplingError, match=r"'both'.*mapping from each of its 2 blocks"):
        draw(coupled, torch.zeros(2, 2, dtype=torch.bool))
    with pytest.raises(CouplingError, match=r"no mask for.*'other'"):
        draw(coupled, {block: torch.zeros(2, 2, dtype=torch.bool)})


@pytest.mark.parametrize("name", ["mlp", "fused", "interleaved", "doubled", "shuffle", "transposed"])
def test_a_family_is_drawn_over_all_its_parameters(name):
    case = PLAIN[name]
    for family in couplings(case.build(), case.inputs):
        block = family_block(family)
        for drawn in block_maps_of(block):
            [parameter] = {spec.name for spec in block.blocks() if spec.name in drawn.lines[0]}
            wanted = torch.full(drawn.shape, NO_BLOCK)
            for part in family.slices:
                if part.name == parameter:
                    for unit in range(family.units):
                        rows = [part.indices.slice(0, unit, unit + 1)(c) for c in coordinates(part.indices.shape[1:])]
                        wanted.index_fill_(part.dim, torch.tensor(rows), unit)
            assert drawn.numbers.ravel().tolist() == wanted.flatten().tolist(), f"{family.name}, {parameter}"


def coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The coordinates of one unit."""
    return [(0, *rest) for rest in itertools.product(*map(range, shape))]


def test_pruned_units_of_a_family_are_hatched():
    [family, _] = couplings(PLAIN["mlp"].build(), PLAIN["mlp"].inputs)
    figure = draw(family, torch.arange(8) < 3)
    assert figure.get_suptitle().splitlines()[0] == "0 (units): 8 blocks of 11 weights; 3 of 8 blocks pruned"
    assert hatched(figure) == 3 * 11
    assert [caption_of(axes).splitlines()[1].split(":")[0] for axes in figure.axes] == [
        "0.weight",
        "0.bias",
        "2.weight",
    ]
    with pytest.raises(LayoutError, match="does not fit"):
        draw(family, torch.arange(7) < 3)
