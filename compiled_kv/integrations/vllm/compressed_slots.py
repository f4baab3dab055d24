"""Slots in caches that hold less than a token each: a request's tail of pooled keys, and one entry for several tokens.

Plain torch, a kernel or two where the step around it is compiled; nothing is read back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import INT64, INTS, Sizes, check_int
from compiled_kv.integrations.vllm.block_tables import NULL_BLOCK_ID, PAD_SLOT_ID
from compiled_kv.integrations.vllm.positions import first_bounds
from compiled_kv.layout import INT32_MAX
from compiled_kv.overlap import check_distinct
from compiled_kv.rows_cpu import floor_div, gather, gather_rows, iota, page_of


def compute_kpool_tail_slot_mapping(
    slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, positions: Tensor, num_actual_tokens: int,
    num_reqs: int, kpool: int, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Slot of each token in its request's own block of `kpool` entries, which it goes round and round in.

    Args:
        slot_mapping: int [T], whose entries from `num_actual_tokens` on are passed on.
        block_table: int [N, W], N >= num_reqs, any strides; a request's block is the first of its row, and the null
            block or a negative one gives `PAD_SLOT_ID`.
        query_start_loc: int [num_reqs + 1] or longer, non-decreasing from 0: tokens of each request. Those behind the
            last bound belong to the last request.
        positions: int [n], n >= num_actual_tokens: position of each token; a negative one gives `PAD_SLOT_ID`.
        num_actual_tokens: tokens that are no padding, at most T.
        num_reqs: requests of the batch; without one no token has a slot.
        kpool: entries of a block.
        out: int64 [T], written in place and returned; it may be `slot_mapping` itself.

    Returns:
        int64 [T], or `out`.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device, range or overlap is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("slot_mapping", slot_mapping, INTS, "T")
    sizes.check("block_table", block_table, INTS, "N", "W")
    check_int("num_reqs", num_reqs, 0, block_table.shape[0])
    bounds = first_bounds(sizes, query_start_loc, num_reqs)
    sizes.check("positions", positions, INTS, "n")
    for tensor in (slot_mapping, positions):
        check_int("num_actual_tokens", num_actual_tokens, 0, tensor.shape[0])
    check_int("kpool", kpool, 1, INT32_MAX)
    if out is not None:
        sizes.check_output("out", out, INT64, "T")
        inputs = {"block_table": block_table, "query_start_loc": bounds, "positions": positions}
        check_distinct({"out": out}, inputs if out is slot_mapping else {**inputs, "slot_mapping": slot_mapping})
    token = iota(slot_mapping.shape[0], slot_mapping)
    is_actual = token < num_actual_tokens
    request = _request_of(bounds, token).clamp(max=num_reqs - 1)
    block = page_of(gather_rows(block_table, request, torch.zeros_like(request), is_actual), 1)
    position = gather(positions, token, is_actual)
    slot = torch.where((block > NULL_BLOCK_ID) & (position >= 0), block * kpool + position % kpool, PAD_SLOT_ID)
    slots = torch.where(is_actual, slot, slot_mapping.long())
    return slots if out is None else out.copy_(slots)


def get_compressed_slot_mapping(
    num_tokens: int, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor,
    block_size: int, compress_ratio: int, dcp_world_size: int = 1, cp_interleave: int = 1,
) -> Tensor:  # fmt: skip
    """Slot of each token that completes a group of `compress_ratio`, in a cache of one entry a group.

    Args:
        num_tokens: entries T of the result.
        slot_mapping: int [N], N >= T; a token without a slot there has none here.
        query_start_loc: int [B + 1] or longer, non-decreasing from 0: new tokens of each request. Those behind the
            last bound have no slot.
        seq_lens: int [B], tokens of each request, the new ones counted.
        block_table: int [B, W], blocks of `block_size` entries; a position beyond the row, or a negative block, gives
            `PAD_SLOT_ID`.
        compress_ratio: tokens an entry.
        dcp_world_size, cp_interleave: context-parallel ranks, and tokens dealt at a time; entries are counted on a
            rank's own tokens.

    Returns:
        int64 [T], `PAD_SLOT_ID` for a token that completes no group.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or range is wrong; the text names it.
    """
    sizes = Sizes()
    sizes.check("slot_mapping", slot_mapping, INTS, "N")
    sizes.check("seq_lens", seq_lens, INTS, "B")
    sizes.check("block_table", block_table, INTS, "B", "W")
    bounds = first_bounds(sizes, query_start_loc, seq_lens.shape[0])
    check_int("num_tokens", num_tokens, 0, slot_mapping.shape[0])
    least = {"block_size": block_size, "compress_ratio": compress_ratio, "dcp_world_size": dcp_world_size}
    for name, value in {**least, "cp_interleave": cp_interleave}.items():
        check_int(name, value, 1, INT32_MAX)
    token = iota(num_tokens, slot_mapping)
    request = _request_of(bounds, token)
    owned = request < seq_lens.shape[0]
    position = gather(seq_lens, request, owned) - gather(bounds, request + 1, owned) + token
    completes = owned & (position >= 0) & ((position + 1) % compress_ratio == 0) & (slot_mapping[:num_tokens] >= 0)
    local = floor_div(position, cp_interleave * dcp_world_size) * cp_interleave + position % cp_interleave
    entry = floor_div(local, compress_ratio)
    block = page_of(gather_rows(block_table, request, floor_div(entry, block_size), completes), 1)
    return torch.where(block < 0, PAD_SLOT_ID, block * block_size + entry % block_size)


def _request_of(bounds: Tensor, token: Tensor) -> Tensor:
    """Request whose interval of `bounds` [B + 1] holds each token, B behind the last one; int64."""
    # In the dtype of the bounds, which a compiled search then reads where they lie.
    return torch.searchsorted(bounds[1:].contiguous(), token.to(bounds.dtype), right=True)
