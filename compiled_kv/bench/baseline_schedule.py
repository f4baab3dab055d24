"""The published schedule kernel, written anew: a warp counts blocks, then one thread walks the parts in order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv import schedules
from compiled_kv.launch import triton

if triton is None:
    raise ImportError("the published schedule needs Triton")
import triton.language as tl


@triton.jit(do_not_specialize=("batch", "parts"))
def walking(lengths_ptr, metadata_ptr, num_splits_ptr, scratch_ptr, batch, parts, OVERHEAD: tl.constexpr):
    total = tl.zeros([], tl.int32)
    for begin in range(0, batch, 32):
        row = begin + tl.arange(0, 32)
        length = tl.load(lengths_ptr + row, mask=row < batch, other=0)
        blocks = tl.maximum((length + 63) // 64, 1)
        tl.store(scratch_ptr + row, blocks, mask=row < batch)
        total += tl.sum(tl.where(row < batch, blocks + OVERHEAD, 0), 0)
    tl.debug_barrier()
    payload = (total + parts - 1) // parts + OVERHEAD
    request, block, split, splits = 0, 0, 0, 0
    tl.store(num_splits_ptr, 0)
    for part in range(parts):
        row_ptr = metadata_ptr + part * 8
        begin_req, begin_block, left = request, block, payload
        tl.store(row_ptr, begin_req)
        tl.store(row_ptr + 2, begin_block)
        tl.store(row_ptr + 4, split)
        going = request < batch
        while going:
            rest = tl.load(scratch_ptr + request) - block
            if left >= rest + OVERHEAD:
                splits += split + 1
                tl.store(num_splits_ptr + request + 1, splits)
                left -= rest + OVERHEAD
                request += 1
                block = 0
                split = 0
                going = request < batch
            else:
                if left > OVERHEAD:
                    block += left - OVERHEAD
                    split += 1
                going = False
        end_req, end_block = request, block
        cut_last = block > 0
        if block == 0:
            end_req = request - 1
            end_block = tl.where(tl.load(lengths_ptr + end_req) == 0, 0, tl.load(scratch_ptr + end_req))
        either = (begin_req == end_req) & ((begin_block > 0) | cut_last)
        tl.store(row_ptr + 1, end_req)
        tl.store(row_ptr + 3, end_block)
        tl.store(row_ptr + 5, tl.where((begin_block > 0) | either, 1, 0))
        tl.store(row_ptr + 6, tl.where(cut_last | either, 1, 0))
        tl.store(row_ptr + 7, 0)


def run(lengths: Tensor, out: tuple[Tensor, ...]) -> None:
    metadata, num_splits = out
    scratch = torch.empty_like(num_splits)
    walking[(1,)](lengths, metadata, num_splits, scratch, len(lengths), len(metadata), OVERHEAD=5, num_warps=1)


def ours_with(lengths: Tensor, out: Any, warps: int) -> None:
    """`flashmla_schedule` with another number of warps."""

    def launch(fn: Any, grid: Any, **arguments: Any) -> None:
        fn[grid](**{**arguments, "num_warps": warps})

    with mock.patch.object(schedules, "launch", launch):
        ckv.flashmla_schedule(lengths, num_sm_parts=len(out[0]), out=out)
