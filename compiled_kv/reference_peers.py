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


def page_of(slot: int, page_size: int) -> int:
    page = slot // page_size
    return page if slot >= 0 and page <= INT32_MAX else -1


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


def write_metadata(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, out: Any, *, layout: KVLayout,
                   seq_len_delta: int = 0, q_len: int | Tensor = 1, slots: Tensor | None = None,
                   full_to_swa: Tensor | None = None, page_map: Tensor | None = None,
                   swa_page_map: Tensor | None = None, tail: str = "keep") -> Any:  # fmt: skip
    """Fill the buffers of `out`."""
    pool, rows, page_size = req_to_token.tolist(), req_pool_indices.tolist(), layout.page_size
    good = [0 <= row < len(pool) for row in rows]
    lengths = [min(max(n, 0) + seq_len_delta, layout.max_seqlen_k) if ok else 0
               for n, ok in zip(seq_lens.tolist(), good, strict=True)]  # fmt: skip
    queries = q_len.tolist() if isinstance(q_len, Tensor) else [q_len] * len(rows)
    store(lengths, out.cache_seqlens)
    store(sums(lengths), out.cu_seqlens_k)
    store(sums([max(n, 0) for n in queries]), out.cu_seqlens_q)
    table, swa_table, token_map = numbers(out.page_table), numbers(out.swa_page_table), numbers(full_to_swa)
    for i, line in enumerate(table):
        live = min(ceil_div(lengths[i], page_size), len(line))
        for column in range(len(line)):
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
