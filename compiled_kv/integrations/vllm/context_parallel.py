"""Lengths of one context-parallel rank, whose tokens `BlockTables` gives slots."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import check_int
from compiled_kv.lengths import UNBOUNDED


def get_dcp_local_seq_lens(
    seq_lens: Tensor, dcp_size: int, dcp_rank: int | Tensor | None = None, interleave: int = 1
) -> Tensor:
    """Tokens of each request that lie on a rank, where `interleave` at a time are dealt out. Plain torch.

    Args:
        seq_lens: int [...], tokens of each request.
        dcp_rank: the rank, an int or a tensor of one; None for all: int32 [..., dcp_size].

    Returns:
        int32, the shape of seq_lens.

    Raises:
        TypeError, ValueError: a number is out of its range; the text names it.
    """
    check_int("dcp_size", dcp_size, 1, UNBOUNDED)
    check_int("interleave", interleave, 1, UNBOUNDED)
    if dcp_rank is None:
        dcp_rank, seq_lens = torch.arange(dcp_size, device=seq_lens.device), seq_lens[..., None]
    elif not isinstance(dcp_rank, Tensor):
        check_int("dcp_rank", dcp_rank, 0, dcp_size - 1)
    rounds = torch.div(seq_lens, interleave * dcp_size, rounding_mode="floor")
    rest = seq_lens - rounds * interleave * dcp_size - dcp_rank * interleave
    return (rounds * interleave + rest.clamp(0, interleave)).int()
