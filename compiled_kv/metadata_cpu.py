"""`decode_metadata` on CPU tensors, in static shapes that Inductor can fuse; `update_metadata` shares half of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.metadata_parts import DecodeMetadata, Inputs, Settings
from compiled_kv.status import Status


class Rows(NamedTuple):
    """What a batch says of its B rows, each int64 [B] but `live`, bool [B]."""

    rows: Tensor
    live: Tensor
    lengths: Tensor
    queries: Tensor
    ends_q: Tensor
    ends_k: Tensor


def rows_of_batch(given: Inputs, settings: Settings) -> tuple[Rows, list[Tensor]]:
    """Rows, lengths and inclusive sums, and their status bits."""
    batch_size, rows = given.seq_lens.shape[0], given.req_pool_indices.long()
    counted = cpu.iota(batch_size, rows) < cpu.active_rows(given.num_reqs, batch_size)
    live = counted & (rows >= 0) & (rows < given.req_to_token.shape[0])
    lengths = cpu.clamped_length(given.seq_lens, settings.delta, settings.cap).where(live, settings.pad_seqlen)
    queries = cpu.queries_of_rows(given.q_lens, settings.q_len, counted)
    ends_q, ends_k = queries.cumsum(0), lengths.where(live, 0).cumsum(0)
    bits = [
        cpu.batch_bits(given.seq_lens, given.q_lens, settings.delta, settings.cap, live),
        cpu.flag(counted & ~live, Status.BAD_ROW),
        cpu.sum_bits(ends_q, ends_k),
    ]
    return Rows(rows, live, lengths, queries, ends_q, ends_k), bits


def slots_of_batch(
    given: Inputs, settings: Settings, batch: Rows, num_tokens: int
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Slot of each token in both pools, and status bits."""
    slots, slot_bits = _slots(given, settings, batch, num_tokens)
    capacity = num_tokens if given.slots is None else given.slots.shape[0]
    bits = [slot_bits, cpu.flag(batch.queries.sum() > capacity, Status.TOO_MANY_TOKENS)]
    if given.swa_map is None:
        return slots, None, bits
    swa_slots = cpu.swa_slot_of(slots, given.full_to_swa, given.page_map, settings.page_size)
    return slots, swa_slots, [*bits, cpu.flag((slots >= 0) & (swa_slots < 0), Status.UNMAPPED)]


def _slots(given: Inputs, settings: Settings, batch: Rows, num_tokens: int) -> tuple[Tensor, Tensor]:
    rows = batch.rows
    tokens = cpu.iota(num_tokens, rows)
    if given.q_lens is None:
        row = cpu.floor_div(tokens, max(settings.q_len, 1))
        query = tokens - row * settings.q_len
        in_batch = row < (rows.shape[0] if settings.q_len > 0 else 0)
    else:
        row = torch.searchsorted(batch.ends_q, tokens, right=True)
        in_batch = row < rows.shape[0]
        query = tokens - cpu.gather(batch.ends_q - batch.queries, row, in_batch)
    owned = cpu.gather(batch.live, row, in_batch) == 1
    if given.slots is not None:
        return cpu.gather(given.slots, tokens, owned).clamp(min=-1), torch.zeros_like(tokens)
    positions = cpu.gather(batch.lengths - batch.queries, row, owned) + query
    held = owned & (positions >= 0)
    slots = cpu.gather_rows(given.req_to_token, cpu.gather(rows, row, owned), positions, held).clamp(min=-1)
    return slots, cpu.flag(held & (slots < 0), Status.BAD_SLOT)


def cpu_body(given: Inputs, settings: Settings, width: int, num_tokens: int | None) -> tuple[DecodeMetadata, Tensor]:
    """Every output with cleared tails, and which columns a kept tail leaves to us."""
    page_size = settings.page_size
    batch, bits = rows_of_batch(given, settings)
    slots, pages, written, owned = cpu.pages_of_rows(
        given.req_to_token, batch.rows, batch.lengths, batch.live, width, page_size
    )
    bits.append(cpu.flag(owned & (pages < 0), Status.BAD_SLOT))
    swa_pages = None
    if given.swa_map is not None:
        seen = owned & cpu.in_window(batch.lengths, batch.queries, settings.window, width, page_size)
        found = cpu.swa_page_of(slots, pages, given.full_to_swa, given.page_map, seen, page_size)
        swa_pages = torch.where(seen, found, 0).int()
        bits.append(cpu.flag(seen & (pages >= 0) & (found < 0), Status.UNMAPPED))
    token_slots = swa_slots = None
    if num_tokens is not None:
        token_slots, swa_slots, token_bits = slots_of_batch(given, settings, batch, num_tokens)
        bits += token_bits
    cpu.report(given.status, *bits)
    sums = cpu.prefix_sums(batch.ends_q), cpu.prefix_sums(batch.ends_k)
    return DecodeMetadata(batch.lengths.int(), *sums, pages.int(), swa_pages, token_slots, swa_slots), written
