"""The kernel behind `update_metadata`: `decode_metadata`'s, but of a page table it writes what changed alone.

Grid (chunks + groups * parts): the first programs take lengths and prefix sums, as there; each of the others takes a
group of GROUP rows side by side, LANES lanes of each, for in most steps hardly anything of a row changes; one or two
that are long are finished one after the other by all lanes. What a row's tables hold is on record once for each of its
programs, in `held`: a program reads and writes its own record only, so that none can meet a record that another has
already renewed.
"""

from __future__ import annotations

from compiled_kv.batch_triton import sum_batch
from compiled_kv.changes_triton import (
    change_further,
    change_long,
    change_turn,
    changes_of,
    held_column,
    renew_record,
    slots_of_pages,
    write_further,
)
from compiled_kv.launch import kernel, launch_dependents, tl, wait_knowing
from compiled_kv.rows_triton import (
    INT32_MAX,
    clamped_length,
    clamped_queries,
    is_within,
    place_of,
    swa_slot_of,
)
from compiled_kv.tokens_triton import slots_of_tokens, write_turn


# In what order, and why: NOTE [Constants and instructions] in metadata_kernel. What a store's address depends on is
# loaded here and not in a device function: torch's mutation analysis follows the result of a call to all its pointers,
# and would take inputs for outputs.
@kernel
def update_metadata_kernel(
    batch_size, parts, reciprocal, index_stride, seq_stride, generation_stride, req_pool_indices_ptr, seq_lens_ptr,
    generations_ptr, num_reqs_ptr, held_ptr, req_to_token_ptr, pool_rows, pool_width, pool_row_stride, pool_stride,
    width, delta, cap, q_len, pad_seqlen, window, num_tokens, page_row_stride, page_table_ptr, map_ptr,
    slot_mapping_ptr, swa_slot_mapping_ptr, swa_page_table_ptr, swa_row_stride, map_stride, map_size,
    q_lens_ptr, slots_ptr, status_ptr, q_stride, slots_stride, num_slots, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, DEBUG: tl.constexpr,
    PDL: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr,
    FEW: tl.constexpr, CHUNK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
    parts = tl.zeros([], tl.int64) + parts
    groups = (batch_size + GROUP - 1) // GROUP
    turn, group, part = place_of(tl.program_id(0), batch_size, groups, parts, reciprocal, CHUNK)
    if turn >= 0:
        lane = tl.arange(0, GROUP * LANES)
        first_row = (group.to(tl.int64) * GROUP).to(tl.int32)
        place, row = lane % LANES, first_row + lane // LANES
        in_batch, wide_row = row < batch_size, row.to(tl.int64)
        index_ptr, seq_ptr = req_pool_indices_ptr + wide_row * index_stride, seq_lens_ptr + wide_row * seq_stride
        generation_ptr = generations_ptr + wide_row * generation_stride
        record_ptr = held_ptr + (wide_row * parts + part) * 5
        offset = (part * LANES).to(tl.int32) + place
        page_row_ptr, swa_row_ptr = page_table_ptr + wide_row * page_row_stride, None
        if swa_page_table_ptr is not None:
            swa_row_ptr = swa_page_table_ptr + wide_row * swa_row_stride
        pool_columns = (tl.zeros([], tl.int64) + pool_width + (PAGE_SIZE - 1)) // PAGE_SIZE
        pool_columns = tl.minimum(pool_columns, width).to(tl.int32)
        # The last program, whose share of a row's pages is the smallest, takes the first tokens.
        from_last = parts - 1 - part
        query = (from_last * LANES).to(tl.int32) + place
        queries = (tl.zeros([], tl.int64) + tl.minimum(q_len, INT32_MAX)).to(tl.int32)
        first_token = wide_row * q_len
        count = tl.where(in_batch, tl.minimum(queries, tl.maximum(num_tokens - first_token, 0)), 0).to(tl.int32)
        if PDL:
            wait_knowing((
                index_ptr, seq_ptr, generation_ptr, record_ptr, page_row_ptr, pool_columns, offset, query, first_token,
                queries, count, pad_seqlen, cap, pool_row_stride, pool_width,
            ))  # fmt: skip
        active = batch_size
        if num_reqs_ptr is not None:
            active = tl.minimum(tl.maximum(tl.load(num_reqs_ptr).to(tl.int64), 0), batch_size).to(tl.int32)
        pool_row = tl.load(index_ptr, mask=in_batch, other=-1).to(tl.int64)
        seq_len = tl.load(seq_ptr, mask=in_batch, other=0)
        generation = tl.load(generation_ptr, mask=in_batch, other=0).to(tl.int64)
        old_owner = tl.load(record_ptr, mask=in_batch, other=-1)
        old_generation = tl.load(record_ptr + 1, mask=in_batch, other=0)
        old_settled = held_column(tl.load(record_ptr + 2, mask=in_batch, other=0), width)
        old_live = held_column(tl.load(record_ptr + 3, mask=in_batch, other=0), width)
        old_first = held_column(tl.load(record_ptr + 4, mask=in_batch, other=0), width)
        is_live = (row < active) & is_within(pool_row, pool_rows)
        length = tl.where(is_live, clamped_length(seq_len, delta, cap), pad_seqlen).to(tl.int32)
        pool_row_ptr = req_to_token_ptr + pool_row * pool_row_stride
        first_position = length - queries
        if q_lens_ptr is not None:
            given = tl.load(q_lens_ptr + wide_row * q_stride, mask=row < active, other=0).to(tl.int64)
            queries = tl.minimum(tl.maximum(given, 0), INT32_MAX).to(tl.int32)
            given = clamped_queries(given)
            first_position = length - given
            if slot_mapping_ptr is not None:
                first_token = tl.cumsum(tl.where(place == 0, given, 0), 0) - given
                for begin in range(0, first_row, SCAN):
                    other = begin + tl.arange(0, SCAN)
                    q_lens = tl.load(q_lens_ptr + other.to(tl.int64) * q_stride, mask=other < first_row, other=0)
                    first_token += tl.sum(clamped_queries(q_lens.to(tl.int64)), 0)
                count = tl.minimum(queries, tl.maximum(num_tokens - first_token, 0)).to(tl.int32)
        # Slots of tokens and of pages are looked up together, and stored once all are there: one wait for both.
        slot, swa_slot = None, None
        if slot_mapping_ptr is not None:
            room = tl.where(is_live, pool_width if slots_ptr is None else num_slots, -1)
            slot = slots_of_tokens(
                pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, first_token, first_position, query,
                query < count,
            )  # fmt: skip
        ahead = tl.maximum(length - queries, 0)
        owner, generation = tl.where(is_live, pool_row, -1), tl.where(is_live, generation, 0)
        is_kept = (owner == old_owner) & (generation == old_generation)
        start, settled, first, live = changes_of(
            is_kept, old_settled, old_first, seq_len, length, ahead, is_live, width, cap, window, PAGE_SIZE, WINDOWED
        )
        readable = tl.minimum(live, pool_columns)
        page_slots = slots_of_pages(pool_row_ptr, pool_stride, start, offset, readable, PAGE_SIZE, LANES, 1)
        columns = tl.maximum(live - start, old_live - live)
        if swa_page_table_ptr is not None:
            columns = tl.maximum(columns, tl.minimum(first, start) - old_first)
        most = columns
        if slot_mapping_ptr is not None:
            most = tl.maximum(columns, count)
        # Over all warps of the program: behind it, each has loaded its records, and they may be replaced.
        further = tl.max(most, 0)
        if (slot_mapping_ptr is not None) and (map_ptr is not None):
            swa_slot = swa_slot_of(slot, map_ptr, map_stride, map_size, query < count, PAGE_SIZE, PAGE_MAP)
        change_turn(
            page_slots, offset, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size, start, first, live,
            old_first, old_live, status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG, LANES, 1,
        )  # fmt: skip
        # In most steps no record changes, and nothing is stored.
        is_renewed = (is_kept == 0) | (settled != old_settled) | (live != old_live) | (first != old_first)
        is_renewed &= in_batch & (place == 0)
        renew_record(record_ptr, owner, generation, settled, live, first, is_renewed)
        if slot_mapping_ptr is not None:
            write_turn(
                slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
                slot_mapping_ptr, swa_slot_mapping_ptr, first_token, first_position, query, query < count,
                status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG,
            )  # fmt: skip
        if further > parts * LANES:
            few, end = parts * LANES * (1 + TURNS * WIDE), further.to(tl.int64)
            if further > few:
                # More than two long rows get on faster side by side.
                if tl.sum(((place == 0) & (columns > few)).to(tl.int32), 0) <= 2:
                    end = few
            change_further(
                parts * LANES, end, pool_row_ptr, pool_stride, readable, page_row_ptr, swa_row_ptr, map_ptr, map_stride,
                map_size, start, first, live, old_first, old_live, place, part, parts, status_ptr,
                PAGE_SIZE, PAGE_MAP, DEBUG, LANES, WIDE,
            )  # fmt: skip
            if end < further:  # more than half the columns at a time would spill
                change_long(
                    end, columns, first_row, req_to_token_ptr, pool_row, pool_row_stride, pool_stride, readable,
                    page_table_ptr, page_row_stride, swa_page_table_ptr, swa_row_stride, map_ptr, map_stride, map_size,
                    start, first, live, old_first, old_live, part, parts, status_ptr,
                    PAGE_SIZE, PAGE_MAP, DEBUG, GROUP, LANES, WIDE // 2,
                )  # fmt: skip
            if slot_mapping_ptr is not None:  # more than two tokens a lane would spill
                write_further(
                    further, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
                    slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, first_position, place, from_last,
                    parts, status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG, LANES, 2,
                )  # fmt: skip
    elif batch_size <= FEW:
        sum_batch(
            seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, req_pool_indices_ptr, index_stride, pool_rows, num_reqs_ptr,
            batch_size, delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
            slots_ptr, num_slots, slot_mapping_ptr, swa_slot_mapping_ptr, num_tokens, status_ptr,
            DEBUG, PDL, FEW, SCAN, True,
        )  # fmt: skip
    else:
        sum_batch(
            seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, req_pool_indices_ptr, index_stride, pool_rows, num_reqs_ptr,
            batch_size, delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
            slots_ptr, num_slots, slot_mapping_ptr, swa_slot_mapping_ptr, num_tokens, status_ptr,
            DEBUG, PDL, CHUNK, SCAN, False,
        )  # fmt: skip
