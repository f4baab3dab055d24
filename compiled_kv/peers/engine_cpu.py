"""The CPU body of `write_metadata`, in torch calls of static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.peers.engine_parts import EngineMetadata, Inputs, Settings


def _physical(pages: Tensor, page_map: Tensor, mask: Tensor) -> Tensor:
    return cpu.page_of(cpu.gather(page_map, pages.clamp(min=0), mask), 1).clamp(min=0)


def run_on_cpu(out: EngineMetadata, given: Inputs, settings: Settings) -> None:
    rows = given.req_pool_indices.long()
    live = (rows >= 0) & (rows < given.req_to_token.shape[0])
    lengths = cpu.clamped_length(given.seq_lens, settings.delta, settings.cap).where(live, 0)
    batch_size, width = rows.shape[0], settings.width
    if out.cache_seqlens is not None:
        out.cache_seqlens[:batch_size].copy_(lengths)
    if out.cu_seqlens_k is not None:
        out.cu_seqlens_k[: batch_size + 1].copy_(cpu.prefix_sums(lengths.cumsum(0)))
    if out.cu_seqlens_q is not None:
        queries = cpu.queries_of_rows(given.q_len, settings.q_len, torch.ones_like(live))
        out.cu_seqlens_q[: batch_size + 1].copy_(cpu.prefix_sums(queries.cumsum(0)))
    if out.page_table is not None:
        swa_table = None if out.swa_page_table is None else out.swa_page_table[:batch_size, :width]
        _fill_tables(out.page_table[:batch_size, :width], swa_table, given, settings, rows, live, lengths)
    if out.swa_slot_mapping is not None:
        tokens = cpu.iota(out.swa_slot_mapping.shape[0], rows)
        count, slots = 0, torch.full_like(tokens, -1)
        if given.slots is not None:
            count, slots = given.slots.shape[0], cpu.gather(given.slots, tokens, tokens >= 0)
        found = cpu.swa_slot_of(slots, given.full_to_swa, None, settings.page_size)
        out.swa_slot_mapping.copy_(torch.where(tokens < count, found, 0))


def _fill_tables(
    table: Tensor, swa_table: Tensor | None, given: Inputs, settings: Settings,
    rows: Tensor, live: Tensor, lengths: Tensor,
) -> None:  # fmt: skip
    page_size = settings.page_size
    slots, pages, _, owned = cpu.pages_of_rows(given.req_to_token, rows, lengths, live, table.shape[1], page_size)
    shown = pages if given.page_map is None else _physical(pages, given.page_map, owned)
    table.copy_(torch.where(owned, shown.int(), 0 if settings.clear else table))
    if swa_table is not None:
        if given.swa_page_map is not None:
            found = _physical(pages, given.swa_page_map, owned)
        else:
            found = cpu.swa_page_of(slots, pages, given.full_to_swa, None, owned, page_size)
        swa_table.copy_(torch.where(owned, found.int(), 0 if settings.clear else swa_table))
