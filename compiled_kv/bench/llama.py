"""A Llama stack with random weights over a paged cache, lean enough that its decode step is bound by its weights.

Between the two compiled halves of a layer, keys and values are written by slot and attention reads the page table:
split over the keys, lengths read on the device, any number of queries a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.launch import INTERPRETED, triton

if triton is None:
    raise ImportError("the decode steps need Triton")
import triton.language as tl

SPLITS = 16
TILE = 64


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


@triton.jit(do_not_specialize=("queries", "pool_stride", "table_stride"))
def attending(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, acc_ptr, max_ptr, sum_ptr, queries, pool_stride, table_stride, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One split of one key head: rows are query j of head g at j * GROUP + g."""
    batch, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    length = tl.load(lens_ptr + batch)
    row, dim, lane = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TILE)
    query = row // GROUP
    there = query < queries
    first = (batch * queries + query) * kv_heads * GROUP + head * GROUP + row % GROUP
    q = tl.load(q_ptr + first[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0)
    last = length - queries + query
    share = ((length + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    end = tl.minimum(length, (split + 1) * share)
    for begin in range(split * share, end, TILE):
        position = begin + lane
        column = batch.to(tl.int64) * table_stride + position // PAGE_SIZE
        page = tl.load(table_ptr + column, mask=position < end, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = slot[:, None] * pool_stride + head * DIM + dim[None, :]
        k = tl.load(k_ptr + at, mask=(position < end)[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where((position[None, :] <= last[:, None]) & (position < end)[None, :], score, -1e30)
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(most - higher)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(v_ptr + at, mask=(position < end)[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        most = higher
    part = first * SPLITS + split
    tl.store(max_ptr + part, most, mask=there)
    tl.store(sum_ptr + part, total, mask=there)
    tl.store(acc_ptr + part[:, None] * DIM + dim[None, :], acc, mask=there[:, None])


@triton.jit
def combining(acc_ptr, max_ptr, sum_ptr, out_ptr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    row, split, dim = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, DIM)
    most = tl.load(max_ptr + row * SPLITS + split)
    weight = tl.exp(most - tl.max(most, 0)) * (most > -1e29).to(tl.float32)
    total = tl.sum(tl.load(sum_ptr + row * SPLITS + split) * weight, 0)
    acc = tl.load(acc_ptr + (row * SPLITS + split)[:, None] * DIM + dim[None, :])
    out = tl.sum(acc * weight[:, None], 0) / total
    tl.store(out_ptr + row * DIM + dim, out.to(out_ptr.dtype.element_ty))


def attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, meta: ckv.DecodeMetadata, page_size: int) -> Tensor:
    """[B, Q, H, D] over pools [slots, KVH, D]; query j of row i sits at cache_seqlens[i] - Q + j."""
    batch, queries, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    parts = q.new_empty((batch * queries * heads, SPLITS, dim), dtype=torch.float32)
    most, total = (parts.new_empty(parts.shape[:2]) for _ in range(2))
    attending[(batch, kv_heads, SPLITS)](
        q, k_pool, v_pool, meta.page_table, meta.cache_seqlens, parts, most, total, queries, k_pool.stride(0),
        meta.page_table.stride(0), dim**-0.5, GROUP=group, ROWS=max(16, triton.next_power_of_2(queries * group)),
        DIM=dim, PAGE_SIZE=page_size, SPLITS=SPLITS, TILE=TILE if dim <= TILE else TILE // 2,
    )  # fmt: skip
    out = torch.empty_like(q)
    combining[(batch * queries * heads,)](parts, most, total, out, DIM=dim, SPLITS=SPLITS)
    return out


def before(hidden: Tensor, norm: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Any:
    """Queries, keys and values of a layer, rotated."""
    normed = F.rms_norm(hidden, norm.shape, norm, 1e-5)
    projected = F.linear(normed, qkv).unflatten(-1, (heads + 2 * kv_heads, -1))
    query, key, value = projected.split([heads, kv_heads, kv_heads], dim=-2)
    return _rotated(query, cos, sin), _rotated(key, cos, sin), value.contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1).to(x.dtype)


def behind(hidden: Tensor, attended: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The rest of a layer."""
    hidden = hidden + F.linear(attended, out)
    gate, up = F.linear(F.rms_norm(hidden, norm.shape, norm, 1e-5), gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, down)


@cache
def _halves() -> tuple[Any, Any]:
    if INTERPRETED:
        return before, behind
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(before, fullgraph=True, dynamic=False), torch.compile(behind, fullgraph=True, dynamic=False)


class Llama:
    """Weights and pools; `step` computes [B, Q] tokens and returns the likeliest next ones, [B, Q]."""

    def __init__(self, config: Config, slots: int, page_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.page_size = config, page_size
        generator = torch.Generator(device=device).manual_seed(config.layers)

        def random(*shape: int) -> Tensor:
            scale = shape[-1] ** -0.5
            return torch.randn(shape, device=device, dtype=dtype, generator=generator).mul_(scale)

        c, kv = config, config.kv_heads * config.head_dim
        ones = torch.ones(c.hidden, device=device, dtype=dtype)
        self.layers = [
            (ones, random(c.heads * c.head_dim + 2 * kv, c.hidden), random(c.hidden, c.heads * c.head_dim), ones,
             random(2 * c.inner, c.hidden), random(c.hidden, c.inner)) for _ in range(c.layers)
        ]  # fmt: skip
        self.embedding, self.head, self.norm = random(c.vocab, c.hidden), random(c.vocab, c.hidden), ones
        self.pools = [
            tuple(torch.zeros(slots, c.kv_heads, c.head_dim, device=device, dtype=dtype) for _ in range(2))
            for _ in range(c.layers)
        ]
        exponent = torch.arange(0, c.head_dim, 2, device=device) / c.head_dim
        self.frequencies = 500000.0**-exponent

    def step(self, tokens: Tensor, meta: ckv.DecodeMetadata) -> Tensor:
        c, queries, (first, second) = self.config, tokens.shape[1], _halves()
        query = torch.arange(queries, device=tokens.device)
        angles = (meta.cache_seqlens[:, None] - queries + query)[..., None] * self.frequencies
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
        hidden = self.embedding[tokens % c.vocab]
        slots = meta.slot_mapping
        assert slots is not None
        for (norm, qkv, out, post, gate_up, down), (k_pool, v_pool) in zip(self.layers, self.pools):
            q, k, v = first(hidden, norm, qkv, cos, sin, c.heads, c.kv_heads)
            k_pool.index_copy_(0, slots, k.flatten(0, 1))
            v_pool.index_copy_(0, slots, v.flatten(0, 1))
            attended = attention(q.contiguous(), k_pool, v_pool, meta, self.page_size).flatten(2)
            hidden = second(hidden, attended, out, post, gate_up, down)
        return F.linear(F.rms_norm(hidden, self.norm.shape, self.norm, 1e-5), self.head).argmax(-1)
