"""The kernel behind `flashmla_schedule`: one program, in which nothing takes the parts one after the other.

Lay the requests on a line, each as long as its blocks and the overhead together, and let `quota` be the length of the
line over the number of parts, rounded up. A part begins `quota` behind the one before it, save where a boundary lies
up to `overhead` further on: then it begins there. Pull each boundary that is so met back by what it lies too far, and
all behind it too. On that ruler part i begins at mark `i * quota`, and its request is found by bisection.

    lengths 192, 64, 320 in blocks of 64, 2 parts, overhead 5: weights 8, 6, 10, quota 12
    boundaries 0, 8, 14, 24; 14 lies 2 behind mark 12 and is met: ruler 0, 8, 12, 24
    part 1 begins at 12, with request 2: it ends at 24; so no request is cut

Which boundaries are met follows from residues modulo `quota`: behind a boundary a that is met, the next is the first m
with (line[m] - line[a]) mod quota <= overhead. Within a group of boundaries all pairs are tested at once, and the
groups are walked in order, one short step each.
"""

from __future__ import annotations

from compiled_kv.batch_triton import SUM_OVERFLOW
from compiled_kv.launch import constexpr, dependent_launch, device_function, kernel, tl
from compiled_kv.rows_triton import INT32_MAX, active_rows, load_at, report

GROUP = constexpr(32)
GROUPS = constexpr(16)
CHUNK = constexpr(512)  # GROUP * GROUPS
ROUNDS = constexpr(5)  # 2 ** ROUNDS == GROUP
STAGED = constexpr(4)  # a boundary in scratch: residue, link, path, unused
FENCES = constexpr(16)


@device_function
def _int32(number):
    return (tl.zeros([], tl.int64) + number).to(tl.int32)


@device_function
def _length_at(ptr, stride, row, active):
    return tl.minimum(tl.maximum(load_at(ptr, row, stride, (row >= 0) & (row < active), 0), 0), INT32_MAX)


@device_function
def _blocks(length, most, BLOCK_SIZE: tl.constexpr):
    """Blocks of a request; an empty one counts as one."""
    return tl.minimum(tl.maximum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, 1), most).to(tl.int32)


@device_function
def _behind(residue, anchor, quota):
    """How far a boundary lies behind the last mark, counted from the anchor; both are given modulo quota."""
    gap = residue - anchor
    return tl.where(gap < 0, gap + quota, gap)


@device_function
def _larger(a, b):
    return tl.maximum(a, b)


@device_function
def _add_pairs(a, b, c, d):
    return a + c, b + d


@device_function
def _paths(residue, quota, overhead):
    """The boundaries met from each one on within its group, itself included: as [GROUPS, GROUP] bit masks, and linked:
    its lane times GROUP and the lane of the last of them."""
    lane = tl.arange(0, GROUP)
    gap = _behind(tl.trans(residue)[:, :, None], residue[None, :, :], quota)  # [later, group, earlier]
    met = (gap <= overhead) & (lane[:, None, None] > lane[None, None, :])
    after = tl.min(tl.where(met, lane[:, None, None], GROUP), 0)
    after = tl.where(after < GROUP, after, lane[None, :])
    path = tl.full([GROUPS, GROUP], 1, tl.int32) << lane[None, :]
    for _ in tl.static_range(ROUNDS):
        path |= tl.gather(path, after, 1)
        after = tl.gather(after, after, 1)
    return path, lane[None, :] * GROUP + after


@device_function
def _walk(stage_ptr, groups, begin, anchor, anchor_residue, quota, overhead):
    """Take the groups in order: the lane first met in each (GROUP for none), and the boundary met before it."""
    lane, group = tl.arange(0, GROUP), tl.arange(0, GROUPS)
    entry = tl.full([GROUPS], GROUP, tl.int32)
    before = tl.zeros([GROUPS], tl.int32)
    anchor_residue += tl.zeros([GROUP], tl.int32)  # in every lane, so that a shuffle can pass it on
    row_ptr = stage_ptr + lane.to(tl.int64) * STAGED
    boundary = begin + 1
    for step in range(groups):
        residue, link = tl.load(row_ptr), tl.load(row_ptr + 1)
        first = tl.min(tl.where(_behind(residue, anchor_residue, quota) <= overhead, link, INT32_MAX), 0)
        met = first < INT32_MAX
        left = first & (GROUP - 1)
        before = tl.where(group == step, anchor, before)
        entry = tl.where((group == step) & met, first >> ROUNDS, entry)
        anchor = tl.where(met, boundary + left, anchor)
        anchor_residue = tl.where(met, tl.gather(residue, left + tl.zeros([GROUP], tl.int32), 0), anchor_residue)
        row_ptr += GROUP * STAGED
        boundary += GROUP
    return entry, before, anchor


@device_function
def _lay_ruler(
    lengths_ptr, len_stride, active, batch_size, ruler_ptr, line_ptr, stage_ptr, num_splits_ptr,
    quota, overhead, most, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write each boundary's place on the ruler, int32 [B + 1], and `num_splits`, a chunk of requests at a time."""
    at, lane, group = tl.arange(0, CHUNK), tl.arange(0, GROUP)[None, :], tl.arange(0, GROUPS)[:, None]
    staged_ptr = stage_ptr + at.to(tl.int64) * STAGED
    anchor = tl.zeros([], tl.int32)
    tl.store(ruler_ptr, 0)
    tl.store(line_ptr, 0)
    tl.store(num_splits_ptr, 0)
    tl.debug_barrier()  # an empty batch meets no other before its parts are looked up
    for begin in range(0, batch_size, CHUNK):
        # What stood at the last boundary met, and at the end of the chunk before.
        line = tl.load(line_ptr + begin, mask=begin > 0, other=0)
        anchor_line = tl.load(line_ptr + anchor, mask=begin > 0, other=0)
        place = tl.load(ruler_ptr + anchor, mask=begin > 0, other=0)
        splits = tl.load(num_splits_ptr + anchor, mask=begin > 0, other=0) - anchor
        row = begin + at
        counted = row < active
        blocks = _blocks(_length_at(lengths_ptr, len_stride, row, active), most, BLOCK_SIZE)
        line += tl.cumsum(tl.where(counted, blocks + overhead, 0), 0)
        residue = tl.where(counted, line % quota, INT32_MAX)  # padding is never met
        path, link = _paths(tl.reshape(residue, [GROUPS, GROUP]), quota, overhead)
        tl.store(staged_ptr, residue)
        tl.store(staged_ptr + 1, tl.reshape(link, [CHUNK]))
        tl.store(staged_ptr + 2, tl.reshape(path, [CHUNK]))
        tl.store(line_ptr + 1 + row, line, mask=row < batch_size)
        tl.debug_barrier()
        # Nothing waits for this before the walk is over, and it brings what the walk reads into the cache.
        path = tl.load(stage_ptr + 2 + (group.to(tl.int64) * GROUP + lane) * STAGED)
        groups = (tl.minimum(active - begin, CHUNK) + GROUP - 1) // GROUP
        entry, before, anchor = _walk(stage_ptr, groups, begin, anchor, anchor_line % quota, quota, overhead)
        # A part ends with the last request, met or not: chunks of padding go on from there.
        anchor = tl.where(active <= begin + CHUNK, active, anchor)
        before = tl.load(line_ptr + before)[:, None]
        ends = tl.reshape(line, [GROUPS, GROUP])
        first = tl.broadcast_to(tl.minimum(entry, GROUP - 1)[:, None], [GROUPS, GROUP])
        met = (entry[:, None] < GROUP) & (((tl.gather(path, first, 1) >> lane) & 1) == 1)
        met |= tl.reshape(row, [GROUPS, GROUP]) == active - 1  # the last request ends a part, wherever it ends
        met_line = tl.associative_scan(tl.where(met, ends, 0), 1, _larger)
        previous = tl.gather(met_line, tl.broadcast_to(tl.maximum(lane - 1, 0), [GROUPS, GROUP]), 1)
        previous = tl.maximum(tl.where(lane > 0, previous, 0), before)
        taken = tl.where(met, (ends - previous - overhead + quota - 1) // quota, 0)
        cut = taken - met.to(tl.int32)
        marks, cuts = tl.associative_scan((tl.reshape(taken, [CHUNK]), tl.reshape(cut, [CHUNK])), 0, _add_pairs)
        beyond = tl.where(counted, line - tl.reshape(tl.maximum(met_line, before), [CHUNK]), 0)
        tl.store(ruler_ptr + 1 + row, place + marks * quota + beyond, mask=row < batch_size)
        request = tl.minimum(row + 1, active)
        tl.store(num_splits_ptr + 1 + row, request + splits + cuts + beyond // quota, mask=row < batch_size)
        tl.debug_barrier()


@device_function
def _find(ruler_ptr, part, quota, active):
    """Request and block at which each part begins: the last boundary at or before its mark."""
    mark = part.to(tl.int64) * quota
    stride = active // FENCES + 1
    fence = tl.arange(0, FENCES).to(tl.int64) * stride
    place = tl.load(ruler_ptr + fence, mask=fence <= active, other=INT32_MAX)
    passed = (fence <= active)[:, None] & (place[:, None] <= mark[None, :])
    request = (tl.sum(passed.to(tl.int32), 0) - 1).to(tl.int64) * stride
    step = tl.zeros([], tl.int32) + 1
    while step < stride:
        step += step
    while step > 1:
        step = step // 2
        further = request + step
        inside = further <= active
        request = tl.where(inside & (tl.load(ruler_ptr + further, mask=inside, other=0) <= mark), further, request)
    block = tl.where(request < active, mark - tl.load(ruler_ptr + request), 0)
    return request.to(tl.int32), block.to(tl.int32)


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
    active = active_rows(num_reqs_ptr, batch_size).to(tl.int32)
    total = tl.zeros([], tl.int32)
    bits = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, active, CHUNK):
        row = begin + tl.arange(0, CHUNK)
        length = _length_at(kv_lens_ptr, len_stride, row, active)
        bits |= tl.where((length + BLOCK_SIZE - 1) // BLOCK_SIZE > most, SUM_OVERFLOW, 0)
        total += tl.sum(tl.where(row < active, _blocks(length, most, BLOCK_SIZE) + overhead, 0), 0)
    report(bits, None, DEBUG)
    quota = tl.maximum((total + num_sm_parts - 1) // num_sm_parts, 1)
    line_ptr = scratch_ptr + batch_size + 1
    _lay_ruler(
        kv_lens_ptr, len_stride, active, batch_size, scratch_ptr, line_ptr, line_ptr + batch_size + 1,
        num_splits_ptr, quota, overhead, most, BLOCK_SIZE,
    )  # fmt: skip
    for begin in range(0, num_sm_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        both = tl.reshape(part[:, None] + tl.arange(0, 2)[None, :], [2 * PARTS])
        request, block = _find(scratch_ptr, both, quota, active)
        begin_req, end_req = tl.split(tl.reshape(request, [PARTS, 2]))
        begin_block, end_block = tl.split(tl.reshape(block, [PARTS, 2]))
        cut_first, cut_last = begin_block > 0, end_block > 0
        end_req = tl.where(cut_last, end_req, end_req - 1)
        length = _length_at(kv_lens_ptr, len_stride, end_req, active)
        if IN_TOKENS:
            end_at = tl.where(cut_last, end_block * BLOCK_SIZE, length.to(tl.int32))
            begin_at = begin_block * BLOCK_SIZE
        else:
            end_at = tl.where(cut_last, end_block, tl.where(length > 0, _blocks(length, most, BLOCK_SIZE), 0))
            begin_at = begin_block
        row_ptr, mask = tile_scheduler_metadata_ptr + part.to(tl.int64) * 8, part < num_sm_parts
        tl.store(row_ptr, begin_req, mask=mask)
        tl.store(row_ptr + 3, end_at, mask=mask)
        tl.store(row_ptr + 4, (begin_block + quota - 1) // quota, mask=mask)
        tl.store(row_ptr + 7, tl.zeros([PARTS], tl.int32), mask=mask)
        if LEGACY:
            tl.store(row_ptr + 1, begin_at, mask=mask)
            tl.store(row_ptr + 2, end_req, mask=mask)
            tl.store(row_ptr + 5, tl.zeros([PARTS], tl.int32), mask=mask)
            tl.store(row_ptr + 6, tl.zeros([PARTS], tl.int32), mask=mask)
        else:
            either = (begin_req == end_req) & (cut_first | cut_last)
            tl.store(row_ptr + 1, end_req, mask=mask)
            tl.store(row_ptr + 2, begin_at, mask=mask)
            tl.store(row_ptr + 5, (cut_first | either).to(tl.int32), mask=mask)
            tl.store(row_ptr + 6, (cut_last | either).to(tl.int32), mask=mask)
