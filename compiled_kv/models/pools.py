"""Pools of cached keys and values, and attention over the pages of one step.

A pool is [num_slots, heads, dim]. Everything has a static shape and touches nothing outside the step's own pages:

    slots=[[9], [-1]], values=[[k0], [k1]]   -> pool[9] = k0; k1 is padding and is dropped: the null slot receives zeros
    page_table=[[2, 5], [0, 0]], page_size=4 -> read: slots 8..11, 20..23 of row 0; the null page twice for row 1
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PagedPool(nn.Module):
    """One cached tensor of one layer, a buffer `data` [num_pages * page_size, heads, dim]; page 0 is the null page."""

    data: Tensor

    def __init__(self, num_pages: int, page_size: int, heads: int, dim: int, like: Tensor) -> None:
        super().__init__()
        self.page_size = page_size
        data = torch.zeros(num_pages * page_size, heads, dim, dtype=like.dtype, device=like.device)
        self.register_buffer("data", data, persistent=False)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store `values` [B, Q, heads, dim] at `slots` [B, Q]; slot -1 stores nothing, so the null page stays zero."""
        real = (slots > 0)[..., None, None]
        self.data[slots.clamp(min=0)] = torch.where(real, values, 0.0)

    def read(self, page_table: Tensor) -> Tensor:
        """The tokens of `page_table` [B, P] as [B, heads, P * page_size, dim]; page -1 reads the null page."""
        pages = self.data.unflatten(0, (-1, self.page_size))[page_table.clamp(min=0)]
        return pages.flatten(1, 2).transpose(1, 2)


def visible_keys(positions: Tensor, num_keys: int, window: int | None = None) -> Tensor:
    """Which keys each query sees: bool [B, 1, Q, K] from query `positions` [B, Q].

    A query before position 0 belongs to padding; it sees key 0 alone, since a row of nothing would turn into NaN.
    """
    query = positions.clamp(min=0)[:, None, :, None]
    key = torch.arange(num_keys, device=positions.device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """PyTorch's own attention; fewer key heads than query heads are shared. [B, H, Q, D] -> [B, Q, H * D_value]."""
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)
