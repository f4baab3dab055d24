"""What a layer of Llama does between its matrix products, fused as serving engines fuse it: five small kernels.

normalizing   residual += what came, and its RMS norm
placing       rotate queries and keys, write keys and values by slot
attending     attention over the page table, split over the keys; lengths are read on the device
combining     the splits together
gating        silu(gate) * up
"""

from __future__ import annotations

import torch
from torch import Tensor

import compiled_kv as ckv
from compiled_kv.launch import triton
from compiled_kv.layout import ceil_div

if triton is None:
    raise ImportError("the decode steps need Triton")
import triton.language as tl

MOST_SPLITS = 16  # of the keys of a request
PROGRAMS = 2048  # fill the device
TILE = 64
EPSILON = tl.constexpr(1e-5)


@triton.jit(do_not_specialize=("size",))
def normalizing(x_ptr, residual_ptr, weight_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    there, first = at < size, tl.program_id(0).to(tl.int64) * size
    value = tl.load(residual_ptr + first + at, mask=there, other=0.0).to(tl.float32)
    if x_ptr is not None:
        value += tl.load(x_ptr + first + at, mask=there, other=0.0).to(tl.float32)
        tl.store(residual_ptr + first + at, value, mask=there)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + EPSILON)
    weight = tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + at, value * scale * weight, mask=there)


@triton.jit(do_not_specialize=("queries",))
def placing(
    qkv_ptr, lens_ptr, slots_ptr, frequency_ptr, q_ptr, k_ptr, v_ptr, queries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    at = tl.arange(0, half)
    source_ptr = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head).to(tl.int64) * DIM
    one, other = tl.load(source_ptr + at), tl.load(source_ptr + half + at)
    slot = tl.load(slots_ptr + token)
    target_ptr = q_ptr + (token * HEADS + head).to(tl.int64) * DIM
    there = slot >= 0
    if head < HEADS:
        there = slot == slot
    elif head < HEADS + KV_HEADS:
        target_ptr = k_ptr + (slot * KV_HEADS + head - HEADS) * DIM
    else:
        target_ptr = v_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
    if head < HEADS + KV_HEADS:
        position = tl.load(lens_ptr + token // queries) - queries + token % queries
        angle = position.to(tl.float32) * tl.load(frequency_ptr + at)
        cos, sin = tl.cos(angle), tl.sin(angle)
        x, y = one.to(tl.float32), other.to(tl.float32)
        one, other = (x * cos - y * sin).to(one.dtype), (y * cos + x * sin).to(one.dtype)
    tl.store(target_ptr + at, one, mask=there)
    tl.store(target_ptr + half + at, other, mask=there)


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


@triton.jit(do_not_specialize=("size",))
def gating(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + token * 2 * size + at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * size + size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + at, gate / (1 + tl.exp(-gate)) * up, mask=at < size)


def norm(x: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of [B, Q, hidden] `residual`, to which `x` is added in place first."""
    out, size = torch.empty_like(residual), residual.shape[-1]
    block = triton.next_power_of_2(size)
    normalizing[(residual.numel() // size,)](
        x, residual, weight, out, size, BLOCK=block, num_warps=max(1, min(block // 256, 16))
    )  # fmt: skip
    return out


def place(
    qkv: Tensor, k_pool: Tensor, v_pool: Tensor, meta: ckv.DecodeMetadata, frequencies: Tensor, heads: int
) -> Tensor:
    """Rotated queries [B, Q, H, D] of [B, Q, (H + 2 KVH) * D]; keys and values go to the slots of the step."""
    batch, queries = qkv.shape[:2]
    kv_heads, dim = k_pool.shape[1:]
    q = qkv.new_empty(batch, queries, heads, dim)
    placing[(batch * queries, heads + 2 * kv_heads)](
        qkv, meta.cache_seqlens, meta.slot_mapping, frequencies, q, k_pool, v_pool, queries, HEADS=heads,
        KV_HEADS=kv_heads, DIM=dim, num_warps=1,
    )  # fmt: skip
    return q


def attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, meta: ckv.DecodeMetadata, page_size: int) -> Tensor:
    """[B, Q, H, D] over pools [slots, KVH, D]; query j of row i sits at cache_seqlens[i] - Q + j."""
    batch, queries, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    splits = min(max(triton.next_power_of_2(PROGRAMS // (batch * kv_heads)), 1), MOST_SPLITS)
    parts = q.new_empty((batch * queries * heads, splits, dim), dtype=torch.float32)
    most, total = (parts.new_empty(parts.shape[:2]) for _ in range(2))
    attending[(batch, kv_heads, splits)](
        q, k_pool, v_pool, meta.page_table, meta.cache_seqlens, parts, most, total, queries, k_pool.stride(0),
        meta.page_table.stride(0), dim**-0.5, GROUP=group, ROWS=max(16, triton.next_power_of_2(queries * group)),
        DIM=dim, PAGE_SIZE=page_size, SPLITS=splits, TILE=TILE if dim <= TILE else TILE // 2,
    )  # fmt: skip
    out = torch.empty_like(q)
    combining[(batch * queries * heads,)](parts, most, total, out, DIM=dim, SPLITS=splits)
    return out


def gated(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second: [B, Q, 2 I] to [B, Q, I]."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    gating[(out.numel() // size, ceil_div(size, 1024))](gate_up, out, size, BLOCK=1024)
    return out
