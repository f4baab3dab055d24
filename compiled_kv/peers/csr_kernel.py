"""The one kernel behind the CSR operators.

Grid (clearers + B, parts): program (0, 0) takes `kv_indptr` and the last pages, the programs of the first `clearers`
clear what no row owns, and program (clearers + i, k) writes the entries of row i. Where `kv_indptr` is not given, each
row sums up those before it.
"""

from __future__ import annotations

from compiled_kv.columns_triton import LINE, clear_row
from compiled_kv.launch import dependent_launch, device_function, kernel, tl
from compiled_kv.rows_triton import INT32_MAX, active_rows, clamped_length, load_at, page_of, through_map, value_at


@device_function
def slots_at(pool_row_ptr, pool_stride, pool_width, position, mask, ENTRY_SIZE: tl.constexpr):
    """Slot of each position; the pool has an entry for each ENTRY_SIZE of them."""
    column = position // ENTRY_SIZE
    entry = load_at(pool_row_ptr, column, pool_stride, mask & (column < pool_width), -1)
    if ENTRY_SIZE == 1:
        return entry
    else:
        page = page_of(entry, 1).to(tl.int64)
        return tl.where(page < 0, -1, page * ENTRY_SIZE + position % ENTRY_SIZE)


@device_function
def entry_of(slot, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Page of a slot as `kv_indices` holds it, -1 for none; int64 entries have room for every page."""
    if WIDE:
        return tl.where(slot >= 0, slot // PAGE_SIZE, -1)
    else:
        return page_of(slot, PAGE_SIZE)


@kernel
def csr_kernel(
    pool_ptr, req_pool_indices_ptr, kv_lens_ptr, kv_start_ptr, map_ptr, num_reqs_ptr, given_indptr_ptr,
    kv_indptr_ptr, kv_indices_ptr, kv_last_page_len_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, len_stride, start_stride, map_stride, map_size,
    indptr_stride, clearers, batch_size, capacity, cap,
    PAGE_SIZE: tl.constexpr, ENTRY_SIZE: tl.constexpr, CLEAR: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    row = tl.program_id(0) - clearers
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    is_first = tl.program_id(0) + tl.program_id(1) == 0
    active = active_rows(num_reqs_ptr, batch_size)
    room = tl.zeros([], tl.int64) + capacity
    first = tl.zeros([], tl.int64)
    if given_indptr_ptr is None:
        # Pages of the rows before; of all rows for the clearers. Loaded here and not in a device function: torch's
        # mutation analysis follows a call's result to all its pointers, and would take the lengths for outputs.
        before = tl.where(row < 0, batch_size, row)
        for chunk in range(0, before, SCAN):
            other = (chunk + tl.arange(0, SCAN)).to(tl.int64)
            in_batch = (other < before) & (other < active)
            pool_row = tl.load(req_pool_indices_ptr + other * index_stride, mask=in_batch, other=-1).to(tl.int64)
            live = (pool_row >= 0) & (pool_row < pool_rows)
            raw = tl.load(kv_lens_ptr + other * len_stride, mask=in_batch, other=0).to(tl.int64)
            length = tl.where(live, clamped_length(raw, 0, cap), 0).to(tl.int64)
            pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
            if kv_indptr_ptr is not None:
                if is_first:
                    ends = tl.minimum(tl.minimum(first + tl.cumsum(pages, 0), room), INT32_MAX)
                    in_range = other < batch_size
                    tl.store(kv_indptr_ptr + other + 1, ends.to(tl.int32), mask=in_range)
                    last = tl.where(length > 0, (length - 1) % PAGE_SIZE + 1, 0)
                    tl.store(kv_last_page_len_ptr + other, last.to(tl.int32), mask=in_range)
            first += tl.sum(pages, 0)
    if row < 0:
        if kv_indptr_ptr is not None:
            if is_first:
                tl.store(kv_indptr_ptr, 0)
        if CLEAR:
            turn = tl.program_id(0) * parts + part
            clear_row(kv_indices_ptr, tl.minimum(first, room), room, turn, clearers * parts, BLOCK)
    else:
        end = room
        if given_indptr_ptr is not None:
            indptr_ptr = given_indptr_ptr + row.to(tl.int64) * indptr_stride
            first += tl.load(indptr_ptr).to(tl.int64)
            end = tl.minimum(tl.maximum(tl.load(indptr_ptr + indptr_stride).to(tl.int64), 0), room)
        pool_row = load_at(req_pool_indices_ptr, row, index_stride, row < active, -1)
        is_live = (pool_row >= 0) & (pool_row < pool_rows) & (first >= 0)
        length = clamped_length(value_at(kv_lens_ptr, row, len_stride, is_live, 0), 0, cap).to(tl.int64)
        count = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, tl.where(is_live, end - first, 0))
        start = tl.zeros([], tl.int64)
        if kv_start_ptr is not None:
            most = (tl.zeros([], tl.int64) + pool_width) * ENTRY_SIZE
            start = tl.minimum(tl.maximum(load_at(kv_start_ptr, row, start_stride, True, 0), 0), most)
        pool_row_ptr = pool_ptr + pool_row * pool_row_stride
        for begin in range(part * BLOCK - first % LINE, count, parts * BLOCK):
            column = begin + tl.arange(0, BLOCK)
            owned = (column >= 0) & (column < count)
            slot = slots_at(pool_row_ptr, pool_stride, pool_width, start + column * PAGE_SIZE, owned, ENTRY_SIZE)
            if map_ptr is not None:
                slot = through_map(slot, map_ptr, map_stride, map_size, owned)
            entry = entry_of(slot, PAGE_SIZE, kv_indices_ptr.dtype.element_ty == tl.int64)
            tl.store(kv_indices_ptr + first + column, entry, mask=owned)
