"""The oracle of the operators behind `integrations`: Python ints and loops, as one would work them out on paper.

Each function bears the name and takes the arguments of the public one, reads tensors through `tolist()` alone, writes
and returns `out` as it does, and validates nothing. It shares nothing with the kernels, nor with `reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_kv.layout import KVLayout, ceil_div

INT32_MAX = 2**31 - 1


def look_up(table: list[int], index: int) -> int:
    """`table[index]`, -1 where the index is none or outside, or the entry negative."""
    return max(table[index], -1) if 0 <= index < len(table) else -1


def page_of(slot: int, page_size: int, dtype: torch.dtype = torch.int32) -> int:
    """-1 for none, and for a page that `dtype` has no room for."""
    page = slot // page_size
    return page if slot >= 0 and page <= torch.iinfo(dtype).max else -1


def physical(page: int, page_map: list[int]) -> int:
    """A virtual page's physical one; page 0 for none."""
    found = look_up(page_map, max(page, 0))
    return found if 0 <= found <= INT32_MAX else 0


def sums(values: list[int]) -> list[int]:
    return [min(sum(values[:i]), INT32_MAX) for i in range(len(values) + 1)]


def numbers(tensor: Tensor | None) -> Any:
    return [] if tensor is None else tensor.tolist()


def store(values: Any, out: Tensor | None) -> None:
    if out is not None:
        out.copy_(torch.tensor(values, dtype=out.dtype).reshape(out.shape))


def store_first(values: list[int], out: Tensor | None) -> None:
    if out is not None:
        store(values, out[: len(values)])


def write_metadata(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, out: Any, *, layout: KVLayout,
                   seq_len_delta: int = 0, q_len: int | Tensor = 1, slots: Tensor | None = None,
                   full_to_swa: Tensor | None = None, page_map: Tensor | None = None,
                   swa_page_map: Tensor | None = None, width: int | None = None,
                   tail: str = "keep") -> Any:  # fmt: skip
    """Fill the first rows of the buffers of `out`."""
    pool, rows, page_size = req_to_token.tolist(), req_pool_indices.tolist(), layout.page_size
    good = [0 <= row < len(pool) for row in rows]
    lengths = [min(max(n, 0) + seq_len_delta, layout.max_seqlen_k) if ok else 0
               for n, ok in zip(seq_lens.tolist(), good, strict=True)]  # fmt: skip
    queries = q_len.tolist() if isinstance(q_len, Tensor) else [q_len] * len(rows)
    store_first(lengths, out.cache_seqlens)
    store_first(sums(lengths), out.cu_seqlens_k)
    store_first(sums([max(n, 0) for n in queries]), out.cu_seqlens_q)
    table, swa_table, token_map = numbers(out.page_table), numbers(out.swa_page_table), numbers(full_to_swa)
    for i, line in enumerate(table[: len(rows)]):
        columns = len(line) if width is None else width
        live = min(ceil_div(lengths[i], page_size), columns)
        for column in range(columns):
            if column < live:
                slot = look_up(pool[rows[i]], column * page_size)
                page = page_of(slot, page_size)
                line[column] = page if page_map is None else physical(page, page_map.tolist())
                if swa_table and swa_page_map is not None:
                    swa_table[i][column] = physical(page, swa_page_map.tolist())
                elif swa_table:
                    swa_table[i][column] = page_of(look_up(token_map, slot), page_size) if page >= 0 else -1
            elif tail == "clear":
                line[column] = 0
                if swa_table:
                    swa_table[i][column] = 0
    store(table, out.page_table)
    store(swa_table, out.swa_page_table)
    if out.swa_slot_mapping is not None:
        translated = [look_up(token_map, slot) for slot in numbers(slots)]
        room = len(out.swa_slot_mapping)
        store((translated + [0] * room)[:room], out.swa_slot_mapping)
    return out


def gather_block_tables(block_tables: Tensor, num_blocks: Tensor, req_pool_indices: Tensor, *,
                        block_sizes: Tensor | None = None, reach: Tensor | None = None,
                        num_computed_tokens: Tensor | None = None, out: Tensor | None = None,
                        tail: str = "clear") -> Tensor:  # fmt: skip
    """int32 [G, N, W]: each request's blocks in each group, null below what the group still reads."""
    rows, counts, (groups, pool_rows, width) = req_pool_indices.tolist(), num_blocks.tolist(), block_tables.shape
    if out is None:
        out = torch.zeros(groups, len(rows), width, dtype=torch.int32)
    tables: Any = out.tolist()
    for g, (table, pool) in enumerate(zip(tables, block_tables.tolist(), strict=True)):
        for i, line in enumerate(table):
            if i >= len(rows) or not 0 <= rows[i] < pool_rows:
                line[:] = [0] * width
                continue
            below = 0
            if reach is not None and num_computed_tokens is not None and block_sizes is not None:
                size, last = int(block_sizes[g]), int(reach[g])
                if size > 0 and last > 0:
                    below = max(max(int(num_computed_tokens[rows[i]]), 0) - last, 0) // size
            live = min(max(counts[g][rows[i]], 0), width)
            for column in range(width):
                if column < live:
                    line[column] = 0 if column < below else page_of(pool[rows[i]][column], 1)
                elif tail == "clear":
                    line[column] = 0
    store(tables, out)
    return out


def group_slot_mappings(block_tables: Tensor, block_sizes: Tensor, req_pool_indices: Tensor, cu_seqlens_q: Tensor,
                        positions: Tensor, *, sharded: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0,
                        cp_interleave: int = 1, num_tokens: int | None = None,
                        out: Tensor | None = None) -> Tensor:  # fmt: skip
    """int64 [G, N]: each token's slot in each group, on this rank."""
    rows, ends, tables = req_pool_indices.tolist(), cu_seqlens_q.tolist()[1:], block_tables.tolist()
    if out is None:
        out = torch.empty(len(tables), len(positions) if num_tokens is None else num_tokens, dtype=torch.int64)
    mappings = [[-1] * out.shape[1] for _ in tables]
    for g, size in enumerate(min(size, INT32_MAX) for size in block_sizes.tolist()):
        ranks, rank = (cp_size, cp_rank) if sharded is not None and int(sharded[g]) else (1, 0)
        for token, position in enumerate(positions.tolist()):
            row = next((row for row, end in zip(rows, ends, strict=True) if token < end), -1)
            if size <= 0 or position < 0 or not 0 <= row < len(tables[g]):
                continue
            column, place = divmod(position, size * ranks)
            block = page_of(look_up(tables[g][row], column), 1)
            turn, offset = divmod(place, cp_interleave)
            if block >= 0 and turn % ranks == rank:
                mappings[g][token] = block * size + turn // ranks * cp_interleave + offset
    store(mappings, out)
    return out


def advance_draft(positions: Tensor, block_table: Tensor, seq_lens: Tensor, *, page_size: int, max_context_len: int,
                  num_tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Positions, slots and lengths one token further."""
    held, lengths, blocks = positions.tolist(), seq_lens.tolist(), block_table.tolist()
    slots = [-1] * (len(held) if num_tokens is None else num_tokens)
    for i, position in enumerate(held):
        if position + 1 >= max_context_len:
            held[i], lengths[i] = 0, 1
            continue
        held[i] = max(position + 1, 0)
        lengths[i] = min(max(lengths[i], 0) + 1, max_context_len)
        block = blocks[i][min(held[i] // page_size, len(blocks[i]) - 1)] if blocks[i] and position >= -1 else -1
        if page_of(block, 1) >= 0:
            slots[i] = block * page_size + held[i] % page_size
    kinds = ((held, torch.int64), (slots, torch.int64), (lengths, torch.int32))
    new_positions, slot_mapping, new_lengths = (torch.tensor(values, dtype=dtype) for values, dtype in kinds)
    return new_positions, slot_mapping, new_lengths


def advance_draft_(positions: Tensor, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor, *, page_size: int,
                   max_context_len: int, num_tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same in place."""
    tokens = len(slot_mapping) if num_tokens is None else num_tokens
    made = advance_draft(positions, block_table, seq_lens, page_size=page_size, max_context_len=max_context_len,
                         num_tokens=tokens)  # fmt: skip
    for target, value in zip((positions, slot_mapping[:tokens], seq_lens), made, strict=True):
        target.copy_(value)
    return positions, slot_mapping, seq_lens


def pages_of_row(pool: Any, row: int, count: int, start: int, page_size: int, entry_page_size: int,
                 token_map: Tensor | None, dtype: torch.dtype) -> list[int]:  # fmt: skip
    """`count` pages of one row of the pool, from position `start` on."""
    found = []
    for position in range(start, start + count * page_size, page_size):
        slot = look_up(pool[row], position // entry_page_size)
        if entry_page_size > 1:
            slot = slot * entry_page_size + position % entry_page_size if page_of(slot, 1) >= 0 else -1
        found.append(page_of(slot if token_map is None else look_up(token_map.tolist(), slot), page_size, dtype))
    return found


def csr_tables(pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_start: Tensor | None = None, *,
               layout: KVLayout, entry_page_size: int = 1, token_map: Tensor | None = None,
               num_reqs: Tensor | None = None, capacity: int | None = None, out: Any = None,
               tail: str = "clear") -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """kv_indptr, kv_indices, kv_last_page_len."""
    rows, page_size, width = req_pool_indices.tolist(), layout.page_size, pool.shape[1] * entry_page_size
    active = len(rows) if num_reqs is None else int(num_reqs)
    lengths = [min(max(n, 0), layout.max_seqlen_k) if i < active and 0 <= rows[i] < len(pool) else 0
               for i, n in enumerate(kv_lens.tolist())]  # fmt: skip
    if out is None:
        room = len(rows) * layout.max_num_pages if capacity is None else capacity
        out = tuple(torch.zeros(n, dtype=torch.int32) for n in (len(rows) + 1, room, len(rows)))
    starts, indices = numbers(kv_start) or [0] * len(rows), []
    for row, length, start in zip(rows, lengths, starts, strict=True):
        count, first = ceil_div(length, page_size), min(max(start, 0), width)
        indices += pages_of_row(pool.tolist(), row, count, first, page_size, entry_page_size, token_map, out[1].dtype)
    room = len(out[1])
    old = out[1].tolist() if tail == "keep" else [0] * room
    store([min(total, room) for total in sums([ceil_div(n, page_size) for n in lengths])], out[0])
    store((indices + old[len(indices) :])[:room], out[1])
    store([(n - 1) % page_size + 1 if n else 0 for n in lengths], out[2])
    return out


def fill_kv_indices(pool: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
                    kv_start: Tensor | None = None, *, layout: KVLayout, entry_page_size: int = 1,
                    token_map: Tensor | None = None) -> Tensor:  # fmt: skip
    """kv_indices behind a kv_indptr that stands already."""
    rows, bounds, indices = req_pool_indices.tolist(), kv_indptr.tolist(), kv_indices.tolist()
    starts, page_size, width = numbers(kv_start) or [0] * len(rows), layout.page_size, pool.shape[1] * entry_page_size
    for i, (row, length) in enumerate(zip(rows, kv_lens.tolist(), strict=True)):
        first, end = bounds[i], min(bounds[i + 1], len(indices))
        count = min(ceil_div(min(max(length, 0), layout.max_seqlen_k), page_size), end - first)
        if 0 <= row < len(pool) and count > 0:
            start = min(max(starts[i], 0), width)
            indices[first : first + count] = pages_of_row(
                pool.tolist(), row, count, start, page_size, entry_page_size, token_map, kv_indices.dtype
            )
    store(indices, kv_indices)
    return kv_indices


def draft_kv_indices(pool: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, num_steps: int, topk: int = 1,
                     layout: KVLayout, positions: Tensor | None = None, page_map: Tensor | None = None,
                     entry_page_size: int = 1, window: int = 0, sinks: int = 0, capacity: int | None = None,
                     out: Any = None, tail: str = "clear") -> Any:  # fmt: skip
    """kv_indptr and kv_indices of every draft step."""
    rows, page_size, cap = req_pool_indices.tolist(), layout.page_size, layout.max_seqlen_k
    good = [0 <= row < len(pool) for row in rows]
    lengths = [min(max(n, 0), cap) if ok else 0 for n, ok in zip(seq_lens.tolist(), good, strict=True)]
    branches = [n for n in lengths for _ in range(topk)]
    shown = branches if positions is None else [min(max(n, 0), cap) for n in positions.tolist()]
    if out is None:
        room = len(branches) * (cap + num_steps) if capacity is None else capacity
        widths = (len(branches) + 1, room)
        out = tuple(torch.zeros(num_steps, width, dtype=torch.int32) for width in widths)
    room, indptr, indices = out[1].shape[1], [], out[1][:num_steps].tolist()
    for step in range(num_steps):
        most = window + sinks if window else cap
        indptr.append([min(total, room) for total in sums([min(n, most) + step + 1 for n in shown])])
        line: list[int] = []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            pages = ceil_div(length % page_size + num_steps, page_size)
            for k in range(topk):
                begin = (length // page_size + k * pages) * page_size + length % page_size
                read = [at for at in range(length) if at < sinks or at >= length - most + min(sinks, length)]
                read = [*range(length)] if length <= most else read
                for position in [*read, *range(begin, begin + step + 1)]:
                    read_as = (1, position, 1, entry_page_size, None, torch.int64)
                    found = pages_of_row(pool.tolist(), row, *read_as)[0] if good[i] else -1
                    if page_map is not None:
                        page = look_up(page_map.tolist(), page_of(found, page_size))
                        found = page * page_size + found % page_size if page_of(page, 1) >= 0 else 0
                    line.append(page_of(found, 1, out[1].dtype))
        indices[step] = (line + (indices[step][len(line) :] if tail == "keep" else [0] * room))[:room]
    store(indptr, out[0][:num_steps, : len(branches) + 1])
    store(indices, out[1][:num_steps])
    return out


def place_tokens_(positions: Tensor, held: Tensor, cu_seqlens_q: Tensor, *, req_pool_indices: Tensor | None = None,
                  counted: bool = False, batch_indices: Tensor | None = None,
                  seq_lens: Tensor | None = None) -> Any:  # fmt: skip
    """positions, batch_indices and seq_lens of a ragged step."""
    bounds, pool, places = cu_seqlens_q.tolist(), held.tolist(), positions.tolist()
    batch = len(bounds) - 1
    rows = list(range(batch)) if req_pool_indices is None else req_pool_indices.tolist()
    lengths, entries = [0] * (batch if seq_lens is None else len(seq_lens)), [-1] * len(places)
    for i, row in enumerate(rows):
        tokens = range(bounds[i], min(bounds[i + 1], len(places)))
        for token in tokens:
            entries[token] = i
        if 0 <= row < len(pool):
            fresh, length = bounds[i + 1] - bounds[i], min(max(pool[row], 0), INT32_MAX)
            first = length - fresh if counted else length
            lengths[i] = min(first + fresh, INT32_MAX)
            for token in tokens:
                places[token] = min(first + token - bounds[i], INT32_MAX)
    store(places, positions)
    store(entries, batch_indices)
    store(lengths, seq_lens)
    return positions, batch_indices, seq_lens
