"""Device functions that write the columns of one row of a page table, shared among the row's programs.

fill_row                  columns [0, live)
  fill_at_once            where the row `fits_at_once`: one turn a program is enough
  fill_turns              turn by turn
fill_block                some columns: `slots_of_columns`, then `write_columns`
clear_row                 columns [live, width)
"""

from __future__ import annotations

from compiled_kv.launch import constexpr, device_function, tl
from compiled_kv.rows_triton import BAD_SLOT, UNMAPPED, page_of, report, swa_page_of

# The most columns that a program writes at once, in SHORT of them.
AT_ONCE = constexpr(4)
# Entries that a warp writes at once. Who writes from a column on, begins at a multiple of these ahead of it: else warps
# meet within sectors of memory, each writes a part of them, and that takes up to three times as long.
LINE = constexpr(32)


@device_function
def slots_of_columns(
    pool_ptr, pool_stride, pool_width, start, is_live, live, begin,
    PAGE_SIZE: tl.constexpr, UNIT_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First slots of the pages in columns [begin, begin + BLOCK) of one row; -1 past the pool's end, 0 past `live` and
    in a padding row. `begin` is below 2^31, as `live` is: their differences have 32 bits."""
    # Counted from `begin`, so that lanes are compared in 32 bits and none wraps.
    lane = tl.arange(0, BLOCK)
    # With a unit stride the lanes of a thread lie at constant distances, which costs no registers.
    step = tl.full([], 1, tl.int64) if UNIT_STRIDE else tl.zeros([], tl.int64) + pool_stride
    start += tl.zeros([], tl.int64)
    owned = tl.where(is_live, live, 0)
    readable = tl.minimum(owned, (pool_width - start + PAGE_SIZE - 1) // PAGE_SIZE).to(tl.int32)
    unread = tl.where(lane < (owned - begin).to(tl.int32), -1, 0).to(pool_ptr.dtype.element_ty)
    is_read = lane < (readable - begin).to(tl.int32)
    page_step = step * PAGE_SIZE
    at = start * step + begin * page_step + lane.to(tl.int64) * page_step
    return tl.load(pool_ptr + at, mask=is_read, other=unread)


@device_function
def write_columns(
    slot, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size, first, live, begin, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write those of the columns [begin, begin + BLOCK) of one row that lie before `live`, from `slots_of_columns`."""
    lane = tl.arange(0, BLOCK)
    in_row = lane < (live - begin).to(tl.int32)
    page = page_of(slot, PAGE_SIZE)
    tl.store(page_ptr + begin + lane, page, mask=in_row)
    # Signs, not predicates, carry the bits: predicates of this many lanes would spill.
    bits = (page >> 31) & BAD_SLOT
    if swa_ptr is not None:
        seen = (lane >= (first - begin).to(tl.int32)) & (lane < (tl.where(is_live, live, 0) - begin).to(tl.int32))
        swa_page = swa_page_of(slot, page, map_ptr, map_stride, map_size, seen, PAGE_SIZE, PAGE_MAP)
        swa_page = tl.where(seen, swa_page, 0)
        tl.store(swa_ptr + begin + lane, swa_page, mask=in_row)
        bits |= (swa_page >> 31) & ~(page >> 31) & UNMAPPED
    report(bits, status_ptr, DEBUG)


@device_function
def fill_block(
    pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
    first, live, begin, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, UNIT_STRIDE: tl.constexpr, DEBUG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write those of the columns [begin, begin + BLOCK) of one row that lie before `live`."""
    slot = slots_of_columns(
        pool_ptr, pool_stride, pool_width, start, is_live, live, begin, PAGE_SIZE, UNIT_STRIDE, BLOCK
    )
    write_columns(
        slot, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size, first, live, begin, status_ptr,
        PAGE_SIZE, PAGE_MAP, DEBUG, BLOCK,
    )  # fmt: skip


@device_function
def fits_at_once(live, parts, SHORT: tl.constexpr):
    """Whether one turn each of the most columns that `fill_at_once` takes is enough for `parts` programs."""
    return live <= (parts * (AT_ONCE * SHORT)).to(tl.int32)


@device_function
def slots_if_short(
    pool_ptr, pool_stride, pool_width, start, is_live, live, part, parts,
    PAGE_SIZE: tl.constexpr, UNIT_STRIDE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """First slots of a program's columns if the row is so short that SHORT of them each are enough, the usual case: on
    their way before anything is decided. Of a longer row none are loaded."""
    columns = tl.where(live <= (parts * SHORT).to(tl.int32), live, 0)
    return slots_of_columns(
        pool_ptr, pool_stride, pool_width, start, is_live, columns, part * SHORT, PAGE_SIZE, UNIT_STRIDE, SHORT
    )


@device_function
def fill_at_once(
    slot, pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
    first, live, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, UNIT_STRIDE: tl.constexpr, DEBUG: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Write columns [0, live) of a row that `fits_at_once`, in as few columns a program as that takes: a program waits
    for one load as long as for many, and without a loop less is computed ahead of it. `slot` is `slots_if_short`, None
    where they are not loaded yet."""
    if slot is None:
        slot = slots_if_short(
            pool_ptr, pool_stride, pool_width, start, is_live, live, part, parts, PAGE_SIZE, UNIT_STRIDE, SHORT
        )
    # Branches and no computed width: torch's mutation analysis would follow a column computed from a length back to all
    # pointers of the call that loaded it.
    only, reach = part * SHORT, (parts * SHORT).to(tl.int32)
    if live <= reach:
        if only < live:
            write_columns(
                slot, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size, first, live, only, status_ptr,
                PAGE_SIZE, PAGE_MAP, DEBUG, SHORT,
            )  # fmt: skip
    elif live <= 2 * reach:
        if 2 * only < live:
            fill_block(
                pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
                first, live, 2 * only, status_ptr, PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG, 2 * SHORT,
            )  # fmt: skip
    elif only * AT_ONCE < live:
        fill_block(
            pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
            first, live, only * AT_ONCE, status_ptr, PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG, AT_ONCE * SHORT,
        )  # fmt: skip


@device_function
def fill_turns(
    slot, pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
    first, live, begin, step, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, UNIT_STRIDE: tl.constexpr, DEBUG: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write those columns of one row before `live` that are a program's own: BLOCK from `begin` on, whose slots are
    `slot`, and as many every `step` columns. With AHEAD slots are loaded a turn ahead, while those of this one are
    looked up in the map or stored."""
    for column in range(begin, live, step):
        if AHEAD:
            # None past the last turn, whose difference might wrap.
            coming = slots_of_columns(
                pool_ptr, pool_stride, pool_width, start, is_live, live, tl.minimum(column + step, live),
                PAGE_SIZE, UNIT_STRIDE, BLOCK,
            )  # fmt: skip
        elif column != begin:
            slot = slots_of_columns(
                pool_ptr, pool_stride, pool_width, start, is_live, live, column, PAGE_SIZE, UNIT_STRIDE, BLOCK
            )
        write_columns(
            slot, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size, first, live, column, status_ptr,
            PAGE_SIZE, PAGE_MAP, DEBUG, BLOCK,
        )  # fmt: skip
        if AHEAD:
            slot = coming


@device_function
def fill_row(
    pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
    first, live, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, UNIT_STRIDE: tl.constexpr, DEBUG: tl.constexpr,
    SHORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write columns [0, live) of one row, shared among `parts` programs.

    A padding row writes null pages. `swa_ptr` may be None; its columns before `first` are null and never looked up.
    """
    if fits_at_once(live, parts, SHORT):
        fill_at_once(
            None, pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
            first, live, part, parts, status_ptr, PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG, SHORT,
        )  # fmt: skip
    else:
        slot = slots_of_columns(
            pool_ptr, pool_stride, pool_width, start, is_live, live, part * BLOCK, PAGE_SIZE, UNIT_STRIDE, BLOCK
        )
        fill_turns(
            slot, pool_ptr, pool_stride, pool_width, start, is_live, page_ptr, swa_ptr, map_ptr, map_stride, map_size,
            first, live, part * BLOCK, parts * BLOCK, status_ptr,
            PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG, map_ptr is not None, BLOCK,
        )  # fmt: skip


@device_function
def clear_row(row_ptr, live, width, part, parts, BLOCK: tl.constexpr):
    """Write the null page to columns [live, width) of a row, `parts` programs taking turns."""
    lane = tl.arange(0, BLOCK)
    for begin in range(live.to(tl.int64) // LINE * LINE + part * BLOCK, width, parts * BLOCK):
        is_own = lane >= tl.maximum(live - begin, 0).to(tl.int32)
        is_own &= lane < tl.minimum(width - begin, BLOCK).to(tl.int32)
        tl.store(row_ptr + begin + lane, tl.zeros([BLOCK], tl.int32), mask=is_own)
