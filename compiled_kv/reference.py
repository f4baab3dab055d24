"""The oracle: every operator in Python ints and loops, written from docs/contract.md as one would on paper.

It bears the names and takes the arguments of the public functions, reads tensors through `tolist()` alone,
and shares nothing with the kernels, the CPU bodies or the checks. It writes and returns `out` as they do,
and validates nothing. `decode_metadata` takes no `status`: it returns the bits that belong there.

    req_to_token = [[0, 0, 0, 0, 0], [8, 9, 10, 11, 20]], page_size = 4
    req_pool_indices = [1, 7], cache_seqlens = [5, 3]
    page_table -> [[2, 5], [0, 0]]      row 7 lies outside the pool: padding
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_kv.layout import KVLayout, ceil_div

INT32_MAX = 2**31 - 1
TOO_LONG, NEGATIVE_LENGTH, BAD_ROW, BAD_SLOT, UNMAPPED, SUM_OVERFLOW, TOO_MANY_TOKENS = (1 << i for i in range(7))


class Metadata(NamedTuple):
    """What `decode_metadata` returns, field by field."""

    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    page_table: Tensor
    swa_page_table: Tensor | None
    slot_mapping: Tensor | None
    swa_slot_mapping: Tensor | None


class Row(NamedTuple):
    """One entry of the batch: its slots (None for padding), its length, its places in `cu_seqlens_q`."""

    slots: list[int] | None
    length: int
    queries: int = 0
    start: int = 0


class Step:
    """One call: its layout, its map, and the status bits seen so far."""

    def __init__(self, layout: KVLayout, full_to_swa: Tensor | None = None, page_map: Tensor | None = None) -> None:
        self.page_size, self.window, self.cap = layout.page_size, layout.window, layout.max_seqlen_k
        self.width = layout.max_num_pages
        self.tokens: Any = None if full_to_swa is None else full_to_swa.tolist()
        self.pages: Any = None if page_map is None else page_map.tolist()
        self.bits = 0

    def rows(self, pool: Tensor, indices: Tensor, lengths: Tensor, q_len: int | Tensor = 0, delta: int = 0,
             num_reqs: Tensor | None = None, pad_seqlen: int = 0) -> list[Row]:  # fmt: skip
        table, batch, rows = pool.tolist(), len(indices), []
        active = active_rows(num_reqs, batch)
        columns = indices.tolist(), lengths.tolist(), per_row(q_len, batch)
        for i, (index, length, queries) in enumerate(zip(*columns, strict=True)):
            if i >= active:
                rows.append(Row(None, pad_seqlen))
            elif not 0 <= index < len(table):
                self.bits |= BAD_ROW
                rows.append(Row(None, pad_seqlen, max(queries, 0)))
            else:
                self.bits |= NEGATIVE_LENGTH if queries < 0 else 0
                rows.append(Row(table[index], self.length(length, delta), max(queries, 0)))
        return rows

    def length(self, seq_len: int, delta: int) -> int:
        self.bits |= NEGATIVE_LENGTH if seq_len < 0 else 0
        length = max(seq_len, 0) + delta
        self.bits |= TOO_LONG if length > self.cap else 0
        return min(length, self.cap)

    def slot(self, row: Row, position: int) -> int:
        assert row.slots is not None
        if position < 0:
            return -1
        if position < len(row.slots) and row.slots[position] >= 0:
            return row.slots[position]
        self.bits |= BAD_SLOT
        return -1

    def page(self, row: Row, column: int) -> int:
        page = self.slot(row, row.start + column * self.page_size) // self.page_size
        if page > INT32_MAX:
            self.bits |= BAD_SLOT
            return -1
        return page

    def swa_slot(self, slot: int) -> int:
        if slot < 0:
            return -1
        if self.tokens is not None:
            found = self.tokens[slot] if slot < len(self.tokens) else -1
        else:
            page, offset = divmod(slot, self.page_size)
            swa_page = self.pages[page] if page < len(self.pages) else -1
            found = swa_page * self.page_size + offset if 0 <= swa_page <= INT32_MAX else -1
        self.bits |= UNMAPPED if found < 0 else 0
        return max(found, -1)

    def swa_page(self, row: Row, column: int) -> int:
        first = 0 if self.window is None else max(row.length - row.queries - self.window + 1, 0)
        if column < first // self.page_size:
            return 0
        if self.page(row, column) < 0:
            return -1
        swa_page = self.swa_slot(self.slot(row, column * self.page_size)) // self.page_size
        if swa_page > INT32_MAX:
            self.bits |= UNMAPPED
            return -1
        return swa_page

    def table(self, rows: list[Row], page: Callable[[Row, int], int], out: Tensor | None, tail: str) -> Tensor:
        if out is None:
            out = torch.zeros(len(rows), self.width, dtype=torch.int32)
        table = out.tolist()
        for line, row in zip(table, rows, strict=True):
            live = min(ceil_div(row.length, self.page_size), len(line))
            for column in range(len(line)):
                if column < live:
                    line[column] = 0 if row.slots is None else page(row, column)
                elif tail == "clear":
                    line[column] = 0
        return store(table, torch.int32, out)

    def prefix_sums(self, values: Sequence[int]) -> list[int]:
        sums = [0]
        for value in values:
            sums.append(sums[-1] + value)
        self.bits |= SUM_OVERFLOW if sums[-1] > INT32_MAX else 0
        return [min(total, INT32_MAX) for total in sums]

    def token_slots(self, rows: list[Row], num_tokens: int, given: list[int] | None) -> list[int]:
        room = num_tokens if given is None else min(num_tokens, len(given))
        self.bits |= TOO_MANY_TOKENS if sum(row.queries for row in rows) > room else 0
        mapping = [-1] * num_tokens
        for token, (row, position) in zip(range(room), queries_of(rows), strict=False):
            if row.slots is not None:
                mapping[token] = self.slot(row, position) if given is None else max(given[token], -1)
        return mapping


def queries_of(rows: list[Row]) -> Iterator[tuple[Row, int]]:
    for row in rows:
        for query in range(row.queries):
            yield row, row.length - row.queries + query


def active_rows(num_reqs: Tensor | None, batch: int) -> int:
    return batch if num_reqs is None else min(max(int(num_reqs), 0), batch)


def per_row(value: int | Tensor, batch: int) -> list[int]:
    return value.tolist() if isinstance(value, Tensor) else [value] * batch


def store(values: Any, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    computed = torch.tensor(values, dtype=dtype)
    return computed if out is None else out.copy_(computed.reshape(out.shape))


def page_table(req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor, *, layout: KVLayout,
               out: Tensor | None = None, tail: str = "clear") -> Tensor:  # fmt: skip
    """int32 [B, P]: the page of every page_size-th position of each row."""
    step = Step(layout)
    return step.table(step.rows(req_to_token, req_pool_indices, cache_seqlens), step.page, out, tail)


def swa_page_table(req_to_token: Tensor, req_pool_indices: Tensor, cache_seqlens: Tensor,
                   full_to_swa: Tensor | None = None, *, page_map: Tensor | None = None, layout: KVLayout,
                   q_len: int | Tensor = 1, out: tuple[Tensor, Tensor] | None = None,
                   tail: str = "clear") -> tuple[Tensor, Tensor]:  # fmt: skip
    """Two int32 [B, P]: the page table, and the same through a map from the window's first page on."""
    step, (full_out, swa_out) = Step(layout, full_to_swa, page_map), out or (None, None)
    rows = step.rows(req_to_token, req_pool_indices, cache_seqlens, q_len)
    return step.table(rows, step.page, full_out, tail), step.table(rows, step.swa_page, swa_out, tail)


def flashmla_kv_indices(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor,
                        kv_start: Tensor | None = None, *, layout: KVLayout, out: Tensor | None = None,
                        tail: str = "clear") -> Tensor:  # fmt: skip
    """int32 [B, P]: the page table of kv_lens tokens from position kv_start on."""
    step = Step(layout)
    rows = step.rows(req_to_token, req_pool_indices, kv_lens)
    starts = per_row(0 if kv_start is None else kv_start, len(rows))
    rows = [row._replace(start=max(start, 0)) for row, start in zip(rows, starts, strict=True)]
    return step.table(rows, step.page, out, tail)


def slot_mapping(req_to_token: Tensor | None, req_pool_indices: Tensor, positions: Tensor, *,
                 block_table: Tensor | None = None, page_size: int | None = None,
                 cu_seqlens_q: Tensor | None = None, num_reqs: Tensor | None = None,
                 out: Tensor | None = None) -> Tensor:  # fmt: skip
    """int64 [T]: the slot of each token's position in its row."""
    table: Any = req_to_token if block_table is None else block_table
    pool, indices, unit = table.tolist(), req_pool_indices.tolist(), page_size or 1
    ends = list(range(1, len(indices) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()[1:]
    mapping = []
    for token, position in enumerate(positions.tolist()):
        i = bisect_right(ends, token)
        slot = -1
        if i < active_rows(num_reqs, len(indices)) and 0 <= indices[i] < len(pool):
            row, (column, offset) = pool[indices[i]], divmod(position, unit)
            entry = row[column] if 0 <= column < len(row) else -1
            largest = INT32_MAX if block_table is not None else entry
            slot = entry * unit + offset if 0 <= entry <= largest else -1
        mapping.append(slot)
    return store(mapping, torch.int64, out)


def translate_slots(slots: Tensor, full_to_swa: Tensor, *, out: Tensor | None = None) -> Tensor:
    """int64 [T]: each slot through the token map."""
    step = Step(KVLayout(page_size=1, max_context_len=0), full_to_swa)
    return store([step.swa_slot(slot) for slot in slots.tolist()], torch.int64, out)


def seqlens(seq_lens: Tensor, *, delta: int = 0, q_len: int | Tensor = 1, num_reqs: Tensor | None = None,
            pad_seqlen: int = 0, layout: KVLayout | None = None,
            out: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Three int32: cache_seqlens [B], cu_seqlens_q [B + 1], cu_seqlens_k [B + 1]."""
    step, batch = Step(layout or KVLayout(page_size=1, max_context_len=INT32_MAX)), len(seq_lens)
    active, into = active_rows(num_reqs, batch), out or (None, None, None)
    padding = batch - active
    lengths = [step.length(seq_len, delta) for seq_len in seq_lens.tolist()[:active]]
    queries = [max(queries, 0) for queries in per_row(q_len, batch)[:active]]
    return (
        store(lengths + [pad_seqlen] * padding, torch.int32, into[0]),
        store(step.prefix_sums(queries + [0] * padding), torch.int32, into[1]),
        store(step.prefix_sums(lengths + [0] * padding), torch.int32, into[2]),
    )


def decode_metadata(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, layout: KVLayout,
                    seq_len_delta: int = 0, q_len: int | Tensor = 1, slots: Tensor | None = None,
                    num_tokens: int | None = None, full_to_swa: Tensor | None = None,
                    page_map: Tensor | None = None, num_reqs: Tensor | None = None, pad_seqlen: int = 0,
                    out: Any = None, tail: str = "clear") -> tuple[Metadata, int]:  # fmt: skip
    """Everything for one decode step, and the bits that this call adds to `status`."""
    step, into = Step(layout, full_to_swa, page_map), out or Metadata(*[None] * 7)  # type: ignore[arg-type]
    rows = step.rows(req_to_token, req_pool_indices, seq_lens, q_len, seq_len_delta, num_reqs, pad_seqlen)
    given, mapped = None if slots is None else slots.tolist(), full_to_swa is not None or page_map is not None
    if num_tokens is None and given is not None:
        num_tokens = len(given)
    elif num_tokens is None and isinstance(q_len, int):
        num_tokens = len(rows) * q_len
    mapping = None if num_tokens is None else step.token_slots(rows, num_tokens, given)
    swa_mapping = [step.swa_slot(slot) for slot in mapping] if mapped and mapping is not None else None
    cu_seqlens_k = step.prefix_sums([0 if row.slots is None else row.length for row in rows])
    metadata = Metadata(
        store([row.length for row in rows], torch.int32, into.cache_seqlens),
        store(step.prefix_sums([row.queries for row in rows]), torch.int32, into.cu_seqlens_q),
        store(cu_seqlens_k, torch.int32, into.cu_seqlens_k),
        step.table(rows, step.page, into.page_table, tail),
        step.table(rows, step.swa_page, into.swa_page_table, tail) if mapped else None,
        None if mapping is None else store(mapping, torch.int64, into.slot_mapping),
        None if swa_mapping is None else store(swa_mapping, torch.int64, into.swa_slot_mapping),
    )
    return metadata, step.bits


def flashmla_schedule(cache_seqlens: Tensor, *, num_sm_parts: int, block_size: int = 64, fixed_overhead_blocks: int = 5,
                      num_reqs: Tensor | None = None, form: str = "current",
                      out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Two int32: tile_scheduler_metadata [num_sm_parts, 8] and num_splits [B + 1], one part after the other."""
    batch, overhead = len(cache_seqlens), fixed_overhead_blocks
    active = active_rows(num_reqs, batch)
    most = max(2**30 // max(batch, 1) - overhead, 1)
    lengths = [min(max(length, 0), INT32_MAX) for length in cache_seqlens.tolist()[:active]]
    blocks = [min(max(ceil_div(length, block_size), 1), most) for length in lengths]
    payload = ceil_div(sum(blocks) + overhead * active, num_sm_parts) + overhead
    req, block, split, splits, rows = 0, 0, 0, [0], []
    for _ in range(num_sm_parts):
        begin, left = (req, block, split), payload
        while req < active and left >= blocks[req] - block + overhead:
            left -= blocks[req] - block + overhead
            splits.append(splits[-1] + split + 1)
            req, block, split = req + 1, 0, 0
        if req < active and left > overhead:
            block, split = block + left - overhead, split + 1
        rows.append(schedule_row(begin, (req, block), lengths, blocks, block_size, form))
    assert (req, block, split) == (active, 0, 0)
    splits += [splits[-1]] * (batch - active)
    into = out or (None, None)
    table = torch.tensor(rows, dtype=torch.int32).reshape(num_sm_parts, 8)
    return store(table.tolist(), torch.int32, into[0]), store(splits, torch.int32, into[1])


def schedule_row(begin: tuple[int, int, int], end: tuple[int, int], lengths: list[int], blocks: list[int],
                 block_size: int, form: str) -> list[int]:  # fmt: skip
    begin_req, begin_block, begin_split = begin
    end_req, end_block = end
    end_token, cut_first, cut_last = end_block * block_size, begin_block > 0, end_block > 0
    if not cut_last:
        end_req -= 1
        end_token = lengths[end_req] if end_req >= 0 else 0
        end_block = blocks[end_req] if end_token > 0 else 0
    if begin_req == end_req:
        cut_first = cut_last = cut_first or cut_last
    if form == "current":
        return [begin_req, end_req, begin_block, end_block, begin_split, cut_first, cut_last, 0]
    if form == "legacy_blocks":
        return [begin_req, begin_block, end_req, end_block, begin_split, 0, 0, 0]
    return [begin_req, begin_block * block_size, end_req, end_token, begin_split, 0, 0, 0]
