"""Positions of new tokens -> the slots where their K/V is written.

    block_table = [[7, 0], [2, 9], [0, 0]], page_size = 4
    req_pool_indices = [0, 1, 2], positions = [0, 4, -1]
    slot_mapping(...) -> [28, 36, -1]                7 * 4 + 0,  9 * 4 + 0,  none

The same from a pool of tokens reads `req_to_token[row, position]` itself. -1 stays -1: it is tested before anything
is divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT64, INTS, Sizes, check_int, check_one_of
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, stride_of, tl
from compiled_kv.layout import INT32_MAX, ceil_div
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import active_rows, load_at, page_of, row_of_token
from compiled_kv.sharing import TOKENS

INPUTS = ("pool", "req_pool_indices", "positions", "cu_seqlens_q", "num_reqs")


@kernel
def _slot_mapping_kernel(
    pool_ptr, req_pool_indices_ptr, positions_ptr, cu_seqlens_q_ptr, num_reqs_ptr, slot_mapping_ptr,
    pool_rows, pool_width, pool_row_stride, pool_stride, index_stride, position_stride, cu_stride,
    batch_size, num_tokens, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, PDL: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = token < num_tokens
    row, owned = token, in_range
    if cu_seqlens_q_ptr is not None:
        row = row_of_token(token, cu_seqlens_q_ptr, cu_stride, batch_size)
        owned = in_range & (row < batch_size)
    owned = owned & (row < active_rows(num_reqs_ptr, batch_size))
    pool_row = load_at(req_pool_indices_ptr, row, index_stride, owned, -1)
    position = load_at(positions_ptr, token, position_stride, owned, -1)
    column = position // PAGE_SIZE
    inside = owned & (pool_row >= 0) & (pool_row < pool_rows) & (position >= 0) & (column < pool_width)
    entry = tl.load(pool_ptr + pool_row * pool_row_stride + column * pool_stride, mask=inside, other=-1).to(tl.int64)
    if PAGED:
        entry = page_of(entry, 1).to(tl.int64)
    slot = tl.where(entry < 0, -1, entry * PAGE_SIZE + position % PAGE_SIZE)
    tl.store(slot_mapping_ptr + token, slot, mask=in_range)


def _launch(
    out: Tensor, pool: Tensor, req_pool_indices: Tensor, positions: Tensor, cu_seqlens_q: Tensor | None, num_reqs:
    Tensor | None,
    page_size: int | None,
) -> None:  # fmt: skip
    launch(
        _slot_mapping_kernel, (ceil_div(out.shape[0], TOKENS),),
        pool_ptr=pool, req_pool_indices_ptr=req_pool_indices, positions_ptr=positions, cu_seqlens_q_ptr=cu_seqlens_q,
        num_reqs_ptr=num_reqs, slot_mapping_ptr=out, pool_rows=pool.shape[0], pool_width=pool.shape[1],
        pool_row_stride=pool.stride(0), pool_stride=pool.stride(1), index_stride=req_pool_indices.stride(0),
        position_stride=positions.stride(0), cu_stride=stride_of(cu_seqlens_q),
        batch_size=req_pool_indices.shape[0], num_tokens=out.shape[0],
        PAGED=page_size is not None, PAGE_SIZE=page_size or 1, TOKENS=TOKENS,
    )  # fmt: skip


def _cpu_body(
    pool: Tensor,
    req_pool_indices: Tensor,
    positions: Tensor,
    cu_seqlens_q: Tensor | None,
    num_reqs: Tensor | None,
    page_size: int | None,
) -> Tensor:
    batch_size, tokens = req_pool_indices.shape[0], cpu.iota(positions.shape[0], positions)
    rows = tokens
    if cu_seqlens_q is not None:
        rows = cpu.row_of_token(cu_seqlens_q, tokens)
    owned = (rows < batch_size) & (rows < cpu.active_rows(num_reqs, batch_size))
    positions = positions.long()
    pool_rows = cpu.gather(req_pool_indices, rows, owned)
    if page_size is None:
        return cpu.gather_rows(pool, pool_rows, positions, owned).clamp(min=-1)
    entries = cpu.gather_rows(pool, pool_rows, cpu.floor_div(positions, page_size), owned & (positions >= 0))
    entries = cpu.page_of(entries, 1)
    return torch.where(entries < 0, -1, entries * page_size + positions % page_size)


@operator("compiled_kv::slot_mapping", mutates_args=())
def _slot_mapping(
    pool: Tensor,
    req_pool_indices: Tensor,
    positions: Tensor,
    cu_seqlens_q: Tensor | None,
    num_reqs: Tensor | None,
    page_size: int | None,
) -> Tensor:
    if not runs_kernel(positions):
        return _cpu_body(pool, req_pool_indices, positions, cu_seqlens_q, num_reqs, page_size)
    out = positions.new_empty(positions.shape, dtype=torch.int64)
    _launch(out, pool, req_pool_indices, positions, cu_seqlens_q, num_reqs, page_size)
    return out


@operator("compiled_kv::slot_mapping_out", mutates_args=("out",))
def _slot_mapping_out(
    pool: Tensor, req_pool_indices: Tensor, positions: Tensor, cu_seqlens_q: Tensor | None, num_reqs: Tensor | None,
    out: Tensor,
    page_size: int | None,
) -> None:  # fmt: skip
    inputs = (pool, req_pool_indices, positions, cu_seqlens_q, num_reqs)
    check_distinct_fake({"out": out}, dict(zip(INPUTS, inputs)))
    if runs_kernel(positions):
        _launch(out, *inputs, page_size)
    else:
        out.copy_(_cpu_body(*inputs, page_size))


def slot_mapping(
    req_to_token: Tensor | None, req_pool_indices: Tensor, positions: Tensor, *, block_table: Tensor | None = None,
    page_size: int | None = None, cu_seqlens_q: Tensor | None = None, num_reqs: Tensor | None = None, out: Tensor |
    None = None,
) -> Tensor:  # fmt: skip
    """Slot of each token of a step, from a pool of tokens or a pool of pages.

    Args:
        req_to_token: int [R, C], token slot of each position of each pool row; None where `block_table` is given.
        req_pool_indices: int [B], the pool row of each batch entry; one outside the pool gives -1.
        positions: int [T], position of each token in its request; one below 0, or beyond the row, gives -1.
        block_table: int [R, W], page id of each page of each pool row; a negative one gives -1.
        page_size: tokens a page; goes with `block_table`.
        cu_seqlens_q: int [B + 1], non-decreasing from 0: token t belongs to the row whose interval holds it, and
        tokens past the
            last entry to none. None: token t belongs to row t (T = B).
        num_reqs: int tensor, 0-d or [1], on the device: tokens of rows at and beyond it give -1.
        out: int64 [T], written in place and returned.

    Returns:
        int64 [T]; -1 where a token has no slot.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range or overlap is wrong; the text names it.
    """
    check_one_of(req_to_token=req_to_token, block_table=block_table)
    if (page_size is None) != (block_table is None):
        raise ValueError(f"page_size goes with block_table, got page_size={page_size}")
    name, pool, width = "req_to_token", req_to_token, "C"
    if block_table is not None:
        name, pool, width = "block_table", block_table, "W"
    assert pool is not None
    sizes = Sizes()
    sizes.check(name, pool, INTS, "R", width)
    if page_size is not None:
        check_int("page_size", page_size, 1, INT32_MAX)
    sizes.check("req_pool_indices", req_pool_indices, INTS, "B")
    token = "B" if cu_seqlens_q is None else "T"
    sizes.check("positions", positions, INTS, token)
    if cu_seqlens_q is not None:
        sizes.check("cu_seqlens_q", cu_seqlens_q, INTS, "B+1")
    if num_reqs is not None:
        sizes.check_scalar("num_reqs", num_reqs)
    inputs = (pool, req_pool_indices, positions, cu_seqlens_q, num_reqs)
    if out is None:
        return torch.ops.compiled_kv.slot_mapping(*inputs, page_size)
    sizes.check_output("out", out, INT64, token)
    check_distinct({"out": out}, dict(zip((name, *INPUTS[1:]), inputs)))
    torch.ops.compiled_kv.slot_mapping_out(*inputs, out, page_size)
    return out
