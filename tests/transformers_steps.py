"""Decode steps of transformers' own models, on the meta device: small configurations, and Llama 3 70B's real one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LLAMA_70B = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, dtype=torch.bfloat16,
)  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=32)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16)),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**{**SMALL, **LATENT}, dtype=torch.bfloat16)),
    "llama_70b": (LlamaForCausalLM, LLAMA_70B),
}
BATCH = 2


def step(model: Any, input_ids: Any, position_ids: Any, cache: Any) -> Any:
    return model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True).logits


def example(name: str, kind: str, layers: int | None = None) -> tuple[Any, ...]:
    """Arguments for `step`: nothing is allocated, and the cache has seen one token."""
    cls, config = MODELS[name]
    if layers is not None:
        config = copy.deepcopy(config)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        model = cls(config).eval().to(config.dtype or torch.float32)
        ids, positions = torch.zeros(BATCH, 1, dtype=torch.int64), torch.zeros(BATCH, 1, dtype=torch.int64)
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=128)
        with torch.no_grad():
            step(model, ids, positions, cache)
    return model, ids, positions, cache
