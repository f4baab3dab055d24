"""The one kernel behind `decode_metadata`.

Grid (B + 1, parts): program (0, 0) takes lengths and prefix sums, for they take longest; program (1 + i, k) writes
the pages and the
slots of row i, `parts` programs a row taking turns over what is live.
"""

from __future__ import annotations

from compiled_kv.launch import device_function, kernel, tl
from compiled_kv.rows_triton import (
    BAD_SLOT,
    TOO_MANY_TOKENS,
    UNMAPPED,
    active_rows,
    clamped_length,
    clamped_queries,
    clear_row,
    fill_row,
    first_column,
    load_at,
    prefix_sums,
    report,
    swa_slot_of,
)


@device_function
def _write_slots(
    pool_row_ptr, pool_stride, pool_width, is_live, slots_ptr, slots_stride, num_slots, map_ptr, map_stride, map_size,
    slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, first_position, part, parts,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Slots of one row's `count` tokens, given by the allocator or looked up; returns status bits of each lane."""
    bits = tl.zeros([TOKENS], tl.int32)
    for begin in range(part * TOKENS, count, parts * TOKENS):
        query = begin + tl.arange(0, TOKENS)
        owned = query < count
        token = first_token + query
        if slots_ptr is not None:
            slot = load_at(slots_ptr, token, slots_stride, owned & is_live & (token < num_slots), -1)
        else:
            position = first_position + query
            held = owned & is_live & (position >= 0)
            slot = load_at(pool_row_ptr, position, pool_stride, held & (position < pool_width), -1)
            bits |= tl.where(held & (slot < 0), BAD_SLOT, 0)
        slot = tl.maximum(slot, -1)
        tl.store(slot_mapping_ptr + token, slot, mask=owned)
        if swa_slot_mapping_ptr is not None:
            swa_slot = swa_slot_of(slot, map_ptr, map_stride, map_size, owned, PAGE_SIZE, PAGE_MAP)
            tl.store(swa_slot_mapping_ptr + token, swa_slot, mask=owned)
            bits |= tl.where(owned & (slot >= 0) & (swa_slot < 0), UNMAPPED, 0)
    return bits


@device_function
def _pad_slots(slot_mapping_ptr, swa_slot_mapping_ptr, first_token, num_tokens, SCAN: tl.constexpr):
    """-1 for the tokens that belong to no row."""
    for begin in range(tl.minimum(first_token, num_tokens).to(tl.int32), num_tokens, SCAN):
        token = begin + tl.arange(0, SCAN)
        tl.store(slot_mapping_ptr + token, tl.full([SCAN], -1, tl.int64), mask=token < num_tokens)
        if swa_slot_mapping_ptr is not None:
            tl.store(swa_slot_mapping_ptr + token, tl.full([SCAN], -1, tl.int64), mask=token < num_tokens)


@kernel
def decode_metadata_kernel(
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, q_lens_ptr, slots_ptr, map_ptr, num_reqs_ptr, status_ptr,
    cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, page_table_ptr, swa_page_table_ptr, slot_mapping_ptr, swa_slot_mapping_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, seq_stride, q_stride, slots_stride, num_slots,
    map_stride, map_size, page_row_stride, swa_row_stride, batch_size, width, num_tokens, delta, q_len, cap,
    pad_seqlen, window,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, CLEAR: tl.constexpr, DEBUG: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) - 1
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    active = active_rows(num_reqs_ptr, batch_size)
    if row < 0:
        if part == 0:
            queries, bits = prefix_sums(
                seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, req_pool_indices_ptr, index_stride, pool_rows, active,
                batch_size,
                delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, SCAN,
            )  # fmt: skip
            if slot_mapping_ptr is not None:
                beyond = queries
                if q_lens_ptr is None:
                    queries += (tl.zeros([], tl.int64) + active) * q_len
                    beyond += (tl.zeros([], tl.int64) + batch_size) * q_len
                if slots_ptr is not None:
                    bits |= tl.where(queries > num_slots, TOO_MANY_TOKENS, 0)
                else:
                    bits |= tl.where(queries > num_tokens, TOO_MANY_TOKENS, 0)
                _pad_slots(slot_mapping_ptr, swa_slot_mapping_ptr, beyond, num_tokens, SCAN)
            report(bits, status_ptr, DEBUG)
    else:
        pool_row = load_at(req_pool_indices_ptr, row, index_stride, True, -1)
        seq_len = load_at(seq_lens_ptr, row, seq_stride, True, 0)
        queries = tl.zeros([], tl.int64) + q_len
        if q_lens_ptr is not None:
            queries = clamped_queries(load_at(q_lens_ptr, row, q_stride, True, 0))
        is_live = (row < active) & (pool_row >= 0) & (pool_row < pool_rows)
        length = tl.where(is_live, clamped_length(seq_len, delta, cap), pad_seqlen)
        live = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, width).to(tl.int32)
        pool_row_ptr = req_to_token_ptr + pool_row * pool_row_stride
        page_row_ptr = page_table_ptr + row.to(tl.int64) * page_row_stride
        swa_row_ptr = None
        if swa_page_table_ptr is not None:
            swa_row_ptr = swa_page_table_ptr + row.to(tl.int64) * swa_row_stride
        bits = fill_row(
            pool_row_ptr, pool_stride, pool_width, 0, is_live, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
            first_column(length, queries, window, PAGE_SIZE, WINDOWED), live, part, parts,
            PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, BLOCK,
        )  # fmt: skip
        report(bits, status_ptr, DEBUG)
        if slot_mapping_ptr is not None:
            # The last program, whose share of a row's pages is the smallest, takes the first tokens.
            turn = parts - 1 - part
            first_token = row.to(tl.int64) * q_len
            if q_lens_ptr is not None:
                queries = tl.where(row < active, queries, 0)
                if turn * TOKENS < queries:
                    # Loaded here and not in a device function: torch's mutation analysis follows a call's result to all
                    # its pointers, and would take q_lens for an output.
                    for begin in range(0, row, SCAN):
                        other = begin + tl.arange(0, SCAN)
                        q_lens = tl.load(q_lens_ptr + other.to(tl.int64) * q_stride, mask=other < row, other=0)
                        first_token += tl.sum(clamped_queries(q_lens.to(tl.int64)), 0)
            count = tl.minimum(queries, tl.maximum(num_tokens - first_token, 0)).to(tl.int32)
            token_bits = _write_slots(
                pool_row_ptr, pool_stride, pool_width, is_live, slots_ptr, slots_stride, num_slots, map_ptr,
                map_stride, map_size,
                slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, length - queries, turn, parts,
                PAGE_SIZE, PAGE_MAP, TOKENS,
            )  # fmt: skip
            report(token_bits, status_ptr, DEBUG)
        if CLEAR:
            clear_row(page_row_ptr, live, width, part, parts, BLOCK)
            if swa_page_table_ptr is not None:
                clear_row(swa_row_ptr, live, width, part, parts, BLOCK)
