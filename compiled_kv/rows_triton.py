"""Device functions that the kernels share: a row's lengths, pages and slots, their translation, the bits of `status`.

Each works on one row (scalars) and on a block of rows alike. Address arithmetic is int64 from the first multiplication
on: the variable factor is widened, never the stride, which a compiler may have folded to a constant.
"""

from __future__ import annotations

from compiled_kv import layout
from compiled_kv.launch import constexpr, device_function, tl
from compiled_kv.sharing import FRACTION
from compiled_kv.status import Status

INT32_MAX = constexpr(layout.INT32_MAX)
MAX_QUERIES = constexpr(2**32)  # of one row: past any length and its tokens, and summed without wrapping
TOO_LONG = constexpr(int(Status.TOO_LONG))
NEGATIVE_LENGTH = constexpr(int(Status.NEGATIVE_LENGTH))
BAD_ROW = constexpr(int(Status.BAD_ROW))
BAD_SLOT = constexpr(int(Status.BAD_SLOT))
UNMAPPED = constexpr(int(Status.UNMAPPED))
POINT = constexpr(FRACTION)


@device_function
def value_at(ptr, index, stride, mask, other):
    """`ptr[index * stride]` as it is stored."""
    return tl.load(ptr + index.to(tl.int64) * stride, mask=mask, other=other)


@device_function
def load_at(ptr, index, stride, mask, other):
    """The int64 value of `ptr[index * stride]`."""
    return value_at(ptr, index, stride, mask, other).to(tl.int64)


@device_function
def _unsigned(value):
    if value.dtype == tl.int64:
        return value.to(tl.uint64, bitcast=True)
    else:
        return value.to(tl.uint32, bitcast=True)


@device_function
def is_within(index, size):
    """0 <= index < size in one comparison: as an unsigned number, a negative index is a huge one."""
    return _unsigned(index.to(tl.int64)) < _unsigned(tl.zeros([], tl.int64) + size)


@device_function
def active_rows(num_reqs_ptr, batch_size):
    if num_reqs_ptr is None:
        return batch_size
    else:
        return tl.minimum(tl.maximum(tl.load(num_reqs_ptr).to(tl.int64), 0), batch_size)


@device_function
def place_of(program, batch_size, count, parts, reciprocal, CHUNK: tl.constexpr):
    """Number of a program behind those that take prefix sums, int32, negative for one of these; which of `count` rows
    (or groups of rows) is its own, int32; and which of that one's `parts` programs it is, int64."""
    turn = (program - tl.maximum((batch_size + CHUNK - 1) // CHUNK, 1)).to(tl.int32)
    part = tl.minimum((turn.to(tl.int64) * reciprocal) >> POINT, parts - 1)
    return turn, (turn - part * count).to(tl.int32), part


@device_function
def row_of_token(token, cu_seqlens_q_ptr, cu_stride, batch_size):
    """Row whose interval of prefix sums holds each token, by bisection over boundaries 1 .. batch_size.

    `batch_size` for a token behind the last of them.
    """
    row = tl.zeros(token.shape, tl.int64)
    beyond = tl.zeros(token.shape, tl.int64) + batch_size
    span = tl.zeros([], tl.int64) + batch_size
    while span > 0:
        middle = (row + beyond) // 2
        open_ = row < beyond
        end = load_at(cu_seqlens_q_ptr, middle + 1, cu_stride, open_, 0)
        row = tl.where(open_ & (end <= token), middle + 1, row)
        beyond = tl.where(open_ & (end > token), middle, beyond)
        span = span // 2
    return row


@device_function
def clamped_length(seq_len, delta, cap):
    """min(max(seq_len, 0) + delta, cap) as int32, computed in the width of `seq_len`; delta and cap fit in int32."""
    # A minimum before the sum, so that nothing wraps round.
    room = (tl.zeros([], tl.int64) + cap - delta).to(tl.int32)
    return tl.minimum(tl.maximum(seq_len, 0), room).to(tl.int32) + (tl.zeros([], tl.int64) + delta).to(tl.int32)


@device_function
def pages_of(length, PAGE_SIZE: tl.constexpr):
    """Pages that `length` tokens take, int32. Unsigned in between: the sum has 32 bits, and a shift divides."""
    return ((_unsigned(length) + (PAGE_SIZE - 1)) // PAGE_SIZE).to(tl.int32)


@device_function
def clamped_queries(q_len):
    return tl.minimum(tl.maximum(q_len, 0), MAX_QUERIES)


@device_function
def length_bits(seq_len, delta, cap):
    return tl.where(seq_len < 0, NEGATIVE_LENGTH, 0) | tl.where(tl.maximum(seq_len, 0) > cap - delta, TOO_LONG, 0)


@device_function
def page_of(slot, PAGE_SIZE: tl.constexpr):
    """Page of a slot as int32; -1 for none."""
    page = _unsigned(slot) // PAGE_SIZE  # unsigned: a shift where PAGE_SIZE is a power of two
    return tl.where((slot >= 0) & (page <= INT32_MAX), page.to(tl.int32), -1)


@device_function
def through_map(index, map_ptr, map_stride, map_size, mask):
    """`map[index]`, -1 where the index is none, outside the map, or unmapped."""
    known = mask & (index >= 0) & (index < map_size)
    return tl.maximum(load_at(map_ptr, index, map_stride, known, -1), -1)


@device_function
def swa_page_of(slot, page, map_ptr, map_stride, map_size, mask, PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr):
    if PAGE_MAP:
        return page_of(through_map(page, map_ptr, map_stride, map_size, mask), 1)
    else:
        # A map may reach slots whose page does not fit: there `page` is -1, and so is what comes of it.
        return page_of(through_map(slot, map_ptr, map_stride, map_size, mask), PAGE_SIZE) | (page >> 31)


@device_function
def swa_slot_of(slot, map_ptr, map_stride, map_size, mask, PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr):
    if PAGE_MAP:
        page = page_of(through_map(page_of(slot, PAGE_SIZE), map_ptr, map_stride, map_size, mask), 1).to(tl.int64)
        return tl.where(page < 0, -1, page * PAGE_SIZE + slot % PAGE_SIZE)
    else:
        return through_map(slot, map_ptr, map_stride, map_size, mask)


@device_function
def first_column(length, queries, window, PAGE_SIZE: tl.constexpr, WINDOWED: tl.constexpr):
    """First column that the row's first query may see."""
    if WINDOWED:
        return (tl.maximum(length - queries - window + 1, 0) // PAGE_SIZE).to(tl.int32)
    else:
        return tl.zeros([], tl.int32)


@device_function
def _either(a, b):
    return a | b


@device_function
def report(bits, status_ptr, DEBUG: tl.constexpr):
    """OR the bits of all lanes into `status`; dead code where nobody asks for them."""
    if (status_ptr is not None) or DEBUG:
        found = tl.reduce(tl.ravel(bits, can_reorder=True), 0, _either)
        if status_ptr is not None:
            if found != 0:
                tl.atomic_or(status_ptr, found, sem="relaxed")
        if DEBUG:
            tl.device_assert(found == 0, "compiled_kv: a status bit was set (COMPILED_KV_DEBUG=1)")
