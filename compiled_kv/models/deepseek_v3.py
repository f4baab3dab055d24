"""DeepSeek-V3: one latent and one rotated key a token are cached; attention runs in the absorbed form over the latent.

transformers expands the latent c of every cached token with `kv_b_proj` = [W_uk; W_uv]. As (W_uk c) . q = c . (W_uk^T
q), the query is projected instead, once a step, and the values after the sum over tokens: the cache is read as it is,
in pages of 64, all heads sharing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from compiled_kv.models.pools import PagedPool, attention
from compiled_kv.models.step import SMALL, Architecture, PagedCausalLM, View


class PagedDeepseekV3(PagedCausalLM):
    """DeepseekV3ForCausalLM over a paged latent cache."""

    def cached(self, config: Any) -> Sequence[tuple[int, int]]:
        return [(1, config.kv_lora_rank + config.qk_rope_head_dim)]

    def queries(self, attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The unrotated and the rotary part of the queries, [B, H, Q, D] each, before the rotation."""
        query = (
            attn.q_proj(hidden)
            if attn.q_lora_rank is None
            else attn.q_b_proj(attn.q_a_layernorm(attn.q_a_proj(hidden)))
        )
        query = query.unflatten(-1, (-1, attn.qk_head_dim)).transpose(1, 2)
        q_pass, q_rot = query.split([attn.qk_nope_head_dim, attn.qk_rope_head_dim], dim=-1)
        return q_pass, q_rot

    def attend(self, attn: Any, hidden: Tensor, view: View, pools: Sequence[PagedPool]) -> Tensor:
        q_pass, q_rot = self.queries(attn, hidden)
        latent, k_rot = attn.kv_a_proj_with_mqa(hidden).split([attn.kv_lora_rank, attn.qk_rope_head_dim], dim=-1)
        rotate = apply_rotary_pos_emb_interleave if attn.config.rope_interleave else apply_rotary_pos_emb
        q_rot, k_rot = rotate(q_rot, k_rot[:, None], *view.rope)
        pools[0].write(view.slots, torch.cat((attn.kv_a_layernorm(latent)[:, None], k_rot), dim=-1).transpose(1, 2))

        up = attn.kv_b_proj.weight.unflatten(0, (attn.num_heads, -1))  # [H, D_nope + D_value, rank]
        w_uk, w_uv = up.split([attn.qk_nope_head_dim, attn.v_head_dim], dim=1)
        cached = pools[0].read(view.page_table)
        query = torch.cat((q_pass @ w_uk, q_rot), dim=-1)
        summed = attention(query, cached, cached[..., : attn.kv_lora_rank], view.mask, attn.scaling)
        heads = summed.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) @ w_uv.transpose(1, 2)
        return attn.o_proj(heads.transpose(1, 2).flatten(2))


# batched_mm is transformers' own way to run experts with no shape that depends on the routing.
ARCHITECTURE = Architecture(
    PagedDeepseekV3,
    DeepseekV3ForCausalLM,
    DeepseekV3Config(
        num_hidden_layers=2, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=32, num_mtp_layers=0, experts_implementation="batched_mm",
        **SMALL | {"num_key_value_heads": 4},
    ),
    page_size=64,
)  # fmt: skip
