"""Slots of a step's tokens in every KV group, over context-parallel ranks; one launch.

    block_tables = [[[7, 8]], [[3, 4]]], block_sizes = [4, 2]            two groups [G, R, W]
    req_pool_indices = [0], cu_seqlens_q = [0, 3], positions = [2, 3, 4], num_tokens = 4
    group_slot_mappings(...) -> [[30, 31, 32, -1],                       7 * 4 + 2, 7 * 4 + 3, 8 * 4 + 0, none
                                 [ 8,  9, -1, -1]]                       4 * 2 + 0, 4 * 2 + 1, beyond the row

With `cp_size` ranks a block of the table covers `block_size * cp_size` positions, dealt out `cp_interleave` at a time:

    cp_size = 2, cp_interleave = 1, block_size = 4, block 7: position 5 lies on rank 1, at place 5 // 2 of the block
    rank 1 -> slot 30        rank 0 -> -1

vLLM publishes this mapping, its padding to the buffer's end, and the interleave.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import layout
from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT64, INTS, Sizes, check_int, check_least
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, stride_of, tl
from compiled_kv.layout import ceil_div
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import INT32_MAX, load_at, page_of, row_of_token
from compiled_kv.sharing import TOKENS

INPUTS = ("block_tables", "block_sizes", "req_pool_indices", "cu_seqlens_q", "positions", "sharded")
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


@kernel
def _group_slot_mappings_kernel(
    pool_ptr, block_sizes_ptr, req_pool_indices_ptr, cu_seqlens_q_ptr, positions_ptr, sharded_ptr, slot_mapping_ptr,
    pool_rows, pool_width, pool_group_stride, pool_row_stride, pool_stride, block_size_stride, index_stride, cu_stride,
    position_stride, sharded_stride, slot_group_stride, batch_size, num_positions, num_tokens,
    cp_size, cp_rank, cp_interleave, PDL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    row = row_of_token(token, cu_seqlens_q_ptr, cu_stride, batch_size)
    owned = (row < batch_size) & (token < num_positions)
    pool_row = load_at(req_pool_indices_ptr, row, index_stride, owned, -1)
    position = load_at(positions_ptr, token, position_stride, owned, -1)
    block_size = tl.minimum(load_at(block_sizes_ptr, group, block_size_stride, True, 0), INT32_MAX)
    owned = owned & (position >= 0) & (pool_row >= 0) & (pool_row < pool_rows) & (block_size > 0)
    block_size = tl.maximum(block_size, 1)
    ranks = tl.zeros([], tl.int64) + 1
    rank = tl.zeros([], tl.int64)
    if sharded_ptr is not None:
        is_sharded = load_at(sharded_ptr, group, sharded_stride, True, 0) != 0
        ranks = tl.where(is_sharded, tl.zeros([], tl.int64) + cp_size, ranks)
        rank = tl.where(is_sharded, tl.zeros([], tl.int64) + cp_rank, rank)
    position = tl.maximum(position, 0)
    column = position // (block_size * ranks)
    place = position % (block_size * ranks)
    turn = place // cp_interleave
    inside = owned & (turn % ranks == rank) & (column < pool_width)
    pool_row_ptr = pool_ptr + group.to(tl.int64) * pool_group_stride + pool_row * pool_row_stride
    block = page_of(load_at(pool_row_ptr, column, pool_stride, inside, -1), 1).to(tl.int64)
    slot = block * block_size + turn // ranks * cp_interleave + place % cp_interleave
    out_ptr = slot_mapping_ptr + group.to(tl.int64) * slot_group_stride
    tl.store(out_ptr + token, tl.where(block < 0, -1, slot), mask=token < num_tokens)


def _launch(out: Tensor, given: Given, cp_size: int, cp_rank: int, cp_interleave: int) -> None:
    block_tables, block_sizes, indices, cu_seqlens_q, positions, sharded = given
    launch(
        _group_slot_mappings_kernel, (ceil_div(out.shape[1], TOKENS), out.shape[0]),
        pool_ptr=block_tables, block_sizes_ptr=block_sizes, req_pool_indices_ptr=indices,
        cu_seqlens_q_ptr=cu_seqlens_q, positions_ptr=positions, sharded_ptr=sharded, slot_mapping_ptr=out,
        pool_rows=block_tables.shape[1], pool_width=block_tables.shape[2], pool_group_stride=block_tables.stride(0),
        pool_row_stride=block_tables.stride(1), pool_stride=block_tables.stride(2),
        block_size_stride=block_sizes.stride(0), index_stride=indices.stride(0), cu_stride=cu_seqlens_q.stride(0),
        position_stride=positions.stride(0), sharded_stride=stride_of(sharded),
        slot_group_stride=out.stride(0), batch_size=indices.shape[0], num_positions=positions.shape[0],
        num_tokens=out.shape[1], cp_size=cp_size, cp_rank=cp_rank, cp_interleave=cp_interleave,
        TOKENS=TOKENS,
    )  # fmt: skip


def _cpu_body(given: Given, tokens: int, cp_size: int, cp_rank: int, cp_interleave: int) -> Tensor:
    block_tables, block_sizes, indices, cu_seqlens_q, positions, sharded = given
    groups, pool_rows, width = block_tables.shape
    token = cpu.iota(tokens, indices)
    row = cpu.row_of_token(cu_seqlens_q, token)
    pool_row = cpu.gather(indices, row, row < indices.shape[0])
    position = cpu.gather(positions, token, pool_row >= 0)
    sizes = block_sizes.long().clamp(max=layout.INT32_MAX)[:, None]
    owned = (position >= 0) & (pool_row >= 0) & (pool_row < pool_rows) & (sizes > 0)
    sizes, position = sizes.clamp(min=1), position.clamp(min=0)
    is_sharded = torch.zeros_like(sizes) if sharded is None else sharded[:, None]
    ranks, rank = torch.where(is_sharded != 0, cp_size, 1), torch.where(is_sharded != 0, cp_rank, 0)
    column, place = position // (sizes * ranks), position % (sizes * ranks)
    turn = cpu.floor_div(place, cp_interleave)
    line = cpu.iota(groups, indices)[:, None] * pool_rows + pool_row
    flat = block_tables.reshape(groups * pool_rows, width)
    block = cpu.page_of(cpu.gather_rows(flat, line, column, owned & (turn % ranks == rank)), 1)
    return torch.where(block < 0, -1, block * sizes + turn // ranks * cp_interleave + place % cp_interleave)


@operator("compiled_kv::group_slot_mappings", mutates_args=())
def _group_slot_mappings(
    block_tables: Tensor, block_sizes: Tensor, req_pool_indices: Tensor, cu_seqlens_q: Tensor, positions: Tensor,
    sharded: Tensor | None, tokens: int, cp_size: int, cp_rank: int, cp_interleave: int,
) -> Tensor:  # fmt: skip
    given = (block_tables, block_sizes, req_pool_indices, cu_seqlens_q, positions, sharded)
    if not runs_kernel(block_tables):
        return _cpu_body(given, tokens, cp_size, cp_rank, cp_interleave)
    out = block_tables.new_empty((block_tables.shape[0], tokens), dtype=torch.int64)
    _launch(out, given, cp_size, cp_rank, cp_interleave)
    return out


@operator("compiled_kv::group_slot_mappings_out", mutates_args=("out",))
def _group_slot_mappings_out(
    block_tables: Tensor, block_sizes: Tensor, req_pool_indices: Tensor, cu_seqlens_q: Tensor, positions: Tensor,
    sharded: Tensor | None, out: Tensor, cp_size: int, cp_rank: int, cp_interleave: int,
) -> None:  # fmt: skip
    given = (block_tables, block_sizes, req_pool_indices, cu_seqlens_q, positions, sharded)
    check_distinct_fake({"out": out}, dict(zip(INPUTS, given)))
    if runs_kernel(block_tables):
        _launch(out, given, cp_size, cp_rank, cp_interleave)
    else:
        out.copy_(_cpu_body(given, out.shape[1], cp_size, cp_rank, cp_interleave))


def group_slot_mappings(
    block_tables: Tensor, block_sizes: Tensor, req_pool_indices: Tensor, cu_seqlens_q: Tensor, positions: Tensor, *,
    sharded: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0, cp_interleave: int = 1,
    num_tokens: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Where each token's K/V is written, in every KV group.

    Args:
        block_tables: int [G, R, W], blocks of each request row in each group; a negative one gives -1.
        block_sizes: int [G], tokens a block; in a group of 0 or less no token has a slot, and its table is not read.
        req_pool_indices: int [B], the request row of each batch entry; the tokens of one outside [0, R) give -1.
        cu_seqlens_q: int [B + 1], non-decreasing from 0: tokens at and beyond its last entry give -1.
        positions: int [T], position of each token in its request; one below 0, or beyond the row, gives -1.
        sharded: int [G], not 0 where the group's tokens are dealt out over the ranks; None: in no group.
        cp_size, cp_rank, cp_interleave: ranks, this rank, and tokens dealt at a time; another rank's token gives -1.
        num_tokens: columns N of the result, at least T; T if absent.
        out: int64 [G, N], N >= T, written in place and returned; in place of num_tokens.

    Returns:
        int64 [G, N].

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range, strides or overlap is wrong; the text
            names it.
    """
    sizes = Sizes()
    sizes.check("block_tables", block_tables, INTS, "G", "R", "W")
    sizes.check("block_sizes", block_sizes, INTS, "G")
    sizes.check("req_pool_indices", req_pool_indices, INTS, "B")
    sizes.check("cu_seqlens_q", cu_seqlens_q, INTS, "B+1")
    sizes.check("positions", positions, INTS, "T")
    if sharded is not None:
        sizes.check("sharded", sharded, INTS, "G")
    check_int("cp_size", cp_size, 1, layout.INT32_MAX)
    check_int("cp_rank", cp_rank, 0, cp_size - 1)
    check_int("cp_interleave", cp_interleave, 1, layout.INT32_MAX)
    given = (block_tables, block_sizes, req_pool_indices, cu_seqlens_q, positions, sharded)
    tokens = positions.shape[0] if num_tokens is None else num_tokens
    if out is None:
        check_int("num_tokens", tokens, positions.shape[0])
        return torch.ops.compiled_kv.group_slot_mappings(*given, tokens, cp_size, cp_rank, cp_interleave)
    sizes.check_output("out", out, INT64, "G", "N")
    if num_tokens is not None:
        raise ValueError(f"num_tokens goes with a new result: out has its own {out.shape[1]}, got {num_tokens}")
    check_least("out", out.shape[1], positions.shape[0], "columns", of="positions")
    check_distinct({"out": out}, dict(zip(INPUTS, given)))
    torch.ops.compiled_kv.group_slot_mappings_out(*given, out, cp_size, cp_rank, cp_interleave)
    return out
