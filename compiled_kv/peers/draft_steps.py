"""One draft step further: the next position of every request, its slot, its length, and no read of the host.

    block_table = [[7, 8], [5, 0]], page_size = 4, max_context_len = 8
    positions = [3, 7], seq_lens = [4, 8]
    advance_draft(...) -> positions [4, 0], slots [32, -1], seq_lens [5, 1]

Row 0 moves on to position 4, the head of block 8. Row 1 is full: it waits at position 0 with one token and no slot, so
that attention stays cheap and nothing is written. vLLM publishes this step for its draft models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv import rows_cpu as cpu
from compiled_kv.checks import INT32, INT64, INTS, Sizes, check_int
from compiled_kv.launch import dependent_launch, kernel, launch, runs_kernel, tl
from compiled_kv.layout import INT32_MAX, ceil_div
from compiled_kv.overlap import check_distinct, check_distinct_fake
from compiled_kv.registration import operator
from compiled_kv.rows_triton import load_at, page_of
from compiled_kv.sharing import TOKENS

Advanced = tuple[Tensor, Tensor, Tensor]
FIELDS = ("positions", "slot_mapping", "seq_lens")


@kernel
def _advance_draft_kernel(
    positions_ptr, pool_ptr, seq_lens_ptr, next_positions_ptr, slot_mapping_ptr, next_seq_lens_ptr,
    pool_width, pool_row_stride, pool_stride, position_stride, seq_stride, batch_size, num_tokens, cap,
    PAGE_SIZE: tl.constexpr, PDL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    if PDL:
        dependent_launch()
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_batch = row < batch_size
    held = load_at(positions_ptr, row, position_stride, in_batch, 0)
    is_full = held >= tl.zeros([], tl.int64) + cap - 1
    position = tl.where(is_full | (held < -1), 0, held + 1)
    column = tl.minimum(position // PAGE_SIZE, tl.zeros([], tl.int64) + pool_width - 1)
    inside = in_batch & (is_full == 0) & (held >= -1) & (column >= 0)
    block = page_of(load_at(pool_ptr + row * pool_row_stride, column, pool_stride, inside, -1), 1).to(tl.int64)
    seq_len = tl.minimum(tl.maximum(load_at(seq_lens_ptr, row, seq_stride, in_batch, 0), 0), cap) + 1
    seq_len = tl.where(is_full, 1, tl.minimum(seq_len, cap)).to(tl.int32)
    if next_positions_ptr is None:
        tl.store(positions_ptr + row * position_stride, position, mask=in_batch)
        tl.store(seq_lens_ptr + row * seq_stride, seq_len, mask=in_batch)
    else:
        tl.store(next_positions_ptr + row, position, mask=in_batch)
        tl.store(next_seq_lens_ptr + row, seq_len, mask=in_batch)
    slot = tl.where(block < 0, -1, block * PAGE_SIZE + position % PAGE_SIZE)
    tl.store(slot_mapping_ptr + row, slot, mask=row < num_tokens)


def _launch(
    positions: Tensor, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor, new: tuple[Tensor, Tensor] | None,
    tokens: int, page_size: int, cap: int,
) -> None:  # fmt: skip
    """`new` None: positions and lengths move on in place."""
    new_positions, new_seq_lens = new or (None, None)
    launch(
        _advance_draft_kernel, (ceil_div(tokens, TOKENS),),
        positions_ptr=positions, pool_ptr=block_table, seq_lens_ptr=seq_lens, next_positions_ptr=new_positions,
        slot_mapping_ptr=slot_mapping, next_seq_lens_ptr=new_seq_lens, pool_width=block_table.shape[1],
        pool_row_stride=block_table.stride(0), pool_stride=block_table.stride(1),
        position_stride=positions.stride(0), seq_stride=seq_lens.stride(0), batch_size=positions.shape[0],
        num_tokens=tokens, cap=cap, PAGE_SIZE=page_size, TOKENS=TOKENS,
    )  # fmt: skip


def _cpu_body(
    positions: Tensor, block_table: Tensor, seq_lens: Tensor, tokens: int, page_size: int, cap: int
) -> Advanced:
    held, row = positions.long(), cpu.iota(positions.shape[0], positions)
    is_full = held >= cap - 1
    position = torch.where(is_full | (held < -1), 0, held + 1)
    column = cpu.floor_div(position, page_size).clamp(max=block_table.shape[1] - 1)
    block = cpu.page_of(cpu.gather_rows(block_table, row, column, ~is_full & (held >= -1)), 1)
    slot = torch.where(block < 0, -1, block * page_size + position % page_size)
    seq_len = torch.where(is_full, 1, (seq_lens.long().clamp(0, cap) + 1).clamp(max=cap))
    return position, torch.nn.functional.pad(slot, (0, tokens - positions.shape[0]), value=-1), seq_len.int()


@operator("compiled_kv::advance_draft", mutates_args=())
def _advance_draft(
    positions: Tensor, block_table: Tensor, seq_lens: Tensor, tokens: int, page_size: int, cap: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_kernel(positions):
        return _cpu_body(positions, block_table, seq_lens, tokens, page_size, cap)
    rows = positions.shape[0]
    kinds = ((rows, torch.int64), (tokens, torch.int64), (rows, torch.int32))
    new_positions, slot_mapping, new_seq_lens = (positions.new_empty((n,), dtype=dtype) for n, dtype in kinds)
    new = (new_positions, new_seq_lens)
    _launch(positions, block_table, seq_lens, slot_mapping, new, tokens, page_size, cap)
    return new_positions, slot_mapping, new_seq_lens


@operator("compiled_kv::advance_draft_in_place", mutates_args=FIELDS)
def _advance_draft_in_place(
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tokens: int,
    page_size: int,
    cap: int,
) -> None:
    check_distinct_fake(dict(zip(FIELDS, (positions, slot_mapping, seq_lens))), {"block_table": block_table})
    if runs_kernel(positions):
        _launch(positions, block_table, seq_lens, slot_mapping, None, tokens, page_size, cap)
        return
    new_positions, slots, lengths = _cpu_body(positions, block_table, seq_lens, tokens, page_size, cap)
    positions.copy_(new_positions)
    slot_mapping[:tokens].copy_(slots)
    seq_lens.copy_(lengths)


def _check(positions: Tensor, block_table: Tensor, seq_lens: Tensor, page_size: int, cap: int) -> Sizes:
    sizes = Sizes()
    sizes.check("positions", positions, INTS, "B")
    sizes.check("block_table", block_table, INTS, "B", "W")
    sizes.check("seq_lens", seq_lens, INTS, "B")
    check_int("page_size", page_size, 1, INT32_MAX)
    check_int("max_context_len", cap, 1, INT32_MAX)
    return sizes


def advance_draft(
    positions: Tensor, block_table: Tensor, seq_lens: Tensor, *, page_size: int, max_context_len: int,
    num_tokens: int | None = None,
) -> Advanced:  # fmt: skip
    """Positions, slots and lengths one token further.

    Args:
        positions: int [B], the last position of each row; below -1 there is no slot, and the next position is 0.
        block_table: int [B, W], blocks of each row; a position beyond the row takes its last block, a negative block
            gives slot -1.
        seq_lens: int [B], tokens attention reads of each row; a negative one counts as 0.
        page_size: tokens a block.
        max_context_len: a row whose next position would reach it starts over: position 0, length 1, slot -1.
        num_tokens: entries N of the slots, at least B; those from B on hold -1. B if absent.

    Returns:
        (positions int64 [B], slot_mapping int64 [N], seq_lens int32 [B]).

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or range is wrong; the text names it.
    """
    _check(positions, block_table, seq_lens, page_size, max_context_len)
    tokens = positions.shape[0] if num_tokens is None else num_tokens
    check_int("num_tokens", tokens, positions.shape[0])
    return torch.ops.compiled_kv.advance_draft(positions, block_table, seq_lens, tokens, page_size, max_context_len)


def advance_draft_(
    positions: Tensor, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor, *, page_size: int,
    max_context_len: int, num_tokens: int | None = None,
) -> Advanced:  # fmt: skip
    """`advance_draft` in place: `positions` int64 [B] and `seq_lens` int32 [B] move on.

    Args:
        slot_mapping: int64, its first `num_tokens` entries are written, all of them by default; from B on with -1.

    Returns:
        (positions, slot_mapping, seq_lens), the three given.

    Raises:
        TypeError, ValueError: as `advance_draft`; or the three have other dtypes or strides, or overlap.
    """
    out = (positions, slot_mapping, seq_lens)
    tokens = check_in_place(*out, block_table, page_size, max_context_len, num_tokens)
    torch.ops.compiled_kv.advance_draft_in_place(*out, block_table, tokens, page_size, max_context_len)
    return out


def check_in_place(
    positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor, block_table: Tensor, page_size: int,
    max_context_len: int, num_tokens: int | None,
) -> int:  # fmt: skip
    """The checks of `advance_draft_`; the entries of `slot_mapping` that it writes."""
    sizes = _check(positions, block_table, seq_lens, page_size, max_context_len)
    sizes.check_output("positions", positions, INT64, "B")
    sizes.check_output("seq_lens", seq_lens, INT32, "B")
    sizes.check_output("slot_mapping", slot_mapping, INT64, "N")
    tokens = slot_mapping.shape[0] if num_tokens is None else num_tokens
    check_int("num_tokens", tokens, positions.shape[0], slot_mapping.shape[0])
    check_distinct(dict(zip(FIELDS, (positions, slot_mapping, seq_lens))), {"block_table": block_table})
    return tokens
