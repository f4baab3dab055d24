"""Which boundaries of the line of requests are met, in groups of 32, and what is met before each of them.

All pairs within a group are tested at once. A boundary then knows the next one met after it; doubling that step gives
the path of boundaries met from it on, as a bit mask, and the path's sums: how many are met, and by how much they pull
the ruler back. The groups are walked in order, one short step each: the first boundary met of a group says how far the
next group's anchor lies behind this one. The sums before groups follow from all of these at once; what is met before a
boundary are then the sums behind its group less those of the boundary met last before it.

    residues 3, 9, 4, 7 modulo quota 10, overhead 2: from 3 on, 4 is met (1 behind), and then none
    behind an anchor of residue 1, 3 is met (2 behind): in all two, which pull the ruler back by 2 + 1
"""

from __future__ import annotations

from compiled_kv.launch import constexpr, device_function, tl

GROUP = constexpr(32)
GROUPS = constexpr(16)
CHUNK = constexpr(512)  # GROUP * GROUPS
ROUNDS = constexpr(5)  # 2 ** ROUNDS == GROUP
STAGED = constexpr(3)  # a boundary in scratch: residue, link, its path's sums
# Sums hold how far the ruler is pulled back and, in their low bits, a count.
COUNTED = constexpr(10)
COUNT = constexpr((1 << 10) - 1)
# A link holds a lane and, below it, how far the path's end lies behind the boundary, or behind an anchor: at most 1023
# a boundary. The link to none is above every other and has no such distance.
LANE = constexpr(27)
MOVED = constexpr((1 << 15) - 1)
NO_LINK = constexpr(0xFC000000)


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
def _wrapped(number, quota):
    """0 <= number < 2 * quota, modulo quota"""
    return tl.minimum(number.to(tl.uint32), (number - quota).to(tl.uint32)).to(tl.int32)  # below zero is huge


@device_function
def modulo(number, divisor, inverse):
    _, rest = _nearly_divided(number, divisor, inverse)
    return _wrapped(rest, divisor)


@device_function
def _behind(residue, anchor, quota):
    """How far a boundary lies behind the last mark, counted from the anchor; both are given modulo quota."""
    gap = residue - anchor
    return tl.minimum(gap.to(tl.uint32), (gap + quota).to(tl.uint32)).to(tl.int32)


@device_function
def _one_met(gap, quota, overhead, odd):
    """The sums of one boundary that is met: by how much it pulls the ruler back; `odd` is overhead modulo quota.

    `gap` itself where quota exceeds overhead. Else each boundary is met, and its request takes as few parts as hold
    its blocks without the overhead.
    """
    pull = gap + (overhead - odd) - tl.where(gap > odd, quota, 0)
    return (pull.to(tl.int64) << COUNTED).to(tl.int32) + 1


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
    sums = tl.where(after > lane, _one_met(gap, quota, overhead, odd), 0)
    path = _bit(lane)
    for _ in tl.static_range(ROUNDS):
        path |= tl.gather(path, after, 1)
        sums += tl.gather(sums, after, 1)
        after = tl.gather(after, after, 1)
    moved = _behind(tl.gather(residue, after, 1), residue, quota)
    return path, (lane.to(tl.uint32) << LANE).to(tl.int32, bitcast=True) | moved, sums


@device_function
def _whole(low, high):
    return tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), [GROUPS, GROUP])


@device_function
def _paths(residue, groups, quota, overhead, odd):
    """Paths within groups, from each boundary of [GROUPS, GROUP]: masks, links, and sums."""
    low, high = tl.split(tl.permute(tl.reshape(residue, [2, GROUPS // 2, GROUP]), (1, 2, 0)))
    path, link, sums = _paths_of_half(low, quota, overhead, odd)
    high_path, high_link, high_sums = high, high, high
    if groups > GROUPS // 2:
        high_path, high_link, high_sums = _paths_of_half(high, quota, overhead, odd)
    return _whole(path, high_path), _whole(link, high_link), _whole(sums, high_sums)


@device_function
def _step(group, gap, link, later, entry, anchors, anchor, quota, overhead):
    """Go on from the anchor through one group, `gap` behind it; `later` is the next group's residue, whose gap is
    returned first. From one gap to the next is what the walk waits for: all that this needs is in the link.
    """
    first = tl.min(tl.where(gap <= overhead, (link + gap).to(tl.uint32, bitcast=True), NO_LINK), 0)
    here = tl.arange(0, GROUP)[None, :] == group
    entry, anchors = tl.where(here, first, entry), tl.where(here, anchor, anchors)
    moved = _wrapped((first & MOVED).to(tl.int32), quota)
    gap = _behind(_behind(later, anchor, quota), moved, quota)
    return gap, entry, anchors, _wrapped(anchor + moved, quota)


@device_function
def _walk(stage_ptr, groups, anchor, quota, overhead):
    """Take the groups in order. Of each: the link of the first boundary met, NO_LINK for none, and the anchor ahead of
    it. Of all: the last anchor's residue."""
    entry, anchors = tl.full([1, GROUP], NO_LINK, tl.uint32), tl.zeros([1, GROUP], tl.int32)
    row_ptr = stage_ptr + tl.arange(0, GROUP)
    # Two groups a turn, each loaded a turn ahead into registers of its own: no step waits for the cache. The last turn
    # reads on into the sums, in vain.
    gap = _behind(tl.load(row_ptr), anchor, quota)
    later, latest = tl.load(row_ptr + GROUP), tl.load(row_ptr + 2 * GROUP)
    link, later_link = tl.load(row_ptr + CHUNK), tl.load(row_ptr + CHUNK + GROUP)
    for group in range(0, groups, 2):
        row_ptr += 2 * GROUP
        gap, entry, anchors, anchor = _step(group, gap, link, later, entry, anchors, anchor, quota, overhead)
        later, link = tl.load(row_ptr + GROUP), tl.load(row_ptr + CHUNK)
        gap, entry, anchors, anchor = _step(group + 1, gap, later_link, latest, entry, anchors, anchor, quota, overhead)
        latest, later_link = tl.load(row_ptr + 2 * GROUP), tl.load(row_ptr + CHUNK + GROUP)
    return entry, anchors, anchor


@device_function
def _sums_of_groups(stage_ptr, entry, anchors, quota, overhead, odd):
    """For each row of [GROUPS, GROUP], the link of its group's first boundary met, and the sums before that and behind
    the last; and the sums of all."""
    lane = tl.arange(0, GROUP)[None, :]
    row = tl.arange(0, GROUPS)[:, None] + tl.zeros([1, GROUP], tl.int32)
    at = stage_ptr + (tl.minimum(lane, GROUPS - 1).to(tl.int64) * GROUP + (entry >> LANE))
    added = _one_met(_behind(tl.load(at), anchors, quota), quota, overhead, odd) + tl.load(at + 2 * CHUNK)
    added = tl.where(entry < NO_LINK, added, 0)
    entry = tl.gather(entry + tl.zeros([GROUPS, 1], tl.uint32), row, 1)
    # Sums over masked lanes take one instruction each, where prefix sums take a chain of five.
    before = tl.sum(tl.where(lane < row, added, 0), 1)[:, None]
    behind = tl.sum(tl.where(lane <= row, added, 0), 1)[:, None]
    return entry, before, behind, tl.sum(tl.sum(added, 1), 0)


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
    for STAGED * CHUNK. Returns the sums before each boundary and whether it is met (not 0), both of that
    shape; the last anchor's residue, and the sums of the chunk.
    """
    lane = tl.arange(0, GROUP)[None, :] + tl.zeros([GROUPS, 1], tl.int32)
    path, link, path_sums = _paths(residue, groups, quota, overhead, odd)
    row_ptr = stage_ptr + tl.arange(0, GROUPS)[:, None].to(tl.int64) * GROUP + lane
    tl.store(row_ptr, residue)
    tl.store(row_ptr + CHUNK, link)
    tl.store(row_ptr + 2 * CHUNK, path_sums)
    tl.debug_barrier()
    # Brings all that the walk reads into the cache at once. Nothing is negative, which the compiler does not know.
    known = tl.load(row_ptr) | (tl.load(row_ptr + CHUNK) & MOVED) | tl.load(row_ptr + 2 * CHUNK)
    path |= tl.minimum(known, 0)
    entry, anchors, anchor = _walk(stage_ptr, groups, anchor, quota, overhead)
    entry, before, behind, sums = _sums_of_groups(stage_ptr, entry, anchors, quota, overhead, odd)
    bit = _bit(lane)
    path = tl.where(entry < NO_LINK, tl.gather(path, (entry >> LANE).to(tl.int32), 1), 0)
    earlier = path & (bit - 1)
    previous = tl.gather(path_sums, _highest(earlier) & (GROUP - 1), 1)
    before = tl.where(earlier != 0, behind - previous, before)
    return before, path & bit, anchor, sums
