"""The kernel behind `draft_kv_indices`.

Grid (clearers + B * topk, parts, steps): of each step, program (0, 0) takes `kv_indptr`, the programs of the first
`clearers` clear what no branch owns, and program (clearers + i, k) writes the entries of branch i, behind those of the
requests before.
"""

from __future__ import annotations

from compiled_kv.columns_triton import LINE, clear_row
from compiled_kv.launch import dependent_launch, device_function, kernel, tl
from compiled_kv.peers.csr_kernel import entry_of, slots_at
from compiled_kv.rows_triton import INT32_MAX, clamped_length, load_at, page_of, through_map


@device_function
def _kept(length, window, sinks):
    """Committed tokens that a draft reads: all of them where `window` is 0."""
    return tl.where(window > 0, tl.minimum(length, tl.zeros([], tl.int64) + window + sinks), length)


@device_function
def _physical(slot, map_ptr, map_stride, map_size, mask, PAGE_SIZE: tl.constexpr):
    """Slot of a virtual slot; the null slot for none, and in a page that is not bound."""
    page = through_map(page_of(slot, PAGE_SIZE), map_ptr, map_stride, map_size, mask)
    page = page_of(page, 1).to(tl.int64)
    return tl.where(page < 0, 0, page * PAGE_SIZE + slot % PAGE_SIZE)


@kernel
def draft_kv_indices_kernel(
    pool_ptr, req_pool_indices_ptr, seq_lens_ptr, branch_lens_ptr, map_ptr, kv_indptr_ptr, kv_indices_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, seq_stride, branch_stride, map_stride, map_size,
    indptr_row_stride, indices_row_stride, clearers, batch_size, topk, num_steps, capacity, cap, window,
    sinks,
    PAGE_SIZE: tl.constexpr, ENTRY_SIZE: tl.constexpr, CLEAR: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    branch = tl.program_id(0).to(tl.int64) - clearers
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    drafts = tl.program_id(2).to(tl.int64) + 1
    room = tl.zeros([], tl.int64) + capacity
    kv_indptr_ptr += tl.program_id(2).to(tl.int64) * indptr_row_stride
    kv_indices_ptr += tl.program_id(2).to(tl.int64) * indices_row_stride
    # Loaded here and not in a device function, as in csr_kernel.
    request = tl.where(branch < 0, batch_size, branch // topk)
    first = tl.zeros([], tl.int64)
    for chunk in range(0, request, SCAN):
        other = (chunk + tl.arange(0, SCAN)).to(tl.int64)
        pool_row = tl.load(req_pool_indices_ptr + other * index_stride, mask=other < request, other=-1).to(tl.int64)
        live = (pool_row >= 0) & (pool_row < pool_rows)
        raw = tl.load(seq_lens_ptr + other * seq_stride, mask=live, other=0).to(tl.int64)
        kept = _kept(clamped_length(raw, 0, cap).to(tl.int64), window, sinks)
        first += tl.sum(tl.where(other < request, (kept + drafts) * topk, 0), 0)
    if branch < 0:
        if tl.program_id(0) + tl.program_id(1) == 0:
            total = tl.zeros([], tl.int64)
            branches = (tl.zeros([], tl.int64) + batch_size) * topk
            for from_branch in range(0, branches, SCAN):
                one = from_branch + tl.arange(0, SCAN)
                in_range = one < branches
                if branch_lens_ptr is not None:
                    raw = load_at(branch_lens_ptr, one, branch_stride, in_range, 0)
                else:
                    pool_row = load_at(req_pool_indices_ptr, one // topk, index_stride, in_range, -1)
                    live = (pool_row >= 0) & (pool_row < pool_rows)
                    raw = load_at(seq_lens_ptr, one // topk, seq_stride, live, 0)
                count = tl.where(in_range, _kept(clamped_length(raw, 0, cap).to(tl.int64), window, sinks) + drafts, 0)
                ends = tl.minimum(tl.minimum(total + tl.cumsum(count, 0), room), INT32_MAX)
                tl.store(kv_indptr_ptr + one + 1, ends.to(tl.int32), mask=in_range)
                total += tl.sum(count, 0)
            tl.store(kv_indptr_ptr, 0)
        if CLEAR:
            turn = tl.program_id(0) * parts + part
            clear_row(kv_indices_ptr, tl.minimum(first, room), room, turn, clearers * parts, BLOCK)
    else:
        pool_row = tl.load(req_pool_indices_ptr + request * index_stride).to(tl.int64)
        is_live = (pool_row >= 0) & (pool_row < pool_rows)
        raw = tl.load(seq_lens_ptr + request * seq_stride, mask=is_live, other=0)
        length = clamped_length(raw, 0, cap).to(tl.int64)
        kept = _kept(length, window, sinks)
        front = tl.minimum(kept, sinks)
        own = branch - request * topk
        pages = (length % PAGE_SIZE + num_steps + PAGE_SIZE - 1) // PAGE_SIZE
        first += own * (kept + drafts)
        count = tl.minimum(kept + drafts, room - first)
        pool_row_ptr = pool_ptr + pool_row * pool_row_stride
        for begin in range(part * BLOCK - first % LINE, count, parts * BLOCK):
            column = begin + tl.arange(0, BLOCK)
            position = column + tl.where(column < front, 0, length - kept)
            position += tl.where(column < kept, 0, own * pages * PAGE_SIZE)
            owned = (column >= 0) & (column < count)
            slot = slots_at(pool_row_ptr, pool_stride, pool_width, position, owned & is_live, ENTRY_SIZE)
            if map_ptr is not None:
                slot = _physical(slot, map_ptr, map_stride, map_size, owned, PAGE_SIZE)
            entry = entry_of(slot, 1, kv_indices_ptr.dtype.element_ty == tl.int64)
            tl.store(kv_indices_ptr + first + column, entry, mask=owned)
