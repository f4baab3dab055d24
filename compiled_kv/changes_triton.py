"""Device functions that bring rows of the persistent tables to what the batch says, several rows side by side.

A lane knows one row and a place among the row's lanes: everything about a row is the same in its lanes, and each takes
the columns, or the tokens, of its place.

changes_of        which columns change, from what is on record and what the batch says
change_turn       write some of them: the first turn, which is usually enough
change_further    those behind it
change_long       what is left of one or two long rows: one after the other, with all lanes
renew_record      what the rows' tables hold from now on
write_further     slots of the tokens behind the first turn
"""

from __future__ import annotations

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
)
from compiled_kv.tokens_triton import slots_of_tokens, write_turn


@device_function
def _columns(length, width, PAGE_SIZE: tl.constexpr):
    return tl.minimum(pages_of(length, PAGE_SIZE), width).to(tl.int32)


@device_function
def held_column(column, width):
    """A column on record, held to the row whatever stands there."""
    return tl.minimum(tl.maximum(column.to(tl.int32), 0), width).to(tl.int32)


@device_function
def changes_of(
    is_kept, old_settled, old_first, seq_len, length, ahead, is_live, width, cap, window,
    PAGE_SIZE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Columns of a row that change: they are written from `start` on. Then settled, first and live column.

    `is_kept` where the row still holds the request on record; `ahead` are the tokens ahead of a step's own."""
    live = tl.where(is_live, _columns(length, width, PAGE_SIZE), 0)
    # Not the tokens of this step: a step that is taken back may get other pages for them.
    settled = tl.minimum(_columns(tl.minimum(clamped_length(seq_len, 0, cap), ahead), width, PAGE_SIZE), live)
    first = tl.minimum(first_column(ahead, 0, window, PAGE_SIZE, WINDOWED), live).to(tl.int32)
    start = tl.where(is_kept & (settled >= old_settled), old_settled, 0)
    start = tl.where(first < old_first, tl.minimum(start, first), start)
    return start, settled, first, live


@device_function
def slots_of_pages(
    pool_row_ptr, pool_stride, start, offset, readable,
    PAGE_SIZE: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """First slots of the pages in a lane's columns, TIMES of them and LANES apart; -1 from column `readable` on."""
    slots = tl.tuple(())
    for each in tl.static_range(TIMES):
        own = offset + each * LANES
        position = (start + own).to(tl.int64) * PAGE_SIZE
        slots = slots + (tl.load(pool_row_ptr + position * pool_stride, mask=own < readable - start, other=-1),)
    return slots


@device_function
def _swa_pages(
    slots, start, offset, first, live, map_ptr, map_stride, map_size,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Their sliding-window pages; 0 for what the window has passed."""
    pages = tl.tuple(())
    for each in tl.static_range(TIMES):
        own = offset + each * LANES
        seen, page = (own >= first - start) & (own < live - start), page_of(slots[each], PAGE_SIZE)
        swa_page = swa_page_of(slots[each], page, map_ptr, map_stride, map_size, seen, PAGE_SIZE, PAGE_MAP)
        pages = pages + (tl.where(seen, swa_page, 0),)
    return pages


@device_function
def change_turn(
    slots, offset, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size, start, first, live, old_first, old_live,
    status_ptr, PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, LANES: tl.constexpr,
    TIMES: tl.constexpr,
):  # fmt: skip
    """Of a row's new columns, of those it shrank by, and of those its window passed, write the ones from `offset` on,
    TIMES of them and LANES apart. `slots` are those of the new ones."""
    if swa_row_ptr is not None:
        swa_pages = _swa_pages(
            slots, start, offset, first, live, map_ptr, map_stride, map_size, PAGE_SIZE, PAGE_MAP, LANES, TIMES
        )
    bits = tl.zeros(offset.shape, tl.int32)
    for each in tl.static_range(TIMES):
        # Masks by offsets: a column past the row's end might wrap.
        own = offset + each * LANES
        page, in_row, is_cleared = page_of(slots[each], PAGE_SIZE), own < live - start, own < old_live - live
        tl.store(page_row_ptr + (start + own), page, mask=in_row)
        tl.store(page_row_ptr + (live + own), 0, mask=is_cleared)
        bits |= tl.where(in_row & (page < 0), BAD_SLOT, 0)
        if swa_row_ptr is not None:
            tl.store(swa_row_ptr + (start + own), swa_pages[each], mask=in_row)
            tl.store(swa_row_ptr + (live + own), 0, mask=is_cleared)
            tl.store(swa_row_ptr + (old_first + own), 0, mask=own < tl.minimum(first, start) - old_first)
            bits |= tl.where(in_row & (page >= 0) & (swa_pages[each] < 0), UNMAPPED, 0)
    report(bits, status_ptr, DEBUG)


@device_function
def change_further(
    begin, end, pool_row_ptr, pool_stride, readable, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size,
    start, first, live, old_first, old_live, place, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Those from `begin` to `end`, `parts` programs taking turns over a row: LANES lanes, TIMES columns each."""
    for turn in range(begin, end, parts * (LANES * TIMES)):
        offset = turn + part * (LANES * TIMES) + place
        slots = slots_of_pages(pool_row_ptr, pool_stride, start, offset, readable, PAGE_SIZE, LANES, TIMES)
        change_turn(
            slots, offset, page_row_ptr, swa_row_ptr, map_ptr, map_stride, map_size, start, first, live, old_first,
            old_live, status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG, LANES, TIMES,
        )  # fmt: skip


@device_function
def _of_row(value, is_own):
    """The value, never below -1, of the lanes that `is_own` chooses."""
    return tl.max(tl.where(is_own, value, -1), 0)


@device_function
def change_long(
    begin, columns, first_row, req_to_token_ptr, pool_row, pool_row_stride, pool_stride, readable,
    page_table_ptr, page_row_stride, swa_page_table_ptr, swa_row_stride, map_ptr, map_stride, map_size,
    start, first, live, old_first, old_live, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    TIMES: tl.constexpr,
):  # fmt: skip
    """Those from `begin` on of the rows with more `columns` to write: all lanes take one row after the other."""
    lane = tl.arange(0, GROUP * LANES)
    for each in range(GROUP):
        is_own = lane // LANES == each
        end = _of_row(columns, is_own)
        if end > begin:
            row = (first_row + each).to(tl.int64)
            swa_row_ptr = None
            if swa_page_table_ptr is not None:
                swa_row_ptr = swa_page_table_ptr + row * swa_row_stride
            change_further(
                begin, end, req_to_token_ptr + _of_row(pool_row, is_own) * pool_row_stride, pool_stride,
                _of_row(readable, is_own), page_table_ptr + row * page_row_stride, swa_row_ptr, map_ptr, map_stride,
                map_size, _of_row(start, is_own), _of_row(first, is_own), _of_row(live, is_own),
                _of_row(old_first, is_own), _of_row(old_live, is_own), lane, part, parts, status_ptr,
                PAGE_SIZE, PAGE_MAP, DEBUG, GROUP * LANES, TIMES,
            )  # fmt: skip


@device_function
def renew_record(record_ptr, owner, generation, settled, live, first, owned):
    tl.store(record_ptr, owner, mask=owned)
    tl.store(record_ptr + 1, generation, mask=owned)
    tl.store(record_ptr + 2, settled, mask=owned)
    tl.store(record_ptr + 3, live, mask=owned)
    tl.store(record_ptr + 4, first, mask=owned)


@device_function
def write_further(
    further, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
    slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, first_position, place, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, LANES: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Slots of the tokens behind each row's first turn."""
    for begin in range(parts * LANES, further, parts * (LANES * TIMES)):
        slots, query = tl.tuple(()), begin + part * (LANES * TIMES) + place
        for each in tl.static_range(TIMES):
            own = query + each * LANES
            slots = slots + (
                slots_of_tokens(
                    pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, first_token, first_position, own,
                    own < count,
                ),
            )  # fmt: skip
        for each in tl.static_range(TIMES):
            own = query + each * LANES
            write_turn(
                slots[each], None, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride,
                map_size, slot_mapping_ptr, swa_slot_mapping_ptr, first_token, first_position, own, own < count,
                status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG,
            )  # fmt: skip
