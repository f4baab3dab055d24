"""Device functions for the slots of a row's tokens: look them up, and store them.

slots_of_tokens   of some queries, given by the allocator or from the pool
write_turn        of some queries
write_slots       of all queries of one row
"""

from __future__ import annotations

from compiled_kv.launch import device_function, tl
from compiled_kv.rows_triton import BAD_SLOT, UNMAPPED, load_at, report, swa_slot_of


@device_function
def slots_of_tokens(
    pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, first_token, first_position, query, owned,
):  # fmt: skip
    """Slots of a row's queries, given by the allocator or looked up where `slots_ptr` is None; negative for none.

    `room` is how many entries there are to read, of the one or of the other; -1 for a padding row.
    """
    if slots_ptr is not None:
        token = first_token + query
        return load_at(slots_ptr, token, slots_stride, owned & (token < room), -1)
    else:
        position = first_position + query
        return load_at(pool_row_ptr, position, pool_stride, owned & (position >= 0) & (position < room), -1)


@device_function
def write_turn(
    slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
    slot_mapping_ptr, swa_slot_mapping_ptr, first_token, first_position, query, owned, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr,
):  # fmt: skip
    """Store the slots of those queries that are `owned`; `slot` and `swa_slot` are None where they are not looked up
    yet. Queries of one row, or of a row each."""
    if slot is None:
        slot = slots_of_tokens(
            pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, first_token, first_position, query, owned
        )
    bits = tl.zeros(query.shape, tl.int32)
    if slots_ptr is None:
        bits |= tl.where(owned & (room >= 0) & (first_position + query >= 0) & (slot < 0), BAD_SLOT, 0)
    slot = tl.maximum(slot, -1)
    tl.store(slot_mapping_ptr + first_token + query, slot, mask=owned)
    if swa_slot_mapping_ptr is not None:
        if swa_slot is None:
            swa_slot = swa_slot_of(slot, map_ptr, map_stride, map_size, owned, PAGE_SIZE, PAGE_MAP)
        tl.store(swa_slot_mapping_ptr + first_token + query, swa_slot, mask=owned)
        bits |= tl.where(owned & (slot >= 0) & (swa_slot < 0), UNMAPPED, 0)
    report(bits, status_ptr, DEBUG)


@device_function
def write_slots(
    slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
    slot_mapping_ptr, swa_slot_mapping_ptr, first_token, count, first_position, part, parts, status_ptr,
    PAGE_SIZE: tl.constexpr, PAGE_MAP: tl.constexpr, DEBUG: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the slots of one row's `count` tokens. `slot` and `swa_slot` are those of the first turn, None where they
    are not looked up yet. That turn is usually the only one: outside of a loop less is computed ahead of it."""
    begin = part * TOKENS
    if begin < count:
        lane = tl.arange(0, TOKENS)
        # Not `query < count`, which a caller may have asked already: its answer would be kept, and spilled, until here.
        write_turn(
            slot, swa_slot, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
            slot_mapping_ptr, swa_slot_mapping_ptr, first_token, first_position, begin + lane, lane < count - begin,
            status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG,
        )  # fmt: skip
        for later in range(begin + parts * TOKENS, count, parts * TOKENS):
            write_turn(
                None, None, pool_row_ptr, pool_stride, slots_ptr, slots_stride, room, map_ptr, map_stride, map_size,
                slot_mapping_ptr, swa_slot_mapping_ptr, first_token, first_position, later + lane,
                lane < count - later, status_ptr, PAGE_SIZE, PAGE_MAP, DEBUG,
            )  # fmt: skip
