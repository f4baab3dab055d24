"""The one kernel behind `write_metadata`.

Grid (B + 1, parts): program (0, 0) takes lengths and prefix sums, the programs (0, k) share the given slots, and
program (1 + i, k) writes the pages of row i. What an engine did not ask for has no pointer, and no code.
"""

from __future__ import annotations

from compiled_kv.launch import dependent_launch, device_function, kernel, tl
from compiled_kv.rows_triton import (
    INT32_MAX,
    clamped_length,
    clamped_queries,
    load_at,
    page_of,
    pages_of,
    swa_page_of,
    through_map,
    value_at,
)


@device_function
def _physical(page, map_ptr, map_stride, map_size, mask):
    """Page of a virtual page; the null page for one that is none, or not bound."""
    return tl.maximum(page_of(through_map(tl.maximum(page, 0), map_ptr, map_stride, map_size, mask), 1), 0)


@device_function
def _sum_rows(
    seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, indices_ptr, index_stride, pool_rows, batch_size, delta, q_len, cap,
    cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, SCAN: tl.constexpr,
):  # fmt: skip
    """Lengths and prefix sums of a whole batch, SCAN rows at a time; each output may be None."""
    total_k = tl.zeros([], tl.int64)
    total_q = tl.zeros([], tl.int64)
    for begin in range(0, batch_size, SCAN):
        row = begin + tl.arange(0, SCAN)
        in_batch = row < batch_size
        pool_row = load_at(indices_ptr, row, index_stride, in_batch, -1)
        live = (pool_row >= 0) & (pool_row < pool_rows)
        length = clamped_length(value_at(seq_lens_ptr, row, seq_stride, live, 0), delta, cap)
        length = tl.where(live, length, 0).to(tl.int64)
        if cache_seqlens_ptr is not None:
            tl.store(cache_seqlens_ptr + row, length.to(tl.int32), mask=in_batch)
        if cu_k_ptr is not None:
            ends = total_k + tl.cumsum(length, 0)
            tl.store(cu_k_ptr + row + 1, tl.minimum(ends, INT32_MAX).to(tl.int32), mask=in_batch)
            total_k += tl.sum(length, 0)
        if cu_q_ptr is not None:
            if q_lens_ptr is not None:
                queries = clamped_queries(load_at(q_lens_ptr, row, q_stride, in_batch, 0))
                ends = total_q + tl.cumsum(queries, 0)
                total_q += tl.sum(queries, 0)
            else:
                ends = (row.to(tl.int64) + 1) * q_len
            tl.store(cu_q_ptr + row + 1, tl.minimum(ends, INT32_MAX).to(tl.int32), mask=in_batch)
    if cu_k_ptr is not None:
        tl.store(cu_k_ptr, 0)
    if cu_q_ptr is not None:
        tl.store(cu_q_ptr, 0)


@device_function
def _translate(slots_ptr, slots_stride, num_slots, map_ptr, map_stride, map_size, out_ptr, num_tokens, part, parts,
               TOKENS: tl.constexpr):  # fmt: skip
    """The given slots through a map of slots; 0 behind them."""
    for begin in range(part * TOKENS, num_tokens, parts * TOKENS):
        token = begin + tl.arange(0, TOKENS)
        given = token < num_slots
        slot = tl.full([TOKENS], -1, tl.int64)
        if slots_ptr is not None:
            slot = load_at(slots_ptr, token, slots_stride, given & (token < num_tokens), -1)
        found = through_map(slot, map_ptr, map_stride, map_size, given)
        tl.store(out_ptr + token, tl.where(given, found, 0), mask=token < num_tokens)


@kernel
def write_metadata_kernel(
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, q_lens_ptr, slots_ptr, map_ptr, page_map_ptr,
    cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, page_table_ptr, swa_page_table_ptr, swa_slot_mapping_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, seq_stride, q_stride, slots_stride, num_slots,
    map_stride, map_size, page_map_stride, page_map_size, page_row_stride, page_stride, swa_row_stride, swa_stride,
    batch_size, width, num_tokens, delta, q_len, cap,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, CLEAR: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    row = tl.program_id(0) - 1
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    if row < 0:
        if part == 0:
            _sum_rows(
                seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, req_pool_indices_ptr, index_stride, pool_rows,
                batch_size, delta, q_len, cap, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, SCAN,
            )  # fmt: skip
        if swa_slot_mapping_ptr is not None:
            _translate(slots_ptr, slots_stride, num_slots, map_ptr, map_stride, map_size, swa_slot_mapping_ptr,
                       num_tokens, parts - 1 - part, parts, TOKENS)  # fmt: skip
    else:
        if page_table_ptr is not None:
            pool_row = load_at(req_pool_indices_ptr, row, index_stride, True, -1)
            is_live = (pool_row >= 0) & (pool_row < pool_rows)
            length = clamped_length(value_at(seq_lens_ptr, row, seq_stride, True, 0), delta, cap)
            live = tl.minimum(pages_of(tl.where(is_live, length, 0), PAGE_SIZE), width).to(tl.int32)
            pool_row_ptr = req_to_token_ptr + pool_row * pool_row_stride
            end = live
            if CLEAR:
                end = tl.maximum(live, (tl.zeros([], tl.int64) + width).to(tl.int32))
            for begin in range(part * BLOCK, end, parts * BLOCK):
                column = (begin + tl.arange(0, BLOCK)).to(tl.int64)
                position = column * PAGE_SIZE
                owned = column < live
                slot = load_at(pool_row_ptr, position, pool_stride, owned & (position < pool_width), -1)
                page = page_of(slot, PAGE_SIZE)
                shown = page
                if page_map_ptr is not None:
                    shown = _physical(page, page_map_ptr, page_map_stride, page_map_size, owned)
                page_ptr = page_table_ptr + row.to(tl.int64) * page_row_stride + column * page_stride
                tl.store(page_ptr, tl.where(owned, shown, 0), mask=column < end)
                if swa_page_table_ptr is not None:
                    if PAGE_MAP:
                        swa_page = _physical(page, map_ptr, map_stride, map_size, owned)
                    else:
                        swa_page = swa_page_of(slot, page, map_ptr, map_stride, map_size, owned, PAGE_SIZE, False)
                    swa_ptr = swa_page_table_ptr + row.to(tl.int64) * swa_row_stride + column * swa_stride
                    tl.store(swa_ptr, tl.where(owned, swa_page, 0), mask=column < end)
