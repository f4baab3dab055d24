"""What a paged step keeps between calls, and what it derives from its inputs once a call.

    state = PagedState(layout, ["full_attention"] * 2, [[(2, 16)] * 2] * 2, like, max_reqs=8, num_pages=64)
    batch = state.batch(1, req_pool_indices, seq_lens, num_reqs)
    batch.places["full_attention"].slots       [B, Q] where this step's tokens go
    batch.places["full_attention"].page_table  [B, P] where the keys lie

Layers of one attention type share a place; sliding layers have pools of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import compiled_kv as ckv
from compiled_kv.models.pools import PagedPool

FULL, SLIDING = "full_attention", "sliding_attention"


class Place(NamedTuple):
    """Where layers of one attention type write and read in one step."""

    slots: Tensor  # int64 [B, Q], -1 for none
    page_table: Tensor  # int32 [B, P]


class Batch(NamedTuple):
    """What a step knows about its rows."""

    counts: Tensor  # int32 [B], queries of each row
    positions: Tensor  # int64 [B, Q]; below 0 where a row has fewer tokens than queries
    places: dict[str, Place]  # by attention type


class PagedState(nn.Module):
    """Pools and tables of a paged cache.

    Args:
        layout: page size, longest context, draft tokens; `window` where layers slide.
        layer_types: the attention type of each layer that caches.
        cached: for each of them, (heads, dim) of each tensor that one token caches.
        like: a tensor of the pools' dtype and device.
        max_reqs: rows of `req_to_token`.
        num_pages: pages of the full-attention pools, the null page included.
        num_swa_pages: pages of the sliding-window pools, the null page included; 0 where no layer slides.

    Buffers: `req_to_token` int64 [max_reqs, max_seqlen_k], `full_to_swa` int64 [num_pages * page_size], and `status`
    int32 [1], which collects what metadata had to clamp.
    """

    req_to_token: Tensor
    full_to_swa: Tensor
    status: Tensor
    pools: Any  # nn.ModuleList of a list of PagedPool a layer

    def __init__(
        self, layout: ckv.KVLayout, layer_types: Sequence[str], cached: Sequence[Sequence[tuple[int, int]]],
        like: Tensor, *, max_reqs: int, num_pages: int, num_swa_pages: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layout, self.layer_types = layout, list(layer_types)
        pages = {FULL: num_pages, SLIDING: num_swa_pages}
        self.pools = nn.ModuleList(
            nn.ModuleList(PagedPool(pages[kind], layout.page_size, heads, dim, like) for heads, dim in tensors)
            for kind, tensors in zip(self.layer_types, cached, strict=True)
        )
        for name, shape, dtype in (
            ("req_to_token", (max_reqs, layout.max_seqlen_k), torch.int64),
            ("full_to_swa", (num_pages * layout.page_size,), torch.int64),
            ("status", (1,), torch.int32),
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=like.device), persistent=False)

    def batch(self, q_max: int, req_pool_indices: Tensor, seq_lens: Tensor, num_reqs: Tensor | None = None,
              q_lens: Tensor | None = None, seq_len_delta: int = 0) -> Batch:  # fmt: skip
        """What one step of up to `q_max` queries a row knows about its rows: one metadata call, no value read."""
        num_tokens = None if q_lens is None else seq_lens.shape[0] * q_max
        meta = ckv.decode_metadata(
            self.req_to_token, req_pool_indices, seq_lens, layout=self.layout, seq_len_delta=seq_len_delta,
            q_len=q_max if q_lens is None else q_lens, num_tokens=num_tokens,
            full_to_swa=self.full_to_swa if SLIDING in self.layer_types else None, num_reqs=num_reqs,
            status=self.status,
        )  # fmt: skip
        return self.placed(meta, q_max)

    def placed(self, meta: ckv.DecodeMetadata, q_max: int) -> Batch:
        """The same from metadata that is there already."""
        counts = meta.cu_seqlens_q.diff()
        query = torch.arange(q_max, device=counts.device)
        positions = (meta.cache_seqlens - counts)[:, None] + query
        tables = {FULL: (meta.slot_mapping, meta.page_table), SLIDING: (meta.swa_slot_mapping, meta.swa_page_table)}
        places = {}
        for kind in sorted(set(self.layer_types)):
            slots, page_table = tables[kind]
            assert slots is not None and page_table is not None
            places[kind] = Place(by_row(slots, meta.cu_seqlens_q, q_max), page_table)
        return Batch(counts, positions, places)


def of_last_token(states: Tensor, counts: Tensor) -> Tensor:
    """`states` [B, Q, D] of the last of each row's `counts` tokens, [B, 1, D]."""
    last = (counts - 1).clamp(min=0).long()[:, None, None]
    return states.gather(1, last.expand(-1, 1, states.shape[-1]))


def by_row(slots: Tensor, cu_seqlens_q: Tensor, q_max: int) -> Tensor:
    """`slots` [T], packed in the order of `cu_seqlens_q`, as [B, Q]: -1 beyond each row's own tokens."""
    query = torch.arange(q_max, device=slots.device)
    start, end = cu_seqlens_q[:-1, None], cu_seqlens_q[1:, None]
    token = (start + query).clamp(max=slots.shape[0] - 1)
    return torch.where(start + query < end, slots[token], -1)
