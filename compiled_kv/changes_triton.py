"""The device function that brings one row of the persistent tables to what the batch says.

update_row
  _changes          which columns change, from what is on record and what the batch says
  _fill_columns     the new columns
  _renew_record     what the row's tables hold from now on
"""

from __future__ import annotations

from compiled_kv.columns_triton import clear_row
from compiled_kv.launch import device_function, tl
from compiled_kv.rows_triton import (
    BAD_SLOT,
    UNMAPPED,
    clamped_length,
    first_column,
    page_of,
    pages_of,
    report,
    swa_page_of,
    swa_slot_of,
)
from compiled_kv.tokens_triton import slots_of_tokens, write_slots


@device_function
def _columns(length, width, PAGE_SIZE: tl.constexpr):
    return tl.minimum(pages_of(length, PAGE_SIZE), width).to(tl.int32)


@device_function
def _held_column(record_ptr, width):
    """A column on record, held to the row whatever stands there."""
    return tl.minimum(tl.maximum(tl.load(record_ptr), 0), width).to(tl.int32)


@device_function
def _slots_of_pages(
    pool_row_ptr, pool_stride, pool_width, begin, live, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """First slots of the pages in columns [begin, begin + BLOCK) of a live row; -1 past the pool's end."""
    column = begin + tl.arange(0, BLOCK)
    position = column * PAGE_SIZE
    return tl.load(pool_row_ptr + position * pool_stride, mask=(column < live) & (position < pool_width), other=-1)


@device_function
def _fill_block(
    slot, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size, first, live, begin, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = begin + tl.arange(0, BLOCK)
    in_row = column < live
    page = page_of(slot, PAGE_SIZE)
    tl.store(page_row_ptr + column, page, mask=in_row)
    bits = tl.where(in_row & (page < 0), BAD_SLOT, 0)
    if swa_row_ptr is not None:
        seen = in_row & (column >= first)
        swa_page = swa_page_of(slot, page, map_ptr, map_stride, map_size, seen, PAGE_SIZE, PAGE_MAP)
        tl.store(swa_row_ptr + column, tl.where(seen, swa_page, 0), mask=in_row)
        bits |= tl.where(seen & (page >= 0) & (swa_page < 0), UNMAPPED, 0)
    report(bits, status_ptr, DEBUG)


@device_function
def _fill_columns(
    slot, pool_row_ptr, pool_stride, pool_width, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
    start, first, live, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write columns [start, live) of a live row, `parts` programs taking turns, of which one is usually enough. `slot`
    are those of the first turn, None where they are not loaded yet."""
    # The first turn too by the loop's variable: torch's mutation analysis would follow a column computed from `start`
    # back to all pointers that it was loaded through, and take inputs for outputs.
    for begin in range(start + part * BLOCK, live, parts * BLOCK):
        if slot is None:
            _fill_block(
                _slots_of_pages(pool_row_ptr, pool_stride, pool_width, begin, live, PAGE_SIZE, BLOCK),
                page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size, first, live, begin, status_ptr,
                PAGE_SIZE, PAGE_MAP, DEBUG, BLOCK,
            )  # fmt: skip
        else:
            if begin != start + part * BLOCK:
                slot = _slots_of_pages(pool_row_ptr, pool_stride, pool_width, begin, live, PAGE_SIZE, BLOCK)
            _fill_block(
                slot, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size, first, live, begin, status_ptr,
                PAGE_SIZE, PAGE_MAP, DEBUG, BLOCK,
            )  # fmt: skip


@device_function
def _changes(
    record_ptr, owner, generation, seq_len, length, queries, is_live, width, cap, window,
    PAGE_SIZE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Columns of a row that change from what is on record to what the batch says: they are written from `start` on.
    Then settled, first and live column, and the first and live one on record."""
    old_owner, old_generation = tl.load(record_ptr), tl.load(record_ptr + 1)
    old_settled = _held_column(record_ptr + 2, width)
    old_live = _held_column(record_ptr + 3, width)
    old_first = _held_column(record_ptr + 4, width)
    live = tl.where(is_live, _columns(length, width, PAGE_SIZE), 0)
    # Not the tokens of this step: a step that is taken back may get other pages for them.
    committed = tl.minimum(clamped_length(seq_len, 0, cap), tl.maximum(length - queries, 0)).to(tl.int32)
    settled = tl.minimum(_columns(committed, width, PAGE_SIZE), live)
    first = tl.minimum(first_column(length, queries, window, PAGE_SIZE, WINDOWED), live).to(tl.int32)
    kept = (owner == old_owner) & (generation == old_generation) & (settled >= old_settled)
    start = tl.where(kept, old_settled, 0)
    start = tl.where(first < old_first, tl.minimum(start, first), start)
    return start, settled, first, live, old_first, old_live


@device_function
def _renew_record(record_ptr, owner, generation, settled, live, first):
    # Every warp of the program has loaded the record before one of them replaces it.
    tl.debug_barrier()
    tl.store(record_ptr, owner)
    tl.store(record_ptr + 1, generation)
    tl.store(record_ptr + 2, settled)
    tl.store(record_ptr + 3, live)
    tl.store(record_ptr + 4, first)


@device_function
def update_row(
    record_ptr, owner, generation, seq_len, length, queries, is_live,
    pool_row_ptr, pool_stride, pool_width, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
    slots_ptr, slots_stride, room, slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count,
    width, cap, window, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, DEBUG: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write what changes of a row's tables, and the slots of its tokens."""
    start, settled, first, live, old_first, old_live = _changes(
        record_ptr, owner, generation, seq_len, length, queries, is_live, width, cap, window, PAGE_SIZE, WINDOWED
    )
    # Slots of pages and of tokens are looked up together, and stored once all are there: one wait for both. Without a
    # map a page's are left until it is known that there is one, which most steps do not begin.
    page_slot, slot, swa_slot = None, None, None
    # The last program, whose share of a row's pages is the smallest, takes the first tokens.
    from_last = parts - 1 - part
    if slot_mapping_ptr is not None:
        query = from_last * TOKENS + tl.arange(0, TOKENS)
        slot = slots_of_tokens(
            pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, first_token, length - queries, query,
            query < count,
        )  # fmt: skip
    if map_ptr is not None:
        page_slot = _slots_of_pages(
            pool_row_ptr, pool_stride, pool_width, start + part * BLOCK, live, PAGE_SIZE, BLOCK
        )  # fmt: skip
    if (slot_mapping_ptr is not None) and (map_ptr is not None):
        swa_slot = swa_slot_of(slot, map_ptr, map_stride, map_size, query < count, PAGE_SIZE, PAGE_MAP)
    _fill_columns(
        page_slot, pool_row_ptr, pool_stride, pool_width, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
        start, first, live, part, parts, status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG, BLOCK,
    )  # fmt: skip
    clear_row(page_row_ptr, swa_row_ptr, live, old_live, part, parts, BLOCK)
    if swa_row_ptr is not None:
        clear_row(swa_row_ptr, None, old_first, tl.minimum(first, start), part, parts, BLOCK)
    _renew_record(record_ptr, owner, generation, settled, live, first)
    if slot_mapping_ptr is not None:
        write_slots(
            slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
            slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, length - queries, from_last, parts,
            status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG, TOKENS,
        )  # fmt: skip
