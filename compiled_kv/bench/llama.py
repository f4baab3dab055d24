"""A Llama stack with random weights over a paged cache, lean enough that its decode step is bound by its weights.

A layer is four matrix products and the fused kernels of `llama_kernels` between them, as serving engines launch them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.bench.llama_kernels import attention, gated, norm, place


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int = 128256
    head_dim: int = 64


CONFIGS = {
    "1B": Config(16, 2048, 8192, 32, 8),
    "8B": Config(32, 4096, 14336, 32, 8, head_dim=128),
    "draft": Config(2, 1024, 4096, 16, 4),
    "tiny": Config(2, 64, 128, 4, 2, vocab=256, head_dim=32),
    "tiny-draft": Config(1, 32, 64, 2, 1, vocab=256, head_dim=32),
}


class Weights:
    """Random weights of a stack; of a layer the norms, qkv, the output, gate and up together, and down."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device=device).manual_seed(config.layers)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype, generator=generator).mul_(shape[-1] ** -0.5)

        c, kv = config, config.kv_heads * config.head_dim
        self.config = config
        self.layers = [
            (random(c.heads * c.head_dim + 2 * kv, c.hidden), random(c.hidden, c.heads * c.head_dim),
             random(2 * c.inner, c.hidden), random(c.hidden, c.inner)) for _ in range(c.layers)
        ]  # fmt: skip
        self.embedding, self.head = random(c.vocab, c.hidden), random(c.vocab, c.hidden)
        self.norm = torch.ones(c.hidden, device=device, dtype=dtype)
        self.frequencies = 500000.0 ** -(torch.arange(0, c.head_dim, 2, device=device) / c.head_dim)


class Llama:
    """Weights over pools of their own; `step` computes [B, Q] tokens and returns the likeliest next ones, [B, Q]."""

    def __init__(self, weights: Weights, slots: int, page_size: int) -> None:
        self.weights, self.page_size = weights, page_size
        shape = slots, weights.config.kv_heads, weights.config.head_dim
        # Not zeros: a step over those takes 6 % less time.
        self.pools = [tuple(weights.norm.new_empty(shape).normal_() for _ in range(2)) for _ in weights.layers]

    def step(self, tokens: Tensor, meta: ckv.DecodeMetadata) -> Tensor:
        w = self.weights
        hidden, update = F.embedding(tokens, w.embedding), None
        for (qkv, out, gate_up, down), (k_pool, v_pool) in zip(w.layers, self.pools):
            projected = F.linear(norm(update, hidden, w.norm), qkv)
            q = place(projected, k_pool, v_pool, meta, w.frequencies, w.config.heads)
            attended = attention(q, k_pool, v_pool, meta, self.page_size).flatten(2)
            update = F.linear(attended, out)
            update = F.linear(gated(F.linear(norm(update, hidden, w.norm), gate_up)), down)
        return F.linear(norm(update, hidden, w.norm), w.head).argmax(-1)
