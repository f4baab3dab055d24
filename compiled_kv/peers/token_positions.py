"""New tokens of a ragged step -> the request and the position of each, and the requests' lengths; in place, one launch.

    cu_seqlens_q = [0, 2, 2, 5], held = [5, 4, 0]                     tokens of each request that are in the cache
    place_tokens_(...) -> positions     [5, 6, 0, 1, 2, kept]
                          batch_indices [0, 0, 2, 2, 2, -1]           from cu_seqlens_q[-1] on a token is no request's
                          seq_lens      [7, 4, 3, 0]                  with the new tokens; behind the batch 0

With `counted` the new tokens are among those held: held = [7, 4, 3] gives the same. vLLM publishes the positions and
lengths of a step, FlashInfer the requests and positions of what it appends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import layout
from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT32, INTS, Sizes, check_bool, check_int, check_least
from compiled_kv.launch import dependent_launch, device_function, kernel, launch, runs_kernel, stride_of, tl
from compiled_kv.layout import ceil_div
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import INT32_MAX, load_at, row_of_token
from compiled_kv.sharing import TOKENS

Placed = tuple[Tensor, Tensor | None, Tensor | None]
OUTPUTS = ("positions", "batch_indices", "seq_lens")


@device_function
def tokens_held(
    row, mask, seq_lens_ptr, seq_stride, req_pool_indices_ptr, index_stride, pool_rows,
):  # fmt: skip
    """Tokens that each request's pool row holds, and whether it has one."""
    pool_row = row
    if req_pool_indices_ptr is not None:
        pool_row = load_at(req_pool_indices_ptr, row, index_stride, mask, -1)
    live = mask & (pool_row >= 0) & (pool_row < pool_rows)
    held = load_at(seq_lens_ptr, pool_row, seq_stride, live, 0)
    return tl.minimum(tl.maximum(held, 0), INT32_MAX), live


@kernel
def _place_tokens_kernel(
    seq_lens_ptr, cu_seqlens_q_ptr, req_pool_indices_ptr, next_positions_ptr, batch_indices_ptr, next_seq_lens_ptr,
    pool_rows, seq_stride, cu_stride, index_stride, batch_size, num_tokens, num_rows,
    COUNTED: tl.constexpr, PDL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = row_of_token(token, cu_seqlens_q_ptr, cu_stride, batch_size)
    owned = (token < num_tokens) & (row < batch_size)
    held, live = tokens_held(row, owned, seq_lens_ptr, seq_stride, req_pool_indices_ptr, index_stride, pool_rows)
    if COUNTED:
        position = held + token - load_at(cu_seqlens_q_ptr, row + 1, cu_stride, live, 0)
    else:
        position = held + token - load_at(cu_seqlens_q_ptr, row, cu_stride, live, 0)
    tl.store(next_positions_ptr + token, tl.minimum(position, INT32_MAX), mask=live)
    if batch_indices_ptr is not None:
        tl.store(batch_indices_ptr + token, tl.where(owned, row, -1).to(tl.int32), mask=token < num_tokens)
    if next_seq_lens_ptr is not None:
        row = token  # a program takes as many requests as tokens
        owned = row < batch_size
        held, live = tokens_held(row, owned, seq_lens_ptr, seq_stride, req_pool_indices_ptr, index_stride, pool_rows)
        if not COUNTED:
            begin = load_at(cu_seqlens_q_ptr, row, cu_stride, live, 0)
            held += tl.maximum(load_at(cu_seqlens_q_ptr, row + 1, cu_stride, live, 0) - begin, 0)
        tl.store(next_seq_lens_ptr + row, tl.minimum(held, INT32_MAX).to(tl.int32), mask=row < num_rows)


def _held_of(held: Tensor, req_pool_indices: Tensor | None, row: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of each request, int64, and which of them the pool knows."""
    pool_row = row if req_pool_indices is None else cpu.gather(req_pool_indices, row, mask)
    live = mask & (pool_row >= 0) & (pool_row < held.shape[0])
    return cpu.gather(held, pool_row, live).clamp(0, layout.INT32_MAX), live


@operator("compiled_kv::place_tokens_in_place", mutates_args=OUTPUTS)
def _place_tokens_in_place(
    held: Tensor, cu_seqlens_q: Tensor, req_pool_indices: Tensor | None, positions: Tensor,
    batch_indices: Tensor | None, seq_lens: Tensor | None, counted: bool,
) -> None:  # fmt: skip
    batch_size, tokens = cu_seqlens_q.shape[0] - 1, positions.shape[0]
    outputs = {k: v for k, v in zip(OUTPUTS, (positions, batch_indices, seq_lens)) if v is not None}
    inputs = {"held": held, "cu_seqlens_q": cu_seqlens_q, "req_pool_indices": req_pool_indices}
    check_distinct_fake(outputs, inputs)
    if runs_kernel(positions):
        rows = 0 if seq_lens is None else seq_lens.shape[0]
        launch(
            _place_tokens_kernel, (ceil_div(torch.sym_max(tokens, rows), TOKENS),),
            seq_lens_ptr=held, cu_seqlens_q_ptr=cu_seqlens_q, req_pool_indices_ptr=req_pool_indices,
            next_positions_ptr=positions, batch_indices_ptr=batch_indices, next_seq_lens_ptr=seq_lens,
            pool_rows=held.shape[0], seq_stride=held.stride(0), cu_stride=cu_seqlens_q.stride(0),
            index_stride=stride_of(req_pool_indices), batch_size=batch_size, num_tokens=tokens, num_rows=rows,
            COUNTED=counted, TOKENS=TOKENS,
        )  # fmt: skip
        return
    token = cpu.iota(tokens, positions)
    row = cpu.row_of_token(cu_seqlens_q, token)
    owned = row < batch_size
    length, live = _held_of(held, req_pool_indices, row, owned)
    position = length + token - cpu.gather(cu_seqlens_q, row + 1 if counted else row, live)
    positions.copy_(torch.where(live, position.clamp(max=layout.INT32_MAX), positions))
    if batch_indices is not None:
        batch_indices.copy_(torch.where(owned, row, -1))
    if seq_lens is not None:
        row = cpu.iota(seq_lens.shape[0], seq_lens)
        length, live = _held_of(held, req_pool_indices, row, row < batch_size)
        if not counted:
            fresh = cpu.gather(cu_seqlens_q, row + 1, live) - cpu.gather(cu_seqlens_q, row, live)
            length = (length + fresh.clamp(min=0)).clamp(max=layout.INT32_MAX)
        seq_lens.copy_(torch.where(live, length, 0))


def place_tokens_(
    positions: Tensor, held: Tensor, cu_seqlens_q: Tensor, *, req_pool_indices: Tensor | None = None,
    counted: bool = False, batch_indices: Tensor | None = None, seq_lens: Tensor | None = None,
) -> Placed:  # fmt: skip
    """Position of each new token, its request, and the length of each request; in place.

    Args:
        positions: int32 or int64 [T], those of tokens from cu_seqlens_q[B] on, and of padding, keep their values. At
            most 2^31 - 1.
        held: int [R], tokens of each pool row, clamped to [0, 2^31 - 1]; R is B without req_pool_indices.
        cu_seqlens_q: int [B + 1], non-decreasing from 0: new tokens of each request.
        req_pool_indices: int [B], the pool row of each request; one outside the pool is padding. None: its own.
        counted: whether the new tokens are among those held: they are then its last.
        batch_indices: int32 [T], the batch entry of each token, -1 from cu_seqlens_q[B] on.
        seq_lens: int32 [N], N >= B, tokens of each request with its new ones, at most 2^31 - 1; 0 for padding and from
            B on.

    Returns:
        (positions, batch_indices, seq_lens), as they were given.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, strides or overlap is wrong; the text names it.
    """
    check_bool("counted", counted)
    sizes = Sizes()
    sizes.check_output("positions", positions, INTS, "T")
    sizes.check("cu_seqlens_q", cu_seqlens_q, INTS, "B+1")
    check_int("the length of cu_seqlens_q", cu_seqlens_q.shape[0], 1)
    sizes.named["B"] = cu_seqlens_q.shape[0] - 1
    sizes.check("held", held, INTS, "B" if req_pool_indices is None else "R")
    if req_pool_indices is not None:
        sizes.check("req_pool_indices", req_pool_indices, INTS, "B")
    if batch_indices is not None:
        sizes.check_output("batch_indices", batch_indices, INT32, "T")
    if seq_lens is not None:
        sizes.check_output("seq_lens", seq_lens, INT32, "N")
        check_least("seq_lens", seq_lens.shape[0], sizes.named["B"], "entries")
    out = (positions, batch_indices, seq_lens)
    given = {"held": held, "cu_seqlens_q": cu_seqlens_q, "req_pool_indices": req_pool_indices}
    check_distinct({name: tensor for name, tensor in zip(OUTPUTS, out) if tensor is not None}, given)
    torch.ops.compiled_kv.place_tokens_in_place(held, cu_seqlens_q, req_pool_indices, *out, counted)
    return out
