"""The kernel behind `update_metadata`: `decode_metadata`'s, but of a page table it writes what changed alone.

Grid (chunks + B * parts) as there. What a row's tables hold is on record once for each of its programs, in `held`: a
program reads and writes its own record only, so that none can meet a record that another has already renewed.
"""

from __future__ import annotations

from compiled_kv.batch_triton import sum_batch
from compiled_kv.columns_triton import clear_row
from compiled_kv.launch import dependent_launch, device_function, kernel, tl
from compiled_kv.rows_triton import (
    BAD_SLOT,
    UNMAPPED,
    active_rows,
    clamped_length,
    clamped_queries,
    first_column,
    is_within,
    load_at,
    page_of,
    pages_of,
    place_of,
    report,
    slots_of_tokens,
    swa_page_of,
    value_at,
    write_slots,
)


@device_function
def _columns(length, width, PAGE_SIZE: tl.constexpr):
    return tl.minimum(pages_of(length, PAGE_SIZE), width).to(tl.int32)


@device_function
def _held_column(record_ptr, width):
    """A column on record, held to the row whatever stands there."""
    return tl.minimum(tl.maximum(tl.load(record_ptr), 0), width).to(tl.int32)


@device_function
def _fill_columns(
    pool_row_ptr, pool_stride, pool_width, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
    start, first, live, part, parts, PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write columns [start, live) of a live row, `parts` programs taking turns; returns status bits of each lane."""
    bits = tl.zeros([BLOCK], tl.int32)
    for begin in range(start + part * BLOCK, live, parts * BLOCK):
        column = begin + tl.arange(0, BLOCK)
        in_row = column < live
        position = column * PAGE_SIZE
        slot = tl.load(pool_row_ptr + position * pool_stride, mask=in_row & (position < pool_width), other=-1)
        page = page_of(slot, PAGE_SIZE)
        tl.store(page_row_ptr + column, page, mask=in_row)
        bits |= tl.where(in_row & (page < 0), BAD_SLOT, 0)
        if swa_row_ptr is not None:
            seen = in_row & (column >= first)
            swa_page = swa_page_of(slot, page, map_ptr, map_stride, map_size, seen, PAGE_SIZE, PAGE_MAP)
            tl.store(swa_row_ptr + column, tl.where(seen, swa_page, 0), mask=in_row)
            bits |= tl.where(seen & (page >= 0) & (swa_page < 0), UNMAPPED, 0)
    return bits


@device_function
def _update_row(
    record_ptr, owner, generation, seq_len, length, queries, is_live,
    pool_row_ptr, pool_stride, pool_width, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
    width, cap, window, part, parts,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring one row's tables from what is on record to what the batch says; returns status bits of each lane."""
    old_owner, old_generation = tl.load(record_ptr), tl.load(record_ptr + 1)
    old_settled = _held_column(record_ptr + 2, width)
    old_live = _held_column(record_ptr + 3, width)
    old_first = _held_column(record_ptr + 4, width)
    live = tl.where(is_live, _columns(length, width, PAGE_SIZE), 0)
    settled = tl.minimum(_columns(clamped_length(seq_len, 0, cap), width, PAGE_SIZE), live)
    first = tl.minimum(first_column(length, queries, window, PAGE_SIZE, WINDOWED), live).to(tl.int32)
    kept = (owner == old_owner) & (generation == old_generation) & (settled >= old_settled)
    start = tl.where(kept, old_settled, 0)
    start = tl.where(first < old_first, tl.minimum(start, first), start)
    bits = _fill_columns(
        pool_row_ptr, pool_stride, pool_width, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
        start, first, live, part, parts, PAGE_SIZE, PAGE_MAP, BLOCK,
    )  # fmt: skip
    clear_row(page_row_ptr, live, old_live, part, parts, BLOCK)
    if swa_row_ptr is not None:
        clear_row(swa_row_ptr, live, old_live, part, parts, BLOCK)
        clear_row(swa_row_ptr, old_first, tl.minimum(first, start), part, parts, BLOCK)
    # Every warp of the program has loaded the record before one of them replaces it.
    tl.debug_barrier()
    tl.store(record_ptr, owner)
    tl.store(record_ptr + 1, generation)
    tl.store(record_ptr + 2, settled)
    tl.store(record_ptr + 3, live)
    tl.store(record_ptr + 4, first)
    return bits


@kernel
def update_metadata_kernel(
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, generations_ptr, q_lens_ptr, slots_ptr, map_ptr, num_reqs_ptr,
    status_ptr, held_ptr,
    cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, page_table_ptr, swa_page_table_ptr, slot_mapping_ptr, swa_slot_mapping_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, seq_stride, generation_stride, q_stride,
    slots_stride, num_slots, map_stride, map_size, page_row_stride, swa_row_stride, batch_size, width, num_tokens,
    delta, q_len, cap, pad_seqlen, window, parts, reciprocal,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, DEBUG: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    active = active_rows(num_reqs_ptr, batch_size)
    parts = tl.zeros([], tl.int64) + parts
    turn, row, part = place_of(tl.program_id(0), batch_size, parts, reciprocal, CHUNK)
    if turn < 0:
        sum_batch(
            seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, req_pool_indices_ptr, index_stride, pool_rows, active,
            batch_size, delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
            slots_ptr, num_slots, slot_mapping_ptr, swa_slot_mapping_ptr, num_tokens, status_ptr,
            tl.program_id(0), DEBUG, CHUNK, SCAN,
        )  # fmt: skip
    else:
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
        if slot_mapping_ptr is not None:
            # The last program, whose share of a row's pages is the smallest, takes the first tokens.
            from_last = parts - 1 - part
            first_token = row.to(tl.int64) * q_len
            if q_lens_ptr is not None:
                if from_last * TOKENS < queries:
                    # Loaded here and not in a device function: torch's mutation analysis follows a call's result to all
                    # its pointers, and would take q_lens for an output.
                    for begin in range(0, row, SCAN):
                        other = begin + tl.arange(0, SCAN)
                        q_lens = tl.load(q_lens_ptr + other.to(tl.int64) * q_stride, mask=other < row, other=0)
                        first_token += tl.sum(clamped_queries(q_lens.to(tl.int64)), 0)
            count = tl.minimum(queries, tl.maximum(num_tokens - first_token, 0)).to(tl.int32)
            query = from_last * TOKENS + tl.arange(0, TOKENS)
            # Looked up before the pages and stored behind them: one wait for both.
            room = tl.where(is_live, pool_width if slots_ptr is None else num_slots, -1)
            slot = slots_of_tokens(
                pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, first_token, length - queries, query,
                query < count,
            )  # fmt: skip
        bits = _update_row(
            held_ptr + (row * parts + part) * 5, tl.where(is_live, pool_row, -1), tl.where(is_live, generation, 0),
            seq_len, length, queries, is_live, pool_row_ptr, pool_stride, pool_width,
            page_table_ptr + row.to(tl.int64) * page_row_stride, swa_row_ptr, map_ptr, map_stride, map_size,
            width, cap, window, part, parts, PAGE_SIZE, PAGE_MAP, WINDOWED, BLOCK,
        )  # fmt: skip
        report(bits, status_ptr, DEBUG)
        if slot_mapping_ptr is not None:
            token_bits = write_slots(
                slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
                slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, length - queries, from_last, parts,
                PAGE_SIZE, PAGE_MAP, TOKENS,
            )  # fmt: skip
            report(token_bits, status_ptr, DEBUG)
