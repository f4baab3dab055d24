"""Torch pieces that the CPU bodies share; the twins of `rows_triton` and `columns_triton`, in static shapes so that
Inductor can fuse them."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.layout import INT32_MAX
from compiled_kv.status import DEBUG, Status

MAX_QUERIES = 2**32


def iota(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)


def row_of_token(cu_seqlens_q: Tensor, token: Tensor) -> Tensor:
    """Row whose interval of prefix sums [B + 1] holds each token, B for one behind the last of them; int64."""
    return torch.searchsorted(cu_seqlens_q[1:].long().contiguous(), token, right=True)


def active_rows(num_reqs: Tensor | None, batch_size: int) -> Tensor | int:
    return batch_size if num_reqs is None else num_reqs.reshape(()).long().clamp(0, batch_size)


def clamped_length(seq_lens: Tensor, delta: int, cap: int) -> Tensor:
    # The first clamp keeps an absurd 64-bit length from wrapping round when delta is added.
    return (seq_lens.long().clamp(0, cap) + delta).clamp(max=cap)


def pages_of(lengths: Tensor, page_size: int) -> Tensor:
    """Pages that each length takes."""
    return floor_div(lengths + page_size - 1, page_size)


def length_bits(seq_lens: Tensor, delta: int, cap: int) -> Tensor:
    seq_lens = seq_lens.long()
    return flag(seq_lens < 0, Status.NEGATIVE_LENGTH) | flag(seq_lens.clamp(min=0) > cap - delta, Status.TOO_LONG)


def queries_of_rows(q_lens: Tensor | None, q_len: int, counted: Tensor) -> Tensor:
    """Queries of each row, int64 [B]; padding rows have none."""
    if q_lens is None:
        return torch.where(counted, q_len, 0)
    return torch.where(counted, q_lens.long().clamp(0, MAX_QUERIES), 0)


def prefix_sums(ends: Tensor) -> Tensor:
    """int32 [B + 1] from inclusive int64 sums, saturating."""
    return torch.nn.functional.pad(ends.clamp(max=INT32_MAX), (1, 0)).int()


def batch_bits(seq_lens: Tensor, q_lens: Tensor | None, delta: int, cap: int, live: Tensor) -> Tensor:
    bits = length_bits(seq_lens, delta, cap)
    if q_lens is not None:
        bits = bits | flag(q_lens < 0, Status.NEGATIVE_LENGTH)
    return bits.where(live, 0)


def sum_bits(ends_q: Tensor, ends_k: Tensor) -> Tensor:
    return flag((ends_q > INT32_MAX) | (ends_k > INT32_MAX), Status.SUM_OVERFLOW)


def gather(table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """`table[index]` as int64 where `mask` and the index is inside, else -1."""
    mask = mask & (index >= 0) & (index < table.shape[0])
    if table.shape[0] == 0:
        return torch.full_like(mask, -1, dtype=torch.int64)
    return torch.where(mask, table[torch.where(mask, index, 0)].long(), -1)


def gather_rows(table: Tensor, rows: Tensor, columns: Tensor, mask: Tensor) -> Tensor:
    """`table[rows, columns]` as int64 where `mask` and both indices are inside, else -1."""
    mask = mask & (rows >= 0) & (rows < table.shape[0]) & (columns >= 0) & (columns < table.shape[1])
    if table.shape[0] == 0 or table.shape[1] == 0:
        return torch.full_like(mask, -1, dtype=torch.int64)
    return torch.where(mask, table[torch.where(mask, rows, 0), torch.where(mask, columns, 0)].long(), -1)


def floor_div(a: Tensor, b: int) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


def page_of(slots: Tensor, page_size: int) -> Tensor:
    """Page of each slot, -1 for none; int64 until it is stored."""
    page = floor_div(slots, page_size)
    return torch.where((slots >= 0) & (page <= INT32_MAX), page, -1)


def swa_page_of(
    slots: Tensor,
    pages: Tensor,
    token_map: Tensor | None,
    page_map: Tensor | None,
    mask: Tensor,
    page_size: int,
) -> Tensor:
    if page_map is not None:
        return page_of(gather(page_map, pages, mask), 1)
    assert token_map is not None
    return page_of(gather(token_map, slots, mask & (pages >= 0)), page_size)


def swa_slot_of(slots: Tensor, token_map: Tensor | None, page_map: Tensor | None, page_size: int) -> Tensor:
    if page_map is not None:
        page = page_of(gather(page_map, page_of(slots, page_size), slots >= 0), 1)
        return torch.where(page < 0, -1, page * page_size + slots % page_size)
    assert token_map is not None
    return gather(token_map, slots, slots >= 0).clamp(min=-1)


def pages_of_rows(
    pool: Tensor,
    rows: Tensor,
    lengths: Tensor,
    live: Tensor,
    width: int,
    page_size: int,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots and pages of every column, each [B, width], and which columns hold pages: (slots, pages, written, owned).

    `written` are the columns that a kept tail leaves to us, `owned` those of them that belong to a live row.
    """
    columns = iota(width, rows)
    written = columns < pages_of(lengths, page_size)[:, None]
    owned = written & live[:, None]
    positions = columns * page_size if start is None else start[:, None] + columns * page_size
    slots = gather_rows(pool, rows[:, None], positions.expand(rows.shape[0], width), owned)
    return slots, torch.where(owned, page_of(slots, page_size), 0), written, owned


def first_column(lengths: Tensor, queries: Tensor, window: int | None, page_size: int) -> Tensor:
    """First column that each row's first query may see."""
    if window is None:
        return torch.zeros_like(lengths)
    return floor_div((lengths - queries - window + 1).clamp(min=0), page_size)


def in_window(lengths: Tensor, queries: Tensor, window: int | None, width: int, page_size: int) -> Tensor:
    """Columns [B, width] that the row's first query may see."""
    columns = iota(width, lengths).expand(lengths.shape[0], width)
    if window is None:
        return columns >= 0
    return columns >= first_column(lengths, queries, window, page_size)[:, None]


def flag(where: Tensor, bit: Status) -> Tensor:
    return torch.where(where, int(bit), 0)


def report(status: Tensor | None, *bits: Tensor) -> None:
    """OR every bit into `status`; each is an int tensor of any shape."""
    if status is None and not DEBUG:
        return
    found = torch.zeros((), dtype=torch.int64, device=bits[0].device)
    for each in bits:
        for bit in Status:
            found = found | torch.where(((each & int(bit)) != 0).any(), int(bit), 0)
    if status is not None:
        status.copy_(status | found.to(status.dtype))
    if DEBUG:
        torch._assert_async(found == 0, "compiled_kv: a status bit was set (COMPILED_KV_DEBUG=1)")
