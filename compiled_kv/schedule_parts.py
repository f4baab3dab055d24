"""The last of a schedule's work: what its parts begin with, and their rows.

A request leaves its number and its place on the ruler with the first part that begins in it, packed into one int64;
running maxima hand both on to the further parts that begin in it.
"""

from __future__ import annotations

from compiled_kv.launch import device_function, tl
from compiled_kv.rows_triton import INT32_MAX, load_at
from compiled_kv.schedule_ruler import GROUP, rounded_up


@device_function
def tokens_of(length):
    return tl.minimum(tl.maximum(length, 0), INT32_MAX).to(tl.int32)


@device_function
def blocks_of(length, BLOCK_SIZE: tl.constexpr):
    """Blocks of a request, before they are clamped; an empty one counts as one."""
    blocks = (tokens_of(length).to(tl.uint32) + (BLOCK_SIZE - 1)) // BLOCK_SIZE
    return tl.maximum(blocks.to(tl.int32), 1)


@device_function
def packed(request, place):
    """Half as many loads and stores as apart."""
    return (request.to(tl.int64) << 32) | place


@device_function
def _unpacked(start):
    return (start >> 32).to(tl.int32), start.to(tl.int32)


@device_function
def _larger(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@device_function
def _handed_on(start, PARTS: tl.constexpr):
    """Where parts begin, from what requests have left: running maxima of [PARTS], and the last of them. Warps wait for
    each other once: each gets the maxima of all GROUP-th parts in its lanes."""
    lane, row = tl.arange(0, GROUP)[None, :], tl.arange(0, PARTS // GROUP)[:, None]
    request, place = _unpacked(tl.reshape(start, [PARTS // GROUP, GROUP]))
    request, place = tl.associative_scan((request, place), 1, _larger)
    most_request, most_place = _unpacked(tl.max(tl.reshape(start, [GROUP, PARTS // GROUP]), 1)[None, :])
    earlier = lane < row * (GROUP * GROUP // PARTS)
    request = tl.maximum(request, tl.max(tl.where(earlier, most_request, 0), 1)[:, None])
    place = tl.maximum(place, tl.max(tl.where(earlier, most_place, 0), 1)[:, None])
    last_request, last_place = tl.max(tl.max(most_request, 1), 0), tl.max(tl.max(most_place, 1), 0)
    return tl.reshape(request, [PARTS]), tl.reshape(place, [PARTS]), last_request, last_place


@device_function
def _write_row(
    row_ptr, mask, begin_req, begin_block, end_req, end_block, tokens, blocks, quota, inverse,
    BLOCK_SIZE: tl.constexpr, IN_TOKENS: tl.constexpr, LEGACY: tl.constexpr,
):  # fmt: skip
    """One part; `tokens` and `blocks` are those of the last request, which is whole where `end_block` is 0."""
    zero = tl.zeros(mask.shape, tl.int32)
    cut_first, cut_last = begin_block > 0, end_block > 0
    begin_at, end_at = begin_block, tl.where(cut_last, end_block, tl.where(tokens > 0, blocks, 0))
    if IN_TOKENS:
        begin_at, end_at = begin_block * BLOCK_SIZE, tl.where(cut_last, end_block * BLOCK_SIZE, tokens)
    tl.store(row_ptr, begin_req, mask=mask)
    tl.store(row_ptr + 3, end_at, mask=mask)
    tl.store(row_ptr + 4, rounded_up(begin_block, quota, inverse), mask=mask)
    tl.store(row_ptr + 7, zero, mask=mask)
    if LEGACY:
        tl.store(row_ptr + 1, begin_at, mask=mask)
        tl.store(row_ptr + 2, end_req, mask=mask)
        tl.store(row_ptr + 5, zero, mask=mask)
        tl.store(row_ptr + 6, zero, mask=mask)
    else:
        either = (begin_req == end_req) & (cut_first | cut_last)
        tl.store(row_ptr + 1, end_req, mask=mask)
        tl.store(row_ptr + 2, begin_at, mask=mask)
        tl.store(row_ptr + 5, (cut_first | either).to(tl.int32), mask=mask)
        tl.store(row_ptr + 6, (cut_last | either).to(tl.int32), mask=mask)


@device_function
def write_parts(
    tile_scheduler_metadata_ptr, kv_lens_ptr, starts_ptr, len_stride, active, num_sm_parts, end_part, most, quota,
    inverse, BLOCK_SIZE: tl.constexpr, IN_TOKENS: tl.constexpr, LEGACY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the rows; from `end_part` on parts have no work."""
    request_before, place_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, num_sm_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        mask = part < num_sm_parts
        start = tl.load(starts_ptr + part, mask=mask, other=0)
        end_req, end_place = _unpacked(tl.load(starts_ptr + part + 1, mask=mask, other=0))
        request, place, last_request, last_place = _handed_on(start, PARTS)
        request, place = tl.maximum(request, request_before), tl.maximum(place, place_before)
        end_req, end_place = tl.maximum(request, end_req), tl.maximum(place, end_place)
        request_before, place_before = tl.maximum(request_before, last_request), tl.maximum(place_before, last_place)
        begins, ends = part < end_part, part + 1 < end_part
        begin_block = tl.where(begins, part * quota - place, 0)
        end_block = tl.where(ends, part * quota + quota - end_place, 0)
        begin_req = tl.where(begins, request, active)
        end_req = tl.where(ends, end_req, active) - (end_block == 0).to(tl.int32)
        tokens = tokens_of(load_at(kv_lens_ptr, end_req, len_stride, mask & (end_req >= 0), 0))
        blocks = tl.minimum(blocks_of(tokens, BLOCK_SIZE), most)
        _write_row(
            tile_scheduler_metadata_ptr + part.to(tl.int64) * 8, mask, begin_req, begin_block, end_req, end_block,
            tokens, blocks, quota, inverse, BLOCK_SIZE, IN_TOKENS, LEGACY,
        )  # fmt: skip
