"""Published designs of the metadata kernel, written anew, each in one launch with the sums and slots that ours gives.

They check nothing and clamp nothing, and with a sliding window they translate the whole row, as published:

    serial   one program a request, 4,096 tokens a step                        block indices of FlashMLA
    grid     a static 2-D grid from the context bound, 4,096 tokens a program  the same, parallel over page blocks
    fused    128 columns a program, everything in one launch                   metadata of captured TRT-LLM MHA
    looped   one program a row looping over its pages, sums beside it          metadata of FlashAttention
    copied   1,024 entries a step of a page-granular table, a program a row    vLLM's gather of block tables

The first four are SGLang's. Publishing puts the sums, and in `serial`, `grid` and `copied` the slots, into launches of
their own; here one launch does all, which favours them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compiled_kv.bench.inputs import Inputs
from compiled_kv.launch import triton
from compiled_kv.layout import ceil_div
from compiled_kv.metadata_parts import DecodeMetadata

if triton is None:
    raise ImportError("the published designs need Triton")
import triton.language as tl

UNSPECIALIZED = ("batch", "width", "pool_stride", "out_stride", "table_stride")


@triton.jit
def _sums(seq_lens_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, batch, SCAN: tl.constexpr):
    total = tl.zeros([], tl.int32)
    tl.store(cu_q_ptr, 0)
    tl.store(cu_k_ptr, 0)
    for begin in range(0, batch, SCAN):
        row = begin + tl.arange(0, SCAN)
        length = tl.load(seq_lens_ptr + row, mask=row < batch, other=0)
        tl.store(cache_seqlens_ptr + row, length, mask=row < batch)
        tl.store(cu_k_ptr + row + 1, total + tl.cumsum(length, 0), mask=row < batch)
        tl.store(cu_q_ptr + row + 1, row + 1, mask=row < batch)
        total += tl.sum(length, 0)


@triton.jit
def _slot(pool_ptr, length, map_ptr, slot_ptr, swa_slot_ptr, SWA: tl.constexpr):
    slot = tl.load(pool_ptr + length - 1).to(tl.int64)
    tl.store(slot_ptr, slot)
    if SWA:
        tl.store(swa_slot_ptr, tl.load(map_ptr + slot))


@triton.jit
def _pages(pool_ptr, column, mask, page_ptr, swa_ptr, map_ptr, PAGE_SIZE: tl.constexpr, SWA: tl.constexpr):
    slot = tl.load(pool_ptr + column.to(tl.int64) * PAGE_SIZE, mask=mask, other=0)
    tl.store(page_ptr + column, slot // PAGE_SIZE, mask=mask)
    if SWA:
        swa_slot = tl.load(map_ptr + slot, mask=mask, other=0)
        swa_page = tl.where(swa_slot < 0, -1, swa_slot // PAGE_SIZE)
        tl.store(swa_ptr + column, swa_page.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def looping(
    pool_ptr, rows_ptr, seq_lens_ptr, map_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, page_ptr, swa_ptr, slot_ptr,
    swa_slot_ptr, batch, pool_stride, out_stride,
    PAGE_SIZE: tl.constexpr, SWA: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row == batch:
        _sums(seq_lens_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, batch, SCAN)
    else:
        length = tl.load(seq_lens_ptr + row)
        pool_ptr += tl.load(rows_ptr + row) * pool_stride
        page_ptr += row.to(tl.int64) * out_stride
        if SWA:
            swa_ptr += row.to(tl.int64) * out_stride
        live = (length + PAGE_SIZE - 1) // PAGE_SIZE
        _slot(pool_ptr, length, map_ptr, slot_ptr + row, swa_slot_ptr + row if SWA else swa_slot_ptr, SWA)
        for begin in range(0, live, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            _pages(pool_ptr, column, column < live, page_ptr, swa_ptr, map_ptr, PAGE_SIZE, SWA)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gridded(
    pool_ptr, rows_ptr, seq_lens_ptr, map_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, page_ptr, swa_ptr, slot_ptr,
    swa_slot_ptr, batch, pool_stride, out_stride,
    PAGE_SIZE: tl.constexpr, SWA: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    if row == batch:
        if block == 0:
            _sums(seq_lens_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, batch, SCAN)
    else:
        length = tl.load(seq_lens_ptr + row)
        live = (length + PAGE_SIZE - 1) // PAGE_SIZE
        if block * BLOCK < live:
            pool_ptr += tl.load(rows_ptr + row) * pool_stride
            page_ptr += row.to(tl.int64) * out_stride
            if SWA:
                swa_ptr += row.to(tl.int64) * out_stride
            if block == 0:
                _slot(pool_ptr, length, map_ptr, slot_ptr + row, swa_slot_ptr + row if SWA else swa_slot_ptr, SWA)
            column = block * BLOCK + tl.arange(0, BLOCK)
            _pages(pool_ptr, column, column < live, page_ptr, swa_ptr, map_ptr, PAGE_SIZE, SWA)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def copying(
    table_ptr, rows_ptr, seq_lens_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, page_ptr, slot_ptr,
    batch, table_stride, out_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row == batch:
        _sums(seq_lens_ptr, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, batch, SCAN)
    else:
        length = tl.load(seq_lens_ptr + row)
        table_ptr += tl.load(rows_ptr + row) * table_stride
        page_ptr += row.to(tl.int64) * out_stride
        live = (length + PAGE_SIZE - 1) // PAGE_SIZE
        last = length - 1
        page = tl.load(table_ptr + last // PAGE_SIZE).to(tl.int64)
        tl.store(slot_ptr + row, page * PAGE_SIZE + last % PAGE_SIZE)
        for begin in range(0, live, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            entry = tl.load(table_ptr + column, mask=column < live, other=0)
            tl.store(page_ptr + column, entry, mask=column < live)


SCAN = 1024


def _arguments(given: Inputs, out: DecodeMetadata, index: int) -> dict[str, Any]:
    pool = given.req_to_token
    return {
        "pool_ptr": pool, "rows_ptr": given.rows[index], "seq_lens_ptr": given.seq_lens[index],
        "map_ptr": given.full_to_swa,
        "cache_seqlens_ptr": out.cache_seqlens, "cu_q_ptr": out.cu_seqlens_q, "cu_k_ptr": out.cu_seqlens_k,
        "page_ptr": out.page_table, "swa_ptr": out.swa_page_table, "slot_ptr": out.slot_mapping,
        "swa_slot_ptr": out.swa_slot_mapping, "batch": given.cell.batch, "pool_stride": pool.stride(0),
        "out_stride": out.page_table.stride(0), "PAGE_SIZE": given.cell.page_size, "SWA": given.full_to_swa is not None,
        "SCAN": SCAN,
    }  # fmt: skip


def serial(given: Inputs, out: DecodeMetadata, index: int) -> None:
    block = max(4096 // given.cell.page_size, 1)
    looping[(given.cell.batch + 1,)](**_arguments(given, out, index), BLOCK=block)


def looped(given: Inputs, out: DecodeMetadata, index: int) -> None:
    looping[(given.cell.batch + 1,)](**_arguments(given, out, index), BLOCK=1024)


def _gridded(given: Inputs, out: DecodeMetadata, index: int, block: int) -> None:
    grid = (given.cell.batch + 1, ceil_div(given.layout.max_num_pages, block))
    gridded[grid](**_arguments(given, out, index), BLOCK=block)


def grid(given: Inputs, out: DecodeMetadata, index: int) -> None:
    _gridded(given, out, index, max(4096 // given.cell.page_size, 1))


def fused(given: Inputs, out: DecodeMetadata, index: int) -> None:
    _gridded(given, out, index, 128)


def copied(given: Inputs, out: DecodeMetadata, index: int) -> None:
    table: Tensor = given.block_table
    copying[(given.cell.batch + 1,)](
        table_ptr=table, rows_ptr=given.rows[index], seq_lens_ptr=given.seq_lens[index],
        cache_seqlens_ptr=out.cache_seqlens, cu_q_ptr=out.cu_seqlens_q, cu_k_ptr=out.cu_seqlens_k,
        page_ptr=out.page_table, slot_ptr=out.slot_mapping, batch=given.cell.batch, table_stride=table.stride(0),
        out_stride=out.page_table.stride(0), PAGE_SIZE=given.cell.page_size, BLOCK=1024, SCAN=SCAN,
    )  # fmt: skip
