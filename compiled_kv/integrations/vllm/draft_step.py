"""The draft step in place, as vLLM's draft proposer takes it between two calls of its model."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kv.checks import INT64, Sizes
from compiled_kv.integrations.layouts import worded
from compiled_kv.overlap import check_distinct
from compiled_kv.peers.draft_steps import advance_draft_, check_in_place


@worded(
    positions="out_clamped_positions", block_table="block_table_tensor", slot_mapping="out_slot_mapping",
    page_size="block_size", max_context_len="max_model_len", num_tokens="input_batch_size",
)  # fmt: skip
def eagle_step_update_slot_mapping_and_metadata(
    positions_1d: Tensor, block_table_tensor: Tensor, seq_lens: Tensor, block_size: int, max_model_len: int,
    out_clamped_positions: Tensor, out_slot_mapping: Tensor, input_batch_size: int | None = None,
) -> None:  # fmt: skip
    """Move every request one draft token on: position + 1, its slot, length + 1.

    A request whose next position would reach `max_model_len` gets position 0, slot -1 and length 1.

    Args:
        positions_1d: int64 [B]. block_table_tensor: int [B, W].
        seq_lens: int32 [B], updated.
        out_clamped_positions: int64 [B], `positions_1d` itself or another.
        out_slot_mapping: int64; the first `input_batch_size` entries are written, from B on with -1. All B of them if
            that is absent.

    Raises:
        TypeError, ValueError: as `compiled_kv.peers.draft_steps.advance_draft_`; or the positions lie partly in one
            another.
    """
    sizes = Sizes()
    sizes.check("positions_1d", positions_1d, INT64, "B")
    sizes.check("out_clamped_positions", out_clamped_positions, INT64, "B")
    tokens = positions_1d.shape[0] if input_batch_size is None else input_batch_size
    if out_clamped_positions is not positions_1d:
        _check_apart(out_clamped_positions, positions_1d)
        out = (out_clamped_positions, out_slot_mapping, seq_lens)
        check_in_place(*out, block_table_tensor, block_size, max_model_len, tokens)
        out_clamped_positions.copy_(positions_1d)
    advance_draft_(
        out_clamped_positions, block_table_tensor, seq_lens, out_slot_mapping, page_size=block_size,
        max_context_len=max_model_len, num_tokens=tokens,
    )  # fmt: skip


def _check_apart(out: Tensor, positions: Tensor) -> None:
    """Refuse positions that begin elsewhere in the same memory; another view of the same ones will do."""
    if not torch.compiler.is_compiling() and out.storage_offset() != positions.storage_offset():
        check_distinct({"out_clamped_positions": out}, {"positions_1d": positions})
