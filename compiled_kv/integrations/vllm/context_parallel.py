"""Lengths of one context-parallel rank, whose tokens `BlockTables` gives slots."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import INTS, Sizes, check_int
from compiled_kv.layout import INT32_MAX


def get_dcp_local_seq_lens(
    seq_lens: Tensor, dcp_size: int, dcp_rank: int | Tensor | None = None, interleave: int = 1
) -> Tensor:
    """Tokens of each request that lie on a rank, where `interleave` at a time are dealt out. Plain torch.

    Args:
        seq_lens: int [...], tokens of each request.
        dcp_size, interleave: ranks, and tokens dealt at a time.
        dcp_rank: the rank, an int or an int tensor, 0-d or [1]; None for all: int32 [..., dcp_size].

    Returns:
        int32, the shape of seq_lens.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or range is wrong; the text names it.
    """
    sizes = Sizes()
    dims = seq_lens.ndim if isinstance(seq_lens, Tensor) else 0
    sizes.check("seq_lens", seq_lens, INTS, *(f"D{dim}" for dim in range(dims)))
    check_int("dcp_size", dcp_size, 1, INT32_MAX)
    check_int("interleave", interleave, 1, INT32_MAX)
    lengths = seq_lens.long()  # the products below may pass int32
    rank: int | Tensor
    if dcp_rank is None:
        rank, lengths = torch.arange(dcp_size, device=lengths.device), lengths[..., None]
    elif isinstance(dcp_rank, Tensor):
        sizes.check_scalar("dcp_rank", dcp_rank)
        rank = dcp_rank.reshape(()).long()
    else:
        check_int("dcp_rank", dcp_rank, 0, dcp_size - 1)
        rank = dcp_rank
    rounds = torch.div(lengths, interleave * dcp_size, rounding_mode="floor")
    rest = lengths - rounds * interleave * dcp_size - rank * interleave
    return (rounds * interleave + rest.clamp(0, interleave)).int()
