"""The CPU body of `draft_kv_indices`, in torch calls of static shapes, and what both bodies are given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.layout import INT32_MAX
from compiled_kv.peers.csr_cpu import entry_of, slots_at


class Given(NamedTuple):
    pool: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    positions: Tensor | None
    page_map: Tensor | None


class Settings(NamedTuple):
    num_steps: int
    topk: int
    page_size: int
    entry_page_size: int
    cap: int
    window: int
    sinks: int


def cpu_body(
    given: Given, settings: Settings, capacity: int, dtype: torch.dtype = torch.int32
) -> tuple[Tensor, Tensor, Tensor]:
    """Both outputs, cleared, and which indices a kept tail leaves to us."""
    num_steps, topk, page_size, entry_size, cap, window, sinks = settings
    rows = given.req_pool_indices.long()
    live = (rows >= 0) & (rows < given.pool.shape[0])
    lengths = cpu.clamped_length(given.seq_lens, 0, cap).where(live, 0)
    lengths = lengths[cpu.floor_div(cpu.iota(lengths.shape[0] * topk, rows), topk)]
    most = window + sinks if window > 0 else cap
    counts, drafts = lengths.clamp(max=most), cpu.iota(num_steps, rows)[:, None] + 1
    shown = counts if given.positions is None else cpu.clamped_length(given.positions, 0, cap).clamp(max=most)
    kv_indptr = torch.nn.functional.pad((shown + drafts).cumsum(1).clamp(max=min(capacity, INT32_MAX)), (1, 0))

    entry = cpu.iota(capacity, rows) + torch.zeros_like(drafts)  # searchsorted would copy an expanded one
    branch = torch.searchsorted((counts + drafts).cumsum(1).contiguous(), entry, right=True)
    written = branch < lengths.shape[0]
    length, kept = cpu.gather(lengths, branch, written), cpu.gather(counts, branch, written)
    column = entry - cpu.gather(counts.cumsum(0) - counts, branch, written) - branch * drafts
    request = cpu.floor_div(branch, topk)
    pages = cpu.pages_of(length % page_size + num_steps, page_size)
    position = column + torch.where(column < kept.clamp(max=sinks), 0, length - kept)
    position = position + torch.where(column < kept, 0, (branch - request * topk) * pages * page_size)
    slot = slots_at(given.pool, cpu.gather(rows, request, written), position, written, entry_size)
    if given.page_map is not None:
        slot = _physical(slot, given.page_map, written, page_size)
    return kv_indptr.int(), torch.where(written, entry_of(slot, 1, dtype), 0), written


def _physical(slot: Tensor, page_map: Tensor, mask: Tensor, page_size: int) -> Tensor:
    """Slot of a virtual slot; the null slot for none, and in a page that is not bound."""
    page = cpu.page_of(cpu.gather(page_map, cpu.page_of(slot, page_size), mask), 1)
    return torch.where(page < 0, 0, page * page_size + slot % page_size)
