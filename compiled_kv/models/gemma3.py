"""Gemma 3: sliding-window layers beside full ones, each kind with its own pool, rotation and mask.

The step hands every layer the view of its kind; what is left to say here is where Gemma puts its norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from compiled_kv.models.pools import PagedPool
from compiled_kv.models.qwen3 import PagedQwen3
from compiled_kv.models.state import FULL, SLIDING
from compiled_kv.models.step import SMALL, Architecture, View


class PagedGemma3(PagedQwen3):
    """Gemma3ForCausalLM (text) over a full and a sliding paged cache."""

    def layer(self, layer: Any, hidden: Tensor, view: View, pools: Sequence[PagedPool]) -> Tensor:
        attended = self.attend(layer.self_attn, layer.input_layernorm(hidden), view, pools)
        hidden = hidden + layer.post_attention_layernorm(attended)
        forwarded = layer.mlp(layer.pre_feedforward_layernorm(hidden))
        return hidden + layer.post_feedforward_layernorm(forwarded)

    def rope(self, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        return self.model.model.rotary_emb(hidden, positions, kind)

    def head(self, hidden: Tensor) -> Tensor:
        cap = self.model.config.final_logit_softcapping
        logits = super().head(hidden)
        return logits if cap is None else (logits / cap).tanh() * cap


ARCHITECTURE = Architecture(
    PagedGemma3,
    Gemma3ForCausalLM,
    Gemma3TextConfig(
        num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL], sliding_window=24, head_dim=16,
        query_pre_attn_scalar=16, **SMALL,
    ),
)  # fmt: skip
