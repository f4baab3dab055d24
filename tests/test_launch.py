"""How programs share rows: from shapes alone, and each of them finds its own row without a division."""

from __future__ import annotations

import itertools

import pytest

from compiled_kv.launch import FRACTION, Split, is_reciprocal_exact, reciprocal_of, split_rows

BATCHES = (1, 2, 3, 7, 8, 64, 65, 127, 256, 319, 512, 527, 528, 659, 660, 661, 5000)
WIDTHS = (1, 128, 2048, 8192, 1 << 20)


def splits() -> list[tuple[int, Split]]:
    shapes = itertools.product(BATCHES, WIDTHS, (1, 7, 8, 64), (False, True))
    return [(batch, split_rows(batch, *shape, has_unit_stride=True)) for batch, *shape in shapes]


def test_every_program_finds_its_row() -> None:
    for batch, split in splits():
        assert is_reciprocal_exact(batch, split.parts)
        for program in range(batch * split.parts):
            part = min(program * reciprocal_of(batch) >> FRACTION, split.parts - 1)
            assert part == program // batch


@pytest.mark.parametrize(("batch", "parts"), [(1025, 2), (32768, 2), (600, 4)])
def test_programs_beyond_the_reciprocal_are_known(batch: int, parts: int) -> None:
    assert not is_reciprocal_exact(batch, parts)


def test_a_row_gets_no_more_programs_than_it_has_turns() -> None:
    assert all(split.parts == 1 for batch, split in splits() if batch >= 1000)
    assert split_rows(1, 1, 64, False, True).parts == 1
    assert split_rows(8, 256, 64, False, True).parts == 2


def test_only_rows_wider_than_their_programs_turns_get_helpers() -> None:
    assert split_rows(8, 1024, 64, False, True).helpers == 0
    assert split_rows(512, 1 << 14, 64, False, True).helpers == 128


def test_other_strides_take_half_the_columns() -> None:
    for is_mapped in (False, True):
        halves = [split_rows(8, 1024, 64, is_mapped, unit).block for unit in (True, False)]
        assert halves[0] == 2 * halves[1]
