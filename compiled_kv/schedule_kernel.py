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
in it, and leaves its number there (`schedule_parts.py`).
"""

from __future__ import annotations

from compiled_kv.batch_triton import SUM_OVERFLOW
from compiled_kv.launch import dependent_launch, device_function, kernel, tl
from compiled_kv.rows_triton import INT32_MAX, report
from compiled_kv.schedule_parts import blocks_of, packed, write_parts
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
    return int(STAGED) * int(CHUNK) + 2 * (parts + 1)


@device_function
def _int32(number):
    return (tl.zeros([], tl.int64) + number).to(tl.int32)


@device_function
def _clear(starts_ptr, num_sm_parts, PARTS: tl.constexpr):
    part, zero = tl.arange(0, PARTS), tl.zeros([PARTS], tl.int64)
    tl.store(starts_ptr + part, zero, mask=part <= num_sm_parts)
    for begin in range(PARTS, num_sm_parts + 1, PARTS):
        tl.store(starts_ptr + begin + part, zero, mask=begin + part <= num_sm_parts)


@device_function
def _summed(weight):
    """Prefix sums of [CHUNK], and their last. Warps wait for each other once: each gets the sums of all half groups in
    its lanes."""
    half = tl.arange(0, GROUP)[None, :]
    halves = tl.sum(tl.reshape(weight, [GROUP, CHUNK // GROUP]), 1)[None, :]
    before = tl.sum(tl.where(half < 2 * tl.arange(0, GROUPS)[:, None], halves, 0), 1)
    line = tl.cumsum(tl.reshape(weight, [GROUPS, GROUP]), 1) + before[:, None]
    return tl.reshape(line, [CHUNK]), tl.sum(tl.sum(halves, 1), 0)


# The lengths are loaded in the kernel itself, as is `num_reqs`: to torch's analysis of mutated arguments, a function
# that is handed a pointer and returns what leads to a store's address writes through that pointer.
# Arguments stand in the order of need: all but the outputs lie in one line of constant memory.
@kernel
def flashmla_schedule_kernel(
    kv_lens_ptr, num_reqs_ptr, len_stride, batch_size, num_sm_parts, reciprocal, overhead, most,
    scratch_ptr, num_splits_ptr, tile_scheduler_metadata_ptr,
    BLOCK_SIZE: tl.constexpr, IN_TOKENS: tl.constexpr, LEGACY: tl.constexpr, DEBUG: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    batch_size, num_sm_parts, overhead, most = _int32(batch_size), _int32(num_sm_parts), _int32(overhead), _int32(most)
    half_inverse = _int32(reciprocal).to(tl.uint32)  # from the host: a division here would be waited for
    inverse_parts = half_inverse + half_inverse
    if PDL:
        dependent_launch()
    row = tl.arange(0, CHUNK)
    length = tl.load(kv_lens_ptr + row.to(tl.int64) * len_stride, mask=row < batch_size, other=0)
    active = batch_size
    if num_reqs_ptr is not None:
        active = tl.minimum(tl.maximum(tl.load(num_reqs_ptr).to(tl.int64), 0), batch_size).to(tl.int32)
    starts_ptr = (scratch_ptr + STAGED * CHUNK).to(tl.pointer_type(tl.int64))
    _clear(starts_ptr, num_sm_parts, PARTS)
    tl.store(num_splits_ptr, 0)

    blocks = blocks_of(length, BLOCK_SIZE)
    bits = tl.where((row < active) & (blocks > most), SUM_OVERFLOW, 0)
    blocks = tl.minimum(blocks, most)
    weight = tl.where(row < active, blocks + overhead, 0)
    line, total = _summed(weight)
    for begin in range(CHUNK, active, CHUNK):
        request = begin + row
        length = tl.load(kv_lens_ptr + request.to(tl.int64) * len_stride, mask=request < active, other=0)
        wanted = blocks_of(length, BLOCK_SIZE)
        bits |= tl.where(wanted > most, SUM_OVERFLOW, 0)
        total += tl.sum(tl.where(request < active, tl.minimum(wanted, most) + overhead, 0), 0)
    report(bits, None, DEBUG)
    quota = tl.maximum(rounded_up(total, num_sm_parts, inverse_parts), 1)
    inverse = inverse_of(quota)
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
        tl.store(starts_ptr + first, packed(request, place), mask=(request < active) & (first < beyond))
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
            blocks = tl.minimum(blocks_of(length, BLOCK_SIZE), most)
            weight = tl.where(request < active, blocks + overhead, 0)
            line, _ = _summed(weight)
            line += line_before
    tl.debug_barrier()
    write_parts(
        tile_scheduler_metadata_ptr, kv_lens_ptr, starts_ptr, len_stride, active, num_sm_parts, end_part, most, quota,
        inverse, BLOCK_SIZE, IN_TOKENS, LEGACY, PARTS,
    )  # fmt: skip
