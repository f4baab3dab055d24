"""How programs share the rows of page tables: how many there are, which row is whose, where a long one is cut, and what
is read ahead of a turn.

Kernels of their own run the device functions, interpreted in a process of its own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kv import KVLayout, decode_metadata, reference
from compiled_kv.columns_triton import fill_turns
from compiled_kv.launch import kernel, launch, tl
from compiled_kv.long_rows_triton import own_blocks
from compiled_kv.rows_triton import place_of
from compiled_kv.sharing import FRACTION, Split, is_reciprocal_exact, reciprocal_of, split_rows
from tests.conftest import INTERPRETED, take_small_sizes

interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernel of this test runs interpreted")
BATCHES = (1, 2, 3, 7, 8, 64, 65, 127, 256, 319, 512, 527, 528, 659, 660, 661, 5000)
WIDTHS = (1, 128, 2048, 8192, 1 << 20)


def splits() -> list[tuple[int, Split]]:
    shapes = itertools.product(BATCHES, WIDTHS, (1, 8), (False, True))
    return [
        (batch, split_rows(batch, width, page_size, is_mapped=is_mapped, has_unit_stride=True))
        for batch, width, page_size, is_mapped in shapes
    ]


def wrong_parts(batch: int, parts: int) -> int:
    """Programs whose part `place_of` would get wrong, by its formula in Python ints."""
    found = (min(turn * reciprocal_of(batch) >> FRACTION, parts - 1) for turn in range(batch * parts))
    return sum(part != turn // batch for turn, part in enumerate(found))


def test_every_program_finds_its_row() -> None:
    for batch, split in splits():
        assert is_reciprocal_exact(batch, split.parts)
        assert wrong_parts(batch, split.parts) == 0


def test_too_many_programs_for_the_reciprocal_are_known() -> None:
    assert wrong_parts(1025, 2) > 0
    assert not is_reciprocal_exact(1025, 2)


def test_a_large_batch_has_one_program_a_row() -> None:
    assert all(split.parts == 1 for batch, split in splits() if batch >= 1000)


def split_of(batch: int, width: int, **given: bool) -> Split:
    return split_rows(batch, width, 64, **{"is_mapped": False, "has_unit_stride": True, **given})


def test_a_row_gets_no_more_programs_than_it_has_turns() -> None:
    assert split_of(1, 1).parts == 1
    assert split_of(8, 256).parts == 2


def test_only_rows_wider_than_their_programs_turns_get_helpers() -> None:
    assert split_of(8, 1024).helpers == 0
    assert split_of(512, 1 << 14).helpers == 32


def test_other_strides_take_half_the_columns() -> None:
    for is_mapped in (False, True):
        whole = split_of(8, 1024, is_mapped=is_mapped).block
        assert whole == 2 * split_of(8, 1024, is_mapped=is_mapped, has_unit_stride=False).block


@kernel
def _place_kernel(out_ptr, batch_size, parts, reciprocal, CHUNK: tl.constexpr):
    program = tl.program_id(0)
    turn, row, part = place_of(program, batch_size, batch_size, tl.zeros([], tl.int64) + parts, reciprocal, CHUNK)
    tl.store(out_ptr + 3 * program, turn)
    tl.store(out_ptr + 3 * program + 1, row)
    tl.store(out_ptr + 3 * program + 2, part)


@interpreted
@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (3, 1), (3, 7), (7, 3), (9, 2)])
def test_places(batch: int, parts: int) -> None:
    chunks = -(-batch // 4)
    out = torch.full((chunks + batch * parts, 3), -9)
    given: dict[str, Any] = {"out_ptr": out}
    launch(_place_kernel, (len(out),), **given, batch_size=batch, parts=parts, reciprocal=reciprocal_of(batch), CHUNK=4)
    assert [turn for turn, _, _ in out.tolist()] == list(range(-chunks, batch * parts))
    assert out[chunks:, 1:].tolist() == [[turn % batch, turn // batch] for turn in range(batch * parts)]


@kernel
def _cut_kernel(
    seq_lens_ptr, indices_ptr, out_ptr, pool_rows, active, cap, width, parts, helpers,
    TURNS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    own = own_blocks(
        seq_lens_ptr, 1, indices_ptr, 1, pool_rows, active, 0, cap, width, tl.zeros([], tl.int32) + parts,
        tl.zeros([], tl.int32) + helpers, 1, TURNS, BLOCK, SCAN,
    )  # fmt: skip
    tl.store(out_ptr, own)


@kernel
def _last_turn_kernel(pool_ptr, map_ptr, page_ptr, swa_ptr, width, part, parts, BLOCK: tl.constexpr):
    """The last turn over a padding row of `width` columns, into tensors that begin with that turn's first column."""
    part, parts = tl.zeros([], tl.int64) + part, tl.zeros([], tl.int64) + parts
    is_live = parts < 0  # never
    fill_turns(
        tl.zeros([BLOCK], tl.int32), pool_ptr, 1, width, 0, is_live, page_ptr - part * BLOCK, swa_ptr - part * BLOCK,
        map_ptr, 1, 1, tl.zeros([], tl.int32), width, part * BLOCK, parts * BLOCK, None,
        1, False, True, False, True, BLOCK,
    )  # fmt: skip


def cut(blocks: list[int], parts: int, helpers: int) -> int:
    out = torch.zeros(1, dtype=torch.int32)
    lengths, rows = torch.tensor(blocks) * 4, torch.arange(len(blocks))
    given: dict[str, Any] = {"seq_lens_ptr": lengths, "indices_ptr": rows, "out_ptr": out}
    launch(
        _cut_kernel, (1,), **given, pool_rows=len(blocks), active=len(blocks), cap=4000, width=4000, parts=parts,
        helpers=helpers, TURNS=2, BLOCK=4, SCAN=4,
    )  # fmt: skip
    return int(out)


@interpreted
@pytest.mark.parametrize(
    ("blocks", "parts", "helpers"),
    [
        ([40, 40, 40, 40, 9, 9, 9, 9], 1, 1),
        ([40, 40, 40, 40, 9, 9, 9, 9], 2, 4),
        ([64, *[5] * 30], 2, 2),
        ([100, 50, 25, 12, 6, 3], 1, 2),
        ([7, 7, 7], 3, 3),
    ],
)
def test_help_makes_no_program_the_slower(blocks: list[int], parts: int, helpers: int) -> None:
    own = cut(blocks, parts, helpers)
    left = sum(max(count - own, 0) for count in blocks)
    without_help = -(-max(blocks) // parts)
    assert -(-own // parts) <= max(without_help, 2)
    assert -(-left // helpers) <= without_help


@interpreted
def test_rows_of_one_length_are_shared_evenly() -> None:
    assert cut([60, 60], 1, 2) == 30  # four programs, thirty blocks each


@interpreted
def test_few_helpers_leave_many_long_rows_alone() -> None:
    assert cut([60] * 5, 1, 2) == 60
    assert cut([60] * 4, 1, 2) < 60


@interpreted
@pytest.mark.parametrize("columns", range(7, 15))
def test_what_lies_around_the_cut_is_written(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of a row write four columns each, and helpers the rest, two at a time."""
    take_small_sizes(monkeypatch, {"LEAST": 1, "BLOCK": 2, "LONG": 4, "SHARED": 2, "PROGRAMS": 12, "HELPERS": 3})
    layout = KVLayout(page_size=8, max_context_len=128)
    pool = torch.arange(8, 8 + 5 * 128).view(5, 128).flip(0)
    given = pool, torch.arange(5), torch.tensor([5, 8 * columns, 9, 8, 0])
    found, (wanted, _) = decode_metadata(*given, layout=layout), reference.decode_metadata(*given, layout=layout)
    assert split_rows(5, layout.max_num_pages, 8, is_mapped=False, has_unit_stride=True)[2:6] == (2, 4, 2, 3)
    assert torch.equal(found.page_table, wanted.page_table)


@interpreted
@pytest.mark.parametrize(
    "columns",
    [
        (20, 4, 18, 40, 2, 32),  # what two rows leave, that lie in two looks at the lengths
        (2, 4, 40, 32, 18, 20),  # in one look
        (38, 2, 4, 37, 3, 38),  # and an uneven number of blocks each
        (26, 2, 40, 2, 40, 2),  # one block alone, which one of them has no part in
        (2, 40, 3, 2, 4, 1),  # one row for both helpers
    ],
)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_helpers_go_on_from_row_to_row(
    columns: tuple[int, ...], is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program a row; two helpers take two columns at a time, and look at two lengths at once."""
    sizes = {"LEAST": 1, "BLOCK": 2, "LONG": 4, "SHARED": 2, "PROGRAMS": 6, "HELPERS": 2, "SCAN": 2}
    take_small_sizes(monkeypatch, sizes)
    layout = KVLayout(page_size=8, max_context_len=320)
    pool = torch.arange(8, 8 + 6 * 320).view(6, 320).flip(0)
    given: dict[str, Any] = {"full_to_swa": torch.arange(8 + 6 * 320).flip(0) // 8 * 8} if is_mapped else {}
    call = pool, torch.arange(6), 8 * torch.tensor(columns)
    found = decode_metadata(*call, layout=layout, **given)
    wanted, _ = reference.decode_metadata(*call, layout=layout, **given)
    assert split_rows(6, 40, 8, is_mapped=is_mapped, has_unit_stride=True)[2:6] == (1, 4, 2, 2)
    assert cut([-(-count // 2) for count in columns], 1, 2) < max(columns) // 2
    assert torch.equal(found.page_table, wanted.page_table)
    if is_mapped:
        assert torch.equal(found.swa_page_table, wanted.swa_page_table)


@interpreted
def test_nothing_is_read_past_the_last_turn_of_the_widest_row() -> None:
    parts = 2**29
    tables, nothing = torch.full((2, 4), 5, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    # Without storage: a lane that read from it would end this process.
    given: dict[str, Any] = {"pool_ptr": nothing, "map_ptr": nothing, "page_ptr": tables[0], "swa_ptr": tables[1]}
    launch(_last_turn_kernel, (1,), **given, width=4 * parts - 1, part=parts - 1, parts=parts, BLOCK=4)
    assert tables.tolist() == [[0, 0, 0, 5]] * 2


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
def test_interpreted_device_functions() -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_sharing.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "37 passed" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-2000:]
