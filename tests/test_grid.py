"""Raster geometry against brute force over cells."""

import itertools

import pytest
import torch

from draftgrid.heads.grid import TokenGrid, offset_name

SHAPES = [(2, 5), (5, 2), (1, 7), (7, 1), (3, 3), (1, 1)]
OFFSETS = [(0, 1), (0, 2), (0, 5), (1, 0), (2, 0), (4, 0), (1, 1), (1, -1), (2, -3), (3, 4), (0, 9), (9, 0)]


@pytest.mark.parametrize("row_end", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_are_exactly_the_cells_an_offset_connects(shape: tuple[int, int], row_end: int) -> None:
    H, W = shape
    grid = TokenGrid(H, W, row_end)
    for dy, dx in OFFSETS:
        expected = []
        for y, x in itertools.product(range(H), range(W)):
            if 0 <= y + dy < H and 0 <= x + dx < W:
                expected.append((y * W + x, (y + dy) * W + x + dx))
        source, target = grid.pairs((dy, dx))
        assert list(zip(source.tolist(), target.tolist(), strict=True)) == expected, (dy, dx)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_pair_crosses_a_row_end(shape: tuple[int, int]) -> None:
    H, W = shape
    for dy, dx in OFFSETS:
        source, target = TokenGrid(H, W).pairs((dy, dx))
        assert torch.equal(target % W - source % W, torch.full_like(source, dx))
        assert torch.equal(target // W - source // W, torch.full_like(source, dy))


@pytest.mark.parametrize("row_end", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_target_refers_to_the_right_token_at_every_row_end(shape: tuple[int, int], row_end: int) -> None:
    """The sequence is written out token by token, structure tokens as negative numbers, image tokens as arange."""
    H, W = shape
    grid = TokenGrid(H, W, row_end)
    sequence: list[int] = []
    for y in range(H):
        sequence += [y * W + x for x in range(W)] + [-1 - s for s in range(row_end)]
    sequence = sequence[: len(sequence) - row_end]
    tokens = torch.arange(H * W)
    assert grid.slots == len(sequence)
    assert [sequence[s] for s in grid.image_slots().tolist()] == tokens.tolist()
    for offset in OFFSETS:
        for source, target in zip(*(t.tolist() for t in grid.pairs(offset)), strict=True):
            slot = int(grid.slot(torch.tensor(target)))
            assert sequence[slot] == int(tokens[target])
            # The state that predicts the target sits one slot earlier: at a row's first cell, on the structure token.
            if slot and target % W == 0 and row_end:
                assert sequence[slot - 1] < 0
            elif slot:
                assert sequence[slot - 1] == target - 1
            assert divmod(target, W) == (source // W + offset[0], source % W + offset[1])


@pytest.mark.parametrize("row_end", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_and_structure_slots_partition_the_sequence(shape: tuple[int, int], row_end: int) -> None:
    H, W = shape
    grid = TokenGrid(H, W, row_end)
    image, structure, slot = [], [], 0
    for _ in range(H):
        for column in range(W + row_end):
            (image if column < W else structure).append(slot)
            slot += 1
    assert grid.stride == W + row_end
    assert grid.image_slots().tolist() == image
    assert grid.is_structure(torch.arange(slot)).nonzero().flatten().tolist() == structure


def test_an_offset_that_leaves_the_grid_everywhere_has_no_pair() -> None:
    source, target = TokenGrid(2, 5).pairs((2, 0))
    assert source.numel() == target.numel() == 0


@pytest.mark.parametrize("size", [(0, 5, 1), (5, 0, 1), (-2, 5, 0), (5, 5, -1)])
def test_a_bad_size_is_refused_by_its_numbers(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {size[0]}, {size[1]}, {size[2]}"):
        TokenGrid(*size)


@pytest.mark.parametrize("offset", [(0, 0), (0, -1), (-1, 0), (-1, 3)])
def test_an_offset_to_a_known_token_is_refused_by_its_value(offset: tuple[int, int]) -> None:
    with pytest.raises(ValueError) as error:
        TokenGrid(4, 4).pairs(offset)
    assert str(offset) in str(error.value)


def test_offset_names_are_readable_and_distinct() -> None:
    assert offset_name((0, 3)) == "right3"
    assert offset_name((2, 0)) == "down2"
    assert offset_name((1, -1)) == "down1right-1"
    assert len({offset_name(o) for o in OFFSETS}) == len(OFFSETS)
