"""Qwen 3: Llama with a norm on each query and key head. The one method below is the whole port."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from compiled_kv.models.llama import PagedLlama
from compiled_kv.models.step import SMALL, Architecture


class PagedQwen3(PagedLlama):
    """Qwen3ForCausalLM over a paged cache."""

    def project(self, attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(attn, hidden)
        return attn.q_norm(query), attn.k_norm(key), value


ARCHITECTURE = Architecture(
    PagedQwen3, Qwen3ForCausalLM, Qwen3Config(num_hidden_layers=2, head_dim=16, **SMALL), page_size=32
)
