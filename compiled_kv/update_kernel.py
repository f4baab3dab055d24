"""The kernel behind `update_metadata`: `decode_metadata`'s, but of a page table it writes what changed alone.

Grid (chunks + B * parts): as there, without helpers. What a row's tables hold is on record once for each of its
programs, in `held`: a program reads and writes its own record only, so that none can meet a record that another has
already renewed.
"""

from __future__ import annotations

from compiled_kv.batch_triton import sum_batch
from compiled_kv.changes_triton import update_row
from compiled_kv.launch import dependent_launch, kernel, tl
from compiled_kv.rows_triton import (
    active_rows,
    clamped_length,
    clamped_queries,
    is_within,
    load_at,
    place_of,
    value_at,
)


# In what order, and why: NOTE [Constants and instructions] in metadata_kernel.
@kernel
def update_metadata_kernel(
    batch_size, parts, reciprocal, index_stride, seq_stride, generation_stride, req_pool_indices_ptr, seq_lens_ptr,
    generations_ptr, num_reqs_ptr, held_ptr, req_to_token_ptr, pool_rows, pool_width, pool_row_stride, pool_stride,
    width, delta, cap, q_len, pad_seqlen, window, num_tokens, page_row_stride, page_table_ptr, map_ptr,
    slot_mapping_ptr, swa_slot_mapping_ptr, swa_page_table_ptr, swa_row_stride, map_stride, map_size,
    q_lens_ptr, slots_ptr, status_ptr, q_stride, slots_stride, num_slots, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, DEBUG: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    parts = tl.zeros([], tl.int64) + parts
    turn, row, part = place_of(tl.program_id(0), batch_size, parts, reciprocal, CHUNK)
    if turn >= 0:
        if PDL:
            dependent_launch()
        active = active_rows(num_reqs_ptr, batch_size)
        pool_row = load_at(req_pool_indices_ptr, row, index_stride, True, -1)
        seq_len = value_at(seq_lens_ptr, row, seq_stride, True, 0)
        generation = load_at(generations_ptr, row, generation_stride, True, 0)
        queries = tl.zeros([], tl.int64) + q_len
        if q_lens_ptr is not None:
            # By the load's mask: a selection afterwards would keep, and spill, `row < active` while pages are written.
            queries = clamped_queries(load_at(q_lens_ptr, row, q_stride, row < active, 0))
        is_live = (row < active) & is_within(pool_row, pool_rows)
        length = tl.where(is_live, clamped_length(seq_len, delta, cap), pad_seqlen).to(tl.int32)
        pool_row_ptr = req_to_token_ptr + pool_row * pool_row_stride
        swa_row_ptr = None
        if swa_page_table_ptr is not None:
            swa_row_ptr = swa_page_table_ptr + row.to(tl.int64) * swa_row_stride
        room, first_token, count = None, None, None
        if slot_mapping_ptr is not None:
            first_token = row.to(tl.int64) * q_len
            if q_lens_ptr is not None:
                if (parts - 1 - part) * TOKENS < queries:
                    # Loaded here and not in a device function: torch's mutation analysis follows a call's result to all
                    # its pointers, and would take q_lens for an output.
                    for begin in range(0, row, SCAN):
                        other = begin + tl.arange(0, SCAN)
                        q_lens = tl.load(q_lens_ptr + other.to(tl.int64) * q_stride, mask=other < row, other=0)
                        first_token += tl.sum(clamped_queries(q_lens.to(tl.int64)), 0)
            count = tl.minimum(queries, tl.maximum(num_tokens - first_token, 0)).to(tl.int32)
            room = tl.where(is_live, pool_width if slots_ptr is None else num_slots, -1)
        update_row(
            held_ptr + (row * parts + part) * 5, tl.where(is_live, pool_row, -1), tl.where(is_live, generation, 0),
            seq_len, length, queries, is_live, pool_row_ptr, pool_stride, pool_width,
            page_table_ptr + row.to(tl.int64) * page_row_stride, swa_row_ptr, map_ptr, map_stride, map_size,
            slots_ptr, slots_stride, room, slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count,
            width, cap, window, part, parts, status_ptr, PAGE_SIZE, PAGE_MAP, WINDOWED, DEBUG, BLOCK, TOKENS,
        )  # fmt: skip
    else:
        if PDL:
            dependent_launch()
        active = active_rows(num_reqs_ptr, batch_size)
        sum_batch(
            seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, req_pool_indices_ptr, index_stride, pool_rows, active,
            batch_size, delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
            slots_ptr, num_slots, slot_mapping_ptr, swa_slot_mapping_ptr, num_tokens, status_ptr,
            tl.program_id(0), DEBUG, CHUNK, SCAN,
        )  # fmt: skip
