"""`decode_metadata` as registered operators: flat arguments, fixed tuples of tensors, absent outputs of size zero.

Schemas know no NamedTuple argument, no optional result and no `int | Tensor`; the public function in `metadata`
restores them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import triton_op

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import check_distinct_fake
from compiled_kv.launch import (
    SCAN,
    TOKENS,
    chunks,
    columns_a_turn,
    launch,
    programs_a_row,
    runs_kernel,
)
from compiled_kv.metadata_kernel import decode_metadata_kernel
from compiled_kv.status import DEBUG, Status


class Inputs(NamedTuple):
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    q_lens: Tensor | None
    slots: Tensor | None
    full_to_swa: Tensor | None
    page_map: Tensor | None
    num_reqs: Tensor | None
    status: Tensor | None

    @property
    def swa_map(self) -> Tensor | None:
        return self.page_map if self.full_to_swa is None else self.full_to_swa


class Settings(NamedTuple):
    page_size: int
    cap: int
    delta: int
    q_len: int
    pad_seqlen: int
    window: int | None


class DecodeMetadata(NamedTuple):
    """What attention and the K/V write of one step read. B rows, P columns, T tokens; absent parts are None."""

    cache_seqlens: Tensor
    """int32 [B], tokens attention reads of each row."""
    cu_seqlens_q: Tensor
    """int32 [B + 1], prefix sums of queries."""
    cu_seqlens_k: Tensor
    """int32 [B + 1], prefix sums of `cache_seqlens` of live rows."""
    page_table: Tensor
    """int32 [B, P], page ids; 0 is the null page, -1 none."""
    swa_page_table: Tensor | None = None
    """int32 [B, P], the same in the sliding-window pool; None without a map."""
    slot_mapping: Tensor | None = None
    """int64 [T], where each token's K/V is written; -1 for none."""
    swa_slot_mapping: Tensor | None = None
    """int64 [T], the same in the sliding-window pool."""


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _stride(tensor: Tensor | None, dim: int = 0) -> int:
    return 0 if tensor is None else tensor.stride(dim)


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[0]


def _launch(out: DecodeMetadata, given: Inputs, settings: Settings, clear: bool) -> None:
    batch_size, width = out.page_table.shape
    block = columns_a_turn(settings.page_size)
    pool, swa_map = given.req_to_token, given.swa_map
    launch(
        decode_metadata_kernel, (chunks(batch_size) + batch_size, programs_a_row(batch_size, width, block)),
        req_to_token_ptr=pool, req_pool_indices_ptr=given.req_pool_indices, seq_lens_ptr=given.seq_lens,
        q_lens_ptr=given.q_lens,
        slots_ptr=given.slots, map_ptr=swa_map, num_reqs_ptr=given.num_reqs, status_ptr=given.status,
        cache_seqlens_ptr=out.cache_seqlens, cu_q_ptr=out.cu_seqlens_q, cu_k_ptr=out.cu_seqlens_k,
        page_table_ptr=out.page_table, swa_page_table_ptr=out.swa_page_table,
        slot_mapping_ptr=out.slot_mapping, swa_slot_mapping_ptr=out.swa_slot_mapping,
        pool_rows=pool.shape[0], pool_width=pool.shape[1], pool_row_stride=pool.stride(0), pool_stride=pool.stride(1),
        index_stride=given.req_pool_indices.stride(0), seq_stride=given.seq_lens.stride(0),
        q_stride=_stride(given.q_lens),
        slots_stride=_stride(given.slots), num_slots=_size(given.slots), map_stride=_stride(swa_map),
        map_size=_size(swa_map),
        page_row_stride=out.page_table.stride(0), swa_row_stride=_stride(out.swa_page_table), batch_size=batch_size,
        width=width,
        num_tokens=_size(out.slot_mapping), delta=settings.delta, q_len=settings.q_len, cap=settings.cap,
        pad_seqlen=settings.pad_seqlen, window=settings.window or 0, PAGE_SIZE=settings.page_size,
        PAGE_MAP=given.page_map is not None, WINDOWED=settings.window is not None, CLEAR=clear,
        UNIT_STRIDE=pool.stride(1) == 1, DEBUG=DEBUG,
        PDL=False, BLOCK=block, TOKENS=TOKENS, SCAN=SCAN,
    )  # fmt: skip


def _cpu_body(given: Inputs, settings: Settings, width: int, num_tokens: int | None) -> tuple[DecodeMetadata, Tensor]:
    """Every output with cleared tails, and which columns a kept tail leaves to us."""
    page_size, cap, delta, q_len, pad_seqlen, window = settings
    batch_size, rows = given.seq_lens.shape[0], given.req_pool_indices.long()
    counted = cpu.iota(batch_size, rows) < cpu.active_rows(given.num_reqs, batch_size)
    live = counted & (rows >= 0) & (rows < given.req_to_token.shape[0])
    lengths = cpu.clamped_length(given.seq_lens, delta, cap).where(live, pad_seqlen)
    queries = cpu.queries_of_rows(given.q_lens, q_len, counted)
    ends_q, ends_k = queries.cumsum(0), lengths.where(live, 0).cumsum(0)
    slots, pages, written, owned = cpu.pages_of_rows(given.req_to_token, rows, lengths, live, width, page_size)
    bits = [
        cpu.batch_bits(given.seq_lens, given.q_lens, delta, cap, live),
        cpu.flag(counted & ~live, Status.BAD_ROW),
        cpu.sum_bits(ends_q, ends_k),
        cpu.flag(owned & (pages < 0), Status.BAD_SLOT),
    ]
    swa_pages = None
    if given.swa_map is not None:
        seen = owned & cpu.in_window(lengths, queries, window, width, page_size)
        found = cpu.swa_page_of(slots, pages, given.full_to_swa, given.page_map, seen, page_size)
        swa_pages = torch.where(seen, found, 0).int()
        bits.append(cpu.flag(seen & (pages >= 0) & (found < 0), Status.UNMAPPED))
    token_slots = swa_slots = None
    if num_tokens is not None:
        token_slots, token_bits = _cpu_slots(given, settings, num_tokens, rows, live, lengths, queries, ends_q)
        capacity = num_tokens if given.slots is None else given.slots.shape[0]
        bits += [token_bits, cpu.flag(queries.sum() > capacity, Status.TOO_MANY_TOKENS)]
        if given.swa_map is not None:
            swa_slots = cpu.swa_slot_of(token_slots, given.full_to_swa, given.page_map, page_size)
            bits.append(cpu.flag((token_slots >= 0) & (swa_slots < 0), Status.UNMAPPED))
    cpu.report(given.status, *bits)
    sums = cpu.prefix_sums(ends_q), cpu.prefix_sums(ends_k)
    return DecodeMetadata(lengths.int(), *sums, pages.int(), swa_pages, token_slots, swa_slots), written


def _cpu_slots(
    given: Inputs,
    settings: Settings,
    num_tokens: int,
    rows: Tensor,
    live: Tensor,
    lengths: Tensor,
    queries: Tensor,
    ends_q: Tensor,
) -> tuple[Tensor, Tensor]:
    """Slot of each token, and status bits."""
    tokens = cpu.iota(num_tokens, rows)
    if given.q_lens is None:
        row = cpu.floor_div(tokens, max(settings.q_len, 1))
        query = tokens - row * settings.q_len
        in_batch = row < (rows.shape[0] if settings.q_len > 0 else 0)
    else:
        row = torch.searchsorted(ends_q, tokens, right=True)
        in_batch = row < rows.shape[0]
        query = tokens - cpu.gather(ends_q - queries, row, in_batch)
    owned = cpu.gather(live, row, in_batch) == 1
    if given.slots is not None:
        return cpu.gather(given.slots, tokens, owned).clamp(min=-1), torch.zeros_like(tokens)
    positions = cpu.gather(lengths - queries, row, owned) + query
    held = owned & (positions >= 0)
    slots = cpu.gather_rows(given.req_to_token, cpu.gather(rows, row, owned), positions, held).clamp(min=-1)
    return slots, cpu.flag(held & (slots < 0), Status.BAD_SLOT)


@triton_op("compiled_kv::decode_metadata", mutates_args=("status",))
def _decode_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_lens: Tensor | None, slots: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, num_reqs: Tensor | None, status: Tensor | None,
    page_size: int, cap: int, delta: int, q_len: int, pad_seqlen: int, window: int | None, width: int, num_tokens: int
    | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    given = Inputs(req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, num_reqs, status)
    settings = Settings(page_size, cap, delta, q_len, pad_seqlen, window)
    check_distinct_fake(_present(status=status), given._asdict())
    if runs_kernel(req_to_token):
        out = _new_outputs(given, width, num_tokens)
        _launch(out, given, settings, clear=True)
    else:
        out, _ = _cpu_body(given, settings, width, num_tokens)
    absent = [torch.empty(0, dtype=dtype, device=seq_lens.device) for dtype in (torch.int32, torch.int64, torch.int64)]
    swa_table, slot_mapping, swa_slots = (empty if t is None else t for t, empty in zip(out[4:], absent))
    return (*out[:4], swa_table, slot_mapping, swa_slots)


def _new_outputs(given: Inputs, width: int, num_tokens: int | None) -> DecodeMetadata:
    batch_size, swa = given.seq_lens.shape[0], given.swa_map is not None

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return given.seq_lens.new_empty(shape, dtype=dtype)

    i32, i64 = torch.int32, torch.int64
    return DecodeMetadata(
        new(i32, batch_size),
        new(i32, batch_size + 1),
        new(i32, batch_size + 1),
        new(i32, batch_size, width),
        new(i32, batch_size, width) if swa else None,
        None if num_tokens is None else new(i64, num_tokens),
        None if num_tokens is None or not swa else new(i64, num_tokens),
    )


@triton_op("compiled_kv::decode_metadata_out", mutates_args=("status", *DecodeMetadata._fields))
def _decode_metadata_out(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, q_lens: Tensor | None, slots: Tensor | None,
    full_to_swa: Tensor | None, page_map: Tensor | None, num_reqs: Tensor | None, status: Tensor | None,
    cache_seqlens: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, page_table: Tensor,
    swa_page_table: Tensor | None, slot_mapping: Tensor | None, swa_slot_mapping: Tensor | None,
    page_size: int, cap: int, delta: int, q_len: int, pad_seqlen: int, window: int | None, clear: bool,
) -> None:  # fmt: skip
    given = Inputs(req_to_token, req_pool_indices, seq_lens, q_lens, slots, full_to_swa, page_map, num_reqs, status)
    settings = Settings(page_size, cap, delta, q_len, pad_seqlen, window)
    out = DecodeMetadata(
        cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table, swa_page_table, slot_mapping, swa_slot_mapping
    )
    check_distinct_fake(_present(**out._asdict(), status=status), given._asdict())
    if runs_kernel(req_to_token):
        _launch(out, given, settings, clear)
        return
    values, written = _cpu_body(
        given, settings, page_table.shape[1], None if slot_mapping is None else slot_mapping.shape[0]
    )
    for name, target in out._asdict().items():
        value = getattr(values, name)
        if target is not None:
            kept = not clear and name in ("page_table", "swa_page_table")
            target.copy_(value.where(written, target) if kept else value)
