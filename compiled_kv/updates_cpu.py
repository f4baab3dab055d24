"""`update_metadata` on CPU tensors: the kernel's twin in static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.metadata_cpu import Rows, rows_of_batch, slots_of_batch
from compiled_kv.metadata_parts import DecodeMetadata, Inputs, Settings
from compiled_kv.status import Status


def cpu_body(
    out: DecodeMetadata, held: Tensor, generations: Tensor, given: Inputs, settings: Settings, num_tokens: int
) -> None:
    batch_size = given.seq_lens.shape[0]
    batch, bits = rows_of_batch(given, settings)
    bits.append(_cpu_tables(out, held[:batch_size], generations, given, settings, batch))
    if out.slot_mapping is not None:
        slots, swa_slots, slot_bits = slots_of_batch(given, settings, batch, num_tokens)
        bits += slot_bits
        out.slot_mapping[:num_tokens] = slots
        if out.swa_slot_mapping is not None:
            assert swa_slots is not None
            out.swa_slot_mapping[:num_tokens] = swa_slots
    out.cache_seqlens[:batch_size] = batch.lengths.int()
    out.cu_seqlens_q[: batch_size + 1] = cpu.prefix_sums(batch.ends_q)
    out.cu_seqlens_k[: batch_size + 1] = cpu.prefix_sums(batch.ends_k)
    cpu.report(given.status, *bits)


def _cpu_tables(
    out: DecodeMetadata, held: Tensor, generations: Tensor, given: Inputs, settings: Settings, batch: Rows
) -> Tensor:  # fmt: skip
    """Write what changed of both tables and of the record; returns status bits of each column written."""
    page_size, rows = settings.page_size, batch.rows
    batch_size, width = rows.shape[0], out.page_table.shape[1]
    columns = cpu.iota(width, rows)
    record, now = held[:, 0], _cpu_record(generations, given, settings, batch, width)
    settled, live_columns, first = now.unbind(1)[2:]
    old_settled, old_live, old_first = record[:, 2:].int().clamp(0, width).unbind(1)
    kept = (now[:, :2] == record[:, :2]).all(1) & (settled >= old_settled)
    start = old_settled.where(kept, 0)
    start = torch.where(first < old_first, torch.minimum(start, first), start)
    written = (columns >= start[:, None]) & (columns < live_columns[:, None])
    cleared = (columns >= live_columns[:, None]) & (columns < old_live[:, None])
    positions = (columns * page_size).expand(batch_size, width)
    slots = cpu.gather_rows(given.req_to_token, rows[:, None], positions, written)
    pages = cpu.page_of(slots, page_size)
    table = out.page_table[:batch_size]
    table.copy_(torch.where(written, pages.int(), table.where(~cleared, 0)))
    bits = cpu.flag(written & (pages < 0), Status.BAD_SLOT)
    if out.swa_page_table is not None:
        seen = written & (columns >= first[:, None])
        found = cpu.swa_page_of(slots, pages, given.full_to_swa, given.page_map, seen, page_size)
        passed = (columns >= old_first[:, None]) & (columns < torch.minimum(first, start)[:, None])
        swa_table = out.swa_page_table[:batch_size]
        kept_swa = swa_table.where(~(cleared | passed), 0)
        swa_table.copy_(torch.where(written, torch.where(seen, found, 0).int(), kept_swa))
        bits = bits | cpu.flag(seen & (pages >= 0) & (found < 0), Status.UNMAPPED)
    held.copy_(now[:, None].expand_as(held))
    return bits


def _cpu_record(
    generations: Tensor, given: Inputs, settings: Settings, batch: Rows, width: int
) -> Tensor:  # fmt: skip
    """What each row is to hold, int64 [B, 5]."""
    rows, live, lengths, queries, _, _ = batch
    page_size, cap, _, _, _, window = settings

    def columns(tokens: Tensor) -> Tensor:
        return cpu.pages_of(tokens, page_size).clamp(max=width)

    live_columns = columns(lengths).where(live, 0)
    committed = torch.minimum(cpu.clamped_length(given.seq_lens, 0, cap), (lengths - queries).clamp(min=0))
    settled = torch.minimum(columns(committed), live_columns)
    first = torch.minimum(cpu.first_column(lengths, queries, window, page_size), live_columns)
    owner, generation = rows.where(live, -1), generations.long().where(live, 0)
    return torch.stack([owner, generation, settled, live_columns, first], 1)
