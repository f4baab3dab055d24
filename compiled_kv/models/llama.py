"""Llama: full attention with shared key heads.

Against transformers' LlamaAttention two lines change: `past_key_values.update` becomes `write` and `read`, and the mask
comes from the step's positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from compiled_kv.models.pools import PagedPool, attention
from compiled_kv.models.step import SMALL, Architecture, PagedCausalLM, View


class PagedLlama(PagedCausalLM):
    """LlamaForCausalLM over a paged cache."""

    def project(self, attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, heads, Q, D], before the rotation."""
        shape = (*hidden.shape[:-1], -1, attn.head_dim)
        query, key, value = (
            proj(hidden).view(shape).transpose(1, 2) for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        return query, key, value

    def attend(self, attn: Any, hidden: Tensor, view: View, pools: Sequence[PagedPool]) -> Tensor:
        query, key, value = self.project(attn, hidden)
        query, key = apply_rotary_pos_emb(query, key, *view.rope)
        for pool, fresh in zip(pools, (key, value), strict=True):
            pool.write(view.slots, fresh.transpose(1, 2))
        keys, values = (pool.read(view.page_table) for pool in pools)
        return attn.o_proj(attention(query, keys, values, view.mask, attn.scaling))


ARCHITECTURE = Architecture(PagedLlama, LlamaForCausalLM, LlamaConfig(num_hidden_layers=2, **SMALL))
