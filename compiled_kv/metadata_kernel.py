"""The one kernel behind `decode_metadata`.

Grid (chunks + B * parts + helpers): the first programs take lengths and prefix sums of a chunk of rows each, for these
take longest. The next write pages and slots, `parts` programs a row taking turns over what is live. What is much longer
than others is shared with the helpers (long_rows_triton).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_kv.batch_triton import sum_batch
from compiled_kv.columns_triton import (
    clear_row,
    fill_at_once,
    fill_turns,
    fits_at_once,
    slots_if_short,
    slots_of_columns,
)
from compiled_kv.launch import dependent_launch, device_function, kernel, launch_dependents, tl, wait_knowing
from compiled_kv.long_rows_triton import help_long_rows, own_blocks
from compiled_kv.rows_triton import (
    active_rows,
    clamped_length,
    clamped_queries,
    first_column,
    is_within,
    load_at,
    pages_of,
    place_of,
    swa_slot_of,
)
from compiled_kv.tokens_triton import slots_of_tokens, write_slots


@device_function
def _finish_row(
    slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, page_row_ptr, swa_row_ptr,
    map_ptr, map_stride, map_size, slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, first_position,
    live, width, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, CLEAR: tl.constexpr, DEBUG: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Behind a row's pages: its cleared tail, and the slots of its tokens."""
    if CLEAR:
        # One table after the other: both in one loop took 5 % longer where most of a wide table is tail.
        clear_row(page_row_ptr, live, width, part, parts, BLOCK)
        if swa_row_ptr is not None:
            clear_row(swa_row_ptr, live, width, part, parts, BLOCK)
    if slot_mapping_ptr is not None:
        write_slots(
            slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
            slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, first_position, parts - 1 - part, parts,
            status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG, TOKENS,
        )  # fmt: skip


def _registers(given: Mapping[str, Any]) -> int | None:
    """With more, the next kernel's programs would find no room beside these, and start late. With a pool of 64 bits it
    takes more, and would spill."""
    return 96 if given["req_to_token_ptr"].dtype == torch.int32 else None


# NOTE [Constants and instructions]
# A program of a short row lives for a microsecond, and waits longer for its arguments and its own instructions than for
# data: on an H200 a profiler counted four to seven times as many stalls for these as for loads. So the arguments that
# the usual program needs stand first, those ahead of its first load in one line of constant memory; the usual branch is
# the first, and its code in one piece; and a program finds its place, where its first loads lie, and whatever else
# needs no load, while the kernel ahead still runs.
@kernel(registers=_registers)
def decode_metadata_kernel(
    batch_size, parts, reciprocal, helpers, index_stride, seq_stride, req_pool_indices_ptr, seq_lens_ptr, num_reqs_ptr,
    req_to_token_ptr, page_table_ptr, map_ptr, pool_rows, pool_width, pool_row_stride, pool_stride, page_row_stride,
    width, delta, cap, q_len, pad_seqlen,
    slot_mapping_ptr, swa_slot_mapping_ptr, swa_page_table_ptr, swa_row_stride, num_tokens, map_stride, map_size,
    window, q_lens_ptr, slots_ptr, status_ptr, q_stride, slots_stride, num_slots,
    cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, CLEAR: tl.constexpr, DEBUG: tl.constexpr,
    PDL: tl.constexpr, UNIT_STRIDE: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr,
    SHARED: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    parts = tl.zeros([], tl.int64) + parts
    helpers = (tl.zeros([], tl.int64) + helpers).to(tl.int32)
    turn, row, part = place_of(tl.program_id(0), batch_size, batch_size, parts, reciprocal, CHUNK)
    if (turn >= 0) & (turn < batch_size * parts):
        index_ptr = req_pool_indices_ptr + row.to(tl.int64) * index_stride
        seq_len_ptr = seq_lens_ptr + row.to(tl.int64) * seq_stride
        page_row_ptr, swa_row_ptr = page_table_ptr + row.to(tl.int64) * page_row_stride, None
        if swa_page_table_ptr is not None:
            swa_row_ptr = swa_page_table_ptr + row.to(tl.int64) * swa_row_stride
        if PDL:
            wait_knowing((index_ptr, seq_len_ptr, page_row_ptr, pad_seqlen, cap, width, num_tokens))
            launch_dependents()
        active = active_rows(num_reqs_ptr, batch_size)
        pool_row, seq_len = tl.load(index_ptr).to(tl.int64), tl.load(seq_len_ptr)
        queries = tl.zeros([], tl.int64) + q_len
        if q_lens_ptr is not None:
            # By the load's mask: a selection afterwards would keep, and spill, `row < active` while pages are written.
            queries = clamped_queries(load_at(q_lens_ptr, row, q_stride, row < active, 0))
        is_live = (row < active) & is_within(pool_row, pool_rows)
        length = tl.where(is_live, clamped_length(seq_len, delta, cap), pad_seqlen).to(tl.int32)
        live = tl.minimum(pages_of(length, PAGE_SIZE), width).to(tl.int32)
        pool_row_ptr = req_to_token_ptr + pool_row * pool_row_stride
        # On their way early, as those of tokens below; in 64 bits that takes too many registers.
        IS_NARROW: tl.constexpr = req_to_token_ptr.dtype.element_ty == tl.int32
        short_slot = None
        if IS_NARROW:
            short_slot = slots_if_short(
                pool_row_ptr, pool_stride, pool_width, 0, is_live, live, part, parts, PAGE_SIZE, UNIT_STRIDE, SHORT
            )
        room, first_token, count = None, None, None
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
            room = tl.where(is_live, pool_width if slots_ptr is None else num_slots, -1)
        if fits_at_once(live, parts, SHORT):
            slot, swa_slot = None, None
            if slot_mapping_ptr is not None:
                # Looked up with the pages and stored behind them: one wait for both.
                query = from_last * TOKENS + tl.arange(0, TOKENS)
                slot = slots_of_tokens(
                    pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, first_token, length - queries, query,
                    query < count,
                )  # fmt: skip
                if map_ptr is not None:
                    swa_slot = swa_slot_of(slot, map_ptr, map_stride, map_size, query < count, PAGE_SIZE, PAGE_MAP)
            first = first_column(length, queries, window, PAGE_SIZE, WINDOWED)
            fill_at_once(
                short_slot, pool_row_ptr, pool_stride, pool_width, 0, is_live, page_row_ptr, swa_row_ptr, map_ptr,
                map_stride, map_size, first, live, part, parts, status_ptr, PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG,
                SHORT,
            )  # fmt: skip
            _finish_row(
                slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, page_row_ptr, swa_row_ptr,
                map_ptr, map_stride, map_size, slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count,
                length - queries, live, width, part, parts, status_ptr,
                PAGE_SIZE, PAGE_MAP, CLEAR, DEBUG, BLOCK, TOKENS,
            )  # fmt: skip
        else:
            # The first turn is the row's own wherever it is cut (LONG >= BLOCK), so its slots can be on their way; with
            # a map that takes too many registers, and so would `first`, were it kept from before the cut.
            EARLY: tl.constexpr = map_ptr is None
            if EARLY:
                taken = slots_of_columns(
                    pool_row_ptr, pool_stride, pool_width, 0, is_live, live, part * BLOCK, PAGE_SIZE, UNIT_STRIDE, BLOCK
                )
            end = live
            if is_live & (live > parts * LONG):
                own = own_blocks(
                    seq_lens_ptr, seq_stride, req_pool_indices_ptr, index_stride, pool_rows, active, delta, cap, width,
                    parts.to(tl.int32), helpers, PAGE_SIZE, LONG // SHARED, SHARED, SCAN,
                )  # fmt: skip
                end = tl.minimum(live, own.to(tl.int64) * SHARED).to(tl.int32)
            if not EARLY:
                taken = slots_of_columns(
                    pool_row_ptr, pool_stride, pool_width, 0, is_live, live, part * BLOCK, PAGE_SIZE, UNIT_STRIDE, BLOCK
                )
            first = first_column(length, queries, window, PAGE_SIZE, WINDOWED)
            fill_turns(
                taken, pool_row_ptr, pool_stride, pool_width, 0, is_live, page_row_ptr, swa_row_ptr, map_ptr,
                map_stride, map_size, first, end, part * BLOCK, parts * BLOCK, status_ptr,
                PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG, not EARLY, BLOCK,
            )  # fmt: skip
            _finish_row(
                None, None, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, page_row_ptr, swa_row_ptr,
                map_ptr, map_stride, map_size, slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count,
                length - queries, live, width, part, parts, status_ptr,
                PAGE_SIZE, PAGE_MAP, CLEAR, DEBUG, BLOCK, TOKENS,
            )  # fmt: skip
    elif turn < 0:
        sum_batch(
            seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, req_pool_indices_ptr, index_stride, pool_rows, num_reqs_ptr,
            batch_size, delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
            slots_ptr, num_slots, slot_mapping_ptr, swa_slot_mapping_ptr, num_tokens, status_ptr,
            DEBUG, PDL, CHUNK, SCAN, False,
        )  # fmt: skip
    else:
        if PDL:
            dependent_launch()
        active = active_rows(num_reqs_ptr, batch_size)
        help_long_rows(
            req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, q_lens_ptr, map_ptr, status_ptr, page_table_ptr,
            swa_page_table_ptr, pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, seq_stride,
            q_stride, map_stride, map_size, page_row_stride, swa_row_stride, active, width, delta, q_len, cap,
            window, parts.to(tl.int32), (turn - batch_size * parts).to(tl.int32), helpers,
            PAGE_SIZE, PAGE_MAP, WINDOWED, DEBUG, UNIT_STRIDE, LONG // SHARED, SHARED, SCAN,
        )  # fmt: skip
