"""What one writes without a kernel: a gather, sized by a host read or by a static bound, eager or compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import metadata_cpu
from compiled_kv.metadata_parts import DecodeMetadata, Inputs, Settings


def sums(seq_lens: Tensor, cache_seqlens: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    cache_seqlens.copy_(seq_lens)
    cu_seqlens_k[1:] = torch.cumsum(seq_lens, 0)
    cu_seqlens_q[1:] = torch.arange(1, seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)


def gather(
    req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, full_to_swa: Tensor | None, out: DecodeMetadata,
    page_size: int, width: int,
) -> None:  # fmt: skip
    """Columns up to `width`, kept where a row has fewer; a window is not looked at."""
    sums(seq_lens, out.cache_seqlens, out.cu_seqlens_q, out.cu_seqlens_k)
    column = torch.arange(width, device=rows.device)
    live = column * page_size < seq_lens[:, None]
    slots = req_to_token[rows[:, None], column * page_size]
    table = out.page_table[:, :width]
    table.copy_(torch.where(live, slots // page_size, table))
    token = req_to_token[rows, seq_lens.long() - 1].long()
    assert out.slot_mapping is not None
    out.slot_mapping.copy_(token)
    if full_to_swa is not None:
        assert out.swa_page_table is not None and out.swa_slot_mapping is not None
        swa_table = out.swa_page_table[:, :width]
        swa_slots = full_to_swa[torch.where(live, slots, 0).long()]
        swa_table.copy_(torch.where(live, swa_slots // page_size, swa_table))
        out.swa_slot_mapping.copy_(full_to_swa[token])


def gather_to_longest(
    req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, full_to_swa: Tensor | None, out: DecodeMetadata,
    page_size: int,
) -> None:  # fmt: skip
    """The same, as wide as the longest request: one read of a length back to the host."""
    width = -(-int(seq_lens.max().item()) // page_size)
    gather(req_to_token, rows, seq_lens, full_to_swa, out, page_size, width)


def cpu_body(
    req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, full_to_swa: Tensor | None, page_size: int, cap: int,
    width: int, window: int | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Our CPU body, for Inductor to compile on any device; tails come cleared and in fresh tensors."""
    given = Inputs(req_to_token, rows, seq_lens, None, None, full_to_swa, None, None, None)
    settings = Settings(page_size, cap, 0, 1, 0, window)
    return tuple(metadata_cpu.cpu_body(given, settings, width, rows.shape[0])[0])
