"""Device functions that share out rows much longer than the others.

Shapes alone say how many programs a row has, and in a large batch that is one or two: a single long request would keep
them busy long after all others are done. So a row of more than TURNS blocks a program is cut. Its own programs write
the front; the rest of all such rows goes, block by block in turn, to helpers: programs without a row of their own. All
find the same cut from the lengths alone, and a batch without long rows costs a helper one look at them.
"""

from __future__ import annotations

from compiled_kv.columns_triton import fill_turns, slots_of_columns
from compiled_kv.launch import constexpr, device_function, tl
from compiled_kv.rows_triton import (
    clamped_length,
    clamped_queries,
    first_column,
    is_within,
    load_at,
    pages_of,
    value_at,
)

UNSIGNED_MAX = constexpr(2**32 - 1)


@device_function
def live_columns(seq_len, pool_row, pool_rows, delta, cap, width, PAGE_SIZE: tl.constexpr):
    """Columns of a row that hold pages of its request, int32; none without a row of the pool."""
    length = tl.where(is_within(pool_row, pool_rows), clamped_length(seq_len, delta, cap), 0)
    return tl.minimum(pages_of(length, PAGE_SIZE), width).to(tl.int32)


@device_function
def _blocks(seq_len, pool_row, pool_rows, delta, cap, width, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    return pages_of(live_columns(seq_len, pool_row, pool_rows, delta, cap, width, PAGE_SIZE), BLOCK)


@device_function
def _sums(counts, chosen):
    """The sum of those counts that are chosen, and how many these are: the upper and the lower half of one number.

    A sum fits: SCAN rows of fewer than 2 ** 31 / BLOCK blocks.
    """
    return tl.sum(tl.where(chosen, (counts.to(tl.int64) << 32) + 1, 0), 0)


@device_function
def _own(blocks, rows, longest, parts, helpers, TURNS: tl.constexpr):
    """Of `rows` long rows with so many blocks in all: those that a row's own `parts` programs write, TURNS a program at
    least. Where a helper then has no more to do than one of these, is found along a chord: what is left falls the more
    slowly the later the cut, so the cut comes a little late, and no program ever gets more than it had without help.
    All blocks, where few helpers could do little for many rows.
    """
    left = tl.maximum(blocks - (rows * parts + helpers) * TURNS, 0)
    most = ((longest + parts - 1) // parts).to(tl.int64)
    sharing = tl.maximum(left + helpers * most, 1)
    own = TURNS + (left * (most - TURNS) + sharing - 1) // sharing
    return (tl.where(rows * parts > 2 * helpers, most, own) * parts).to(tl.int32)


@device_function
def own_blocks(
    seq_lens_ptr, seq_stride, indices_ptr, index_stride, pool_rows, active, delta, cap, width, parts, helpers,
    PAGE_SIZE: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Blocks of each long row of a batch that its own programs write."""
    blocks = tl.zeros([], tl.int64)
    rows = tl.zeros([], tl.int64)
    longest = tl.zeros([], tl.int32)
    for begin in range(0, active, SCAN):
        row = begin + tl.arange(0, SCAN)
        seq_lens = value_at(seq_lens_ptr, row, seq_stride, row < active, 0)
        indices = load_at(indices_ptr, row, index_stride, row < active, -1)
        count = _blocks(seq_lens, indices, pool_rows, delta, cap, width, PAGE_SIZE, BLOCK)
        found = _sums(count, count > parts * TURNS)
        blocks += found >> 32
        rows += found & UNSIGNED_MAX
        longest = tl.maximum(longest, tl.max(count, 0))
    return _own(blocks, rows, longest, parts, helpers, TURNS)


@device_function
def help_long_rows(
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, q_lens_ptr, map_ptr, status_ptr, page_table_ptr,
    swa_page_table_ptr, pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, seq_stride, q_stride,
    map_stride, map_size, page_row_stride, swa_row_stride, active, width, delta, q_len, cap, window,
    parts, helper, helpers,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, WINDOWED: tl.constexpr, DEBUG: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Write what long rows leave to the helpers; this is the one numbered `helper` of them.

    It loads lengths and indices in its own body: torch's mutation analysis follows a call's result to all its
    pointers, and would take these for outputs.
    """
    # One look at the lengths is all that a batch without long rows costs.
    most = tl.zeros([], seq_lens_ptr.dtype.element_ty)
    for begin in range(0, active, SCAN):
        row = begin + tl.arange(0, SCAN)
        most = tl.maximum(
            most, tl.max(tl.load(seq_lens_ptr + row.to(tl.int64) * seq_stride, mask=row < active, other=0), 0)
        )
    pages = tl.minimum(pages_of(clamped_length(most, delta, cap), PAGE_SIZE), width).to(tl.int32)
    active = tl.where(pages_of(pages, BLOCK) > parts * TURNS, active, 0)
    blocks = tl.zeros([], tl.int64)
    rows = tl.zeros([], tl.int64)
    longest = tl.zeros([], tl.int32)
    for begin in range(0, active, SCAN):
        row = begin + tl.arange(0, SCAN)
        seq_lens = tl.load(seq_lens_ptr + row.to(tl.int64) * seq_stride, mask=row < active, other=0)
        indices = tl.load(req_pool_indices_ptr + row.to(tl.int64) * index_stride, mask=row < active, other=-1)
        count = _blocks(seq_lens, indices.to(tl.int64), pool_rows, delta, cap, width, PAGE_SIZE, BLOCK)
        found = _sums(count, count > parts * TURNS)
        blocks += found >> 32
        rows += found & UNSIGNED_MAX
        longest = tl.maximum(longest, tl.max(count, 0))
    own = _own(blocks, rows, longest, parts, helpers, TURNS)
    # A row is found once for all of a helper's turns over it. One loop, for with a loop in a loop the addresses of its
    # lanes are kept, and spilled.
    turn, begin = tl.zeros([], tl.int64) + helper, tl.zeros([], tl.int32)
    while begin < active:
        row = begin + tl.arange(0, SCAN)
        seq_lens = tl.load(seq_lens_ptr + row.to(tl.int64) * seq_stride, mask=row < active, other=0)
        indices = tl.load(req_pool_indices_ptr + row.to(tl.int64) * index_stride, mask=row < active, other=-1)
        count = _blocks(seq_lens, indices.to(tl.int64), pool_rows, delta, cap, width, PAGE_SIZE, BLOCK)
        left = tl.where(count > parts * TURNS, tl.maximum(count - own, 0), 0).to(tl.int32)
        total = tl.sum(left, 0)
        if turn < total:
            before = _sums(left, tl.cumsum(left, 0) <= turn)
            helped, others = begin + (before & UNSIGNED_MAX), before >> 32
            pool_row = tl.load(req_pool_indices_ptr + helped * index_stride).to(tl.int64)
            seq_len = tl.load(seq_lens_ptr + helped * seq_stride)
            live = live_columns(seq_len, pool_row, pool_rows, delta, cap, width, PAGE_SIZE)
            pool_row_ptr, is_live = req_to_token_ptr + pool_row * pool_row_stride, helped >= 0
            column = (own + turn - others) * BLOCK
            end = others + pages_of(live, BLOCK) - own
            is_last = end == total
            slot = slots_of_columns(
                pool_row_ptr, pool_stride, pool_width, 0, is_live, live, column, PAGE_SIZE, UNIT_STRIDE, BLOCK
            )
            queries = tl.zeros([], tl.int64) + q_len
            if q_lens_ptr is not None:
                queries = clamped_queries(tl.load(q_lens_ptr + helped * q_stride).to(tl.int64))
            swa_row_ptr = None
            if swa_page_table_ptr is not None:
                swa_row_ptr = swa_page_table_ptr + helped * swa_row_stride
            # With a map, columns of more tokens leave no registers for a turn ahead.
            fill_turns(
                slot, pool_row_ptr, pool_stride, pool_width, 0, is_live,
                page_table_ptr + helped * page_row_stride, swa_row_ptr, map_ptr, map_stride, map_size,
                first_column(clamped_length(seq_len, delta, cap), queries, window, PAGE_SIZE, WINDOWED),
                live, column, helpers.to(tl.int64) * BLOCK, status_ptr,
                PAGE_SIZE, PAGE_MAP, UNIT_STRIDE, DEBUG, (map_ptr is None) or (PAGE_SIZE < 8), BLOCK,
            )  # fmt: skip
            # Once for the last of these rows: lengths are not looked at again, for most helpers have no further row.
            turn += (end - turn + helpers - 1) // helpers * helpers
            if is_last:
                turn -= end
                begin += SCAN
        else:
            turn -= total
            begin += SCAN
