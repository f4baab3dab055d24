"""Device functions for what spans a whole batch: prefix sums, and the tokens that belong to no row.

A batch is taken CHUNK rows a program. Each program adds up the rows ahead of its own by itself, SCAN of them at a time
with all of their loads in flight at once: no program waits for another.
"""

from __future__ import annotations

from compiled_kv.launch import constexpr, device_function, launch_dependents, tl, wait_knowing
from compiled_kv.rows_triton import (
    BAD_ROW,
    INT32_MAX,
    NEGATIVE_LENGTH,
    active_rows,
    clamped_length,
    clamped_queries,
    is_within,
    length_bits,
    load_at,
    report,
    value_at,
)
from compiled_kv.status import Status

SUM_OVERFLOW = constexpr(int(Status.SUM_OVERFLOW))
TOO_MANY_TOKENS = constexpr(int(Status.TOO_MANY_TOKENS))


@device_function
def _inclusive_sums(counts, FITS_INT32: tl.constexpr):
    if FITS_INT32:
        return tl.cumsum(counts, 0).to(tl.int64)
    else:
        return tl.cumsum(counts.to(tl.int64), 0)


@device_function
def _sum(lengths):
    """Sum of up to 2^15 lengths, int64. In two halves that cannot wrap: sums of 32 bits take an instruction a warp."""
    return (tl.sum(lengths >> 16, 0).to(tl.int64) << 16) + tl.sum(lengths & 0xFFFF, 0)


@device_function
def _is_live(indices_ptr, index_stride, pool_rows, row, counted):
    """Which of the counted rows have a pool row; all of them where `indices_ptr` is None."""
    live = counted
    if indices_ptr is not None:
        live = is_within(load_at(indices_ptr, row, index_stride, counted, -1), pool_rows)
    return live


@device_function
def prefix_sums(
    seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, indices_ptr, index_stride, pool_rows, active, batch_size,
    delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, status_ptr, begin,
    DEBUG: tl.constexpr, CHUNK: tl.constexpr, SCAN: tl.constexpr, IS_ALL: tl.constexpr,
):  # fmt: skip
    """Lengths and prefix sums of rows [begin, begin + CHUNK), which are the whole batch where `IS_ALL`.

    `indices_ptr` and `q_lens_ptr` may be None: every row below `active` is live, and has `q_len` queries. Returns the
    queries that `q_lens_ptr` gives all rows up to the chunk's end.
    """
    row = begin + tl.arange(0, CHUNK)
    in_batch = row < batch_size
    counted = row < active
    seq_len = value_at(seq_lens_ptr, row, seq_stride, counted, 0)
    live = _is_live(indices_ptr, index_stride, pool_rows, row, counted)
    before_k = tl.zeros([], tl.int64)
    before_q = tl.zeros([], tl.int64)
    if not IS_ALL:
        ahead = tl.minimum(begin, active).to(tl.int32)
        for earlier in range(0, ahead, SCAN):
            other = earlier + tl.arange(0, SCAN)
            is_ahead = other < ahead
            other_len = value_at(seq_lens_ptr, other, seq_stride, is_ahead, 0)
            other_live = _is_live(indices_ptr, index_stride, pool_rows, other, is_ahead)
            before_k += _sum(tl.where(other_live, clamped_length(other_len, delta, cap), 0))
        if q_lens_ptr is not None:  # in a loop of its own: so many loads at once would spill
            for earlier in range(0, ahead, SCAN):
                other = earlier + tl.arange(0, SCAN)
                before_q += tl.sum(clamped_queries(load_at(q_lens_ptr, other, q_stride, other < ahead, 0)), 0)
    bits = tl.where(live, length_bits(seq_len, delta, cap), 0)
    if indices_ptr is not None:
        bits |= tl.where(counted & (live == 0), BAD_ROW, 0)
    length = tl.where(live, clamped_length(seq_len, delta, cap), 0)
    tl.store(cache_seqlens_ptr + row, tl.where(live, length, pad_seqlen).to(tl.int32), mask=in_batch)
    if q_lens_ptr is not None:
        queries = load_at(q_lens_ptr, row, q_stride, counted, 0)
        bits |= tl.where(live & (queries < 0), NEGATIVE_LENGTH, 0)
        queries = clamped_queries(queries)
        ends_q = before_q + _inclusive_sums(queries, False)
        before_q += tl.sum(queries, 0)
    else:
        ends_q = tl.minimum(row.to(tl.int64) + 1, active) * q_len
    tl.store(cu_q_ptr + row + 1, tl.minimum(ends_q, INT32_MAX).to(tl.int32), mask=in_batch)
    bits |= tl.where(in_batch & (ends_q > INT32_MAX), SUM_OVERFLOW, 0)
    # A chunk whose longest possible sum fits in 32 bits, the usual one, is scanned in 32: half the shuffles.
    if cap <= INT32_MAX // CHUNK:
        ends_k = before_k + _inclusive_sums(length, True)
    else:
        ends_k = before_k + _inclusive_sums(length, False)
    tl.store(cu_k_ptr + row + 1, tl.minimum(ends_k, INT32_MAX).to(tl.int32), mask=in_batch)
    bits |= tl.where(in_batch & (ends_k > INT32_MAX), SUM_OVERFLOW, 0)
    # Last, and by every program alike: a predicate from before the scan would be kept, and spilled, all through it.
    tl.store(cu_q_ptr, 0)
    tl.store(cu_k_ptr, 0)
    report(bits, status_ptr, DEBUG)
    return before_q


@device_function
def _pad_slots(slot_mapping_ptr, swa_slot_mapping_ptr, first_token, num_tokens, SCAN: tl.constexpr):
    """-1 for the tokens that belong to no row."""
    for begin in range(tl.minimum(first_token, num_tokens), num_tokens, SCAN):
        token = begin + tl.arange(0, SCAN)
        tl.store(slot_mapping_ptr + token, tl.full([SCAN], -1, tl.int64), mask=token < num_tokens)
        if swa_slot_mapping_ptr is not None:
            tl.store(swa_slot_mapping_ptr + token, tl.full([SCAN], -1, tl.int64), mask=token < num_tokens)


@device_function
def sum_batch(
    seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, indices_ptr, index_stride, pool_rows, num_reqs_ptr, batch_size,
    delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr,
    slots_ptr, num_slots, slot_mapping_ptr, swa_slot_mapping_ptr, num_tokens, status_ptr,
    DEBUG: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr, SCAN: tl.constexpr, IS_ALL: tl.constexpr,
):  # fmt: skip
    """What of a batch belongs to no single row, for one chunk of rows; the last one pads the slot mapping."""
    chunk = tl.program_id(0)
    begin = 0 if IS_ALL else (chunk.to(tl.int64) * CHUNK).to(tl.int32)
    if PDL:
        row = (begin + tl.arange(0, CHUNK)).to(tl.int64)
        wait_knowing((
            seq_lens_ptr + row * seq_stride, indices_ptr + row * index_stride, cap, pad_seqlen,
            cu_k_ptr,  # addresses of an empty batch are all 0
        ))  # fmt: skip
        launch_dependents()
    active = active_rows(num_reqs_ptr, batch_size)
    queries = prefix_sums(
        seq_lens_ptr, seq_stride, q_lens_ptr, q_stride, indices_ptr, index_stride, pool_rows, active, batch_size,
        delta, q_len, cap, pad_seqlen, cache_seqlens_ptr, cu_q_ptr, cu_k_ptr, status_ptr, begin,
        DEBUG, CHUNK, SCAN, IS_ALL,
    )  # fmt: skip
    if slot_mapping_ptr is not None:
        if (chunk.to(tl.int64) + 1) * CHUNK >= batch_size:
            beyond = queries
            if q_lens_ptr is None:
                queries += (tl.zeros([], tl.int64) + active) * q_len
                beyond += (tl.zeros([], tl.int64) + batch_size) * q_len
            capacity = tl.zeros([], tl.int64) + num_tokens
            if slots_ptr is not None:
                capacity = tl.zeros([], tl.int64) + num_slots
            report(tl.zeros([1], tl.int32) + tl.where(queries > capacity, TOO_MANY_TOKENS, 0), status_ptr, DEBUG)
            _pad_slots(slot_mapping_ptr, swa_slot_mapping_ptr, beyond, num_tokens, SCAN)
