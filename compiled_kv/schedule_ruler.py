"""Which boundaries of the line of requests are met, in groups of 32, and what is met before each of them.

All pairs within a group are tested at once. A boundary then knows the next one met after it; doubling that step gives
the path of boundaries met from it on, as a bit mask, and the path's sums: how many are met, and by how much they pull
the ruler back. The groups are walked in order, one short step each: the first boundary met of a group gives where its
path ends and its sums, and the next group goes on from there. What is met before a boundary are then the sums at the
path's entry less those of the boundary met last before it.

    residues 3, 9, 4, 7 modulo quota 10, overhead 2: from 3 on, 4 is met (1 behind), and then none
    behind an anchor of residue 1, 3 is met (2 behind): in all two, which pull the ruler back by 2 + 1
"""

from __future__ import annotations

from compiled_kv.launch import constexpr, device_function, tl
from compiled_kv.rows_triton import INT32_MAX

GROUP = constexpr(32)
GROUPS = constexpr(16)
CHUNK = constexpr(512)  # GROUP * GROUPS
ROUNDS = constexpr(5)  # 2 ** ROUNDS == GROUP
STAGED = constexpr(3)  # a boundary in scratch: residue, link, residue of its path's end
# A link holds a lane and its path's sums; sums hold how far the ruler is pulled back and, in their low bits, a count.
COUNTED = constexpr(10)
SUMMED = constexpr(25)
COUNT = constexpr((1 << 10) - 1)
SUMS = constexpr((1 << 25) - 1)


@device_function
def inverse_of(divisor):
    """What the divisions below multiply by: floor((2**32 - 1) / divisor)."""
    return tl.full([], 0xFFFFFFFF, tl.uint32) // divisor.to(tl.uint32)


@device_function
def _nearly_divided(number, divisor, inverse):
    """A quotient of 0 <= number < 2**31 that is right or one short, and what it leaves."""
    quotient = tl.umulhi(number.to(tl.uint32), inverse + tl.zeros(number.shape, tl.uint32)).to(tl.int32)
    return quotient, number + (quotient.to(tl.int64) * -divisor).to(tl.int32)


@device_function
def rounded_up(number, divisor, inverse):
    """ceil(number / divisor)"""
    quotient, rest = _nearly_divided(number + (divisor - 1), divisor, inverse)
    return quotient + (rest >= divisor).to(tl.int32)


@device_function
def modulo(number, divisor, inverse):
    _, rest = _nearly_divided(number, divisor, inverse)
    return tl.minimum(rest.to(tl.uint32), (rest - divisor).to(tl.uint32)).to(tl.int32)  # below zero is huge


@device_function
def _behind(residue, anchor, quota):
    """How far a boundary lies behind the last mark, counted from the anchor; both are given modulo quota."""
    gap = residue - anchor
    return tl.minimum(gap.to(tl.uint32), (gap + quota).to(tl.uint32)).to(tl.int32)


@device_function
def _pull(gap, quota, overhead, odd):
    """By how much a boundary that is met pulls the ruler back; `odd` is overhead modulo quota.

    `gap` itself where quota exceeds overhead. Else each boundary is met, and its request takes as few parts as hold
    its blocks without the overhead.
    """
    return gap + (overhead - odd) - tl.where(gap > odd, quota, 0)


@device_function
def _bit(lane):
    return (tl.full(lane.shape, 1, tl.int64) << lane).to(tl.int32)


@device_function
def _paths_of_half(residue, quota, overhead, odd):
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros([GROUPS // 2, 1], tl.int32)
    after = lane
    for nearer in tl.static_range(1, GROUP):
        later = (lane + (GROUP - nearer)) & (GROUP - 1)
        gap = _behind(tl.gather(residue, later, 1), residue, quota)
        after = tl.where(gap <= overhead, later, after)
    after = tl.maximum(after, lane)  # only an earlier one was found, beyond the group's end
    gap = _behind(tl.gather(residue, after, 1), residue, quota)
    sums = tl.where(after > lane, (_pull(gap, quota, overhead, odd) << COUNTED) + 1, 0)
    path = _bit(lane)
    for _ in tl.static_range(ROUNDS):
        path |= tl.gather(path, after, 1)
        sums += tl.gather(sums, after, 1)
        after = tl.gather(after, after, 1)
    return path, (lane << SUMMED) + sums, tl.gather(residue, after, 1)


@device_function
def _whole(low, high):
    return tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), [GROUPS, GROUP])


@device_function
def _paths(residue, groups, quota, overhead, odd):
    """Paths within groups, from each boundary of [GROUPS, GROUP]: masks, links, and the residues where they end."""
    low, high = tl.split(tl.permute(tl.reshape(residue, [2, GROUPS // 2, GROUP]), (1, 2, 0)))
    path, link, end = _paths_of_half(low, quota, overhead, odd)
    high_path, high_link, high_end = high, high, high
    if groups > GROUPS // 2:
        high_path, high_link, high_end = _paths_of_half(high, quota, overhead, odd)
    return _whole(path, high_path), _whole(link, high_link), _whole(end, high_end)


@device_function
def _staged(row_ptr):
    return tl.load(row_ptr), tl.load(row_ptr + CHUNK), tl.load(row_ptr + 2 * CHUNK)


@device_function
def _step(group, residue, link, end, entry, before, at_entry, anchor, sums, quota, overhead, odd):
    """Go on from the anchor through one group; what later groups got from it is overwritten when they are reached."""
    gap = _behind(residue, anchor, quota)
    first = tl.min(tl.where(gap <= overhead, link, INT32_MAX), 0)
    found = first < INT32_MAX
    lane = ((first >> SUMMED) & (GROUP - 1)) + tl.zeros([GROUP], tl.int32)
    pull = _pull(tl.gather(gap, lane, 0), quota, overhead, odd)
    met = sums + (pull.to(tl.int64) << COUNTED).to(tl.int32) + 1
    here = tl.arange(0, GROUPS)[:, None] + tl.zeros([1, GROUP], tl.int32) >= group
    entry = tl.where(here, first, entry)
    before = tl.where(here, sums[None, :], before)
    at_entry = tl.where(here, met[None, :], at_entry)
    anchor = tl.where(found, tl.gather(end, lane, 0), anchor)
    sums = tl.where(found, met + (first & SUMS), sums)
    return entry, before, at_entry, anchor, sums


@device_function
def _walk(stage_ptr, groups, before, anchor, quota, overhead, odd):
    """Take the groups in order. Of each: the link of the first boundary met, INT32_MAX for none, and the sums before
    it and with it. Of all: the last anchor's residue, and the sums."""
    entry = tl.full([GROUPS, GROUP], INT32_MAX, tl.int32)
    at_entry = before
    # In every lane, so that shuffles can pass them on.
    anchor += tl.zeros([GROUP], tl.int32)
    sums = tl.zeros([GROUP], tl.int32)
    row_ptr = stage_ptr + tl.arange(0, GROUP)
    # Two groups a turn, each loaded a turn ahead into registers of its own: no step waits for the cache.
    residue, link, end = _staged(row_ptr)
    next_residue, next_link, next_end = _staged(row_ptr + GROUP)
    for group in range(0, groups, 2):
        row_ptr += 2 * GROUP
        entry, before, at_entry, anchor, sums = _step(
            group, residue, link, end, entry, before, at_entry, anchor, sums, quota, overhead, odd
        )
        residue, link, end = _staged(row_ptr)
        entry, before, at_entry, anchor, sums = _step(
            group + 1, next_residue, next_link, next_end, entry, before, at_entry, anchor, sums, quota, overhead, odd
        )
        next_residue, next_link, next_end = _staged(row_ptr + GROUP)
    return entry, before, at_entry, tl.max(anchor, 0), tl.max(sums, 0)


@device_function
def _highest(bits):
    """Place of the highest bit set: the exponent of a float, which is not rounded up, as the next bit is cleared."""
    bits = bits.to(tl.uint32)
    bits = bits ^ (bits & (bits >> 1))
    return (bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@device_function
def meet(stage_ptr, residue, groups, anchor, quota, overhead, odd):
    """Go on from the anchor through the groups of a chunk.

    `residue` is [GROUPS, GROUP]: the boundaries modulo quota, INT32_MAX for one that is never met. `stage_ptr` has room
    for STAGED * CHUNK + 2 * GROUP. Returns the sums before each boundary and whether it is met (not 0), both of that
    shape; the last anchor's residue, and the sums of the chunk.
    """
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros([GROUPS, 1], tl.int32)
    path, link, end = _paths(residue, groups, quota, overhead, odd)
    row_ptr = stage_ptr + tl.arange(0, GROUPS)[:, None].to(tl.int64) * GROUP + lane
    tl.store(row_ptr, residue)
    tl.store(row_ptr + CHUNK, link)
    tl.store(row_ptr + 2 * CHUNK, end)
    tl.store(stage_ptr + STAGED * CHUNK + tl.arange(0, 2 * GROUP), tl.zeros([2 * GROUP], tl.int32))  # read ahead of use
    tl.debug_barrier()
    # Brings all that the walk reads into the cache at once. Nothing is negative, which the compiler does not know.
    staged_residue, link, end = _staged(row_ptr)
    before = tl.minimum(staged_residue, 0) | tl.minimum(link, 0) | tl.minimum(end, 0)
    entry, before, at_entry, anchor, sums = _walk(stage_ptr, groups, before, anchor, quota, overhead, odd)
    bit = _bit(lane)
    path = tl.where(entry < INT32_MAX, tl.gather(path, (entry >> SUMMED) & (GROUP - 1), 1), 0)
    earlier = path & (bit - 1)
    previous = tl.gather(link, _highest(earlier) & (GROUP - 1), 1)
    before = tl.where(earlier != 0, at_entry + (entry & SUMS) - (previous & SUMS), before)
    return before, path & bit, anchor, sums
