"""The kernel behind `flashmla_schedule`: one program, in which nothing takes the parts one after the other.

Lay the requests on a line, each as long as its blocks and the overhead together, and let `quota` be the length of the
line over the number of parts, rounded up. A part begins `quota` behind the one before it, save where a boundary lies
up to `overhead` further on: then it begins there. Pull each boundary that is so met back by what it lies too far, and
all behind it too. On that ruler part i begins at mark `i * quota`.

    lengths 192, 64, 320 in blocks of 64, 2 parts, overhead 5: weights 8, 6, 10, quota 12
    boundaries 0, 8, 14, 24; 14 lies 2 behind mark 12 and is met: ruler 0, 8, 12, 24
    part 1 begins at 12, with request 2: it ends at 24; so no request is cut

Which boundaries are met follows from residues modulo `quota`: behind a boundary a that is met, the next is the first m
with (line[m] - line[a]) mod quota <= overhead (`schedule_ruler.py`). A request on the ruler then knows the first mark
in it, and leaves its number there; running maxima hand it on to the further marks in it.
"""

from __future__ import annotations

from compiled_kv.batch_triton import SUM_OVERFLOW
from compiled_kv.launch import dependent_launch, device_function, kernel, tl
from compiled_kv.rows_triton import INT32_MAX, load_at, report
from compiled_kv.schedule_ruler import (
    CHUNK,
    COUNT,
    COUNTED,
    GROUP,
    GROUPS,
    STAGED,
    inverse_of,
    meet,
    modulo,
    rounded_up,
)

WARPS = 8


def scratch_size(parts: int) -> int:
    """int32 of scratch: what is staged of a chunk, and where each part and the one behind the last begins."""
    return int(STAGED) * int(CHUNK) + 2 * int(GROUP) + 2 * (parts + 1)


@device_function
def _int32(number):
    return (tl.zeros([], tl.int64) + number).to(tl.int32)


@device_function
def _tokens(length):
    return tl.minimum(tl.maximum(length, 0), INT32_MAX).to(tl.int32)


@device_function
def _blocks(length, BLOCK_SIZE: tl.constexpr):
    """Blocks of a request, before they are clamped; an empty one counts as one."""
    blocks = (_tokens(length).to(tl.uint32) + (BLOCK_SIZE - 1)) // BLOCK_SIZE
    return tl.maximum(blocks.to(tl.int32), 1)


@device_function
def _clear(starts_ptr, num_sm_parts, PARTS: tl.constexpr):
    for begin in range(0, 2 * (num_sm_parts + 1), 2 * PARTS):
        at = begin + tl.arange(0, 2 * PARTS)
        tl.store(starts_ptr + at, tl.zeros([2 * PARTS], tl.int32), mask=at < 2 * (num_sm_parts + 1))


@device_function
def _larger(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


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
def _write_parts(
    tile_scheduler_metadata_ptr, kv_lens_ptr, starts_ptr, len_stride, active, num_sm_parts, end_part, most, quota,
    inverse, BLOCK_SIZE: tl.constexpr, IN_TOKENS: tl.constexpr, LEGACY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the rows; from `end_part` on parts have no work."""
    request_before, place_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, num_sm_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        mask, start_ptr = part < num_sm_parts, starts_ptr + part.to(tl.int64) * 2
        request, place = tl.load(start_ptr, mask=mask, other=0), tl.load(start_ptr + 1, mask=mask, other=0)
        end_req, end_place = tl.load(start_ptr + 2, mask=mask, other=0), tl.load(start_ptr + 3, mask=mask, other=0)
        request, place = tl.associative_scan((request, place), 0, _larger)
        request, place = tl.maximum(request, request_before), tl.maximum(place, place_before)
        end_req, end_place = tl.maximum(request, end_req), tl.maximum(place, end_place)
        if begin + PARTS < num_sm_parts:
            request_before, place_before = tl.max(request, 0), tl.max(place, 0)
        begins, ends = part < end_part, part + 1 < end_part
        begin_block = tl.where(begins, part * quota - place, 0)
        end_block = tl.where(ends, part * quota + quota - end_place, 0)
        begin_req = tl.where(begins, request, active)
        end_req = tl.where(ends, end_req, active) - (end_block == 0).to(tl.int32)
        tokens = _tokens(load_at(kv_lens_ptr, end_req, len_stride, mask & (end_req >= 0), 0))
        blocks = tl.minimum(_blocks(tokens, BLOCK_SIZE), most)
        _write_row(
            tile_scheduler_metadata_ptr + part.to(tl.int64) * 8, mask, begin_req, begin_block, end_req, end_block,
            tokens, blocks, quota, inverse, BLOCK_SIZE, IN_TOKENS, LEGACY,
        )  # fmt: skip


# The lengths are loaded in the kernel itself, as is `num_reqs`: to torch's analysis of mutated arguments, a function
# that is handed a pointer and returns what leads to a store's address writes through that pointer.
@kernel
def flashmla_schedule_kernel(
    kv_lens_ptr, num_reqs_ptr, tile_scheduler_metadata_ptr, num_splits_ptr, scratch_ptr,
    len_stride, batch_size, num_sm_parts, overhead, most,
    BLOCK_SIZE: tl.constexpr, IN_TOKENS: tl.constexpr, LEGACY: tl.constexpr, DEBUG: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    batch_size, num_sm_parts, overhead, most = _int32(batch_size), _int32(num_sm_parts), _int32(overhead), _int32(most)
    row = tl.arange(0, CHUNK)
    length = tl.load(kv_lens_ptr + row.to(tl.int64) * len_stride, mask=row < batch_size, other=0)
    active = batch_size
    if num_reqs_ptr is not None:
        active = tl.minimum(tl.maximum(tl.load(num_reqs_ptr).to(tl.int64), 0), batch_size).to(tl.int32)
    inverse_parts = inverse_of(num_sm_parts)
    starts_ptr = scratch_ptr + (STAGED * CHUNK + 2 * GROUP)
    _clear(starts_ptr, num_sm_parts, PARTS)
    tl.store(num_splits_ptr, 0)

    blocks = _blocks(length, BLOCK_SIZE)
    bits = tl.where((row < active) & (blocks > most), SUM_OVERFLOW, 0)
    blocks = tl.minimum(blocks, most)
    weight = tl.where(row < active, blocks + overhead, 0)
    total = tl.sum(weight, 0)
    for begin in range(CHUNK, active, CHUNK):
        request = begin + row
        length = tl.load(kv_lens_ptr + request.to(tl.int64) * len_stride, mask=request < active, other=0)
        wanted = _blocks(length, BLOCK_SIZE)
        bits |= tl.where(wanted > most, SUM_OVERFLOW, 0)
        total += tl.sum(tl.where(request < active, tl.minimum(wanted, most) + overhead, 0), 0)
    report(bits, None, DEBUG)
    quota = tl.maximum(rounded_up(total, num_sm_parts, inverse_parts), 1)
    inverse = inverse_of(quota)
    line = tl.cumsum(weight, 0)
    odd = modulo(overhead, quota, inverse)

    line_before = tl.zeros([], tl.int32)
    anchor, pulled, met, end_part = line_before, line_before, line_before, line_before
    for begin in range(0, batch_size, CHUNK):
        request = begin + row
        before, is_met = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
        sums = tl.zeros([], tl.int32)
        if begin < active - 1:
            # The last boundary ends a part wherever it lies, and nothing goes on from there.
            residue = tl.where(request < active - 1, modulo(line, quota, inverse), INT32_MAX)
            groups = (tl.minimum(active - begin, CHUNK) + GROUP - 1) // GROUP
            before, is_met, anchor, sums = meet(
                scratch_ptr, tl.reshape(residue, [GROUPS, GROUP]), groups, anchor, quota, overhead, odd
            )
            before, is_met = tl.reshape(before, [CHUNK]), tl.reshape(is_met, [CHUNK])
        else:
            tl.debug_barrier()  # the parts' beginnings are cleared by now
        place = line - weight - pulled - (before >> COUNTED)
        first = rounded_up(place, quota, inverse)
        is_end = (is_met != 0) | (request == active - 1)
        beyond = rounded_up(place + blocks + tl.where(is_end, 0, overhead), quota, inverse)
        start_ptr, begins = starts_ptr + first.to(tl.int64) * 2, (request < active) & (first < beyond)
        tl.store(start_ptr, request, mask=begins)
        tl.store(start_ptr + 1, place, mask=begins)
        splits = request + beyond - met - (before & COUNT)
        pulled += sums >> COUNTED
        met += sums & COUNT
        end_part = rounded_up(tl.maximum(total - pulled - overhead, 0), quota, inverse)
        splits = tl.where(request < active, splits, tl.maximum(active - 1, 0) + end_part - met)
        tl.store(num_splits_ptr + 1 + request, splits, mask=request < batch_size)
        if begin + CHUNK < batch_size:
            tl.debug_barrier()  # the walk is done with what is staged
            line_before += tl.sum(weight, 0)
            request += CHUNK
            length = tl.load(kv_lens_ptr + request.to(tl.int64) * len_stride, mask=request < active, other=0)
            blocks = tl.minimum(_blocks(length, BLOCK_SIZE), most)
            weight = tl.where(request < active, blocks + overhead, 0)
            line = line_before + tl.cumsum(weight, 0)
    tl.debug_barrier()
    _write_parts(
        tile_scheduler_metadata_ptr, kv_lens_ptr, starts_ptr, len_stride, active, num_sm_parts, end_part, most, quota,
        inverse, BLOCK_SIZE, IN_TOKENS, LEGACY, PARTS,
    )  # fmt: skip
