"""The CPU body of the CSR operators, in torch calls of static shapes, and what both bodies are given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu


class Given(NamedTuple):
    pool: Tensor
    req_pool_indices: Tensor
    kv_lens: Tensor
    kv_start: Tensor | None
    token_map: Tensor | None
    num_reqs: Tensor | None


class Settings(NamedTuple):
    page_size: int
    entry_page_size: int
    cap: int


def lengths_of(given: Given, settings: Settings) -> tuple[Tensor, Tensor]:
    """Tokens and pages of each row, int64 [B]; none of a row that is padding."""
    rows = given.req_pool_indices.long()
    counted = cpu.iota(rows.shape[0], rows) < cpu.active_rows(given.num_reqs, rows.shape[0])
    live = counted & (rows >= 0) & (rows < given.pool.shape[0])
    lengths = cpu.clamped_length(given.kv_lens, 0, settings.cap).where(live, 0)
    return lengths, cpu.pages_of(lengths, settings.page_size)


def slots_at(pool: Tensor, pool_row: Tensor, position: Tensor, mask: Tensor, entry_size: int) -> Tensor:
    """Slot of each position; the pool has an entry for each `entry_size` of them."""
    entry = cpu.gather_rows(pool, pool_row, cpu.floor_div(position, entry_size), mask)
    if entry_size == 1:
        return entry
    page = cpu.page_of(entry, 1)
    return torch.where(page < 0, -1, page * entry_size + position % entry_size)


def last_page_lens(lengths: Tensor, page_size: int) -> Tensor:
    return torch.where(lengths > 0, (lengths - 1) % page_size + 1, 0).int()


def entry_of(slot: Tensor, page_size: int, dtype: torch.dtype) -> Tensor:
    """Page of each slot in the dtype of `kv_indices`, -1 for none; int64 has room for every page."""
    if dtype == torch.int64:
        return torch.where(slot >= 0, cpu.floor_div(slot, page_size), -1)
    return cpu.page_of(slot, page_size).to(dtype)


def entries_of(
    given: Given, settings: Settings, kv_indptr: Tensor, pages: Tensor, capacity: int, dtype: torch.dtype = torch.int32
) -> tuple[Tensor, Tensor]:
    """`dtype` [capacity], 0 where no row owns an entry, and which entries a row owns."""
    page_size, entry_size, _ = settings
    entry = cpu.iota(capacity, pages)
    row = torch.searchsorted(kv_indptr[1:].contiguous(), entry, right=True)
    in_batch = row < pages.shape[0]
    first = cpu.gather(kv_indptr, row, in_batch)
    column = entry - first
    written = in_batch & (first >= 0) & (column >= 0) & (column < cpu.gather(pages, row, in_batch))
    position = column * page_size
    if given.kv_start is not None:
        start = given.kv_start.long().clamp(0, given.pool.shape[1] * entry_size)
        position = position + cpu.gather(start, row, in_batch)
    pool_row = cpu.gather(given.req_pool_indices, row, written)
    slot = slots_at(given.pool, pool_row, position, written, entry_size)
    if given.token_map is not None:
        slot = cpu.gather(given.token_map, slot, slot >= 0)
    return torch.where(written, entry_of(slot, page_size, dtype), 0), written
