"""What the bodies of `write_metadata` are given: buffers, inputs, settings."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class EngineMetadata(NamedTuple):
    """Buffers that one call fills; None for what the step does not read. P columns, T tokens.

    Those of a captured batch may hold more rows than the B that a call brings: the first are used.
    """

    cache_seqlens: Tensor | None = None
    """int32 [B], tokens attention reads of each row."""
    cu_seqlens_q: Tensor | None = None
    """int32 [B + 1], prefix sums of queries."""
    cu_seqlens_k: Tensor | None = None
    """int32 [B + 1], prefix sums of the lengths."""
    page_table: Tensor | None = None
    """int32 [B, P], page ids; any strides, as long as no two entries share memory."""
    swa_page_table: Tensor | None = None
    """int32 [B, P], the same in the sliding-window pool."""
    swa_slot_mapping: Tensor | None = None
    """int64 [T], the given slots in the sliding-window pool, 0 behind them."""


class Inputs(NamedTuple):
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    q_len: Tensor | None
    slots: Tensor | None
    full_to_swa: Tensor | None
    page_map: Tensor | None
    swa_page_map: Tensor | None


class Settings(NamedTuple):
    width: int
    page_size: int
    cap: int
    delta: int
    q_len: int
    clear: bool
