"""What nothing can beat: a copy of the bytes that must move, and loads that must wait for each other."""

from __future__ import annotations

from torch import Tensor

from compiled_kv.bench.inputs import Inputs
from compiled_kv.launch import triton
from compiled_kv.layout import ceil_div

if triton is None:
    raise ImportError("the floors need Triton")
import triton.language as tl

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


def copy(source: Tensor, target: Tensor, count: int) -> None:
    """Of `count` entries, a multiple of UNIT."""
    copying[(max(ceil_div(count, BLOCK), 1),)](source, target, count, BLOCK=BLOCK, num_warps=8)


def fill(target: Tensor) -> None:
    """All of the target, which has a multiple of UNIT entries."""
    filling[(max(ceil_div(target.numel(), BLOCK), 1),)](target, target.numel(), BLOCK=BLOCK, num_warps=8)


def dependent_loads(given: Inputs, out: Tensor, index: int) -> None:
    """Row index, then a length and a slot of that row: one program a request."""
    pool = given.req_to_token
    waiting[(given.cell.batch,)](pool, given.rows[index], given.seq_lens[index], out, pool.stride(0))
