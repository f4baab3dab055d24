"""Where long rows are cut: no program gets more turns than the longest row's own would have without help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kv.columns_triton import fill_turns
from compiled_kv.launch import kernel, launch, tl
from compiled_kv.long_rows_triton import own_blocks
from tests.conftest import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernel of this test runs interpreted")


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
    fill_turns(
        tl.zeros([BLOCK], tl.int32), pool_ptr, 1, width, 0, parts < 0, page_ptr - part * BLOCK, swa_ptr - part * BLOCK,
        map_ptr, 1, 1, tl.zeros([], tl.int32), width, part, parts, None, 1, False, True, False, BLOCK,
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
@pytest.mark.parametrize("parts", [2**29 - 1, 2**29])
def test_nothing_is_read_ahead_of_the_last_turn_of_the_widest_row(parts: int) -> None:
    tables, nothing = torch.full((2, 4), 5, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    # Without storage: a lane that read from it would end this process.
    given: dict[str, Any] = {"pool_ptr": nothing, "map_ptr": nothing, "page_ptr": tables[0], "swa_ptr": tables[1]}
    launch(_last_turn_kernel, (1,), **given, width=4 * parts - 1, part=parts - 1, parts=parts, BLOCK=4)
    assert tables.tolist() == [[0, 0, 0, 5]] * 2


@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreted one")
def test_interpreted_cuts() -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_long_rows.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "9 passed" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-2000:]
