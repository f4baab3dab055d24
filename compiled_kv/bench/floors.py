"""What there is to do, and nothing else: a copy of the bytes that must move, loads that must wait for each other, and a
gather whose grid and addresses the host, knowing all lengths, has made beforehand.

None of them starts before the call ahead has ended, as ours do: a short call of ours takes less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.bench.cells import WINDOW
from compiled_kv.bench.inputs import Inputs
from compiled_kv.launch import triton
from compiled_kv.layout import ceil_div

if triton is None:
    raise ImportError("the floors need Triton")
import triton.language as tl

# Columns of a row that a program of the gather takes.
COLUMNS = 512
# Of 512 to 8,192 entries what takes least; a thread of these moves 16 bytes at once.
BLOCK = 1024
# Triton compiles such a count apart, and needs it: a mask that might end within a thread's 16 bytes would have each
# entry moved by itself, which writes parts of sectors and takes up to three times as long.
UNIT = 16


@triton.jit
def copying(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def filling(target_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.zeros([BLOCK], tl.int32), mask=at < count)


@triton.jit(do_not_specialize=("pool_stride",))
def waiting(pool_ptr, rows_ptr, seq_lens_ptr, out_ptr, pool_stride):
    row = tl.program_id(0)
    at = tl.load(rows_ptr + row) * pool_stride + tl.load(seq_lens_ptr + row)
    tl.store(out_ptr + row, tl.load(pool_ptr + at - 1))


@triton.jit
def gathering(
    tasks_ptr, pool_ptr, map_ptr, table_ptr, swa_table_ptr, PAGE_SIZE: tl.constexpr, SWA: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    task = tasks_ptr + tl.program_id(0).to(tl.int64) * 4
    source, target, count, first = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    lane = tl.arange(0, BLOCK)
    slot = tl.load(pool_ptr + source + lane.to(tl.int64) * PAGE_SIZE, mask=lane < count, other=0)
    tl.store(table_ptr + target + lane, slot // PAGE_SIZE, mask=lane < count)
    if SWA:
        swa_slot = tl.load(map_ptr + slot, mask=(lane >= first) & (lane < count), other=0)
        tl.store(swa_table_ptr + target + lane, (swa_slot // PAGE_SIZE).to(tl.int32), mask=lane < count)


def copy(source: Tensor, target: Tensor, count: int) -> None:
    """Of `count` entries, a multiple of UNIT."""
    copying[(ceil_div(count, BLOCK),)](source, target, count, BLOCK=BLOCK, num_warps=8)


def fill(target: Tensor) -> None:
    """All of the target, which has a multiple of UNIT entries."""
    filling[(ceil_div(target.numel(), BLOCK),)](target, target.numel(), BLOCK=BLOCK, num_warps=8)


def dependent_loads(given: Inputs, out: Tensor, index: int) -> None:
    """Row index, then a length and a slot of that row: one program a request."""
    pool = given.req_to_token
    waiting[(given.cell.batch,)](pool, given.rows[index], given.seq_lens[index], out, pool.stride(0))


def gather(given: Inputs, tasks: Tensor, table: Tensor, swa_table: Tensor | None) -> None:
    """One program a task of `tasks_of`."""
    gathering[(len(tasks),)](
        tasks, given.req_to_token, given.full_to_swa, table, swa_table, PAGE_SIZE=given.layout.page_size,
        SWA=swa_table is not None, BLOCK=COLUMNS, num_warps=2,
    )  # fmt: skip


def tasks_of(given: Inputs, index: int) -> Tensor:
    """For every COLUMNS live columns of a batch's rows: where in the pool and in the table they begin, how many they
    are, and the first that the sliding window sees, counted from there, so that it may lie ahead of them or behind.
    int64 [tasks, 4]."""
    page_size, rows, lengths = given.layout.page_size, given.rows[index], given.seq_lens[index].long()
    pages = (lengths + page_size - 1) // page_size
    passed = (lengths - WINDOW).clamp(min=0) // page_size if given.cell.swa == "window" else torch.zeros_like(pages)
    turns = (pages + COLUMNS - 1) // COLUMNS
    row = torch.arange(len(rows), device=rows.device).repeat_interleave(turns)
    begin = (torch.arange(len(row), device=rows.device) - (turns.cumsum(0) - turns)[row]) * COLUMNS
    source = rows[row] * given.req_to_token.stride(0) + begin * page_size
    target = row * given.layout.max_num_pages + begin
    return torch.stack((source, target, (pages[row] - begin).clamp(max=COLUMNS), passed[row] - begin), 1)
